/* SPDX-License-Identifier: MIT
 *
 * random.c - see random.h. Integers of 64 bits only: no libc generator, and no floating point, whose last bit may
 * differ. */
#include "random.h"

#include <string.h>

/* SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014). */
struct generator {
    uint64_t state;
};

static uint64_t mix(uint64_t h)
{
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9u;
    h = (h ^ h >> 27) * 0x94D049BB133111EBu;
    return h ^ h >> 31;
}

static uint64_t next(struct generator *generator)
{
    return mix(generator->state += 0x9E3779B97F4A7C15u);
}

/* 0 to count - 1; count is below 2^32. */
static int64_t below(struct generator *generator, int64_t count)
{
    return (int64_t)((next(generator) >> 32) * (uint64_t)count >> 32);
}

static bool percent(struct generator *generator, int64_t share)
{
    return below(generator, 100) < share;
}

/* ---- sizes ------------------------------------------------------------------------------------------------------ */

/* Logarithms to the base 2 are in units of 2^-16. */
enum { LOG_ONE = 1 << 16 };

/* 2^log within 0.3 %, rising with log: between powers of two a parabola. */
static int64_t power_of_two(int64_t log)
{
    int64_t fraction = log % LOG_ONE;
    int64_t mantissa = LOG_ONE + (fraction * (43003 + (fraction * 22533 >> 16)) >> 16);
    return mantissa << (log >> 16) >> 16;
}

