/* SPDX-License-Identifier: MIT
 *
 * test_cuda_host.c - the host side of the CUDA backend against a driver without a GPU (fake_driver.h): the driver,
 * kernels, launches, contexts, several devices and threads. Calls of the interface are in test_cuda_calls.c, what must
 * hold of any plan in test_cuda_plans.c. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda/loader.h"
#include "cuda/schedules.h"
#include "fake_driver.h"
#include "harness.h"
#include "normfuse.h"
#include "package.h"
#include "refused.h"

/* The kernel that launches here are of. */
static const struct normfuse_cuda_signature kernel = {
    .body = NORMFUSE_BODY_finish, .work = NORMFUSE_WORK_MERGE, .type = NORMFUSE_F64};
static const char *const kernel_name = "normfuse_finish_merge_f64";

static const struct normfuse_cuda_device *device_of(int32_t ordinal)
{
    const struct normfuse_cuda_device *device = NULL;
    const normfuse_status status = normfuse_cuda_device("test", ordinal, &device);
    CHECK(status == NORMFUSE_OK, "device %d: %d %s", (int)ordinal, (int)status, normfuse_last_error());
    return status == NORMFUSE_OK ? device : NULL;
}

static normfuse_status prepare_quietly(int32_t ordinal)
{
    errno = 77;
    const normfuse_status status = normfuse_prepare(ordinal);
    CHECK(errno == 77, "errno became %d", errno);
    return status;
}

static normfuse_status launch_on(const struct normfuse_cuda_device *device, struct normfuse_cuda_launch launch)
{
    static const struct normfuse_merge_arguments arguments = {.shards = 42};
    launch.signature = &kernel;
    if (launch.arguments == NULL)
        launch.arguments = &arguments;
    return normfuse_cuda_launch("test", device, NULL, &launch);
}

/* ---- the driver ------------------------------------------------------------------------------------------------ */

static void test_no_driver(void)
{
    void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library != NULL) {
        dlclose(library);
        harness_skip("no driver: this machine has one");
        return;
    }
    normfuse_cuda_use_driver(NULL);
    REFUSED(NORMFUSE_NO_DRIVER, prepare_quietly(0), "normfuse_prepare: ", "no CUDA driver", "libcuda.so.1");
    REFUSED(NORMFUSE_NO_DRIVER, prepare_quietly(7), "libcuda.so.1");
    CHECK(strstr(normfuse_cuda_state(), "libcuda.so.1") != NULL, "state: %s", normfuse_cuda_state());

    int64_t sizes[] = {1, 2, 3, 3}, samples;
    normfuse_axes axes;
    normfuse_tensor x = normfuse_tensor_contiguous(sizes, NORMFUSE_F32, 4, sizes, &axes);
    x.device.device_type = NORMFUSE_CUDA;
    REFUSED(NORMFUSE_NO_DRIVER, normfuse_sample_quantum(&x, &samples), "sample_quantum", "libcuda.so.1");
}

static void test_versions(void)
{
    char wanted[32], found[32];
    snprintf(wanted, sizeof wanted, "%d.0", (int)NORMFUSE_CUDA_DRIVER_MAJOR);
    fake_driver_reset();
    fake_driver.version = (NORMFUSE_CUDA_DRIVER_MAJOR - 1) * 1000 + 80;
    fake_driver_use();
    snprintf(found, sizeof found, "%d.8", (int)NORMFUSE_CUDA_DRIVER_MAJOR - 1);
    REFUSED(NORMFUSE_OLD_DRIVER, prepare_quietly(0), wanted, found);
    CHECK(strstr(normfuse_cuda_state(), found) != NULL, "state: %s", normfuse_cuda_state());
    CHECK(fake_driver.calls[FAKE_CALLS_cuInit] == 0, "an old driver was started");

    /* Any of the same major version and any later one */
    const int good[] = {NORMFUSE_CUDA_DRIVER_MAJOR * 1000, NORMFUSE_CUDA_DRIVER_MAJOR * 1000 + 2000};
    for (int i = 0; i < 2; i++) {
        fake_driver_reset();
        fake_driver.version = good[i];
        fake_driver_use();
        CHECK(prepare_quietly(0) == NORMFUSE_OK, "version %d: %s", good[i], normfuse_last_error());
    }
}

