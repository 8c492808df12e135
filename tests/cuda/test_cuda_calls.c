/* SPDX-License-Identifier: MIT
 *
 * test_cuda_calls.c - calls of the interface on tensors of a GPU, against a driver without one (fake_driver.h): what is
 * refused, scratch memory, tensors without elements, plans that are remembered. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/loader.h"
#include "cuda/schedules.h"
#include "fake_driver.h"
#include "harness.h"
#include "normfuse.h"
#include "package.h"
#include "refused.h"

static const uintptr_t scratch_address = (uintptr_t)0x7f8000000000;
static pthread_barrier_t barrier; /* threads that begin together */

/* ---- the interface --------------------------------------------------------------------------------------------- */

static void test_interface(void)
{
    fake_driver_reset();
    fake_driver_use();
    size_t bytes = 0;
    CHECK(normfuse_sync_bytes(0, &bytes) == NORMFUSE_OK && bytes == 65536, "sync bytes: %zu", bytes);
    CHECK(normfuse_sync_bytes(63, &bytes) == NORMFUSE_OK && bytes == 65536, "sync bytes of device 63: %zu", bytes);
    REFUSED(NORMFUSE_BAD_ARGUMENT, normfuse_sync_bytes(0, NULL), "bytes is NULL");
    REFUSED(NORMFUSE_BAD_ARGUMENT, normfuse_sync_bytes(-1, &bytes), "device is -1");

    /* Addresses that nothing reads. */
    static _Alignas(64) char memory[2 * 4 * 64 * 4 + 65536];
    int64_t sizes[] = {2, 4, 8, 8}, samples = 0;
    normfuse_axes axes_x, axes_y;
    normfuse_tensor x = normfuse_tensor_contiguous(memory, NORMFUSE_F32, 4, sizes, &axes_x);
    normfuse_tensor y = normfuse_tensor_contiguous(memory, NORMFUSE_F32, 4, sizes, &axes_y);
    x.device = y.device = (normfuse_device){NORMFUSE_CUDA, 0};
    CHECK(normfuse_sample_quantum(&x, &samples) == NORMFUSE_OK && samples == 1, "sample quantum: %d", (int)samples);

    const normfuse_group_norm_options options = {.struct_bytes = sizeof options, .groups = 2, .eps = 1e-5};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &x, .y = &y};
    normfuse_exec exec = {.struct_bytes = sizeof exec, .sync = memory + 4, .sync_bytes = 65536};
    REFUSED(NORMFUSE_BAD_POINTER, normfuse_group_norm_forward(&options, &tensors, &exec), "exec.sync", "64 bytes");
    exec.sync = memory + 64;
    exec.sync_bytes = 65535;
    REFUSED(NORMFUSE_SCRATCH, normfuse_group_norm_forward(&options, &tensors, &exec), "exec.sync_bytes is 65535",
            "65536");
    CHECK(fake_driver.launches == 0, "a refused call launched");

    x.device.device_id = y.device.device_id = 5;
    REFUSED(NORMFUSE_BAD_ARGUMENT, normfuse_group_norm_forward(&options, &tensors, NULL), "group_norm forward",
            "no CUDA device 5");
    REFUSED(NORMFUSE_BAD_ARGUMENT, normfuse_group_norm_forward_scratch_bytes(&options, &tensors, NULL, &bytes),
            "no CUDA device 5");
    double stats[2][3] = {{0}};
    int64_t in_sizes[] = {2, 3}, out_sizes[] = {3};
    normfuse_axes axes_in, axes_out;
    normfuse_tensor in = normfuse_tensor_contiguous(stats, NORMFUSE_F64, 2, in_sizes, &axes_in);
    normfuse_tensor out = normfuse_tensor_contiguous(stats, NORMFUSE_F64, 1, out_sizes, &axes_out);
    in.device = out.device = (normfuse_device){NORMFUSE_CUDA, 5};
    REFUSED(NORMFUSE_BAD_ARGUMENT, normfuse_stats_merge(&in, &out, NULL), "stats_merge", "no CUDA device 5");
}

/* The size that ..._scratch_bytes says is enough, and a call refuses to do with less. Sizes from one block's to the
 * whole device's: which of them need scratch is the choice of kernels. */
