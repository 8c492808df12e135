/* SPDX-License-Identifier: MIT
 *
 * test_cuda_host.c - the host side of the CUDA backend against a driver without a GPU (fake_driver.h): statuses, what
 * is passed to launches, contexts, several devices and threads, cached occupancy, and what must hold of any choice of
 * kernels and geometry. */
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
#include "tolerance.h"
#include "torch.h"

#define KERNEL ((enum normfuse_cuda_kernel)0)
#define LAST_KERNEL ((enum normfuse_cuda_kernel)(NORMFUSE_CUDA_KERNELS - 1))

static const char *const first_kernel_name = "normfuse_rows_split_forward_f32_4x22";

/* What kernels are given is noted at launches. */
static void note_arguments(void)
{
    fake_driver.argument_bytes = sizeof(struct normfuse_cuda_arguments);
    fake_driver.notes_specialized = true;
}

static const struct normfuse_cuda_device *device_of(int32_t ordinal)
{
    const struct normfuse_cuda_device *device = NULL;
    const normfuse_status status = normfuse_cuda_device("test", ordinal, &device);
    CHECK(status == NORMFUSE_OK, "device %d: %d %s", (int)ordinal, (int)status, normfuse_last_error());
    return status == NORMFUSE_OK ? device : NULL;
}

static int32_t blocks_per_multiprocessor(const struct normfuse_cuda_device *device, enum normfuse_cuda_kernel kernel,
                                         uint32_t threads, size_t shared)
{
    const struct normfuse_cuda_launch launch = {.kernel = kernel, .threads = threads, .shared = shared};
    return normfuse_cuda_resident_clusters(device, &launch) / device->multiprocessors;
}

#define REFUSED(wanted, status, ...) refused(__LINE__, wanted, status, (const char *[]){__VA_ARGS__, NULL})

/* The status, and a message with every one of these words. */
static void refused(int line, normfuse_status wanted, normfuse_status status, const char *const *words)
{
    CHECK(status == wanted, "line %d: status %d, not %d: %s", line, (int)status, (int)wanted, normfuse_last_error());
    for (; *words != NULL; words++)
        CHECK(strstr(normfuse_last_error(), *words) != NULL, "line %d: '%s' is not in: %s", line, *words,
              normfuse_last_error());
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
    static const int64_t argument = 42;
    if (launch.arguments == NULL)
        launch.arguments = &argument;
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
    CHECK(strstr(normfuse_cuda_state(), "libcuda.so.1") != NULL &&
              strstr(normfuse_cuda_state(), "; built for " NORMFUSE_CUDA_BUILT_FOR) != NULL,
          "state: %s", normfuse_cuda_state());

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
    CHECK(strstr(normfuse_cuda_state(), "0 devices; built for") != NULL, "state: %s", normfuse_cuda_state());

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
    /* Of graphs that are gone: taken again, by a stream or by another graph, and nothing is allocated. */
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
    CHECK(launch_on(device, (struct normfuse_cuda_launch){.kernel = KERNEL, .grid = 3, .threads = 64}) == NORMFUSE_OK,
          "launch: %s", normfuse_last_error());
    CHECK(there->launches == 1 && there->launch[0].grid == 3, "the launch did not arrive");
    CHECK(there->device[0].primary_retained == 1, "retained %d times", there->device[0].primary_retained);
    test_stream_sync(library, there);
}

/* What allocates device memory, copies, sets or waits has no place among the entries. */
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

static void test_kernels_missing(void)
{
    fake_driver_reset();
    fake_driver.devices = 2;
    fake_driver.device[1].name = "NVIDIA T4";
    fake_driver.device[1].capability = 75;
    fake_driver.device[1].function_result = CUDA_ERROR_NO_BINARY_FOR_GPU;
    fake_driver_use();
    CHECK(prepare_quietly(0) == NORMFUSE_OK, "device 0: %s", normfuse_last_error());
    for (int i = 0; i < 2; i++)
        REFUSED(NORMFUSE_NO_KERNEL, prepare_quietly(1), "NVIDIA T4", "7.5", NORMFUSE_CUDA_BUILT_FOR, "fake error 209");
    CHECK(prepare_quietly(0) == NORMFUSE_OK, "device 0, again: %s", normfuse_last_error());
    CHECK(fake_driver_depth() == 0, "%d contexts are left", fake_driver_depth());

    static const struct {
        CUresult result;
        normfuse_status status;
    } results[] = {{CUDA_ERROR_NO_BINARY_FOR_GPU, NORMFUSE_NO_KERNEL},
                   {CUDA_ERROR_UNSUPPORTED_PTX_VERSION, NORMFUSE_NO_KERNEL},
                   {CUDA_ERROR_JIT_COMPILER_NOT_FOUND, NORMFUSE_NO_KERNEL},
                   {CUDA_ERROR_OUT_OF_MEMORY, NORMFUSE_OUT_OF_MEMORY},
                   {CUDA_ERROR_ILLEGAL_ADDRESS, NORMFUSE_DEVICE_ERROR}};
    for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
        fake_driver_reset();
        fake_driver.library_result = results[i].result;
        fake_driver_use();
        REFUSED(results[i].status, prepare_quietly(0), "NVIDIA H200");
        CHECK(fake_driver.libraries == 0, "%d libraries stay loaded", fake_driver.libraries);
        /* Not for good: memory may be free later, another device may have its kernels. */
        fake_driver.library_result = CUDA_SUCCESS;
        CHECK(prepare_quietly(0) == NORMFUSE_OK, "afterwards: %s", normfuse_last_error());
    }

    fake_driver_reset();
    fake_driver.missing_kernel = first_kernel_name;
    fake_driver_use();
    REFUSED(NORMFUSE_NO_KERNEL, prepare_quietly(0), first_kernel_name);
    CHECK(fake_driver.libraries == 0, "%d libraries stay loaded", fake_driver.libraries);
}

/* A device may have the general kernels and no others, as PTX; one beside it has all. */
static void test_general_alone(void)
{
    static const struct {
        const char *built_for;
        int32_t capability;
        bool alone;
    } builds[] = {{"80 90a 100 120 90-general-PTX", 80, false},  {"80 90a 100 120 90-general-PTX", 89, false},
                  {"80 90a 100 120 90-general-PTX", 90, false},  {"80 90a 100 120 90-general-PTX", 103, false},
                  {"80 90a 100 120 90-general-PTX", 121, false}, {"80 90a 100 120 90-general-PTX", 110, true},
                  {"80 90a 100 120 90-general-PTX", 130, true},  {"90a 90-general-PTX", 100, true},
                  {"80 90-general-PTX", 75, false},              {"100f 90-general-PTX", 103, false},
                  {"90-general-PTX 100-PTX", 120, false},        {"90-general-PTX 100-PTX", 90, true},
                  {"80 90a 90-PTX", 120, false},                 {"90a", 100, false}};
    for (size_t i = 0; i < sizeof builds / sizeof *builds; i++)
        CHECK(normfuse_cuda_has_general_alone(builds[i].built_for, builds[i].capability) == builds[i].alone,
              "%d.%d of %s", (int)builds[i].capability / 10, (int)builds[i].capability % 10, builds[i].built_for);

    fake_driver_reset();
    fake_driver.devices = 2;
    fake_driver.device[1].name = "NVIDIA R100";
    fake_driver.device[1].capability = 130;
    normfuse_cuda_built_for = "90a 90-general-PTX";
    fake_driver_use();
    for (int32_t i = 2; i-- > 0;)
        CHECK(prepare_quietly(i) == NORMFUSE_OK, "%s", normfuse_last_error());
    const struct normfuse_cuda_device *const first = device_of(0), *const second = device_of(1);
    normfuse_cuda_built_for = NORMFUSE_CUDA_BUILT_FOR;
    if (first == NULL || second == NULL)
        return;
    CHECK(!first->general_alone && second->general_alone, "device 0 or 1");
    int general = 0;
    for (int k = 0; k < NORMFUSE_CUDA_KERNELS; k++) {
        const char *const name = fake_driver_kernel_name(k);
        const bool is_general = strstr(name, "_general_") != NULL && strstr(name, "_general_vectors_") == NULL;
        general += is_general;
        CHECK(fake_driver.device[0].functions_loaded[k] == 1 && fake_driver.device[1].functions_loaded[k] == is_general,
              "%s was loaded %d and %d times", name, fake_driver.device[0].functions_loaded[k],
              fake_driver.device[1].functions_loaded[k]);
    }
    CHECK(general == 20, "%d kernels", general);
    const struct normfuse_cuda_launch launch = {.kernel = KERNEL, .grid = 1, .threads = 256};
    CHECK(launch_on(first, launch) == NORMFUSE_OK, "%s", normfuse_last_error());
    REFUSED(NORMFUSE_DEVICE_ERROR, launch_on(second, launch), "NVIDIA R100", first_kernel_name);
    CHECK(blocks_per_multiprocessor(first, KERNEL, 256, 0) == 8 &&
              blocks_per_multiprocessor(second, KERNEL, 256, 0) == 0 && !normfuse_cuda_lacks_answers() &&
              blocks_per_multiprocessor(second, NORMFUSE_CUDA_rows_general_forward_f64_1x8, 256, 0) == 8,
          "occupancy");
}

static void test_kernels_prepared(void)
{
    fake_driver_reset();
    fake_driver.devices = 2;
    fake_driver.device[1].clusters = false;
    fake_driver.fixed_shared[LAST_KERNEL] = 1000;
    fake_driver_use();
    for (int times = 0; times < 2; times++)
        for (int32_t i = 0; i < 2; i++)
            CHECK(prepare_quietly(i) == NORMFUSE_OK, "%s", normfuse_last_error());
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < NORMFUSE_CUDA_KERNELS; k++) {
            const struct fake_device *const device = &fake_driver.device[i];
            CHECK(device->functions_loaded[k] == 2, "device %d: kernel %d was loaded %d times", i, k,
                  device->functions_loaded[k]);
            CHECK(device->dynamic_shared[k] == 232448 - fake_driver.fixed_shared[k], "device %d: kernel %d has %d", i,
                  k, device->dynamic_shared[k]);
            CHECK(device->large_clusters[k] == device->clusters, "device %d: kernel %d: large clusters", i, k);
        }
    CHECK(fake_driver.calls[FAKE_CALLS_cuKernelSetAttribute] == 3 * NORMFUSE_CUDA_KERNELS, "attributes were set again");
    CHECK(fake_driver.calls[FAKE_CALLS_cuLibraryLoadData] == fake_driver.libraries, "libraries were loaded again");

    /* Another context of the device has kernels of its own, but not attributes. */
    fake_driver_set_context(fake_driver_context(0, 1));
    for (int times = 0; times < 2; times++)
        CHECK(prepare_quietly(0) == NORMFUSE_OK, "%s", normfuse_last_error());
    CHECK(fake_driver.device[0].functions_loaded[KERNEL] == 4, "loaded %d times, in two contexts",
          fake_driver.device[0].functions_loaded[KERNEL]);
    CHECK(fake_driver.calls[FAKE_CALLS_cuKernelSetAttribute] == 3 * NORMFUSE_CUDA_KERNELS, "attributes were set again");
    CHECK(fake_driver_depth() == 1, "%d contexts", fake_driver_depth());
    fake_driver_set_context(NULL);

    /* While a stream is captured; the thread's mode is afterwards what it was. */
    fake_driver_reset();
    fake_driver.capturing = true;
    fake_driver_use();
    CHECK(prepare_quietly(0) == NORMFUSE_OK, "under capture: %s", normfuse_last_error());
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    fake_driver_table()->cuThreadExchangeStreamCaptureMode(&mode);
    CHECK(mode == CU_STREAM_CAPTURE_MODE_GLOBAL, "the capture mode became %d", (int)mode);
    fake_driver_reset();
    fake_driver.device[0].function_result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    fake_driver_use();
    REFUSED(NORMFUSE_DEVICE_ERROR, prepare_quietly(0), "NVIDIA H200", "call normfuse_prepare", "fake error 900");
}

