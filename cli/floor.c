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
    /* With more threads than cores the others must get their turn. */
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

/* Each output is the exclusive or of the inputs. A body is compiled for every number of streams, so that it has no loop
 * over them. */
#define BODY static inline __attribute__((always_inline))

#if defined(__x86_64__)

BODY __attribute__((target("avx"))) size_t move_avx(const struct floor_streams *s, size_t begin, size_t end, int reads,
                                                    int writes)
{
    const char *const a = s->in[0], *const b = s->in[1], *const c = s->in[2], *const d = s->in[3];
    char *const y = s->out[0], *const z = s->out[1];
#define LOAD(from) _mm256_load_ps((const float *)(const void *)((from) + i + j))
    size_t i = begin;
    for (; i + 128 <= end; i += 128)
        for (size_t j = 0; j < 128; j += 32) {
            __m256 value = LOAD(a);
            if (reads > 1)
                value = _mm256_xor_ps(value, LOAD(b));
            if (reads > 2)
                value = _mm256_xor_ps(value, LOAD(c));
            if (reads > 3)
                value = _mm256_xor_ps(value, LOAD(d));
            _mm256_stream_ps((float *)(void *)(y + i + j), value);
            if (writes > 1)
                _mm256_stream_ps((float *)(void *)(z + i + j), value);
        }
#undef LOAD
    return i;
}

BODY size_t move_sse2(const struct floor_streams *s, size_t begin, size_t end, int reads, int writes)
{
    const char *const a = s->in[0], *const b = s->in[1], *const c = s->in[2], *const d = s->in[3];
    char *const y = s->out[0], *const z = s->out[1];
#define LOAD(from) _mm_load_si128((const __m128i *)(const void *)((from) + i + j))
    size_t i = begin;
    for (; i + 64 <= end; i += 64)
        for (size_t j = 0; j < 64; j += 16) {
            __m128i value = LOAD(a);
            if (reads > 1)
                value = _mm_xor_si128(value, LOAD(b));
            if (reads > 2)
                value = _mm_xor_si128(value, LOAD(c));
            if (reads > 3)
                value = _mm_xor_si128(value, LOAD(d));
            _mm_stream_si128((__m128i *)(void *)(y + i + j), value);
            if (writes > 1)
                _mm_stream_si128((__m128i *)(void *)(z + i + j), value);
        }
#undef LOAD
    return i;
}

/* A function for each pair of numbers, so that target("avx") holds for the body. */
#define EACH(reads, writes)                                                                                            \
    __attribute__((target("avx"))) static size_t move_avx_##reads##writes(const struct floor_streams *s, size_t begin, \
                                                                          size_t end)                                  \
    {                                                                                                                  \
        return move_avx(s, begin, end, reads, writes);                                                                 \
    }                                                                                                                  \
    static size_t move_##reads##writes(const struct floor_streams *s, size_t begin, size_t end)                        \
    {                                                                                                                  \
        size_t moved = __builtin_cpu_supports("avx") ? move_avx_##reads##writes(s, begin, end)                         \
                                                     : move_sse2(s, begin, end, reads, writes);                        \
        _mm_sfence();                                                                                                  \
        return moved;                                                                                                  \
    }

#else

typedef unsigned char bytes16 __attribute__((vector_size(16)));

BODY bytes16 load(const char *from)
{
    bytes16 value;
    memcpy(&value, from, sizeof value);
    return value;
}

BODY void store(char *to, bytes16 low, bytes16 high)
{
#if defined(__aarch64__)
    __asm__ volatile("stnp %q1, %q2, [%0]" : : "r"(to), "w"(low), "w"(high) : "memory");
#else
    memcpy(to, &low, sizeof low);
    memcpy(to + sizeof low, &high, sizeof high);
#endif
}

BODY size_t move_vectors(const struct floor_streams *s, size_t begin, size_t end, int reads, int writes)
{
    const char *const in[] = {s->in[0], s->in[1], s->in[2], s->in[3]};
    char *const y = s->out[0], *const z = s->out[1];
    size_t i = begin;
    for (; i + 32 <= end; i += 32) {
        bytes16 low = load(in[0] + i), high = load(in[0] + i + 16);
        for (int r = 1; r < reads; r++) {
            low ^= load(in[r] + i);
            high ^= load(in[r] + i + 16);
        }
        store(y + i, low, high);
        if (writes > 1)
            store(z + i, low, high);
    }
    return i;
}

#define EACH(reads, writes)                                                                                            \
    static size_t move_##reads##writes(const struct floor_streams *s, size_t begin, size_t end)                        \
    {                                                                                                                  \
        return move_vectors(s, begin, end, reads, writes);                                                             \
    }

#endif

EACH(1, 1)
EACH(1, 2)
EACH(2, 1)
EACH(2, 2)
EACH(3, 1)
EACH(3, 2)
EACH(4, 1)
EACH(4, 2)

static size_t (*const moves[FLOOR_READS_MAX][FLOOR_WRITES_MAX])(const struct floor_streams *, size_t, size_t) = {
    {move_11, move_12}, {move_21, move_22}, {move_31, move_32}, {move_41, move_42}};

static void move(void *context, size_t begin, size_t end)
{
    const struct floor_streams *s = context;
    for (size_t i = moves[s->reads - 1][s->writes - 1](s, begin, end); i < end; i++) {
        char value = s->in[0][i];
        for (int r = 1; r < s->reads; r++)
            value = (char)(value ^ s->in[r][i]);
        for (int w = 0; w < s->writes; w++)
            s->out[w][i] = value;
    }
}

void floor_move(struct floor *floor, const struct floor_streams *streams, size_t bytes)
{
    struct floor_streams copy = *streams;
    floor_run(floor, bytes, move, &copy);
}
