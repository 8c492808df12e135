/* SPDX-License-Identifier: MIT
 *
 * test_threads.c - the built-in pool: task 0 runs once, each other task at most once, and all work is done on return,
 * from several callers at once, after fork and in the child; and a call through the public interface gives the same
 * bits in all of these. What calls leave alone, in processes whose first calls they are: signals of the pool's threads,
 * the floating-point environment, errno; and how many threads a call has by default. */
#define _GNU_SOURCE
#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cpu/threads.h"
#include "harness.h"
#include "normfuse.h"

enum { TASKS = 7, N = 4, C = 64, S = 32 * 32, VALUES = N * C * S };

enum { ITEMS = 40, MOST_TASKS = 64 };

struct work {
    atomic_int next, ended, begun[MOST_TASKS], done[ITEMS];
};

static void take_items(void *context, int64_t i)
{
    struct work *const work = context;
    atomic_fetch_add(&work->begun[i], 1);
    for (int item; (item = atomic_fetch_add(&work->next, 1)) < ITEMS;)
        atomic_fetch_add(&work->done[item], 1);
    atomic_fetch_add(&work->ended, 1);
}

static bool is_done(int32_t tasks)
{
    struct work work = {0};
    normfuse_threads_run(tasks, take_items, &work);
    int begun = 0;
    for (int i = 0; i < MOST_TASKS; i++) {
        if (work.begun[i] > (i < tasks) || work.begun[0] != 1)
            return false;
        begun += work.begun[i];
    }
    for (int i = 0; i < ITEMS; i++)
        if (work.done[i] != 1)
            return false;
    return work.ended == begun;
}

/* A caller does the work of a thread that comes late; here task 0 waits for task 1, for 20 s at most. */
static atomic_bool second_has_come, second_has_slept;

static void wait_for_second(void)
{
    for (int i = 0; i < 200000 && !atomic_load(&second_has_come); i++)
        usleep(100);
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
    const normfuse_group_norm_options options = {.struct_bytes = sizeof options, .groups = 8, .eps = 1e-5,
                                                 .activation = NORMFUSE_SILU};
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
        good = good && is_done(1 + i % TASKS) && normalizes(1 + i % 4);
    *(bool *)result = good;
    return NULL;
}

/* ---- processes of their own ------------------------------------------------------------------------------------- */

/* Runs `test` in a child of this process, which has no pool yet. */
static void in_child(const char *name, bool (*test)(void))
{
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0)
        _exit(test() ? 0 : 1);
    int status = -1;
    if (child > 0)
        waitpid(child, &status, 0);
    CHECK(status == 0, "%s: wait status 0x%x", name, (unsigned)status);
}

static double seconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- signals ------------------------------------------------------------------------------------------------------
 * */

