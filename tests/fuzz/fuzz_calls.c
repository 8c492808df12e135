/* SPDX-License-Identifier: MIT
 *
 * fuzz_calls.c - libFuzzer target of the operators: a call with any options and tensors, most of them near legal ones.
 * The input is a list of choices; 0 is the legal one everywhere, and what an input that has ended gives.
 *
 * Every tensor lies in memory of exactly the bytes that its sizes and strides reach, or at a place in memory that
 * several share. Of each call this is checked:
 *
 *   refused    no byte has changed, and there is a message
 *   accepted   it breaks none of the header's rules that are known here; outputs meet nothing but their in-place pairs;
 *              no byte has changed that is not an output's; the results have the bits of the same call by one thread on
 *              copies of the tensors without gaps and overlaps
 *   copies     results as near to call_reference.c's, in long double, as roundings allow, where the values are
 * ordinary; the              same bits from several threads at once, and in parts: of samples, and statistics or sums
 * first   scratch    of exactly the bytes that were asked for, and no byte behind them is written */
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call_reference.h"
#include "normfuse.h"
#include "problem.h"
#include "tests/ref/reference.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void fuzz_report(void);

enum {
    AXES = 8,
    MOST_BYTES = 1 << 19,   /* of a tensor; one that reaches further has no memory, and its call is checked, not run */
    SHARED_BYTES = 1 << 14,
    SHARED_OFFSETS = 256,   /* a shared tensor begins up to so many elements late */
    SHARED_SHIFTS = 8,      /* and an output that overlaps it partly up to so many later */
    FILLER = 0xA5,          /* the bytes between elements, and behind scratch */
    SCRATCH_GUARD = 64,
    CALLERS = 3
};

#define PRE (BIT(PRE_ADD) | BIT(PRE_BIAS))
#define FORWARD_INPUTS (BIT(X) | PRE | BIT(POST_ADD) | BIT(WEIGHT) | BIT(BIAS) | BIT(SCALE) | BIT(SHIFT) | BIT(SLOPE))
#define SAVED (BIT(MEAN) | BIT(RSTD))
#define RUNNING (BIT(RUNNING_MEAN) | BIT(RUNNING_VAR))
#define BACKWARD_INPUTS (FORWARD_INPUTS | SAVED | BIT(Y) | BIT(DY) | BIT(DU))
#define PARAMETER_GRADIENTS (BIT(DWEIGHT) | BIT(DBIAS) | BIT(DSCALE) | BIT(DSHIFT))
#define INPUT_GRADIENTS (BIT(DX) | BIT(DPRE_BIAS))
#define LIKE_Y (BIT(Y) | BIT(DY) | BIT(POST_ADD) | BIT(DPOST_ADD))
#define ADAPTIVE (BIT(SCALE) | BIT(SHIFT) | BIT(DSCALE) | BIT(DSHIFT))

/* The tensors that a call takes, and which of these it writes (running statistics: when training). */
static const struct {
    uint32_t takes, writes;
} calls[] = {
    [FORWARD] = {FORWARD_INPUTS | BIT(Y) | BIT(U) | SAVED | RUNNING, BIT(Y) | BIT(U) | SAVED | RUNNING},
    [BACKWARD] = {BACKWARD_INPUTS | PARAMETER_GRADIENTS | INPUT_GRADIENTS | BIT(DPOST_ADD) | BIT(DSLOPE),
                  PARAMETER_GRADIENTS | INPUT_GRADIENTS | BIT(DPOST_ADD) | BIT(DSLOPE)},
    [STATS_OF] = {BIT(X) | PRE | BIT(U) | BIT(STATS), BIT(U) | BIT(STATS)},
    [APPLY] = {FORWARD_INPUTS | BIT(Y) | SAVED | RUNNING | BIT(STATS), BIT(Y) | SAVED | RUNNING},
    [BACKWARD_SUMS] = {BACKWARD_INPUTS | BIT(DPOST_ADD) | BIT(DSLOPE) | BIT(SUMS),
                       BIT(DPOST_ADD) | BIT(DSLOPE) | BIT(SUMS)},
    [BACKWARD_APPLY] = {BACKWARD_INPUTS | PARAMETER_GRADIENTS | INPUT_GRADIENTS | BIT(SUMS),
                        PARAMETER_GRADIENTS | INPUT_GRADIENTS},
};

/* The inputs that an output may be. */
static const uint32_t in_place[SLOTS] = {
    [Y] = BIT(X) | BIT(PRE_ADD) | BIT(POST_ADD),
    [U] = BIT(X) | BIT(PRE_ADD),
    [DX] = BIT(DY) | BIT(X) | BIT(DU),
    [DPOST_ADD] = BIT(DY),
};

static void stop(const char *what, int slot);

/* ---- choices -------------------------------------------------------------------------------------------------- */

static const uint8_t *input, *input_begin;
static size_t input_left;

/* 0 to below. */
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
    static const double edges[] = {0.1, 0.0, -1.0, 1e300, 1e-5};
    const unsigned choice = take(7);
    return choice < 5 ? edges[choice] : choice == 5 ? (double)INFINITY : (double)NAN;
}

/* ---- options -------------------------------------------------------------------------------------------------- */

union options {
    normfuse_group_norm_options group;
    normfuse_batch_norm_options batch;
    normfuse_channel_norm_options channel;
    normfuse_affine_options affine;
};

static union options options_of(const struct call *call)
{
    union options options;
    const uint32_t more = call->options_bytes_more;
    if (call->operator == GROUP)
        options.group = (normfuse_group_norm_options){.struct_bytes = (uint32_t)sizeof options.group + more,
                                                      .flags = call->flags,
                                                      .groups = call->groups,
                                                      .eps = call->eps,
                                                      .activation = call->activation,
                                                      .reserved = call->reserved,
                                                      .act_param = call->act_param,
                                                      .momentum = call->momentum,
                                                      .batches_seen = call->batches_seen,
                                                      .set_values = call->set_values};
    else if (call->operator == BATCH)
        options.batch = (normfuse_batch_norm_options){.struct_bytes = (uint32_t)sizeof options.batch + more,
                                                      .flags = call->flags,
                                                      .eps = call->eps,
                                                      .activation = call->activation,
                                                      .reserved = call->reserved,
                                                      .act_param = call->act_param,
                                                      .momentum = call->momentum,
                                                      .batches_seen = call->batches_seen,
                                                      .set_values = call->set_values};
    else if (call->operator == CHANNEL)
        options.channel = (normfuse_channel_norm_options){.struct_bytes = (uint32_t)sizeof options.channel + more,
                                                          .flags = call->flags,
                                                          .groups = call->groups,
                                                          .eps = call->eps,
                                                          .statistics = call->statistics,
                                                          .eps_kind = call->eps_kind,
                                                          .activation = call->activation,
                                                          .reserved = call->reserved,
                                                          .act_param = call->act_param};
    else
        options.affine = (normfuse_affine_options){.struct_bytes = (uint32_t)sizeof options.affine + more,
                                                   .flags = call->flags,
                                                   .activation = call->activation,
                                                   .reserved = call->reserved,
                                                   .act_param = call->act_param};
    return options;
}

