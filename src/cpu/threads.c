/* SPDX-License-Identifier: MIT
 *
 * threads.c - a small pool: idle threads spin for a moment, since layers follow one another, then sleep. One caller
 * uses it at a time. After fork() the child starts with no threads and makes its own. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "cpu/threads.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
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

/* From <linux/futex.h>, which a C library need not bring. */
enum { FUTEX_WAIT_PRIVATE = 128, FUTEX_WAKE_PRIVATE = 129 };

static struct {
    pthread_mutex_t busy;       /* held by the caller that uses the pool */
    int32_t started;            /* threads that exist, the callers' not counted */
    _Atomic int32_t unclaimed;  /* tasks that no thread has begun: n means tasks 1 to n */
    _Atomic int32_t unfinished; /* tasks but task 0 that are unclaimed or at work */
    _Atomic int32_t sleeping;   /* pool threads that sleep while unclaimed is 0 */
    _Atomic int32_t done;       /* a flag, raised by the pool thread that makes unfinished 0 */
    void (*task)(void *, int64_t);
    void *context;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER};

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

enum { PATH_BYTES = 4096 };

/* True where the file `folder`/`name` begins with `count` numbers. */
static bool read_numbers(const char *folder, const char *name, double *numbers, int count)
{
    char path[PATH_BYTES + 64], text[64];
    FILE *const file = snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path ? fopen(path, "re") : NULL;
    bool good = file && fgets(text, sizeof text, file);
    const char *begin = text;
    for (int i = 0; good && i < count; i++) {
        char *end;
        numbers[i] = strtod(begin, &end);
        good = end != begin;
        begin = end;
    }
    if (file)
        fclose(file);
    return good;
}

/* The quota of one cgroup in CPUs: "quota period" of v2, or the two files of v1; INFINITY: it has none. */
static double quota_of(const char *folder, bool is_v2)
{
    double numbers[2];
    const bool is_known = is_v2 ? read_numbers(folder, "cpu.max", numbers, 2)
                                : read_numbers(folder, "cpu.cfs_quota_us", &numbers[0], 1) &&
                                      read_numbers(folder, "cpu.cfs_period_us", &numbers[1], 1);
    return is_known && numbers[0] > 0 && numbers[1] > 0 ? numbers[0] / numbers[1] : INFINITY;
}

/* The smallest quota of the cgroups from `mount`/`path` up to `mount`. Cgroups that the mount does not show, as in a
 * container, have none. */
static double quota_along(const char *mount, const char *path, bool is_v2)
{
    char folder[PATH_BYTES];
    const size_t root = strlen(mount);
    const int length = snprintf(folder, sizeof folder, "%s%s", mount, path);
    if (length < 0 || length >= (int)sizeof folder)
        return quota_of(mount, is_v2);
    double least = INFINITY;
    for (char *end = folder + length; end; end = strlen(folder) > root ? strrchr(folder, '/') : NULL) {
        *end = '\0';
        least = fmin(least, quota_of(folder, is_v2));
    }
    return least;
}

/* The same of one hierarchy, whose folder is named after its controllers; v2's has none. */
static double quota_in(const char *controllers, const char *path)
{
    if (*controllers == '\0')
        return fmin(quota_along("/sys/fs/cgroup", path, true), quota_along("/sys/fs/cgroup/unified", path, true));
    char mount[256];
    const int length = snprintf(mount, sizeof mount, "/sys/fs/cgroup/%s", controllers);
    return fmin(quota_along("/sys/fs/cgroup/cpu", path, false),
                length > 0 && length < (int)sizeof mount ? quota_along(mount, path, false) : INFINITY);
}

static bool has_cpu(const char *controllers)
{
    for (const char *name = controllers; name; name = strchr(name, ',')) {
        name += *name == ',';
        if (strncmp(name, "cpu", 3) == 0 && (name[3] == ',' || name[3] == '\0'))
            return true;
    }
    return false;
}

/* The CPUs that cgroups leave to this process: those of its path in /proc/self/cgroup, whose lines are
 * "number:controllers:path", and all above them. Where no path is known, of the mounts. INFINITY: no limit. */