enum { PAGE = 65536 }; /* a multiple of every page size */
static const int synchronous[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
static char *page; /* may not be touched until on_fault made it usable */
static atomic_int faults, fault_milliseconds;
static pthread_t fault_thread;

static void on_fault(int signal, siginfo_t *info, void *context)
{
    (void)context;
    const char *const address = info->si_addr;
    if (address < page || address >= page + PAGE)
        _exit(100 + signal);
    nanosleep(&(struct timespec){.tv_nsec = atomic_load(&fault_milliseconds) * 1000000L}, NULL);
    fault_thread = pthread_self();
    atomic_fetch_add(&faults, 1);
    mprotect(page, PAGE, PROT_READ | PROT_WRITE);
}

static void handle_faults(void)
{
    const struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
}

static void touch_in_second_task(void *context, int64_t i)
{
    (void)context;
    if (i == 0) {
        wait_for_second();
        return;
    }
    *(volatile char *)page = 1;
    atomic_store(&second_has_come, true);
}

/* A handler of the process gets a fault in a thread of the pool, as it would in one of its own. */
static bool faults_reach_handler(void)
{
    page = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    handle_faults();
    normfuse_threads_run(2, touch_in_second_task, NULL);
    return atomic_load(&faults) == 1 && !pthread_equal(fault_thread, pthread_self()) && page[0] == 1;
}

static void read_mask(void *context, int64_t i)
{
    if (i == 0) {
        wait_for_second();
        return;
    }
    pthread_sigmask(SIG_BLOCK, NULL, context);
    atomic_store(&second_has_come, true);
}

/* Signals to the process run on its own threads. The caller's mask is not the pool's, and stays. */
static bool masks_signals(void)
{
    sigset_t mine, of_pool, after;
    sigfillset(&mine);
    pthread_sigmask(SIG_SETMASK, &mine, NULL);
    sigemptyset(&of_pool);
    normfuse_threads_run(2, read_mask, &of_pool);
    pthread_sigmask(SIG_BLOCK, NULL, &after);
    for (int signal = 1; signal < 32; signal++) {
        bool is_synchronous = false;
        for (size_t i = 0; i < sizeof synchronous / sizeof *synchronous; i++)
            is_synchronous = is_synchronous || signal == synchronous[i];
        if (signal != SIGKILL && signal != SIGSTOP &&
            (sigismember(&of_pool, signal) != !is_synchronous || sigismember(&after, signal) != 1))
            return false;
    }
    return true;
}

/* ---- waiting ------------------------------------------------------------------------------------------------------
 * */

static void sleep_in_second_task(void *context, int64_t i)
{
    (void)context;
    if (i == 0) {
        wait_for_second();
        return;
    }
    atomic_store(&second_has_come, true);
    usleep(300000);
    atomic_store(&second_has_slept, true);
}

/* A caller that would spin for long keeps its CPU from the thread that it waits for, where its priority is higher. */
static bool waits_asleep(void)
{
    const double start = seconds(CLOCK_THREAD_CPUTIME_ID);
    normfuse_threads_run(2, sleep_in_second_task, NULL);
    return atomic_load(&second_has_slept) && seconds(CLOCK_THREAD_CPUTIME_ID) - start < 0.15;
}

/* One set, cut in pieces; a thread that faults in its piece is held up in the handler, and the other one waits for it.
 * */
static bool waits_asleep_for_pieces(void)
{
    enum { LENGTH = 1 << 18 };
    char *const memory = mmap(NULL, LENGTH * sizeof *x, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    page = memory + LENGTH * sizeof *x / 2;
    mprotect(page, PAGE, PROT_NONE);
    handle_faults();
    atomic_store(&fault_milliseconds, 300);
    const int64_t sizes[] = {1, 1, LENGTH};
    normfuse_axes axes;
    const normfuse_tensor tx = normfuse_tensor_contiguous(memory, NORMFUSE_F32, 3, sizes, &axes);
    const normfuse_group_norm_options options = {.struct_bytes = sizeof options, .groups = 1, .eps = 1e-5};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &tx, .y = &tx};
    const normfuse_exec exec = {.struct_bytes = sizeof exec, .threads = 2};
    const double start = seconds(CLOCK_PROCESS_CPUTIME_ID);
    return normfuse_group_norm_forward(&options, &tensors, &exec) == NORMFUSE_OK && atomic_load(&faults) == 1 &&
           seconds(CLOCK_PROCESS_CPUTIME_ID) - start < 0.15;
}

/* ---- the floating-point environment -------------------------------------------------------------------------------
 * */

enum environment { STANDARD, UPWARD, FLUSHING, TRAPPING, ENVIRONMENTS };

static void set_environment(enum environment environment)
{
    fesetenv(FE_DFL_ENV);
    if (environment == UPWARD)
        fesetround(FE_UPWARD);
    if (environment == FLUSHING) {
#if defined(__x86_64__)
        __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#elif defined(__aarch64__)
        __asm__ volatile("msr fpcr, %0" : : "r"(UINT64_C(1) << 24));
#endif
    }
#if defined(__GLIBC__) /* other C libraries cannot trap */
    if (environment == TRAPPING)
        feenableexcept(FE_ALL_EXCEPT);
#endif
}

/* State of the thread that a call must not change. */
static bool is_environment(enum environment environment, int flags)
{
    bool flushes = false;
#if defined(__x86_64__)
    flushes = (__builtin_ia32_stmxcsr() & 0x8040) == 0x8040;
#elif defined(__aarch64__)
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    flushes = control >> 24 & 1;
#else
    flushes = environment == FLUSHING;
#endif
    return fegetround() == (environment == UPWARD ? FE_UPWARD : FE_TONEAREST) && flushes == (environment == FLUSHING) &&
           fetestexcept(FE_ALL_EXCEPT) == flags;
}

enum { SAMPLES = 2, CHANNELS = 8, SMALL = SAMPLES * CHANNELS * 4096, RESULTS = 5 * SMALL + 64 };
static float small[2][SMALL], weight[CHANNELS]; /* filled in the standard environment */

static void fill_small(void)
{
    for (int i = 0; i < 2 * SMALL; i++) /* of either sign, a third of them subnormal */
        small[i / SMALL][i % SMALL] =
            (float)(int32_t)((uint32_t)i * 2654435761u) * 0x1p-31f * (i % 3 == 0 ? 0x1p-126f : 0x1p-20f);
    for (int i = 0; i < CHANNELS; i++)
        weight[i] = (float)(i + 1) * 0x1.6p-30f;
}

/* Calls whose results would differ in another environment, one after another in `results`. */
static bool compute(float *results, const normfuse_exec *exec)
{
    static float mean[SAMPLES * 2], rstd[SAMPLES * 2];
    const int64_t sizes[] = {SAMPLES, CHANNELS, SMALL / SAMPLES / CHANNELS}, groups[] = {SAMPLES, 2},
                            channels[] = {CHANNELS};
    normfuse_axes axes, of_groups, of_channels;
    const normfuse_tensor tx = normfuse_tensor_contiguous(small[0], NORMFUSE_F32, 3, sizes, &axes),
                          tm = normfuse_tensor_contiguous(mean, NORMFUSE_F32, 2, groups, &of_groups),
                          tw = normfuse_tensor_contiguous(weight, NORMFUSE_F32, 1, channels, &of_channels);
    normfuse_tensor tdy = tx, tr = tm, ty[5], tg[2];
    tdy.data = small[1];
    tr.data = rstd;
    for (int i = 0; i < 5; i++) {
        ty[i] = tx;
        ty[i].data = results + i * SMALL;
    }
    for (int i = 0; i < 2; i++) {
        tg[i] = tw;
        tg[i].data = results + 5 * SMALL + i * CHANNELS;
    }
    const normfuse_group_norm_options group = {
        .struct_bytes = sizeof group, .groups = 2, .eps = 1e-7, .activation = NORMFUSE_GELU};
    const normfuse_affine_options affine = {.struct_bytes = sizeof affine, .activation = NORMFUSE_SILU};
    const normfuse_batch_norm_options batch = {.struct_bytes = sizeof batch, .eps = 1e-7};
    const normfuse_tensors forward = {.struct_bytes = sizeof forward, .x = &tx, .weight = &tw, .y = &ty[0], .mean = &tm,
                                      .rstd = &tr};
    const normfuse_tensors backward = {.struct_bytes = sizeof backward, .x = &tx, .dy = &tdy, .weight = &tw,
                                       .mean = &tm, .rstd = &tr, .dx = &ty[1], .dweight = &tg[0], .dbias = &tg[1]};
    const normfuse_tensors scaled = {.struct_bytes = sizeof scaled, .x = &tx, .pre_add = &tdy, .weight = &tw,
                                     .y = &ty[2]};
    const normfuse_tensors plain = {.struct_bytes = sizeof plain, .x = &tx, .weight = &tw, .y = &ty[3]};
    const normfuse_tensors added = {.struct_bytes = sizeof added, .x = &tx, .post_add = &tdy, .y = &ty[4]};
    double shards[2][3] = {{3, 0x1p-1030, 0x1.1p-1040}, {5, 0x1.7p-1028, 0.1}},
                          sums[2][2] = {{0.1, 0x1p-1060}, {0.3, 0x1p-1070}};
    const int64_t of_shards[] = {2, 1, 3}, of_sums[] = {2, 1, 2}, of_stats[] = {1, 3}, of_sum[] = {1, 2},
                                of_weight[] = {CHANNELS, 1};
    normfuse_axes folded[8];
    float *const rest = results + 5 * SMALL + 2 * CHANNELS; /* 3 + 2 doubles, then two of CHANNELS floats */
    const normfuse_tensor shards_in = normfuse_tensor_contiguous(shards, NORMFUSE_F64, 3, of_shards, &folded[0]),
                          stats = normfuse_tensor_contiguous(rest, NORMFUSE_F64, 2, of_stats, &folded[1]),
                          sums_in = normfuse_tensor_contiguous(sums, NORMFUSE_F64, 3, of_sums, &folded[2]),
                          sum = normfuse_tensor_contiguous(rest + 6, NORMFUSE_F64, 2, of_sum, &folded[3]),
                          weights = normfuse_tensor_contiguous(weight, NORMFUSE_F32, 2, of_weight, &folded[4]),
                          new_weight = normfuse_tensor_contiguous(rest + 10, NORMFUSE_F32, 2, of_weight, &folded[5]),
                          new_bias = normfuse_tensor_contiguous(rest + 10 + CHANNELS, NORMFUSE_F32, 1, channels,
                                                                &folded[6]);
    const normfuse_tensors fold = {.struct_bytes = sizeof fold, .running_mean = &tw, .running_var = &tw};
    return normfuse_group_norm_forward(&group, &forward, exec) == NORMFUSE_OK &&
           normfuse_group_norm_backward(&group, &backward, exec) == NORMFUSE_OK &&
           normfuse_affine_forward(&affine, &scaled, exec) == NORMFUSE_OK &&
           normfuse_affine_forward(&(const normfuse_affine_options){.struct_bytes = sizeof affine}, &plain,
                                   exec) == NORMFUSE_OK &&
           normfuse_batch_norm_forward(&batch, &added, exec) == NORMFUSE_OK &&
           normfuse_stats_merge(&shards_in, &stats, NULL) == NORMFUSE_OK &&
           normfuse_sums_merge(&sums_in, &sum, NULL) == NORMFUSE_OK &&
           normfuse_batch_norm_fold(&fold, 1e-7, 0, &weights, NULL, &new_weight, &new_bias) == NORMFUSE_OK;
}

static float wanted[RESULTS], found[RESULTS];
static enum environment caller_environment;

static bool computes_alike(const normfuse_exec *exec)
{
    memset(found, 0, sizeof found);
    feclearexcept(FE_ALL_EXCEPT);
    return compute(found, exec) && is_environment(caller_environment, 0) && memcmp(found, wanted, sizeof found) == 0;
}

struct hosted {
    void (*task)(void *, int64_t);
    void *context;
    int64_t i;
    bool good;
};

static void *host_thread(void *argument)
{
    struct hosted *const hosted = argument;
    set_environment(FLUSHING);
    errno = 77;
    hosted->task(hosted->context, hosted->i);
    hosted->good = errno == 77 && is_environment(FLUSHING, 0);
    return NULL;
}

/* A host's pool: a thread for each task, in an environment that is not the caller's. */
static void host_for(void *good, int64_t tasks, void (*task)(void *, int64_t), void *context)
{
    for (int64_t i = 0; i < tasks; i++) {
        struct hosted hosted = {task, context, i, false};
        pthread_t thread;
        pthread_create(&thread, NULL, host_thread, &hosted);
        pthread_join(thread, NULL);
        if (!hosted.good)
            *(bool *)good = false;
    }
}

/* The pool is started in the caller's environment, and then used in another. */
static bool computes_alike_in_two(void)
{
    const enum environment first = caller_environment;
    for (int i = 0; i < 2; i++) {
        caller_environment = (enum environment)(((int)first + i) % ENVIRONMENTS);
        set_environment(caller_environment);
        bool good = true;
        const normfuse_exec pool = {.struct_bytes = sizeof pool, .threads = 2},
                                   alone = {.struct_bytes = sizeof alone, .threads = 1},
                            host = {.struct_bytes = sizeof host, .threads = 2, .parallel_for = host_for, .pool = &good};
        if (!computes_alike(&pool) || !computes_alike(&alone) || !computes_alike(&host) || !good)
            return false;
    }
    return true;
}

/* ---- errno --------------------------------------------------------------------------------------------------------
 * */

static bool keeps_errno_of_info(void)
{
    setenv("NORMFUSE_NUM_THREADS", "99999999999999999999999", 1);
    normfuse_information info = {.struct_bytes = sizeof info};
    errno = 77;
    return normfuse_info(&info) == NORMFUSE_OK && errno == 77 && info.threads == 1024;
}

static bool keeps_errno_of_calls(void)
{
    unsetenv("NORMFUSE_NUM_THREADS");
    const normfuse_exec exec = {.struct_bytes = sizeof exec, .threads = 2};
    errno = 77;
    bool good = compute(found, NULL) && errno == 77 && compute(found, &exec) && errno == 77;
    /* of which libm says that they underflow and overflow */
    static double values[2 * 32768];
    for (int i = 0; i < 2 * 32768; i++)
        values[i] = i % 2 ? -1e300 : 1e300;
    const int64_t sizes[] = {1, 1, 2 * 32768};
    normfuse_axes axes;
    const normfuse_tensor t = normfuse_tensor_contiguous(values, NORMFUSE_F64, 3, sizes, &axes);
    double large = 1e300;
    normfuse_axes slope_axes;
    const normfuse_tensor slope = normfuse_tensor_contiguous(&large, NORMFUSE_F64, 1, sizes, &slope_axes);
    for (int activation = NORMFUSE_IDENTITY; activation <= NORMFUSE_PRELU; activation++) {
        const normfuse_affine_options options = {.struct_bytes = sizeof options, .activation = activation};
        const normfuse_tensors tensors = {
            .struct_bytes = sizeof tensors, .x = &t, .y = &t, .slope = activation == NORMFUSE_PRELU ? &slope : NULL};
        good = good && normfuse_affine_forward(&options, &tensors, &exec) == NORMFUSE_OK && errno == 77;
    }
    return good;
}

static bool keeps_errno_of_sizes(void)
{
    const int64_t sizes[] = {N, C, 32, 32};
    normfuse_axes axes;
    const normfuse_tensor t = normfuse_tensor_contiguous(x, NORMFUSE_F32, 4, sizes, &axes);
    const normfuse_batch_norm_options options = {.struct_bytes = sizeof options, .eps = 1e-5};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &t, .y = &t};
    size_t bytes;
    int64_t samples;
    errno = 77;
    return normfuse_batch_norm_forward_scratch_bytes(&options, &tensors, NULL, &bytes) == NORMFUSE_OK && errno == 77 &&
           normfuse_sample_quantum(&t, &samples) == NORMFUSE_OK && errno == 77;
}