static normfuse_status run(const struct call *call, const normfuse_tensors *given, const normfuse_exec *exec)
{
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
    const union options options = options_of(call);
    if (call->operator == GROUP)
        return group_calls[call->call](&options.group, given, exec);
    if (call->operator == BATCH)
        return batch_calls[call->call](&options.batch, given, exec);
    if (call->operator == CHANNEL)
        return (call->call == FORWARD ? normfuse_channel_norm_forward
                                      : normfuse_channel_norm_backward)(&options.channel, given, exec);
    return (call->call == FORWARD ? normfuse_affine_forward : normfuse_affine_backward)(&options.affine, given, exec);
}

/* The same without running: refused for the options and tensors, or their picture. */
static normfuse_status look(const struct call *call, const normfuse_tensors *given, struct normfuse_problem *problem)
{
    const union options options = options_of(call);
    const enum normfuse_call name = (enum normfuse_call)call->call;
    return call->operator == GROUP     ? normfuse_group_norm_problem(problem, name, &options.group, given)
           : call->operator == BATCH   ? normfuse_batch_norm_problem(problem, name, &options.batch, given)
           : call->operator == CHANNEL ? normfuse_channel_norm_problem(problem, name, &options.channel, given)
                                       : normfuse_affine_problem(problem, name, &options.affine, given);
}

static normfuse_status ask_scratch(const struct call *call, const normfuse_tensors *given, const normfuse_exec *exec,
                                   size_t *bytes)
{
    const union options options = options_of(call);
    const bool backward = call->call == BACKWARD || call->call == BACKWARD_SUMS || call->call == BACKWARD_APPLY ||
                          call->call == BACKWARD_SCRATCH;
    if (call->operator == GROUP)
        return (backward ? normfuse_group_norm_backward_scratch_bytes : normfuse_group_norm_forward_scratch_bytes)(
            &options.group, given, exec, bytes);
    if (call->operator == BATCH)
        return (backward ? normfuse_batch_norm_backward_scratch_bytes : normfuse_batch_norm_forward_scratch_bytes)(
            &options.batch, given, exec, bytes);
    if (call->operator == CHANNEL)
        return (backward ? normfuse_channel_norm_backward_scratch_bytes : normfuse_channel_norm_forward_scratch_bytes)(
            &options.channel, given, exec, bytes);
    return (backward ? normfuse_affine_backward_scratch_bytes : normfuse_affine_forward_scratch_bytes)(
        &options.affine, given, exec, bytes);
}

/* ---- tensors -------------------------------------------------------------------------------------------------- */

struct block {
    unsigned char *bytes, *before, *owner; /* before: the call; owner: 1 + the output that has the byte, 0: none */
    size_t size;
};

static normfuse_tensor tensors[SLOTS];
static int64_t shapes[SLOTS][AXES], strides[SLOTS][AXES];
static uint32_t present;
static struct block blocks[SLOTS + 1]; /* the last: shared memory */
static int block_of[SLOTS];            /* -1: none */
static bool is_out_of_reach;           /* a tensor reaches over more memory than is behind it */
static const char *broken_rules[SLOTS + 1]; /* by a tensor; the last: by options and exec. NULL: none that is known */
static ptrdiff_t offsets[MOST_BYTES / 2]; /* see list_elements */

static struct call drawn;
static int64_t calls_accepted, calls_compared, values_compared; /* with the reference */

static void stop(const char *what, int slot)
{
    fputs("the input, a line of fuzz_calls.txt: ", stderr);
    for (const uint8_t *byte = input_begin; byte < input; byte++)
        fprintf(stderr, "\\x%02x", *byte);
    fputs("\n", stderr);
    static const char *const operators[] = {"group_norm", "batch_norm", "affine", "channel_norm"};
    fprintf(stderr, "%s, call %u, flags 0x%x, groups %lld, tensors 0x%x: %s (tensor %d); last error: %s\n",
            operators[drawn.operator], drawn.call, drawn.flags, (long long)drawn.groups, present, what, slot,
            normfuse_last_error());
    for (int other = 0; other < SLOTS; other++) {
        if ((present >> other & 1) == 0 || tensors[other].shape == NULL)
            continue;
        fprintf(stderr, "tensor %d, type %d,", other, type_of(&tensors[other]));
        for (int a = 0; a < tensors[other].ndim; a++)
            fprintf(stderr, " %lld (%lld)", (long long)shapes[other][a],
                    tensors[other].strides != NULL ? (long long)tensors[other].strides[a] : 0);
        fprintf(stderr, "%s\n", block_of[other] == SLOTS ? ", shared" : block_of[other] == other ? "" : ", in place");
    }
    abort();
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
        const wide far = count > 1 ? (count - 1) * stride : 0; /* below 2^126 */
        most = far > 0 && most < MOST_BYTES ? most + far : most;
        least = far < 0 && least > -MOST_BYTES ? least + far : least;
        row_major *= count < 1 ? 1 : count > MOST_BYTES ? MOST_BYTES : count;
        row_major = row_major > MOST_BYTES ? MOST_BYTES : row_major;
    }
    *low = is_empty ? 0 : least < -MOST_BYTES ? -MOST_BYTES : (int64_t)least;
    *high = is_empty ? 0 : most >= MOST_BYTES ? MOST_BYTES : (int64_t)most + 1;
}

static bool is_known(normfuse_dtype dtype)
{
    return dtype.lanes == 1 && ((dtype.code == 2 && (dtype.bits == 64 || dtype.bits == 32 || dtype.bits == 16)) ||
                                (dtype.code == 4 && dtype.bits == 16));
}

/* Its elements in row-major order: `offsets` are their distances in bytes from the first. -1: more than there is memory
 * for, or not a tensor. */
