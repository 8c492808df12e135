/* SPDX-License-Identifier: MIT
 *
 * group_norm.c - group norm with SiLU of two samples' feature maps. After an install:
 *   cc group_norm.c -o group_norm $(pkg-config --cflags --libs normfuse) */
#include <normfuse.h>
#include <stdio.h>

int main(void)
{
    static float x[2 * 64 * 56 * 56], y[2 * 64 * 56 * 56];
    for (int i = 0; i < 2 * 64 * 56 * 56; i++)
        x[i] = (float)(i % 17);

    const int64_t sizes[] = {2, 64, 56, 56}; /* N, C, H, W */
    normfuse_axes x_axes, y_axes;
    const normfuse_tensor in = normfuse_tensor_contiguous(x, NORMFUSE_F32, 4, sizes, &x_axes);
    const normfuse_tensor out = normfuse_tensor_contiguous(y, NORMFUSE_F32, 4, sizes, &y_axes);

    const normfuse_group_norm_options options = {
        .struct_bytes = sizeof options, .groups = 8, .eps = 1e-5, .activation = NORMFUSE_SILU};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &in, .y = &out};
    if (normfuse_group_norm_forward(&options, &tensors, NULL) != NORMFUSE_OK) {
        fprintf(stderr, "%s\n", normfuse_last_error());
        return 1;
    }
    printf("x = %g, y = %.4f\n", (double)x[0], (double)y[0]);
    return 0;
}
