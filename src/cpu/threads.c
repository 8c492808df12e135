/* SPDX-License-Identifier: MIT
 *
 * threads.c - a small pool: idle threads spin for a moment, since layers follow one another, then sleep on a condition
 * variable. One caller uses it at a time. After fork() the child starts with no threads and makes its own. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "cpu/threads.h"

#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SPINS = 4000, /* pauses: 40 to 160 us, a few times the wake-up they save */
    YIELDS = 256  /* of the CPU, before a wait sleeps */
};

/* Of <linux/futex.h>, which a C library need not bring. */
enum { FUTEX_WAIT_PRIVATE = 128, FUTEX_WAKE_PRIVATE = 129 };

static struct {
    pthread_mutex_t busy;  /* held by the caller that uses the pool */
    pthread_mutex_t mutex; /* guards sleeping and `started` against lost wake-ups */
    pthread_cond_t wake;
    int32_t started; /* threads that exist, the callers' not counted */
    uint_fast64_t first_generation; /* the last one that a thread made now must not take part in */
    atomic_uint_fast64_t generation;
    atomic_int sleeping;
    atomic_int remaining; /* pool threads still at work */
    _Atomic int32_t done; /* a flag: none is */
    int32_t count;
    void (*task)(void *, int64_t);
    void *context;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .mutex = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void pause_once(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- flags ------------------------------------------------------------------------------------------------------- */

enum { LOWERED = 0, RAISED = 1, AWAITED = -1 }; /* AWAITED: lowered, and a thread sleeps until it is raised */

void normfuse_flag_wait(_Atomic int32_t *flag, int spins)
{
    for (int spin = 0; atomic_load_explicit(flag, memory_order_acquire) != RAISED; spin++) {
        int32_t lowered = LOWERED;
        if (spin < spins)
            pause_once();
        else if (spin - spins < YIELDS)
            sched_yield();
        else if (atomic_compare_exchange_strong(flag, &lowered, AWAITED) || lowered == AWAITED)
            syscall(SYS_futex, flag, FUTEX_WAIT_PRIVATE, AWAITED, NULL, NULL, 0);
    }
}

void normfuse_flag_raise(_Atomic int32_t *flag)
{
    if (atomic_exchange_explicit(flag, RAISED, memory_order_acq_rel) == AWAITED)
        syscall(SYS_futex, flag, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* ---- how many ---------------------------------------------------------------------------------------------------- */

/* Reads "quota period" of cgroup v2, or the two files of v1; 0: no limit found. */
static double quota_cpus(void)
{
    char text[64];
    double quota = 0, period = 0;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (file) {
        if (fgets(text, sizeof text, file) && strncmp(text, "max", 3) != 0) {
            char *end;
            quota = strtod(text, &end);
            period = strtod(end, NULL);
        }
        fclose(file);
    } else if ((file = fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "re"))) {
        if (fgets(text, sizeof text, file))
            quota = strtod(text, NULL);
        fclose(file);
        if ((file = fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "re"))) {
            if (fgets(text, sizeof text, file))
                period = strtod(text, NULL);
            fclose(file);
        }
    }
    return quota > 0 && period > 0 ? quota / period : 0;
}

static int32_t count_threads(void)
{
    const char *wanted = getenv("NORMFUSE_NUM_THREADS");
    if (wanted && *wanted) {
        char *end;
        const long n = strtol(wanted, &end, 10);
        if (!*end && n >= 1)
            return n < NORMFUSE_MAX_THREADS ? (int32_t)n : NORMFUSE_MAX_THREADS;
    }
    cpu_set_t set;
    int32_t n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    const double quota = quota_cpus();
    if (quota > 0 && quota < n)
        n = quota < 1 ? 1 : (int32_t)quota;
    return n < 1 ? 1 : n < NORMFUSE_MAX_THREADS ? n : NORMFUSE_MAX_THREADS;
}

int32_t normfuse_threads_default(void)
{
    static _Atomic int32_t known;
    int32_t n = atomic_load_explicit(&known, memory_order_relaxed);
    if (n == 0) {
        int state;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state); /* files are open */
        n = count_threads();
        pthread_setcancelstate(state, NULL);
        atomic_store_explicit(&known, n, memory_order_relaxed);
    }
    return n;
}

/* ---- the pool ---------------------------------------------------------------------------------------------------- */

static void *thread_main(void *argument)
{
    const int32_t index = (int32_t)(intptr_t)argument;
    uint_fast64_t seen = pool.first_generation;
    for (;;) {
        uint_fast64_t generation = atomic_load_explicit(&pool.generation, memory_order_acquire);
        for (int spin = 0; generation == seen && spin < SPINS; spin++) {
            pause_once();
            generation = atomic_load_explicit(&pool.generation, memory_order_acquire);
        }
        if (generation == seen) {
            pthread_mutex_lock(&pool.mutex);
            atomic_fetch_add(&pool.sleeping, 1);
            while ((generation = atomic_load(&pool.generation)) == seen)
                pthread_cond_wait(&pool.wake, &pool.mutex);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.mutex);
        }
        seen = generation;
        if (index < pool.count)
            pool.task(pool.context, index);
        if (atomic_fetch_sub_explicit(&pool.remaining, 1, memory_order_acq_rel) == 1)
            normfuse_flag_raise(&pool.done);
    }
    return NULL;
}

static void after_fork_in_child(void)
{
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pool.started = 0;
    atomic_store(&pool.generation, 0);
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.remaining, 0);
}

/* Makes threads 1 to count - 1 where missing. They block the signals that are sent to a process, whose handlers run on
 * the program's own threads, and none of those that a thread brings upon itself: a host may handle its faults. */
static bool start_threads(int32_t count)
{
    static const int synchronous[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    static bool follows_forks;
    if (pool.started >= count - 1)
        return true;
    if (!follows_forks && pthread_atfork(NULL, NULL, after_fork_in_child) != 0)
        return false;
    follows_forks = true;
    sigset_t blocked, old;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof synchronous / sizeof *synchronous; i++)
        sigdelset(&blocked, synchronous[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &old);
    pool.first_generation = atomic_load(&pool.generation);
    while (pool.started < count - 1) {
        pthread_attr_t attributes;
        pthread_t thread;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        const int error = pthread_create(&thread, &attributes, thread_main, (void *)(intptr_t)(pool.started + 1));
        pthread_attr_destroy(&attributes);
        if (error)
            break;
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return pool.started >= count - 1;
}

void normfuse_threads_run(int32_t count, void (*task)(void *, int64_t), void *context)
{
    if (count > 1 && pthread_mutex_trylock(&pool.busy) == 0) {
        if (start_threads(count)) {
            pool.count = count;
            pool.task = task;
            pool.context = context;
            atomic_store(&pool.remaining, pool.started);
            atomic_store(&pool.done, LOWERED);
            atomic_fetch_add(&pool.generation, 1);
            if (atomic_load(&pool.sleeping)) {
                pthread_mutex_lock(&pool.mutex);
                pthread_cond_broadcast(&pool.wake);
                pthread_mutex_unlock(&pool.mutex);
            }
            task(context, 0);
            normfuse_flag_wait(&pool.done, SPINS);
            pthread_mutex_unlock(&pool.busy);
            return;
        }
        pthread_mutex_unlock(&pool.busy);
    }
    for (int32_t i = 0; i < count; i++)
        task(context, i);
}