static int64_t list_elements(const normfuse_tensor *tensor)
{
    int64_t count = 1;
    if (tensor->shape == NULL || tensor->ndim < 1 || tensor->ndim > AXES)
        return -1;
    for (int a = 0; a < tensor->ndim; a++)
        if (tensor->shape[a] <= 0)
            return tensor->shape[a] == 0 ? 0 : -1;
    for (int a = 0; a < tensor->ndim; a++)
        if (__builtin_mul_overflow(count, tensor->shape[a], &count) || count > MOST_BYTES / 2)
            return -1;
    int64_t index[AXES] = {0}, row_major = tensor->dtype.bits / 8;
    ptrdiff_t step[AXES]; 
    for (int a = tensor->ndim - 1; a >= 0; a--) {
        step[a] = row_major;
        if (tensor->strides != NULL &&
            __builtin_mul_overflow(tensor->shape[a] > 1 ? tensor->strides[a] : 0, tensor->dtype.bits / 8, &step[a]))
            return -1;
        row_major *= tensor->shape[a];
    }
    offsets[0] = 0;
    ptrdiff_t at = 0;
    for (int64_t listed = 1; listed < count; listed++) {
        int a = tensor->ndim - 1;
        for (; index[a] == tensor->shape[a] - 1; a--) {
            at -= index[a] * step[a];
            index[a] = 0;
        }
        index[a]++;
        at += step[a];
        offsets[listed] = at;
    }
    return count;
}

static unsigned char *first_byte(const normfuse_tensor *tensor)
{
    return (unsigned char *)tensor->data + tensor->byte_offset;
}

static void make_tensor(int slot, int32_t ndim, const int64_t *sizes, int type, bool channels_last)
{
    static const normfuse_dtype dtypes[] = {{2, 32, 1}, {2, 64, 1}, {2, 16, 1}, {4, 16, 1},
                                            {2, 8, 1},  {0, 32, 1}, {2, 32, 2}};
    normfuse_tensor *const tensor = &tensors[slot];
    *tensor = (normfuse_tensor){.device = {NORMFUSE_CPU, 0}, .ndim = ndim, .dtype = dtypes[type]};
    if (rarely())
        tensor->dtype = dtypes[take(7)];
    if (rarely()) {
        /* Not CUDA's: a machine with a GPU would run the call, on memory of the host. */
        static const int32_t devices[] = {NORMFUSE_CPU, 0, 3, -1};
        tensor->device = (normfuse_device){devices[take(4)], (int32_t)take(2)};
    }
    memset(shapes[slot], 0, sizeof shapes[slot]);
    memset(strides[slot], 0, sizeof strides[slot]);
    memcpy(shapes[slot], sizes, (size_t)ndim * sizeof *sizes);
    if (rarely())
        shapes[slot][take(AXES)] = any_integer();
    else if (rarely())
        shapes[slot][take(AXES)] ^= 1;

    /* Slices are of a tensor with more channels, or padded. */
    const int64_t pad = take(4) == 3 ? (int64_t)take(5) : 0;
    int64_t stride = 1;
    if (channels_last && ndim > 2) {
        strides[slot][1] = 1;
        stride = (int64_t)((uint64_t)sizes[1] + (uint64_t)pad);
    }
    for (int a = ndim - 1; a >= 0; a--) {
        if (channels_last && ndim > 2 && a == 1)
            continue;
        strides[slot][a] = stride;
        stride = (int64_t)((uint64_t)stride * (uint64_t)sizes[a] + (a <= 1 ? (uint64_t)pad : 0));
    }
    const unsigned change = take(32);
    if (change == 31)
        strides[slot][take(AXES)] = any_integer();
    else if (change == 30)
        strides[slot][take(AXES)] = (int64_t)take(40) - 20;
    else if (change >= 28 && !is_big(slot))
        strides[slot][take((unsigned)ndim)] = change == 29 ? 0 : -(int64_t)take(4);
    else if (change >= 26)
        strides[slot][0] = change == 27 ? 0 : (int64_t)(0 - (uint64_t)strides[slot][0]);
    tensor->shape = rarely() ? NULL : shapes[slot];
    tensor->strides = take(16) == 15 ? NULL : strides[slot];
    if (rarely())
        tensor->ndim = (int32_t)take(AXES + 1) - 1;
    if (!is_known(tensor->dtype))
        broken_rules[slot] = "a dtype that is none of the four";
    if (tensor->device.device_type != NORMFUSE_CPU)
        broken_rules[slot] = "a tensor that is not on the CPU";
    if (tensor->shape == NULL)
        broken_rules[slot] = "no shape";

    const size_t element = tensor->dtype.bits >= 8 ? tensor->dtype.bits / 8 : 1;
    int64_t low = 0, high = 0;
    if (tensor->shape != NULL && tensor->ndim > 0)
        reach(tensor, &low, &high);
    const bool too_large = (uint64_t)(high - low) * element >= MOST_BYTES;
    const size_t bytes = (size_t)(high - low) * element, before = (size_t)-low * element;
    if (rarely()) {
        tensor->data = NULL;
        tensor->byte_offset = take(3);
        block_of[slot] = -1;
        if (high > low)
            broken_rules[slot] = "no data";
    } else if (too_large ||
               (take(4) == 3 && bytes + (SHARED_OFFSETS + SHARED_SHIFTS) * element < SHARED_BYTES)) {
        is_out_of_reach |= too_large;
        block_of[slot] = too_large ? -1 : SLOTS;
        tensor->data = blocks[SLOTS].bytes;
        tensor->byte_offset = before + take(SHARED_OFFSETS) * element;
    } else {
        const size_t offset = take(4) * (rarely() ? 1 : element);
        struct block *const block = &blocks[slot];
        block->size = bytes + offset + 1; /* an odd byte, so that an empty tensor has an address too */
        block->bytes = malloc(block->size);
        memset(block->bytes, FILLER, block->size);
        block_of[slot] = slot;
        tensor->data = block->bytes;
        tensor->byte_offset = before + offset;
        if (offset % element != 0 && high > low)
            broken_rules[slot] = "a tensor that is not aligned to its elements";
    }
    if (rarely()) {
        tensor->byte_offset = UINT64_MAX - take(200);
        block_of[slot] = -1;
        if (high > low)
            broken_rules[slot] = "an offset past the end of memory";
    }
}

static uint32_t mix(uint32_t h)
{
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    return h ^ h >> 16;
}

/* Values that a tensor of this kind may hold; kind 0: ordinary ones, 1: whole numbers, 2: and some that are not finite,
 * 3: any bytes at all. */
