/* SPDX-License-Identifier: MIT
 *
 * plain_loop.c - group norm with SiLU as one would write it in an afternoon, to compare with: f32, NCHW, one thread,
 * every sum in its own loop. `plain_loop N C H W GROUPS SAMPLES` prints the median microseconds of a forward and of a
 * backward, cold: the calls take turns over sets of tensors that are together four times the last-level cache. */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

struct sizes {
    size_t n, c, s, groups;
};

static void forward(const struct sizes *z, const float *x, const float *weight, const float *bias, float *y,
                    float *mean, float *rstd)
{
    const size_t channels = z->c / z->groups, values = channels * z->s;
    for (size_t g = 0; g < z->n * z->groups; g++) {
        const float *group = x + g * values;
        float sum = 0, square = 0;
        for (size_t i = 0; i < values; i++)
            sum += group[i];
        mean[g] = sum / (float)values;
        for (size_t i = 0; i < values; i++)
            square += (group[i] - mean[g]) * (group[i] - mean[g]);
        rstd[g] = 1 / sqrtf(square / (float)values + 1e-5f);
        for (size_t i = 0; i < values; i++) {
            const size_t c = g % z->groups * channels + i / z->s;
            const float v = (group[i] - mean[g]) * rstd[g] * weight[c] + bias[c];
            y[g * values + i] = v / (1 + expf(-v));
        }
    }
}

static void backward(const struct sizes *z, const float *x, const float *dy, const float *weight, const float *bias,
                     const float *mean, const float *rstd, float *dx, float *dweight, float *dbias)
{
    const size_t channels = z->c / z->groups, values = channels * z->s;
    for (size_t c = 0; c < z->c; c++)
        dweight[c] = dbias[c] = 0;
    for (size_t g = 0; g < z->n * z->groups; g++) {
        float sum = 0, product = 0;
        for (size_t i = 0; i < values; i++) {
            const size_t c = g % z->groups * channels + i / z->s;
            const float hat = (x[g * values + i] - mean[g]) * rstd[g], v = hat * weight[c] + bias[c];
            const float gate = 1 / (1 + expf(-v)), d = dy[g * values + i] * (gate + v * gate * (1 - gate));
            dweight[c] += d * hat;
            dbias[c] += d;
            sum += d * weight[c];
            product += d * weight[c] * hat;
        }
        for (size_t i = 0; i < values; i++) {
            const size_t c = g % z->groups * channels + i / z->s;
            const float hat = (x[g * values + i] - mean[g]) * rstd[g], v = hat * weight[c] + bias[c];
            const float gate = 1 / (1 + expf(-v)), d = dy[g * values + i] * (gate + v * gate * (1 - gate));
            dx[g * values + i] = rstd[g] * (d * weight[c] - (sum + hat * product) / (float)values);
        }
    }
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int ascending(const void *a, const void *b)
{
    const double p = *(const double *)a, q = *(const double *)b;
    return (p > q) - (p < q);
}

static float *filled(size_t values, float offset)
{
    float *v = malloc(values * sizeof *v);
    if (!v) {
        fprintf(stderr, "plain_loop: out of memory\n");
        exit(1);
    }
    unsigned state = 1;
    for (size_t i = 0; i < values; i++) {
        state = state * 1664525u + 1013904223u;
        v[i] = offset + (float)(state >> 8) * 0x1p-23f - 1;
    }
    return v;
}

int main(int count, char **words)
{
    if (count != 7) {
        fprintf(stderr, "usage: plain_loop N C H W GROUPS SAMPLES\n");
        return 2;
    }
    size_t given[6];
    for (int i = 0; i < 6; i++)
        given[i] = strtoul(words[i + 1], NULL, 10);
    const struct sizes z = {.n = given[0], .c = given[1], .s = given[2] * given[3], .groups = given[4]};
    const size_t samples = given[5], values = z.n * z.c * z.s;
    if (values == 0 || samples == 0 || z.groups == 0 || z.c % z.groups != 0) {
        fprintf(stderr, "plain_loop: sizes and samples are above 0, and groups divides C\n");
        return 2;
    }

#ifdef _SC_LEVEL3_CACHE_SIZE /* musl has none */
    const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
#else
    const long cache = 0;
#endif
    const size_t cold = 4 * (cache > 0 ? (size_t)cache : (size_t)32 << 20);
    const size_t sets = cold / (3 * values * sizeof(float)) + 2;
    float **x = malloc(sets * sizeof *x), **dy = malloc(sets * sizeof *dy), **y = malloc(sets * sizeof *y);
    double *forward_us = malloc(samples * sizeof *forward_us), *backward_us = malloc(samples * sizeof *backward_us);
    if (!x || !dy || !y || !forward_us || !backward_us)
        return 1;
    for (size_t k = 0; k < sets; k++) {
        x[k] = filled(values, 0);
        dy[k] = filled(values, 0);
        y[k] = filled(values, 0);
    }
    float *weight = filled(z.c, 2), *bias = filled(z.c, 0), *mean = filled(z.n * z.groups, 0);
    float *rstd = filled(z.n * z.groups, 0), *dweight = filled(z.c, 0), *dbias = filled(z.c, 0);

    for (size_t i = 0; i < samples; i++) {
        const size_t k = i % sets;
        double start = now_us();
        forward(&z, x[k], weight, bias, y[k], mean, rstd);
        forward_us[i] = now_us() - start;
    }
    for (size_t i = 0; i < samples; i++) {
        const size_t k = i % sets;
        double start = now_us();
        backward(&z, x[k], dy[k], weight, bias, mean, rstd, y[k], dweight, dbias);
        backward_us[i] = now_us() - start;
    }
    qsort(forward_us, samples, sizeof *forward_us, ascending);
    qsort(backward_us, samples, sizeof *backward_us, ascending);
    printf("%.1f %.1f\n", forward_us[samples / 2], backward_us[samples / 2]);
    return 0;
}
