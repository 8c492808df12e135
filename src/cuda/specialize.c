/* SPDX-License-Identifier: MIT
 *
 * specialize.c - see specialize.h. A table of all signatures that were asked for, by device. Entries are added under
 * the mutex and never removed, so that they are found without it. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "specialize.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../cpu/threads.h"
#include "compile.h"

enum { TABLE_BITS = 10, COMPILER_STACK_BYTES = 16 << 20 };

struct entry {
    struct entry *next; /* of the same hash */
    uint64_t device;    /* its serial number */
    struct normfuse_cuda_signature signature;
    _Atomic(CUkernel) kernel; /* NULL: not loaded */
    /* Under the mutex: */
    bool is_busy; /* a thread compiles or loads it */
    bool is_noted;
    normfuse_status status; /* of a failure for good; OK: none */
    char *problem;
};

static _Atomic(struct entry *) table[1 << TABLE_BITS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

/* ---- the table -------------------------------------------------------------------------------------------------- */

static _Atomic(struct entry *) *place_of(uint64_t device, const struct normfuse_cuda_signature *signature)
{
    uint64_t hash = device, words[(sizeof *signature + 7) / 8] = {0};
    memcpy(words, signature, sizeof *signature);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        hash = (hash ^ words[i]) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
    }
    return &table[hash >> (64 - TABLE_BITS)];
}

static struct entry *find(uint64_t device, const struct normfuse_cuda_signature *signature)
{
    struct entry *entry = atomic_load_explicit(place_of(device, signature), memory_order_acquire);
    while (entry != NULL &&
           (entry->device != device || memcmp(&entry->signature, signature, sizeof *signature) != 0))
        entry = entry->next;
    return entry;
}

/* Under the mutex. NULL: no memory. */
static struct entry *find_or_add(uint64_t device, const struct normfuse_cuda_signature *signature)
{
    struct entry *entry = find(device, signature);
    if (entry != NULL)
        return entry;
    entry = calloc(1, sizeof *entry);
    if (entry == NULL)
        return NULL;
    _Atomic(struct entry *) *const place = place_of(device, signature);
    entry->device = device;
    entry->signature = *signature;
    entry->next = atomic_load_explicit(place, memory_order_relaxed);
    atomic_store_explicit(place, entry, memory_order_release);
    return entry;
}

CUkernel normfuse_cuda_find_specialized(const struct normfuse_cuda_device *device,
                                        const struct normfuse_cuda_signature *signature)
{
    const struct entry *const entry = find(device->serial, signature);
    return entry != NULL ? atomic_load_explicit(&entry->kernel, memory_order_acquire) : NULL;
}

/* ---- compiling -------------------------------------------------------------------------------------------------- */

/* Compilations that threads share out among them. */
struct work {
    struct normfuse_cuda_compilation *compilations;
    int32_t count;
    _Atomic(int32_t) next;
    int32_t done; /* under the mutex */
};

static void *compile_some(void *context)
{
    struct work *const work = context;
    for (int32_t i = atomic_fetch_add(&work->next, 1); i < work->count; i = atomic_fetch_add(&work->next, 1)) {
        if (work->compilations[i].is_anew || !normfuse_cuda_find_compiled(&work->compilations[i]))
            normfuse_cuda_compile(&work->compilations[i]);
        pthread_mutex_lock(&mutex);
        work->done++;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&mutex);
    }
    return NULL;
}

/* In threads of their own, for the stack that a compiler needs, and without signals: an interrupted compiler is not
 * this library's to mend, and a file that grows too large ends a process by one. False: no thread could be made. */