static void test_start(void)
{
    fake_driver_reset();
    fake_driver.init_result = CUDA_ERROR_NO_DEVICE;
    fake_driver_use();
    REFUSED(NORMFUSE_BAD_ARGUMENT, prepare_quietly(0), "no CUDA device 0");
    CHECK(strstr(normfuse_cuda_state(), "0 devices") != NULL, "state: %s", normfuse_cuda_state());

    fake_driver_reset();
    fake_driver.init_result = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    fake_driver_use();
    /* Not for good: every call asks again, and the words of the first answer stay where they are. */
    normfuse_information info = {.struct_bytes = sizeof info};
    CHECK(normfuse_info(&info) == NORMFUSE_OK && strstr(info.cuda, "fake error 803") != NULL, "no error 803");
    const char *const first_words = info.cuda;
    REFUSED(NORMFUSE_DEVICE_ERROR, prepare_quietly(0), "fake error 803");
    REFUSED(NORMFUSE_DEVICE_ERROR, prepare_quietly(0), "fake error 803");
    CHECK(normfuse_info(&info) == NORMFUSE_OK && info.cuda == first_words, "the same answer in other memory");
    fake_driver.init_result = CUDA_ERROR_NO_DEVICE;
    REFUSED(NORMFUSE_BAD_ARGUMENT, prepare_quietly(0), "no CUDA device 0");
    fake_driver.init_result = CUDA_SUCCESS;
    CHECK(prepare_quietly(0) == NORMFUSE_OK, "the driver starts later: %s", normfuse_last_error());
    CHECK(normfuse_info(&info) == NORMFUSE_OK && strstr(info.cuda, "1 device") != NULL &&
              strstr(first_words, "fake error 803") != NULL,
          "the words after a failed start, or those of before");
    const int starts = fake_driver.calls[FAKE_CALLS_cuInit];
    CHECK(prepare_quietly(0) == NORMFUSE_OK && fake_driver.calls[FAKE_CALLS_cuInit] == starts, "it is started again");

    fake_driver_reset();
    fake_driver.init_result = CUDA_ERROR_STUB_LIBRARY;
    fake_driver_use();
    REFUSED(NORMFUSE_NO_DRIVER, prepare_quietly(0), "stub");

    fake_driver_reset();
    fake_driver.devices = 2;
    fake_driver_use();
    REFUSED(NORMFUSE_BAD_ARGUMENT, prepare_quietly(2), "no CUDA device 2", "sees 2");
    REFUSED(NORMFUSE_BAD_ARGUMENT, prepare_quietly(-1), "no CUDA device -1");
    CHECK(prepare_quietly(1) == NORMFUSE_OK, "%s", normfuse_last_error());
    const int loads = fake_driver.calls[FAKE_CALLS_cuLibraryLoadData];
    fake_driver.devices = 1;
    fake_driver.device[0].name = "A GPU";
    fake_driver_use();
    char state[160];
    snprintf(state, sizeof state, "driver (CUDA %d.%d), 1 device: A GPU (9.0)",
             fake_driver.version / 1000, fake_driver.version % 1000 / 10);
    CHECK(strcmp(normfuse_cuda_state(), state) == 0, "state: %s", normfuse_cuda_state());
    CHECK(normfuse_info(&info) == NORMFUSE_OK && strcmp(info.cuda, state) == 0, "info.cuda differs");
    CHECK(fake_driver.calls[FAKE_CALLS_cuLibraryLoadData] == loads, "the state in words loaded kernels");
}

/* The entries by name, versions included, through a library that is opened. */
static void *sync_of(int32_t device, uintptr_t stream)
{
    size_t bytes = 1;
    void *const memory = normfuse_stream_sync(device, (void *)stream, &bytes);
    CHECK(bytes == (memory != NULL ? 65536u : 0u), "%zu bytes", bytes);
    return memory;
}

/* Scratch in a stream's order, whatever context is current. */
static void test_stream_scratch(struct fake_driver *there, int (*contexts)(void))
{
    for (int32_t device = 0; device < 2; device++) {
        void *scratch = NULL;
        normfuse_stream_scratch(device, (void *)(uintptr_t)0x100, 1000, &scratch);
        CHECK(scratch != NULL && (uintptr_t)scratch % 256 == 0 && there->pooled == 1, "no scratch on device %d",
              (int)device);
        normfuse_stream_scratch_free(device, (void *)(uintptr_t)0x100, scratch);
        CHECK(there->pooled == 0 && contexts() == 0, "%d blocks, %d contexts", there->pooled, contexts());
    }
    there->is_out_of_memory = true;
    void *none = there;
    normfuse_stream_scratch(0, NULL, 1000, &none);
    CHECK(none == NULL && contexts() == 0, "scratch where there is none");
    there->is_out_of_memory = false;
}

static void *acquire_in_thread(void *context)
{
    normfuse_exec exec = {.struct_bytes = sizeof exec, .stream = (void *)(uintptr_t)0x100};
    void *const acquired = normfuse_stream_acquire(0, &exec);
    *(_Atomic(int) *)context = 1;
    normfuse_stream_release(acquired);
    return NULL;
}