static void fill(int slot, unsigned kind)
{
    const normfuse_tensor *const tensor = &tensors[slot];
    const int64_t count = block_of[slot] >= 0 && is_known(tensor->dtype) ? list_elements(tensor) : 0;
    for (int64_t i = 0; i < count; i++) {
        unsigned char *const at = first_byte(tensor) + offsets[i];
        const uint32_t random = mix((uint32_t)(i * SLOTS + slot));
        double value = (double)random * 0x1p-30 - 2;
        if (kind == 1)
            value = floor(2 * value);
        if (slot == RSTD || slot == RUNNING_VAR)
            value = fabs(value) + 0.125;
        else if (slot == STATS)
            value = i % 3 == 0 ? 9 : i % 3 == 1 ? value : fabs(value);
        /* Counts to go on from are the same for all channels. */
        const bool is_count = slot == STATS && i % 3 == 0;
        if (kind == 2 && random % 13 == 0 && !is_count)
            value = random % 2 != 0 ? (double)NAN : (double)INFINITY;
        if (kind != 3 || is_count)
            reference_store(at, type_of(tensor), value);
        else
            for (int b = 0; b < tensor->dtype.bits / 8; b++)
                at[b] = (unsigned char)mix((uint32_t)(i * 8 + b));
    }
}

/* That what was accepted has a right to its memory; marks what each output owns. */
static void check_overlaps(uint32_t outputs)
{
    for (int slot = 0; slot < SLOTS; slot++) {
        if ((outputs >> slot & 1) == 0 || block_of[slot] < 0)
            continue;
        const struct block *const block = &blocks[block_of[slot]];
        const int64_t count = list_elements(&tensors[slot]);
        for (int64_t i = 0; i < count; i++)
            for (int b = 0; b < tensors[slot].dtype.bits / 8; b++) {
                unsigned char *const owner = &block->owner[first_byte(&tensors[slot]) + offsets[i] + b - block->bytes];
                if (*owner != 0)
                    stop("outputs that overlap were accepted", slot);
                *owner = (unsigned char)(slot + 1);
            }
    }
    for (int slot = 0; slot < SLOTS; slot++) {
        const normfuse_tensor *const tensor = &tensors[slot];
        if ((present & ~outputs & BIT(slot)) == 0 || block_of[slot] < 0)
            continue;
        const struct block *const block = &blocks[block_of[slot]];
        const int64_t count = list_elements(tensor);
        int last_owner = 0;
        for (int64_t i = 0; i < count; i++)
            for (int b = 0; b < tensor->dtype.bits / 8; b++) {
                const int owner = block->owner[first_byte(tensor) + offsets[i] + b - block->bytes];
                if (owner == 0 || owner == last_owner)
                    continue;
                last_owner = owner;
                const normfuse_tensor *const output = &tensors[owner - 1];
                bool same = (in_place[owner - 1] & BIT(slot)) != 0 && first_byte(output) == first_byte(tensor);
                int64_t row_major = 1;
                for (int a = tensor->ndim - 1; same && a >= 0; a--) {
                    if (tensor->shape[a] > 1)
                        same = (tensor->strides != NULL ? tensor->strides[a] : row_major) ==
                               (output->strides != NULL ? output->strides[a] : row_major);
                    row_major *= tensor->shape[a];
                }
                if (!same)
                    stop("an output that overlaps an input was accepted", slot);
            }
    }
}

/* ---- copies --------------------------------------------------------------------------------------------------- */

/* A call's tensors without gaps and overlaps, in the picture of the original. */
struct copies {
    normfuse_tensor tensors[SLOTS];
    int64_t shapes[SLOTS][AXES], strides[SLOTS][AXES];
    void *memory[SLOTS];
    uint32_t present;
};

static normfuse_tensors list_of(const normfuse_tensor *list, uint32_t which)
{
    normfuse_tensors given = {.struct_bytes = sizeof given};
    for (int slot = 0; slot < SLOTS; slot++) {
        const normfuse_tensor *const pointer = which >> slot & 1 ? &list[slot] : NULL;
        memcpy((char *)&given + offsetof(normfuse_tensors, x) + (size_t)slot * sizeof pointer, &pointer,
               sizeof pointer);
    }
    return given;
}

static void add_copy(struct copies *copies, int slot, normfuse_dtype dtype, int32_t ndim, const int64_t *shape)
{
    copies->tensors[slot] = (normfuse_tensor){.device = {NORMFUSE_CPU, 0},
                                              .ndim = ndim,
                                              .dtype = dtype,
                                              .shape = copies->shapes[slot],
                                              .strides = copies->strides[slot]};
    memcpy(copies->shapes[slot], shape, (size_t)ndim * sizeof *shape);
    int64_t stride = 1;
    for (int a = ndim - 1; a >= 0; a--) {
        copies->strides[slot][a] = stride;
        stride *= shape[a];
    }
    copies->present |= BIT(slot);
}

static void *allocate_copy(struct copies *copies, int slot)
{
    int64_t low, high;
    reach(&copies->tensors[slot], &low, &high);
    const size_t bytes = (size_t)high * (copies->tensors[slot].dtype.bits / 8);
    copies->memory[slot] = copies->tensors[slot].data = malloc(bytes + 1);
    return memset(copies->memory[slot], FILLER, bytes + 1);
}

