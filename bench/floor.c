/* SPDX-License-Identifier: MIT
 *
 * floor.c - threads that copy. */
#define _GNU_SOURCE
#include "floor.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { LINE = 64 };

/* A thread moves at least this much: below it, waiting for another one costs more than the copy, and a floor that is
 * slow would flatter. */
enum { LEAST_PART_BYTES = 32 << 10 };

struct floor {
    int threads;
    pthread_t *handles;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool awake, ending; /* under mutex */
    atomic_int spinning;
    atomic_uint round;    /* a new value starts the task */
    atomic_bool resting;  /* spinning threads go back to sleep */
    atomic_int unfinished;
    /* the task of the round */
    size_t bytes;
    int parts;
    void (*task)(void *, size_t, size_t);
    void *context;
};

struct worker {
    struct floor *floor;
    int index;
};

static void pause_spin(unsigned *spins)
{
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
    /* Where there are more threads than cores the others must get their turn. */
    if (++*spins % 4096 == 0)
        sched_yield();
}

static void run_part(const struct floor *floor, int index)
{
    if (index >= floor->parts)
        return;
    size_t lines = (floor->bytes + LINE - 1) / LINE;
    size_t begin = lines * (size_t)index / (size_t)floor->parts * LINE;
    size_t end = lines * (size_t)(index + 1) / (size_t)floor->parts * LINE;
    if (end > floor->bytes)
        end = floor->bytes;
    floor->task(floor->context, begin, end);
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    struct floor *floor = worker->floor;
    int index = worker->index;
    free(worker);
    for (;;) {
        pthread_mutex_lock(&floor->mutex);
        while (!floor->awake && !floor->ending)
            pthread_cond_wait(&floor->changed, &floor->mutex);
        bool ending = floor->ending;
        unsigned seen = atomic_load(&floor->round);
        pthread_mutex_unlock(&floor->mutex);
        if (ending)
            return NULL;
        atomic_fetch_add(&floor->spinning, 1);
        for (unsigned spins = 0;;) {
            unsigned round = atomic_load_explicit(&floor->round, memory_order_acquire);
            if (round != seen) {
                seen = round;
                run_part(floor, index);
                atomic_fetch_sub_explicit(&floor->unfinished, 1, memory_order_release);
                spins = 0;
            } else if (atomic_load_explicit(&floor->resting, memory_order_acquire)) {
                break;
            } else {
                pause_spin(&spins);
            }
        }
        atomic_fetch_sub(&floor->spinning, 1);
    }
}

struct floor *floor_create(int threads)
{
    struct floor *floor = calloc(1, sizeof *floor);
    if (!floor)
        return NULL;
    floor->threads = 1;
    pthread_mutex_init(&floor->mutex, NULL);
    pthread_cond_init(&floor->changed, NULL);
    floor->handles = calloc((size_t)threads, sizeof *floor->handles);
    for (int i = 1; floor->handles && i < threads; i++) {
        struct worker *worker = malloc(sizeof *worker);
        if (worker)
            *worker = (struct worker){floor, i};
        if (!worker || pthread_create(&floor->handles[i], NULL, work, worker) != 0) {
            free(worker);
            floor_destroy(floor);
            return NULL;
        }
        floor->threads = i + 1;
    }
    if (!floor->handles) {
        floor_destroy(floor);
        return NULL;
    }
    return floor;
}

void floor_destroy(struct floor *floor)
{
    if (!floor)
        return;
    pthread_mutex_lock(&floor->mutex);
    floor->ending = true;
    pthread_cond_broadcast(&floor->changed);
    pthread_mutex_unlock(&floor->mutex);
    for (int i = 1; i < floor->threads; i++)
        pthread_join(floor->handles[i], NULL);
    pthread_cond_destroy(&floor->changed);
    pthread_mutex_destroy(&floor->mutex);
    free(floor->handles);
    free(floor);
}

static void wait_until(atomic_int *counter, int value)
{
    for (unsigned spins = 0; atomic_load_explicit(counter, memory_order_acquire) != value;)
        pause_spin(&spins);
}