static void test_scratch(void)
{
    fake_driver_reset();
    fake_driver_use();
    static _Alignas(64) char scratch[64];
    void *const address = (void *)(uintptr_t)0x7f0000000000; /* of a device: nothing reads it here */
    int needing = 0;
    for (int64_t size = 8; size <= 8192; size *= 4) {
        int64_t sizes[] = {1, 64, size, size};
        normfuse_axes axes_x, axes_y;
        normfuse_tensor x = normfuse_tensor_contiguous(address, NORMFUSE_F32, 4, sizes, &axes_x);
        normfuse_tensor y = normfuse_tensor_contiguous(address, NORMFUSE_F32, 4, sizes, &axes_y);
        x.device = y.device = (normfuse_device){NORMFUSE_CUDA, 0};
        const normfuse_group_norm_options options = {.struct_bytes = sizeof options, .groups = 1, .eps = 1e-5};
        const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &x, .y = &y};
        size_t bytes = 0, needed = 0;
        CHECK(normfuse_group_norm_forward_scratch_bytes(&options, &tensors, NULL, &bytes) == NORMFUSE_OK, "size %d: %s",
              (int)size, normfuse_last_error());
        int launches = fake_driver.launches;
        normfuse_exec exec = {.struct_bytes = sizeof exec};
        const normfuse_status without = normfuse_group_norm_forward(&options, &tensors, NULL);
        /* The halves of a sharded call may need scratch that the whole call does not. */
        if (without != NORMFUSE_OK) {
            const char *const said = strstr(normfuse_last_error(), "needs ");
            needing++;
            CHECK(said != NULL && sscanf(said, "needs %zu", &needed) == 1 && needed > 0 && needed <= bytes,
                  "size %d: %zu bytes asked for: %s", (int)size, bytes, normfuse_last_error());
            REFUSED(NORMFUSE_SCRATCH, without, "exec.scratch is NULL");
            REFUSED(NORMFUSE_SCRATCH, normfuse_group_norm_forward(&options, &tensors, &exec), "exec.scratch is NULL");
            exec.scratch = scratch;
            exec.scratch_bytes = needed - 1;
            REFUSED(NORMFUSE_SCRATCH, normfuse_group_norm_forward(&options, &tensors, &exec), "exec.scratch_bytes is");
            CHECK(fake_driver.launches == launches, "a refused call launched");
        }
        launches = fake_driver.launches;
        exec.scratch = scratch;
        exec.scratch_bytes = bytes;
        CHECK(normfuse_group_norm_forward(&options, &tensors, &exec) == NORMFUSE_OK, "size %d: %s", (int)size,
              normfuse_last_error());
        CHECK(fake_driver.launches > launches, "nothing was launched");
    }
    CHECK(needing > 0, "no problem of this test needs scratch");
}

/* A shard without samples still writes its sums, for which scratch may be needed. */
static void test_scratch_of_empty_shards(void)
{
    fake_driver_reset();
    fake_driver_use();
    char *const address = (char *)(uintptr_t)0x7f0000000000;
    int64_t sizes[] = {0, 8, 5}, channels[] = {8}, pairs[] = {8, 2};
    normfuse_axes axes, axes_of_channels, axes_of_sums;
    normfuse_tensor x = normfuse_tensor_contiguous(address, NORMFUSE_F32, 3, sizes, &axes);
    normfuse_tensor saved = normfuse_tensor_contiguous(address, NORMFUSE_F32, 1, channels, &axes_of_channels);
    normfuse_tensor sums = normfuse_tensor_contiguous(address + 4096, NORMFUSE_F64, 2, pairs, &axes_of_sums);
    x.device = saved.device = sums.device = (normfuse_device){NORMFUSE_CUDA, 0};
    const normfuse_batch_norm_options options = {.struct_bytes = sizeof options, .eps = 1e-5};
    const normfuse_tensors tensors = {
        .struct_bytes = sizeof tensors, .x = &x, .dy = &x, .mean = &saved, .rstd = &saved, .sums = &sums};
    normfuse_exec exec = {.struct_bytes = sizeof exec, .scratch = address};
    CHECK(normfuse_batch_norm_backward_scratch_bytes(&options, &tensors, NULL, &exec.scratch_bytes) == NORMFUSE_OK,
          "%s", normfuse_last_error());
    CHECK(normfuse_batch_norm_backward_sums(&options, &tensors, &exec) == NORMFUSE_OK, "%s", normfuse_last_error());
}

/* Results in the place of x, gradients in that of dy; a backward has statistics where there are sets. */
static normfuse_tensors in_place(const normfuse_tensor *x, const normfuse_tensor *statistics, bool backward)
{
    normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = x};
    if (!backward) {
        tensors.y = x;
        return tensors;
    }
    tensors.dy = tensors.dx = x;
    tensors.mean = tensors.rstd = statistics;
    return tensors;
}