/* The block that normfuse_stream_sync gives, with scratch behind it, for one thread at a time. */
static void test_stream_acquire(void)
{
    normfuse_exec exec = {.struct_bytes = sizeof exec, .stream = (void *)(uintptr_t)0x100};
    char *const sync = sync_of(0, 0x100);
    void *const acquired = normfuse_stream_acquire(0, &exec);
    CHECK(acquired != NULL && exec.sync == sync && exec.sync_bytes == 65536, "another block than the stream's");
    CHECK(exec.scratch == sync + 65536 && exec.scratch_bytes > 0, "no scratch behind it");
    memset(exec.scratch, 1, exec.scratch_bytes);
    normfuse_exec other = {.struct_bytes = sizeof other, .stream = (void *)(uintptr_t)0x200};
    void *const beside = normfuse_stream_acquire(0, &other);
    CHECK(beside != NULL && other.scratch != exec.scratch, "two streams share scratch");
    normfuse_stream_release(beside);

    _Atomic(int) passed = 0;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, acquire_in_thread, &passed) == 0, "no thread");
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    CHECK(passed == 0, "two threads have one stream's scratch");
    normfuse_stream_release(acquired);
    pthread_join(thread, NULL);
    CHECK(passed == 1, "a thread was kept waiting");

    normfuse_exec none = {.struct_bytes = sizeof none, .stream = (void *)CU_STREAM_PER_THREAD};
    CHECK(normfuse_stream_acquire(0, &none) == NULL && none.sync == NULL && none.scratch == NULL,
          "threads share the scratch of their own default streams");
    normfuse_stream_release(NULL);
}

/* A stream that is made at the address of a destroyed one, whose work may still run, shares no memory with it; what
 * destroyed streams leave is freed, while other streams are captured, too. */
static void test_destroyed_streams(struct fake_driver *there, void (*destroy_graphs)(void))
{
    there->capture = 0;
    there->capturing = false;
    there->renewed = (void *)(uintptr_t)0x500;
    char *const first = sync_of(0, 0x500), *const beside = sync_of(0, 0x600);
    CHECK(first != NULL && sync_of(0, 0x500) == first, "a stream's memory has changed");
    there->renewals = 1;
    char *const second = sync_of(0, 0x500);
    CHECK(second != NULL && second != first && sync_of(0, 0x500) == second,
          "a new stream has a destroyed one's memory");
    there->capturing = true;
    const int before = there->allocations;
    int maximum = 0;
    for (; there->renewals < 1000; there->renewals++) {
        char *const sync = sync_of(0, 0x500);
        CHECK(sync != NULL && sync[0] == 0 && sync[65535] == 0, "no memory, or it was not cleared");
        maximum = maximum < there->allocations ? there->allocations : maximum;
    }
    there->capturing = false;
    CHECK(maximum - before < 64, "1000 streams left %d blocks", maximum - before);
    CHECK(sync_of(0, 0x600) == beside, "a living stream's memory has changed");
    /* A device reset takes the memory with it: none of it is used again, nor freed. */
    there->capture = 10;
    char *const captured = sync_of(0, 0x600);
    there->capture = 0;
    destroy_graphs(); /* nobody's, until another stream takes it */
    const int left = there->allocations;
    there->resets = 1;
    char *const after = sync_of(0, 0x600), *const other = sync_of(0, 0x500);
    CHECK(after != NULL && after != beside && after != captured && other != NULL && there->allocations == left + 2,
          "memory of before a device reset");
    CHECK(there->invalidations == 0, "%d captures invalidated", there->invalidations);
}

/* Which memory is whose: a stream's, a stream's of a captured graph, of a context. `there` is of the driver opened as
 * `library`. */
