/* SPDX-License-Identifier: MIT
 *
 * test_failures.c - each allocation, file, thread and library that the library asks for is refused in turn, for each
 * kind of call: the call says so and writes nothing, or does without and writes the same; nothing leaks; the next call
 * works. The linker puts the functions below in the place of libc's (--wrap). A process of its own for each refusal,
 * since much is asked for once. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"
#include "normfuse.h"
#include "package.h"
#ifdef NORMFUSE_FAKE_LIBCUDA
#include "tests/cuda/fake_driver.h"
#endif

/* ---- what may be refused ---------------------------------------------------------------------------------------- */

static atomic_int asked, live; /* requests so far; blocks and files that were not given back */
static int refused_from, refused_to;

static bool is_refused(void)
{
    const int request = atomic_fetch_add(&asked, 1) + 1;
    return request >= refused_from && request <= refused_to;
}

static void *counted(void *block)
{
    atomic_fetch_add(&live, block != NULL);
    return block;
}

/* The linker's names */
void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void __real_free(void *block);
FILE *__real_fopen(const char *path, const char *mode);
int __real_fclose(FILE *file);
void *__real_dlopen(const char *path, int flags);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument);
int __real_pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void));
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void __wrap_free(void *block);
FILE *__wrap_fopen(const char *path, const char *mode);
int __wrap_fclose(FILE *file);
void *__wrap_dlopen(const char *path, int flags);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument);
int __wrap_pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void));

void *__wrap_malloc(size_t bytes)
{
    return is_refused() ? NULL : counted(__real_malloc(bytes));
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return is_refused() ? NULL : counted(__real_calloc(count, bytes));
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    return is_refused() ? NULL : counted(__real_aligned_alloc(alignment, bytes));
}

void __wrap_free(void *block)
{
    atomic_fetch_sub(&live, block != NULL);
    __real_free(block);
}

FILE *__wrap_fopen(const char *path, const char *mode)
{
    return is_refused() ? NULL : counted(__real_fopen(path, mode));
}

int __wrap_fclose(FILE *file)
{
    atomic_fetch_sub(&live, 1);
    return __real_fclose(file);
}

void *__wrap_dlopen(const char *path, int flags)
{
    if (is_refused())
        return __real_dlopen("/none", flags); /* sets dlerror */
#ifdef NORMFUSE_FAKE_LIBCUDA
    if (strcmp(path, "libcuda.so.1") == 0)
        return __real_dlopen(NORMFUSE_FAKE_LIBCUDA, flags);
#endif
    return __real_dlopen(path, flags);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
    return is_refused() ? EAGAIN : __real_pthread_create(thread, attributes, start, argument);
}

int __wrap_pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void))
{
    return is_refused() ? ENOMEM : __real_pthread_atfork(prepare, parent, child);
}

/* ---- the calls -------------------------------------------------------------------------------------------------- */

enum { N = 2, C = 64, S = 1024, VALUES = N * C * S, GROUPS = 8 };

/* Memory that parent and children share: a call's outputs, and those of a call of which nothing was refused. */
static struct shared {
    struct results {
        float y[VALUES], mean[C], rstd[C], dweight[C], dbias[C];
        double stats[C][3], sums[C][2];
        size_t bytes;
        int launches;
    } results, wanted;
    int requests; /* of the call when nothing is refused */
} *shared;

static float x[VALUES], dy[VALUES], saved_mean[C], saved_rstd[C];
static double given_stats[C][3], given_sums[C][2], shards[2][C][3];
static normfuse_axes axes[8];
static normfuse_tensor tx, tdy, ty, channel[6], tstats, tsums, tshards, saved_stats, saved_sums;
static const normfuse_group_norm_options group = {
    .struct_bytes = sizeof group, .groups = GROUPS, .eps = 1e-5, .activation = NORMFUSE_SILU};
static const normfuse_batch_norm_options batch = {.struct_bytes = sizeof batch, .eps = 1e-5};
static const normfuse_affine_options affine = {.struct_bytes = sizeof affine};
static const normfuse_exec exec = {.struct_bytes = sizeof exec, .threads = 4};

