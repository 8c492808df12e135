/* SPDX-License-Identifier: MIT
 *
 * fuzz_arguments.c - a libFuzzer target for the argument checks: any options and tensors, mostly near legal ones.
 * Behind each tensor is memory of exactly the bytes that its sizes and strides name, or a place in memory shared by
 * several, so that AddressSanitizer sees whatever a call that is accepted touches beyond them. A refused call must have
 * written nothing, and no call may write to an input that shares no memory with an output. */
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "normfuse.h"
#include "problem.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* In the order of normfuse_tensors. */
enum {
    X,
    PRE_ADD,
    POST_ADD,
    WEIGHT,
    BIAS,
    SCALE,
    SHIFT,
    Y,
    U,
    MEAN,
    RSTD,
    RUNNING_MEAN,
    RUNNING_VAR,
    DY,
    DU,
    DX,
    DWEIGHT,
    DBIAS,
    DSCALE,
    DSHIFT,
    DPOST_ADD,
    STATS,
    SUMS,
    SLOTS
};
enum { GROUP, BATCH, AFFINE };
enum { SHARED_BYTES = 1 << 14, MOST_BYTES = 1 << 16 };

static const uint8_t *input;
static size_t input_left;

/* 0 to below; 0 when the input is used up, which is the legal choice everywhere. */
static unsigned take(unsigned below)
{
    if (input_left == 0)
        return 0;
    input_left--;
    return *input++ % below;
}

static bool rarely(void)
{
    return take(64) == 63;
}

static int64_t any_integer(void)
{
    static const int64_t edges[] = {0, -1, 1, INT64_MAX, INT64_MIN, INT64_C(1) << 31, INT64_C(1) << 61, 7};
    return (int64_t)((uint64_t)edges[take(8)] + take(3) - 1);
}

static double any_double(void)
{
    static const double edges[] = {1e-5, 0.0, -1.0, 1e300, 0.1};
    const unsigned choice = take(7);
    return choice < 5 ? edges[choice] : choice == 5 ? (double)INFINITY : (double)NAN;
}

struct memory {
    unsigned char *bytes, *copy; /* NULL: in shared memory, or none */
    size_t size;
};

static normfuse_tensor tensors[SLOTS];
static int64_t shapes[SLOTS][8], strides[SLOTS][8];
static struct memory memories[SLOTS];
static unsigned char *shared;
static bool is_out_of_reach; /* a tensor names more memory than is behind it */

static bool is_big(int slot)
{
    return slot <= POST_ADD || slot == Y || slot == U || (slot >= DY && slot <= DX) || slot == DPOST_ADD;
}

__extension__ typedef __int128 wide;

/* Elements from the first one back to the lowest and on to the highest, saturated. */
static void reach(const normfuse_tensor *tensor, int64_t *low, int64_t *high)
{
    wide least = 0, most = 0;
    bool is_empty = false;
    wide row_major = 1;
    for (int a = tensor->ndim - 1; a >= 0; a--) {
        const int64_t count = tensor->shape[a];
        const wide stride = tensor->strides != NULL ? tensor->strides[a] : row_major;
        is_empty |= count <= 0;
        if (count > 1 && stride > 0)
            most += (count - 1) * stride;
        else if (count > 1)
            least += (count - 1) * stride;
        row_major *= count < 1 ? 1 : count > MOST_BYTES ? MOST_BYTES : count;
        row_major = row_major > MOST_BYTES ? MOST_BYTES : row_major;
    }
    *low = is_empty ? 0 : least < -MOST_BYTES ? -MOST_BYTES : (int64_t)least;
    *high = is_empty ? 0 : most >= MOST_BYTES ? MOST_BYTES : (int64_t)most + 1;
}