static void test_stream_sync(void *library, struct fake_driver *there)
{
    void (*destroy_graphs)(void), (*set_context)(CUcontext);
    int (*contexts)(void);
    CUcontext (*context_of)(int, int);
    const struct {
        const char *name;
        void *function;
    } wanted[] = {{"fake_driver_destroy_graphs", &destroy_graphs},
                  {"fake_driver_set_context", &set_context},
                  {"fake_driver_depth", &contexts},
                  {"fake_driver_context", &context_of}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *const address = dlsym(library, wanted[i].name);
        memcpy(wanted[i].function, &address, sizeof address);
    }
    set_context(NULL);
    there->devices = 2;

    there->is_out_of_memory = true;
    CHECK(sync_of(0, 0x100) == NULL && contexts() == 0, "memory where there is none");
    there->is_out_of_memory = false;
    char *const first = sync_of(0, 0x100);
    CHECK(first != NULL && first[0] == 0 && first[65535] == 0, "no memory, or it was not cleared");
    char *const second = sync_of(0, 0x200), *const usual = sync_of(0, 0);
    CHECK(second != NULL && second != first && usual != NULL && usual != first && usual != second,
          "two streams share memory");
    CHECK(sync_of(0, 0x100) == first && sync_of(0, 0x200) == second && sync_of(0, (uintptr_t)CU_STREAM_LEGACY) == usual,
          "a stream's memory has changed");
    CHECK(sync_of(0, (uintptr_t)CU_STREAM_PER_THREAD) == NULL, "threads share the memory of their own default streams");
    char *const other = sync_of(1, 0x100);
    CHECK(other != NULL && other != first && sync_of(1, 0x100) == other, "two devices share memory");
    CHECK(there->allocations == 4 && there->streams == 0 && contexts() == 0, "%d allocations, %d streams, %d contexts",
          there->allocations, there->streams, contexts());
    CHECK(there->device[1].primary_retained == 1, "retained %d times", there->device[1].primary_retained);
    /* A context of the caller's own, as the launch will take it, and the same one being the primary. */
    set_context(context_of(0, 1));
    char *const own = sync_of(0, 0x100);
    CHECK(own != NULL && own != first && sync_of(0, 0x100) == own && contexts() == 1, "two contexts share memory");
    set_context(context_of(0, 0));
    CHECK(sync_of(0, 0x100) == first, "the primary context has two memories for a stream");

    there->capturing = true;
    there->capture = 7;
    char *const captured = sync_of(0, 0x100), *const beside = sync_of(0, 0x200);
    CHECK(captured != NULL && captured != first && captured != second && beside != NULL && beside != captured &&
              beside != first && beside != second && sync_of(0, 0x100) == captured,
          "a graph shares memory with a stream");
    there->capture = 8;
    char *const later = sync_of(0, 0x100);
    CHECK(later != NULL && later != captured && later != beside && later != first, "two graphs share memory");
    CHECK(there->graph_objects == 3, "graphs hold %d objects", there->graph_objects);
    there->capture = 0;
    CHECK(sync_of(0, 0x100) == first && sync_of(0, 0x200) == second, "a stream's memory has changed by a capture");
    /* Memory of graphs that are gone: taken again, by a stream or by another graph, and nothing is allocated. */
    const int allocations = there->allocations;
    destroy_graphs();
    char *const again = sync_of(0, 0x300);
    CHECK(again == captured || again == beside || again == later, "the memory of a graph was lost");
    there->capture = 9;
    char *const next = sync_of(0, 0x300);
    CHECK(next != again && (next == captured || next == beside || next == later), "the memory of a graph was lost");
    CHECK(there->allocations == allocations, "%d allocations more", there->allocations - allocations);
    /* A graph that takes no object: the block is free again, and this call has none. */
    there->user_object_result = CUDA_ERROR_INVALID_VALUE;
    CHECK(sync_of(0, 0x400) == NULL && sync_of(0, 0x400) == NULL, "memory that no graph holds");
    there->user_object_result = CUDA_SUCCESS;
    char *const last = sync_of(0, 0x400);
    CHECK(last != NULL && last != next && there->allocations == allocations, "the memory of a graph was lost");
    destroy_graphs();
    set_context(NULL);
    test_stream_acquire();
    test_stream_scratch(there, contexts);
    test_destroyed_streams(there, destroy_graphs);
}

static void test_opened(void)
{
    if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) != NULL) {
        harness_skip("the opened driver: this machine has one of its own");
        return;
    }
    /* The loader's dlopen finds it by its soname from now on. */
    void *const library = dlopen(NORMFUSE_FAKE_LIBCUDA, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL, "dlopen: %s", dlerror());
    if (library == NULL)
        return;
    struct fake_driver *const there = dlsym(library, "fake_driver");
    void (*reset)(void);
    void *const address = dlsym(library, "fake_driver_reset");
    memcpy(&reset, &address, sizeof reset);
    reset();
    there->version = 11080;
    normfuse_cuda_use_driver(NULL);
    REFUSED(NORMFUSE_OLD_DRIVER, prepare_quietly(0), "11.8");
    there->version = 13000;
    normfuse_cuda_use_driver(NULL);
    const struct normfuse_cuda_device *const device = device_of(0);
    if (device == NULL)
        return;
    CHECK(launch_on(device, (struct normfuse_cuda_launch){.grid = 3, .threads = 64}) == NORMFUSE_OK,
          "launch: %s", normfuse_last_error());
    CHECK(there->launches == 1 && there->launch[0].grid == 3, "the launch did not arrive");
    CHECK(there->device[0].primary_retained == 1, "retained %d times", there->device[0].primary_retained);
    test_stream_sync(library, there);
}

