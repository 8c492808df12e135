/* SPDX-License-Identifier: MIT
 *
 * stream_sync.c - memory of the driver's for the streams and CUDA graphs of Python's array libraries: sync memory (see
 * normfuse_sync_bytes) and scratch beside it, which block belongs to a call that is about to be enqueued; and scratch
 * for one call that needs more.
 *
 * Blocks come from the driver, not from an array library's allocator: a block that is first needed while torch fills a
 * graph's private pool would otherwise lie in that pool, and be taken for memory that leaked out of the graph. */
#include "package.h"

#if !defined(NORMFUSE_HAVE_CUDA)

void *normfuse_stream_sync(int32_t device, void *stream, size_t *bytes)
{
    (void)device;
    (void)stream;
    *bytes = 0;
    return NULL;
}

void *normfuse_stream_acquire(int32_t device, normfuse_exec *exec)
{
    (void)device;
    (void)exec;
    return NULL;
}

void normfuse_stream_release(void *acquired)
{
    (void)acquired;
}

void normfuse_stream_scratch(int32_t device, void *stream, size_t bytes, void **scratch)
{
    (void)device;
    (void)stream;
    (void)bytes;
    *scratch = NULL;
}

void normfuse_stream_scratch_free(int32_t device, void *stream, void *scratch)
{
    (void)device;
    (void)stream;
    (void)scratch;
}

#else

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"

#define ENTRY_POINTS(ENTRY)                                                                                            \
    ENTRY(cuStreamGetCaptureInfo_v2) ENTRY(cuStreamGetId) ENTRY(cuThreadExchangeStreamCaptureMode)                     \
    ENTRY(cuCtxGetCurrent) ENTRY(cuCtxGetId) ENTRY(cuCtxGetDevice) ENTRY(cuDevicePrimaryCtxRetain)                     \
    ENTRY(cuCtxPushCurrent) ENTRY(cuCtxPopCurrent)                                                                     \
    ENTRY(cuMemAlloc) ENTRY(cuMemFree) ENTRY(cuMemAllocAsync) ENTRY(cuMemFreeAsync) ENTRY(cuMemsetD8Async)             \
    ENTRY(cuStreamCreate) ENTRY(cuStreamSynchronize) ENTRY(cuStreamDestroy)                                            \
    ENTRY(cuUserObjectCreate) ENTRY(cuUserObjectRelease) ENTRY(cuGraphRetainUserObject)

static struct {
#define MEMBER(name) __typeof__(&name) name;
    ENTRY_POINTS(MEMBER)
#undef MEMBER
} driver;

static pthread_once_t driver_once = PTHREAD_ONCE_INIT;
static bool driver_is_usable;

static bool look_up(void *library, const char *name, void *function)
{
    void *const symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

static void find_driver(void)
{
    void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    driver_is_usable = library != NULL;
#define TEXT(name) #name
#define LOOK_UP(name) driver_is_usable = driver_is_usable && look_up(library, TEXT(name), &driver.name);
    ENTRY_POINTS(LOOK_UP)
#undef LOOK_UP
#undef TEXT
}

/* Scratch bytes of a block, after its sync memory: asking how much a call needs plans it three times over, which with
 * an allocation by the array library took 3 of 13 us on the host. Calls that need more keep the GPU busy for longer
 * than that. */
enum { SCRATCH_BYTES = 192 << 10 };

/* How many blocks of destroyed streams a context keeps before they are freed. */
enum { MAX_DEAD = 32 };

/* A block and whom it belongs to. A graph's block is reused once the graph is gone, since no work of it is left then. A
 * stream's block is never reused: the stream may be destroyed while its work runs, and a new stream may get its address
 * (an H100's driver hands the address out again at once). Streams and contexts are therefore known by their ids, which
 * the driver never uses twice, and which also tell a device reset. All but in_use changes under the lock only. */
struct block {
    struct block *next;
    CUdeviceptr memory;
    pthread_mutex_t call; /* held while one is enqueued: its kernels find in scratch what others of it left there */
    unsigned long long context; /* the id of the one that the memory is of */
    void *stream;
    unsigned long long stream_id; /* 0 in a capture: asking for the id would invalidate the capture */
    cuuint64_t capture; /* 0: of the stream outside of captures */
    bool is_dead; /* another stream has this one's address */
    _Atomic(bool) in_use;
};

static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;

/* The driver calls this when the graph that the block was captured into, and all that was instantiated from it, are
 * gone. It must not call the driver, nor wait for a lock whose holder does: the driver may hold one of its own. */
static void hand_back(void *context)
{
    struct block *const block = context;
    atomic_store_explicit(&block->in_use, false, memory_order_release);
}

/* Allocation and clearing while another stream, or this thread's, may be captured: neither is part of a graph. */
static CUdeviceptr zeroed_memory(size_t bytes)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (driver.cuThreadExchangeStreamCaptureMode(&mode) != CUDA_SUCCESS)
        return 0;
    CUdeviceptr memory = 0;
    CUstream stream = NULL;
    bool succeeded = driver.cuMemAlloc(&memory, bytes) == CUDA_SUCCESS;
    if (succeeded) {
        /* A stream of its own: the default stream would wait for, and be refused by, streams under capture. */
        succeeded = driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
                    driver.cuMemsetD8Async(memory, 0, bytes, stream) == CUDA_SUCCESS &&
                    driver.cuStreamSynchronize(stream) == CUDA_SUCCESS;
        if (stream != NULL)
            (void)driver.cuStreamDestroy(stream);
        if (!succeeded)
            (void)driver.cuMemFree(memory);
    }
    (void)driver.cuThreadExchangeStreamCaptureMode(&mode);
    return succeeded ? memory : 0;
}