static void make_tensor(int slot, int32_t ndim, const int64_t *sizes, int type, bool channels_last)
{
    static const normfuse_dtype dtypes[] = {{2, 32, 1}, {2, 64, 1}, {2, 16, 1}, {4, 16, 1},
                                            {2, 8, 1},  {0, 32, 1}, {2, 32, 2}};
    normfuse_tensor *const tensor = &tensors[slot];
    *tensor = (normfuse_tensor){.device = {NORMFUSE_CPU, 0}, .ndim = ndim, .dtype = dtypes[type]};
    if (rarely())
        tensor->dtype = dtypes[take(7)];
    if (rarely())
        tensor->device = (normfuse_device){(int32_t)take(4), (int32_t)take(2)};
    memcpy(shapes[slot], sizes, (size_t)ndim * sizeof *sizes);
    if (rarely())
        shapes[slot][take(8)] = any_integer();
    else if (rarely())
        shapes[slot][take(8)] ^= 1;

    /* Slices are of a tensor with more channels, or padded. */
    const int64_t pad = take(4) == 3 ? (int64_t)take(5) : 0;
    int64_t stride = 1;
    if (channels_last && ndim > 2) {
        strides[slot][1] = 1;
        stride = sizes[1] + pad;
    }
    for (int a = ndim - 1; a >= 0; a--) {
        if (channels_last && ndim > 2 && a == 1)
            continue;
        strides[slot][a] = stride;
        stride = (int64_t)((uint64_t)stride * (uint64_t)sizes[a] + (a <= 1 ? (uint64_t)pad : 0));
    }
    if (rarely())
        strides[slot][take(8)] = any_integer();
    else if (rarely())
        strides[slot][take(8)] = (int64_t)take(40) - 20;
    tensor->shape = rarely() ? NULL : shapes[slot];
    tensor->strides = take(16) == 15 ? NULL : strides[slot];
    if (rarely())
        tensor->ndim = (int32_t)take(9) - 1;

    const size_t element = tensor->dtype.bits >= 8 ? tensor->dtype.bits / 8 : 1;
    int64_t low = 0, high = 0;
    if (tensor->shape != NULL && tensor->ndim > 0)
        reach(tensor, &low, &high);
    const bool too_large = (uint64_t)(high - low) * element >= MOST_BYTES;
    const size_t bytes = (size_t)(high - low) * element, before = (size_t)-low * element;
    struct memory *const memory = &memories[slot];
    if (rarely()) {
        tensor->data = NULL;
        tensor->byte_offset = take(3);
    } else if (too_large || (take(4) == 3 && bytes + 256 * element < SHARED_BYTES)) {
        is_out_of_reach |= too_large;
        tensor->data = shared;
        tensor->byte_offset = before + take(256) * element;
    } else {
        const size_t offset = take(4) * (rarely() ? 1 : element);
        memory->size = bytes + offset;
        memory->bytes = malloc(memory->size + 1); /* an odd byte, so that an empty tensor has an address too */
        memory->copy = malloc(memory->size + 1);
        for (size_t i = 0; i < memory->size + 1; i++)
            memory->bytes[i] = (unsigned char)(i * 37 + (size_t)slot * 11);
        memcpy(memory->copy, memory->bytes, memory->size + 1);
        tensor->data = memory->bytes;
        tensor->byte_offset = before + offset;
    }
    if (rarely())
        tensor->byte_offset = UINT64_MAX - take(200);
}

static bool is_output(int slot, bool evaluates)
{
    return slot == Y || slot == U || slot == MEAN || slot == RSTD || slot >= DX ||
           (!evaluates && (slot == RUNNING_MEAN || slot == RUNNING_VAR));
}