/* A function that allocates device memory, copies, sets or waits has no place among the entries. */
static void test_entries(void)
{
    static const char *const names[] = {
#define NAME(name) #name,
        NORMFUSE_CUDA_DRIVER_LIST(NAME)
#undef NAME
    };
    static const char *const forbidden[] = {"Alloc", "Free", "Sync", "Memcpy", "Memset", "cuMem", "Wait", "Query"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (size_t k = 0; k < sizeof forbidden / sizeof *forbidden; k++)
            CHECK(strstr(names[i], forbidden[k]) == NULL, "%s is looked up", names[i]);
}

/* ---- kernels --------------------------------------------------------------------------------------------------- */

static void test_facts(void)
{
    fake_driver_reset();
    fake_driver.devices = 2;
    fake_driver.device[1].name = "NVIDIA A100";
    fake_driver.device[1].capability = 86;
    fake_driver.device[1].multiprocessors = 108;
    fake_driver.device[1].clusters = false;
    fake_driver_use();
    const struct normfuse_cuda_device *const first = device_of(0), *const second = device_of(1);
    if (first == NULL || second == NULL)
        return;
    CHECK(first->ordinal == 0 && first->capability == 90 && first->multiprocessors == 132 && first->clusters &&
              first->shared_per_block == 232448 && strcmp(first->name, "NVIDIA H200") == 0,
          "facts of device 0");
    CHECK(second->ordinal == 1 && second->capability == 86 && second->multiprocessors == 108 && !second->clusters &&
              strcmp(second->name, "NVIDIA A100") == 0,
          "facts of device 1");
}

/* As cuDevicePrimaryCtxReset leaves it: the context's address stays, nothing works in it until it is retained again. */
static void test_reset(void)
{
    fake_driver_reset();
    fake_driver_use();
    const struct normfuse_cuda_device *const device = device_of(0);
    const struct normfuse_cuda_launch launch = {.grid = 3, .threads = 64};
    CHECK(launch_on(device, launch) == NORMFUSE_OK, "%s", normfuse_last_error());
    fake_driver.device[0].is_reset = true;
    REFUSED(NORMFUSE_DEVICE_ERROR, launch_on(device, launch), "fake error 709");
    /* The caller's own retaining */
    CUcontext context;
    fake_driver_table()->cuDevicePrimaryCtxRetain(&context, 0);
    CHECK(launch_on(device, launch) == NORMFUSE_OK, "after the caller retained: %s", normfuse_last_error());
    fake_driver.device[0].is_reset = true;
    CHECK(prepare_quietly(0) == NORMFUSE_OK && launch_on(device, launch) == NORMFUSE_OK && fake_driver_depth() == 0,
          "after normfuse_prepare: %s", normfuse_last_error());
    CHECK(fake_driver.device[0].functions_loaded[0] == 2, "loaded %d times", fake_driver.device[0].functions_loaded[0]);
}

#if !defined(__SANITIZE_THREAD__)
static void *info_in_thread(void *argument)
{
    normfuse_information info = {.struct_bytes = sizeof info};
    (void)argument;
    (void)normfuse_info(&info);
    return NULL;
}
#endif

/* A child that is made while a thread starts the driver. */
static void test_fork(void)
{
#if defined(__SANITIZE_THREAD__)
    harness_skip("a fork beside a thread: ThreadSanitizer cannot follow the child");
#else
    fake_driver_reset();
    fake_driver.init_milliseconds = 300;
    fake_driver_use();
    pthread_t thread;
    pthread_create(&thread, NULL, info_in_thread, NULL);
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        alarm(10);
        _exit(prepare_quietly(0) == NORMFUSE_OK ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0, "the child's wait status is 0x%x", (unsigned)status);
    pthread_join(thread, NULL);
#endif
}

/* A group norm in place: on a device at an address that nothing reads, on the CPU of a few values. */
static normfuse_status normalize(int32_t device_type)
{
    static float values[2 * 64 * 4];
    void *const address = device_type == NORMFUSE_CPU ? (void *)values : (void *)(uintptr_t)0x7f0000000000;
    const int64_t sizes[] = {2, 64, 4};
    normfuse_axes axes;
    normfuse_tensor x = normfuse_tensor_contiguous(address, NORMFUSE_F32, 3, sizes, &axes);
    x.device.device_type = device_type;
    const normfuse_group_norm_options options = {.struct_bytes = sizeof options, .groups = 8, .eps = 1e-5};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &x, .y = &x};
    /* Read by nothing either. */
    const normfuse_exec exec = {
        .struct_bytes = sizeof exec, .scratch = (void *)(uintptr_t)0x7e0000000000, .scratch_bytes = 1 << 20};
    return normfuse_group_norm_forward(&options, &tensors, device_type == NORMFUSE_CPU ? NULL : &exec);
}