/* ---- tensors without elements --------------------------------------------------------------------------------- */

enum { EMPTY_TENSORS = 32 };

/* The tensors of one call; those without elements have no memory. */
struct empty_call {
    normfuse_axes axes[EMPTY_TENSORS];
    normfuse_tensor tensors[EMPTY_TENSORS];
    int count;
    bool channels_last;
};

static const normfuse_tensor *add_tensor(struct empty_call *call, normfuse_type type, int32_t ndim,
                                         const int64_t *sizes)
{
    int64_t elements = 1;
    for (int32_t a = 0; a < ndim; a++)
        elements *= sizes[a];
    const int i = call->count++;
    void *const data = elements > 0 ? (void *)((uintptr_t)(i + 1) << 36) : NULL;
    call->tensors[i] = (call->channels_last && ndim == 3 && type == NORMFUSE_F32
                            ? normfuse_tensor_channels_last
                            : normfuse_tensor_contiguous)(data, type, ndim, sizes, &call->axes[i]);
    call->tensors[i].device = (normfuse_device){NORMFUSE_CUDA, 0};
    return &call->tensors[i];
}

/* Every entry point of one operator, by struct empty_part. */
struct empty_part {
    bool backward, sharded, second; /* second: ..._apply, ..._backward_apply */
};

