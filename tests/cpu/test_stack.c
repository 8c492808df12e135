/* SPDX-License-Identifier: MIT
 *
 * test_stack.c - how much stack calls need: every operator, dtype and layout runs on a thread whose stack was painted
 * before, tasks included, once with each table. What they need fits into the smallest default stack there is, musl's
 * 128 KiB, with half of it left to the caller. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cpu/kernels.h"
#include "harness.h"
#include "normfuse.h"

enum { STACK_BYTES = 1 << 20, PROMISED_BYTES = 64 << 10, PAINT = 0xa5, GROUPS = 4 };

static void run_here(void *pool, int64_t tasks, void (*task)(void *, int64_t), void *context)
{
    (void)pool;
    for (int64_t i = 0; i < tasks; i++)
        task(context, i);
}

/* Forward and backward of one operator with every tensor that it takes. False: a call was refused. */
static bool call(int operator, normfuse_type type, bool channels_last, const int64_t sizes[4], int32_t activation)
{
    enum { BIG = 8, SMALL = 10 };
    const size_t values = (size_t)(sizes[0] * sizes[1] * sizes[2] * sizes[3]);
    const normfuse_type statistics = type == NORMFUSE_F64 ? NORMFUSE_F64 : NORMFUSE_F32;
    normfuse_axes axes[BIG + SMALL];
    normfuse_tensor big[BIG], channels[SMALL];
    for (int i = 0; i < BIG; i++)
        big[i] = (channels_last ? normfuse_tensor_channels_last
                                : normfuse_tensor_contiguous)(calloc(values, 8), type, 4, sizes, &axes[i]);
    for (int i = 0; i < SMALL; i++)
        channels[i] = normfuse_tensor_contiguous(calloc((size_t)sizes[1], 8), i < 2 ? statistics : NORMFUSE_F32, 1,
                                                 sizes + 1, &axes[BIG + i]);
    if (operator == 0) { /* mean and rstd of group norm */
        const int64_t groups[] = {sizes[0], GROUPS};
        for (int i = 0; i < 2; i++)
            channels[i] = normfuse_tensor_contiguous(channels[i].data, statistics, 2, groups, &axes[BIG + i]);
    }
    normfuse_tensors forward = {.struct_bytes = sizeof forward, .x = &big[0], .pre_add = &big[1], .post_add = &big[2],
        .weight = &channels[2], .bias = &channels[3], .y = &big[3], .u = &big[4]};
    normfuse_tensors backward = {.struct_bytes = sizeof backward, .x = &big[4], .post_add = &big[2],
                                 .weight = &channels[2],
        .bias = &channels[3], .dy = &big[5], .dx = &big[6], .dpost_add = &big[7], .dweight = &channels[4],
        .dbias = &channels[5]};
    if (operator < 2) {
        forward.mean = backward.mean = &channels[0];
        forward.rstd = backward.rstd = &channels[1];
    }
    if (activation == NORMFUSE_PRELU) {
        forward.slope = backward.slope = &channels[6];
        backward.dslope = &channels[7];
    }
    const normfuse_exec exec = {.struct_bytes = sizeof exec, .parallel_for = run_here, .threads = 4};
    normfuse_status status;
    if (operator == 0) {
        const normfuse_group_norm_options options = {.struct_bytes = sizeof options, .groups = GROUPS, .eps = 1e-5,
                                                     .activation = activation};
        status = normfuse_group_norm_forward(&options, &forward, &exec);
        status = status ? status : normfuse_group_norm_backward(&options, &backward, &exec);
    } else if (operator == 1) {
        const normfuse_batch_norm_options options = {.struct_bytes = sizeof options, .eps = 1e-5,
                                                     .activation = activation};
        status = normfuse_batch_norm_forward(&options, &forward, &exec);
        status = status ? status : normfuse_batch_norm_backward(&options, &backward, &exec);
    } else {
        const normfuse_affine_options options = {.struct_bytes = sizeof options, .activation = activation};
        status = normfuse_affine_forward(&options, &forward, &exec);
        status = status ? status : normfuse_affine_backward(&options, &backward, &exec);
    }
    for (int i = 0; i < BIG; i++)
        free(big[i].data);
    for (int i = 0; i < SMALL; i++)
        free(channels[i].data);
    return status == NORMFUSE_OK;
}