void floor_wake(struct floor *floor)
{
    atomic_store(&floor->resting, false);
    pthread_mutex_lock(&floor->mutex);
    floor->awake = true;
    pthread_cond_broadcast(&floor->changed);
    pthread_mutex_unlock(&floor->mutex);
    wait_until(&floor->spinning, floor->threads - 1);
}

void floor_rest(struct floor *floor)
{
    pthread_mutex_lock(&floor->mutex);
    floor->awake = false;
    pthread_mutex_unlock(&floor->mutex);
    atomic_store(&floor->resting, true);
    wait_until(&floor->spinning, 0);
}

void floor_run(struct floor *floor, size_t bytes, void (*task)(void *, size_t, size_t), void *context)
{
    size_t parts = (bytes + LEAST_PART_BYTES - 1) / LEAST_PART_BYTES;
    floor->bytes = bytes;
    floor->parts = parts < (size_t)floor->threads ? (int)parts : floor->threads;
    floor->task = task;
    floor->context = context;
    if (floor->parts <= 1) {
        task(context, 0, bytes);
        return;
    }
    atomic_store(&floor->unfinished, floor->threads - 1);
    atomic_fetch_add_explicit(&floor->round, 1, memory_order_release);
    run_part(floor, 0);
    wait_until(&floor->unfinished, 0);
}

/* ---- the loops -------------------------------------------------------------------------------------------------- */

struct streams {
    char *out;
    const char *x, *dy; /* dy NULL: a copy */
};

#if defined(__x86_64__)

__attribute__((target("avx"))) static size_t move_avx(const struct streams *s, size_t begin, size_t end)
{
    size_t i = begin;
    for (; i + 128 <= end; i += 128)
        for (size_t j = 0; j < 128; j += 32) {
            __m256 value = _mm256_load_ps((const float *)(const void *)(s->x + i + j));
            if (s->dy)
                value = _mm256_xor_ps(value, _mm256_load_ps((const float *)(const void *)(s->dy + i + j)));
            _mm256_stream_ps((float *)(void *)(s->out + i + j), value);
        }
    return i;
}

static size_t move_sse2(const struct streams *s, size_t begin, size_t end)
{
    size_t i = begin;
    for (; i + 64 <= end; i += 64)
        for (size_t j = 0; j < 64; j += 16) {
            __m128i value = _mm_load_si128((const __m128i *)(const void *)(s->x + i + j));
            if (s->dy)
                value = _mm_xor_si128(value, _mm_load_si128((const __m128i *)(const void *)(s->dy + i + j)));
            _mm_stream_si128((__m128i *)(void *)(s->out + i + j), value);
        }
    return i;
}

static size_t move_vectors(const struct streams *s, size_t begin, size_t end)
{
    size_t i = __builtin_cpu_supports("avx") ? move_avx(s, begin, end) : move_sse2(s, begin, end);
    _mm_sfence();
    return i;
}

#elif defined(__aarch64__)

typedef unsigned char bytes16 __attribute__((vector_size(16)));

static size_t move_vectors(const struct streams *s, size_t begin, size_t end)
{
    size_t i = begin;
    for (; i + 32 <= end; i += 32) {
        bytes16 a, b, c, d;
        memcpy(&a, s->x + i, 16);
        memcpy(&b, s->x + i + 16, 16);
        if (s->dy) {
            memcpy(&c, s->dy + i, 16);
            memcpy(&d, s->dy + i + 16, 16);
            a ^= c;
            b ^= d;
        }
        __asm__ volatile("stnp %q1, %q2, [%0]" : : "r"(s->out + i), "w"(a), "w"(b) : "memory");
    }
    return i;
}

#else
#error "the copy floor knows x86-64 and aarch64"
#endif

static void move(void *context, size_t begin, size_t end)
{
    const struct streams *s = context;
    for (size_t i = move_vectors(s, begin, end); i < end; i++)
        s->out[i] = (char)(s->dy ? s->x[i] ^ s->dy[i] : s->x[i]);
}

void floor_copy(struct floor *floor, void *y, const void *x, size_t bytes)
{
    floor_run(floor, bytes, move, &(struct streams){y, x, NULL});
}

void floor_combine(struct floor *floor, void *dx, const void *x, const void *dy, size_t bytes)
{
    floor_run(floor, bytes, move, &(struct streams){dx, x, dy});
}
