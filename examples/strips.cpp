// SPDX-License-Identifier: MIT
//
// strips.cpp - group norm of an image that arrives in strips of rows, with normfuse.hpp: statistics of each strip,
// merged in order, then each strip normalized with them. Prints the largest difference to the image in one call.
//
//     c++ -std=c++17 strips.cpp -o strips $(pkg-config --cflags --libs normfuse)
#include <normfuse.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

int main()
{
    constexpr std::int64_t C = 16, H = 64, W = 48, GROUPS = 4, STRIPS = 4, ROWS = H / STRIPS;
    std::vector<float> image(C * H * W), whole(C * H * W), weight(C), bias(C);
    for (std::size_t i = 0; i < image.size(); i++)
        image[i] = 100.0f + std::sin(0.01f * static_cast<float>(i));
    for (std::size_t c = 0; c < C; c++) {
        weight[c] = 1.0f + 0.05f * static_cast<float>(c);
        bias[c] = -0.1f * static_cast<float>(c);
    }
    normfuse::group_norm_options options;
    options.groups = GROUPS;
    options.activation = normfuse::activation::silu;

    try {
        normfuse::tensors all;
        all.weight = normfuse::contiguous(weight.data(), {C});
        all.bias = normfuse::contiguous(bias.data(), {C});
        all.x = normfuse::contiguous(image.data(), {1, C, H, W});
        all.y = normfuse::contiguous(whole.data(), {1, C, H, W});
        normfuse::group_norm_forward(options, all);

        // A strip: its rows of every channel, as another process or a pipeline would hold it.
        std::vector<std::vector<float>> strips(STRIPS, std::vector<float>(C * ROWS * W));
        std::vector<double> stats(STRIPS * GROUPS * 3), merged(GROUPS * 3);
        for (std::size_t s = 0; s < STRIPS; s++) {
            for (std::size_t c = 0; c < C; c++)
                for (std::size_t i = 0; i < ROWS * W; i++)
                    strips[s][c * ROWS * W + i] = image[(c * H + s * ROWS) * W + i];
            normfuse::tensors strip;
            strip.x = normfuse::contiguous(strips[s].data(), {1, C, ROWS, W});
            strip.stats = normfuse::contiguous(&stats[s * GROUPS * 3], {1, GROUPS, 3});
            normfuse::group_norm_stats(options, strip);
        }
        normfuse::stats_merge(normfuse::contiguous(stats.data(), {STRIPS, 1, GROUPS, 3}),
                              normfuse::contiguous(merged.data(), {1, GROUPS, 3}));

        float worst = 0;
        for (std::size_t s = 0; s < STRIPS; s++) {
            normfuse::tensors strip = all; // weight and bias
            strip.x = strip.y = normfuse::contiguous(strips[s].data(), {1, C, ROWS, W});
            strip.stats = normfuse::contiguous(merged.data(), {1, GROUPS, 3});
            normfuse::group_norm_apply(options, strip);
            for (std::size_t c = 0; c < C; c++)
                for (std::size_t i = 0; i < ROWS * W; i++)
                    worst = std::fmax(worst,
                                      std::fabs(strips[s][c * ROWS * W + i] - whole[(c * H + s * ROWS) * W + i]));
        }
        std::printf("%d strips of %d rows: largest difference to the whole image %.2g\n", static_cast<int>(STRIPS),
                    static_cast<int>(ROWS), static_cast<double>(worst));
        return worst <= 1e-6f ? 0 : 1; // four units in the last place of values up to 4
    } catch (const normfuse::error &refused) {
        std::fprintf(stderr, "status %d: %s\n", refused.status(), refused.what());
        return 1;
    }
}