/* The outputs that follow from what the tensors held before the call. False where one has too many elements. */
static bool copy_tensors(struct copies *copies, const struct normfuse_problem *problem)
{
    memset(copies, 0, sizeof *copies);
    const int64_t n = problem->n, c = problem->c, s = problem->s;
    for (int slot = 0; slot < SLOTS; slot++) {
        const normfuse_tensor *const tensor = &tensors[slot];
        if ((present >> slot & 1) == 0)
            continue;
        if (list_elements(tensor) < 0)
            return false;
        const int64_t rows = problem->sets == NORMFUSE_SETS_BATCH ? 1 : n;
        if (is_big(slot)) {
            add_copy(copies, slot, tensor->dtype, tensor->ndim, tensor->shape);
            if (n * c * s != 0) {
                /* One channel or one position has a stride that tells the pictures apart all the same. */
                int64_t *const stride = copies->strides[slot];
                int64_t position = !problem->columns ? 1 : c > 1 ? c : 2;
                stride[1] = problem->columns ? 1 : s > 1 ? s : 2;
                stride[0] = problem->columns ? position * s : stride[1] * c;
                for (int a = tensor->ndim - 1; a >= 2; a--) {
                    stride[a] = position;
                    position *= tensor->shape[a];
                }
            }
        } else if (slot == MEAN || slot == RSTD) {
            add_copy(copies, slot, tensor->dtype, drawn.operator == CHANNEL ? 3 : 2,
                     (int64_t[]){rows, problem->groups, s});
        } else if (slot == STATS) {
            add_copy(copies, slot, tensor->dtype, 3, (int64_t[]){rows, problem->groups, 3});
        } else if (slot == SUMS) {
            add_copy(copies, slot, tensor->dtype, 3, (int64_t[]){rows, c, 2});
        } else {
            add_copy(copies, slot, tensor->dtype, tensor->ndim, tensor->shape);
        }
        unsigned char *const to = allocate_copy(copies, slot);
        const size_t element = tensor->dtype.bits / 8;
        static ptrdiff_t to_offsets[MOST_BYTES / 2];
        const int64_t count = list_elements(&copies->tensors[slot]);
        memcpy(to_offsets, offsets, (size_t)count * sizeof *offsets);
        if (list_elements(tensor) != count)
            stop("a tensor of another size was accepted", slot);
        if (count == 0)
            continue;
        const struct block *const block = &blocks[block_of[slot]];
        for (int64_t i = 0; i < count; i++)
            memcpy(to + to_offsets[i], block->before + (first_byte(tensor) - block->bytes) + offsets[i], element);
    }
    return true;
}

static void free_copies(struct copies *copies)
{
    for (int slot = 0; slot < SLOTS; slot++)
        free(copies->memory[slot]);
}

/* NaNs are alike. */
static bool same_element(const unsigned char *a, const unsigned char *b, normfuse_type type)
{
    return memcmp(a, b, reference_type_bytes(type)) == 0 ||
           (isnan(reference_load(a, type)) && isnan(reference_load(b, type)));
}

static void compare(const normfuse_tensor *got, const normfuse_tensor *want, int slot, const char *what)
{
    static ptrdiff_t got_offsets[MOST_BYTES / 2];
    const int64_t count = list_elements(got);
    memcpy(got_offsets, offsets, (size_t)count * sizeof *offsets);
    list_elements(want);
    const normfuse_type type = type_of(want);
    for (int64_t i = 0; i < count; i++) {
        const unsigned char *const a = first_byte(got) + got_offsets[i], *const b = first_byte(want) + offsets[i];
        if (!same_element(a, b, type)) {
            fprintf(stderr, "element %lld: got %.17g, want %.17g\n", (long long)i, reference_load(a, type),
                    reference_load(b, type));
            stop(what, slot);
        }
    }
}

/* A pool whose tasks come in an order of its own. */
static void any_order(void *pool, int64_t tasks, void (*task)(void *context, int64_t i), void *context)
{
    (void)pool;
    for (int64_t i = 0; i < tasks; i++)
        task(context, i % 2 != 0 ? i - 1 : i + 1 < tasks ? i + 1 : i);
}

/* ---- several threads ------------------------------------------------------------------------------------------ */

struct caller {
    const struct call *call;
    struct copies copies;
    int32_t threads;
    normfuse_status status;
    pthread_t thread;
};

static void *run_caller(void *argument)
{
    struct caller *const caller = argument;
    const normfuse_tensors given = list_of(caller->copies.tensors, caller->copies.present);
    const normfuse_exec exec = {.struct_bytes = sizeof exec, .threads = caller->threads};
    caller->status = run(caller->call, &given, &exec);
    return NULL;
}

static void check_callers(const struct call *call, const struct copies *first, const struct normfuse_problem *problem,
                          uint32_t outputs)
{
    static struct caller callers[CALLERS];
    for (int i = 0; i < CALLERS; i++) {
        callers[i].call = call;
        callers[i].threads = i + 1;
        if (!copy_tensors(&callers[i].copies, problem) ||
            pthread_create(&callers[i].thread, NULL, run_caller, &callers[i]) != 0)
            stop("no memory", -1);
    }
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(callers[i].thread, NULL);
        if (callers[i].status != NORMFUSE_OK)
            stop("a call was refused beside others", -1);
        for (int slot = 0; slot < SLOTS; slot++)
            if (outputs >> slot & 1)
                compare(&callers[i].copies.tensors[slot], &first->tensors[slot], slot, "other bits beside other calls");
        free_copies(&callers[i].copies);
    }
}

/* ---- parts ---------------------------------------------------------------------------------------------------- */

/* The samples from `first` on of the tensors in `which`. */
static void run_samples(const struct call *call, const struct copies *copies, uint32_t which, uint32_t sliced,
                        int64_t first, int64_t count)
{
    normfuse_tensor part[SLOTS];
    int64_t part_shapes[SLOTS][AXES];
    for (int slot = 0; slot < SLOTS; slot++) {
        part[slot] = copies->tensors[slot];
        if ((which & sliced & BIT(slot)) == 0)
            continue;
        memcpy(part_shapes[slot], copies->shapes[slot], sizeof part_shapes[slot]);
        part[slot].shape = part_shapes[slot];
        part_shapes[slot][0] = count;
        part[slot].byte_offset = (uint64_t)(first * copies->strides[slot][0]) * (part[slot].dtype.bits / 8);
    }
    const normfuse_tensors given = list_of(part, which);
    if (run(call, &given, NULL) != NORMFUSE_OK)
        stop("a part was refused", -1);
}

/* A call in parts of samples has the bits of one call. Where statistics are of all samples they, or the sums, come in
 * parts, and then the rest in one. Group norm's own shards are not promised the same bits; they are not cut here. */