static void make_tensors(void)
{
    struct results *const to = &shared->results;
    for (int i = 0; i < VALUES; i++) {
        x[i] = (float)((uint32_t)i * 2654435761u >> 16) * 0x1p-12f;
        dy[i] = (float)((uint32_t)i * 2246822519u >> 16) * 0x1p-15f;
    }
    for (int i = 0; i < C; i++) {
        saved_mean[i] = 8;
        saved_rstd[i] = 0.25f;
        memcpy(given_stats[i], (double[]){VALUES / C, 8, 16 * VALUES / C}, sizeof given_stats[i]);
        memcpy(given_sums[i], (double[]){1, 2}, sizeof given_sums[i]);
        for (int k = 0; k < 2; k++)
            memcpy(shards[k][i], given_stats[i], sizeof given_stats[i]);
    }
    const int64_t sizes[] = {N, C, S}, of_channels[] = {C}, of_stats[] = {C, 3}, of_sums[] = {C, 2},
                            of_shards[] = {2, C, 3};
    tx = tdy = ty = normfuse_tensor_channels_last(x, NORMFUSE_F32, 3, sizes, &axes[0]);
    tdy.data = dy;
    ty.data = to->y;
    float *const data[] = {to->mean, to->rstd, to->dweight, to->dbias, saved_mean, saved_rstd};
    for (int i = 0; i < 6; i++)
        channel[i] = normfuse_tensor_contiguous(data[i], NORMFUSE_F32, 1, of_channels, &axes[1]);
    tstats = saved_stats = normfuse_tensor_contiguous(to->stats, NORMFUSE_F64, 2, of_stats, &axes[2]);
    tsums = saved_sums = normfuse_tensor_contiguous(to->sums, NORMFUSE_F64, 2, of_sums, &axes[3]);
    saved_stats.data = given_stats;
    saved_sums.data = given_sums;
    tshards = normfuse_tensor_contiguous(shards, NORMFUSE_F64, 3, of_shards, &axes[4]);
}

#define TENSORS(...) &(const normfuse_tensors){.struct_bytes = sizeof(normfuse_tensors), .x = &tx, __VA_ARGS__}
#define SAVED .mean = &channel[4], .rstd = &channel[5]
#define GRADIENTS .dweight = &channel[2], .dbias = &channel[3]

static normfuse_status group_forward(void)
{
    return normfuse_group_norm_forward(&group, TENSORS(.y = &ty), &exec);
}

static normfuse_status group_backward(void)
{
    const int64_t sizes[] = {N, GROUPS};
    normfuse_axes of_groups;
    const normfuse_tensor mean = normfuse_tensor_contiguous(saved_mean, NORMFUSE_F32, 2, sizes, &of_groups),
                          rstd = normfuse_tensor_contiguous(saved_rstd, NORMFUSE_F32, 2, sizes, &of_groups);
    return normfuse_group_norm_backward(&group, TENSORS(.dy = &tdy, .mean = &mean, .rstd = &rstd, .dx = &ty, GRADIENTS),
                                        &exec);
}

static normfuse_status batch_forward(void)
{
    return normfuse_batch_norm_forward(&batch, TENSORS(.y = &ty, .mean = &channel[0], .rstd = &channel[1]), &exec);
}

static normfuse_status batch_backward(void)
{
    return normfuse_batch_norm_backward(&batch, TENSORS(.dy = &tdy, SAVED, .dx = &ty, GRADIENTS), &exec);
}

static normfuse_status batch_stats(void)
{
    return normfuse_batch_norm_stats(&batch, TENSORS(.stats = &tstats), &exec);
}

/* u is nowhere but in memory of the call. */
static normfuse_status batch_stats_of_sum(void)
{
    return normfuse_batch_norm_stats(&batch, TENSORS(.pre_add = &tdy, .pre_bias = &channel[5], .stats = &tstats),
                                     &exec);
}

static normfuse_status batch_apply(void)
{
    return normfuse_batch_norm_apply(&batch, TENSORS(.stats = &saved_stats, .y = &ty, .mean = &channel[0]), &exec);
}

static normfuse_status batch_backward_sums(void)
{
    return normfuse_batch_norm_backward_sums(&batch, TENSORS(.dy = &tdy, SAVED, .sums = &tsums), &exec);
}

static normfuse_status batch_backward_apply(void)
{
    return normfuse_batch_norm_backward_apply(
        &batch, TENSORS(.dy = &tdy, SAVED, .sums = &saved_sums, .dx = &ty, GRADIENTS), &exec);
}

static normfuse_status affine_forward(void)
{
    return normfuse_affine_forward(&affine, TENSORS(.weight = &channel[5], .y = &ty), &exec);
}