static void stop(const char *what, int slot)
{
    fprintf(stderr, "%s (tensor %d); last error: %s\n", what, slot, normfuse_last_error());
    abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input = data;
    input_left = size;
    is_out_of_reach = false;
    memset(memories, 0, sizeof memories);
    shared = aligned_alloc(64, SHARED_BYTES);
    unsigned char *const shared_copy = malloc(SHARED_BYTES);
    for (size_t i = 0; i < SHARED_BYTES; i++)
        shared[i] = (unsigned char)(i * 29);
    memcpy(shared_copy, shared, SHARED_BYTES);

    const unsigned operator = take(3), call = operator == AFFINE ? (take(2) != 0 ? take(2) + 6 : take(2)) : take(8);
    const bool evaluates = operator != AFFINE && call < 2 && take(3) == 2;
    const int32_t ndim = 2 + (int32_t)take(4);
    const int type = (int)take(4);
    const bool channels_last = take(2), per_sample = take(2);
    int64_t sizes[5];
    for (int a = 0; a < 5; a++)
        sizes[a] = take(32) == 31 ? 0 : a == 1 ? (int64_t)take(40) + 1 : (int64_t)take(6) + 1;
    int64_t groups = sizes[1] / ((int64_t)take(4) + 1);
    if (evaluates || groups == 0 || sizes[1] % groups != 0)
        groups = sizes[1];
    if (rarely())
        groups = any_integer();

    normfuse_tensors given = {.struct_bytes = sizeof given};
    static const uint32_t forward = 0x7f | 1u << Y | 1u << U | 3u << MEAN | 3u << RUNNING_MEAN,
                          backward = 0x7f | 3u << MEAN | 3u << DY | 0x3fu << DX;
    static const uint32_t takes[] = {forward,
                                     backward,
                                     1u << X | 1u << PRE_ADD | 1u << U | 1u << STATS,
                                     (forward & ~(1u << U)) | 1u << STATS,
                                     0x7f | 3u << MEAN | 1u << DY | 1u << DPOST_ADD | 1u << SUMS,
                                     (backward & ~(1u << DPOST_ADD)) | 1u << SUMS,
                                     forward | 1u << STATS,
                                     backward | 1u << SUMS};
    uint32_t mask = takes[call];
    if (operator != GROUP)
        mask &= ~(3u << SCALE | 3u << DSCALE);
    if (operator == AFFINE)
        mask &= ~(1u << PRE_ADD | 1u << U | 1u << DU | 3u << MEAN | 3u << RUNNING_MEAN | 3u << STATS);
    if (evaluates)
        mask = (mask & ~(3u << MEAN)) | 3u << RUNNING_MEAN;
    else if (operator == GROUP && groups != sizes[1])
        mask &= ~(3u << RUNNING_MEAN);
    const bool drops_running = take(2);
    for (int slot = 0; slot < SLOTS; slot++) {
        bool is_given = mask >> slot & 1;
        if (slot != X && slot != DY && slot < STATS && !(evaluates && (slot == RUNNING_MEAN || slot == RUNNING_VAR)))
            is_given &= take(4) != 3;
        if ((slot == RUNNING_MEAN || slot == RUNNING_VAR) && drops_running && !evaluates)
            is_given = false;
        if (rarely())
            is_given = !is_given;
        if (!is_given)
            continue;
        const int64_t n = sizes[0], c = sizes[1];
        if (is_big(slot))
            make_tensor(slot, ndim, sizes, type, rarely() ? !channels_last : channels_last);
        else if (slot == MEAN || slot == RSTD)
            operator == GROUP ? make_tensor(slot, 2, (int64_t[]){n, groups}, type == 1, false)
                              : make_tensor(slot, 1, &c, type == 1, false);
        else if (slot == STATS || slot == SUMS)
            operator == GROUP
                ? make_tensor(slot, 3, (int64_t[]){n, slot == STATS ? groups : c, slot == STATS ? 3 : 2}, 1, false)
                : make_tensor(slot, 2, (int64_t[]){c, slot == STATS ? 3 : 2}, 1, false);
        else if (slot == SCALE || slot == SHIFT || slot == DSCALE || slot == DSHIFT ||
                 (operator == AFFINE && per_sample))
            make_tensor(slot, 2, (int64_t[]){n, c}, (int)take(4), false);
        else
            make_tensor(slot, 1, &c, (int)take(4), false);
        /* In place, now and then. */
        static const int originals[SLOTS] = {[Y] = X, [U] = PRE_ADD, [DX] = DY, [DPOST_ADD] = DY};
        if (is_big(slot) && slot >= Y && take(8) == 7) {
            const int original = take(4) == 3 ? X : originals[slot];
            if ((mask >> original & 1) != 0 && tensors[original].data != NULL && slot != DY && slot != DU) {
                free(memories[slot].bytes);
                free(memories[slot].copy);
                memories[slot] = (struct memory){0};
                tensors[slot] = tensors[original];
            }
        }
        const normfuse_tensor *const pointer = &tensors[slot];
        memcpy((char *)&given + offsetof(normfuse_tensors, x) + (size_t)slot * sizeof pointer, &pointer,
               sizeof pointer);
    }
    if (rarely())
        given.struct_bytes += take(16);
    if (rarely())
        given.flags = take(3);

    uint32_t flags = 0;
    if (evaluates)
        flags |= NORMFUSE_EVALUATE;
    if (take(8) == 7)
        flags |= 1u << take(5);
    const int32_t activation = rarely() ? (int32_t)any_integer() : (int32_t)take(9);
    const int32_t reserved = rarely() ? 1 : 0;
    const double eps = take(4) == 3 ? any_double() : 1e-5, act_param = any_double(), momentum = any_double();
    const int64_t seen = rarely() ? any_integer() : take(3), set_values = rarely() ? any_integer() : 0;
    const uint32_t bytes_off = rarely() ? take(16) : 0;
    const normfuse_group_norm_options group = {(uint32_t)sizeof group + bytes_off,
                                               flags,
                                               groups,
                                               eps,
                                               activation,
                                               reserved,
                                               act_param,
                                               momentum,
                                               seen,
                                               set_values};
    const normfuse_batch_norm_options batch = {
        (uint32_t)sizeof batch + bytes_off, flags, eps, activation, reserved, act_param, momentum, seen, set_values};
    const normfuse_affine_options affine = {(uint32_t)sizeof affine + bytes_off, flags, activation, reserved,
                                            act_param};

    normfuse_exec exec = {.struct_bytes = sizeof exec, .threads = (int32_t)take(4)};
    void *scratch = NULL;
    if (take(4) == 3) {
        exec.scratch_bytes = take(16) * 4096;
        exec.scratch = scratch = exec.scratch_bytes != 0 ? aligned_alloc(64, exec.scratch_bytes) : NULL;
        if (rarely() && scratch != NULL)
            exec.scratch = (char *)scratch + 8;
    }
    if (rarely())
        exec.flags = 1;
    if (rarely())
        exec.threads = -1;

    static normfuse_status (*const group_calls[])(const normfuse_group_norm_options *, const normfuse_tensors *,
                                                  const normfuse_exec *) = {
        normfuse_group_norm_forward, normfuse_group_norm_backward,      normfuse_group_norm_stats,
        normfuse_group_norm_apply,   normfuse_group_norm_backward_sums, normfuse_group_norm_backward_apply,
    };
    static normfuse_status (*const batch_calls[])(const normfuse_batch_norm_options *, const normfuse_tensors *,
                                                  const normfuse_exec *) = {
        normfuse_batch_norm_forward, normfuse_batch_norm_backward,      normfuse_batch_norm_stats,
        normfuse_batch_norm_apply,   normfuse_batch_norm_backward_sums, normfuse_batch_norm_backward_apply,
    };
    struct normfuse_problem problem;
    normfuse_status status;
    errno = 0;
    if (is_out_of_reach || call >= 6)
        status = operator == GROUP   ? normfuse_group_norm_problem(&problem, (enum normfuse_call)call, &group, &given)
                 : operator == BATCH ? normfuse_batch_norm_problem(&problem, (enum normfuse_call)call, &batch, &given)
                                     : normfuse_affine_problem(&problem, (enum normfuse_call)call, &affine, &given);
    else
        status = operator == GROUP ? group_calls[call](&group, &given, &exec)
                 : operator == BATCH
                     ? batch_calls[call](&batch, &given, &exec)
                     : (call == 0 ? normfuse_affine_forward : normfuse_affine_backward)(&affine, &given, &exec);
    if (status != NORMFUSE_OK && errno != 0)
        stop("a refused call set errno", -1);

    const bool ran = status == NORMFUSE_OK;
    bool is_aliased[SLOTS] = {false};
    for (int slot = 0; slot < SLOTS; slot++)
        for (int other = 0; other < SLOTS; other++)
            is_aliased[slot] |=
                other != slot && memories[slot].bytes != NULL && tensors[other].data == memories[slot].bytes;
    for (int slot = 0; slot < SLOTS; slot++) {
        const struct memory *const memory = &memories[slot];
        if (memory->bytes == NULL ||
            (ran && (is_output(slot, evaluates || call == 1 || call >= 4) || is_aliased[slot])))
            continue;
        if (memcmp(memory->bytes, memory->copy, memory->size + 1) != 0)
            stop(ran ? "an input was written" : "a refused call wrote", slot);
    }
    if (!ran && memcmp(shared, shared_copy, SHARED_BYTES) != 0)
        stop("a refused call wrote", -1);
    for (int slot = 0; slot < SLOTS; slot++) {
        free(memories[slot].bytes);
        free(memories[slot].copy);
        tensors[slot].data = NULL;
    }
    free(scratch);
    free(shared_copy);
    free(shared);
    return 0;
}