static void check_parts(const struct call *call, const struct copies *whole, const struct normfuse_problem *problem,
                        uint32_t outputs, unsigned quanta)
{
    const bool backward = call->call == BACKWARD, in_two = problem->sets == NORMFUSE_SETS_BATCH;
    if ((call->flags & NORMFUSE_ACCUMULATE) != 0)
        return; /* what is there already is added in another order */
    struct copies copies;
    int64_t quantum;
    if (!copy_tensors(&copies, problem) || normfuse_sample_quantum(&copies.tensors[X], &quantum) != NORMFUSE_OK)
        stop("no quantum of samples", -1);
    uint32_t sliced = 0;
    for (int slot = 0; slot < SLOTS; slot++)
        if (is_big(slot) || (copies.tensors[slot].ndim == 2 && (!in_two || slot >= PRE_BIAS)) ||
            (call->operator == CHANNEL && (BIT(slot) & SAVED) != 0))
            sliced |= BIT(slot);
    struct call part = *call;
    if (in_two) {
        const int joined = backward ? SUMS : STATS;
        add_copy(&copies, joined, (normfuse_dtype){2, 64, 1}, 2, (int64_t[]){problem->c, backward ? 2 : 3});
        allocate_copy(&copies, joined);
        part.call = backward ? BACKWARD_SUMS : STATS_OF;
    }
    /* Instance norm's running statistics are means over all samples. */
    const uint32_t which = copies.present & (in_two ? calls[part.call].takes : ~(outputs & RUNNING));
    const uint32_t added = copies.present & ~sliced & (in_two ? BIT(DSLOPE)
                                                       : BIT(DWEIGHT) | BIT(DBIAS) | BIT(DPRE_BIAS) | BIT(DSLOPE));
    if ((copies.present & BIT(DSLOPE)) != 0 && copies.shapes[DSLOPE][0] != problem->c)
        outputs &= ~BIT(DSLOPE); /* one slope's sums of all channels are added in another order */
    const int64_t step = quantum * (1 + quanta);
    for (int64_t first = 0; first < problem->n; first += step) {
        run_samples(&part, &copies, which, sliced, first, step < problem->n - first ? step : problem->n - first);
        if (in_two || added != 0)
            part.flags |= NORMFUSE_ACCUMULATE;
    }
    if (in_two) {
        part = *call;
        part.call = backward ? BACKWARD_APPLY : APPLY;
        part.set_values = 0; /* a call in one ignores it */
        uint32_t second = copies.present & calls[part.call].takes;
        if (!backward && (copies.present & BIT(U)) != 0) { /* which was normalized, and has what was added */
            copies.tensors[X] = copies.tensors[U];
            second &= ~PRE;
        }
        run_samples(&part, &copies, second, 0, 0, problem->n);
    } else {
        outputs &= which;
    }
    for (int slot = 0; slot < SLOTS; slot++)
        if ((outputs >> slot & 1) && ((added >> slot & 1) == 0 || type_of(&copies.tensors[slot]) == NORMFUSE_F64))
            compare(&copies.tensors[slot], &whole->tensors[slot], slot, "other bits in parts");
    free_copies(&copies);
}

/* ---- one input ------------------------------------------------------------------------------------------------ */

/* kind: as fill has it; what is not ordinary has no reference. */
static void check_results(const struct call *call, uint32_t outputs, unsigned kind, unsigned more)
{
    struct normfuse_problem problem;
    struct copies copies, before;
    const normfuse_tensors original = list_of(tensors, present);
    if (look(call, &original, &problem) != NORMFUSE_OK)
        stop("what was accepted is refused", -1);
    /* The library sees groups without channels as if they had some. */
    problem.c = tensors[X].shape[1];
    problem.s = 1;
    for (int a = 2; a < tensors[X].ndim; a++)
        problem.s *= tensors[X].shape[a];
    if (!copy_tensors(&copies, &problem)) {
        free_copies(&copies);
        return;
    }
    struct normfuse_problem same;
    const normfuse_tensors given = list_of(copies.tensors, present);
    if (look(call, &given, &same) != NORMFUSE_OK || (same.columns != problem.columns && problem.c * problem.s > 1))
        stop("copies are refused, or seen in another picture", -1);
    normfuse_exec exec = {.struct_bytes = sizeof exec, .threads = 1};
    if (run(call, &given, &exec) != NORMFUSE_OK)
        stop("copies are refused", -1);
    for (int slot = 0; slot < SLOTS; slot++)
        if (outputs >> slot & 1)
            compare(&tensors[slot], &copies.tensors[slot], slot, "other bits than those of copies");
    struct difference difference;
    calls_accepted++;
    calls_compared += kind <= 1;
    if (kind <= 1 && copy_tensors(&before, &problem)) {
        if (!call_reference_agrees(call, present, before.tensors, copies.tensors, &difference, &values_compared)) {
            fprintf(stderr, "[%lld, %lld, %lld]: got %.17g, want %.17g within %.3g\n", (long long)difference.n,
                    (long long)difference.c, (long long)difference.s, difference.got, difference.want,
                    difference.bound);
            stop("far from the reference", difference.slot);
        }
        free_copies(&before);
    }
    if (more % 8 == 7)
        check_callers(call, &copies, &problem, outputs);
    if (call->call <= BACKWARD && more / 8 != 0 && problem.n * problem.c * problem.s != 0)
        check_parts(call, &copies, &problem, outputs, more / 8 - 1);
    free_copies(&copies);
}