static void *all_calls(void *result)
{
    static const int64_t shapes[][4] = {{2, 8, 3, 5}, {3, 32, 32, 32}, {2, 512, 8, 8}};
    bool good = true;
    normfuse_information info = {.struct_bytes = sizeof info};
    good = good && normfuse_info(&info) == NORMFUSE_OK;
    for (int operator = 0; operator < 3; operator++)
        for (int type = NORMFUSE_F64; type <= NORMFUSE_BF16; type++)
            for (int channels_last = 0; channels_last < 2; channels_last++)
                for (size_t shape = 0; shape < sizeof shapes / sizeof *shapes; shape++)
                    good = good &&
                           call(operator, (normfuse_type)type, channels_last != 0, shapes[shape],
                                NORMFUSE_SILU + (int32_t)shape % 2);
    for (int32_t activation = NORMFUSE_IDENTITY; activation <= NORMFUSE_PRELU; activation++)
        for (int type = NORMFUSE_F64; type <= NORMFUSE_BF16; type++)
            good = good && call(0, (normfuse_type)type, type % 2 != 0, shapes[0], activation);
    for (int operator = 0; operator < 3; operator++) /* rows of few values, in the slowest ways through memory */
        for (int type = NORMFUSE_F64; type <= NORMFUSE_BF16; type++)
            good = good && call(operator, (normfuse_type)type, false, (int64_t[]){2, 8, 5, 13}, NORMFUSE_PRELU);
    *(bool *)result = good;
    return NULL;
}

static void *nothing(void *result)
{
    *(bool *)result = true;
    return NULL;
}

/* Bytes of stack that a thread of this function touched, the C library's own part included; 0: it failed. */
static size_t touched(void *(*function)(void *))
{
    unsigned char *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1,
                                0);
    if (stack == MAP_FAILED)
        return 0;
    memset(stack, PAINT, STACK_BYTES);
    bool good = false;
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    if (pthread_attr_setstack(&attributes, stack, STACK_BYTES) == 0 &&
        pthread_create(&thread, &attributes, function, &good) == 0)
        pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
    size_t untouched = 0;
    while (untouched < STACK_BYTES && stack[untouched] == PAINT)
        untouched++;
    munmap(stack, STACK_BYTES);
    return good ? STACK_BYTES - untouched : 0;
}

int main(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
    const bool measured = false;
    harness_skip("frames are larger under sanitizers and without optimization");
#else
    const bool measured = true;
#endif
    for (int i = 0; measured && normfuse_tables[i]; i++) {
        if (!normfuse_tables[i]->usable()) {
            harness_skip("%s: this CPU does not have it", normfuse_tables[i]->isa);
            continue;
        }
        fflush(stdout);
        int used[2] = {0};
        const pid_t child = pipe(used) == 0 ? fork() : -1; /* the table is chosen once in a process */
        if (child == 0) {
            setenv("NORMFUSE_MAX_ISA", normfuse_tables[i]->isa, 1);
            const size_t empty = touched(nothing), full = touched(all_calls), bytes = empty && full ? full - empty : 0;
            _exit(write(used[1], &bytes, sizeof bytes) != sizeof bytes);
        }
        size_t bytes = 0;
        close(used[1]);
        const bool received = child > 0 && read(used[0], &bytes, sizeof bytes) == sizeof bytes;
        close(used[0]);
        CHECK(received && waitpid(child, NULL, 0) == child && bytes > 0, "%s: every call succeeds",
              normfuse_tables[i]->isa);
        CHECK(bytes <= PROMISED_BYTES, "%s: calls need %zu bytes of stack", normfuse_tables[i]->isa, bytes);
        printf("%s: %zu bytes of stack\n", normfuse_tables[i]->isa, bytes);
    }
    return harness_close();
}