/* The smallest log with power_of_two(log) >= value. */
static int64_t log_of(int64_t value)
{
    int64_t low = 0, high = (int64_t)46 * LOG_ONE;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (power_of_two(middle) < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Log-uniform between two numbers above 0. */
static int64_t between(struct generator *generator, int64_t least, int64_t most)
{
    int64_t first = log_of(least), last = log_of(most);
    int64_t value = power_of_two(first + below(generator, last - first + 1));
    return value < least ? least : value > most ? most : value;
}

static int64_t square_root(int64_t value)
{
    int64_t root = power_of_two(log_of(value) / 2);
    while (root * root > value)
        root--;
    while ((root + 1) * (root + 1) <= value)
        root++;
    return root;
}

static int64_t draw_channels(struct generator *generator)
{
    switch (below(generator, 4)) {
    case 0: return INT64_C(1) << below(generator, 14);
    case 1: return INT64_C(3) << below(generator, 12);
    case 2: return 32 * (1 + below(generator, 64));
    default: return 2 * below(generator, 512) + 1;
    }
}

/* Spatial axes that together have about so many positions, none more than four times as long as another's equal share;
 * in half of the draws multiples of a small number, as those of networks are. */
static void draw_axes(struct generator *generator, int64_t positions, int32_t count, int64_t *sizes)
{
    static const int64_t multiples[] = { 1, 1, 1, 1, 2, 4, 7, 8 };
    int64_t multiple = multiples[below(generator, 8)];
    for (int32_t i = 0; i < count; i++) {
        int64_t left = count - i, share = positions;
        if (left == 2)
            share = square_root(positions);
        else if (left == 3)
            share = power_of_two(log_of(positions) / 3);
        if (left > 1)
            share = between(generator, (share + 1) / 2, 2 * share);
        int64_t size = share < multiple ? share : (share + multiple / 2) / multiple * multiple;
        sizes[i] = size > 0 ? size : 1;
        positions = positions / sizes[i] > 0 ? positions / sizes[i] : 1;
    }
}

/* One of the divisors of the channels that leave a group RANDOM_VALUES; 0: there is none. */
static int64_t draw_groups(struct generator *generator, int64_t channels, int64_t positions)
{
    int64_t count = 0, groups = 0;
    for (int pass = 0; pass < 2; pass++) {
        int64_t wanted = pass ? below(generator, count) : -1, seen = 0;
        for (int64_t divisor = 1; divisor <= channels; divisor++)
            if (channels % divisor == 0 && channels / divisor * positions >= RANDOM_VALUES && seen++ == wanted)
                groups = divisor;
        count = seen;
        if (!count)
            return 0;
    }
    return groups;
}

/* Sizes and groups for an operator and `elements`, met within an eighth; false: these draws do not go together. */
static bool draw_shape(struct generator *generator, struct problem_line *line, int64_t elements)
{
    enum { SAMPLES_MOST = 256 };
    int64_t channels = draw_channels(generator), rest = elements / channels, positions = 1;
    if (rest < 1)
        return false;
    line->sizes[1] = channels;
    if (line->ndim > 2) {
        int64_t samples = between(generator, 1, rest < SAMPLES_MOST ? rest : SAMPLES_MOST);
        draw_axes(generator, rest / samples, line->ndim - 2, line->sizes + 2);
        for (int32_t i = 2; i < line->ndim; i++)
            positions *= line->sizes[i];
    }
    int64_t row = channels * positions, samples = (elements + row / 2) / row;
    line->sizes[0] = samples;
    int64_t error = samples * row - elements;
    if (samples < 1 || error > elements / 8 || error < -elements / 8 || samples * positions < RANDOM_VALUES)
        return false;
    bool by_sample = line->op == INSTANCE_NORM || line->per_sample || line->scale_shift;
    if (by_sample && positions < RANDOM_VALUES)
        return false;
    if (line->op == INSTANCE_NORM)
        line->groups = channels;
    if (line->op == GROUP_NORM)
        line->groups = draw_groups(generator, channels, positions);
    return line->op != GROUP_NORM || line->groups > 0;
}

/* ---- the whole -------------------------------------------------------------------------------------------------- */

struct problem_line random_problem(uint64_t seed, int64_t index, int64_t least_bytes, int64_t most_bytes)
{
    static const normfuse_type types[] = { NORMFUSE_F32, NORMFUSE_BF16, NORMFUSE_F16 };
    static const int32_t others[] = { NORMFUSE_LEAKY_RELU, NORMFUSE_GELU, NORMFUSE_GELU_TANH, NORMFUSE_HARDSWISH,
                                      NORMFUSE_ELU,        NORMFUSE_MISH };
    struct generator generator = { mix(mix(seed + 0x9E3779B97F4A7C15u) + (uint64_t)index) };
    int64_t share = below(&generator, 100);
    struct problem_line line = problem_line_default(share < 45   ? GROUP_NORM
                                                    : share < 73 ? BATCH_NORM
                                                    : share < 88 ? INSTANCE_NORM
                                                                 : AFFINE);
    line.evaluate = line.op == BATCH_NORM && share >= 65;
    line.backward = index % 2 != 0;
    line.channels_last = percent(&generator, 50);
    line.type = percent(&generator, 4) ? NORMFUSE_F64 : types[below(&generator, 3)];
    line.weight_type = line.type;
    if ((line.type == NORMFUSE_BF16 || line.type == NORMFUSE_F16) && percent(&generator, 50))
        line.weight_type = NORMFUSE_F32;
    int64_t activation = below(&generator, 4);
    line.activation = activation == 0   ? NORMFUSE_IDENTITY
                      : activation == 1 ? NORMFUSE_RELU
                      : activation == 2 ? NORMFUSE_SILU
                                        : others[below(&generator, 6)];
    line.per_sample = line.op == AFFINE && percent(&generator, 50);
    line.pre_add = percent(&generator, 15);
    line.write_u = line.pre_add && percent(&generator, 50);
    line.post_add = percent(&generator, 20);
    line.scale_shift = line.op == GROUP_NORM && percent(&generator, 10);
    /* Statistics of a sample's channel need positions. */
    bool by_sample = line.op == INSTANCE_NORM || line.per_sample || line.scale_shift;
    int64_t axes = below(&generator, by_sample ? 90 : 100);
    line.ndim = axes < 50 ? 4 : axes < 70 ? 3 : axes < 90 ? 5 : 2;
    int64_t item = line.type == NORMFUSE_F64 ? 8 : line.type == NORMFUSE_F32 ? 4 : 2;
    int64_t elements = between(&generator, least_bytes, most_bytes) / item;
    do
        memset(line.sizes, 0, sizeof line.sizes);
    while (!draw_shape(&generator, &line, elements));
    if (line.ndim == 2)
        line.channels_last = false; /* the same memory */
    return line;
}

void random_prelu(struct problem_line *line, uint64_t seed, int64_t index)
{
    struct generator generator = { mix(mix(seed + 0xA24BAED4963EE407u) + (uint64_t)index) };
    if (!percent(&generator, 5))
        return;
    line->activation = NORMFUSE_PRELU;
    line->one_slope = percent(&generator, 50);
}

void random_channel_norm(struct problem_line *line, uint64_t seed, int64_t index)
{
    struct generator generator = { mix(mix(seed + 0xE7037ED1A0B428DBu) + (uint64_t)index) };
    if (!percent(&generator, 10) || line->sizes[1] < RANDOM_VALUES)
        return;
    line->op = CHANNEL_NORM;
    line->evaluate = line->per_sample = false;
    line->groups = percent(&generator, 75) ? 1 : draw_groups(&generator, line->sizes[1], 1);
    line->statistics = percent(&generator, 50) ? NORMFUSE_MEAN_SQUARE : NORMFUSE_MEAN_AND_VARIANCE;
    line->eps_kind = percent(&generator, 30) ? NORMFUSE_EPS_OF_NORM : NORMFUSE_EPS_ADDED;
}

void random_pre_bias(struct problem_line *line, uint64_t seed, int64_t index)
{
    struct generator generator = { mix(mix(seed + 0xD1B54A32D192ED03u) + (uint64_t)index) };
    int64_t positions = 1;
    for (int32_t i = 2; i < line->ndim; i++)
        positions *= line->sizes[i];
    if (!percent(&generator, 15))
        return;
    line->sample_bias = percent(&generator, 50) && positions >= RANDOM_VALUES;
    line->pre_bias = !line->sample_bias;
    line->write_u = line->write_u || percent(&generator, 25);
}