static void draw_tensors(struct call *call)
{
    const bool evaluates = (call->flags & NORMFUSE_EVALUATE) != 0;
    const int32_t ndim = 2 + (int32_t)take(4);
    const int type = (int)take(4);
    const bool channels_last = take(2), per_sample = take(2);
    static const int64_t huge[] = {INT64_C(1) << 57, INT64_C(1) << 40, INT64_C(1) << 31, INT64_C(1) << 62, INT64_MAX};
    int64_t sizes[NORMFUSE_MAX_AXES];
    for (int a = 0; a < NORMFUSE_MAX_AXES; a++) {
        const unsigned choice = take(64);
        sizes[a] = choice == 63             ? 0
                   : choice == 62           ? huge[take(5)]
                   : choice >= 60 && a == 2 ? 1024 * (take(4) + 1) /* enough for several threads */
                   : choice >= 56 && a == 0 ? 12 * (take(8) + 1)
                                            : choice % (a == 1 ? 40 : 6) + 1;
    }
    const int64_t n = sizes[0], c = sizes[1];
    /* f32 is 0, f64 1, and those of 16 bits 2 and 3. */
    const bool changes_type = call->operator == CHANNEL && type != 1 && take(4) == 3;
    const int type_of_y = !changes_type ? type : type == 0 ? 2 + (int)take(2) : 0;
    int64_t groups = c / ((int64_t)take(4) + 1);
    if (evaluates || groups == 0 || c % groups != 0)
        groups = c;
    if (rarely())
        groups = any_integer();
    call->groups = groups;

    uint32_t mask = call->call == FORWARD_SCRATCH    ? calls[FORWARD].takes | BIT(STATS)
                    : call->call == BACKWARD_SCRATCH ? calls[BACKWARD].takes | BIT(SUMS)
                                                     : calls[call->call].takes;
    const bool has_groups = call->operator == GROUP || call->operator == CHANNEL;
    if (!has_groups)
        mask &= ~ADAPTIVE;
    if (call->operator == CHANNEL)
        mask &= ~(RUNNING | BIT(STATS) | BIT(SUMS) | (call->statistics == NORMFUSE_MEAN_SQUARE ? BIT(MEAN) : 0));
    if (call->operator == AFFINE)
        mask &= ~(BIT(PRE_ADD) | BIT(U) | BIT(DU) | SAVED | RUNNING | BIT(STATS) | BIT(SUMS));
    if (evaluates)
        mask = (mask & ~SAVED) | RUNNING;
    else if (call->operator == GROUP && groups != c)
        mask &= ~RUNNING;
    const bool has_slope = call->activation == NORMFUSE_PRELU, one_slope = has_slope && take(2);
    if (!has_slope)
        mask &= ~(BIT(SLOPE) | BIT(DSLOPE));
    const bool drops_running = take(2);
    if (evaluates && drops_running) /* which it needs: what is of each sample is dropped, and its gradients are not */
        mask &= ~(BIT(SCALE) | BIT(SHIFT));
    for (int slot = 0; slot < SLOTS; slot++) {
        bool is_given = mask >> slot & 1;
        const bool is_running = slot == RUNNING_MEAN || slot == RUNNING_VAR;
        const bool is_needed = slot == X || slot == DY || slot == STATS || slot == SUMS ||
                               (has_slope && slot == SLOPE) || (evaluates && is_running) ||
                               (call->call != FORWARD && call->call != APPLY &&
                                (slot == Y || slot == MEAN || slot == RSTD));
        if (!is_needed)
            is_given &= take(4) != 3;
        if (is_running && drops_running && !evaluates)
            is_given = false;
        if (rarely())
            is_given = !is_given;
        if (!is_given)
            continue;
        present |= BIT(slot);
        if (is_big(slot))
            make_tensor(slot, ndim, sizes, (BIT(slot) & LIKE_Y) != 0 ? type_of_y : type,
                        rarely() ? !channels_last : channels_last);
        else if (call->operator == CHANNEL && (BIT(slot) & SAVED) != 0)
            make_tensor(slot, ndim, (int64_t[]){n, groups, sizes[2], sizes[3], sizes[4]}, type == 1, false);
        else if (slot == MEAN || slot == RSTD)
            call->operator == GROUP ? make_tensor(slot, 2, (int64_t[]){n, groups}, type == 1, false)
                                    : make_tensor(slot, 1, &c, type == 1, false);
        else if (slot == STATS || slot == SUMS)
            call->operator == GROUP
                ? make_tensor(slot, 3, (int64_t[]){n, slot == STATS ? groups : c, slot == STATS ? 3 : 2}, 1, false)
                : make_tensor(slot, 2, (int64_t[]){c, slot == STATS ? 3 : 2}, 1, false);
        else if (slot == SLOPE || slot == DSLOPE)
            make_tensor(slot, 1, one_slope ? (int64_t[]){1} : &c, (int)take(4), false);
        else if (slot == SCALE || slot == SHIFT || slot == DSCALE || slot == DSHIFT ||
                 (call->operator == AFFINE && per_sample && slot < PRE_BIAS) || (slot >= PRE_BIAS && take(2)))
            make_tensor(slot, 2, (int64_t[]){n, c}, (int)take(4), false);
        else
            make_tensor(slot, 1, &c, (int)take(4), false);

        /* In place, or a little beside it. */
        const unsigned alias = is_big(slot) && slot != DY && slot != DU && slot >= Y ? take(8) : 0;
        if (alias < 6)
            continue;
        static const int originals[SLOTS] = {[Y] = X, [U] = PRE_ADD, [DX] = DY, [DPOST_ADD] = DY};
        const int original = take(4) == 3 ? X : originals[slot];
        if ((present >> original & 1) == 0 || block_of[original] < 0)
            continue;
        free(blocks[slot].bytes);
        blocks[slot] = (struct block){0};
        tensors[slot] = tensors[original];
        block_of[slot] = block_of[original];
        broken_rules[slot] = broken_rules[original];
        if (alias == 6 && block_of[slot] == SLOTS)
            tensors[slot].byte_offset += take(SHARED_SHIFTS) * (tensors[slot].dtype.bits / 8);
    }
}

static void draw_options(struct call *call)
{
    const bool one_more_flag = take(8) == 7;
    if (one_more_flag)
        call->flags |= BIT(take(5));
    call->activation = rarely() ? (int32_t)any_integer() : (int32_t)take(NORMFUSE_PRELU + 1);
    call->reserved = rarely() ? 1 : 0;
    call->eps = take(4) == 3 ? any_double() : 1e-5;
    call->act_param = any_double();
    call->momentum = any_double();
    call->batches_seen = rarely() ? any_integer() : take(3);
    call->set_values = rarely() ? any_integer() : 0;
    call->options_bytes_more = rarely() ? take(16) : 0;
    if (call->operator == CHANNEL) {
        call->statistics = rarely() ? (int32_t)any_integer() : (int32_t)take(2);
        call->eps_kind = rarely() ? (int32_t)any_integer() : (int32_t)take(2);
        if (call->eps_kind == NORMFUSE_EPS_OF_NORM && take(2))
            call->eps = 2; /* of norms and saved deviations here, some are clamped */
        if (call->statistics < 0 || call->statistics > NORMFUSE_MEAN_SQUARE || call->eps_kind < 0 ||
            call->eps_kind > NORMFUSE_EPS_OF_NORM)
            broken_rules[SLOTS] = "statistics or a kind of eps that is none";
        else if (call->eps_kind == NORMFUSE_EPS_OF_NORM && !(call->eps >= 0))
            broken_rules[SLOTS] = "options.eps";
    }
    if (call->activation < 0 || call->activation > NORMFUSE_PRELU)
        broken_rules[SLOTS] = "an activation that is none";
    /* y of a backward takes no byte of the input; test_arguments.c has what is refused. */
    const bool backward = call->call == BACKWARD || call->call == BACKWARD_SUMS || call->call == BACKWARD_APPLY ||
                          call->call == BACKWARD_SCRATCH;
    const bool derives = call->activation == NORMFUSE_RELU || call->activation == NORMFUSE_RELU6 ||
                         (call->activation == NORMFUSE_LEAKY_RELU &&
                          ((call->flags & NORMFUSE_HAS_ACT_PARAM) == 0 || call->act_param > 0));
    if (backward && (present & BIT(Y)) != 0 && (!derives || (present & BIT(POST_ADD)) != 0))
        present &= ~BIT(Y);
    if (call->reserved != 0)
        broken_rules[SLOTS] = "options.reserved";
    if (call->options_bytes_more != 0)
        broken_rules[SLOTS] = "options.struct_bytes";
    if ((call->flags & ~15u) != 0 ||
        ((call->operator == AFFINE || call->operator == CHANNEL) && (call->flags & 6) != 0))
        broken_rules[SLOTS] = "options.flags";
    if (call->set_values < 0 && call->operator != AFFINE && call->operator != CHANNEL)
        broken_rules[SLOTS] = "options.set_values";
}