static struct block *find_block(void *stream, unsigned long long stream_id, cuuint64_t capture)
{
    for (struct block *block = blocks; block != NULL; block = block->next)
        if (block->stream == stream && block->stream_id == stream_id && block->capture == capture &&
            atomic_load_explicit(&block->in_use, memory_order_relaxed))
            return block;
    return NULL;
}

static struct block *free_block(unsigned long long context)
{
    for (struct block *block = blocks; block != NULL; block = block->next)
        if (block->context == context && !atomic_load_explicit(&block->in_use, memory_order_acquire))
            return block;
    return NULL;
}

static struct block *new_block(unsigned long long context, size_t bytes)
{
    struct block *const block = calloc(1, sizeof *block);
    if (block == NULL)
        return NULL;
    block->memory = zeroed_memory(bytes + SCRATCH_BYTES);
    if (block->memory == 0) {
        free(block);
        return NULL;
    }
    (void)pthread_mutex_init(&block->call, NULL);
    block->context = context;
    block->next = blocks;
    blocks = block;
    return block;
}

/* `stream` is new, so a stream that had its address is destroyed. Takes the context's blocks of destroyed streams off
 * the list, to be freed without the lock, once there are many. */
static struct block *take_dead_blocks(unsigned long long context, void *stream)
{
    int dead = 0;
    for (struct block *block = blocks; block != NULL; block = block->next)
        if (block->context == context && block->stream_id != 0) {
            block->is_dead = block->is_dead || block->stream == stream;
            dead += block->is_dead;
        }
    if (dead < MAX_DEAD)
        return NULL;
    struct block *taken = NULL;
    for (struct block **link = &blocks; *link != NULL;) {
        struct block *const block = *link;
        if (block->context == context && block->is_dead) {
            *link = block->next;
            block->next = taken;
            taken = block;
        } else {
            link = &block->next;
        }
    }
    return taken;
}

/* cuMemFree waits for what runs on the device, destroyed streams' work included. */
static void free_blocks(struct block *taken)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (taken == NULL)
        return;
    const bool is_relaxed = driver.cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS;
    while (taken != NULL) {
        struct block *const block = taken;
        taken = block->next;
        (void)driver.cuMemFree(block->memory);
        (void)pthread_mutex_destroy(&block->call);
        free(block);
    }
    if (is_relaxed)
        (void)driver.cuThreadExchangeStreamCaptureMode(&mode);
}

/* The graph that is being captured keeps the block until it is gone. */
static bool give_to_graph(struct block *block, CUgraph graph)
{
    CUuserObject object;
    if (driver.cuUserObjectCreate(&object, block, hand_back, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) != CUDA_SUCCESS) {
        hand_back(block);
        return false;
    }
    if (driver.cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE) == CUDA_SUCCESS)
        return true;
    (void)driver.cuUserObjectRelease(object, 1); /* hands the block back */
    return false;
}