/* NORMFUSE_VERBOSE=plan, which a process reads once: what each schedule says, and the kernel that is taken. */
static void plan_in_words(const char *gpu, int capability, const char *words)
{
    int ends[2], status = -1;
    char text[4096] = "";
    CHECK(pipe(ends) == 0, "no pipe");
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        fake_driver_reset();
        fake_driver.device[0].name = gpu;
        fake_driver.device[0].capability = capability;
        fake_driver.device[0].clusters = capability >= 90;
        fake_driver_use();
        setenv("NORMFUSE_VERBOSE", "plan", 1);
        dup2(ends[1], STDERR_FILENO);
        close(ends[1]);
        _exit(normalize(NORMFUSE_CUDA) == NORMFUSE_OK ? 0 : 1);
    }
    close(ends[1]);
    for (size_t length = 0; length + 1 < sizeof text;) {
        const ssize_t got = read(ends[0], text + length, sizeof text - 1 - length);
        if (got <= 0)
            break;
        length += (size_t)got;
    }
    close(ends[0]);
    waitpid(child, &status, 0);
    CHECK(status == 0, "the child's wait status is 0x%x", (unsigned)status);
    CHECK(strstr(text, "normfuse: plan: group_norm forward: ") != NULL && strstr(text, ": held: ") != NULL &&
              strstr(text, words) != NULL && strstr(text, ": single: ") != NULL &&
              strstr(text, ": stream: ") != NULL && strstr(text, ": takes normfuse_") != NULL,
          "what was said: %s", text);
}

static void test_plan_in_words(void)
{
#if defined(__SANITIZE_THREAD__)
    harness_skip("a fork: ThreadSanitizer cannot follow the child");
#else
    plan_in_words("NVIDIA H200", 90, ": by figures of this kind of GPU\n");
    plan_in_words("NVIDIA A100-SXM4-80GB", 80, "none below 9.0 was measured\n");
    plan_in_words("NVIDIA B200", 100, "the newest measured\n");
#endif
}

/* After a fault on the device the driver refuses everything in the context. Every call says so, none takes it for an
 * answer; once the device is reset calls work. */
static void test_sticky_error(void)
{
    fake_driver_reset();
    fake_driver_use();
    CHECK(normalize(NORMFUSE_CUDA) == NORMFUSE_OK, "%s", normfuse_last_error());
    fake_driver.launch_result = fake_driver.device[0].function_result =
        CUDA_ERROR_ILLEGAL_ADDRESS;
    for (int i = 0; i < 2; i++) {
        REFUSED(NORMFUSE_DEVICE_ERROR, normalize(NORMFUSE_CUDA), "group_norm", "NVIDIA H200");
        REFUSED(NORMFUSE_DEVICE_ERROR, prepare_quietly(0), "NVIDIA H200", "fake error 700");
        CHECK(normalize(NORMFUSE_CPU) == NORMFUSE_OK && fake_driver_depth() == 0, "%s, or contexts are left",
              normfuse_last_error());
    }
    fake_driver.launch_result = fake_driver.device[0].function_result = CUDA_SUCCESS;
    fake_driver.device[0].is_reset = true;
    CHECK(prepare_quietly(0) == NORMFUSE_OK && normalize(NORMFUSE_CUDA) == NORMFUSE_OK, "after a reset: %s",
          normfuse_last_error());
}

/* The driver of a process refuses the process's children. */
static void test_fork_after_start(void)
{
#if defined(__SANITIZE_THREAD__)
    harness_skip("a fork beside the pool: ThreadSanitizer cannot follow the child");
#else
    fake_driver_reset();
    fake_driver_use();
    CHECK(normalize(NORMFUSE_CUDA) == NORMFUSE_OK, "%s", normfuse_last_error());
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        alarm(10);
        fake_driver.context_result = CUDA_ERROR_NOT_INITIALIZED;
        REFUSED(NORMFUSE_DEVICE_ERROR, normalize(NORMFUSE_CUDA), "group_norm", "fake error 3");
        REFUSED(NORMFUSE_DEVICE_ERROR, prepare_quietly(0), "normfuse_prepare", "fake error 3");
        normfuse_information info = {.struct_bytes = sizeof info};
        CHECK(normfuse_info(&info) == NORMFUSE_OK && strstr(info.cuda, "1 device") != NULL, "info");
        CHECK(normalize(NORMFUSE_CPU) == NORMFUSE_OK, "%s", normfuse_last_error());
        fflush(stdout);
        _exit(harness_failed != 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0, "the child's wait status is 0x%x", (unsigned)status);
#endif
}

enum { THREADS = 8 };
static pthread_barrier_t barrier;

static void *prepare_in_thread(void *argument)
{
    normfuse_status *const status = argument;
    pthread_barrier_wait(&barrier);
    *status = normfuse_prepare(0);
    const struct normfuse_cuda_device *device;
    if (*status == NORMFUSE_OK)
        *status = normfuse_cuda_device("test", 1, &device);
    if (*status == NORMFUSE_OK)
        *status = launch_on(device, (struct normfuse_cuda_launch){.grid = 1, .threads = 32});
    return NULL;
}