static double quota_cpus(void)
{
    double least = fmin(quota_in("", ""), quota_in("cpu", ""));
    char line[PATH_BYTES + 256];
    FILE *const file = fopen("/proc/self/cgroup", "re");
    while (file && fgets(line, sizeof line, file)) {
        char *const controllers = strchr(line, ':'), *const path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        path[strcspn(path, "\n")] = '\0';
        *path = '\0';
        if (controllers[1] == '\0' || has_cpu(controllers + 1))
            least = fmin(least, quota_in(controllers + 1, path + 1));
    }
    if (file)
        fclose(file);
    return least;
}

/* The CPUs that this thread may run on. The kernel refuses a set that is smaller than the CPUs that are possible. */
static int32_t affinity_cpus(void)
{
    enum { MOST_CPUS = 1 << 20 };
    cpu_set_t usual;
    int error = sched_getaffinity(0, sizeof usual, &usual) == 0 ? 0 : errno;
    if (error == 0)
        return CPU_COUNT(&usual);
    int32_t n = 1;
    for (size_t cpus = 2 * CPU_SETSIZE; error == EINVAL && cpus <= MOST_CPUS; cpus *= 2) {
        const size_t bytes = CPU_ALLOC_SIZE(cpus);
        cpu_set_t *const set = malloc(bytes);
        error = !set ? ENOMEM : sched_getaffinity(0, bytes, set) == 0 ? 0 : errno;
        if (error == 0)
            n = CPU_COUNT_S(bytes, set);
        free(set);
    }
    return n;
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
    int32_t n = affinity_cpus();
    const double quota = quota_cpus();
    if (quota < n)
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

static void *thread_main(void *unused)
{
    (void)unused;
    for (int spin = 0;;) {
        int32_t task = atomic_load_explicit(&pool.unclaimed, memory_order_acquire);
        while (task > 0 && !atomic_compare_exchange_weak(&pool.unclaimed, &task, task - 1)) {
        }
        if (task > 0) {
            pool.task(pool.context, task);
            if (atomic_fetch_sub(&pool.unfinished, 1) == 1)
                normfuse_flag_raise(&pool.done);
            spin = 0;
        } else if (spin < SPINS) {
            pause_once();
            spin++;
        } else {
            atomic_fetch_add(&pool.sleeping, 1);
            syscall(SYS_futex, &pool.unclaimed, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
            atomic_fetch_sub(&pool.sleeping, 1);
        }
    }
    return NULL;
}

static void after_fork_in_child(void)
{
    pthread_mutex_init(&pool.busy, NULL);
    pool.started = 0;
    atomic_store(&pool.unclaimed, 0);
    atomic_store(&pool.sleeping, 0);
}

/* Makes threads where fewer than `count` exist, as many as can be made. They block the signals that are sent to a
 * process, whose handlers run on the program's own threads, and none of those that a thread brings upon itself: a host
 * may handle its faults. */
static void start_threads(int32_t count)
{
    static const int synchronous[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    static bool follows_forks;
    if (pool.started >= count || (!follows_forks && pthread_atfork(NULL, NULL, after_fork_in_child) != 0))
        return;
    follows_forks = true;
    sigset_t blocked, old;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof synchronous / sizeof *synchronous; i++)
        sigdelset(&blocked, synchronous[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &old);
    while (pool.started < count) {
        pthread_attr_t attributes;
        pthread_t thread;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        const int error = pthread_create(&thread, &attributes, thread_main, NULL);
        pthread_attr_destroy(&attributes);
        if (error)
            break;
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

void normfuse_threads_run(int32_t count, void (*task)(void *, int64_t), void *context)
{
    const bool shares = count > 1 && pthread_mutex_trylock(&pool.busy) == 0;
    if (shares) {
        start_threads(count - 1);
        pool.task = task;
        pool.context = context;
        atomic_store(&pool.done, LOWERED);
        atomic_store(&pool.unfinished, count - 1);
        atomic_store(&pool.unclaimed, count - 1);
        if (atomic_load(&pool.sleeping))
            syscall(SYS_futex, &pool.unclaimed, FUTEX_WAKE_PRIVATE, count - 1, NULL, NULL, 0);
    }
    task(context, 0);
    if (shares) {
        const int32_t late = atomic_exchange(&pool.unclaimed, 0);
        if (late == 0 || atomic_fetch_sub(&pool.unfinished, late) != late)
            normfuse_flag_wait(&pool.done, SPINS);
        pthread_mutex_unlock(&pool.busy);
    }
}
