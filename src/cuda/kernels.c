/* SPDX-License-Identifier: MIT
 *
 * kernels.c - the rows of kernels.def as a table, and where in it a kernel is. */
#include "kernels.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Lines of what kernels are given; kernels.h. */
_Static_assert(offsetof(struct normfuse_cuda_arguments, problem) == 48, "the problem begins a line");
_Static_assert(offsetof(struct normfuse_cuda_problem, views) == 64, "the tensors begin a line");
_Static_assert(offsetof(struct normfuse_cuda_problem, parameters) == 128, "the parameters begin a line");
_Static_assert(offsetof(struct normfuse_cuda_arguments, lines) % 64 == 48, "what a schedule reads begins a line");
_Static_assert(offsetof(struct normfuse_cuda_arguments, geometry) % 64 == 48, "the geometry begins a line");

enum { DIRECTION_forward = 0, DIRECTION_backward = 1, LAYOUT_rows = 0, LAYOUT_columns = 1 };
enum { TYPE_f64 = NORMFUSE_F64, TYPE_f32 = NORMFUSE_F32, TYPE_f16 = NORMFUSE_F16, TYPE_bf16 = NORMFUSE_BF16, TYPES };

const struct normfuse_cuda_kernel_row normfuse_cuda_kernel_table[NORMFUSE_CUDA_KERNELS] = {
#define ROW(layout, schedule, direction, type, ...)                                                                    \
    {NORMFUSE_SCHEDULE_##schedule, LAYOUT_##layout, DIRECTION_##direction, TYPE_##type, __VA_ARGS__},
    NORMFUSE_KERNELS(ROW)
#undef ROW
};

/* All names would be 5 KB: they are put together from these. */
static const char schedules[][24] = {
#define NAME(name) #name,
    NORMFUSE_SCHEDULE_LIST(NAME)
#undef NAME
};
static const char types[TYPES][8] = {
    [NORMFUSE_F64] = "f64", [NORMFUSE_F32] = "f32", [NORMFUSE_F16] = "f16", [NORMFUSE_BF16] = "bf16"};

const char *normfuse_cuda_kernel_name(enum normfuse_cuda_kernel kernel)
{
    static _Thread_local char name[96];
    const struct normfuse_cuda_kernel_row *const row = &normfuse_cuda_kernel_table[kernel];
    snprintf(name, sizeof name, "normfuse_%s_%s_%s_%s_%dx%d", row->columns ? "columns" : "rows",
             schedules[row->schedule], row->backward ? "backward" : "forward", types[row->type], row->elements,
             row->vectors);
    return name;
}

bool normfuse_cuda_has_general_alone(const char *built_for, int32_t capability)
{
    bool has_general = false;
    for (const char *target = built_for; *target != '\0';) {
        char *end;
        const long of = strtol(target, &end, 10);
        const bool of_generation = of / 10 == capability / 10 && of <= capability;
        if (strncmp(end, "-general", strlen("-general")) == 0)
            has_general = has_general || of <= capability;
        else if (*end == 'a' ? of == capability : of_generation || (*end == '-' && of <= capability))
            return false;
        target += strcspn(target, " ");
        target += strspn(target, " ");
    }
    return has_general;
}

enum normfuse_cuda_kernel normfuse_cuda_kernel_of(bool columns, enum normfuse_cuda_schedule schedule, bool backward,
                                                  int32_t type, bool vectorized)
{
    static const uint8_t kernels[2][NORMFUSE_SCHEDULES][2][TYPES][2] = {
#define ROW(layout, schedule, direction, type, elements, vectors, registers)                                           \
    [LAYOUT_##layout][NORMFUSE_SCHEDULE_##schedule][DIRECTION_##direction][TYPE_##type][(elements) > 1] =              \
        NORMFUSE_CUDA_##layout##_##schedule##_##direction##_##type##_##elements##x##vectors,
        NORMFUSE_KERNELS(ROW)
#undef ROW
    };
    return (enum normfuse_cuda_kernel)kernels[columns][schedule][backward][type][vectorized];
}