static void test_threads(void)
{
    for (int round = 0; round < 50; round++) {
        pthread_t threads[THREADS];
        normfuse_status statuses[THREADS];
        fake_driver_reset();
        fake_driver.devices = 2;
        fake_driver_use();
        pthread_barrier_init(&barrier, NULL, THREADS);
        for (int i = 0; i < THREADS; i++)
            pthread_create(&threads[i], NULL, prepare_in_thread, &statuses[i]);
        for (int i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
        pthread_barrier_destroy(&barrier);
        bool all = true;
        for (int i = 0; i < THREADS; i++)
            all &= statuses[i] == NORMFUSE_OK;
        CHECK(all && fake_driver.launches == THREADS, "round %d: a thread was refused", round);
        CHECK(fake_driver.calls[FAKE_CALLS_cuInit] == 1 &&
                  fake_driver.calls[FAKE_CALLS_cuFuncLoad] == 1,
              "round %d: cuInit %d times, cuFuncLoad %d times", round, fake_driver.calls[FAKE_CALLS_cuInit],
              fake_driver.calls[FAKE_CALLS_cuFuncLoad]);
        CHECK(fake_driver.device[0].primary_retained == 1 && fake_driver.device[1].primary_retained == 1,
              "round %d: retained %d and %d times", round, fake_driver.device[0].primary_retained,
              fake_driver.device[1].primary_retained);
    }
}

static void *launch_in_thread(void *argument)
{
    normfuse_status *const status = argument;
    const struct normfuse_cuda_device *device;
    pthread_barrier_wait(&barrier);
    *status = normfuse_cuda_device("test", 0, &device);
    if (*status == NORMFUSE_OK)
        *status = launch_on(device, (struct normfuse_cuda_launch){.grid = 1, .threads = 32});
    return NULL;
}

/* Threads without a context all find that nobody has retained the primary one yet. */
static void test_threads_retain(void)
{
    pthread_t threads[THREADS];
    normfuse_status statuses[THREADS];
    fake_driver_reset();
    fake_driver_use();
    fake_driver_set_context(fake_driver_context(0, 1));
    CHECK(prepare_quietly(0) == NORMFUSE_OK && fake_driver.device[0].primary_retained == 0, "in a context of its own");
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, launch_in_thread, &statuses[i]);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK(statuses[i] == NORMFUSE_OK, "thread %d was refused", i);
    }
    pthread_barrier_destroy(&barrier);
    if (fake_driver.calls[FAKE_CALLS_cuDevicePrimaryCtxRetain] == 1)
        harness_skip("two threads that retain a context: they did not meet");
    CHECK(fake_driver.device[0].primary_retained == 1, "retained %d times", fake_driver.device[0].primary_retained);
    fake_driver_set_context(NULL);
}

/* ---- launches -------------------------------------------------------------------------------------------------- */

static void test_launch_attributes(void)
{
    static const uint32_t clusters[] = {0, 1, 2, 8, 16};
    fake_driver_reset();
    fake_driver_use();
    const struct normfuse_cuda_device *const device = device_of(0);
    if (device == NULL)
        return;
    int stream;
    struct normfuse_merge_arguments arguments;
    memset(&arguments, 0x5a, sizeof arguments);
    fake_driver.notes_arguments = true;
    for (int i = 0; i < 20; i++) {
        const struct normfuse_cuda_launch launch = {.signature = &kernel, .grid = 32,
                                                    .threads = 96,
                                                    .cluster = clusters[i / 4],
                                                    .shared = (size_t)i * 11000,
                                                    .cooperative = (i & 1) != 0,
                                                    .dependent = (i & 2) != 0,
                                                    .arguments = &arguments};
        arguments.shards = i;
        CHECK(normfuse_cuda_launch("test", device, &stream, &launch) == NORMFUSE_OK, "launch %d: %s", i,
              normfuse_last_error());
        const struct fake_launch *const seen = &fake_driver.launch[i];
        CHECK(strcmp(seen->name, kernel_name) == 0 && seen->grid == 32 && seen->threads == 96 &&
                  seen->shared == launch.shared && seen->stream == &stream && seen->device == 0,
              "launch %d: geometry", i);
        CHECK(seen->cluster == (launch.cluster > 1 ? launch.cluster : 0), "launch %d: cluster %u", i, seen->cluster);
        CHECK(seen->cooperative == launch.cooperative && seen->dependent == launch.dependent, "launch %d: attributes",
              i);
        CHECK(memcmp(seen->arguments, &arguments, sizeof arguments) == 0,
              "launch %d: arguments", i);
    }
    CHECK(fake_driver.launches == 20, "%d launches", fake_driver.launches);
}