static normfuse_status call_empty(int op, int64_t groups, uint32_t flags, const struct empty_part *part,
                                  const normfuse_tensors *tensors, const normfuse_exec *exec, size_t *bytes)
{
    const normfuse_group_norm_options group = {
        .struct_bytes = sizeof group, .flags = flags, .groups = groups, .eps = 1e-5, .momentum = 0.1};
    const normfuse_batch_norm_options batch = {.struct_bytes = sizeof batch, .flags = flags, .eps = 1e-5,
                                               .momentum = 0.1};
    const normfuse_affine_options affine = {.struct_bytes = sizeof affine, .flags = flags};
#define WHOLE(name, direction, options)                                                                                \
    (bytes != NULL ? normfuse_##name##_##direction##_scratch_bytes(options, tensors, exec, bytes)                      \
                   : normfuse_##name##_##direction(options, tensors, exec))
#define ANY(name, options)                                                                                             \
    (bytes != NULL || !part->sharded                                                                                   \
         ? (part->backward ? WHOLE(name, backward, options) : WHOLE(name, forward, options))                           \
     : part->backward ? (part->second ? normfuse_##name##_backward_apply : normfuse_##name##_backward_sums)(           \
                            options, tensors, exec)                                                                    \
                      : (part->second ? normfuse_##name##_apply : normfuse_##name##_stats)(options, tensors, exec))
    return op < 2    ? ANY(group_norm, &group)
           : op == 2 ? ANY(batch_norm, &batch)
                     : (part->backward ? WHOLE(affine, backward, &affine) : WHOLE(affine, forward, &affine));
#undef ANY
#undef WHOLE
}

/* op: group norm, instance norm, batch norm, affine. sizes: N, C, positions, of which one at least is 0. */
static void run_empty(int op, const struct empty_part *part, const int64_t *sizes, bool has_running, bool evaluates,
                      bool channels_last)
{
    char name[160];
    snprintf(name, sizeof name, "operator %d, %s%s%s of %lldx%lldx%lld%s%s%s", op,
             part->backward ? "backward" : "forward",
             part->sharded ? " of shards" : "", part->second ? ", its second part" : "", (long long)sizes[0],
             (long long)sizes[1], (long long)sizes[2], has_running ? " running" : "", evaluates ? " eval" : "",
             channels_last ? " nhwc" : "");
    const bool is_norm = op < 3, has_statistics = is_norm && !evaluates;
    const int64_t groups = op == 0 ? 2 : sizes[1], sets = op < 2 ? sizes[0] * groups : sizes[1];
    const int64_t triples[] = {sets, 3}, pairs[] = {op < 2 ? sizes[0] * sizes[1] : sizes[1], 2};
    struct empty_call call = {.channels_last = channels_last};
    normfuse_tensors tensors = {.struct_bytes = sizeof tensors};
    bool writes = false; /* something that has elements */
#define BIG(field) tensors.field = add_tensor(&call, NORMFUSE_F32, 3, sizes)
#define SMALL(field, ndim, of) tensors.field = add_tensor(&call, NORMFUSE_F32, ndim, of)
#define OUTPUT(field, ndim, of)                                                                                        \
    SMALL(field, ndim, of);                                                                                            \
    writes = writes || tensors.field->data != NULL
    const bool only_stats = part->sharded && !part->backward && !part->second;
    const bool only_sums = part->sharded && part->backward && !part->second;
    BIG(x);
    if (is_norm)
        BIG(pre_add);
    if (!only_stats) {
        BIG(post_add);
        SMALL(weight, 1, &sizes[1]);
        SMALL(bias, 1, &sizes[1]);
    }
    if (part->backward) {
        BIG(dy);
        if (!only_sums) {
            BIG(dx);
            OUTPUT(dweight, 1, &sizes[1]);
            OUTPUT(dbias, 1, &sizes[1]);
        }
        if (has_statistics) {
            SMALL(mean, 1, &sets);
            SMALL(rstd, 1, &sets);
        }
    } else if (!only_stats) {
        BIG(y);
        if (has_statistics) {
            OUTPUT(mean, 1, &sets);
            OUTPUT(rstd, 1, &sets);
        }
    }
    if (op < 2 && !only_stats) {
        SMALL(scale, 2, sizes);
        SMALL(shift, 2, sizes);
        if (part->backward && !only_sums) {
            OUTPUT(dscale, 2, sizes);
            OUTPUT(dshift, 2, sizes);
        }
    }
    if (has_running) {
        SMALL(running_mean, 1, &sizes[1]);
        SMALL(running_var, 1, &sizes[1]);
        writes = writes || (part->second && sets > 0);
    }
    if (part->sharded) {
        *(part->backward ? &tensors.sums : &tensors.stats) =
            add_tensor(&call, NORMFUSE_F64, 2, part->backward ? pairs : triples);
        writes = writes || (!part->second && (part->backward ? pairs : triples)[0] > 0);
    }
#undef OUTPUT
#undef SMALL
#undef BIG
    const uint32_t flags = evaluates ? NORMFUSE_EVALUATE : 0;
    for (int has_sync = 0; has_sync < 2; has_sync++) {
        normfuse_exec exec = {.struct_bytes = sizeof exec};
        if (has_sync) {
            exec.sync = (void *)((uintptr_t)1 << 45);
            exec.sync_bytes = NORMFUSE_CUDA_SYNC_BYTES;
        }
        CHECK(call_empty(op, groups, flags, part, &tensors, &exec, &exec.scratch_bytes) == NORMFUSE_OK,
              "%s: scratch: %s", name, normfuse_last_error());
        exec.scratch = exec.scratch_bytes > 0 ? (void *)scratch_address : NULL;
        fake_driver.launches = 0;
        CHECK(call_empty(op, groups, flags, part, &tensors, &exec, NULL) == NORMFUSE_OK, "%s: %s", name,
              normfuse_last_error());
        CHECK(writes ? fake_driver.launches > 0 : fake_driver.launches == 0, "%s: %d kernels", name,
              fake_driver.launches);
        for (int i = 0; i < fake_driver.launches && i < FAKE_LAUNCHES; i++)
            CHECK(fake_driver.launch[i].grid > 0, "%s: %s has no blocks", name, fake_driver.launch[i].name);
    }
}

/* Every entry point, of tensors without samples, channels or positions, or without several of these. */
static void test_empty(void)
{
    static const struct empty_part parts[] = {{false, false, false}, {true, false, false}, {false, true, false},
                                              {false, true, true},   {true, true, false},  {true, true, true}};
    fake_driver_reset();
    fake_driver_use();
    for (int op = 0; op < 4; op++)
        for (size_t i = 0; i < (op == 3 ? 2 : sizeof parts / sizeof *parts); i++)
            for (int lacks = 1; lacks < 8; lacks++)
                for (int mode = 0; mode < (op == 0 || op == 3 ? 1 : 3); mode++) {
                    const struct empty_part *const part = &parts[i];
                    const int64_t sizes[] = {lacks & 1 ? 0 : 2, lacks & 2 ? 0 : 6, lacks & 4 ? 0 : 5};
                    const bool evaluates = mode == 2, updates = mode == 1;
                    if ((evaluates && part->sharded) ||
                        (updates && (part->backward || (part->sharded && !part->second))))
                        continue;
                    run_empty(op, part, sizes, mode > 0, evaluates, false);
                    run_empty(op, part, sizes, mode > 0, evaluates, true);
                }
}

/* Shards that there are none of, and of norm groups that there are none of. */
static void test_empty_merges(void)
{
    fake_driver_reset();
    fake_driver_use();
    for (int lacks = 1; lacks < 4; lacks++)
        for (int64_t width = 2; width <= 3; width++) {
            const int64_t of_in[] = {lacks & 1 ? 0 : 2, lacks & 2 ? 0 : 6, width};
            struct empty_call call = {.count = 0};
            const normfuse_tensor *const in = add_tensor(&call, NORMFUSE_F64, 3, of_in),
                                  *const out = add_tensor(&call, NORMFUSE_F64, 2, of_in + 1);
            fake_driver.launches = 0;
            CHECK((width == 3 ? normfuse_stats_merge : normfuse_sums_merge)(in, out, NULL) == NORMFUSE_OK,
                  "%dx%d: %s", (int)of_in[0], (int)of_in[1], normfuse_last_error());
            CHECK(fake_driver.launches == (of_in[1] > 0), "%dx%d: %d kernels", (int)of_in[0], (int)of_in[1],
                  fake_driver.launches);
        }
}

/* More problems than are remembered, so that some are asked for again after they were given up. */
enum { REMEMBERED = 3000, OF_A_NETWORK = 60, ASKING = 4 };
static size_t scratch_of_problem[REMEMBERED];

static size_t request_scratch(int i)
{
    void *const address = (void *)0x100000000000, *const elsewhere = (void *)0x200000000000;
    const bool backward = i % 3 == 0;
    const int64_t sizes[] = {1 + i % 7, 64, 8 + i, 16 + i % 5};
    const normfuse_type type = (normfuse_type)(1 + i % 2);
    normfuse_axes axes[3];
    normfuse_tensor x = normfuse_tensor_channels_last(address, type, 4, sizes, &axes[0]);
    x.device = (normfuse_device){NORMFUSE_CUDA, 0};
    const int64_t sets[] = {sizes[0], 8};
    normfuse_tensor mean = normfuse_tensor_contiguous(elsewhere, NORMFUSE_F32, 2, sets, &axes[1]);
    mean.device = x.device;
    const normfuse_group_norm_options options = {.struct_bytes = sizeof options, .groups = 8, .eps = 1e-5};
    const normfuse_tensors tensors = in_place(&x, &mean, backward);
    size_t bytes = SIZE_MAX;
    const normfuse_status status =
        (backward ? normfuse_group_norm_backward_scratch_bytes
                  : normfuse_group_norm_forward_scratch_bytes)(&options, &tensors, NULL, &bytes);
    return status == NORMFUSE_OK ? bytes : SIZE_MAX;
}

static void *request_in_thread(void *argument)
{
    int *const wrong = argument;
    int seed = *wrong;
    *wrong = 0;
    pthread_barrier_wait(&barrier);
    for (int round = 0; round < 2 * REMEMBERED; round++) {
        seed = (int)((seed * INT64_C(48271) + 11) % INT32_MAX);
        /* Mostly few problems, as a network has. */
        const int i = seed % (round % 8 == 0 ? REMEMBERED : OF_A_NETWORK);
        *wrong += request_scratch(i) != scratch_of_problem[i];
    }
    return NULL;
}

static void test_plans_remembered(void)
{
    fake_driver_reset();
    fake_driver_use();
    int different = 0;
    for (int i = 0; i < REMEMBERED; i++) {
        scratch_of_problem[i] = request_scratch(i);
        CHECK(scratch_of_problem[i] != SIZE_MAX, "problem %d: %s", i, normfuse_last_error());
        different += i >= 3 && scratch_of_problem[i] != scratch_of_problem[i - 3];
    }
    CHECK(different > REMEMBERED / 4, "only %d problems need other scratch than the one before them", different);
    pthread_t threads[ASKING];
    int wrong[ASKING];
    pthread_barrier_init(&barrier, NULL, ASKING);
    for (int i = 0; i < ASKING; i++) {
        wrong[i] = i + 1;
        pthread_create(&threads[i], NULL, request_in_thread, &wrong[i]);
    }
    for (int i = 0; i < ASKING; i++) {
        pthread_join(threads[i], NULL);
        CHECK(wrong[i] == 0, "thread %d: %d answers differ from the first ones", i, wrong[i]);
    }
    pthread_barrier_destroy(&barrier);
    /* Another driver is another device, whatever its number: of what was asked for last all is still remembered. */
    for (int i = REMEMBERED - OF_A_NETWORK; i < REMEMBERED; i++)
        CHECK(request_scratch(i) == scratch_of_problem[i], "problem %d has another answer than before", i);
    fake_driver_reset();
    fake_driver.device[0].multiprocessors = 40;
    fake_driver_use();
    int same = 0;
    for (int i = REMEMBERED - OF_A_NETWORK; i < REMEMBERED; i++) {
        const size_t bytes = request_scratch(i);
        CHECK(bytes != SIZE_MAX, "problem %d: %s", i, normfuse_last_error());
        same += bytes == scratch_of_problem[i];
    }
    CHECK(same < OF_A_NETWORK / 2, "%d of %d answers are those of a device with more multiprocessors", same,
          (int)OF_A_NETWORK);
}

/* The last kernel of a forward over channels-last bf16 tensors; `apart`: elements between their samples. */
static const struct fake_launch *launch_forward(bool batch, normfuse_type weight_type, int64_t apart)
{
    const int64_t sizes[] = {4, 64, 10000};
    normfuse_axes axes[2], of_weight;
    normfuse_tensor big[2];
    for (int i = 0; i < 2; i++) {
        big[i] = normfuse_tensor_channels_last((void *)(uintptr_t)((i + 1) * INT64_C(0x100000000000)), NORMFUSE_BF16, 3,
                                               sizes, &axes[i]);
        big[i].device = (normfuse_device){NORMFUSE_CUDA, 0};
        axes[i].strides[0] += apart;
    }
    normfuse_tensor weight = normfuse_tensor_contiguous((void *)0x300000000000, weight_type, 1, &sizes[1], &of_weight);
    weight.device = big[0].device;
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &big[0], .y = &big[1], .weight = &weight};
    const normfuse_group_norm_options group = {.struct_bytes = sizeof group, .groups = 8, .eps = 1e-5};
    const normfuse_batch_norm_options of_batch = {.struct_bytes = sizeof of_batch, .eps = 1e-5};
    const normfuse_exec exec = {
        .struct_bytes = sizeof exec, .scratch = (void *)scratch_address, .scratch_bytes = 1 << 20};
    fake_driver.launches = 0;
    CHECK((batch ? normfuse_batch_norm_forward(&of_batch, &tensors, &exec)
                 : normfuse_group_norm_forward(&group, &tensors, &exec)) == NORMFUSE_OK && fake_driver.launches > 0,
          "%s", normfuse_last_error());
    return &fake_driver.launch[fake_driver.launches - 1];
}

/* A plan that was made for a device before is not of this one. */
static void use_fresh_driver(void)
{
    fake_driver_reset();
    fake_driver.notes_arguments = true;
    fake_driver_use();
}

/* Samples that all count together are one where they are adjacent, and only there. */
static void test_samples_apart(void)
{
    use_fresh_driver();
    for (int64_t apart = 0; apart <= 64; apart += 64) {
        struct normfuse_stream_arguments a;
        memcpy(&a, launch_forward(true, NORMFUSE_F32, apart)->arguments, sizeof a);
        CHECK(a.samples == (apart ? 4 : 1) && (int64_t)a.rows * a.samples == 40000,
              "%lld elements between samples: %d samples of %d rows", (long long)apart, (int)a.samples, (int)a.rows);
    }
}

/* A problem of the same sizes with parameters of another type has another plan. */
static void test_plan_of_parameters(void)
{
    static const normfuse_type types[] = {NORMFUSE_F64, NORMFUSE_F32, NORMFUSE_F64, NORMFUSE_BF16};
    use_fresh_driver();
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const struct fake_launch *const launch = launch_forward(false, types[i], 0);
        const int32_t weight = fake_driver_signature(launch->kernel).weight;
        CHECK(weight == 1 + (int32_t)types[i], "weights of type %d have a kernel of those of %d", (int)types[i],
              (int)weight - 1);
    }
}

int main(void)
{
    setenv("NORMFUSE_NVRTC", NORMFUSE_FAKE_NVRTC, 1);
    setenv("NORMFUSE_CACHE_DIR", "", 1);
    test_interface();
    test_scratch();
    test_scratch_of_empty_shards();
    test_empty();
    test_empty_merges();
    test_plans_remembered();
    test_samples_apart();
    test_plan_of_parameters();
    normfuse_cuda_use_driver(NULL);
    return harness_close();
}
