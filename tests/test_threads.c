/* SPDX-License-Identifier: MIT
 *
 * test_threads.c - the built-in pool: every task runs once, from several callers at once, after fork and in the child;
 * and a call through the public interface gives the same bits in all of these. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cpu/threads.h"
#include "harness.h"
#include "normfuse.h"

enum { TASKS = 7, N = 4, C = 64, S = 32 * 32, VALUES = N * C * S };

static void count_task(void *context, int64_t i) { atomic_fetch_add((atomic_int *)context + i, 1); }

static bool each_runs_once(int32_t tasks)
{
    atomic_int counts[64];
    for (int i = 0; i < 64; i++)
        atomic_init(&counts[i], 0);
    normfuse_threads_run(tasks, count_task, counts);
    for (int i = 0; i < 64; i++)
        if (atomic_load(&counts[i]) != (i < tasks))
            return false;
    return true;
}

static float *x, *expected;

static bool normalizes(int32_t threads)
{
    float *y = malloc(VALUES * sizeof *y);
    const int64_t sizes[] = {N, C, 32, 32};
    normfuse_axes axes;
    const normfuse_tensor tx = normfuse_tensor_channels_last(x, NORMFUSE_F32, 4, sizes, &axes);
    normfuse_tensor ty = tx;
    ty.data = y;
    const normfuse_group_norm_options options = {.struct_bytes = sizeof options, .groups = 8, .eps = 1e-5, .activation = NORMFUSE_SILU};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &tx, .y = &ty};
    const normfuse_exec exec = {.struct_bytes = sizeof exec, .threads = threads};
    bool same = normfuse_group_norm_forward(&options, &tensors, &exec) == NORMFUSE_OK;
    if (!expected) {
        expected = y;
        return same;
    }
    same = same && memcmp(y, expected, VALUES * sizeof *y) == 0;
    free(y);
    return same;
}

static void *caller(void *result)
{
    bool good = true;
    for (int i = 0; i < 40; i++)
        good = good && each_runs_once(1 + i % TASKS) && normalizes(1 + i % 4);
    *(bool *)result = good;
    return NULL;
}

int main(void)
{
    x = malloc(VALUES * sizeof *x);
    for (int i = 0; i < VALUES; i++)
        x[i] = (float)(((uint32_t)i * 2654435761u) >> 16) * 0x1p-12f;
    CHECK(normfuse_threads_default() >= 1, "the pool has a size");
    CHECK(normalizes(1), "one thread");
    for (int32_t tasks = 1; tasks <= TASKS; tasks++)
        CHECK(each_runs_once(tasks), "%d tasks, each once", (int)tasks);
    CHECK(normalizes(3), "three threads, the bits of one");

    pthread_t callers[4];
    bool good[4];
    for (int i = 0; i < 4; i++)
        pthread_create(&callers[i], NULL, caller, &good[i]);
    for (int i = 0; i < 4; i++) {
        pthread_join(callers[i], NULL);
        CHECK(good[i], "caller %d of four at once", i);
    }

#if defined(__SANITIZE_THREAD__)
    harness_skip("fork with threads: ThreadSanitizer cannot follow a child that starts threads");
#else
    fflush(stdout);
    const pid_t child = fork(); /* as a data loader does, with threads already started */
    if (child == 0)
        _exit(each_runs_once(3) && normalizes(3) && normalizes(2) ? 0 : 1);
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child of a fork");
    CHECK(normalizes(3), "the parent after the fork");
#endif

    usleep(50000); /* the threads have gone to sleep */
    CHECK(each_runs_once(4) && normalizes(4), "after the threads slept");
    free(x);
    free(expected);
    return harness_close();
}