/* `context` is current, and the stream is its. */
static struct block *block_of(CUcontext context, void *stream, size_t bytes)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuuint64_t capture = 0;
    CUgraph graph = NULL;
    unsigned long long stream_id = 0, context_id;
    if (driver.cuStreamGetCaptureInfo_v2(stream, &status, &capture, &graph, NULL, NULL) != CUDA_SUCCESS ||
        status == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
        return NULL;
    const bool is_capturing = status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (!is_capturing) {
        capture = 0;
        if (driver.cuStreamGetId(stream, &stream_id) != CUDA_SUCCESS)
            return NULL;
    }

    pthread_mutex_lock(&blocks_lock);
    struct block *block = find_block(stream, stream_id, capture), *dead = NULL;
    const bool is_found = block != NULL;
    if (!is_found && driver.cuCtxGetId(context, &context_id) == CUDA_SUCCESS) {
        if (!is_capturing)
            dead = take_dead_blocks(context_id, stream);
        block = free_block(context_id);
        if (block == NULL)
            block = new_block(context_id, bytes);
        if (block != NULL) {
            block->stream = stream;
            block->stream_id = stream_id;
            block->capture = capture;
            atomic_store_explicit(&block->in_use, true, memory_order_relaxed);
        }
    }
    pthread_mutex_unlock(&blocks_lock);
    free_blocks(dead);
    /* No other thread enqueues to this capture meanwhile. */
    if (block != NULL && !is_found && is_capturing && !give_to_graph(block, graph))
        return NULL;
    return block;
}

/* Array libraries work in the primary contexts of devices. Each is retained once, so that it and the blocks in it live
 * until the process ends or the device is reset; its handle is the same after a reset. */
static CUcontext primary_context(int32_t device)
{
    enum { MAX_DEVICES = 64 };
    static _Atomic(CUcontext) contexts[MAX_DEVICES];
    if (device < 0 || device >= MAX_DEVICES)
        return NULL;
    CUcontext context = atomic_load_explicit(&contexts[device], memory_order_acquire);
    if (context == NULL && driver.cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS)
        atomic_store_explicit(&contexts[device], context, memory_order_release);
    return context;
}

/* The context that a call of the library would use: the current one where it is the device's. */
static bool enter(int32_t device, CUcontext *context, bool *is_pushed)
{
    CUdevice current = -1;
    *is_pushed = driver.cuCtxGetDevice(&current) != CUDA_SUCCESS || current != device;
    if (!*is_pushed)
        return driver.cuCtxGetCurrent(context) == CUDA_SUCCESS;
    *context = primary_context(device);
    return *context != NULL && driver.cuCtxPushCurrent(*context) == CUDA_SUCCESS;
}

static void leave(bool is_pushed)
{
    CUcontext context;
    if (is_pushed)
        (void)driver.cuCtxPopCurrent(&context);
}

void normfuse_stream_scratch(int32_t device, void *stream, size_t bytes, void **scratch)
{
    pthread_once(&driver_once, find_driver);
    CUcontext context;
    bool is_pushed;
    *scratch = NULL;
    if (!driver_is_usable || !enter(device, &context, &is_pushed))
        return;
    CUdeviceptr memory = 0;
    if (driver.cuMemAllocAsync(&memory, bytes, stream) == CUDA_SUCCESS)
        *scratch = (void *)(uintptr_t)memory;
    leave(is_pushed);
}

void normfuse_stream_scratch_free(int32_t device, void *stream, void *scratch)
{
    CUcontext context;
    bool is_pushed;
    if (!enter(device, &context, &is_pushed))
        return;
    (void)driver.cuMemFreeAsync((CUdeviceptr)(uintptr_t)scratch, stream);
    leave(is_pushed);
}

/* NULL where there is none; `bytes` is the size of its sync memory. */
static struct block *block_for(int32_t device, void *stream, size_t *bytes)
{
    /* One value, but another stream in each thread. */
    if (stream == (void *)CU_STREAM_PER_THREAD)
        return NULL;
    if (stream == (void *)CU_STREAM_LEGACY)
        stream = NULL;
    pthread_once(&driver_once, find_driver);
    if (!driver_is_usable || normfuse_sync_bytes(device, bytes) != NORMFUSE_OK)
        return NULL;
    CUcontext context;
    bool is_pushed;
    if (!enter(device, &context, &is_pushed))
        return NULL;
    struct block *const block = block_of(context, stream, *bytes);
    leave(is_pushed);
    return block;
}

void *normfuse_stream_sync(int32_t device, void *stream, size_t *bytes)
{
    size_t size;
    const struct block *const block = block_for(device, stream, &size);
    *bytes = block != NULL ? size : 0;
    return block != NULL ? (void *)(uintptr_t)block->memory : NULL;
}

void *normfuse_stream_acquire(int32_t device, normfuse_exec *exec)
{
    size_t size;
    struct block *const block = block_for(device, exec->stream, &size);
    if (block == NULL)
        return NULL;
    pthread_mutex_lock(&block->call);
    exec->sync = (void *)(uintptr_t)block->memory;
    exec->sync_bytes = size;
    exec->scratch = (void *)(uintptr_t)(block->memory + size);
    exec->scratch_bytes = SCRATCH_BYTES;
    return block;
}

void normfuse_stream_release(void *acquired)
{
    struct block *const block = acquired;
    if (block != NULL)
        pthread_mutex_unlock(&block->call);
}

#endif