static normfuse_status affine_backward(void)
{
    return normfuse_affine_backward(&affine, TENSORS(.weight = &channel[5], .dy = &tdy, .dx = &ty, GRADIENTS), &exec);
}

static normfuse_status merge(void)
{
    return normfuse_stats_merge(&tshards, &tstats, &exec);
}

static normfuse_status fold(void)
{
    const int64_t sizes[] = {C, 1};
    normfuse_axes of_weight;
    const normfuse_tensor weight = normfuse_tensor_contiguous(saved_mean, NORMFUSE_F32, 2, sizes, &of_weight),
                          new_weight = normfuse_tensor_contiguous(shared->results.dweight, NORMFUSE_F32, 2, sizes,
                                                                  &of_weight);
    const normfuse_tensors tensors = {
        .struct_bytes = sizeof tensors, .running_mean = &channel[4], .running_var = &channel[5]};
    return normfuse_batch_norm_fold(&tensors, 1e-5, 0, &weight, NULL, &new_weight, &channel[3]);
}

static normfuse_status scratch_bytes(void)
{
    return normfuse_batch_norm_backward_scratch_bytes(
        &batch, TENSORS(.dy = &tdy, SAVED, .dx = &ty),
        &(const normfuse_exec){.struct_bytes = sizeof exec, .threads = 1}, &shared->results.bytes);
}

#ifdef NORMFUSE_FAKE_LIBCUDA
enum { OF_DRIVER = 2 };
#else
enum { OF_DRIVER = 0 };
#endif

/* Files that cannot be read leave facts unknown: what is said is not compared. */
static normfuse_status info(void)
{
    normfuse_information said = {.struct_bytes = sizeof said};
    const normfuse_status status = normfuse_info(&said);
    return status == NORMFUSE_OK && (said.isa == NULL || said.cpu == NULL || said.cuda == NULL || said.threads < 1)
               ? NORMFUSE_DEVICE_ERROR
               : status;
}

#ifdef NORMFUSE_FAKE_LIBCUDA
static struct fake_driver *driver;
static void *const address = (void *)(uintptr_t)0x7f0000000000; /* of the device: nothing reads it here */

static void find_driver(void)
{
    void *const library = __real_dlopen(NORMFUSE_FAKE_LIBCUDA, RTLD_NOW | RTLD_LOCAL);
    void (*reset)(void);
    void *const symbol = dlsym(library, "fake_driver_reset");
    memcpy(&reset, &symbol, sizeof reset);
    driver = dlsym(library, "fake_driver");
    reset();
}

static normfuse_status prepare(void)
{
    return normfuse_prepare(0);
}

/* Legal without memory: NULL is handed on. */
static normfuse_status stream(void)
{
    size_t bytes;
    normfuse_exec acquired = {.struct_bytes = sizeof acquired};
    (void)normfuse_stream_sync(0, NULL, &bytes);
    normfuse_stream_release(normfuse_stream_acquire(0, &acquired));
    void *scratch = NULL;
    normfuse_stream_scratch(0, NULL, 256, &scratch);
    if (scratch != NULL)
        normfuse_stream_scratch_free(0, NULL, scratch);
    return NORMFUSE_OK;
}
#endif

static const struct call {
    const char *name;
    normfuse_status (*run)(void);
    bool first; /* of its process: files are read */
    int kept;   /* blocks that stay: the driver's state and devices, a stream's */
} calls[] = {
    {"group norm, first", group_forward, true, 0},
    {"info, first", info, true, OF_DRIVER},
    {"group norm forward", group_forward, false, 0},
    {"group norm backward", group_backward, false, 0},
    {"batch norm forward", batch_forward, false, 0},
    {"batch norm backward", batch_backward, false, 0},
    {"batch norm stats", batch_stats, false, 0},
    {"batch norm stats of a sum", batch_stats_of_sum, false, 0},
    {"batch norm apply", batch_apply, false, 0},
    {"batch norm backward_sums", batch_backward_sums, false, 0},
    {"batch norm backward_apply", batch_backward_apply, false, 0},
    {"affine forward", affine_forward, false, 0},
    {"affine backward", affine_backward, false, 0},
    {"merge", merge, false, 0},
    {"fold", fold, false, 0},
    {"scratch_bytes", scratch_bytes, true, 0},
    {"info", info, false, OF_DRIVER},
#ifdef NORMFUSE_FAKE_LIBCUDA
    {"prepare", prepare, false, OF_DRIVER}, /* test_compile refuses what calls ask for, each of which compiles */
    {"stream_sync", stream, false, 1},
#endif
};

