/* SPDX-License-Identifier: MIT
 *
 * consumer.c - a user of the installed library; valid C11 and C++17. Prints the version. */
#include <normfuse.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 9}, y[8];
    const int64_t sizes[4] = {1, 2, 2, 2};
    normfuse_axes axes_x, axes_y;
    const normfuse_tensor in = normfuse_tensor_contiguous(x, NORMFUSE_F32, 4, sizes, &axes_x);
    const normfuse_tensor out = normfuse_tensor_contiguous(y, NORMFUSE_F32, 4, sizes, &axes_y);
    normfuse_tensors tensors;
    normfuse_group_norm_options options;
    memset(&tensors, 0, sizeof tensors);
    memset(&options, 0, sizeof options);
    tensors.struct_bytes = sizeof tensors;
    tensors.x = &in;
    tensors.y = &out;
    options.struct_bytes = sizeof options;
    options.groups = 1;
    options.eps = 1e-5;
    if (normfuse_group_norm_forward(&options, &tensors, NULL) != NORMFUSE_OK) {
        fprintf(stderr, "%s\n", normfuse_last_error());
        return 1;
    }
    float sum = 0;
    for (int i = 0; i < 8; i++)
        sum += y[i];
    if (!(sum > -1e-5f && sum < 1e-5f)) { /* eight values below 2, each within a few 1e-7 */
        fprintf(stderr, "the normalized values add up to %g\n", (double)sum);
        return 1;
    }
    printf("normfuse %s\n", normfuse_version());
    return 0;
}