void fuzz_report(void)
{
    printf("# %lld calls were run, %lld of them beside the reference, %lld values\n", (long long)calls_accepted,
           (long long)calls_compared, (long long)values_compared);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input = input_begin = data;
    input_left = size;
    is_out_of_reach = false;
    present = 0;
    memset(broken_rules, 0, sizeof broken_rules);
    memset(blocks, 0, sizeof blocks);
    for (int slot = 0; slot < SLOTS; slot++)
        block_of[slot] = -1;
    blocks[SLOTS].size = SHARED_BYTES;
    blocks[SLOTS].bytes = aligned_alloc(64, SHARED_BYTES);
    memset(blocks[SLOTS].bytes, FILLER, SHARED_BYTES);

    struct call call = {.operator = take(4)};
    const bool is_whole = call.operator == AFFINE || call.operator == CHANNEL; /* there are no calls of shards */
    call.call = is_whole ? (take(2) != 0 ? take(2) + FORWARD_SCRATCH : take(2)) : take(8);
    if (!is_whole && call.call < STATS_OF && take(3) == 2)
        call.flags = NORMFUSE_EVALUATE;
    draw_options(&call);
    draw_tensors(&call);
    drawn = call;
    if (is_out_of_reach && call.call == APPLY) /* which reads counts while it checks its arguments */
        present &= ~BIT(STATS);
    const unsigned kind = take(8), values = kind < 5 ? 0 : kind - 4, more = take(64);
    for (int slot = 0; slot < SLOTS; slot++)
        if (present >> slot & 1)
            fill(slot, values);

    normfuse_tensors given = list_of(tensors, present);
    if (rarely())
        given.struct_bytes += take(16);
    if (rarely())
        given.flags = take(3);
    normfuse_exec exec = {.struct_bytes = sizeof exec, .threads = (int32_t)take(4)};
    if (take(8) == 7)
        exec.parallel_for = any_order;
    if (rarely())
        exec.struct_bytes += take(16);
    if (rarely())
        exec.flags = 2 * take(2); /* 1 is NORMFUSE_PREPARE */
    if (rarely())
        exec.reserved = (int32_t)take(2);
    if (rarely())
        exec.threads = -1;
    if (given.struct_bytes != sizeof given || given.flags != 0)
        broken_rules[SLOTS] = "tensors.struct_bytes or .flags";
    if ((exec.struct_bytes != sizeof exec || exec.flags != 0 || exec.reserved != 0 || exec.threads < 0) &&
        call.call < FORWARD_SCRATCH && !is_out_of_reach)
        broken_rules[SLOTS] = "exec";
    void *scratch = NULL;
    size_t scratch_bytes = 0;
    const unsigned own_scratch = take(8);
    const bool may_ask = own_scratch >= 6 || call.call >= FORWARD_SCRATCH;
    const normfuse_status asked = may_ask ? ask_scratch(&call, &given, &exec, &scratch_bytes) : NORMFUSE_OK;
    if (own_scratch >= 6 && asked == NORMFUSE_OK && scratch_bytes < MOST_BYTES) {
        const size_t offset = own_scratch == 7 && rarely() ? 8 : 0;
        exec.scratch_bytes = scratch_bytes;
        if (posix_memalign(&scratch, 64, scratch_bytes + offset + SCRATCH_GUARD) != 0)
            stop("no memory", -1);
        exec.scratch = (char *)scratch + offset;
        memset((char *)exec.scratch + scratch_bytes, FILLER, SCRATCH_GUARD);
        if (offset != 0 && call.call < FORWARD_SCRATCH && !is_out_of_reach)
            broken_rules[SLOTS] = "exec.scratch that is not aligned";
    }

    for (int block = 0; block <= SLOTS; block++)
        if (blocks[block].bytes != NULL) {
            blocks[block].before = malloc(blocks[block].size);
            memcpy(blocks[block].before, blocks[block].bytes, blocks[block].size);
            blocks[block].owner = calloc(blocks[block].size, 1);
        }
    struct normfuse_problem problem;
    errno = 0;
    const bool runs = !is_out_of_reach && call.call < FORWARD_SCRATCH;
    const normfuse_status status = runs ? run(&call, &given, &exec) : look(&call, &given, &problem);
    if (errno != 0)
        stop("a call set errno", -1);
    if (status != NORMFUSE_OK && normfuse_last_error()[0] == 0)
        stop("a refused call has no message", -1);
    for (int slot = 0; slot <= SLOTS; slot++)
        if (status == NORMFUSE_OK && broken_rules[slot] != NULL)
            stop(broken_rules[slot], slot);
    if (runs && status == NORMFUSE_OK && asked != NORMFUSE_OK)
        stop("a call was accepted, and its question for scratch refused", -1);

    for (size_t i = 0; scratch != NULL && i < SCRATCH_GUARD; i++)
        if (((const unsigned char *)exec.scratch)[scratch_bytes + i] != FILLER)
            stop("a call wrote behind its scratch", -1);

    const bool ran = runs && status == NORMFUSE_OK;
    uint32_t outputs = ran ? present & calls[call.call].writes : 0;
    if ((call.flags & NORMFUSE_EVALUATE) != 0)
        outputs &= ~RUNNING;
    if (ran)
        check_overlaps(outputs);
    for (int b = 0; b <= SLOTS; b++) {
        const struct block *const block = &blocks[b];
        if (block->bytes == NULL || memcmp(block->bytes, block->before, block->size) == 0)
            continue;
        for (size_t i = 0; i < block->size; i++)
            if (block->bytes[i] != block->before[i] && block->owner[i] == 0)
                stop(ran ? "a byte was written that is no output's" : "a refused call wrote", b);
    }
    if (ran)
        check_results(&call, outputs, values, more);
    for (int block = 0; block <= SLOTS; block++) {
        free(blocks[block].bytes);
        free(blocks[block].before);
        free(blocks[block].owner);
    }
    free(scratch);
    return 0;
}