static bool keeps_errno_of_refusals(void)
{
    errno = 77;
    size_t bytes;
    (void)normfuse_prepare(0);
    (void)normfuse_sync_bytes(0, &bytes);
    return errno == 77 && normfuse_info(NULL) == NORMFUSE_BAD_ARGUMENT && errno == 77;
}

/* ---- how many threads ----------------------------------------------------------------------------------------------
 * */

/* The machine that the first call of a process finds. The linker puts the functions below in the place of libc's
 * (--wrap). */
static struct machine {
    size_t possible_cpus; /* sets of fewer bits are refused; 0: the machine as it is */
    int allowed_cpus;
    const char *files[8][2]; /* paths and texts: all that there are in /sys/fs/cgroup, and /proc/self/cgroup */
} machine;

FILE *__real_fopen(const char *path, const char *mode);
int __real_sched_getaffinity(pid_t process, size_t bytes, cpu_set_t *set);
FILE *__wrap_fopen(const char *path, const char *mode);
int __wrap_sched_getaffinity(pid_t process, size_t bytes, cpu_set_t *set);

FILE *__wrap_fopen(const char *path, const char *mode)
{
    if (machine.possible_cpus == 0 ||
        (strncmp(path, "/sys/fs/cgroup", 14) != 0 && strcmp(path, "/proc/self/cgroup") != 0))
        return __real_fopen(path, mode);
    for (size_t i = 0; i < sizeof machine.files / sizeof *machine.files; i++)
        if (machine.files[i][0] && strcmp(machine.files[i][0], path) == 0)
            return fmemopen((void *)(uintptr_t)machine.files[i][1], strlen(machine.files[i][1]), "r");
    errno = ENOENT;
    return NULL;
}