/* As cuDevicePrimaryCtxReset leaves it: the context's address stays, nothing works in it until it is retained again. */
static void test_reset(void)
{
    fake_driver_reset();
    fake_driver_use();
    const struct normfuse_cuda_device *const device = device_of(0);
    const struct normfuse_cuda_launch launch = {.kernel = KERNEL, .grid = 3, .threads = 64};
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
    CHECK(fake_driver.device[0].functions_loaded[KERNEL] == 2, "loaded %d times",
          fake_driver.device[0].functions_loaded[KERNEL]);
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
    CHECK(strstr(text, "normfuse: plan: group_norm forward: ") != NULL && strstr(text, ": refused: ") != NULL &&
              strstr(text, words) != NULL && strstr(text, ": single: ") != NULL &&
              strstr(text, ": two_pass: ") != NULL && strstr(text, ": takes normfuse_") != NULL,
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
    normfuse_cuda_built_for = "90a 90-general-PTX";
    plan_in_words("NVIDIA R100", 130, ": the library has the general kernels alone for this GPU, as PTX\n");
    normfuse_cuda_built_for = NORMFUSE_CUDA_BUILT_FOR;
#endif
}

/* After a fault on the device the driver refuses everything in the context. Every call says so, none takes it for an
 * answer; once the device is reset calls work. */
static void test_sticky_error(void)
{
    fake_driver_reset();
    fake_driver_use();
    CHECK(prepare_quietly(0) == NORMFUSE_OK, "%s", normfuse_last_error());
    fake_driver.launch_result = fake_driver.occupancy_result = fake_driver.device[0].function_result =
        CUDA_ERROR_ILLEGAL_ADDRESS;
    for (int i = 0; i < 2; i++) {
        REFUSED(NORMFUSE_DEVICE_ERROR, normalize(NORMFUSE_CUDA), "group_norm", "NVIDIA H200");
        REFUSED(NORMFUSE_DEVICE_ERROR, prepare_quietly(0), "NVIDIA H200", "fake error 700");
        CHECK(normalize(NORMFUSE_CPU) == NORMFUSE_OK && fake_driver_depth() == 0, "%s, or contexts are left",
              normfuse_last_error());
    }
    fake_driver.launch_result = fake_driver.occupancy_result = fake_driver.device[0].function_result = CUDA_SUCCESS;
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
        *status = launch_on(device, (struct normfuse_cuda_launch){.kernel = KERNEL, .grid = 1, .threads = 32});
    if (*status == NORMFUSE_OK && blocks_per_multiprocessor(device, KERNEL, 256, 0) != 8)
        *status = NORMFUSE_DEVICE_ERROR;
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
                  fake_driver.calls[FAKE_CALLS_cuFuncLoad] == (THREADS + 1) * NORMFUSE_CUDA_KERNELS,
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
        *status = launch_on(device, (struct normfuse_cuda_launch){.kernel = KERNEL, .grid = 1, .threads = 32});
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
    struct {
        double values[37];
        char tail;
    } arguments;
    memset(&arguments, 0x5a, sizeof arguments);
    for (int i = 0; i < 20; i++) {
        const struct normfuse_cuda_launch launch = {.kernel = LAST_KERNEL,
                                                    .grid = 32,
                                                    .threads = 96,
                                                    .cluster = clusters[i / 4],
                                                    .shared = (size_t)i * 11000,
                                                    .cooperative = (i & 1) != 0,
                                                    .dependent = (i & 2) != 0,
                                                    .arguments = &arguments};
        arguments.values[0] = i;
        fake_driver.argument_bytes = sizeof arguments;
        CHECK(normfuse_cuda_launch("test", device, &stream, &launch) == NORMFUSE_OK, "launch %d: %s", i,
              normfuse_last_error());
        const struct fake_launch *const seen = &fake_driver.launch[i];
        CHECK(seen->kernel == launch.kernel && seen->grid == 32 && seen->threads == 96 &&
                  seen->shared == launch.shared && seen->stream == &stream && seen->device == 0,
              "launch %d: geometry", i);
        CHECK(seen->cluster == (launch.cluster > 1 ? launch.cluster : 0), "launch %d: cluster %u", i, seen->cluster);
        CHECK(seen->cooperative == launch.cooperative && seen->dependent == launch.dependent, "launch %d: attributes",
              i);
        CHECK(seen->argument_bytes == sizeof arguments && memcmp(seen->arguments, &arguments, sizeof arguments) == 0,
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
    struct normfuse_cuda_launch launch = {.kernel = KERNEL, .grid = 133 * 64, .threads = 1024, .cooperative = true};
    REFUSED(NORMFUSE_DEVICE_ERROR, launch_on(device, launch), "test: ", first_kernel_name, "fake error 720",
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
    const struct normfuse_cuda_launch launch = {.kernel = KERNEL, .grid = 1, .threads = 32};

    /* A context of the caller's own, of this device: used, and the primary one is left alone. */
    const CUcontext own = fake_driver_context(1, 2);
    fake_driver_set_context(own);
    const struct normfuse_cuda_device *second = device_of(1);
    if (second == NULL)
        return;
    int before = calls_of_all();
    CHECK(launch_on(second, launch) == NORMFUSE_OK, "%s", normfuse_last_error());
    CHECK(calls_of_all() - before == 3, "a launch made %d calls", calls_of_all() - before);
    CHECK(fake_driver.launch[0].context == own && fake_driver.launch[0].device == 1, "not in the caller's context");
    CHECK(fake_driver.device[1].primary_retained == 0, "the primary context was retained");
    CHECK(fake_driver.calls[FAKE_CALLS_cuCtxPushCurrent] == 0, "a context was pushed");

    /* Of another device: the primary one of the right device for as long as the call takes. */
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
        CHECK(blocks_per_multiprocessor(first, KERNEL, 32 + 32 * (uint32_t)i, 0) > 0, "occupancy %d", i);
        CHECK(fake_driver_depth() == 0, "%d contexts are left", fake_driver_depth());
    }
    CHECK(fake_driver.device[0].primary_retained == 1 && fake_driver.device[1].primary_retained == 0,
          "retained %d and %d times", fake_driver.device[0].primary_retained, fake_driver.device[1].primary_retained);
    CHECK(fake_driver.calls[FAKE_CALLS_cuCtxPushCurrent] == fake_driver.calls[FAKE_CALLS_cuCtxPopCurrent],
          "%d pushed, %d popped", fake_driver.calls[FAKE_CALLS_cuCtxPushCurrent],
          fake_driver.calls[FAKE_CALLS_cuCtxPopCurrent]);
}

/* ---- occupancy ------------------------------------------------------------------------------------------------- */

static int questions(void)
{
    return fake_driver.calls[FAKE_CALLS_cuOccupancyMaxActiveBlocksPerMultiprocessor] +
           fake_driver.calls[FAKE_CALLS_cuOccupancyMaxActiveClusters];
}

static void test_occupancy(void)
{
    fake_driver_reset();
    fake_driver.devices = 2;
    fake_driver.device[1].multiprocessors = 100;
    fake_driver.device[1].threads_per_multiprocessor = 1024;
    fake_driver_use();
    const struct normfuse_cuda_device *const first = device_of(0), *const second = device_of(1);
    if (first == NULL || second == NULL)
        return;
    for (int times = 0; times < 3; times++) {
        CHECK(blocks_per_multiprocessor(first, KERNEL, 256, 0) == 8, "256 threads");
        CHECK(blocks_per_multiprocessor(first, KERNEL, 512, 0) == 4, "512 threads");
        CHECK(blocks_per_multiprocessor(first, KERNEL, 256, 100000) == 2, "256 threads, 100000 bytes");
        CHECK(blocks_per_multiprocessor(second, KERNEL, 256, 0) == 4, "256 threads, device 1");
        struct normfuse_cuda_launch launch = {
            .kernel = KERNEL, .grid = 64, .threads = 256, .cluster = 16, .cooperative = true, .dependent = true};
        CHECK(normfuse_cuda_resident_clusters(first, &launch) == 66, "clusters of 16");
        launch.cluster = 8;
        launch.grid = 7; /* what is asked is not this grid */
        CHECK(normfuse_cuda_resident_clusters(first, &launch) == 132, "clusters of 8");
        CHECK(normfuse_cuda_resident_clusters(second, &launch) == 47, "clusters of 8, device 1");
        launch.cluster = 1;
        CHECK(normfuse_cuda_resident_clusters(first, &launch) == 8 * 132, "no clusters");
        CHECK(questions() == 7, "round %d: %d questions", times, questions());
    }
    CHECK(blocks_per_multiprocessor(first, KERNEL, 1025, 0) == 0 &&
              blocks_per_multiprocessor(first, KERNEL, 0, 0) == 0 &&
              blocks_per_multiprocessor(first, KERNEL, 32, 232449) == 0 &&
              blocks_per_multiprocessor(first, KERNEL, 32, SIZE_MAX) == 0,
          "what no GPU runs");
    const struct normfuse_cuda_launch too_large = {.kernel = KERNEL, .grid = 64, .threads = 256, .cluster = 32};
    CHECK(normfuse_cuda_resident_clusters(first, &too_large) == 0, "clusters of 32");

    /* More questions than are kept: answers stay right. */
    for (int times = 0; times < 2; times++)
        for (uint32_t threads = 32; threads <= 1024; threads += 32)
            for (size_t shared = 0; shared <= 230000; shared += 5000) {
                int32_t expected = (int32_t)(2048 / threads < 32 ? 2048 / threads : 32);
                if ((size_t)expected > 233472 / (shared + 1024))
                    expected = (int32_t)(233472 / (shared + 1024));
                const int32_t seen = blocks_per_multiprocessor(first, KERNEL, threads, shared);
                if (seen != expected)
                    CHECK(false, "%u threads, %zu bytes: %d, not %d", threads, shared, (int)seen, (int)expected);
            }

    /* An error is not kept. */
    fake_driver_reset();
    fake_driver.occupancy_result = CUDA_ERROR_UNKNOWN;
    fake_driver_use();
    const struct normfuse_cuda_device *const device = device_of(0);
    if (device == NULL)
        return;
    CHECK(blocks_per_multiprocessor(device, KERNEL, 256, 0) == 0, "an error");
    fake_driver.occupancy_result = CUDA_SUCCESS;
    CHECK(blocks_per_multiprocessor(device, KERNEL, 256, 0) == 8, "after an error");
    CHECK(fake_driver_depth() == 0, "%d contexts are left", fake_driver_depth());

    /* Without clusters there are none, and nobody asks. */
    fake_driver_reset();
    fake_driver.device[0].clusters = false;
    fake_driver_use();
    const struct normfuse_cuda_device *const older = device_of(0);
    const struct normfuse_cuda_launch pair = {.kernel = KERNEL, .grid = 64, .threads = 256, .cluster = 2};
    CHECK(older != NULL && normfuse_cuda_resident_clusters(older, &pair) == 0 && questions() == 0, "no clusters");
}

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

/* What ..._scratch_bytes says is enough, and what a call needs it refuses to do without. Sizes from one block's to the
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

/* A plan that was made while the driver answered with errors is not remembered. */
static void test_answers(void)
{
    fake_driver_reset();
    fake_driver_use();
    void *const address = (void *)(uintptr_t)0x7f0000000000;
    const int64_t sizes[] = {2, 64, 512, 512};
    normfuse_axes axes;
    normfuse_tensor x = normfuse_tensor_channels_last(address, NORMFUSE_F16, 4, sizes, &axes);
    x.device = (normfuse_device){NORMFUSE_CUDA, 0};
    const normfuse_group_norm_options options = {.struct_bytes = sizeof options, .groups = 8, .eps = 1e-5};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &x, .y = &x};
    const normfuse_exec exec = {.struct_bytes = sizeof exec, .scratch = address, .scratch_bytes = 1 << 30};
    char wanted[512];
    CHECK(normfuse_group_norm_forward(&options, &tensors, &exec) == NORMFUSE_OK, "%s", normfuse_last_error());
    snprintf(wanted, sizeof wanted, "%s", normfuse_last_kernels());
    fake_driver_reset();
    fake_driver_use();
    fake_driver.occupancy_result = CUDA_ERROR_UNKNOWN;
    const normfuse_status status = normfuse_group_norm_forward(&options, &tensors, &exec);
    CHECK(status == NORMFUSE_DEVICE_ERROR || (status == NORMFUSE_OK && strcmp(normfuse_last_kernels(), wanted) != 0),
          "status %d: %s", (int)status, normfuse_last_kernels());
    fake_driver.occupancy_result = CUDA_SUCCESS;
    CHECK(normfuse_group_norm_forward(&options, &tensors, &exec) == NORMFUSE_OK &&
              strcmp(normfuse_last_kernels(), wanted) == 0,
          "%s instead of %s", normfuse_last_kernels(), wanted);
}

/* ---- the choice of kernels --------------------------------------------------------------------------------------- */

/* What holds for any choice, whatever the policy: every element of every set falls to one thread of one launch, grids
 * and clusters are what the device can hold, blocks that wait for one another are resident together, scratch is used
 * within what was asked for, and no value goes a longer way through sums than tests/ref/tolerance.c says. */

static uint64_t random_state = 20260102;

static int64_t random_below(int64_t count)
{
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return (int64_t)((random_state >> 11) % (uint64_t)count);
}

/* Sizes of all magnitudes, often near a power of two. */
static int64_t random_size(int max_bits)
{
    const int64_t power = INT64_C(1) << random_below(max_bits + 1);
    const int64_t size = random_below(3) == 0 ? power + random_below(3) - 1 : power + random_below(power);
    return size < 1 ? 1 : size;
}

struct plan_case {
    char name[200];
    int op; /* 0 group norm, 1 batch norm, 2 affine */
    int64_t sizes[3], groups;
    normfuse_type type;
    bool channels_last, backward, has_sync, misaligned,
        sliced; /* sliced: of channels-last tensors with more channels */
    bool residual; /* before the activation */
    bool summed, in_place; /* forward: pre_add and u; u over x */
    int32_t activation;
};

static size_t scratch_address_bytes;
static int early_launches, too_large, too_little_shared, general_launches, unaligned_launches, folded_launches,
    slope_launches, compact_launches, grid_launches, cache_line_launches, unaligned_samples_launches,
    general_vectors_launches, additions_launches, run_launches, sums_of_runs;
static int finish_launches[NORMFUSE_WORK_MERGE + 1]; /* of the body `finish`, by its work */
static int single_launches, single_parts, single_walks, single_unaligned, single_sums; /* of the body `single` */
static const uintptr_t scratch_address = (uintptr_t)0x7f8000000000;

static int64_t up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t levels(int64_t adding)
{
    int64_t count = 0;
    while (INT64_C(1) << count < adding)
        count++;
    return count;
}

/* Packs aligned in memory whose first and last ones in a row have elements of other rows. */
static bool is_unaligned(const char *kernel)
{
    return strstr(kernel, "_rows_unaligned_") != NULL || strstr(kernel, "_rows_additions_") != NULL;
}

/* One of columns_cluster.cu, whose last warp may have no vectors. */
static bool is_compact(const char *kernel)
{
    return strstr(kernel, "_columns_cluster_") != NULL;
}

/* One of rows_elementwise.cu, which walk the whole tensor as one run. */
static bool is_run(const char *kernel)
{
    return strstr(kernel, "_rows_elementwise_") != NULL;
}

/* One of both layouts that holds its vectors in shared memory, through which what is added passes. */
static bool takes_additions(const char *kernel)
{
    return strstr(kernel, "_rows_additions_") != NULL || strstr(kernel, "_columns_additions_") != NULL;
}

/* Those of these whose tiles have something added to them beside shared memory. */
static bool adds_to_tiles(const char *kernel)
{
    return strstr(kernel, "_grid_additions_") != NULL || strstr(kernel, "_batch_additions_") != NULL;
}

/* One of columns_grid.cu or columns_grid_pipeline_batch.cu that keep nothing in registers. */
static bool is_of_grid(const char *kernel)
{
    return strstr(kernel, "_grid_pipeline_") != NULL || adds_to_tiles(kernel);
}

/* Batch norm over rows by a kernel of columns, of which a channel has several; not what follows it. */
static bool is_stacked(const struct normfuse_cuda_arguments *a)
{
    return (a->problem.flags & 1 << NORMFUSE_FLAG_columns) != 0 && a->problem.sets == NORMFUSE_SETS_BATCH &&
           a->phases != 0 && a->geometry.spans > 1;
}

/* The problem that a kernel is given, as the host has it. */
static struct normfuse_problem problem_of(const struct normfuse_cuda_arguments *a)
{
    const struct normfuse_cuda_problem *const from = &a->problem;
    struct normfuse_problem p = {
        .sets = (enum normfuse_sets)from->sets,
        .phases = from->flags >> NORMFUSE_FLAG_PHASES,
        .type = from->big_type,
        .columns = (from->flags & 1 << NORMFUSE_FLAG_columns) != 0,
        .from_y = (from->flags & 1 << NORMFUSE_FLAG_from_y) != 0,
        .evaluate = (from->flags & 1 << NORMFUSE_FLAG_evaluate) != 0,
        .activation = from->activation,
        .n = from->n,
        .c = from->c,
        .s = from->s,
        .groups = from->groups,
        .set_values = from->set_values,
    };
    if (is_stacked(a)) { /* samples are rows, and positions of channels columns */
        p.c *= p.s;
        p.s = p.n;
        p.n = 1;
    }
    const bool backward = (p.phases & (NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY)) != 0;
    struct normfuse_view *const views[NORMFUSE_VIEWS] = {
        &p.x, backward ? &p.dx : &p.y, &p.dy, &p.post_add, &p.pre_add, backward ? &p.du : &p.u, &p.dpost_add};
    for (int i = 0; i < NORMFUSE_VIEWS; i++)
        *views[i] = (struct normfuse_view){from->views[i], from->x_batch, from->x_channel, from->x_position};
    struct normfuse_parameter *const parameters[NORMFUSE_PARAMETERS] = {
        &p.weight, &p.bias,         &p.scale,       &p.shift,   &p.pre_bias, &p.mean,   &p.rstd,
        &p.running_mean, &p.running_var, &p.dweight, &p.dbias,    &p.dscale, &p.dshift, &p.slope,
        &p.dslope};
    for (int i = 0; i < NORMFUSE_PARAMETERS; i++) {
        const int rare = i - NORMFUSE_COMMON_PARAMETERS;
        const struct normfuse_cuda_strides strides = rare < 0 ? from->strides[i] : from->rare_strides[rare];
        *parameters[i] =
            (struct normfuse_parameter){rare < 0 ? from->parameters[i] : from->rare_parameters[rare], strides.batch,
                                        strides.channel, rare < 0 ? from->types[i] : from->rare_types[rare]};
    }
    return p;
}

/* Columns: rows that the threads of a block have at once. */
static int64_t rows_at_once(const struct normfuse_cuda_arguments *a, const char *kernel, uint32_t threads)
{
    return is_compact(kernel) || is_of_grid(kernel) ? a->columns.at_once : (int64_t)threads / a->geometry.width;
}

/* One of general.cuh, whose threads share vectors of channels, or channels of a sample. */
static bool is_general(const char *kernel)
{
    return strstr(kernel, "_general_") != NULL;
}

/* Of a thread's sums; of what it joins, whose means are five more; of blocks. */
static double longest_way_of_general(const struct normfuse_cuda_arguments *a, int held, int vector_elements,
                                     bool backward)
{
    const struct normfuse_problem of_launch = problem_of(a), *const p = &of_launch;
    const struct normfuse_cuda_geometry *const g = &a->geometry;
    const int64_t rows = g->part_rows < g->rows ? g->part_rows : g->rows,
                  vectors = up(rows, g->unit_lanes) * g->part_samples;
    /* A thread adds a batch of values to four sums in turn; over columns those of a channel, and then these to one. A
     * vector of 16 bytes is a batch, and has a sum of each channel. */
    held = vector_elements > 2 ? 1 : held;
    const int64_t of_batch = held * vector_elements, sums = vector_elements > 4 ? vector_elements : 4;
    const int64_t in_turn = of_batch < sums ? of_batch : sums, of_channel = p->columns ? vector_elements : 1;
    const int64_t lanes = INT64_C(1) << g->group_bits;
    /* Where a block has whole rows it joins all that are folded. */
    const int64_t copies = p->columns && g->blocks_wide == 1 ? g->folded : 1;
    const int64_t in_thread = up(vectors, held) * up(of_batch, in_turn) + in_turn / of_channel - 1;
    if (!backward)
        return (double)(in_thread + 5 + 3 * (p->columns ? g->subvector_bits : 0) +
                        copies * up((g->group >> (p->columns ? g->subvector_bits : 0)) * g->unit_lanes, lanes) + 7);
    /* Adding the nothing that others have rounds nothing. */
    const int64_t beside = INT64_C(1) << g->channel_bits;
    return (double)(in_thread + copies * up(g->unit_lanes, beside) +
                    levels(beside < g->unit_lanes ? beside : g->unit_lanes) + 2);
}

static double longest_way(const struct normfuse_cuda_arguments *a, const char *kernel, int held, uint32_t threads,
                          int vector_elements, bool unaligned, bool backward)
{
    if (is_general(kernel))
        return longest_way_of_general(a, held, vector_elements, backward);

    const struct normfuse_problem of_launch = problem_of(a), *const p = &of_launch;
    const struct normfuse_cuda_geometry *const g = &a->geometry;
    /* What of a vector belongs to a row: adding the zeros in the place of the others rounds nothing. */
    const int64_t of_vector = unaligned && p->s < vector_elements ? p->s : vector_elements;
    const bool applies = (a->phases & (NORMFUSE_PHASE_APPLY | NORMFUSE_PHASE_BACKWARD_APPLY)) != 0;
    const bool centred = p->sets != NORMFUSE_SETS_NONE;
    if (is_run(kernel)) {
        /* In a thread; lanes up to the end of a row, and those of what came before; a shift that moves; warps and
         * blocks, in double or backward one after the other: a warp has adjacent values, and a row those that it
         * touches. */
        const int64_t in_thread = g->segment_rows * (int64_t)(vector_elements + 1);
        const int64_t of_warp = (int64_t)g->segment_rows * 32 * vector_elements, touched = up(p->s - 1, of_warp) + 1;
        const int64_t warps = touched < threads / 32 ? touched : threads / 32;
        return (double)((in_thread < p->s ? in_thread : p->s) + 6 + 6 + 4 + (backward ? warps : 0));
    }
    if (p->columns) {
        const int64_t at_once = rows_at_once(a, kernel, threads);
        const int64_t rows = g->part_rows < g->rows ? g->part_rows : g->rows;
        const int64_t beside = at_once < rows ? at_once : rows, lanes = INT64_C(1) << g->group_bits;
        const int64_t spans = is_stacked(a) ? g->spans : 1;
        if (is_compact(kernel)) {
            /* In a thread's channel; those of its vector; its mean; what a lane joins; lanes; parts. */
            const int64_t together = vector_elements < g->group ? vector_elements : g->group,
                          vectors = (g->group + 2 * vector_elements - 2) / vector_elements;
            const int64_t joined = up(vectors * beside, INT64_C(1) << a->columns.lane_bits);
            return (double)(up(rows, at_once) + together - 1 + 5 + joined + 7 +
                            (g->parts > 1 ? up(g->parts, INT64_C(1) << a->columns.lane_bits) + 7 : 0));
        }
        if (is_of_grid(kernel)) {
            /* In a thread's channel, of a tile and of tiles, or of some tiles and of what these give; then as above,
             * eight lanes a group. */
            const struct normfuse_cuda_grid *const of = &a->columns.of.grid;
            const int64_t tile_rows = of->by_tile.divisor, slots = up(tile_rows, at_once), tiles = up(rows, tile_rows);
            const int64_t chunk = of->chunk_tiles < tiles ? of->chunk_tiles : tiles;
            const int64_t in_thread = backward ? slots + tiles : slots * chunk + 4 * (up(tiles, chunk) - 1);
            const int64_t together = vector_elements < g->group ? vector_elements : g->group,
                          vectors = (g->group + 2 * vector_elements - 2) / vector_elements;
            if (p->sets == NORMFUSE_SETS_BATCH) /* a warp joins a channel's blocks; backward in double */
                return (double)(in_thread + 5 + up(at_once, INT64_C(1) << a->columns.lane_bits) + 7 + up(g->parts, 32) +
                                4 * up(g->parts, 160) + 7);
            return (double)(in_thread + together - 1 + 5 + up(vectors * at_once, 8) + 7 + up(g->parts, 8) +
                            4 * up(g->parts, 72) + 7);
        }
        if (backward)
            return (double)(up(rows, at_once) + up(beside * g->folded * spans, INT64_C(1) << g->channel_bits) +
                            (centred ? up(g->group / spans, lanes) : 0) + 10);
        /* In a thread; its mean, three in each join of its channels, the value that all blocks know; lanes; parts. */
        const int64_t subvectors = (g->group >> g->subvector_bits) * beside;
        return (double)(up(rows, at_once) + 5 + 3 * g->subvector_bits + g->folded * up(subvectors, lanes) + 7) +
               (applies && g->parts > 1 ? (double)up(g->parts, lanes) + 7 : 0.0);
    }
    const int64_t lanes = 32, rows = backward ? up(g->segment_rows, lanes) : g->segment_rows;
    if (backward) {
        /* What falls to one channel: the vectors of a thread, the threads and the segments that have some of it; or the
         * channels of a thread, the threads and the warps of the block. Adding nothing rounds nothing. */
        const int64_t vectors = g->part_rows < g->rows ? g->part_rows : g->rows;
        const int64_t of_channel = p->sets == NORMFUSE_SETS_BATCH || vectors < g->spans ? vectors : g->spans;
        const int64_t own = up(of_channel, lanes) + 1 < rows ? up(of_channel, lanes) + 1 : rows;
        const int64_t segments = up(vectors, rows * lanes), touched = up(of_channel, rows * lanes) + 1;
        const int64_t others = touched < segments ? touched : segments;
        const int64_t of_set = rows + 2 + levels(vectors < lanes ? vectors : lanes) + levels(segments);
        const int64_t of_sums = own + levels(of_channel < lanes ? of_channel : lanes) + others;
        return (double)(of_vector + (centred && of_set > of_sums ? of_set : of_sums) + 6);
    }
    /* Packs in shared memory and those in registers are two sums, each about a value of its own. */
    const int64_t apart = g->held_shared < rows ? g->held_shared : rows;
    const int64_t in_turn = apart > rows - apart ? apart : rows - apart;
    const double serial =
        (vector_elements > 1 ? (double)(in_turn * up(of_vector, 2)) + 1 : (double)rows) + (apart > 0 && held > 0 ? 4 : 0);
    const double joins = g->exchange == NORMFUSE_EXCHANGE_GRID ? 7 + 4 * (double)up(g->parts, 32) : 7;
    const int64_t tiles = up(g->rows, (int64_t)threads * g->segment_rows);
    const int64_t passes = tiles > g->passes ? g->passes : tiles;
    return serial + 4.0 * (double)(passes - 1) + 17 + (g->parts > 1 && applies ? joins : 0);
}

/* x / divisor as the kernels do it: `by` is a divisor of theirs. */
static bool divides_by(uint32_t divisor, uint32_t multiplier, uint32_t shift)
{
    for (int i = 0; i < 40; i++) {
        const uint32_t near = (uint32_t)random_below(2000) * divisor;
        const uint32_t x = (i < 20 ? (uint32_t)random_below(INT32_MAX) : near - (i & 1)) & INT32_MAX;
        const uint32_t high = (uint32_t)((uint64_t)x * multiplier >> 32);
        if ((high + x) >> shift != x / divisor)
            return false;
    }
    return true;
}
#define divides(by) divides_by((by)->divisor, (by)->multiplier, (by)->shift)

/* In `seen`, one a vector of channels and row (columns) or a set and row (rows): how many threads have it. */
static void count_owners(const struct fake_launch *launch, const struct normfuse_cuda_arguments *a, int vector_elements,
                         int held, unsigned char *seen)
{
    const struct normfuse_problem of_launch = problem_of(a), *const p = &of_launch;
    const struct normfuse_cuda_geometry *const g = &a->geometry;
    const int64_t vectors = p->columns ? p->c * g->folded / vector_elements : p->s / vector_elements;
    const int64_t samples =
        is_compact(launch->name) && a->columns.of.cluster.samples > 0 ? a->columns.of.cluster.samples : 1;
    for (int64_t block = 0; block < launch->grid; block++) {
        int64_t block_group = block / g->parts, part = block % g->parts;
        if (samples > 1) { /* of a cluster: sample after sample */
            const int64_t cluster = block / (g->parts * samples), sample = block / g->parts % samples;
            block_group = (cluster / g->blocks_wide * samples + sample) * g->blocks_wide + cluster % g->blocks_wide;
        }
        for (int64_t set = block_group; set < g->all_block_groups; set += g->exchange == NORMFUSE_EXCHANGE_GRID
                                                                  ? (int64_t)g->block_groups
                                                                  : (int64_t)g->all_block_groups + launch->grid) {
            if (p->columns) {
                const int64_t sample = set / g->blocks_wide, beside = set % g->blocks_wide;
                const int64_t n = g->all_samples ? part / g->parts_a_sample : sample;
                const int64_t first = (g->all_samples ? part % g->parts_a_sample : part) * g->part_rows;
                const int64_t stop = first + g->part_rows < g->rows ? first + g->part_rows : g->rows;
                const int64_t at_once = rows_at_once(a, launch->name, launch->threads);
                if (is_of_grid(launch->name)) {
                    const struct normfuse_cuda_grid *const of = &a->columns.of.grid;
                    const int64_t tile = of->by_tile.divisor, apart = of->interleaved ? tile * g->parts : tile;
                    const int64_t end = of->interleaved ? g->rows : stop;
                    for (int64_t begin = of->interleaved ? part * tile : first; begin < end; begin += apart)
                        for (int64_t row = begin; row < begin + tile && row < end; row++)
                            for (int64_t column = 0; column < g->width; column++)
                                seen[(n * g->rows + row) * vectors + column]++;
                    continue;
                }
                for (int64_t thread = 0; thread < launch->threads; thread++) {
                    const int64_t column = beside * g->width + thread % g->width;
                    if (thread / g->width >= at_once || column >= vectors)
                        continue;
                    int64_t slots = (int64_t)(held + (vector_elements > 1 ? g->held_shared : 0)) * g->passes;
                    for (int64_t row = first + thread / g->width; row < stop && slots > 0; row += at_once, slots--)
                        seen[(n * g->rows + row) * vectors + column]++;
                }
                continue;
            }
            if (strstr(launch->name, "forward") != NULL) { /* vectors in turn */
                const int64_t step = (int64_t)launch->threads;
                for (int pass = 0; pass < g->passes; pass++)
                    for (int64_t thread = 0; thread < launch->threads; thread++) {
                        const int64_t first = part * g->part_rows + pass * g->segment_rows * step;
                        const int64_t end = (part + 1) * (int64_t)g->part_rows;
                        const int64_t stop = set >= g->all_block_groups ? 0 : end > g->rows ? g->rows : end;
                        int slots = held + (vector_elements > 1 ? g->held_shared : 0);
                        for (int64_t row = first + thread % step; row < stop && slots > 0; row += step, slots--)
                            seen[set * g->rows + row]++;
                    }
                continue;
            }
            /* A warp has vectors that are adjacent. */
            for (int64_t warp = 0; warp < launch->threads / 32 && set < g->all_block_groups; warp++) {
                const int64_t first = part * g->part_rows + warp * g->segment_rows;
                int64_t end = (part + 1) * (int64_t)g->part_rows;
                if (first + g->segment_rows < end)
                    end = first + g->segment_rows;
                end = end < g->rows ? end : g->rows;
                for (int64_t lane = 0; lane < 32; lane++) {
                    int slots = held + (vector_elements > 1 ? g->held_shared : 0);
                    for (int64_t row = first + lane; row < end && slots > 0; row += 32, slots--)
                        seen[set * g->rows + row]++;
                }
            }
        }
    }
}

/* Over columns: whether the rows of all samples follow one another as those of one. */
static bool walks_as_one(const struct normfuse_cuda_arguments *a)
{
    const struct normfuse_problem of_launch = problem_of(a), *const p = &of_launch;
    const struct normfuse_cuda_geometry *const g = &a->geometry;
    return p->columns && g->all_samples && p->n > 1 && (int64_t)g->rows * g->folded > p->s + 16;
}

/* In `seen`, one an element: how many threads of a general kernel have it. */
static void count_elements_of_general(const struct fake_launch *launch, const struct normfuse_cuda_arguments *a,
                                      int vector_elements, unsigned char *seen)
{
    const struct normfuse_problem of_launch = problem_of(a), *const p = &of_launch;
    const struct normfuse_cuda_geometry *const g = &a->geometry;
    const int64_t of_unit = p->columns ? vector_elements : 1, row_channels = p->columns ? g->row_channels : p->c;
    const bool vectors = vector_elements > 2, is_one = walks_as_one(a);
    for (int64_t i = 0; i < (int64_t)launch->grid * launch->threads; i++) {
        const int64_t block = i / launch->threads, thread = i % launch->threads;
        const bool by_width = vectors || g->interleaved != 0; /* blocks follow one another by it */
        const int64_t part = by_width ? block / g->blocks_wide % g->parts : block % g->parts;
        const int64_t beside = by_width ? block % g->blocks_wide : block / g->parts % g->blocks_wide;
        const int64_t of_sample = block / g->parts / g->blocks_wide, chunk = part % g->parts_a_sample;
        const int64_t first_sample = g->all_samples ? part / g->parts_a_sample * g->part_samples : of_sample;
        const int64_t past = first_sample + (g->all_samples ? g->part_samples : 1);
        const int64_t unit = p->columns ? thread % g->width : thread / g->unit_lanes;
        const int64_t lane = p->columns ? thread / g->width : thread % g->unit_lanes;
        const int64_t channel = (beside * g->width + unit) * of_unit;
        const bool in_turn = vectors && g->interleaved != 0; /* rows are dealt out */
        const int64_t first = chunk * (in_turn ? g->unit_lanes : g->part_rows);
        const int64_t end = !in_turn && first + g->part_rows < g->rows ? first + g->part_rows : g->rows;
        const int64_t step = in_turn ? g->unit_lanes * (int64_t)g->parts_a_sample : g->unit_lanes;
        if (lane >= g->unit_lanes || unit >= g->width || channel >= row_channels)
            continue;
        for (int64_t n = first_sample; n < past && n < p->n; n++)
            for (int64_t row = first + lane; row < end; row += step)
                for (int64_t k = 0; k < vector_elements; k++) {
                    /* A vector may begin before its sample, or end behind it. */
                    const int64_t lead = vectors ? n * p->x.batch % vector_elements : 0;
                    const int64_t at = p->columns ? row * row_channels + channel + k - lead : row;
                    if (p->columns) { /* its rows may be those of all samples */
                        const int64_t of_all = n * p->s + at / p->c;
                        if (at >= 0 && of_all < (vectors && !is_one ? (n + 1) * p->s : p->n * p->s))
                            seen[(of_all / p->s * p->c + at % p->c) * p->s + of_all % p->s]++;
                    } else if (at < p->s) {
                        seen[(n * p->c + channel) * p->s + at]++;
                    }
                }
    }
}

static void check_general(const struct plan_case *test, const struct fake_launch *launch,
                          const struct normfuse_cuda_arguments *a, int vector_elements, int held)
{
    const struct normfuse_problem of_launch = problem_of(a), *const p = &of_launch;
    const struct normfuse_cuda_geometry *const g = &a->geometry;
    const bool backward = test->backward;
    const int32_t first = NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_BACKWARD_SUMS;
    const bool sums = (a->phases & first) != 0, applies = (a->phases & ~first) != 0;
#define HOLDS(condition)                                                                                               \
    if (!(condition))                                                                                                  \
    CHECK(false, "%s: %s: not %s", test->name, launch->name, #condition)
    const struct normfuse_view *const views[] = {&p->x, &p->y, &p->dy, &p->dx, &p->post_add, &p->dpost_add};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) {
        const struct normfuse_view *const view = views[i];
        if (view->data == NULL)
            continue;
        HOLDS(vector_elements == 1 ||
              ((uintptr_t)view->data % (normfuse_type_bytes(p->type) * (size_t)vector_elements) == 0 &&
               view->batch == p->x.batch && view->channel == p->x.channel && view->position == p->x.position));
        HOLDS(vector_elements == 1 || (p->columns && view->channel == 1));
    }
    HOLDS(vector_elements == 1 || p->c * g->folded % vector_elements == 0);
    HOLDS((g->folded == 1 || (p->columns && p->x.position == p->c * g->folded)));
    /* Words begin at one in each sample; one sample may have the rows of all, which then follow one another. */
    const bool is_one = walks_as_one(a);
    const bool pipelines = vector_elements > 2,
               begins_inside = !is_one && p->n > 1 && p->x.batch % vector_elements != 0;
    const int64_t walked = (is_one ? p->n : 1) * p->s;
    HOLDS(!p->columns || !begins_inside || pipelines);
    HOLDS(!p->columns || !is_one || p->x.batch * g->folded == p->s * p->x.position);
    HOLDS(!p->columns || pipelines || g->rows * (int64_t)g->folded == walked);
    if (pipelines) {
        const int64_t all = walked * p->c;
        HOLDS(g->whole_rows == all / g->row_channels && g->rest == all % g->row_channels);
        HOLDS(g->rows == up(all + (begins_inside ? vector_elements - 1 : 0), g->row_channels));
        HOLDS(g->part_samples == 1);
        HOLDS(!begins_inside || p->x.position == p->c * (int64_t)g->folded);
        HOLDS((!begins_inside && g->folded == 1) || g->group == 1);
        folded_launches += g->folded > 1;
        /* As few rows are folded as are whole vectors, or, where nothing is summed, whole cache lines. */
        const int64_t line = 128 / (int64_t)normfuse_type_bytes(p->type);
        int64_t fewest = 1;
        while (p->c * fewest % vector_elements != 0)
            fewest *= 2;
        const bool in_cache_lines = g->folded > fewest;
        HOLDS(in_cache_lines || g->folded == fewest);
        HOLDS(!in_cache_lines || (!sums && (is_one || p->n == 1 || p->x.batch % line == 0) &&
                                  g->row_channels % line == 0 && g->width * vector_elements % line == 0));
        cache_line_launches += in_cache_lines;
        unaligned_samples_launches += begins_inside || g->rest > 0;
    }
    HOLDS(g->by_rows_at_once.divisor == (uint32_t)g->unit_lanes && (!g->interleaved || p->columns));
    HOLDS((int64_t)g->width * g->unit_lanes <= (int64_t)launch->threads);
    HOLDS(launch->grid == (int64_t)g->all_block_groups * g->parts && launch->cluster <= 1);
    /* Sums of what has norm groups are joined by a later kernel, before results. */
    HOLDS(g->exchange == NORMFUSE_EXCHANGE_NONE && !(sums && applies && p->sets != NORMFUSE_SETS_NONE));
    const int64_t d = p->sets == NORMFUSE_SETS_GROUP ? p->c / p->groups : 1;
    if (sums && p->sets != NORMFUSE_SETS_NONE)
        HOLDS(d % g->group == 0 && (g->group == 1 || g->width * (p->columns ? vector_elements : 1) % g->group == 0));
    /* What the kernel places in shared memory. */
    const int64_t value = p->type == NORMFUSE_F64 ? 8 : 4;
    const int64_t channels = (int64_t)g->width * (p->columns ? vector_elements : 1);
    /* A pipeline has places for what the kernel reads; sums take them over, so the same kernel has no results after these. */
    const int tensors = 1 + backward + (p->pre_add.data != NULL) +
                        (backward ? (p->post_add.data != NULL && p->activation != NORMFUSE_IDENTITY) +
                                        (applies && p->dx.data != NULL && p->du.data != NULL)
                                  : applies && p->post_add.data != NULL);
    HOLDS(g->general.slot == (pipelines ? tensors * (int32_t)launch->threads : 0));
    HOLDS(g->general.pipeline == held * g->general.slot);
    HOLDS(!sums || g->general.entries >=
                       (int64_t)g->width * g->unit_lanes *
                           (p->columns ? backward ? vector_elements : vector_elements >> g->subvector_bits : 1));
    HOLDS((!applies && !backward) || g->general.channels >= channels);
    const struct normfuse_general_layout at = normfuse_lay_out_general(&g->general, (int32_t)value, backward);
    HOLDS(at.slopes >= at.bytes && at.slopes % 16 == 0);
    const bool has_slopes = p->activation == NORMFUSE_PRELU && g->general.channels > 0;
    HOLDS(launch->shared == (size_t)(has_slopes ? at.slopes + value * g->general.channels : at.bytes));
    /* All elements, once. */
    const int64_t elements = p->n * p->c * p->s;
    if (elements <= 60000 && (int64_t)launch->grid * launch->threads <= 4000000) {
        unsigned char *seen = calloc((size_t)elements, 1);
        int64_t wrong = 0, first_wrong = -1;
        if (seen == NULL)
            abort();
        count_elements_of_general(launch, a, vector_elements, seen);
        for (int64_t i = 0; i < elements; i++)
            if (seen[i] != 1) {
                first_wrong = wrong == 0 ? i : first_wrong;
                wrong++;
            }
        CHECK(wrong == 0, "%s: %s: %lld of %lld elements have no thread or several, the first is %lld", test->name,
              launch->name, (long long)wrong, (long long)elements, (long long)first_wrong);
        free(seen);
    } else {
        HOLDS((int64_t)g->parts_a_sample * g->part_rows >= g->rows);
        HOLDS((int64_t)g->blocks_wide * g->width * (p->columns ? vector_elements : 1) >=
              (p->columns ? g->row_channels : p->c));
        HOLDS(g->all_block_groups == (g->all_samples ? 1 : p->n) * g->blocks_wide);
    }
#undef HOLDS
    general_launches++;
    general_vectors_launches += pipelines;
}

/* In `of_elements`, one an element: how many threads have it, if one has each place of a set and row (rows of vectors
 * that are aligned in memory). */
static void count_elements(const struct normfuse_cuda_arguments *a, int vector_elements, unsigned char *of_elements)
{
    const struct normfuse_problem of_launch = problem_of(a), *const p = &of_launch;
    const struct normfuse_cuda_geometry *const g = &a->geometry;
    for (int64_t set = 0; set < g->all_block_groups; set++)
        for (int64_t row = 0; row < g->rows; row++) {
            const int64_t stretch = row / g->spans, groups = p->sets == NORMFUSE_SETS_GROUP ? p->groups : 1;
            const int64_t n = p->sets == NORMFUSE_SETS_BATCH ? stretch : set / groups;
            const int64_t c = p->sets == NORMFUSE_SETS_BATCH ? set : set % groups * g->outer + stretch;
            const int64_t lead = (n * p->x.batch + c * p->x.channel) % vector_elements;
            for (int64_t i = 0; i < vector_elements; i++) {
                const int64_t position = row % g->spans * vector_elements - lead + i;
                if (position >= 0 && position < p->s)
                    of_elements[(n * p->c + c) * p->s + position]++;
            }
        }
}

/* A run of vectors has every element once, and each row has its sums. */
static void check_run(const struct plan_case *test, const struct fake_launch *launch,
                      const struct normfuse_cuda_arguments *a, int vector_elements, int held)
{
    const struct normfuse_problem of_launch = problem_of(a), *const p = &of_launch;
    const struct normfuse_cuda_geometry *const g = &a->geometry;
    const int32_t first = NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_BACKWARD_SUMS;
    const bool sums = (a->phases & first) != 0, applies = (a->phases & ~first) != 0, backward = test->backward;
    const int64_t all = p->n * p->c * p->s;
#define HOLDS(condition)                                                                                               \
    if (!(condition))                                                                                                  \
    CHECK(false, "%s: %s: not %s", test->name, launch->name, #condition)
    const struct normfuse_view *const views[] = {&p->x,  &p->y,        &p->dy,        &p->dx, &p->pre_add,
                                                 &p->du, &p->post_add, &p->dpost_add, &p->u};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++)
        HOLDS(views[i]->data == NULL || ((uintptr_t)views[i]->data % 16 == 0 &&
                                         (p->n == 1 || views[i]->batch == p->c * p->s ||
                                          (views[i]->batch == p->x.batch && p->c * p->s % vector_elements == 0 &&
                                           p->x.batch % vector_elements == 0)) &&
                                         (p->c == 1 || views[i]->channel == p->s) &&
                                         (p->s == 1 || views[i]->position == 1)));
    HOLDS(!p->columns && g->spans == p->s && g->outer == p->c);
    /* Blocks follow one another, and so do their warps. */
    const int64_t of_warp = (int64_t)g->segment_rows * 32 * vector_elements, warps = launch->threads / 32;
    HOLDS(g->part_rows % vector_elements == 0 && g->part_rows <= warps * of_warp);
    HOLDS((int64_t)launch->grid == up(all, g->part_rows) && g->parts == (int64_t)launch->grid);
    /* Vectors have values of two rows at most where that matters. */
    HOLDS((!sums && !backward) || p->s >= vector_elements);
    int64_t most = 0, parts = 0;
    for (int64_t i = 0; i < 1000 && i < launch->grid; i++) {
        const int64_t block = i < 500 ? i : launch->grid - 1 - (i - 500), begin = block * g->part_rows;
        const int64_t end = begin + g->part_rows < all ? begin + g->part_rows : all;
        const int64_t rows = (end - 1) / p->s - begin / p->s + 1;
        most = rows > most ? rows : most;
    }
    for (int64_t i = 0; i < 1000 && i < p->n * p->c; i++) {
        const int64_t of_row = ((i + 1) * p->s - 1) / g->part_rows - i * p->s / g->part_rows + 1;
        parts = of_row > parts ? of_row : parts;
    }
    HOLDS(g->coefficients >= most + 1 && (!sums || g->sum_slots >= parts));
    HOLDS(!sums || (g->sum_slots == 1 ? g->part_rows % p->s == 0 : (g->part_rows & (g->part_rows - 1)) == 0));
    HOLDS(!g->sums_by_channel && g->folded == 0);
    const bool reads_post = p->post_add.data != NULL && (backward ? p->activation != 0 : applies);
    const bool reads_du = backward && applies && p->dx.data != NULL && p->du.data != NULL;
    const int64_t tensors = 1 + backward + (p->pre_add.data != NULL) + reads_post + reads_du;
    HOLDS(launch->shared >= (size_t)normfuse_lay_out_run((int32_t)(tensors * 16 * held * (int64_t)launch->threads),
                                                         g->coefficients, (int32_t)warps, backward)
                                .bytes);
    run_launches++;
    sums_of_runs += sums;
#undef HOLDS
}

static void check_unaligned(const struct plan_case *test, const struct fake_launch *launch,
                            const struct normfuse_cuda_arguments *a, int vector_elements)
{
    const struct normfuse_problem of_launch = problem_of(a), *const p = &of_launch;
    const struct normfuse_view *const views[] = {&p->x,        &p->y, &p->dy, &p->dx,       &p->pre_add,
                                                 &p->post_add, &p->u, &p->du, &p->dpost_add};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++)
        CHECK(views[i]->data == NULL || ((uintptr_t)views[i]->data % 16 == 0 && views[i]->batch == p->x.batch &&
                                         views[i]->channel == p->x.channel && views[i]->position == 1),
              "%s: %s: tensor %zu is not like x, or not aligned", test->name, launch->name, i);
    /* Sums of x know nothing of a residual after them. */
    CHECK(takes_additions(launch->name) ||
              (p->pre_add.data == NULL && (p->post_add.data == NULL || a->phases == NORMFUSE_PHASE_STATISTICS) &&
               p->u.data == NULL && p->du.data == NULL && p->dpost_add.data == NULL),
          "%s: %s: more than a plain kernel does", test->name, launch->name);
    const int64_t elements = p->n * p->c * p->s;
    /* Of large ones the last rows: by then every place that a row can begin at in a vector was met. */
    for (int64_t i = 0; i < 64 && i < p->n * p->c; i++) {
        const int64_t row = p->n * p->c - 1 - i;
        const int64_t lead = (row / p->c * p->x.batch + row % p->c * p->x.channel) % vector_elements;
        CHECK(a->geometry.spans * (int64_t)vector_elements - lead >= p->s,
              "%s: %s: %d vectors do not hold a row that begins at %lld", test->name, launch->name,
              (int)a->geometry.spans, (long long)lead);
    }
    if (elements > 300000)
        return;
    unsigned char *const seen = calloc((size_t)elements, 1);
    int64_t wrong = 0;
    if (seen == NULL)
        abort();
    count_elements(a, vector_elements, seen);
    for (int64_t i = 0; i < elements; i++)
        wrong += seen[i] != 1;
    CHECK(wrong == 0, "%s: %s: %lld of %lld elements are in no vector or in several", test->name, launch->name,
          (long long)wrong, (long long)elements);
    free(seen);
}

/* Threads read the parameters of their channels in vectors. */
static void check_packed(const struct plan_case *test, const struct fake_launch *launch,
                         const struct normfuse_problem *p, int vector_elements)
{
    const struct normfuse_parameter *const parameters[] = {&p->weight, &p->bias, &p->scale, &p->shift};
    for (int i = 0; i < 4; i++) {
        const struct normfuse_parameter *const of = parameters[i];
        const int64_t bytes = of->data != NULL ? (int64_t)normfuse_type_bytes(of->type) : 0;
        const int64_t aligned = bytes * vector_elements < 16 ? bytes * vector_elements : 16;
        if (of->data != NULL && (of->type == NORMFUSE_F64 || (intptr_t)of->data % aligned != 0 || of->channel != 1 ||
                                 of->batch * bytes % aligned != 0))
            CHECK(false, "%s: %s: parameter %d cannot be read in vectors", test->name, launch->name, i);
    }
}

/* What the compact kernels take for granted. */
static void check_compact(const struct plan_case *test, const struct fake_launch *launch,
                          const struct normfuse_cuda_arguments *a, int vector_elements)
{
    const struct normfuse_problem of_launch = problem_of(a), *const p = &of_launch;
    const struct normfuse_cuda_geometry *const g = &a->geometry;
    const struct normfuse_cuda_columns *const c = &a->columns;
    const struct normfuse_cuda_cluster *const of = &c->of.cluster;
    const int64_t channels = (int64_t)g->width * vector_elements, groups = channels / g->group;
    const bool backward = p->dy.data != NULL;
#define HOLDS(condition)                                                                                               \
    if (!(condition))                                                                                                  \
    CHECK(false, "%s: %s: not %s", test->name, launch->name, #condition)
    HOLDS(p->sets == NORMFUSE_SETS_GROUP && g->group == p->c / p->groups && p->c % channels == 0);
    HOLDS(p->pre_add.data == NULL && p->post_add.data == NULL && p->du.data == NULL && p->dpost_add.data == NULL);
    HOLDS(c->groups == groups && channels % g->group == 0 && groups << c->lane_bits <= 32);
    for (int64_t first = 0; first < channels; first += vector_elements)
        HOLDS((first + vector_elements - 1) / g->group - first / g->group <= 1);
    const bool gives = backward && (of->samples > 0 || a->sums != NULL);
    const int64_t ranks = g->parts * (of->samples > 0 ? of->samples : 1);
    HOLDS(c->at_once * g->width <= (int32_t)launch->threads - (gives ? 32 : 0));
    HOLDS(launch->grid == p->n * (p->c / channels) * g->parts);
    HOLDS(launch->cluster == (ranks > 1 ? ranks : 0) && (of->samples == 0 || p->n == of->samples));
    HOLDS(of->by_ranks.divisor == ranks && divides(&of->by_ranks) && divides(&of->by_at_once));
    HOLDS(c->parts == g->parts && c->part_rows == g->part_rows && c->rows == p->s);
    HOLDS((int64_t)(g->parts - 1) * g->part_rows < g->rows);
    const struct normfuse_cluster_layout layout =
        backward ? normfuse_lay_out_cluster_backward(g->width, (int32_t)channels, (int32_t)groups, c->at_once, g->parts,
                                                     of->samples > 0 ? (int32_t)ranks : 0, gives)
                 : normfuse_lay_out_cluster_forward(g->width, (int32_t)groups, c->at_once, g->parts);
    HOLDS(layout.bytes <= (int32_t)launch->shared);
    check_packed(test, launch, p, vector_elements);
#undef HOLDS
}

/* What those of the whole grid take for granted. */
static void check_grid(const struct plan_case *test, const struct fake_launch *launch,
                       const struct normfuse_cuda_arguments *a, int vector_elements)
{
    const struct normfuse_problem of_launch = problem_of(a), *const p = &of_launch;
    const struct normfuse_cuda_geometry *const g = &a->geometry;
    const struct normfuse_cuda_columns *const c = &a->columns;
    const struct normfuse_cuda_grid *const of = &c->of.grid;
    const int32_t tile_rows = (int32_t)of->by_tile.divisor;
    const bool backward = p->dy.data != NULL, gives = backward && a->sums != NULL;
    const bool batch = p->sets == NORMFUSE_SETS_BATCH;
#define HOLDS(condition)                                                                                               \
    if (!(condition))                                                                                                  \
    CHECK(false, "%s: %s: not %s", test->name, launch->name, #condition)
    HOLDS((batch ? g->group == 1 && p->n == 1 : p->sets == NORMFUSE_SETS_GROUP && g->group == p->c / p->groups));
    HOLDS((int64_t)g->width * vector_elements == p->c && batch == (strstr(launch->name, "_batch_") != NULL));
    /* x with pre_add takes the place of x in tiles that stay. */
    HOLDS(p->pre_add.data == NULL || (backward && (int64_t)of->stages * tile_rows >= c->part_rows));
    HOLDS(p->u.data == NULL);
    HOLDS(adds_to_tiles(launch->name) ==
          (p->pre_add.data != NULL || p->post_add.data != NULL || p->du.data != NULL || p->dpost_add.data != NULL));
    /* A thread has registers for what is added to so many vectors of a tile, each of which is whole. */
    HOLDS(!adds_to_tiles(launch->name) ||
          (tile_rows <= NORMFUSE_CUDA_PASSING_AHEAD * c->at_once && (uintptr_t)p->pre_add.data % 16 == 0 &&
           (uintptr_t)p->post_add.data % 16 == 0 && (uintptr_t)p->du.data % 16 == 0 &&
           (uintptr_t)p->dpost_add.data % 16 == 0));
    HOLDS((backward ? p->dx.data : p->y.data) != NULL);
    HOLDS(!backward ||
          (p->scale.data == NULL && p->shift.data == NULL && p->dscale.data == NULL && p->dshift.data == NULL));
    for (int64_t first = 0; first < p->c; first += vector_elements)
        HOLDS(batch || (first + vector_elements - 1) / g->group - first / g->group <= 1);
    HOLDS(g->exchange == NORMFUSE_EXCHANGE_GRID && launch->cooperative && launch->cluster <= 1);
    HOLDS((int64_t)(g->block_groups + 1) * 64 <= NORMFUSE_CUDA_GRID_BARRIER_WORDS * 4);
    /* Rows of a part are adjacent in memory, and a bulk copy takes whole vectors. */
    HOLDS(p->x.position == p->c && p->x.channel == 1 && (uintptr_t)p->x.data % 16 == 0 &&
          p->x.batch % vector_elements == 0);
    HOLDS(c->at_once >= 1 && (int64_t)c->at_once * g->width <= (int64_t)launch->threads - 32);
    HOLDS((batch || c->groups == p->groups) && c->parts == g->parts && c->part_rows == g->part_rows);
    HOLDS(c->rows == p->s && c->n == p->n && of->block_groups == g->block_groups &&
          (int64_t)g->block_groups * g->parts == launch->grid);
    HOLDS(divides(&of->by_tile) && divides(&of->by_turn));
    HOLDS((int64_t)of->by_turn.divisor == (int64_t)tile_rows * g->parts);
    /* A copy has fewer bytes than a barrier counts. */
    const int32_t stage = tile_rows * g->width * NORMFUSE_VECTOR_BYTES * (backward ? 2 : 1),
                  stages = of->stages * stage;
    const int32_t channels = (int32_t)p->c, groups = (int32_t)p->groups;
    const int32_t bytes =
        batch ? normfuse_lay_out_batch(stages, channels, c->at_once, backward).bytes
              : normfuse_lay_out_grid(stages, g->width, groups, c->at_once, gives ? channels : 0, backward).bytes;
    HOLDS(!batch || p->c << c->lane_bits <= (int64_t)launch->threads - 32 || c->lane_bits == 0);
    HOLDS(!batch || (2 * g->block_groups * p->c * g->parts) * (backward ? 16 : 24) >=
                        8 * p->c * g->parts + (backward ? 24 : 16) * p->c);
    HOLDS(of->stages >= 1 && of->stages <= 32 && stage < 1 << 20);
    HOLDS(bytes <= (int32_t)launch->shared);
    /* How many rows each part has. */
    int64_t rows = 0;
    for (int64_t part = 0; part < g->parts; part++) {
        int64_t own = 0;
        if (of->interleaved) {
            for (int64_t row = part * tile_rows; row < g->rows; row += (int64_t)g->parts * tile_rows)
                own += g->rows - row < tile_rows ? g->rows - row : tile_rows;
        } else {
            own = g->rows - part * g->part_rows < g->part_rows ? g->rows - part * g->part_rows : g->part_rows;
        }
        const int64_t said = (part < of->first_parts ? c->part_rows : of->small_part_rows) -
                             (part == of->first_parts - 1 ? of->lacking_rows : 0);
        HOLDS(own > 0 && own == said);
        rows += own;
    }
    HOLDS(rows == g->rows && of->first_parts >= 1 && of->first_parts <= g->parts);
    check_packed(test, launch, p, vector_elements);
#undef HOLDS
}

/* Rows that are walked as one are adjacent, whole vectors, and all of them in each block. */
static void check_folded(const struct plan_case *test, const struct fake_launch *launch,
                         const struct normfuse_cuda_arguments *a, int vector_elements)
{
    const struct normfuse_problem of_launch = problem_of(a), *const p = &of_launch;
    const struct normfuse_cuda_geometry *const g = &a->geometry;
    CHECK(g->folded >= 1 && g->rows == p->s / g->folded && p->s % g->folded == 0 &&
              g->row_channels == p->c * g->folded && g->row_values == (int64_t)g->group * g->folded,
          "%s: %s: %d rows of %d folded, %d channels", test->name, launch->name, (int)g->rows, (int)g->folded,
          (int)g->row_channels);
    CHECK(vector_elements > 1 || g->folded == 1, "%s: %s: %d rows folded", test->name, launch->name, (int)g->folded);
    if (g->folded == 1)
        return;
    folded_launches++;
    const struct normfuse_view *const views[] = {&p->x, &p->y, &p->dy, &p->dx};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++)
        CHECK(views[i]->data == NULL ||
                  ((uintptr_t)views[i]->data % 16 == 0 && views[i]->batch % vector_elements == 0 &&
                   views[i]->channel == 1 && views[i]->position == p->c * g->folded),
              "%s: %s: tensor %zu does not allow %d rows folded", test->name, launch->name, i, (int)g->folded);
    CHECK(g->blocks_wide == 1 && (int64_t)g->width * vector_elements == p->c * g->folded &&
              g->folded <= vector_elements && p->c * (g->folded / 2) % vector_elements != 0,
          "%s: %s: %d rows folded in %d vectors", test->name, launch->name, (int)g->folded, (int)g->width);
    const int64_t at_once = (int64_t)launch->threads / g->width, group = g->group < 16 ? g->group : 16;
    const int64_t subvectors = (g->group >> g->subvector_bits) * at_once;
    const int64_t in_lane = test->backward ? up(at_once * g->folded, INT64_C(1) << g->channel_bits)
                                           : g->folded * up(subvectors, INT64_C(1) << g->group_bits);
    CHECK(p->sets == NORMFUSE_SETS_NONE || (a->phases & ~NORMFUSE_PHASE_APPLY) == 0 ||
              in_lane <= (test->backward ? 16 : 22 + group - 3 * g->subvector_bits),
          "%s: %s: a lane joins %lld sums one after the other", test->name, launch->name, (long long)in_lane);
    CHECK(p->c % g->group == 0 || (a->phases & ~NORMFUSE_PHASE_APPLY) == 0 || p->sets == NORMFUSE_SETS_NONE,
          "%s: %s: groups of %d channels", test->name, launch->name, (int)g->group);
}

/* What is added has room to pass beside the vectors that are held, of as many tensors as are read at a time. */
static void check_additions(const struct plan_case *test, const struct fake_launch *launch,
                            const struct normfuse_cuda_arguments *a)
{
    const struct normfuse_problem of_launch = problem_of(a), *const p = &of_launch;
    const struct normfuse_cuda_geometry *const g = &a->geometry;
    const bool backward = p->dy.data != NULL, reads_post = p->post_add.data != NULL &&
                                                           (!backward || p->activation != NORMFUSE_IDENTITY);
    const bool is_exact = p->type == NORMFUSE_F32 || p->activation == NORMFUSE_RELU || p->activation == NORMFUSE_RELU6;
    const int before = p->pre_add.data != NULL || reads_post;
    const int after = (backward && reads_post && !is_exact) + (backward && p->du.data != NULL && p->dx.data != NULL);
    CHECK(p->type != NORMFUSE_F64 && !test->misaligned && g->passing == (before > after ? before : after),
          "%s: %s: %d tensors pass", test->name, launch->name, (int)g->passing);
    CHECK(launch->shared >= ((backward ? 2 : 1) * (size_t)g->held_shared +
                             (size_t)NORMFUSE_CUDA_PASSING_AHEAD * (size_t)g->passing) *
                                16 * launch->threads,
          "%s: %s: %zu bytes of shared memory", test->name, launch->name, launch->shared);
    additions_launches++;
}

static size_t end_of(const void *part, size_t bytes)
{
    return part != NULL ? (size_t)((uintptr_t)part - scratch_address) + bytes : 0;
}

/* A kernel that reads tensors before the kernels ahead of it have ended reads what none of these writes: the tensors
 * that the first one is given. */
static void check_early_launches(const char *name)
{
    struct normfuse_cuda_arguments first, a;
    int elements, held;
    for (int i = 1; i < fake_driver.launches && i < FAKE_LAUNCHES; i++) {
        const struct fake_launch *const launch = &fake_driver.launch[i];
        if (launch->argument_bytes != sizeof a || sscanf(strrchr(launch->name, '_'), "_%dx%d", &elements, &held) != 2)
            continue;
        memcpy(&a, launch->arguments, sizeof a);
        if (a.begins_early == 0)
            continue;
        early_launches++;
        if (!CHECK(fake_driver.launch[0].argument_bytes == sizeof first, "%s: %s reads copies early", name,
                   launch->name))
            continue;
        memcpy(&first, fake_driver.launch[0].arguments, sizeof first);
        for (int view = 0; view < NORMFUSE_VIEWS; view++)
            CHECK(view == NORMFUSE_VIEW_OUT || a.problem.views[view] == first.problem.views[view],
                  "%s: %s reads early what another kernel wrote", name, launch->name);
        CHECK(first.geometry.stores_dz == 0 &&
                  (first.problem.views[NORMFUSE_VIEW_U] == NULL || a.source != NORMFUSE_SOURCE_SCRATCH),
              "%s: %s reads early what the first kernel writes", name, launch->name);
    }
}

/* ---- the body `single` ------------------------------------------------------------------------------------------- */

/* A launch of it, and where the tensors of the call have their elements. */
struct single {
    const struct plan_case *test;
    const struct fake_launch *launch;
    struct normfuse_cuda_signature of;
    struct normfuse_single_arguments a;
    int64_t down, beside, block_columns;
    bool is_spread, has_statistics;
    int64_t batch, channel, position, extent; /* strides, and one past the last element */
};

/* The block and thread that work is about, of one sample; as `place` in device/single.cuh. */
struct single_place {
    int64_t block, rank, group, walker, of_sample, tx, ty, rows, columns, own;
    bool has_group;
};

static struct single_place place_in_single(const struct single *s, int64_t block, int64_t thread)
{
    const struct normfuse_single_arguments *const a = &s->a;
    struct single_place at = {.block = block};
    const int64_t turn = block / a->parts, slot = thread / s->of.lanes, of_group = thread % s->of.lanes;
    at.rank = block % a->parts;
    at.group = turn / a->walkers;
    at.walker = turn % a->walkers;
    if (s->beside > 1) {
        at.of_sample = slot & ((1 << a->sample_bits) - 1);
        at.group = at.group * (s->beside >> a->sample_bits) + (slot >> a->sample_bits);
    }
    at.has_group = s->beside == 1 || at.group < a->groups;
    at.tx = of_group % s->of.across;
    at.ty = of_group / s->of.across;
    const int64_t first_row = at.rank * a->next_rows, first_column = at.rank * a->next_columns;
    const int64_t rows = a->rows - first_row,
                  columns = a->columns - first_column - (s->is_spread ? at.group * s->block_columns : 0);
    at.rows = rows < a->part_rows ? rows : a->part_rows;
    at.columns = columns < a->part_columns ? columns : a->part_columns;
    at.own = at.group * a->group_stride + first_row * a->row_stride + first_column;
    return at;
}

/* Where the sums of a channel go: which block writes each place, and that each is written. */
struct single_sums {
    int32_t *writer; /* 1 + the block; 0: none yet */
    int64_t count;
};

/* False: something was wrong, and said. */
static bool note_sums(const struct single *s, const struct single_place *at, int64_t sample, int64_t channel,
                      const struct single_sums *sums)
{
    const struct normfuse_single_arguments *const a = &s->a;
    const bool by_sample = s->of.gradients == NORMFUSE_GRADIENTS_OF_SAMPLES;
    const int64_t part = a->part_slots > 1 ? at->rank : 0;
    const int64_t slot = by_sample ? part : at->walker * a->part_slots + part;
    const int64_t index = ((by_sample ? sample * a->channels : 0) + channel) * a->sum_slots + slot;
    if (slot >= a->sum_slots || index >= sums->count)
        return CHECK(false, "%s: sums of channel %lld are beyond their places", s->test->name, (long long)channel);
    /* Where the blocks of a cluster know the totals of all, the first one writes these. */
    const bool is_known = a->part_slots == 1 && s->of.shared_by_cluster != 0 && s->of.sums_slopes == 0;
    const int64_t writer = 1 + at->block - (is_known ? at->rank : 0);
    const int32_t before = sums->writer[index];
    sums->writer[index] = (int32_t)writer;
    return before == 0 || before == (int32_t)writer ||
           CHECK(false, "%s: blocks %d and %lld write the same sums of channel %lld", s->test->name, before - 1,
                 (long long)writer - 1, (long long)channel);
}

/* In `seen`, one a place in memory: how many threads have it. Ends at the first thing that is wrong. */
static void count_owners_of_single(const struct single *s, unsigned char *seen, const struct single_sums *sums)
{
    const struct normfuse_single_arguments *const a = &s->a;
    const struct plan_case *const test = s->test;
    const int64_t vector = s->of.vector, at_once = s->beside > 1 ? INT64_C(1) << a->sample_bits : 1;
#define HOLDS(condition)                                                                                               \
    if (!(condition)) {                                                                                                \
        CHECK(false, "%s: %s: not %s", test->name, s->launch->name, #condition);                                       \
        return;                                                                                                        \
    }
    for (int64_t i = 0; i < (int64_t)s->launch->grid * s->launch->threads; i++) {
        const struct single_place at = place_in_single(s, i / s->launch->threads, i % s->launch->threads);
        int64_t sample = at.walker * at_once + at.of_sample;
        HOLDS(s->of.exact == 0 || (at.has_group && sample < a->samples));
        for (; at.has_group && sample < a->samples; sample += s->of.walks ? a->walkers * at_once : a->samples)
            for (int64_t k = 0; k < (int64_t)s->of.held_rows * s->of.held_columns; k++) {
                const int64_t row = at.ty + k / s->of.held_columns * s->down;
                const int64_t row_begin = sample * a->sample_stride + at.own + row * a->row_stride;
                const int64_t before = s->of.aligned ? 0 : row_begin & (vector - 1);
                const int64_t first = (at.tx + k % s->of.held_columns * s->of.across) * vector - before;
                const bool has = row < at.rows && first < at.columns;
                HOLDS(s->of.exact == 0 || has);
                if (!has)
                    continue;
                HOLDS((row_begin + first) % vector == 0);
                for (int64_t j = 0; j < vector; j++) {
                    const int64_t column = first + j, place = row_begin + column;
                    if (s->of.aligned == 0 && (column < 0 || column >= at.columns))
                        continue;
                    HOLDS(place >= 0 && place < s->extent);
                    seen[place]++;
                    const int64_t n = place / s->batch, rest = place % s->batch;
                    const int64_t c = test->channels_last ? rest % s->position : rest / s->channel;
                    const int64_t of = at.group * a->group_channels +
                                       (s->of.parameters == NORMFUSE_PARAMETERS_OF_ROW ? at.rank * a->next_rows + row
                                        : s->of.parameters == NORMFUSE_PARAMETERS_OF_COLUMN
                                            ? at.rank * a->next_columns + column
                                            : 0);
                    HOLDS(of == c);
                    const int64_t set = s->of.statistics == NORMFUSE_STATISTICS_COLUMN ? of : at.group;
                    HOLDS(!s->has_statistics || s->of.mean == 0 ||
                          sample * a->mean.sample + set * a->mean.channel ==
                              (test->op == 0 ? n * test->groups + c / (test->sizes[1] / test->groups) : c));
                    if (sums->count > 0 && !note_sums(s, &at, sample, of, sums))
                        return;
                }
            }
    }
#undef HOLDS
}

/* Roundings on a value's longest way into a sum: in a thread, lanes of a warp, warps, blocks; and the distance, the
 * product and the quotients, 6. */
static double longest_way_in_single(const struct single *s, bool of_gradients)
{
    const struct normfuse_single_arguments *const a = &s->a;
    const int64_t lanes = s->of.lanes, warps = lanes / 32, vector = s->of.vector;
    const int64_t thread_rows = up(a->part_rows, s->down);
    const int64_t thread_columns = vector * s->of.held_columns < a->part_columns ? vector * s->of.held_columns
                                                                               : a->part_columns;
    const int64_t of_block = levels(lanes < 32 ? lanes : 32) + (warps <= 1 ? 0 : warps <= 8 ? warps - 1 : 5);
    const int64_t at_once = INT64_C(1) << a->sample_bits;
    const int64_t samples = of_gradients ? up(a->samples, at_once * a->walkers) - 1 : 0;
    const bool by_row = s->of.parameters == NORMFUSE_PARAMETERS_OF_ROW,
               by_column = s->of.parameters == NORMFUSE_PARAMETERS_OF_COLUMN;
    if (s->of.statistics == NORMFUSE_STATISTICS_COLUMN) {
        int64_t column_lanes = 1;
        while (column_lanes < 32 && column_lanes * 2 <= s->down && column_lanes * 2 * s->block_columns <= s->of.threads)
            column_lanes *= 2;
        return (double)(thread_rows + up(s->down, column_lanes) + levels(column_lanes) +
                        (s->of.shared_by_cluster ? a->parts : 0) + 6);
    }
    /* Of a channel: its values in a thread, then the sums of samples; those of threads in double, but for lanes of a row
     * and the threads of a group of one channel. */
    if (of_gradients && (by_row || by_column))
        return (double)((by_row ? thread_columns + levels(s->of.across) : thread_rows) + samples + 6);
    /* Forward in two sums, which are then one. */
    const int64_t in_thread = !s->of.backward ? up(thread_rows * thread_columns, 2) + 1
                              : by_row        ? thread_columns + s->of.held_rows
                              : by_column     ? thread_rows + thread_columns
                                              : thread_rows * thread_columns;
    const int64_t of_cluster = !s->of.shared_by_cluster ? 0 : s->of.backward ? 5 : 4 + 3;
    return (double)(in_thread + of_block + of_cluster + samples + 6);
}

/* Bytes of dynamic shared memory that the kernel places: sums of columns, or what the blocks of a cluster send one
 * another; and sums of channels, in their place. */
static int64_t shared_of_single(const struct single *s)
{
    const int64_t value = s->of.type == NORMFUSE_F64 ? 8 : 4, parts = s->of.shared_by_cluster ? 16 : 0;
    const bool by_row = s->of.parameters == NORMFUSE_PARAMETERS_OF_ROW,
               by_column = s->of.parameters == NORMFUSE_PARAMETERS_OF_COLUMN;
    int64_t bytes = 2 * value * parts;
    if (s->of.statistics == NORMFUSE_STATISTICS_COLUMN)
        bytes = s->block_columns * value * (2 * s->down + 4 + 2 * parts + 1);
    const int64_t weights = by_column ? s->down * s->block_columns : by_row ? s->of.held_rows * s->down : 1;
    const int64_t of_channels =
        s->of.gradients != NORMFUSE_GRADIENTS_NONE ? s->beside * weights * (s->of.sums_slopes ? 3 : 2) * value : 0;
    return of_channels > bytes ? of_channels : bytes;
}

/* Every element of the tensors has one thread, which takes it for what it is; blocks, shared memory and clusters are
 * within the device's limits; every sum that a later kernel reads is written by one block. */
static void check_single(const struct plan_case *test, const struct fake_launch *launch,
                         const struct normfuse_cuda_device *device, const struct tolerance_arithmetic *arithmetic)
{
    enum { STATIC_SHARED = 2048, MAX_ELEMENTS = 60000, MAX_THREADS = 2000000, MAX_CLUSTER_BLOCKS = 16 };
    struct single s = {.test = test, .launch = launch, .of = fake_driver_signature((int)launch->kernel)};
    const struct normfuse_single_arguments *const a = &s.a;
    const int64_t *const sizes = test->sizes;
    if (!CHECK(launch->argument_bytes == sizeof s.a, "%s: %zu bytes of arguments", test->name, launch->argument_bytes))
        return;
    memcpy(&s.a, launch->arguments, sizeof s.a);
#define HOLDS(condition)                                                                                               \
    if (!(condition))                                                                                                  \
    CHECK(false, "%s: %s: not %s", test->name, launch->name, #condition)
    s.down = s.of.lanes / s.of.across;
    s.beside = s.of.threads / s.of.lanes;
    s.block_columns = (int64_t)s.of.across * s.of.held_columns * s.of.vector;
    s.has_statistics =
        s.of.statistics == NORMFUSE_STATISTICS_GROUP || s.of.statistics == NORMFUSE_STATISTICS_COLUMN;
    s.is_spread =
        s.of.parameters == NORMFUSE_PARAMETERS_OF_COLUMN && s.of.statistics != NORMFUSE_STATISTICS_GROUP;
    s.channel = test->channels_last ? 1 : sizes[2];
    s.position = test->channels_last ? sizes[1] + (test->sliced ? 8 : 0) : 1;
    s.batch = sizes[2] * (test->channels_last ? s.position : sizes[1]);
    s.extent = (sizes[0] - 1) * s.batch + (sizes[1] - 1) * s.channel + (sizes[2] - 1) * s.position + 1;

    HOLDS(s.of.body == NORMFUSE_BODY_single && s.of.backward == test->backward && s.of.type == (int32_t)test->type);
    HOLDS(s.of.activation == test->activation && s.has_statistics == (test->op != 2));
    HOLDS(s.of.pre_add == test->summed && s.of.stores_u == test->summed && s.of.post_add == test->residual);
    HOLDS(s.of.dpost_add == (test->residual && test->backward) && s.of.writes_out == 1);
    /* Threads. */
    HOLDS((int32_t)launch->threads == s.of.threads && s.of.threads % 32 == 0 && s.of.threads <= 1024);
    HOLDS((s.of.lanes & (s.of.lanes - 1)) == 0 && (s.of.across & (s.of.across - 1)) == 0 && s.of.across <= s.of.lanes);
    HOLDS(s.of.threads % s.of.lanes == 0 && (s.beside & (s.beside - 1)) == 0 && INT64_C(1) << a->sample_bits <= s.beside);
    HOLDS(s.of.lanes <= 32 || s.beside == 1); /* whole blocks, or parts of a warp, meet */
    HOLDS(s.of.parameters != NORMFUSE_PARAMETERS_OF_ROW || !s.of.backward || s.of.across <= 32);
    HOLDS(s.of.parameters != NORMFUSE_PARAMETERS_OF_COLUMN || s.of.aligned != 0);
    HOLDS(!s.is_spread || s.beside == 1);
    HOLDS((s.of.joins_beside != 0) == (a->sample_bits > 0));
    /* Vectors. */
    const int64_t vector_bytes = s.of.vector * (int64_t)normfuse_type_bytes(s.of.type);
    const void *const tensors[] = {a->x, a->dy, a->out, a->pre_add, a->post_add, a->du, a->u, a->dpost_add};
    HOLDS(vector_bytes <= 16 && (s.of.vector & (s.of.vector - 1)) == 0);
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        HOLDS((uintptr_t)tensors[i] % (uintptr_t)vector_bytes == 0);
    /* Blocks. */
    HOLDS(!launch->cooperative && launch->cluster == (s.of.shared_by_cluster ? (uint32_t)a->parts : 0u));
    HOLDS(launch->cluster == 0 || (device->clusters && a->parts <= MAX_CLUSTER_BLOCKS));
    HOLDS((s.of.split != 0) == (a->parts > 1) && (s.of.split != 0 || s.of.shared_by_cluster == 0));
    HOLDS(!s.has_statistics || (s.of.shared_by_cluster != 0) == (a->parts > 1));
    HOLDS(a->next_rows == 0 || a->next_columns == 0);
    HOLDS((a->parts > 1) == (a->next_rows > 0 || a->next_columns > 0));
    HOLDS((int64_t)launch->shared >= shared_of_single(&s));
    HOLDS(launch->shared + STATIC_SHARED <= device->shared_per_block);
    HOLDS((int32_t)a->by_parts.divisor == a->parts && divides(&a->by_parts));
    HOLDS((int32_t)a->by_walkers.divisor == a->walkers && divides(&a->by_walkers));
    /* Whatever the size: rows, columns, groups and samples are all somebody's. */
    const int64_t turns = (int64_t)launch->grid / a->parts, group_blocks = turns / a->walkers;
    HOLDS(turns * a->parts == (int64_t)launch->grid && group_blocks * a->walkers == turns);
    HOLDS(s.down * s.of.held_rows >= a->part_rows);
    HOLDS(s.block_columns >= a->part_columns + (s.of.aligned ? 0 : s.of.vector - 1));
    HOLDS((int64_t)a->next_rows * (a->parts - 1) + a->part_rows >= a->rows &&
          (int64_t)a->next_rows * (a->parts - 1) < a->rows && a->part_rows >= a->next_rows);
    HOLDS(s.is_spread ? group_blocks * s.block_columns >= a->columns
                      : (int64_t)a->next_columns * (a->parts - 1) + a->part_columns >= a->columns &&
                            (int64_t)a->next_columns * (a->parts - 1) < a->columns && a->part_columns >= a->next_columns);
    HOLDS(s.is_spread || group_blocks * (s.beside >> a->sample_bits) >= a->groups);
    HOLDS((s.of.walks != 0) == (((int64_t)a->walkers << a->sample_bits) < a->samples));
    HOLDS(((int64_t)(a->walkers - 1) << a->sample_bits) < a->samples);
    HOLDS(a->channels == sizes[1]);
    const double values = test->op == 0 ? (double)(sizes[1] / test->groups) * (double)sizes[2]
                                        : (double)sizes[0] * (double)sizes[2];
    HOLDS(!s.has_statistics || (a->values == (float)values && a->share == 1.0f / a->values));
    /* Sums for a later kernel. */
    const bool leaves_sums =
        s.of.gradients != NORMFUSE_GRADIENTS_NONE && s.of.gradients != NORMFUSE_GRADIENTS_DIRECT;
    const bool by_sample = s.of.gradients == NORMFUSE_GRADIENTS_OF_SAMPLES;
    struct single_sums sums = {.count = leaves_sums ? (by_sample ? a->samples : 1) * (int64_t)a->channels * a->sum_slots : 0};
    HOLDS(test->backward == (s.of.gradients != NORMFUSE_GRADIENTS_NONE)); /* dweight is always wanted */
    HOLDS(!leaves_sums || (a->sums != NULL && end_of(a->sums, (size_t)sums.count * 16) <= scratch_address_bytes));
    HOLDS(!leaves_sums || s.of.sums_slopes == 0 ||
          end_of(a->slope_sums, (size_t)sums.count * 16) <= scratch_address_bytes);
    const int64_t elements = sizes[0] * sizes[1] * sizes[2], held = (int64_t)s.of.held_rows * s.of.held_columns;
    if (s.extent <= MAX_ELEMENTS && (int64_t)launch->grid * launch->threads * held <= MAX_THREADS) {
        unsigned char *const seen = calloc((size_t)s.extent, 1);
        sums.writer = calloc((size_t)sums.count + 1, sizeof *sums.writer);
        int64_t right = 0, all = 0, empty = 0;
        if (seen == NULL || sums.writer == NULL)
            abort();
        count_owners_of_single(&s, seen, &sums);
        for (int64_t i = 0; i < s.extent; i++)
            all += seen[i];
        for (int64_t i = 0; i < elements; i++)
            right += seen[i / (sizes[1] * sizes[2]) * s.batch + i / sizes[2] % sizes[1] * s.channel +
                          i % sizes[2] * s.position] == 1;
        for (int64_t i = 0; i < sums.count; i++)
            empty += sums.writer[i] == 0;
        CHECK(right == elements && all == elements, "%s: %s: %lld of %lld elements have one thread, %lld are held",
              test->name, launch->name, (long long)right, (long long)elements, (long long)all);
        CHECK(empty == 0, "%s: %s: %lld of %lld sums are not written", test->name, launch->name, (long long)empty,
              (long long)sums.count);
        free(seen);
        free(sums.writer);
    }
    single_launches++;
    single_parts += a->parts > 1;
    single_walks += s.of.walks;
    single_unaligned += s.of.aligned == 0;
    single_sums += leaves_sums;
    for (int gradients = !s.has_statistics; gradients < 1 + (s.of.gradients != NORMFUSE_GRADIENTS_NONE); gradients++) {
        const double way = longest_way_in_single(&s, gradients != 0);
        const double more =
            gradients ? tolerance_sample_additions(arithmetic, test->channels_last || sizes[2] == 1, sizes[0], sizes[2]) : 0.0;
        CHECK(way <= arithmetic->additions + more, "%s: %s: a value meets %.0f roundings, tolerance.c says %.0f", test->name,
              launch->name, way, arithmetic->additions + more);
    }
#undef HOLDS
}

/* ---- the body `finish` ------------------------------------------------------------------------------------------- */

static bool is_power_of_two(int64_t value)
{
    return value > 0 && (value & (value - 1)) == 0;
}

/* Each item has its threads, and memory that was asked for. */
static void check_finish(const struct plan_case *test, const struct fake_launch *launch)
{
    const struct normfuse_cuda_signature of = fake_driver_signature((int)launch->kernel);
    struct normfuse_finish_arguments a;
    if (!CHECK(launch->argument_bytes == sizeof a, "%s: %zu bytes of arguments", test->name, launch->argument_bytes))
        return;
    memcpy(&a, launch->arguments, sizeof a);
#define HOLDS(condition)                                                                                               \
    if (!(condition))                                                                                                  \
    CHECK(false, "%s: %s: not %s", test->name, launch->name, #condition)
    const int64_t threads = (int64_t)launch->threads, grid = launch->grid;
    const int64_t samples = test->sizes[0], channels = test->sizes[1];
    const int64_t sets = test->op == 0 ? samples * test->groups : channels;
    HOLDS(threads % 32 == 0 && threads <= NORMFUSE_FINISH_THREADS && launch->cluster <= 1 && !launch->cooperative);
    HOLDS(is_power_of_two(a.lanes) && threads % a.lanes == 0);
    HOLDS(a.samples == samples || a.samples == 1); /* samples that count together may be one */
    HOLDS(a.channels == channels);
    HOLDS(of.statistics == (test->op == 0   ? NORMFUSE_STATISTICS_GROUP
                            : test->op == 1 ? NORMFUSE_STATISTICS_CHANNEL
                                            : NORMFUSE_STATISTICS_NONE));
    HOLDS(divides(&a.by_groups) && divides(&a.by_set_channels));
    HOLDS(test->op != 0 || (a.by_groups.divisor == test->groups && a.by_set_channels.divisor * test->groups == channels));
    if (of.work != NORMFUSE_WORK_GRADIENTS)
        HOLDS(grid * threads >= (int64_t)a.items * a.lanes);
    finish_launches[of.work]++;
    if (of.work == NORMFUSE_WORK_SHARES) {
        const int64_t shares = a.by_shares.divisor;
        HOLDS(divides(&a.by_shares) && a.items == sets * shares && shares * a.share >= a.triples);
        HOLDS(end_of(a.sums, (size_t)(sets * a.triples) * 24) <= scratch_address_bytes);
    } else if (of.work == NORMFUSE_WORK_STATISTICS) {
        HOLDS(a.items == sets && (int64_t)a.joined * a.share >= a.triples && (int64_t)(a.joined - 1) * a.share < a.triples);
        HOLDS(end_of(a.sums, (size_t)(sets * a.triples) * 24) <= scratch_address_bytes);
        HOLDS(of.keeps_statistics == 0 || (end_of(a.sums, (size_t)(sets * a.triples) * 24) <= end_of(a.statistics, 0) &&
                                           end_of(a.statistics, (size_t)sets * 24) <= scratch_address_bytes));
    } else {
        const bool by_sample = of.gradients == NORMFUSE_GRADIENTS_OF_SAMPLES;
        const int64_t all = (by_sample ? a.samples : 1) * channels * a.slot_stride;
        HOLDS(divides(&a.by_slots) && a.slots <= a.slot_stride && (int32_t)a.by_slots.divisor == a.slots);
        HOLDS(end_of(a.sums, (size_t)all * 16) <= scratch_address_bytes);
        HOLDS(of.gradients != NORMFUSE_GRADIENTS_NORMALIZED || test->op == 0);
        HOLDS(of.work != NORMFUSE_WORK_PARTS || (a.items == all / a.slot_stride && a.slots > 1));
    }
    if (of.work == NORMFUSE_WORK_GRADIENTS) {
        const bool finds = (of.dweight | of.dbias | of.dscale | of.dshift | of.writes_shard) != 0;
        const int64_t before = of.dslope ? a.slopes.first_block : grid;
        HOLDS(of.totals ? a.items == sets && a.totals_blocks * threads >= (int64_t)a.items * a.lanes
                        : a.totals_blocks == 0);
        HOLDS(of.totals == 0 || (a.totals != NULL && end_of(a.totals, (size_t)sets * 16) <= scratch_address_bytes));
        HOLDS(finds ? (before - a.totals_blocks) * threads >= channels * a.gradient_lanes &&
                          threads % a.gradient_lanes == 0 && is_power_of_two(a.gradient_lanes)
                    : before == a.totals_blocks);
        HOLDS(of.totals != 0 || finds || of.dslope != 0);
        if (of.dslope) {
            /* All pairs, once, of channels or of what these left. */
            const struct normfuse_finish_slopes *const slopes = &a.slopes;
            const int64_t pairs = (int64_t)slopes->items * slopes->outers * slopes->by_slots.divisor;
            const int64_t all = (of.gradients == NORMFUSE_GRADIENTS_OF_SAMPLES ? a.samples : 1) * channels * a.slot_stride;
            slope_launches++;
            HOLDS((grid - before) * threads >= (int64_t)slopes->items * slopes->lanes);
            HOLDS(threads % slopes->lanes == 0 && is_power_of_two(slopes->lanes) && divides(&slopes->by_slots));
            HOLDS(pairs == all || pairs == channels);
            HOLDS(slopes->leaves || slopes->items == (a.dslope.channel == 0 ? 1 : channels));
            HOLDS(end_of(a.slope_sums, (size_t)all * 16) <= scratch_address_bytes);
        }
    }
#undef HOLDS
}

static void check_launch(const struct plan_case *test, const struct fake_launch *launch,
                         const struct normfuse_cuda_device *device, const struct tolerance_arithmetic *arithmetic)
{
    struct normfuse_cuda_arguments a;
    int vector_elements = 0, held = 0;
    const char *const numbers = strrchr(launch->name, '_');
    if ((int)launch->kernel >= NORMFUSE_CUDA_KERNELS) {
        if (fake_driver_signature((int)launch->kernel).body == NORMFUSE_BODY_finish)
            check_finish(test, launch);
        else
            check_single(test, launch, device, arithmetic);
        return;
    }
    if (!CHECK(launch->argument_bytes == sizeof a, "%s: %zu bytes of arguments", test->name, launch->argument_bytes))
        return;
    memcpy(&a, launch->arguments, sizeof a);
    const struct normfuse_problem of_launch = problem_of(&a), *const p = &of_launch;
    const struct normfuse_cuda_geometry *const g = &a.geometry;
    if (!CHECK(sscanf(numbers, "_%dx%d", &vector_elements, &held) == 2, "%s: %s", test->name, launch->name))
        return;
    const bool backward = strstr(launch->name, "backward") != NULL;
    const bool gathers = (a.phases & (NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_BACKWARD_SUMS)) != 0;
    const int resident =
        blocks_per_multiprocessor(device, launch->kernel, launch->threads, launch->shared);
#define HOLDS(condition)                                                                                               \
    if (!(condition))                                                                                                  \
    CHECK(false, "%s: %s: not %s", test->name, launch->name, #condition)
    const bool unaligned = is_unaligned(launch->name), run = is_run(launch->name);
    const bool general = is_general(launch->name) || run; /* checked by themselves */
    HOLDS(backward == test->backward && (strstr(launch->name, "columns") != NULL) == (p->columns != 0));
    HOLDS(vector_elements == 1 || unaligned || general ||
          (p->columns ? p->c * g->folded : p->s) % vector_elements == 0);
    if (p->columns && !general)
        check_folded(test, launch, &a, vector_elements);
    HOLDS(vector_elements == 1 || !test->misaligned);
    HOLDS(launch->threads % 32 == 0 && launch->threads <= 1024);
    HOLDS(launch->shared <= device->shared_per_block);
    HOLDS(resident > 0);
    HOLDS(g->parts >= 1 && g->passes >= 1 && g->held_shared >= 0 &&
          (vector_elements > 1 || g->held_shared == 0 || general));
    /* Blocks that wait for one another. */
    HOLDS(launch->cooperative == (g->exchange == NORMFUSE_EXCHANGE_GRID));
    if (g->exchange == NORMFUSE_EXCHANGE_GRID) {
        HOLDS(test->has_sync && a.grid_barriers != NULL);
        HOLDS(launch->grid == (int64_t)g->block_groups * g->parts && g->block_groups <= g->all_block_groups);
        HOLDS((int64_t)g->block_groups * 64 <= NORMFUSE_CUDA_SYNC_BYTES);
        HOLDS(launch->grid <= (int64_t)resident * device->multiprocessors);
    }
    HOLDS((g->exchange == NORMFUSE_EXCHANGE_CLUSTER) == (launch->cluster > 1));
    HOLDS(launch->cluster <= 1 || (device->clusters && launch->cluster <= 16 &&
                                   (is_compact(launch->name) || general || g->parts == (int32_t)launch->cluster)));
    /* One that computes what it then applies hears of all parts of its sets. */
    const bool applies = (a.phases & (NORMFUSE_PHASE_APPLY | NORMFUSE_PHASE_BACKWARD_APPLY)) != 0;
    if (gathers && applies && p->sets != NORMFUSE_SETS_NONE && !general) {
        HOLDS(g->parts == 1 || g->exchange != NORMFUSE_EXCHANGE_NONE);
        HOLDS(g->passes == 1);
        HOLDS(!p->columns || p->sets != NORMFUSE_SETS_GROUP || g->group == p->c / p->groups);
    }
    HOLDS(!p->columns || general || g->blocks_wide == 1 || !gathers || p->sets == NORMFUSE_SETS_NONE ||
          g->width * vector_elements % g->group == 0);
    if (takes_additions(launch->name))
        check_additions(test, launch, &a);
    /* All elements, once. */
    const int64_t vectors = unaligned ? g->spans : (p->columns ? p->c * g->folded : p->s) / vector_elements;
    const int64_t places = p->columns ? p->n * g->rows * vectors : (int64_t)g->all_block_groups * g->rows;
    if (run) {
        check_run(test, launch, &a, vector_elements, held);
    } else if (general) {
        check_general(test, launch, &a, vector_elements, held);
    } else if (!p->columns) {
        HOLDS(g->spans == vectors && g->spans <= up(p->s + vector_elements - 1, vector_elements));
        if (unaligned) {
            unaligned_launches++;
            check_unaligned(test, launch, &a, vector_elements);
        }
        HOLDS(g->rows == (int64_t)g->outer * g->spans && (int64_t)g->all_block_groups * g->outer == p->n * p->c);
        /* Of a thread's values that are summed about one of them. */
        HOLDS(g->held_shared <= 48 && held <= 48 && launch->threads <= 512);
        HOLDS(g->stagger_cycles == 0 ||
              (g->exchange == NORMFUSE_EXCHANGE_GRID && g->block_groups < g->all_block_groups));
        /* Four numbers a channel that a block touches, backward two more a channel of a segment, and what it holds. */
        const int64_t segments = !backward ? 0 : (int64_t)launch->threads / 32;
        const int64_t values = 4 * (int64_t)g->coefficients + 2 * segments * g->channels_a_segment;
        HOLDS(launch->shared >= (size_t)(values * (p->type == NORMFUSE_F64 ? 8 : 4) +
                                         (backward ? 2 : 1) * INT64_C(16) * g->held_shared * launch->threads));
        HOLDS(g->segment_rows <= (held + g->held_shared) * (backward ? 32 : 1));
    } else {
        HOLDS((int64_t)g->blocks_wide * g->width >= vectors && (int64_t)(g->blocks_wide - 1) * g->width < vectors);
        HOLDS((int64_t)launch->threads >= g->width);
        if (is_compact(launch->name)) {
            check_compact(test, launch, &a, vector_elements);
            compact_launches++;
        }
        if (is_of_grid(launch->name)) {
            check_grid(test, launch, &a, vector_elements);
            grid_launches++;
        }
    }
    if (general) {
        HOLDS(true);
    } else if (places <= (is_of_grid(launch->name) ? 1000000 : 30000) && (int64_t)launch->grid * launch->threads <= 4000000) {
        unsigned char *seen = calloc((size_t)places, 1);
        int64_t wrong = 0, first = -1;
        if (seen == NULL)
            abort();
        count_owners(launch, &a, vector_elements, held, seen);
        for (int64_t i = 0; i < places; i++)
            if (seen[i] != 1) {
                first = wrong == 0 ? i : first;
                wrong++;
            }
        CHECK(wrong == 0, "%s: %s: %lld of %lld places have no thread or several, the first is %lld (%d)", test->name,
              launch->name, (long long)wrong, (long long)places, (long long)first, first < 0 ? 0 : seen[first]);
        free(seen);
    } else if (p->columns) {
        HOLDS(is_of_grid(launch->name) ||
              g->passes * rows_at_once(&a, launch->name, launch->threads) * (held + g->held_shared) >=
                  (g->part_rows < g->rows ? g->part_rows : g->rows));
        HOLDS((int64_t)g->parts_a_sample * g->part_rows >= g->rows);
        HOLDS(g->exchange == NORMFUSE_EXCHANGE_GRID || launch->grid == (int64_t)g->all_block_groups * g->parts);
        HOLDS(g->all_block_groups == (g->all_samples ? 1 : p->n) * g->blocks_wide);
        HOLDS(g->parts == (g->all_samples ? p->n : 1) * g->parts_a_sample);
    } else {
        const int64_t of_tile = (int64_t)launch->threads / (backward ? 32 : 1) * g->segment_rows;
        HOLDS(g->passes * of_tile >= g->part_rows || g->passes * of_tile >= g->rows);
        HOLDS((int64_t)g->parts * g->part_rows >= g->rows);
        HOLDS(g->exchange == NORMFUSE_EXCHANGE_GRID || launch->grid == (int64_t)g->all_block_groups * g->parts);
    }
    HOLDS(divides(&g->by_parts) && divides(&g->by_groups) && divides(&g->by_spans) && divides(&g->by_outer));
    HOLDS(divides(&g->by_width) && divides(&g->by_blocks_wide) && divides(&g->by_group));
    HOLDS(!p->columns || (divides(&g->by_subvectors) && divides(&g->by_set_channels)));
    HOLDS(!p->columns ||
          (g->group % (1 << g->subvector_bits) == 0 && vector_elements % (1 << g->subvector_bits) == 0 &&
           ((int64_t)g->by_subvectors.divisor << g->subvector_bits == g->group || general)));
    HOLDS(divides(&g->by_parts_a_sample) && divides(&g->by_rows_at_once) && g->by_parts.divisor == (uint32_t)g->parts);
    /* Scratch: parts one after the other, within what was asked for. */
    const int64_t groups = p->columns ? (int64_t)g->width * vector_elements / g->group : 1;
    const int64_t channels = is_stacked(&a) ? p->c / g->spans : p->c;
    const int64_t all_sets = p->sets == NORMFUSE_SETS_GROUP ? p->n * p->groups : channels;
    const int64_t split = p->sets == NORMFUSE_SETS_GROUP && !run ? p->c / p->groups / g->group : 1;
    const int64_t rows_of_set = p->sets == NORMFUSE_SETS_BATCH ? p->n : p->c / (p->groups > 0 ? p->groups : 1);
    const int64_t triples =
        run ? rows_of_set * g->sum_slots : split * g->parts * (g->folded > 1 && g->blocks_wide > 1 ? g->folded : 1);
    const size_t word = backward ? 16 : 24;
    size_t used = 0;
    if (g->exchange == NORMFUSE_EXCHANGE_GRID)
        used = end_of(a.partials, (size_t)(2 * groups * g->block_groups * g->parts) * word);
    else if (gathers && !backward && !(a.phases & NORMFUSE_PHASE_APPLY))
        used = end_of(a.partials, (size_t)(all_sets * triples) * word);
    HOLDS(used == 0 || a.partials != NULL);
    HOLDS(a.statistics == NULL || end_of(a.statistics, 0) >= used);
    used = a.statistics != NULL ? end_of(a.statistics, (size_t)all_sets * sizeof *a.statistics) : used;
    HOLDS(a.sums == NULL || end_of(a.sums, 0) >= used);
    used = a.sums != NULL && gathers && backward
               ? end_of(a.sums, (size_t)((g->sums_by_channel ? 1 : p->n) * channels * g->sum_slots) * 16 *
                                    (p->dslope.data != NULL ? 2 : 1))
               : used;
    HOLDS(a.totals == NULL || end_of(a.totals, 0) >= used);
    used = a.totals != NULL ? end_of(a.totals, (size_t)all_sets * 16) : used;
    CHECK(used <= scratch_address_bytes, "%s: %s: %zu bytes of scratch used, %zu asked for", test->name, launch->name,
          used, scratch_address_bytes);
    if (gathers) {
        const double way = longest_way(&a, launch->name, held, launch->threads, vector_elements, unaligned, backward);
        CHECK(way <= arithmetic->additions, "%s: %s: a value meets %.0f roundings, tolerance.c says %.0f", test->name,
              launch->name, way, arithmetic->additions);
    }
#undef HOLDS
}

static normfuse_status call_plan_case(const struct plan_case *test, const normfuse_tensors *tensors,
                                      const normfuse_exec *exec, size_t *bytes)
{
    const normfuse_group_norm_options group = {
        .struct_bytes = sizeof group, .groups = test->groups, .eps = 1e-5, .activation = test->activation};
    const normfuse_batch_norm_options batch = {
        .struct_bytes = sizeof batch, .eps = 1e-5, .activation = test->activation};
    const normfuse_affine_options affine = {.struct_bytes = sizeof affine, .activation = test->activation};
#define EITHER(name, options)                                                                                          \
    (test->backward ? bytes ? normfuse_##name##_backward_scratch_bytes(options, tensors, exec, bytes)                  \
                            : normfuse_##name##_backward(options, tensors, exec)                                       \
     : bytes ? normfuse_##name##_forward_scratch_bytes(options, tensors, exec, bytes)                                  \
                    : normfuse_##name##_forward(options, tensors, exec))
    return test->op == 0   ? EITHER(group_norm, &group)
           : test->op == 1 ? EITHER(batch_norm, &batch)
                           : EITHER(affine, &affine);
#undef EITHER
}

static void run_plan_case(struct plan_case *test, const struct normfuse_cuda_device *device)
{
    static const char *const types[] = {"f64", "f32", "f16", "bf16"};
    static const char *const operators[] = {"group_norm", "batch_norm", "affine"};
    const int64_t *const sizes = test->sizes;
    snprintf(test->name, sizeof test->name, "%s %lldx%lldx%lld groups=%lld %s %s act=%d %s%s%s%s on %s",
             operators[test->op], (long long)sizes[0], (long long)sizes[1], (long long)sizes[2],
             (long long)test->groups, types[test->type], test->channels_last ? "nhwc" : "nchw", (int)test->activation,
             test->backward ? "bwd" : "fwd", test->has_sync ? " sync" : "",
             test->misaligned ? " misaligned"
             : test->sliced   ? " sliced"
                              : "",
             test->residual                   ? " post_add"
             : test->summed && test->in_place ? " pre_add u=x"
             : test->summed                   ? " pre_add u"
                                              : "",
             device->clusters ? "9.0" : "8.0");
    const size_t value = (size_t)normfuse_type_bytes((int32_t)test->type);
    const uintptr_t base = (uintptr_t)0x100000000000, gap = (uintptr_t)1 << 42;
    enum { BIG = 5, SMALL = 7 };
    normfuse_axes axes[BIG + SMALL];
    normfuse_tensor big[BIG], small[SMALL];
    for (int i = 0; i < BIG; i++) {
        void *const data = (void *)(base + (uintptr_t)(i < 3 ? i : 7 + i) * gap + (test->misaligned ? value : 0));
        big[i] = test->channels_last ? normfuse_tensor_channels_last(data, test->type, 3, sizes, &axes[i])
                                     : normfuse_tensor_contiguous(data, test->type, 3, sizes, &axes[i]);
        big[i].device = (normfuse_device){NORMFUSE_CUDA, 0};
        if (test->sliced) {
            axes[i].strides[2] = sizes[1] + 8;
            axes[i].strides[0] = sizes[2] * axes[i].strides[2];
        }
    }
    const int64_t sets = test->op == 1 ? sizes[1] : sizes[0] * test->groups;
    for (int i = 0; i < SMALL; i++) {
        void *const data = (void *)(base + (uintptr_t)(i < 5 ? 3 + i : 7 + i) * gap);
        const bool is_saved = i == 1 || i == 2;
        const normfuse_type saved = test->type == NORMFUSE_F64 ? NORMFUSE_F64 : NORMFUSE_F32;
        small[i] = normfuse_tensor_contiguous(data, is_saved ? saved : test->type, 1, is_saved ? &sets : &sizes[1],
                                              &axes[BIG + i]);
        small[i].device = (normfuse_device){NORMFUSE_CUDA, 0};
    }
    normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &big[0], .weight = &small[0]};
    if (test->op != 2) {
        tensors.mean = &small[1];
        tensors.rstd = &small[2];
    }
    if (test->backward) {
        tensors.dy = &big[1];
        tensors.dx = &big[2];
        tensors.dweight = &small[3];
        tensors.dbias = NULL;
    } else {
        tensors.y = &big[1];
    }
    if (test->residual) {
        tensors.post_add = &big[3];
        if (test->backward)
            tensors.dpost_add = &big[4];
    }
    if (test->summed) {
        tensors.pre_add = &big[3];
        tensors.u = test->in_place ? &big[0] : &big[4];
    }
    if (test->activation == NORMFUSE_PRELU) {
        tensors.slope = &small[5];
        tensors.dslope = test->backward ? &small[6] : NULL;
    }
    normfuse_exec exec = {.struct_bytes = sizeof exec};
    if (test->has_sync) {
        exec.sync = (void *)(base + 9 * gap);
        exec.sync_bytes = NORMFUSE_CUDA_SYNC_BYTES;
    }
    scratch_address_bytes = 0;
    normfuse_status status = call_plan_case(test, &tensors, &exec, &scratch_address_bytes);
    if (!CHECK(status == NORMFUSE_OK, "%s: scratch bytes: %s", test->name, normfuse_last_error()))
        return;
    exec.scratch = scratch_address_bytes ? (void *)scratch_address : NULL;
    exec.scratch_bytes = scratch_address_bytes;
    fake_driver.launches = 0;
    status = call_plan_case(test, &tensors, &exec, NULL);
    /* Sets of about 2^31 vectors are more than the kernels count; everything smaller has a geometry. */
    const int64_t set_values = sizes[2] * (test->op == 0         ? sizes[1] / test->groups
                                           : test->op == 1       ? sizes[0]
                                           : sizes[0] > sizes[1] ? sizes[0]
                                                                 : sizes[1]);
    if (status == NORMFUSE_UNSUPPORTED && set_values > INT32_MAX - (1 << 24)) {
        too_large++;
        return;
    }
    /* A block of many channels needs more shared memory than such a device gives it. */
    if (status == NORMFUSE_UNSUPPORTED && device->shared_per_block < (160 << 10)) {
        too_little_shared++;
        return;
    }
    if (!CHECK(status == NORMFUSE_OK, "%s: %s", test->name, normfuse_last_error()))
        return;
    CHECK(fake_driver.launches > 0, "%s: nothing was launched", test->name);
    const int64_t rows = test->op == 0 ? 1 : sizes[0], channels = test->op == 0 ? sizes[1] / test->groups : 1;
    const struct tolerance_arithmetic arithmetic = tolerance_arithmetic(
        NORMFUSE_CUDA, test->type, test->channels_last, sizes[1] == 1 || sizes[2] == 1, rows, channels, sizes[2]);
    for (int i = 0; i < fake_driver.launches && i < FAKE_LAUNCHES; i++) {
        check_launch(test, &fake_driver.launch[i], device, &arithmetic);
        CHECK(fake_driver.launch[i].dependent == (i > 0 && device->capability >= 90),
              "%s: kernel %d of the call %s what ran before it", test->name, i,
              fake_driver.launch[i].dependent ? "does not wait for" : "waits for");
    }
    check_early_launches(test->name);
}

static void read_registers(void)
{
    const int found = fake_driver_read_registers(NORMFUSE_KERNEL_LIMITS);
    CHECK(found == NORMFUSE_CUDA_KERNELS, "%s names %d of %d kernels", NORMFUSE_KERNEL_LIMITS, found,
          NORMFUSE_CUDA_KERNELS);
}

/* One copy of device/transpose.cuh: tiles that are all of the tensor, vectors that are aligned in memory, shared memory that
 * holds a tile, and memory that is no other copy's: of the call's scratch, or for an input that of one of `outputs`. */
static void check_copy(const char *name, const struct fake_launch *launch, const struct normfuse_transpose_copy *copy,
                       int64_t bytes, int64_t elements, bool is_output, uintptr_t outputs[2], size_t *scratch_used)
{
#define HOLDS(condition)                                                                                               \
    if (!(condition))                                                                                                  \
    CHECK(false, "%s: %s: not %s", name, launch->name, #condition)
    const int64_t vector = 16 / bytes;
    HOLDS(copy->outer.size * copy->b.size * copy->a.size == elements);
    HOLDS(copy->tile_outer >= 1 && copy->tile_b >= 1 && copy->tile_a >= 1);
    HOLDS(copy->tile_outer <= copy->outer.size && copy->tile_b <= copy->b.size && copy->tile_a <= copy->a.size);
    HOLDS(copy->tile_outer == 1 || (copy->tile_b == copy->b.size && copy->tile_a == copy->a.size));
    HOLDS(copy->by_tiles_a.divisor == up(copy->a.size, copy->tile_a) &&
          copy->by_tiles_b.divisor == up(copy->b.size, copy->tile_b));
    HOLDS(copy->by_tile_a.divisor == (uint32_t)copy->tile_a && copy->by_tile_b.divisor == (uint32_t)copy->tile_b);
    HOLDS(divides(&copy->by_tiles_a) && divides(&copy->by_tiles_b) && divides(&copy->by_tile_a) &&
          divides(&copy->by_tile_b) && divides(&copy->by_read) && divides(&copy->by_write));
    /* Rows of the source, and of the destination: `ends` elements beside one another, others apart. */
    const bool straight = copy->straight;
    HOLDS(!straight || (!copy->from_plane && !copy->to_plane && copy->from_vectors == copy->to_vectors));
    const int64_t read = copy->from_plane ? (int64_t)copy->tile_a * copy->tile_b : copy->tile_a;
    const int64_t written = copy->to_plane ? (int64_t)copy->tile_a * copy->tile_b : copy->tile_b;
    HOLDS(copy->by_read.divisor == up(read, copy->from_vectors ? vector : 1));
    HOLDS(straight || copy->by_write.divisor == up(written, copy->to_vectors ? vector : 1));
    HOLDS(!copy->from_plane || (copy->from_vectors && copy->tile_a == copy->a.size && copy->b.from == copy->a.size));
    HOLDS(!copy->to_plane || (copy->to_vectors && copy->tile_b == copy->b.size && copy->a.to == copy->b.size));
    if (copy->from_vectors) {
        HOLDS((uintptr_t)copy->from % 16 == 0 && copy->a.from == 1 && copy->outer.from % vector == 0);
        HOLDS(copy->from_plane ? copy->a.size * copy->b.size % vector == 0 &&
                                     (copy->tile_b == copy->b.size || read % vector == 0)
                               : copy->a.size % vector == 0 && copy->b.from % vector == 0 &&
                                     (copy->tile_a == copy->a.size || copy->tile_a % vector == 0));
    }
    const int64_t nearest = straight ? copy->a.to : copy->b.to, apart = straight ? copy->b.to : copy->a.to;
    const int64_t size = straight ? copy->a.size : copy->b.size, tile = straight ? copy->tile_a : copy->tile_b;
    if (copy->to_vectors) {
        HOLDS((uintptr_t)copy->to % 16 == 0 && nearest == 1 && copy->outer.to % vector == 0);
        HOLDS(copy->to_plane ? copy->a.size * copy->b.size % vector == 0 &&
                                   (copy->tile_a == copy->a.size || written % vector == 0)
                             : size % vector == 0 && apart % vector == 0 && (tile == size || tile % vector == 0));
    }
    if (!straight) {
        HOLDS(copy->pitch >= copy->tile_a && (!copy->from_plane || copy->pitch == copy->tile_a));
        HOLDS(copy->from_plane || copy->pitch * bytes % 8 == 4 || copy->pitch * bytes % 16 == 8);
        HOLDS((size_t)(copy->tile_outer * copy->tile_b) * (size_t)(copy->pitch * bytes) <= launch->shared);
        HOLDS(launch->shared <= 48 << 10);
    }
    /* The far one of the two is the caller's. */
    const uintptr_t here = (uintptr_t)(is_output ? copy->from : copy->to);
    for (int k = 0; k < 2 && !is_output; k++)
        if (here == outputs[k]) {
            outputs[k] = 0;
            return;
        }
    const int64_t last = is_output ? (copy->outer.size - 1) * copy->outer.from + (copy->b.size - 1) * copy->b.from +
                                         (copy->a.size - 1) * copy->a.from
                                   : (copy->outer.size - 1) * copy->outer.to + (copy->b.size - 1) * copy->b.to +
                                         (copy->a.size - 1) * copy->a.to;
    HOLDS(here >= scratch_address + *scratch_used);
    *scratch_used = (size_t)(here - scratch_address) + (size_t)((last + 1) * bytes);
    HOLDS(*scratch_used <= scratch_address_bytes);
    /* A tensor of other strides is read and written no further than it has elements. */
    const int64_t blocks =
        up(copy->a.size, copy->tile_a) * up(copy->b.size, copy->tile_b) * up(copy->outer.size, copy->tile_outer);
    HOLDS(copy->first_block + blocks <= launch->grid);
#undef HOLDS
}

static bool is_copy(const struct fake_launch *launch)
{
    return strncmp(launch->name, "normfuse_transpose", strlen("normfuse_transpose")) == 0;
}

static void check_copies(const char *name, const struct fake_launch *launch, normfuse_type type, int64_t elements,
                         bool are_outputs, uintptr_t outputs[2], int *copies, size_t *scratch_used)
{
    struct normfuse_transpose_arguments a;
    const int64_t bytes = (int64_t)normfuse_type_bytes((int32_t)type);
    const struct normfuse_cuda_signature of = fake_driver_signature((int)launch->kernel);
    memcpy(&a, launch->arguments, sizeof a);
    CHECK(of.body == NORMFUSE_BODY_transpose && (int64_t)normfuse_type_bytes(of.type) == bytes &&
              launch->threads == NORMFUSE_TRANSPOSE_THREADS &&
              !launch->cooperative && launch->cluster <= 1 && launch->grid == a.blocks && a.count >= 1 &&
              a.count <= NORMFUSE_TRANSPOSE_COPIES && a.copies[0].first_block == 0,
          "%s: %s of %d copies, %lld blocks", name, launch->name, a.count, (long long)a.blocks);
    *copies += a.count;
    for (int i = 0; i < a.count; i++) {
        check_copy(name, launch, &a.copies[i], bytes, elements, are_outputs, outputs, scratch_used);
        const struct normfuse_transpose_copy *const copy = &a.copies[i];
        const int64_t end = copy->first_block + up(copy->a.size, copy->tile_a) * up(copy->b.size, copy->tile_b) *
                                                    up(copy->outer.size, copy->tile_outer);
        CHECK(end == (i + 1 < a.count ? a.copies[i + 1].first_block : (int64_t)launch->grid), "%s: %s: copy %d", name,
              launch->name, i);
    }
}

/* Tensors of a channel affine in either layout, with gaps or without. */
static void test_transposes(void)
{
    enum { BIG = 5 };
    fake_driver_reset();
    note_arguments();
    read_registers();
    fake_driver_use();
    const uintptr_t base = (uintptr_t)0x100000000000, gap = (uintptr_t)1 << 42;
    int copied = 0, flipped = 0, of_outputs = 0, held = 0;
    for (int i = 0; i < 6000 && device_of(0) != NULL; i++) {
        const normfuse_type type = (normfuse_type)random_below(4);
        const bool backward = random_below(2) != 0, residual = random_below(3) == 0;
        int64_t sizes[3] = {random_size(6), random_size(i % 2 ? 12 : 7), random_size(i % 3 ? 8 : 14)};
        if (i % 5 == 0)
            sizes[2] = (7 + random_below(30)) * (7 + random_below(30)); /* of few vectors */
        for (int axis = 0; axis < 3; axis++)
            sizes[axis] = sizes[axis] < 1 || random_below(8) == 0 ? 1 : sizes[axis];
        char name[160];
        int length = snprintf(name, sizeof name, "affine %lldx%lldx%lld type %d %s%s", (long long)sizes[0],
                              (long long)sizes[1], (long long)sizes[2], (int)type, backward ? "bwd" : "fwd",
                              residual ? " post_add" : "");
        normfuse_axes axes[BIG + 2];
        normfuse_tensor big[BIG], small[2];
        int others = 0;
        bool is_sliced = false;
        for (int k = 0; k < BIG; k++) {
            void *const data = (void *)(base + (uintptr_t)k * gap + (random_below(6) == 0 ? 16 : 0) +
                                        (random_below(12) == 0 ? normfuse_type_bytes((int32_t)type) : 0));
            const bool last = random_below(2) != 0;
            const int64_t more = random_below(4) == 0 ? 1 + random_below(9) : 0;
            big[k] = last ? normfuse_tensor_channels_last(data, type, 3, sizes, &axes[k])
                          : normfuse_tensor_contiguous(data, type, 3, sizes, &axes[k]);
            big[k].device = (normfuse_device){NORMFUSE_CUDA, 0};
            if (last)
                axes[k].strides[2] += more;
            axes[k].strides[0] = (sizes[1] + more) * sizes[2];
            is_sliced = is_sliced || (k == 0 && more > 0);
            length += snprintf(name + length, sizeof name - (size_t)length, " %c%d", last ? 'l' : 'f', (int)more);
        }
        const int over = random_below(4) != 0 ? 1 : backward ? 2 * (int)random_below(2) : 0;
        big[1] = big[over]; /* the output: in place, or its own memory */
        for (int k = 0; k < 2; k++) {
            small[k] = normfuse_tensor_contiguous((void *)(base + (uintptr_t)(BIG + k) * gap), NORMFUSE_F32, 1,
                                                  &sizes[1], &axes[BIG + k]);
            small[k].device = (normfuse_device){NORMFUSE_CUDA, 0};
        }
        normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &big[0], .weight = &small[0]};
        const normfuse_affine_options options = {.struct_bytes = sizeof options, .activation = NORMFUSE_RELU};
        normfuse_exec exec = {.struct_bytes = sizeof exec};
        *(backward ? &tensors.dx : &tensors.y) = &big[1];
        if (backward) {
            tensors.dy = &big[2];
            tensors.dweight = &small[1];
        }
        if (residual)
            tensors.post_add = &big[3];
        if (residual && backward)
            tensors.dpost_add = &big[4];
        const normfuse_tensor *const present[] = {tensors.y, tensors.dx, tensors.dy, tensors.post_add,
                                                  tensors.dpost_add};
        for (int k = 0; k < BIG; k++)
            for (int axis = 0; present[k] != NULL && axis < 3; axis++)
                if (sizes[axis] > 1 && present[k]->strides[axis] != axes[0].strides[axis]) {
                    others++;
                    break;
                }
        scratch_address_bytes = 0;
        size_t *const bytes = &scratch_address_bytes;
        normfuse_status status = backward ? normfuse_affine_backward_scratch_bytes(&options, &tensors, &exec, bytes)
                                          : normfuse_affine_forward_scratch_bytes(&options, &tensors, &exec, bytes);
        exec.scratch = scratch_address_bytes ? (void *)scratch_address : NULL;
        exec.scratch_bytes = scratch_address_bytes;
        fake_driver.launches = 0;
        if (status == NORMFUSE_OK)
            status = backward ? normfuse_affine_backward(&options, &tensors, &exec)
                              : normfuse_affine_forward(&options, &tensors, &exec);
        if (!CHECK(status == NORMFUSE_OK, "%s: %s", name, normfuse_last_error()))
            continue;
        int copies = 0;
        size_t scratch_used = 0;
        const normfuse_tensor *const output = backward ? tensors.dx : tensors.y;
        uintptr_t outputs[2] = {over == 1 ? (uintptr_t)output->data : 0,
                                tensors.dpost_add ? (uintptr_t)tensors.dpost_add->data : 0};
        const int64_t elements = sizes[0] * sizes[1] * sizes[2];
        const int last = fake_driver.launches - 1;
        const bool before = is_copy(&fake_driver.launch[0]), after = last > 0 && is_copy(&fake_driver.launch[last]);
        if (before)
            check_copies(name, &fake_driver.launch[0], type, elements, false, outputs, &copies, &scratch_used);
        const int copies_before = copies;
        if (after)
            check_copies(name, &fake_driver.launch[last], type, elements, true, outputs, &copies, &scratch_used);
        held += over == 1 && outputs[0] == 0;
        for (int k = 0; k <= last; k++)
            CHECK(fake_driver.launch[k].dependent == (k > 0), "%s: kernel %d of %d", name, k, last + 1);
        check_early_launches(name);
        CHECK(others == 0 ? copies == 0 : copies >= 1 && (copies <= others || is_sliced), "%s: %d copies of %d tensors",
              name, copies, others);
        copied += copies > 0;
        flipped += others > copies;
        of_outputs += copies > copies_before;
    }
    CHECK(copied > 2000 && flipped > 300 && of_outputs > 500 && held > 1000,
          "%d calls copied, %d fewer tensors, %d outputs, %d inputs to an output's memory", copied, flipped, of_outputs,
          held);
}

/* The i-th of random problems, some of them of kinds that the others seldom are. */
static struct plan_case draw_plan_case(int i)
{
    struct plan_case test = {.op = (int)random_below(5) % 3};
    test.type = (normfuse_type)random_below(4);
    test.channels_last = random_below(2) != 0;
    test.backward = random_below(2) != 0;
    test.has_sync = random_below(3) != 0;
    test.misaligned = random_below(6) == 0;
    test.sliced = test.channels_last && random_below(6) == 0;
    int maximum = i % 3 == 0 ? 12 : 31;
    for (int axis = 0; axis < 3; axis++) {
        const int limit[] = {12, i % 50 == 0 ? 17 : 12, 24};
        test.sizes[axis] = random_below(8) == 0 ? 1 : random_size(maximum < limit[axis] ? maximum : limit[axis]);
        for (int64_t rest = test.sizes[axis]; rest > 1; rest /= 2)
            maximum--;
        maximum = maximum < 1 ? 1 : maximum;
    }
    if (random_below(2))
        test.sizes[1] = up(test.sizes[1], 8) * 8;
    if (i % 12 == 9) { /* over columns, of samples or tensors that a whole GPU keeps, or nearly */
        test.op = i / 12 % 2;
        test.channels_last = test.has_sync = true;
        test.misaligned = test.sliced = false;
        test.type = (normfuse_type)(1 + random_below(3));
        test.sizes[0] = 1 + random_below(5);
        test.sizes[1] = 8 * (1 + random_below(160));
        test.sizes[2] = 1 + random_below(INT64_C(30000000) / (test.sizes[0] * test.sizes[1]));
    } else if (i % 12 == 7) { /* the same, backward, of what all registers hold */
        test.op = 0;
        test.backward = test.channels_last = test.has_sync = true;
        test.misaligned = test.sliced = false;
        test.type = (normfuse_type)(1 + random_below(3));
        test.sizes[0] = 1 + random_below(16);
        test.sizes[1] = 32 * (1 + random_below(40));
        test.sizes[2] = 1 + random_below(INT64_C(3000000) / (test.sizes[0] * test.sizes[1]));
    } else if (i % 12 == 8) { /* the same, of many samples of few rows */
        test.op = 0;
        test.channels_last = true;
        test.misaligned = test.sliced = false;
        test.type = (normfuse_type)(1 + random_below(3));
        test.sizes[0] = 1 + random_below(5000);
        test.sizes[1] = 8 * (1 + random_below(64));
        test.sizes[2] = 1 + random_below(i % 24 == 8 ? 64 : 1);
    } else if (i % 12 == 10) { /* of norm groups whose values are adjacent and few */
        test.op = 0;
        test.sliced = false;
        test.sizes[0] = 1 + random_below(i % 24 == 10 ? 300000 : 300);
        test.sizes[1] = 1 + random_below(700);
        test.sizes[2] = 1 + (random_below(2) ? 0 : random_below(40));
    }
    test.groups = 1;
    if (test.op == 0)
        do
            test.groups = random_below(4) == 0 ? 1 : 1 + random_below(test.sizes[1] < 64 ? test.sizes[1] : 64);
        while (test.sizes[1] % test.groups != 0);
    if (test.op == 1 && test.sizes[0] * test.sizes[2] == 1)
        test.sizes[2] = 2; /* training refuses one value a channel */
    test.activation = random_below(2) ? NORMFUSE_IDENTITY : (int32_t)random_below(NORMFUSE_PRELU + 1);
    test.residual = (i % 12 < 7 || i % 12 > 9) && random_below(6) == 0;
    test.summed = !test.backward && !test.residual && test.op < 2 && i % 5 == 0;
    test.in_place = i % 10 == 0;
    return test;
}

static void test_plans(void)
{
    for (int generation = 0; generation < 3; generation++) {
        fake_driver_reset();
        note_arguments();
        read_registers();
        if (generation == 1) {
            struct fake_device *const old = &fake_driver.device[0];
            *old = (struct fake_device){.name = "NVIDIA A100",
                                        .capability = 80,
                                        .multiprocessors = 108,
                                        .threads_per_multiprocessor = 2048,
                                        .registers_per_multiprocessor = 65536,
                                        .shared_per_multiprocessor = 167936,
                                        .shared_per_block = 166912,
                                        .shared_reserved = 1024,
                                        .l2_bytes = 40 << 20,
                                        .clusters = false};
            for (int k = 0; k < FAKE_KERNELS; k++)
                old->dynamic_shared[k] = 48 << 10;
        }
        if (generation == 2) { /* one block is resident where two would be */
            fake_driver.device[0].shared_per_block = 120000;
            fake_driver.device[0].shared_per_multiprocessor = 124000;
        }
        fake_driver_use();
        const struct normfuse_cuda_device *const device = device_of(0);
        if (device == NULL)
            return;
        for (int i = 0; i < 6500; i++) {
            struct plan_case test = draw_plan_case(i);
            run_plan_case(&test, device);
        }
    }
    CHECK(single_launches > 3000 && single_parts > 100 && single_walks > 100 && single_unaligned > 100 && single_sums > 100,
          "single was launched %d times, %d of several blocks a norm group, %d from sample to sample, %d with unaligned rows, "
          "%d with sums for a later kernel",
          single_launches, single_parts, single_walks, single_unaligned, single_sums);
    CHECK(run_launches > 500 && sums_of_runs > 300, "tensors were walked as a run %d times, %d for sums", run_launches,
          sums_of_runs);
    CHECK(slope_launches > 50, "the gradients of slopes were launched %d times", slope_launches);
    CHECK(finish_launches[NORMFUSE_WORK_SHARES] > 0 && finish_launches[NORMFUSE_WORK_STATISTICS] > 500 &&
              finish_launches[NORMFUSE_WORK_PARTS] > 10 && finish_launches[NORMFUSE_WORK_GRADIENTS] > 1000,
          "shares %d, statistics %d, parts %d, gradients %d", finish_launches[NORMFUSE_WORK_SHARES],
          finish_launches[NORMFUSE_WORK_STATISTICS], finish_launches[NORMFUSE_WORK_PARTS],
          finish_launches[NORMFUSE_WORK_GRADIENTS]);
    CHECK(general_vectors_launches > 500, "general kernels of vectors were launched %d times", general_vectors_launches);
    CHECK(additions_launches > 150, "kernels of every addition were launched %d times", additions_launches);
    CHECK(early_launches > 1000, "kernels began early %d times", early_launches);
    CHECK(folded_launches > 300, "rows were walked folded %d times", folded_launches);
    CHECK(cache_line_launches > 10, "rows were folded to cache lines %d times", cache_line_launches);
    CHECK(unaligned_samples_launches > 250, "samples began or ended inside of vectors %d times",
          unaligned_samples_launches);
    CHECK(general_launches > 1000, "general kernels were launched %d times", general_launches);
    CHECK(compact_launches > 300, "compact kernels were launched %d times", compact_launches);
    CHECK(grid_launches > 50, "kernels of the whole grid were launched %d times", grid_launches);
    CHECK(unaligned_launches > 100, "rows that are not aligned took vectors of 16 bytes %d times", unaligned_launches);
    if (too_little_shared > 0)
        harness_skip("%d problems of many channels were refused where a block has less than 160 KB of shared memory",
                     too_little_shared);
    if (too_large > 0)
        harness_skip("%d problems with sets of 2^31 vectors or more were refused", too_large);
}

/* The general kernels take every call: run_plan_case finds a launch of any other refused. */
static void test_plans_of_general_alone(void)
{
    fake_driver_reset();
    note_arguments();
    read_registers();
    fake_driver.device[0].name = "NVIDIA R100";
    fake_driver.device[0].capability = 130;
    normfuse_cuda_built_for = "90a 90-general-PTX";
    fake_driver_use();
    const struct normfuse_cuda_device *const device = device_of(0);
    normfuse_cuda_built_for = NORMFUSE_CUDA_BUILT_FOR;
    const int before = general_launches;
    for (int i = 0; i < 6000 && device != NULL; i++) {
        struct plan_case test = draw_plan_case(i);
        run_plan_case(&test, device);
    }
    CHECK(general_launches - before > 6000, "general kernels were launched %d times", general_launches - before);
}

enum { ENOUGH = 3 };
static int cases_of_schedule = 2000;

/* How many cases of one layout a schedule took; of a rare one more are drawn until it took enough. */
static int run_plan_cases(const struct normfuse_cuda_device *device, bool columns, const char *schedule)
{
    int taken = 0;
    const bool is_named = schedule[0] != '\0';
    for (int i = 0; i < cases_of_schedule || (is_named && taken <= ENOUGH && i < 5 * cases_of_schedule); i++) {
        struct plan_case test = draw_plan_case(i);
        test.channels_last = columns;
        test.sliced = test.sliced && columns;
        normfuse_cuda_choice()->taken = NULL;
        run_plan_case(&test, device);
        const char *const now = normfuse_cuda_choice()->taken;
        taken += now != NULL && strcmp(now, schedule) == 0;
    }
    return taken;
}

/* What must hold of plans holds of each schedule alone, and of the planner's choice. */
static void test_plans_of_each_schedule(void)
{
    fake_driver_reset();
    note_arguments();
    read_registers();
    fake_driver_use();
    const struct normfuse_cuda_device *const device = device_of(0);
    const char **const only = &normfuse_cuda_choice()->only;
    for (int columns = 0; columns < 2 && device != NULL; columns++) {
        const struct schedule *const *list = columns ? normfuse_cuda_columns_schedules : normfuse_cuda_rows_schedules;
        for (; *list != NULL; list++) {
            *only = (*list)->name;
            const int taken = run_plan_cases(device, columns, *only);
            CHECK(taken > ENOUGH, "%s of %s was taken %d times", *only, columns ? "columns" : "rows", taken);
        }
    }
    *only = NULL;
    for (int columns = 0; columns < 2 && device != NULL; columns++)
        (void)run_plan_cases(device, columns, "");
}

/* A schedule that is taken before all after it is not where two passes take less: a rare derivative over rows is a call
 * for each vector. */
static void test_order_of_schedules(void)
{
    fake_driver_reset();
    note_arguments();
    read_registers();
    fake_driver_use();
    const struct normfuse_cuda_device *const device = device_of(0);
    if (device == NULL)
        return;
    struct plan_case test = {
        .sizes = {35, 1472, 22 * 39 * 12}, .groups = 16, .type = NORMFUSE_BF16, .backward = true, .has_sync = true};
    run_plan_case(&test, device);
    CHECK(strstr(fake_driver.launch[0].name, "_rows_split_") != NULL, "%s: %s", test.name, fake_driver.launch[0].name);
    test.activation = NORMFUSE_MISH;
    run_plan_case(&test, device);
    CHECK(strstr(fake_driver.launch[0].name, "_rows_elementwise_") != NULL, "%s: %s", test.name,
          fake_driver.launch[0].name);
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

static const normfuse_tensor *add_tensor(struct empty_call *call, normfuse_type type, int32_t ndim, const int64_t *sizes)
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
    const normfuse_batch_norm_options batch = {.struct_bytes = sizeof batch, .flags = flags, .eps = 1e-5, .momentum = 0.1};
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
    snprintf(name, sizeof name, "operator %d, %s%s%s of %lldx%lldx%lld%s%s%s", op, part->backward ? "backward" : "forward",
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
                    if ((evaluates && part->sharded) || (updates && (part->backward || (part->sharded && !part->second))))
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

/* Strides of parameters are 32 bits of what kernels are given. */
static void test_long_strides(void)
{
    const int64_t sizes[] = {2, 3, 40};
    fake_driver_reset();
    fake_driver_use();
    for (int is_long = 0; is_long < 2; is_long++)
        for (int backward = 0; backward < 2; backward++) {
            normfuse_axes axes[3];
            normfuse_tensor big[2], weight;
            for (int i = 0; i < 2; i++) {
                big[i] = normfuse_tensor_contiguous((void *)((uintptr_t)(i + 1) << 44), NORMFUSE_F32, 3, sizes, &axes[i]);
                big[i].device = (normfuse_device){NORMFUSE_CUDA, 0};
            }
            weight = normfuse_tensor_contiguous((void *)((uintptr_t)3 << 44), NORMFUSE_F32, 1, &sizes[1], &axes[2]);
            weight.device = big[0].device;
            axes[2].strides[0] = (int64_t)INT32_MAX + is_long;
            const normfuse_tensors tensors = {.struct_bytes = sizeof tensors,
                                              .x = &big[0],
                                              .y = backward ? NULL : &big[1],
                                              .dy = backward ? &big[0] : NULL,
                                              .dx = backward ? &big[1] : NULL,
                                              .weight = &weight};
            const struct plan_case test = {.op = 2, .backward = backward != 0};
            const normfuse_status status = call_plan_case(&test, &tensors, NULL, NULL);
            if (is_long)
                REFUSED(NORMFUSE_UNSUPPORTED, status, "no geometry of any kernel fits these sizes");
            else
                CHECK(status == NORMFUSE_OK, "%s", normfuse_last_error());
        }
}

/* The first kernel of a forward over channels-last bf16 tensors; `apart`: elements between their samples. */
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
    const struct plan_case test = {.op = batch ? 1 : 0, .groups = 8};
    const normfuse_exec exec = {
        .struct_bytes = sizeof exec, .scratch = (void *)scratch_address, .scratch_bytes = 1 << 20};
    fake_driver.launches = 0;
    CHECK(call_plan_case(&test, &tensors, &exec, NULL) == NORMFUSE_OK && fake_driver.launches > 0, "%s",
          normfuse_last_error());
    return &fake_driver.launch[0];
}

/* What was planned for a device before is not of this one. */
static void use_fresh_driver(void)
{
    fake_driver_reset();
    note_arguments();
    fake_driver_use();
}

/* Samples that all count together are one where they are adjacent, and only there. */
static void test_samples_apart(void)
{
    use_fresh_driver();
    for (int64_t apart = 0; apart <= 64; apart += 64) {
        struct normfuse_cuda_arguments a;
        memcpy(&a, launch_forward(true, NORMFUSE_F32, apart)->arguments, sizeof a);
        CHECK(a.problem.n == (apart ? 4 : 1) && a.problem.s * a.problem.n == 40000,
              "%lld elements between samples: %lld samples of %lld positions", (long long)apart, (long long)a.problem.n,
              (long long)a.problem.s);
    }
}

/* A problem of the same sizes with parameters of another type has another plan. */
static void test_plan_of_parameters(void)
{
    static const normfuse_type types[] = {NORMFUSE_F64, NORMFUSE_F32, NORMFUSE_F64, NORMFUSE_BF16};
    use_fresh_driver();
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const struct fake_launch *const launch = launch_forward(false, types[i], 0);
        if (CHECK((int)launch->kernel >= NORMFUSE_CUDA_KERNELS, "a kernel of the build, %s", launch->name)) {
            const int32_t weight = fake_driver_signature((int)launch->kernel).weight;
            CHECK(weight == 1 + (int32_t)types[i], "weights of type %d have a kernel of those of %d", (int)types[i],
                  (int)weight - 1);
        }
    }
}

/* test_cuda_host [--fast]: a fifth of the problems for each schedule, as sanitizers are slow. */
int main(int count, char **arguments)
{
    if (count > 1 && strcmp(arguments[1], "--fast") == 0)
        cases_of_schedule /= 5;
    setenv("NORMFUSE_NVRTC", NORMFUSE_FAKE_NVRTC, 1);
    setenv("NORMFUSE_CACHE_DIR", "", 1);
    test_no_driver();
    test_opened();
    test_versions();
    test_start();
    test_entries();
    test_facts();
    test_kernels_missing();
    test_general_alone();
    test_kernels_prepared();
    test_reset();
    test_fork();
    test_plan_in_words();
    test_sticky_error();
    test_fork_after_start();
    test_threads();
    test_threads_retain();
    test_launch_attributes();
    test_launch_refused();
    test_contexts();
    test_occupancy();
    test_interface();
    test_scratch();
    test_scratch_of_empty_shards();
    test_answers();
#if defined(__SANITIZE_THREAD__)
    const bool draws_plans = false;
#else
    const bool draws_plans = true;
#endif
    if (draws_plans) {
        test_plans();
        test_plans_of_each_schedule();
        test_plans_of_general_alone();
        test_order_of_schedules();
        test_transposes();
        test_long_strides();
    } else {
        harness_skip("drawn plans: one thread makes them, and ThreadSanitizer looks for races");
    }
    test_empty();
    test_empty_merges();
    test_plans_remembered();
    test_samples_apart();
    test_plan_of_parameters();
    normfuse_cuda_use_driver(NULL);
    return harness_close();
}
