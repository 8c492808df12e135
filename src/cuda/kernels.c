/* SPDX-License-Identifier: MIT
 *
 * kernels.c - the rows of kernels.def as a table, and where in it a kernel is. */
#include "kernels.h"

#include <stddef.h>

enum { DIRECTION_forward = 0, DIRECTION_backward = 1, LAYOUT_rows = 0, LAYOUT_columns = 1 };
enum { TYPE_f64 = NORMFUSE_F64, TYPE_f32 = NORMFUSE_F32, TYPE_f16 = NORMFUSE_F16, TYPE_bf16 = NORMFUSE_BF16, TYPES };

/* Names beside one another: a pointer to each would be 24 bytes for the dynamic loader. */
#define NAME(layout, schedule, direction, type, elements, vectors)                                                     \
    "normfuse_" #layout "_" #schedule "_" #direction "_" #type "_" #elements "x" #vectors
#define MEMBER(layout, schedule, direction, type, elements, vectors)                                                   \
    layout##_##schedule##_##direction##_##type##_##elements##x##vectors
static const struct names {
#define ROW(layout, schedule, direction, type, elements, vectors, threads, registers)                                  \
    char MEMBER(layout, schedule, direction, type, elements,                                                           \
                vectors)[sizeof NAME(layout, schedule, direction, type, elements, vectors)];
    NORMFUSE_KERNELS(ROW)
#undef ROW
#define ROW(kernel) char kernel[sizeof "normfuse_" #kernel];
    NORMFUSE_FINISH_KERNELS(ROW)
#undef ROW
} names = {
#define ROW(layout, schedule, direction, type, elements, vectors, threads, registers)                                  \
    NAME(layout, schedule, direction, type, elements, vectors),
    NORMFUSE_KERNELS(ROW)
#undef ROW
#define ROW(kernel) "normfuse_" #kernel,
        NORMFUSE_FINISH_KERNELS(ROW)
#undef ROW
};

const struct normfuse_cuda_kernel_row normfuse_cuda_kernel_table[NORMFUSE_CUDA_KERNELS] = {
#define ROW(layout, schedule, direction, type, elements, vectors, threads, registers)                                  \
    {NORMFUSE_SCHEDULE_##schedule,                                                                                     \
     offsetof(struct names, MEMBER(layout, schedule, direction, type, elements, vectors)),                             \
     elements,                                                                                                         \
     vectors,                                                                                                          \
     threads,                                                                                                          \
     registers},
    NORMFUSE_KERNELS(ROW)
#undef ROW
#define ROW(kernel) {.schedule = NORMFUSE_SCHEDULES, .name = offsetof(struct names, kernel)},
        NORMFUSE_FINISH_KERNELS(ROW)
#undef ROW
};

const char *normfuse_cuda_kernel_name(enum normfuse_cuda_kernel kernel)
{
    return (const char *)&names + normfuse_cuda_kernel_table[kernel].name;
}

enum normfuse_cuda_kernel normfuse_cuda_kernel_of(bool columns, enum normfuse_cuda_schedule schedule, bool backward,
                                                  int32_t type, bool vectorized)
{
    static const uint8_t kernels[2][NORMFUSE_SCHEDULES][2][TYPES][2] = {
#define ROW(layout, schedule, direction, type, elements, vectors, threads, registers)                                  \
    [LAYOUT_##layout][NORMFUSE_SCHEDULE_##schedule][DIRECTION_##direction][TYPE_##type][(elements) > 1] =              \
        NORMFUSE_CUDA_##layout##_##schedule##_##direction##_##type##_##elements##x##vectors,
        NORMFUSE_KERNELS(ROW)
#undef ROW
    };
    return (enum normfuse_cuda_kernel)kernels[columns][schedule][backward][type][vectorized];
}