int __wrap_sched_getaffinity(pid_t process, size_t bytes, cpu_set_t *set)
{
    if (machine.possible_cpus == 0)
        return __real_sched_getaffinity(process, bytes, set);
    if (bytes * 8 < machine.possible_cpus) {
        errno = EINVAL;
        return -1;
    }
    memset(set, 0, bytes);
    for (int i = 0; i < machine.allowed_cpus; i++) /* the last ones */
        CPU_SET_S(machine.possible_cpus - 1 - (size_t)i, bytes, set);
    return 0;
}

static int32_t wanted_threads;

static bool counts_threads(void)
{
    unsetenv("NORMFUSE_NUM_THREADS");
    const int32_t count = normfuse_threads_default();
    if (count != wanted_threads)
        fprintf(stderr, "# %d threads, expected %d\n", (int)count, (int)wanted_threads);
    return count == wanted_threads;
}

#define SELF "/proc/self/cgroup"
#define ROOT "/sys/fs/cgroup"

static void test_counts(void)
{
    static const struct {
        const char *name;
        int32_t threads;
        struct machine machine;
    } cases[] = {
        {"no cgroups", 40, {64, 40, {{NULL, NULL}}}},
        {"1024 CPUs", 1000, {1024, 1000, {{NULL, NULL}}}},
        {"1025 possible CPUs", 40, {1025, 40, {{NULL, NULL}}}},
        {"8192 possible CPUs, with a quota", 3, {8192, 900, {{ROOT "/cpu.max", "300000 100000\n"}}}},
        {"65536 possible CPUs, more than threads", 1024, {65536, 5000, {{NULL, NULL}}}},
        {"more than any machine has", 1, {(size_t)1 << 40, 5, {{NULL, NULL}}}},
        {"v2: the mount", 2, {64, 40, {{SELF, "0::/\n"}, {ROOT "/cpu.max", "200000 100000\n"}}}},
        {"v2: no process file", 2, {64, 40, {{ROOT "/cpu.max", "200000 100000\n"}}}},
        {"v2: less than a CPU", 1, {64, 40, {{SELF, "0::/\n"}, {ROOT "/cpu.max", "20000 100000\n"}}}},
        {"v2: no limit", 40, {64, 40, {{SELF, "0::/a\n"}, {ROOT "/a/cpu.max", "max 100000\n"}}}},
        {"v2: below the mount", 3, {64, 40, {{SELF, "0::/system.slice/a.service\n"},
                                            {ROOT "/system.slice/a.service/cpu.max", "300000 100000\n"}}}},
        {"v2: above, the cgroup itself has none", 5,
         {64, 40, {{SELF, "0::/system.slice/a.service\n"}, {ROOT "/system.slice/a.service/cpu.max", "max 100000\n"},
                   {ROOT "/system.slice/cpu.max", "500000 100000\n"}}}},
        {"v2: the smallest of three", 2,
         {64, 40, {{SELF, "0::/a/b\n"}, {ROOT "/a/b/cpu.max", "700000 100000\n"}, {ROOT "/a/cpu.max", "100000 50000\n"},
                   {ROOT "/cpu.max", "900000 100000\n"}}}},
        {"v2: another's quota", 40, {64, 40, {{SELF, "0::/a\n"}, {ROOT "/b/cpu.max", "100000 100000\n"}}}},
        {"v2: a path that the mount does not show", 4,
         {64, 40, {{SELF, "0::/docker/123/x\n"}, {ROOT "/cpu.max", "400000 100000\n"}}}},
        {"v2: a path with colons and spaces", 4,
         {64, 40, {{SELF, "0::/a:b c/d\n"}, {ROOT "/a:b c/d/cpu.max", "400000 100000\n"}}}},
        {"v2 beside v1", 6, {64, 40, {{SELF, "3:memory:/m\n0::/a\n"}, {ROOT "/unified/a/cpu.max", "600000 100000\n"}}}},
        {"v1: the mount", 2,
         {64, 40, {{ROOT "/cpu/cpu.cfs_quota_us", "200000\n"}, {ROOT "/cpu/cpu.cfs_period_us", "100000\n"}}}},
        {"v1: below the mount", 3,
         {64, 40, {{SELF, "5:cpuset:/a\n4:cpu,cpuacct:/user.slice/job\n0::/\n"},
                   {ROOT "/cpu/user.slice/job/cpu.cfs_quota_us", "300000\n"},
                   {ROOT "/cpu/user.slice/job/cpu.cfs_period_us", "100000\n"}, {ROOT "/cpu/cpu.cfs_quota_us", "-1\n"},
                   {ROOT "/cpu/cpu.cfs_period_us", "100000\n"}}}},
        {"v1: above, in a folder of the controllers' names", 7,
         {64, 40, {{SELF, "4:cpuacct,cpu:/a/b\n"}, {ROOT "/cpuacct,cpu/a/cpu.cfs_quota_us", "350000\n"},
                   {ROOT "/cpuacct,cpu/a/cpu.cfs_period_us", "50000\n"},
                   {ROOT "/cpuacct,cpu/a/b/cpu.cfs_quota_us", "-1\n"},
                   {ROOT "/cpuacct,cpu/a/b/cpu.cfs_period_us", "100000\n"}}}},
        {"v1: of cpuset and cpuacct", 40,
         {64, 40, {{SELF, "4:cpuset:/a\n3:cpuacct:/a\n"}, {ROOT "/cpu/a/cpu.cfs_quota_us", "100000\n"},
                   {ROOT "/cpu/a/cpu.cfs_period_us", "100000\n"}}}},
        {"v1: no period", 40,
         {64, 40, {{ROOT "/cpu/cpu.cfs_quota_us", "200000\n"}, {ROOT "/cpu/cpu.cfs_period_us", "0\n"}}}},
        {"lines that are none", 2,
         {64, 40,
          {{SELF, "nothing\n7:cpu\n:\n0::/a"}, {ROOT "/a/cpu.max", "200000 100000"}, {ROOT "/cpu.max", "words\n"}}}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        machine = cases[i].machine;
        wanted_threads = cases[i].threads;
        in_child(cases[i].name, counts_threads);
    }
    machine = (struct machine){0};
}

/* ---- cancellation, fork ----------------------------------------------------------------------------------------- */

static atomic_bool came_back;

static void *cancelled_thread(void *context)
{
    (void)context;
    pthread_cancel(pthread_self());
    normfuse_information info = {.struct_bytes = sizeof info};
    const bool good = normfuse_info(&info) == NORMFUSE_OK && normalizes(3);
    atomic_store(&came_back, good);
    pthread_testcancel();
    return NULL;
}

/* First calls read files, which are cancellation points: half of what they set up would stay undone. */
static bool is_cancelled_later(void)
{
    pthread_t thread;
    void *result = NULL;
    pthread_create(&thread, NULL, cancelled_thread, NULL);
    pthread_join(thread, &result);
    return result == PTHREAD_CANCELED && atomic_load(&came_back) && normalizes(2);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
static atomic_bool stops;

static void *call_until_stopped(void *context)
{
    (void)context;
    while (!atomic_load(&stops))
        normalizes(3);
    return NULL;
}

static bool works_in_child(void)
{
    signal(SIGALRM, SIG_DFL);
    alarm(20);
    return normalizes(3) && is_done(4);
}

/* Children that are made while other threads are inside of calls, pool and all. */
static void fork_beside_calls(void)
{
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, call_until_stopped, NULL);
    for (int i = 0; i < 8; i++)
        in_child("a fork beside calls", works_in_child);
    atomic_store(&stops, true);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
}
#endif

int main(void)
{
    x = malloc(VALUES * sizeof *x);
    for (int i = 0; i < VALUES; i++)
        x[i] = (float)(((uint32_t)i * 2654435761u) >> 16) * 0x1p-12f;
    fill_small();
    in_child("a fault in a thread of the pool reaches the process's handler", faults_reach_handler);
    in_child("signals of the pool's threads", masks_signals);
    in_child("a caller that waits long sleeps", waits_asleep);
    in_child("a thread that waits long for a piece sleeps", waits_asleep_for_pieces);
    in_child("cancelled inside of first calls", is_cancelled_later);
    in_child("errno: normfuse_info first", keeps_errno_of_info);
    in_child("errno: operators first", keeps_errno_of_calls);
    in_child("errno: sizes first", keeps_errno_of_sizes);
    in_child("errno: refusals", keeps_errno_of_refusals);
    test_counts();
    CHECK(compute(wanted, &(const normfuse_exec){.struct_bytes = sizeof(normfuse_exec), .threads = 1}),
          "the standard environment");
    CHECK(normalizes(1), "one thread");
    for (caller_environment = STANDARD; caller_environment < ENVIRONMENTS; caller_environment++) {
        char name[64];
        snprintf(name, sizeof name, "the pool is started in environment %d", (int)caller_environment);
        in_child(name, computes_alike_in_two);
    }

    CHECK(normfuse_threads_default() >= 1, "the pool has a size");
    for (int32_t tasks = 1; tasks <= TASKS; tasks++)
        CHECK(is_done(tasks), "%d tasks do all the work", (int)tasks);
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
        _exit(is_done(3) && normalizes(3) && normalizes(2) && masks_signals() ? 0 : 1);
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "the child of a fork");
    CHECK(normalizes(3), "the parent after the fork");
#if defined(__SANITIZE_ADDRESS__)
    harness_skip("a fork beside calls: AddressSanitizer's allocator may stay locked in the child");
#else
    fork_beside_calls();
#endif
#endif

    usleep(50000); /* the threads have gone to sleep */
    CHECK(is_done(4) && normalizes(4), "after the threads slept");
    free(x);
    free(expected);
    return harness_close();
}