static void test_launch_refused(void)
{
    fake_driver_reset();
    fake_driver_use();
    const struct normfuse_cuda_device *const device = device_of(0);
    if (device == NULL)
        return;
    struct normfuse_cuda_launch launch = {.grid = 133 * 64, .threads = 1024, .cooperative = true};
    REFUSED(NORMFUSE_DEVICE_ERROR, launch_on(device, launch), "test: ", kernel_name, "fake error 720",
            "8512 blocks");
    launch.cooperative = false;
    CHECK(launch_on(device, launch) == NORMFUSE_OK, "%s", normfuse_last_error());
    fake_driver.launch_result = CUDA_ERROR_ILLEGAL_ADDRESS;
    REFUSED(NORMFUSE_DEVICE_ERROR, launch_on(device, launch), "NVIDIA H200", "fake error 700");
    CHECK(fake_driver_depth() == 0, "%d contexts are left", fake_driver_depth());
    launch.shared = 232449;
    fake_driver.launch_result = CUDA_SUCCESS;
    REFUSED(NORMFUSE_DEVICE_ERROR, launch_on(device, launch), "232449 bytes");
}

/* A call costs what it costs: three entries with a context of the device current, four with none. */
static int calls_of_all(void)
{
    int sum = 0;
    for (int i = 0; i < FAKE_ENTRIES; i++)
        sum += fake_driver.calls[i];
    return sum;
}

static void test_contexts(void)
{
    fake_driver_reset();
    fake_driver.devices = 2;
    fake_driver_use();
    const struct normfuse_cuda_launch launch = {.grid = 1, .threads = 32};

    /* A context of the caller's own, of this device: used, and the primary one is left alone. */
    const CUcontext own = fake_driver_context(1, 2);
    fake_driver_set_context(own);
    const struct normfuse_cuda_device *second = device_of(1);
    if (second == NULL)
        return;
    CHECK(launch_on(second, launch) == NORMFUSE_OK, "%s", normfuse_last_error()); /* compiles */
    fake_driver.launches = 0;
    int before = calls_of_all();
    CHECK(launch_on(second, launch) == NORMFUSE_OK, "%s", normfuse_last_error());
    CHECK(calls_of_all() - before == 3, "a launch made %d calls", calls_of_all() - before);
    CHECK(fake_driver.launch[0].context == own && fake_driver.launch[0].device == 1, "not in the caller's context");
    CHECK(fake_driver.device[1].primary_retained == 0, "the primary context was retained");
    CHECK(fake_driver.calls[FAKE_CALLS_cuCtxPushCurrent] == 0, "a context was pushed");

    /* A call for another device: the primary one of the right device for as long as the call takes. */
    const struct normfuse_cuda_device *first = device_of(0);
    if (first == NULL)
        return;
    CHECK(launch_on(first, launch) == NORMFUSE_OK, "%s", normfuse_last_error());
    CHECK(fake_driver.launch[1].context == fake_driver_context(0, 0) && fake_driver.launch[1].device == 0,
          "not in the primary context of device 0");
    CUcontext current = NULL;
    cuCtxGetCurrent(&current);
    CHECK(fake_driver_depth() == 1 && current == own, "the caller's context is not back");

    /* None: likewise, and retained once for all calls. */
    fake_driver_set_context(NULL);
    for (int i = 0; i < 3; i++) {
        before = calls_of_all();
        CHECK(launch_on(first, launch) == NORMFUSE_OK, "%s", normfuse_last_error());
        CHECK(calls_of_all() - before == 4, "a launch made %d calls", calls_of_all() - before);
        CHECK(fake_driver_depth() == 0, "%d contexts are left", fake_driver_depth());
    }
    CHECK(fake_driver.device[0].primary_retained == 1 && fake_driver.device[1].primary_retained == 0,
          "retained %d and %d times", fake_driver.device[0].primary_retained, fake_driver.device[1].primary_retained);
    CHECK(fake_driver.calls[FAKE_CALLS_cuCtxPushCurrent] == fake_driver.calls[FAKE_CALLS_cuCtxPopCurrent],
          "%d pushed, %d popped", fake_driver.calls[FAKE_CALLS_cuCtxPushCurrent],
          fake_driver.calls[FAKE_CALLS_cuCtxPopCurrent]);
}

int main(void)
{
    setenv("NORMFUSE_NVRTC", NORMFUSE_FAKE_NVRTC, 1);
    setenv("NORMFUSE_CACHE_DIR", "", 1);
    test_plan_in_words(); /* before anything else reads the environment */
    test_no_driver();
    test_opened();
    test_versions();
    test_start();
    test_entries();
    test_facts();
    test_reset();
    test_fork();
    test_sticky_error();
    test_fork_after_start();
    test_threads();
    test_threads_retain();
    test_launch_attributes();
    test_launch_refused();
    test_contexts();
    normfuse_cuda_use_driver(NULL);
    return harness_close();
}
