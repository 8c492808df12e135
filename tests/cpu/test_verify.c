/* SPDX-License-Identifier: MIT
 *
 * test_verify.c - that cli/verify.c, of which `normfuse check` and test_operators are made, finds what is wrong. The
 * linker puts the functions below in place of channel affine's entry points; they call the library and spoil what it
 * did. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cli/random.h"
#include "cli/verify.h"
#include "harness.h"

enum plant {
    NOTHING,
    LAST_BIT_TWICE,  /* of one value, in the second run */
    ONE_VALUE,       /* by an eighth, of one element */
    ONE_UNWRITTEN,   /* one element is left as it was */
    BEHIND,          /* a byte behind the output */
    BEFORE,          /* a byte before it */
    INPUT,           /* one element of x, in the second run */
    GRADIENT,        /* dweight of the last channel, by an eighth */
    NO_ADDITION,     /* post_add is left out of a forward */
    PLANTS
};

static enum plant plant;
static int calls;

static double load(const normfuse_tensor *tensor, int64_t i)
{
    double value = 0;
    const char *at = (const char *)tensor->data + (size_t)i * tensor->dtype.bits / 8;
    if (tensor->dtype.bits == 64)
        memcpy(&value, at, sizeof value);
    else {
        float single;
        memcpy(&single, at, sizeof single);
        value = (double)single;
    }
    return value;
}

static void store(const normfuse_tensor *tensor, int64_t i, double value)
{
    char *at = (char *)tensor->data + (size_t)i * tensor->dtype.bits / 8;
    float single = (float)value;
    if (tensor->dtype.bits == 64)
        memcpy(at, &value, sizeof value);
    else
        memcpy(at, &single, sizeof single);
}

static int64_t elements(const normfuse_tensor *tensor)
{
    int64_t count = 1;
    for (int32_t i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

/* Every tensor is dense, f32 or f64. */
static void spoil(const normfuse_tensors *tensors, const normfuse_tensor *output)
{
    int64_t count = elements(output), middle = count / 2;
    size_t bytes = output->dtype.bits / 8;
    char *data = output->data;
    calls++;
    switch (plant) {
    case LAST_BIT_TWICE: data[(size_t)middle * bytes] ^= (char)(calls == 2); break;
    case ONE_VALUE: store(output, middle, load(output, middle) * 1.125 + 0.125); break;
    case ONE_UNWRITTEN: memset(data + (size_t)middle * bytes, 0xFF, bytes); break;
    case BEHIND: data[(size_t)count * bytes] = 0; break;
    case BEFORE: data[-1] = 0; break;
    case INPUT: ((char *)tensors->x->data)[(size_t)middle * bytes] ^= (char)(calls == 2); break;
    case GRADIENT:
        if (tensors->dweight)
            store(tensors->dweight, elements(tensors->dweight) - 1,
                  load(tensors->dweight, elements(tensors->dweight) - 1) * 1.125 + 0.125);
        break;
    default: break;
    }
}

normfuse_status __real_normfuse_affine_forward(const normfuse_affine_options *, const normfuse_tensors *,
                                               const normfuse_exec *);
normfuse_status __real_normfuse_affine_backward(const normfuse_affine_options *, const normfuse_tensors *,
                                                const normfuse_exec *);
normfuse_status __wrap_normfuse_affine_forward(const normfuse_affine_options *, const normfuse_tensors *,
                                               const normfuse_exec *);
normfuse_status __wrap_normfuse_affine_backward(const normfuse_affine_options *, const normfuse_tensors *,
                                                const normfuse_exec *);

normfuse_status __wrap_normfuse_affine_forward(const normfuse_affine_options *options, const normfuse_tensors *tensors,
                                               const normfuse_exec *exec)
{
    normfuse_tensors given = *tensors;
    if (plant == NO_ADDITION)
        given.post_add = NULL;
    normfuse_status status = __real_normfuse_affine_forward(options, &given, exec);
    spoil(tensors, tensors->y);
    return status;
}

normfuse_status __wrap_normfuse_affine_backward(const normfuse_affine_options *options, const normfuse_tensors *tensors,
                                                const normfuse_exec *exec)
{
    normfuse_status status = __real_normfuse_affine_backward(options, tensors, exec);
    spoil(tensors, tensors->dx);
    return status;
}

int main(void)
{
    enum { WANTED = 12 };
    static const char *const messages[PLANTS] = {
        [NOTHING] = "",          [LAST_BIT_TWICE] = "other bits",   [ONE_VALUE] = "budget used",
        [ONE_UNWRITTEN] = "nan", [BEHIND] = "memory",               [BEFORE] = "memory",
        [INPUT] = "x: memory",   [GRADIENT] = "dweight",            [NO_ADDITION] = "budget used",
    };
    struct verify_options options = {.seed = 3, .twice = true};
    int tried[PLANTS] = {0};
    for (int64_t i = 0, found = 0; found < WANTED || !tried[NO_ADDITION]; i++) {
        struct problem_line line = random_problem(5, i, RANDOM_LEAST_BYTES, 4 * RANDOM_LEAST_BYTES);
        if (line.op != AFFINE || (line.type != NORMFUSE_F32 && line.type != NORMFUSE_F64))
            continue;
        found++;
        for (plant = NOTHING; plant < PLANTS; plant++) {
            char name[PROBLEM_NAME_BYTES];
            struct verify_result result;
            if ((plant == GRADIENT && !line.backward) || (plant == NO_ADDITION && (!line.post_add || line.backward)))
                continue;
            tried[plant]++;
            calls = 0;
            problem_line_name(&line, name, sizeof name);
            verify_problem(&line, &options, &result);
            CHECK(result.outcome == (plant == NOTHING ? VERIFY_PASSED : VERIFY_FAILED) &&
                      strstr(result.message, messages[plant]) && calls >= 1,
                  "%s, planted bug %d: outcome %d, %s", name, (int)plant, (int)result.outcome, result.message);
        }
    }
    for (int each = 0; each < PLANTS; each++)
        CHECK(tried[each] > 0, "planted bug %d was never tried", each);
    return harness_close();
}