/* ---- refusing --------------------------------------------------------------------------------------------------- */

static bool is_poison(void)
{
    const unsigned char *const bytes = (const unsigned char *)&shared->results;
    for (size_t i = 0; i < sizeof shared->results; i++)
        if (bytes[i] != 0x3d)
            return false;
    return true;
}

static normfuse_status run(const struct call *call)
{
    memset(&shared->results, 0x3d, sizeof shared->results);
    return call->run();
}

static bool is_as_wanted(void)
{
    return memcmp(&shared->results, &shared->wanted, sizeof shared->wanted) == 0;
}

/* In a child. `first` above `last`: nothing is refused, and the parent learns what is asked for and written. */
static int refuse(const struct call *call, int first, int last)
{
#ifdef NORMFUSE_FAKE_LIBCUDA
    find_driver();
#endif
    if (!call->first)
        (void)scratch_bytes(); /* and no thread is made, no driver looked for */
    const int before = atomic_load(&live);
    atomic_store(&asked, 0);
    refused_from = first;
    refused_to = last;
    const normfuse_status status = run(call);
    if (first > last) {
        shared->requests = atomic_load(&asked);
        shared->wanted = shared->results;
    }
    if (status == NORMFUSE_OK ? !is_as_wanted() : !is_poison())
        return 2;
    const bool of_file = status == NORMFUSE_BAD_ARGUMENT && strstr(normfuse_last_error(), "cannot be opened") != NULL;
    if (status != NORMFUSE_OK && !of_file &&
        (normfuse_last_error()[0] == '\0' || (status != NORMFUSE_OUT_OF_MEMORY && status != NORMFUSE_NO_DRIVER)))
        return 3;
    refused_from = 1;
    refused_to = 0;
    if (run(call) != NORMFUSE_OK || !is_as_wanted())
        return 4;
    const int kept = atomic_load(&live) - before;
    if (run(call) != NORMFUSE_OK || atomic_load(&live) - before != kept)
        return 6;
    /* A driver that was not found leaves its words behind, which normfuse_info may have given out. */
    return (first > last ? kept == call->kept : kept <= call->kept + 1) ? 0 : 5;
}

/* 0, or what was wrong. */
static int in_child(const struct call *call, int first, int last)
{
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0)
        exit(refuse(call, first, last)); /* past AddressSanitizer's look for leaks */
    int status = -1;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#ifdef NORMFUSE_FAKE_LIBCUDA
/* The memory that stays after CUDA calls of many shapes: docs/promises.md. */
static void plans_stay_few(void)
{
    enum { SHAPES = 4000 };
    find_driver();
    const int before = atomic_load(&live);
    bool good = true;
    for (int64_t i = 0; i < SHAPES; i++) {
        const int64_t sizes[] = {1, 8, 1 + i};
        normfuse_tensor there = normfuse_tensor_contiguous(address, NORMFUSE_F32, 3, sizes, &axes[5]);
        there.device = (normfuse_device){NORMFUSE_CUDA, 0};
        size_t bytes;
        good = good && normfuse_affine_forward_scratch_bytes(
                           &affine, &(const normfuse_tensors){.struct_bytes = sizeof(normfuse_tensors), .x = &there,
                                                     .y = &there},
                           &exec, &bytes) == NORMFUSE_OK;
    }
    const int kept = atomic_load(&live) - before;
    CHECK(good && kept <= OF_DRIVER, "%d blocks stay: %s", kept, normfuse_last_error());
}
#endif

int main(void)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    make_tensors();
    int most = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        const struct call *const call = &calls[i];
        if (!CHECK(in_child(call, 1, 0) == 0, "%s, nothing refused", call->name))
            continue;
        const int requests = shared->requests;
        most = requests > most ? requests : most;
        for (int k = 1; k <= requests; k++) {
            const int alone = in_child(call, k, k), after = in_child(call, k, 1 << 30);
            CHECK(alone == 0, "%s, request %d of %d refused: %d", call->name, k, requests, alone);
            CHECK(after == 0, "%s, requests from %d of %d on refused: %d", call->name, k, requests, after);
        }
        printf("%s: %d requests\n", call->name, requests);
    }
#ifdef NORMFUSE_FAKE_LIBCUDA
    plans_stay_few();
#endif
    CHECK(most > 8, "the first call asks for %d things only: are they counted?", most);
    return harness_close();
}
