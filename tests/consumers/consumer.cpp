// SPDX-License-Identifier: MIT
//
// consumer.cpp - a user of the installed normfuse.hpp. Prints the version.
#include <normfuse.hpp>

#include <cstdio>
#include <cstring>

int main()
{
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 9}, y[8];
    normfuse::tensors tensors;
    tensors.x = normfuse::contiguous(x, {1, 2, 2, 2});
    tensors.y = normfuse::contiguous(y, {1, 2, 2, 2});
    normfuse::group_norm_options options;
    options.groups = 1;
    normfuse::group_norm_forward(options, tensors);
    float sum = 0;
    for (const float value : y)
        sum += value;
    if (!(sum > -1e-5f && sum < 1e-5f)) { // eight values below 2, each within a few 1e-7
        std::fprintf(stderr, "the normalized values add up to %g\n", static_cast<double>(sum));
        return 1;
    }
    try {
        options.groups = 3;
        normfuse::group_norm_forward(options, tensors);
        std::fprintf(stderr, "3 groups of 2 channels were taken\n");
        return 1;
    } catch (const normfuse::error &refused) {
        if (refused.status() != NORMFUSE_BAD_SHAPE && refused.status() != NORMFUSE_BAD_ARGUMENT) {
            std::fprintf(stderr, "%s\n", refused.what());
            return 1;
        }
    }
    std::printf("normfuse %s\n", normfuse::version());
    return 0;
}