static bool compile_all(struct normfuse_cuda_compilation *compilations, int32_t count, int32_t threads,
                        void (*progress)(void *, int32_t, int32_t), void *context)
{
    struct work work = {.compilations = compilations, .count = count};
    pthread_t started[NORMFUSE_MAX_THREADS];
    pthread_attr_t attributes;
    sigset_t all, before;
    int32_t running = 0, told = 0;
    if (pthread_attr_init(&attributes) != 0)
        return false;
    sigfillset(&all);
    (void)pthread_attr_setstacksize(&attributes, COMPILER_STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (running < threads && running < count &&
           pthread_create(&started[running], &attributes, compile_some, &work) == 0)
        running++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    while (progress != NULL && running > 0 && told < count) {
        pthread_mutex_lock(&mutex);
        while (work.done == told)
            pthread_cond_wait(&changed, &mutex);
        told = work.done;
        pthread_mutex_unlock(&mutex);
        progress(context, told, count);
    }
    for (int32_t i = 0; i < running; i++)
        pthread_join(started[i], NULL);
    return running > 0;
}

static normfuse_status refuse_without_threads(const char *call)
{
    return normfuse_refuse(NORMFUSE_OUT_OF_MEMORY, "%s: no thread to compile a kernel in", call);
}

static struct normfuse_cuda_compilation compilation_of(const struct normfuse_cuda_device *device,
                                                       const struct normfuse_cuda_signature *signature)
{
    return (struct normfuse_cuda_compilation){
        .signature = *signature, .capability = device->capability, .driver = device->driver};
}

/* True if the driver says that it is no machine code for this GPU. */
static bool is_bad_code(CUresult result)
{
    return result == CUDA_ERROR_INVALID_IMAGE || result == CUDA_ERROR_NO_BINARY_FOR_GPU ||
           result == CUDA_ERROR_NOT_FOUND || result == CUDA_ERROR_INVALID_SOURCE;
}

static CUresult load_code(const struct normfuse_cuda_device *device, struct normfuse_cuda_compilation *compilation,
                          CUkernel *kernel)
{
    char name[NORMFUSE_KERNEL_NAME_BYTES];
    const CUresult result =
        normfuse_cuda_load_code(device, compilation->code.bytes,
                                normfuse_cuda_signature_name(&compilation->signature, name), kernel);
    free(compilation->code.bytes);
    return result;
}

/* Loads what was compiled, and frees it. Code from the cache that the driver refuses is compiled anew. */
static normfuse_status load(const char *call, const struct normfuse_cuda_device *device,
                            struct normfuse_cuda_compilation *compilation, CUkernel *kernel)
{
    char name[NORMFUSE_KERNEL_NAME_BYTES];
    CUresult result = CUDA_SUCCESS;
    if (compilation->status == NORMFUSE_OK)
        result = load_code(device, compilation, kernel);
    if (is_bad_code(result) && compilation->is_cached) {
        const struct normfuse_cuda_signature signature = compilation->signature;
        *compilation = compilation_of(device, &signature);
        compilation->is_anew = true;
        if (!compile_all(compilation, 1, 1, NULL, NULL))
            return refuse_without_threads(call);
        if (compilation->status == NORMFUSE_OK)
            result = load_code(device, compilation, kernel);
    }
    if (compilation->status != NORMFUSE_OK)
        return normfuse_refuse(compilation->status, "%s: %s", call, compilation->problem);
    if (result == CUDA_SUCCESS)
        return NORMFUSE_OK;
    normfuse_cuda_signature_name(&compilation->signature, name);
    if (is_bad_code(result))
        return normfuse_refuse(NORMFUSE_NO_KERNEL, "%s: device %d, %s, does not take %s as NVRTC %d.%d compiled it",
                               call, (int)device->ordinal, device->name, name, (int)compilation->code.compiler / 1000,
                               (int)compilation->code.compiler % 1000 / 10);
    return normfuse_cuda_refuse_kernels(call, device, name, result);
}

/* Under the mutex: the thread that made the entry busy leaves it. */
static void leave(struct entry *entry, const struct normfuse_cuda_compilation *compilation, CUkernel kernel)
{
    entry->is_busy = false;
    if (compilation->status != NORMFUSE_OK && compilation->is_final && entry->problem == NULL) {
        entry->problem = strdup(compilation->problem);
        entry->status = entry->problem != NULL ? compilation->status : NORMFUSE_OK;
    }
    atomic_store_explicit(&entry->kernel, kernel, memory_order_release);
    pthread_cond_broadcast(&changed);
}

/* Compiles side by side, and loads, entries that the caller made busy. Under the mutex, which it gives up meanwhile.
 * The status is that of the first one that failed. */
static normfuse_status make(const char *call, const struct normfuse_cuda_device *device, struct entry *const *entries,
                            int32_t count, void (*progress)(void *context, int32_t done, int32_t all), void *context)
{
    normfuse_status status = NORMFUSE_OK;
    pthread_mutex_unlock(&mutex);
    struct normfuse_cuda_compilation *const compilations = calloc((size_t)count + 1, sizeof *compilations);
    if (compilations == NULL)
        status = normfuse_refuse(NORMFUSE_OUT_OF_MEMORY, "%s: no memory to compile %d kernels", call, (int)count);
    for (int32_t i = 0; compilations != NULL && i < count; i++)
        compilations[i] = compilation_of(device, &entries[i]->signature);
    /* One that is on disk needs no thread. */
    const bool is_found = compilations != NULL && count == 1 && normfuse_cuda_find_compiled(&compilations[0]);
    if (status == NORMFUSE_OK && count > 0 && !is_found) {
        compilations[0].is_anew = count == 1;
        if (!compile_all(compilations, count, normfuse_threads_default(), progress, context))
            status = refuse_without_threads(call);
    }
    const bool is_compiled = status == NORMFUSE_OK;
    const struct normfuse_cuda_compilation none = {.status = status};
    for (int32_t i = 0; i < count; i++) {
        CUkernel kernel = NULL;
        normfuse_status loaded = status;
        if (is_compiled && (status == NORMFUSE_OK || compilations[i].status == NORMFUSE_OK))
            loaded = load(call, device, &compilations[i], &kernel);
        status = status == NORMFUSE_OK ? loaded : status;
        pthread_mutex_lock(&mutex);
        leave(entries[i], is_compiled ? &compilations[i] : &none, loaded == NORMFUSE_OK ? kernel : NULL);
        pthread_mutex_unlock(&mutex);
    }
    free(compilations);
    pthread_mutex_lock(&mutex);
    return status;
}

/* True if a thread is to make it. */
static bool lacks_kernel(const struct entry *entry)
{
    return !entry->is_busy && entry->status == NORMFUSE_OK &&
           atomic_load_explicit(&entry->kernel, memory_order_relaxed) == NULL;
}

/* A thread that were cancelled in here would leave the mutex locked, or an entry busy. */
static int lock(void)
{
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    pthread_mutex_lock(&mutex);
    return state;
}

static void unlock(int state)
{
    pthread_mutex_unlock(&mutex);
    pthread_setcancelstate(state, NULL);
}

normfuse_status normfuse_cuda_specialized(const char *call, const struct normfuse_cuda_device *device,
                                          const struct normfuse_cuda_signature *signature,
                                          const struct normfuse_cuda_beside *beside, CUkernel *kernel)
{
    *kernel = normfuse_cuda_find_specialized(device, signature);
    if (*kernel != NULL)
        return NORMFUSE_OK;
    const int state = lock();
    normfuse_status status = NORMFUSE_OK;
    struct entry *const entry = find_or_add(device->serial, signature);
    while (entry != NULL && entry->is_busy)
        pthread_cond_wait(&changed, &mutex);
    if (entry == NULL) {
        status = normfuse_refuse(NORMFUSE_OUT_OF_MEMORY, "%s: no memory for another kernel", call);
    } else if (entry->status != NORMFUSE_OK) {
        status = normfuse_refuse(entry->status, "%s: %s", call, entry->problem);
    } else if (lacks_kernel(entry)) {
        struct entry *entries[1 + NORMFUSE_MAX_BESIDE] = {entry};
        int32_t count = 1;
        entry->is_busy = true;
        for (int32_t i = 0; beside != NULL && i < beside->count; i++) {
            struct entry *const other = find_or_add(device->serial, beside->signatures[i]);
            if (other != NULL && lacks_kernel(other)) {
                other->is_busy = true;
                entries[count++] = other;
            }
        }
        status = make(call, device, entries, count, NULL, NULL);
        if (atomic_load_explicit(&entry->kernel, memory_order_relaxed) != NULL)
            status = NORMFUSE_OK; /* another one's failure is that of its own launch */
    }
    if (status == NORMFUSE_OK)
        *kernel = atomic_load_explicit(&entry->kernel, memory_order_relaxed);
    unlock(state);
    return status;
}

/* ---- ahead of the calls ----------------------------------------------------------------------------------------- */

normfuse_status normfuse_cuda_note(const char *call, const struct normfuse_cuda_device *device,
                                   const struct normfuse_cuda_signature *signature)
{
    const int state = lock();
    struct entry *const entry = find_or_add(device->serial, signature);
    if (entry != NULL)
        entry->is_noted = true;
    unlock(state);
    return entry != NULL ? NORMFUSE_OK
                         : normfuse_refuse(NORMFUSE_OUT_OF_MEMORY, "%s: no memory to note a kernel", call);
}

/* Under the mutex. Those of the device that are noted and that no thread has begun or finished; `entries` NULL: counts
 * them. */
static int32_t take_noted(uint64_t device, struct entry **entries)
{
    int32_t count = 0;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        for (struct entry *entry = atomic_load_explicit(&table[i], memory_order_relaxed); entry != NULL;
             entry = entry->next)
            if (entry->device == device && entry->is_noted && lacks_kernel(entry)) {
                if (entries != NULL) {
                    entries[count] = entry;
                    entry->is_busy = true;
                }
                count++;
            }
    return count;
}

/* Every noted entry is loaded, by this thread if by no other. Under the mutex. */
static normfuse_status wait_for_noted(const char *call, const struct normfuse_cuda_device *device)
{
    normfuse_status status = NORMFUSE_OK;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        for (struct entry *entry = atomic_load_explicit(&table[i], memory_order_relaxed);
             entry != NULL && status == NORMFUSE_OK; entry = entry->next) {
            if (entry->device != device->serial || !entry->is_noted)
                continue;
            while (entry->is_busy)
                pthread_cond_wait(&changed, &mutex);
            if (entry->status != NORMFUSE_OK) {
                status = normfuse_refuse(entry->status, "%s: %s", call, entry->problem);
            } else if (lacks_kernel(entry)) {
                entry->is_busy = true;
                status = make(call, device, &entry, 1, NULL, NULL);
            }
        }
    return status;
}

normfuse_status normfuse_cuda_prepare_noted(const char *call, const struct normfuse_cuda_device *device,
                                            void (*progress)(void *context, int32_t done, int32_t all), void *context)
{
    normfuse_status status = NORMFUSE_OK;
    const int state = lock();
    const int32_t room = take_noted(device->serial, NULL);
    struct entry **const entries = calloc((size_t)room + 1, sizeof *entries);
    if (entries != NULL) {
        (void)take_noted(device->serial, entries);
        status = make(call, device, entries, room, progress, context);
    } else {
        status = normfuse_refuse(NORMFUSE_OUT_OF_MEMORY, "%s: no memory to prepare %d kernels", call, (int)room);
    }
    if (status == NORMFUSE_OK)
        status = wait_for_noted(call, device);
    unlock(state);
    free(entries);
    return status;
}

CUresult normfuse_cuda_load_specialized(const struct normfuse_cuda_device *device,
                                        CUresult (*with)(const struct normfuse_cuda_device *, CUkernel))
{
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        for (struct entry *entry = atomic_load_explicit(&table[i], memory_order_acquire);
             entry != NULL && result == CUDA_SUCCESS; entry = entry->next) {
            const CUkernel kernel = atomic_load_explicit(&entry->kernel, memory_order_acquire);
            if (entry->device == device->serial && kernel != NULL)
                result = with(device, kernel);
        }
    return result;
}

void normfuse_cuda_specialized_after_fork(void)
{
    pthread_mutex_init(&mutex, NULL);
    pthread_cond_init(&changed, NULL);
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        for (struct entry *entry = atomic_load_explicit(&table[i], memory_order_relaxed); entry != NULL;
             entry = entry->next)
            entry->is_busy = false;
    normfuse_cuda_compiler_after_fork();
}

void normfuse_cuda_forget_specialized(void)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        for (struct entry *entry = atomic_exchange(&table[i], NULL), *next; entry != NULL; entry = next) {
            next = entry->next;
            free(entry->problem);
            free(entry);
        }
}
