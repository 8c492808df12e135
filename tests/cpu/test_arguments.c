/* SPDX-License-Identifier: MIT
 *
 * test_arguments.c - what calls are refused, with which status and message, and that they write nothing; what is
 * accepted at the edges; and the small functions beside the operators: merging, folding, tensor helpers. */
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "normfuse.h"
#include "problem.h"
#include "scalar.h"
#include "cpu/run.h"
#include "package.h"

/* In the order of normfuse_tensors. */
enum slot {
#define SLOT(number, member, kind) number,
#include "slots.def"
#undef SLOT
    SLOTS
};

enum operator { GROUP, BATCH, AFFINE, CHANNEL }; /* the last two are not sharded */
enum call { FORWARD, BACKWARD, STATISTICS, APPLY, BACKWARD_SUMS, BACKWARD_APPLY, FORWARD_SCRATCH, BACKWARD_SCRATCH };

/* ---- a call that is legal until a test changes something ------------------------------------------------------- */

enum { N = 2, C = 4, H = 3, W = 5, GROUPS = 2, SLOT_BYTES = 4096 };

static struct fixture {
    enum operator operator;
    enum call call;
    normfuse_group_norm_options group;
    normfuse_batch_norm_options batch;
    normfuse_affine_options affine;
    normfuse_channel_norm_options channel;
    normfuse_tensors tensors;
    normfuse_exec exec;
    normfuse_tensor t[SLOTS];
    normfuse_axes axes[SLOTS];
    bool no_options, no_tensors;
} f;

static _Alignas(64) unsigned char arena[SLOTS][SLOT_BYTES], before[SLOTS][SLOT_BYTES];
static _Alignas(64) unsigned char scratch[1 << 20];

static void put(enum slot slot, const normfuse_tensor *tensor)
{
    memcpy((char *)&f.tensors + offsetof(normfuse_tensors, x) + (size_t)slot * sizeof tensor, &tensor, sizeof tensor);
}

static void absent(enum slot slot)
{
    put(slot, NULL);
}

/* Gives a slot a new shape in its own memory, row-major or channels-last. */
static void shape(enum slot slot, normfuse_type type, bool channels_last, int32_t ndim, const int64_t *sizes)
{
    f.t[slot] = (channels_last ? normfuse_tensor_channels_last
                               : normfuse_tensor_contiguous)(arena[slot], type, ndim, sizes, &f.axes[slot]);
    put(slot, &f.t[slot]);
}

#define SHAPE(slot, type, ...)                                                                                         \
    shape(slot, type, false, (int32_t)(sizeof (int64_t[]){__VA_ARGS__} / sizeof(int64_t)), (int64_t[]){__VA_ARGS__})

static bool is_big(int slot)
{
    return slot <= POST_ADD || slot == Y || slot == U || (slot >= DY && slot <= DX) || slot == DPOST_ADD;
}

/* Every tensor that the call takes, of sizes n, c, h, w. */
static void fresh_of(enum operator operator, enum call call, normfuse_type type, int64_t n, int64_t c, int64_t h,
                     int64_t w, int64_t groups)
{
    f = (struct fixture){.operator = operator, .call = call};
    f.group = (normfuse_group_norm_options){.struct_bytes = sizeof f.group, .groups = groups, .eps = 1e-5};
    f.batch = (normfuse_batch_norm_options){.struct_bytes = sizeof f.batch, .eps = 1e-5};
    f.affine = (normfuse_affine_options){.struct_bytes = sizeof f.affine};
    f.channel = (normfuse_channel_norm_options){.struct_bytes = sizeof f.channel, .groups = groups, .eps = 1e-5};
    f.tensors.struct_bytes = sizeof f.tensors;
    f.exec.struct_bytes = sizeof f.exec;
    const uint32_t forward_inputs =
                       1u << X | 1u << PRE_ADD | 1u << POST_ADD | 1u << WEIGHT | 1u << BIAS | 1u << SCALE |
                           1u << SHIFT |
                       1u << PRE_BIAS,
                   backward_inputs = forward_inputs | 1u << DY | 1u << MEAN | 1u << RSTD;
    const uint32_t gradients = 1u << DWEIGHT | 1u << DBIAS | 1u << DSCALE | 1u << DSHIFT | 1u << DX |
                               1u << DPRE_BIAS;
    const uint32_t takes[] = {
        [FORWARD] = forward_inputs | 1u << Y | 1u << U | 1u << MEAN | 1u << RSTD,
        [BACKWARD] = backward_inputs | 1u << DU | gradients | 1u << DPOST_ADD,
        [STATISTICS] = 1u << X | 1u << PRE_ADD | 1u << PRE_BIAS | 1u << U | 1u << STATS,
        [APPLY] = forward_inputs | 1u << Y | 1u << MEAN | 1u << RSTD | 1u << STATS,
        [BACKWARD_SUMS] = backward_inputs | 1u << DPOST_ADD | 1u << SUMS,
        [BACKWARD_APPLY] = backward_inputs | 1u << DU | gradients | 1u << SUMS,
        [FORWARD_SCRATCH] = forward_inputs | 1u << Y | 1u << U | 1u << MEAN | 1u << RSTD | 1u << STATS,
        [BACKWARD_SCRATCH] = backward_inputs | 1u << DU | gradients | 1u << DPOST_ADD | 1u << SUMS,
    };
    uint32_t mask = takes[call];
    if (operator == BATCH || operator == AFFINE)
        mask &= ~(1u << SCALE | 1u << SHIFT | 1u << DSCALE | 1u << DSHIFT);
    if (operator == CHANNEL)
        mask &= ~(1u << STATS | 1u << SUMS);
    if (operator == AFFINE)
        mask &= ~(1u << PRE_ADD | 1u << U | 1u << MEAN | 1u << RSTD | 1u << DU | 1u << STATS | 1u << SUMS);
    for (int slot = 0; slot < SLOTS; slot++) {
        if ((mask >> slot & 1) == 0)
            continue;
        const enum slot at = (enum slot)slot;
        if (is_big(slot))
            SHAPE(at, type, n, c, h, w);
        else if (slot == MEAN || slot == RSTD)
            operator == GROUP     ? SHAPE(at, type == NORMFUSE_F64 ? type : NORMFUSE_F32, n, groups)
            : operator == CHANNEL ? SHAPE(at, type == NORMFUSE_F64 ? type : NORMFUSE_F32, n, groups, h, w)
                                  : SHAPE(at, type == NORMFUSE_F64 ? type : NORMFUSE_F32, c);
        else if (slot == STATS)
            operator == GROUP ? SHAPE(at, NORMFUSE_F64, n, groups, 3) : SHAPE(at, NORMFUSE_F64, c, 3);
        else if (slot == SUMS)
            operator == GROUP ? SHAPE(at, NORMFUSE_F64, n, c, 2) : SHAPE(at, NORMFUSE_F64, c, 2);
        else if (slot == SCALE || slot == SHIFT || slot == DSCALE || slot == DSHIFT)
            SHAPE(at, NORMFUSE_F32, n, c);
        else
            SHAPE(at, NORMFUSE_F32, c);
    }
}

static void fresh(enum operator operator, enum call call)
{
    fresh_of(operator, call, NORMFUSE_F32, N, C, H, W, GROUPS);
}

static void add_running(void)
{
    SHAPE(RUNNING_MEAN, NORMFUSE_F32, f.axes[X].shape[1]);
    SHAPE(RUNNING_VAR, NORMFUSE_F32, f.axes[X].shape[1]);
}

static void evaluate(void)
{
    f.group.flags |= NORMFUSE_EVALUATE;
    f.batch.flags |= NORMFUSE_EVALUATE;
    f.group.groups = f.axes[X].shape[1];
    absent(MEAN);
    absent(RSTD);
    add_running();
}

/* The slope of `slopes` values, and its gradient where the call has one. */
static void prelu(int64_t slopes)
{
    f.group.activation = f.batch.activation = f.affine.activation = f.channel.activation = NORMFUSE_PRELU;
    if (f.call != STATISTICS)
        SHAPE(SLOPE, NORMFUSE_F32, slopes);
    if (f.call == BACKWARD || f.call == BACKWARD_SUMS || f.call == BACKWARD_SCRATCH)
        SHAPE(DSLOPE, NORMFUSE_F32, slopes);
}

static size_t asked_bytes; /* by the last call of a ..._scratch_bytes */

static normfuse_status call_it(void)
{
    static normfuse_status (*const group_calls[])(const normfuse_group_norm_options *, const normfuse_tensors *,
                                                  const normfuse_exec *) = {
        normfuse_group_norm_forward, normfuse_group_norm_backward,      normfuse_group_norm_stats,
        normfuse_group_norm_apply,   normfuse_group_norm_backward_sums, normfuse_group_norm_backward_apply,
    };
    static normfuse_status (*const batch_calls[])(const normfuse_batch_norm_options *, const normfuse_tensors *,
                                                  const normfuse_exec *) = {
        normfuse_batch_norm_forward, normfuse_batch_norm_backward,      normfuse_batch_norm_stats,
        normfuse_batch_norm_apply,   normfuse_batch_norm_backward_sums, normfuse_batch_norm_backward_apply,
    };
    const normfuse_tensors *const tensors = f.no_tensors ? NULL : &f.tensors;
    const normfuse_group_norm_options *const group = f.no_options ? NULL : &f.group;
    const normfuse_batch_norm_options *const batch = f.no_options ? NULL : &f.batch;
    const normfuse_affine_options *const affine = f.no_options ? NULL : &f.affine;
    const normfuse_channel_norm_options *const channel = f.no_options ? NULL : &f.channel;
    if (f.call == FORWARD_SCRATCH || f.call == BACKWARD_SCRATCH) {
        const bool forward = f.call == FORWARD_SCRATCH;
        switch (f.operator) {
        case GROUP:
            return (forward ? normfuse_group_norm_forward_scratch_bytes
                            : normfuse_group_norm_backward_scratch_bytes)(group, tensors, &f.exec, &asked_bytes);
        case BATCH:
            return (forward ? normfuse_batch_norm_forward_scratch_bytes
                            : normfuse_batch_norm_backward_scratch_bytes)(batch, tensors, &f.exec, &asked_bytes);
        case CHANNEL:
            return (forward ? normfuse_channel_norm_forward_scratch_bytes
                            : normfuse_channel_norm_backward_scratch_bytes)(channel, tensors, &f.exec, &asked_bytes);
        default:
            return (forward ? normfuse_affine_forward_scratch_bytes
                            : normfuse_affine_backward_scratch_bytes)(affine, tensors, &f.exec, &asked_bytes);
        }
    }
    switch (f.operator) {
    case GROUP: return group_calls[f.call](group, tensors, &f.exec);
    case BATCH: return batch_calls[f.call](batch, tensors, &f.exec);
    case CHANNEL:
        return (f.call == FORWARD ? normfuse_channel_norm_forward
                                  : normfuse_channel_norm_backward)(channel, tensors, &f.exec);
    default: return (f.call == FORWARD ? normfuse_affine_forward : normfuse_affine_backward)(affine, tensors, &f.exec);
    }
}

/* ---- refused and accepted ------------------------------------------------------------------------------------- */

static void poison(void)
{
    memset(arena, 0x3d, sizeof arena);
}

static void expect_refused(int line, normfuse_status status, const char *text)
{
    poison();
    memcpy(before, arena, sizeof arena);
    errno = 0;
    const normfuse_status got = call_it();
    harness_check(got == status, __FILE__, line, "status %d, expected %d (%s); last error: %s", (int)got, (int)status,
                  text, normfuse_last_error());
    harness_check(got == NORMFUSE_OK || strstr(normfuse_last_error(), text) != NULL, __FILE__, line,
                  "message \"%s\" does not name %s", normfuse_last_error(), text);
    harness_check(memcmp(arena, before, sizeof arena) == 0, __FILE__, line, "a refused call wrote something (%s)",
                  text);
    harness_check(errno == 0, __FILE__, line, "errno was set");
}

static void expect_accepted(int line)
{
    poison();
    const normfuse_status got = call_it();
    harness_check(got == NORMFUSE_OK, __FILE__, line, "status %d: %s", (int)got, normfuse_last_error());
}

/* One line a rule: a legal call of an operator, what is changed about it, what comes back. */
#define REFUSED(operator, call, status, text, ...)                                                                     \
    do {                                                                                                               \
        fresh(operator, call);                                                                                         \
        __VA_ARGS__;                                                                                                   \
        expect_refused(__LINE__, NORMFUSE_##status, text);                                                             \
    } while (0)
#define ACCEPTED(operator, call, ...)                                                                                  \
    do {                                                                                                               \
        fresh(operator, call);                                                                                         \
        __VA_ARGS__;                                                                                                   \
        expect_accepted(__LINE__);                                                                                     \
    } while (0)

/* Puts a tensor into another's memory, `elements` f32 after its start. */
static void place(enum slot slot, enum slot owner, int64_t elements)
{
    f.t[slot].data = arena[owner];
    f.t[slot].byte_offset = (uint64_t)elements * 4;
}

static struct normfuse_problem problem_of_fixture(void)
{
    struct normfuse_problem problem;
    const normfuse_status status =
        f.operator == GROUP   ? normfuse_group_norm_problem(&problem, (enum normfuse_call)f.call, &f.group, &f.tensors)
        : f.operator == BATCH ? normfuse_batch_norm_problem(&problem, (enum normfuse_call)f.call, &f.batch, &f.tensors)
        : f.operator == CHANNEL
            ? normfuse_channel_norm_problem(&problem, (enum normfuse_call)f.call, &f.channel, &f.tensors)
                              : normfuse_affine_problem(&problem, (enum normfuse_call)f.call, &f.affine, &f.tensors);
    CHECK(status == NORMFUSE_OK, "%s", normfuse_last_error());
    return problem;
}

static void test_structs(void)
{
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "options is NULL", f.no_options = true);
    REFUSED(BATCH, BACKWARD, BAD_ARGUMENT, "options is NULL", f.no_options = true);
    REFUSED(AFFINE, FORWARD, BAD_ARGUMENT, "options is NULL", f.no_options = true);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "tensors is NULL", f.no_tensors = true);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "options.struct_bytes", f.group.struct_bytes -= 8);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "options.struct_bytes", f.group.struct_bytes += 8);
    REFUSED(BATCH, FORWARD, BAD_ARGUMENT, "options.struct_bytes", f.batch.struct_bytes = 0);
    REFUSED(AFFINE, FORWARD, BAD_ARGUMENT, "options.struct_bytes", f.affine.struct_bytes += 8);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "tensors.struct_bytes", f.tensors.struct_bytes -= 8);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "tensors.struct_bytes", f.tensors.struct_bytes += 8);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "tensors.flags", f.tensors.flags = 1);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "exec.struct_bytes", f.exec.struct_bytes -= 8);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "exec.struct_bytes", f.exec.struct_bytes += 8);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "exec.flags", f.exec.flags = 2);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "exec.reserved", f.exec.reserved = 1);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "exec.threads", f.exec.threads = -1);
    REFUSED(GROUP, FORWARD, BAD_POINTER, "exec.scratch", f.exec.scratch = scratch + 8);
    REFUSED(GROUP, FORWARD_SCRATCH, BAD_ARGUMENT, "exec.flags", f.exec.flags = 2);
    for (int difference = -8; difference <= 8; difference += 8) {
        normfuse_information info = {.struct_bytes = (uint32_t)((int)sizeof info + difference)};
        const normfuse_information given = info;
        const normfuse_status status = normfuse_info(&info);
        CHECK(difference == 0 ? status == NORMFUSE_OK
                              : status == NORMFUSE_BAD_ARGUMENT && memcmp(&info, &given, sizeof info) == 0 &&
                                    strstr(normfuse_last_error(), "info->struct_bytes") != NULL,
              "info of %d bytes more: status %d", difference, (int)status);
    }
}

static void test_options(void)
{
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "options.flags", f.group.flags = 16);
    REFUSED(BATCH, FORWARD, BAD_ARGUMENT, "options.flags", f.batch.flags = 0x80000000u);
    REFUSED(AFFINE, FORWARD, BAD_ARGUMENT, "options.flags", f.affine.flags = NORMFUSE_EVALUATE);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "ACCUMULATE", f.group.flags = NORMFUSE_ACCUMULATE);
    REFUSED(BATCH, APPLY, BAD_ARGUMENT, "ACCUMULATE", f.batch.flags = NORMFUSE_ACCUMULATE);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "groups = C", f.group.flags = NORMFUSE_EVALUATE; absent(MEAN); absent(RSTD);
            add_running());
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "groups = C", f.group.flags = NORMFUSE_CUMULATIVE);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "running_mean needs groups = C", add_running());
    REFUSED(BATCH, STATISTICS, BAD_ARGUMENT, "EVALUATE", f.batch.flags = NORMFUSE_EVALUATE);
    REFUSED(BATCH, BACKWARD_SUMS, BAD_ARGUMENT, "EVALUATE", f.batch.flags = NORMFUSE_EVALUATE);
    REFUSED(BATCH, FORWARD, BAD_ARGUMENT, "batches_seen", f.batch.flags = NORMFUSE_CUMULATIVE;
            f.batch.batches_seen = -1; add_running());
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "options.reserved", f.group.reserved = 1);
    REFUSED(AFFINE, BACKWARD, BAD_ARGUMENT, "options.reserved", f.affine.reserved = -1);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "options.activation", f.group.activation = -1);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "options.activation", f.group.activation = NORMFUSE_PRELU + 1);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "options.groups", f.group.groups = 0);
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "options.groups", f.group.groups = -2);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "options.groups is 3", f.group.groups = 3);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "options.groups is 8", f.group.groups = 8);
    REFUSED(GROUP, BACKWARD_APPLY, BAD_ARGUMENT, "options.set_values", f.group.set_values = -1);
    REFUSED(BATCH, FORWARD, BAD_ARGUMENT, "options.eps", f.batch.eps = 0);
    REFUSED(BATCH, FORWARD, BAD_ARGUMENT, "options.eps", f.batch.eps = -1e-5);
    REFUSED(BATCH, FORWARD, BAD_ARGUMENT, "options.eps", f.batch.eps = NAN);
    REFUSED(BATCH, APPLY, BAD_ARGUMENT, "options.eps", f.batch.eps = 0);

    ACCEPTED(GROUP, FORWARD, f.group.eps = 0);
    ACCEPTED(GROUP, FORWARD, f.group.eps = -1);
    ACCEPTED(BATCH, FORWARD, evaluate(); f.batch.eps = 0);
    ACCEPTED(GROUP, FORWARD, f.group.flags = NORMFUSE_HAS_ACT_PARAM; f.group.activation = NORMFUSE_ELU;
             f.group.act_param = -INFINITY);
    ACCEPTED(GROUP, BACKWARD, f.group.flags = NORMFUSE_ACCUMULATE);
    ACCEPTED(BATCH, STATISTICS, f.batch.flags = NORMFUSE_ACCUMULATE);
    ACCEPTED(BATCH, BACKWARD_APPLY, f.batch.flags = NORMFUSE_ACCUMULATE);
    ACCEPTED(BATCH, FORWARD, f.batch.flags = NORMFUSE_CUMULATIVE; f.batch.batches_seen = INT64_MAX; add_running());
    for (int activation = 0; activation <= NORMFUSE_RELU6; activation++)
        ACCEPTED(AFFINE, FORWARD, f.affine.activation = activation);
}

/* y in the place of post_add, with an activation of which act_param may be the slope. */
static void give_y(int32_t activation, double slope)
{
    absent(POST_ADD);
    SHAPE(Y, NORMFUSE_F32, N, C, H, W);
    f.group.activation = f.batch.activation = f.affine.activation = f.channel.activation = activation;
    f.group.flags = f.batch.flags = f.affine.flags = f.channel.flags = NORMFUSE_HAS_ACT_PARAM;
    f.group.act_param = f.batch.act_param = f.affine.act_param = f.channel.act_param = slope;
}

static void test_derivative_of_y(void)
{
    static const struct {
        int32_t activation;
        double slope;
    } good[] = {{NORMFUSE_RELU, 0}, {NORMFUSE_RELU6, 0}, {NORMFUSE_LEAKY_RELU, 0.25}, {NORMFUSE_LEAKY_RELU, 2}},
      bad[] = {{NORMFUSE_LEAKY_RELU, 0}, {NORMFUSE_LEAKY_RELU, -0.25}, {NORMFUSE_LEAKY_RELU, NAN}};
    static const enum call calls[] = {BACKWARD, BACKWARD_SUMS, BACKWARD_APPLY, BACKWARD_SCRATCH};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (size_t j = 0; j < sizeof good / sizeof *good; j++)
            ACCEPTED(GROUP, calls[i], give_y(good[j].activation, good[j].slope));
        for (size_t j = 0; j < sizeof bad / sizeof *bad; j++)
            REFUSED(BATCH, calls[i], BAD_ARGUMENT, "tensors.y is for relu", give_y(bad[j].activation, bad[j].slope));
    }
    fresh(GROUP, BACKWARD);
    give_y(NORMFUSE_RELU, 0);
    const struct normfuse_problem problem = problem_of_fixture();
    CHECK(problem.from_y && problem.post_add.data == (char *)arena[Y] && problem.y.data == NULL,
          "y is where post_add was");
    for (int32_t activation = 0; activation <= NORMFUSE_RELU6; activation++)
        if (activation != NORMFUSE_RELU && activation != NORMFUSE_LEAKY_RELU && activation != NORMFUSE_RELU6)
            REFUSED(AFFINE, BACKWARD, BAD_ARGUMENT, "tensors.y is for relu", give_y(activation, 1));
    ACCEPTED(AFFINE, BACKWARD, give_y(NORMFUSE_LEAKY_RELU, 0); f.affine.flags = 0); /* 0.01 */
    ACCEPTED(BATCH, BACKWARD, evaluate(); give_y(NORMFUSE_RELU, 0); f.batch.flags |= NORMFUSE_EVALUATE);
    REFUSED(GROUP, BACKWARD, BAD_ARGUMENT, "tensors.y and tensors.post_add", give_y(NORMFUSE_RELU, 0);
            SHAPE(POST_ADD, NORMFUSE_F32, N, C, H, W));
    REFUSED(GROUP, BACKWARD, UNSUPPORTED, "tensors.y", give_y(NORMFUSE_RELU, 0); SHAPE(Y, NORMFUSE_F16, N, C, H, W));
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dx", give_y(NORMFUSE_RELU, 0); place(DX, Y, 0));
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dpost_add", give_y(NORMFUSE_RELU, 0); place(DPOST_ADD, Y, 0));
}

static void test_presence(void)
{
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "tensors.x", absent(X));
    REFUSED(AFFINE, FORWARD, BAD_ARGUMENT, "tensors.y", absent(Y));
    REFUSED(BATCH, FORWARD, BAD_ARGUMENT, "tensors.y", evaluate(); absent(Y));
    REFUSED(BATCH, FORWARD, BAD_ARGUMENT, "tensors.running_mean", evaluate(); absent(RUNNING_MEAN));
    REFUSED(BATCH, BACKWARD, BAD_ARGUMENT, "tensors.running_var", evaluate(); absent(RUNNING_VAR));
    REFUSED(BATCH, FORWARD, BAD_ARGUMENT, "tensors.mean", evaluate(); SHAPE(MEAN, NORMFUSE_F32, C));
    REFUSED(BATCH, FORWARD, BAD_ARGUMENT, "tensors.running_var", add_running(); absent(RUNNING_VAR));
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "tensors.u needs", absent(PRE_ADD); absent(PRE_BIAS));
    REFUSED(GROUP, BACKWARD, BAD_ARGUMENT, "tensors.dpre_bias needs tensors.dx", absent(DX));
    REFUSED(BATCH, APPLY, BAD_ARGUMENT, "tensors.dpre_bias", SHAPE(DPRE_BIAS, NORMFUSE_F32, C));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.pre_bias", SHAPE(PRE_BIAS, NORMFUSE_F32, N, C, H));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.pre_bias", SHAPE(PRE_BIAS, NORMFUSE_F32, C + 1));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.pre_bias", SHAPE(PRE_BIAS, NORMFUSE_F32, N + 1, C));
    REFUSED(GROUP, BACKWARD, BAD_SHAPE, "tensors.dpre_bias", SHAPE(DPRE_BIAS, NORMFUSE_F32, C, N));
    ACCEPTED(GROUP, FORWARD, absent(PRE_ADD));
    ACCEPTED(BATCH, FORWARD, SHAPE(PRE_BIAS, NORMFUSE_F64, N, C));
    ACCEPTED(AFFINE, BACKWARD, SHAPE(PRE_BIAS, NORMFUSE_F16, N, C));
    ACCEPTED(GROUP, BACKWARD, absent(PRE_BIAS); SHAPE(DPRE_BIAS, NORMFUSE_F64, N, C));
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "tensors.dy", SHAPE(DY, NORMFUSE_F32, N, C, H, W));
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "tensors.stats", SHAPE(STATS, NORMFUSE_F64, N, GROUPS, 3));
    REFUSED(GROUP, BACKWARD, BAD_ARGUMENT, "tensors.dy", absent(DY));
    REFUSED(GROUP, BACKWARD, BAD_ARGUMENT, "tensors.mean", absent(MEAN));
    REFUSED(BATCH, BACKWARD, BAD_ARGUMENT, "tensors.rstd", absent(RSTD));
    REFUSED(GROUP, BACKWARD, BAD_ARGUMENT, "tensors.y", SHAPE(Y, NORMFUSE_F32, N, C, H, W));
    REFUSED(BATCH, BACKWARD, BAD_ARGUMENT, "tensors.running_mean", add_running());
    REFUSED(GROUP, BACKWARD, BAD_ARGUMENT, "tensors.sums", SHAPE(SUMS, NORMFUSE_F64, N, C, 2));
    REFUSED(BATCH, FORWARD, BAD_ARGUMENT, "tensors.scale", SHAPE(SCALE, NORMFUSE_F32, N, C));
    REFUSED(BATCH, BACKWARD, BAD_ARGUMENT, "tensors.dshift", SHAPE(DSHIFT, NORMFUSE_F32, N, C));
    REFUSED(AFFINE, FORWARD, BAD_ARGUMENT, "tensors.mean", SHAPE(MEAN, NORMFUSE_F32, C));
    REFUSED(GROUP, STATISTICS, BAD_ARGUMENT, "tensors.stats", absent(STATS));
    REFUSED(GROUP, STATISTICS, BAD_ARGUMENT, "tensors.weight", SHAPE(WEIGHT, NORMFUSE_F32, C));
    REFUSED(BATCH, APPLY, BAD_ARGUMENT, "tensors.stats", absent(STATS));
    REFUSED(BATCH, APPLY, BAD_ARGUMENT, "tensors.u", SHAPE(U, NORMFUSE_F32, N, C, H, W));
    REFUSED(BATCH, BACKWARD_SUMS, BAD_ARGUMENT, "tensors.sums", absent(SUMS));
    REFUSED(BATCH, BACKWARD_SUMS, BAD_ARGUMENT, "tensors.dx", SHAPE(DX, NORMFUSE_F32, N, C, H, W));
    REFUSED(GROUP, BACKWARD_APPLY, BAD_ARGUMENT, "tensors.sums", absent(SUMS));
    REFUSED(GROUP, BACKWARD_APPLY, BAD_ARGUMENT, "tensors.dpost_add", SHAPE(DPOST_ADD, NORMFUSE_F32, N, C, H, W));

    static const enum operator operators[] = {GROUP, BATCH};
    for (int i = 0; i < 2; i++)
        for (int call = FORWARD; call <= BACKWARD_SCRATCH; call++)
            ACCEPTED(operators[i], (enum call)call, );
    ACCEPTED(AFFINE, FORWARD, );
    ACCEPTED(AFFINE, BACKWARD, );
    ACCEPTED(AFFINE, FORWARD_SCRATCH, );
    ACCEPTED(AFFINE, BACKWARD_SCRATCH, );
    ACCEPTED(BATCH, FORWARD, evaluate());
    ACCEPTED(BATCH, BACKWARD, evaluate());
    ACCEPTED(GROUP, FORWARD, evaluate());
    ACCEPTED(GROUP, BACKWARD, evaluate());
    ACCEPTED(BATCH, FORWARD_SCRATCH, absent(STATS); evaluate());
    ACCEPTED(BATCH, FORWARD, add_running());
    ACCEPTED(GROUP, FORWARD, f.group.groups = C; add_running(); SHAPE(MEAN, NORMFUSE_F32, N, C);
             SHAPE(RSTD, NORMFUSE_F32, N, C));
    /* Every optional tensor left out, one at a time. */
    static const enum slot forward[] = {PRE_ADD, PRE_BIAS, POST_ADD, WEIGHT, BIAS, SCALE, SHIFT, Y, U, MEAN, RSTD};
    for (size_t i = 0; i < sizeof forward / sizeof *forward; i++)
        ACCEPTED(GROUP, FORWARD, absent(forward[i]));
    static const enum slot backward[] = {PRE_ADD, PRE_BIAS, POST_ADD, WEIGHT, BIAS,   SCALE,     SHIFT,
                                         DU,      DX,       DWEIGHT,  DBIAS,  DSCALE, DSHIFT,    DPOST_ADD, DPRE_BIAS};
    for (size_t i = 0; i < sizeof backward / sizeof *backward; i++)
        ACCEPTED(GROUP, BACKWARD, absent(backward[i]); if (backward[i] == DX) absent(DPRE_BIAS));
}

static void test_channel_norm(void)
{
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "options is NULL", f.no_options = true);
    REFUSED(CHANNEL, BACKWARD, BAD_ARGUMENT, "tensors is NULL", f.no_tensors = true);
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "options.struct_bytes", f.channel.struct_bytes -= 8);
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "options.struct_bytes", f.channel.struct_bytes += 8);
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "options.flags", f.channel.flags = NORMFUSE_EVALUATE);
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "options.flags", f.channel.flags = NORMFUSE_CUMULATIVE);
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "ACCUMULATE", f.channel.flags = NORMFUSE_ACCUMULATE);
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "options.reserved", f.channel.reserved = 1);
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "options.activation", f.channel.activation = NORMFUSE_PRELU + 1);
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "options.groups", f.channel.groups = 0);
    REFUSED(CHANNEL, BACKWARD, BAD_ARGUMENT, "options.groups", f.channel.groups = -1);
    REFUSED(CHANNEL, FORWARD, BAD_SHAPE, "options.groups is 3", f.channel.groups = 3);
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "options.statistics is 2", f.channel.statistics = 2);
    REFUSED(CHANNEL, BACKWARD, BAD_ARGUMENT, "options.statistics is -1", f.channel.statistics = -1);
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "options.eps_kind is 2", f.channel.eps_kind = 2);
    REFUSED(CHANNEL, BACKWARD, BAD_ARGUMENT, "options.eps_kind is -1", f.channel.eps_kind = -1);
    static const double bad_norms[] = {-1e-5, NAN, -INFINITY};
    for (size_t i = 0; i < sizeof bad_norms / sizeof *bad_norms; i++)
        REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "options.eps is", f.channel.eps_kind = NORMFUSE_EPS_OF_NORM;
                f.channel.eps = bad_norms[i]);
    ACCEPTED(CHANNEL, FORWARD, f.channel.eps_kind = NORMFUSE_EPS_OF_NORM; f.channel.eps = 0);
    ACCEPTED(CHANNEL, FORWARD, f.channel.eps = -1);
    for (int call = FORWARD; call <= BACKWARD_SCRATCH; call++) {
        if (call > BACKWARD && call < FORWARD_SCRATCH)
            continue;
        ACCEPTED(CHANNEL, (enum call)call, );
        ACCEPTED(CHANNEL, (enum call)call, f.channel.statistics = NORMFUSE_MEAN_SQUARE; absent(MEAN));
        REFUSED(CHANNEL, (enum call)call, BAD_ARGUMENT,
                "tensors.mean is not taken by this call with NORMFUSE_MEAN_SQUARE",
                f.channel.statistics = NORMFUSE_MEAN_SQUARE);
        REFUSED(CHANNEL, (enum call)call, BAD_ARGUMENT, "tensors.running_mean", add_running());
    }
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "tensors.stats", SHAPE(STATS, NORMFUSE_F64, N, GROUPS, 3));
    REFUSED(CHANNEL, BACKWARD, BAD_ARGUMENT, "tensors.sums", SHAPE(SUMS, NORMFUSE_F64, N, C, 2));
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "tensors.x", absent(X));
    REFUSED(CHANNEL, BACKWARD, BAD_ARGUMENT, "tensors.mean is NULL", absent(MEAN));
    REFUSED(CHANNEL, BACKWARD, BAD_ARGUMENT, "tensors.rstd is NULL", absent(RSTD));
    REFUSED(CHANNEL, BACKWARD, BAD_ARGUMENT, "tensors.rstd is NULL", absent(MEAN); absent(RSTD);
            f.channel.statistics = NORMFUSE_MEAN_SQUARE);
    REFUSED(CHANNEL, BACKWARD, BAD_ARGUMENT, "tensors.dy", absent(DY));
    REFUSED(CHANNEL, FORWARD, BAD_ARGUMENT, "tensors.u needs", absent(PRE_ADD); absent(PRE_BIAS));
    REFUSED(CHANNEL, FORWARD, BAD_SHAPE, "tensors.mean has 4 elements, expected 60",
            SHAPE(MEAN, NORMFUSE_F32, N, GROUPS));
    REFUSED(CHANNEL, BACKWARD, BAD_SHAPE, "tensors.rstd has 30 elements, expected 60",
            SHAPE(RSTD, NORMFUSE_F32, N, H, W));
    REFUSED(CHANNEL, FORWARD, BAD_SHAPE, "tensors.weight", SHAPE(WEIGHT, NORMFUSE_F32, N, C));
    REFUSED(CHANNEL, BACKWARD, BAD_SHAPE, "tensors.dscale", SHAPE(DSCALE, NORMFUSE_F32, C));
    REFUSED(CHANNEL, FORWARD, UNSUPPORTED, "tensors.rstd must be f32", SHAPE(RSTD, NORMFUSE_F64, N, GROUPS, H, W));
    REFUSED(CHANNEL, FORWARD, UNSUPPORTED, "tensors.mean is not row-major", f.axes[MEAN].strides[3] = 2);
    static const normfuse_type halves[] = {NORMFUSE_F16, NORMFUSE_BF16};
    for (size_t i = 0; i < sizeof halves / sizeof *halves; i++) {
        ACCEPTED(CHANNEL, FORWARD, SHAPE(Y, halves[i], N, C, H, W); SHAPE(POST_ADD, halves[i], N, C, H, W));
        ACCEPTED(CHANNEL, BACKWARD, SHAPE(DY, halves[i], N, C, H, W); SHAPE(POST_ADD, halves[i], N, C, H, W);
                 SHAPE(DPOST_ADD, halves[i], N, C, H, W));
        ACCEPTED(CHANNEL, BACKWARD,
                 give_y(NORMFUSE_RELU, 0); SHAPE(DY, halves[i], N, C, H, W); SHAPE(Y, halves[i], N, C, H, W);
                 absent(DPOST_ADD));
        ACCEPTED(CHANNEL, FORWARD, SHAPE(X, halves[i], N, C, H, W); SHAPE(PRE_ADD, halves[i], N, C, H, W);
                 SHAPE(U, halves[i], N, C, H, W));
        REFUSED(CHANNEL, FORWARD, UNSUPPORTED, "tensors.post_add must have the dtype of tensors.y and tensors.dy",
                SHAPE(Y, halves[i], N, C, H, W));
        REFUSED(CHANNEL, BACKWARD, UNSUPPORTED, "tensors.dpost_add must have the dtype of tensors.y and tensors.dy",
                SHAPE(DY, halves[i], N, C, H, W); absent(POST_ADD));
        REFUSED(CHANNEL, FORWARD, UNSUPPORTED, "tensors.u must have the dtype of tensors.x",
                SHAPE(U, halves[i], N, C, H, W));
        REFUSED(CHANNEL, BACKWARD, UNSUPPORTED, "tensors.dx must have the dtype of tensors.x",
                SHAPE(DX, halves[i], N, C, H, W));
        REFUSED(CHANNEL, FORWARD, UNSUPPORTED, "tensors.y must have the dtype of tensors.x, or one of them f32",
                SHAPE(X, halves[i], N, C, H, W); SHAPE(Y, halves[1 - i], N, C, H, W));
        REFUSED(CHANNEL, FORWARD, OVERLAP, "tensors.y, an output, overlaps tensors.x", absent(POST_ADD);
                SHAPE(Y, halves[i], N, C, H, W); place(Y, X, 0));
    }
    REFUSED(CHANNEL, FORWARD, UNSUPPORTED, "tensors.y must have the dtype of tensors.x, or one of them f32",
            SHAPE(Y, NORMFUSE_F64, N, C, H, W));
    REFUSED(CHANNEL, BACKWARD, UNSUPPORTED, "tensors.dy must have the dtype of tensors.x, or one of them f32",
            SHAPE(DY, NORMFUSE_F64, N, C, H, W));
    REFUSED(CHANNEL, FORWARD, UNSUPPORTED, "tensors.y has a dtype", f.t[Y].dtype.bits = 8);
    REFUSED(CHANNEL, FORWARD, OVERLAP, "tensors.y, an output, overlaps tensors.x", place(Y, X, 1));
    REFUSED(CHANNEL, BACKWARD, OVERLAP, "overlaps", place(DX, RSTD, 0));
    ACCEPTED(CHANNEL, FORWARD,
             SHAPE(MEAN, NORMFUSE_F64, N * GROUPS, H * W); SHAPE(RSTD, NORMFUSE_F32, N * GROUPS * H * W));
    static const enum slot forward[] = {PRE_ADD, PRE_BIAS, POST_ADD, WEIGHT, BIAS, SCALE, SHIFT, Y, U, MEAN, RSTD};
    for (size_t i = 0; i < sizeof forward / sizeof *forward; i++)
        ACCEPTED(CHANNEL, FORWARD, absent(forward[i]));
    static const enum slot backward[] = {PRE_ADD, PRE_BIAS, POST_ADD, WEIGHT, BIAS,   SCALE,     SHIFT,
                                         DU,      DX,       DWEIGHT,  DBIAS,  DSCALE, DSHIFT,    DPOST_ADD, DPRE_BIAS};
    for (size_t i = 0; i < sizeof backward / sizeof *backward; i++)
        ACCEPTED(CHANNEL, BACKWARD, absent(backward[i]); if (backward[i] == DX) absent(DPRE_BIAS));
    /* Statistics of no channels are those of no values. */
    fresh_of(CHANNEL, FORWARD, NORMFUSE_F32, N, 0, H, W, GROUPS);
    f.channel.eps_kind = NORMFUSE_EPS_OF_NORM;
    poison();
    CHECK(call_it() == NORMFUSE_OK && ((float *)(void *)arena[RSTD])[N * GROUPS * H * W - 1] == 0,
          "the norm of no values is at least eps: %s", normfuse_last_error());
}

static void test_slope(void)
{
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "tensors.slope is NULL, but required", prelu(C); absent(SLOPE));
    REFUSED(BATCH, APPLY, BAD_ARGUMENT, "tensors.slope is NULL, but required", prelu(C); absent(SLOPE));
    REFUSED(AFFINE, BACKWARD, BAD_ARGUMENT, "tensors.slope is NULL, but required", prelu(C); absent(SLOPE));
    REFUSED(GROUP, BACKWARD_APPLY, BAD_ARGUMENT, "tensors.slope is NULL, but required", prelu(C); absent(SLOPE));
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "tensors.slope is for prelu alone", prelu(C);
            f.group.activation = NORMFUSE_LEAKY_RELU);
    REFUSED(BATCH, BACKWARD, BAD_ARGUMENT, "tensors.dslope is for prelu alone", prelu(C); absent(SLOPE);
            f.batch.activation = NORMFUSE_RELU);
    REFUSED(GROUP, STATISTICS, BAD_ARGUMENT, "tensors.slope is not taken", prelu(C); SHAPE(SLOPE, NORMFUSE_F32, C));
    REFUSED(GROUP, FORWARD, BAD_ARGUMENT, "tensors.dslope is not taken", prelu(C); SHAPE(DSLOPE, NORMFUSE_F32, C));
    REFUSED(BATCH, BACKWARD_APPLY, BAD_ARGUMENT, "tensors.dslope is not taken",
            prelu(C); SHAPE(DSLOPE, NORMFUSE_F32, C));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.slope has 2 axes", prelu(C); SHAPE(SLOPE, NORMFUSE_F32, N, C));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.slope has 2 axes", prelu(C); SHAPE(SLOPE, NORMFUSE_F32, 1, 1));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.slope has 5 elements along C, x has 4", prelu(C + 1));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.slope has 0 elements along C, x has 4", prelu(0));
    REFUSED(BATCH, BACKWARD, BAD_SHAPE, "tensors.dslope has 1 elements along C, tensors.slope has 4", prelu(C);
            SHAPE(DSLOPE, NORMFUSE_F32, 1));
    REFUSED(BATCH, BACKWARD, BAD_SHAPE, "tensors.dslope has 4 elements along C, tensors.slope has 1", prelu(1);
            SHAPE(DSLOPE, NORMFUSE_F32, C));
    REFUSED(BATCH, BACKWARD, BAD_SHAPE, "tensors.dslope has 2 axes", prelu(1); SHAPE(DSLOPE, NORMFUSE_F32, 1, C));
    REFUSED(GROUP, FORWARD, BAD_POINTER, "tensors.slope.shape", prelu(C); f.t[SLOPE].shape = NULL);
    REFUSED(GROUP, BACKWARD, BAD_POINTER, "tensors.dslope.shape", prelu(1); f.t[DSLOPE].shape = NULL);
    REFUSED(GROUP, FORWARD, BAD_POINTER, "tensors.slope.data", prelu(1); f.t[SLOPE].data = NULL);
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.slope has a dtype", prelu(C); f.t[SLOPE].dtype.bits = 8);
    REFUSED(AFFINE, FORWARD, UNSUPPORTED, "tensors.slope is on device", prelu(C); f.t[SLOPE].device.device_id = 1);
    REFUSED(GROUP, BACKWARD, OVERLAP, "elements of tensors.dslope", prelu(C); f.axes[DSLOPE].strides[0] = 0);
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dslope, an output, overlaps tensors.slope",
            prelu(C); place(DSLOPE, SLOPE, 0));
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dslope, an output, overlaps tensors.slope",
            prelu(1); place(DSLOPE, SLOPE, 0));
    REFUSED(GROUP, BACKWARD, OVERLAP, "overlaps", prelu(1); place(DSLOPE, DBIAS, 2));
    REFUSED(GROUP, BACKWARD, BAD_ARGUMENT, "tensors.y is for relu", prelu(C); absent(POST_ADD);
            SHAPE(Y, NORMFUSE_F32, N, C, H, W));
    static const normfuse_type types[] = {NORMFUSE_F64, NORMFUSE_F32, NORMFUSE_F16, NORMFUSE_BF16};
    for (int operator = GROUP; operator <= CHANNEL; operator++)
        for (int call = FORWARD; call <= BACKWARD_SCRATCH; call++)
            for (int i = 0; i < 8; i++) {
                if (operator >= AFFINE && call > BACKWARD && call < FORWARD_SCRATCH)
                    continue;
                const int64_t slopes = i % 2 ? 1 : C;
                ACCEPTED((enum operator)operator, (enum call)call, prelu(slopes);
                         if (call != STATISTICS) SHAPE(SLOPE, types[i / 2], slopes));
            }
    ACCEPTED(GROUP, BACKWARD, prelu(C); absent(DSLOPE));
    ACCEPTED(GROUP, BACKWARD, prelu(C); SHAPE(DSLOPE, NORMFUSE_BF16, C));
    ACCEPTED(GROUP, FORWARD, prelu(C); absent(Y); absent(SLOPE)); /* statistics alone */
    ACCEPTED(BATCH, FORWARD, evaluate(); prelu(1));
    ACCEPTED(GROUP, FORWARD, prelu(C); f.axes[SLOPE].strides[0] = 0);
    ACCEPTED(AFFINE, BACKWARD, prelu(C); f.axes[DSLOPE].strides[0] = -1; f.t[DSLOPE].byte_offset = (C - 1) * 4);
    /* The two shapes of one channel are one. */
    fresh_of(GROUP, BACKWARD, NORMFUSE_F32, N, 1, H, W, 1);
    prelu(1);
    expect_accepted(__LINE__);
}

static void test_shapes(void)
{
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.x", f.t[X].ndim = 0);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.x", f.t[X].ndim = 1);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.x", f.t[X].ndim = 6);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.x", f.t[X].ndim = -1);
    REFUSED(GROUP, FORWARD, BAD_POINTER, "tensors.x.shape", f.t[X].shape = NULL);
    REFUSED(GROUP, FORWARD, BAD_POINTER, "tensors.y.shape", f.t[Y].shape = NULL);
    REFUSED(GROUP, FORWARD, BAD_POINTER, "tensors.weight.shape", f.t[WEIGHT].shape = NULL);
    REFUSED(GROUP, FORWARD, BAD_POINTER, "tensors.mean.shape", f.t[MEAN].shape = NULL);
    for (int axis = 0; axis < 4; axis++) {
        REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.x", f.axes[X].shape[axis] = -1);
        REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.y", f.axes[Y].shape[axis]++);
        REFUSED(BATCH, BACKWARD, BAD_SHAPE, "tensors.dpost_add", f.axes[DPOST_ADD].shape[axis]--);
    }
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.x overflow", f.axes[X].shape[0] = INT64_MAX);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.x overflow", f.axes[X].shape[2] = INT64_MAX / 100);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.x overflow", f.axes[X].shape[0] = 0;
            f.axes[X].shape[2] = INT64_MAX / 2);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.y has 3 axes", f.t[Y].ndim = 3);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.weight has 3 elements along C, x has 4", f.axes[WEIGHT].shape[0] = 3);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.bias has 5", f.axes[BIAS].shape[0] = 5);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.weight has 2 axes", SHAPE(WEIGHT, NORMFUSE_F32, N, C));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.scale has 1 axes", SHAPE(SCALE, NORMFUSE_F32, C));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.shift has 3 elements along N, x has 2", f.axes[SHIFT].shape[0] = 3);
    REFUSED(GROUP, BACKWARD, BAD_SHAPE, "tensors.dscale has 5 elements along C", f.axes[DSCALE].shape[1] = 5);
    REFUSED(AFFINE, FORWARD, BAD_SHAPE, "tensors.bias", SHAPE(WEIGHT, NORMFUSE_F32, N, C));
    REFUSED(AFFINE, BACKWARD, BAD_SHAPE, "tensors.dbias", SHAPE(WEIGHT, NORMFUSE_F32, N, C);
            SHAPE(BIAS, NORMFUSE_F32, N, C); SHAPE(DWEIGHT, NORMFUSE_F32, N, C));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.mean has 8", SHAPE(MEAN, NORMFUSE_F32, N, C));
    REFUSED(BATCH, FORWARD, BAD_SHAPE, "tensors.rstd has 2", SHAPE(RSTD, NORMFUSE_F32, 2));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.mean", f.axes[MEAN].shape[0] = -2; f.axes[MEAN].shape[1] = -2);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.mean", f.axes[MEAN].shape[0] = f.axes[MEAN].shape[1] = INT64_MAX / 2);
    REFUSED(GROUP, STATISTICS, BAD_SHAPE, "tensors.stats has 8", SHAPE(STATS, NORMFUSE_F64, N, GROUPS, 2));
    REFUSED(BATCH, BACKWARD_SUMS, BAD_SHAPE, "tensors.sums has 12", SHAPE(SUMS, NORMFUSE_F64, C, 3));
    REFUSED(GROUP, BACKWARD_SUMS, BAD_SHAPE, "tensors.sums has 8", SHAPE(SUMS, NORMFUSE_F64, N, GROUPS, 2));

    /* One value a channel. */
    fresh_of(BATCH, FORWARD, NORMFUSE_F32, 1, C, 1, 1, 1);
    expect_refused(__LINE__, NORMFUSE_BAD_SHAPE, "more than 1 value per channel");
    fresh_of(BATCH, BACKWARD, NORMFUSE_F32, 1, C, 1, 1, 1);
    expect_refused(__LINE__, NORMFUSE_BAD_SHAPE, "more than 1 value per channel");
    REFUSED(BATCH, BACKWARD_APPLY, BAD_SHAPE, "options.set_values", f.batch.set_values = 1);
    fresh_of(GROUP, FORWARD, NORMFUSE_F32, N, C, 1, 1, C);
    add_running();
    expect_refused(__LINE__, NORMFUSE_BAD_SHAPE, "tensors.running_var");
    fresh(BATCH, APPLY);
    poison();
    *(double *)(void *)arena[STATS] = 1.0;
    CHECK(call_it() == NORMFUSE_BAD_SHAPE && strstr(normfuse_last_error(), "tensors.stats") != NULL,
          "merged stats of one value: %s", normfuse_last_error());
    /* Each of the counts; one value is enough for a norm group that no running statistics are made of. */
    for (int operator = GROUP; operator <= BATCH; operator++)
        for (int i = 0; i < (operator == GROUP ? N * C : C); i++)
            for (int updates = 0; updates < 2; updates++) {
                fresh_of((enum operator)operator, APPLY, NORMFUSE_F32, N, C, H, W, C);
                if (updates)
                    add_running();
                for (int j = 0; j < N * C; j++)
                    memcpy(arena[STATS] + j * 24, (double[]){j == i ? 1 : 4, 0, 0}, 24);
                memcpy(before, arena, sizeof arena);
                const normfuse_status status = call_it();
                const bool is_refused = operator == BATCH || updates;
                CHECK(status == (is_refused ? NORMFUSE_BAD_SHAPE : NORMFUSE_OK), "operator %d, count %d: status %d, %s",
                      operator, i, (int)status, normfuse_last_error());
                CHECK(!is_refused || (strstr(normfuse_last_error(), "more than 1 value") != NULL &&
                                      memcmp(before, arena, sizeof arena) == 0), "operator %d, count %d: %s", operator,
                                      i,
                      normfuse_last_error());
            }
    fresh_of(BATCH, STATISTICS, NORMFUSE_F32, 1, C, 1, 1, 1);
    expect_accepted(__LINE__);
    fresh_of(BATCH, BACKWARD_SUMS, NORMFUSE_F32, 1, C, 1, 1, 1);
    expect_accepted(__LINE__);
    fresh_of(BATCH, FORWARD, NORMFUSE_F32, 1, C, 1, 1, 1);
    evaluate();
    expect_accepted(__LINE__);
    fresh_of(GROUP, FORWARD, NORMFUSE_F32, N, C, 1, 1, C);
    expect_accepted(__LINE__);

    /* Any shape of that many elements. */
    ACCEPTED(GROUP, FORWARD, SHAPE(MEAN, NORMFUSE_F32, N * GROUPS));
    ACCEPTED(GROUP, FORWARD, SHAPE(RSTD, NORMFUSE_F32, N, GROUPS, 1, 1));
    ACCEPTED(BATCH, FORWARD, SHAPE(MEAN, NORMFUSE_F64, 1, C, 1, 1));
    ACCEPTED(AFFINE, BACKWARD, SHAPE(WEIGHT, NORMFUSE_F32, N, C); SHAPE(BIAS, NORMFUSE_BF16, N, C);
             SHAPE(DWEIGHT, NORMFUSE_F32, N, C); SHAPE(DBIAS, NORMFUSE_F64, N, C));
    /* Zero to three spatial axes. */
    for (int32_t ndim = 2; ndim <= 5; ndim++) {
        const int64_t sizes[] = {2, 4, 3, 2, 2};
        for (int last = 0; last < 2; last++) {
            fresh(BATCH, BACKWARD);
            for (int slot = 0; slot < SLOTS; slot++)
                if (f.t[slot].ndim == 4)
                    shape((enum slot)slot, NORMFUSE_F32, last == 1, ndim, sizes);
            expect_accepted(__LINE__);
        }
    }
    /* Empty in each axis, every call. */
    for (int axis = 0; axis < 3; axis++)
        for (int operator = GROUP; operator <= CHANNEL; operator++)
            for (int call = FORWARD; call <= BACKWARD_SCRATCH; call++) {
                if (operator >= AFFINE && call >= STATISTICS && call <= BACKWARD_APPLY)
                    continue;
                fresh_of((enum operator)operator, (enum call)call, NORMFUSE_F32, axis == 0 ? 0 : N, axis == 1 ? 0 : C,
                         axis == 2 ? 0 : H, W, GROUPS);
                expect_accepted(__LINE__);
                for (int slot = 0; slot < SLOTS; slot++)
                    if (is_big(slot))
                        f.t[slot].data = NULL;
                expect_accepted(__LINE__);
                /* Running statistics: to be updated, or of an evaluation */
                if (operator >= AFFINE || call == STATISTICS || call == BACKWARD_SUMS || call == BACKWARD_APPLY)
                    continue;
                for (int evaluates = 0; evaluates < (call == APPLY ? 1 : 2); evaluates++) {
                    if (!evaluates && (call == BACKWARD || call == BACKWARD_SCRATCH))
                        continue;
                    const int64_t channels = axis == 1 ? 0 : C;
                    fresh_of((enum operator)operator, (enum call)call, NORMFUSE_F32, axis == 0 ? 0 : N, channels,
                             axis == 2 ? 0 : H, W, channels);
                    if (evaluates)
                        evaluate();
                    else
                        add_running();
                    absent(STATS);
                    absent(SUMS);
                    if (call == APPLY)
                        operator == GROUP ? SHAPE(STATS, NORMFUSE_F64, axis == 0 ? 0 : N, channels, 3)
                                          : SHAPE(STATS, NORMFUSE_F64, channels, 3);
                    expect_accepted(__LINE__);
                }
            }
    fresh_of(GROUP, FORWARD, NORMFUSE_F32, N, 0, H, W, 0); /* instance norm of no channels */
    expect_accepted(__LINE__);
    fresh_of(BATCH, FORWARD, NORMFUSE_F32, 0, C, H, W, 0);
    add_running();
    poison();
    memcpy(before, arena, sizeof arena);
    CHECK(call_it() == NORMFUSE_OK, "an empty batch: %s", normfuse_last_error());
    CHECK(!problem_of_fixture().has_running_momentum, "an empty batch is to update the running statistics");
    CHECK(memcmp(arena[RUNNING_MEAN], before[RUNNING_MEAN], SLOT_BYTES) == 0 &&
              memcmp(arena[RUNNING_VAR], before[RUNNING_VAR], SLOT_BYTES) == 0,
          "an empty batch changed the running statistics");

    /* Sums over nothing are 0; nothing is added to what a call continues. */
    static const struct {
        enum operator operator;
        enum call call;
        enum slot slot;
        size_t bytes;
    } sums[] = {{GROUP, BACKWARD, DWEIGHT, C * 4},  {GROUP, BACKWARD, DBIAS, C * 4},
                {BATCH, BACKWARD, DWEIGHT, C * 4},  {AFFINE, BACKWARD, DBIAS, C * 4},
                {BATCH, STATISTICS, STATS, C * 24}, {BATCH, BACKWARD_SUMS, SUMS, C * 16}};
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            fresh_of(sums[i].operator, sums[i].call, NORMFUSE_F32, 0, C, H, W, GROUPS);
            f.group.flags = f.batch.flags = f.affine.flags = f.channel.flags = accumulate ? NORMFUSE_ACCUMULATE : 0;
            poison();
            memset(before, accumulate ? 0x3d : 0, sizeof before);
            CHECK(call_it() == NORMFUSE_OK && memcmp(arena[sums[i].slot], before, sums[i].bytes) == 0,
                  "sums over an empty batch, row %zu, accumulate %d: %s", i, accumulate, normfuse_last_error());
        }
    fresh_of(BATCH, APPLY, NORMFUSE_F32, 0, C, H, W, GROUPS);
    add_running();
    f.batch.momentum = 1;
    for (int c = 0; c < C; c++)
        memcpy(arena[STATS] + c * 24, (double[]){4, 1.5, 1}, 24);
    CHECK(call_it() == NORMFUSE_OK && ((float *)(void *)arena[MEAN])[C - 1] == 1.5f &&
              ((float *)(void *)arena[RUNNING_MEAN])[0] == 1.5f,
          "an empty shard takes the merged statistics");
}

static void test_types_and_devices(void)
{
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.x has a dtype", f.t[X].dtype.lanes = 2);
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.x has a dtype", f.t[X].dtype.lanes = 0);
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.x has a dtype", f.t[X].dtype.bits = 8);
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.x has a dtype", f.t[X].dtype.code = 0);
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.x has a dtype", f.t[X].dtype.code = 4);
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.weight has a dtype", f.t[WEIGHT].dtype.bits = 128);
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.y must have the dtype of tensors.x",
            SHAPE(Y, NORMFUSE_F16, N, C, H, W));
    REFUSED(GROUP, BACKWARD, UNSUPPORTED, "tensors.dy must", SHAPE(DY, NORMFUSE_F64, N, C, H, W));
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.mean must be f64 or f32", SHAPE(MEAN, NORMFUSE_BF16, N, GROUPS));
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.rstd must be f32", SHAPE(RSTD, NORMFUSE_F64, N, GROUPS));
    REFUSED(GROUP, STATISTICS, UNSUPPORTED, "tensors.stats must be f64", SHAPE(STATS, NORMFUSE_F32, N, GROUPS, 3));
    REFUSED(BATCH, BACKWARD_APPLY, UNSUPPORTED, "tensors.sums must be f64", SHAPE(SUMS, NORMFUSE_F32, C, 2));
    fresh_of(GROUP, FORWARD, NORMFUSE_F64, N, C, H, W, GROUPS);
    SHAPE(MEAN, NORMFUSE_F32, N, GROUPS);
    expect_refused(__LINE__, NORMFUSE_UNSUPPORTED, "tensors.mean must be f64");
    fresh_of(GROUP, FORWARD, NORMFUSE_F64, N, C, H, W, GROUPS);
    SHAPE(RSTD, NORMFUSE_F32, N, GROUPS);
    expect_refused(__LINE__, NORMFUSE_UNSUPPORTED, "tensors.rstd must be f64");

    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.x is on a device of type 7", f.t[X].device.device_type = 7);
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.y is on device", f.t[Y].device.device_type = NORMFUSE_CUDA);
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.weight is on device", f.t[WEIGHT].device.device_id = 1);
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.mean is on device", f.t[MEAN].device.device_type = 0);

    ACCEPTED(GROUP, FORWARD, SHAPE(MEAN, NORMFUSE_F64, N, GROUPS));
    for (int type = NORMFUSE_F64; type <= NORMFUSE_BF16; type++)
        for (int parameter = NORMFUSE_F64; parameter <= NORMFUSE_BF16; parameter++) {
            const normfuse_type p = (normfuse_type)parameter;
            fresh_of(GROUP, BACKWARD, (normfuse_type)type, N, C, H, W, GROUPS);
            SHAPE(WEIGHT, p, C);
            SHAPE(BIAS, (normfuse_type)(3 - parameter), C);
            SHAPE(SCALE, p, N, C);
            SHAPE(DWEIGHT, p, C);
            SHAPE(DSHIFT, p, N, C);
            expect_accepted(__LINE__);
            fresh_of(BATCH, FORWARD, (normfuse_type)type, N, C, H, W, GROUPS);
            SHAPE(RUNNING_MEAN, p, C);
            SHAPE(RUNNING_VAR, (normfuse_type)(3 - parameter), C);
            expect_accepted(__LINE__);
        }
}

static void test_pointers(void)
{
    static const enum slot forward[] = {X, PRE_ADD, POST_ADD, WEIGHT, BIAS, SCALE, SHIFT, Y, U, MEAN, RSTD};
    for (size_t i = 0; i < sizeof forward / sizeof *forward; i++) {
        const enum slot slot = forward[i];
        REFUSED(GROUP, FORWARD, BAD_POINTER, ".data is NULL", f.t[slot].data = NULL);
        REFUSED(GROUP, FORWARD, BAD_POINTER, "multiple of 4", f.t[slot].data = arena[slot] + 2);
        REFUSED(GROUP, FORWARD, BAD_POINTER, "multiple of 4", f.t[slot].byte_offset = 3);
        ACCEPTED(GROUP, FORWARD, f.t[slot].data = arena[slot] + 1; f.t[slot].byte_offset = 3);
    }
    REFUSED(GROUP, FORWARD, BAD_POINTER, "tensors.y.data", f.t[Y].data = NULL; f.t[Y].byte_offset = 64);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.y reach", f.t[Y].byte_offset = UINT64_MAX - 63);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "tensors.y reach", f.t[Y].data = (void *)(UINTPTR_MAX - 63));
    REFUSED(GROUP, STATISTICS, BAD_POINTER, "tensors.stats", f.t[STATS].byte_offset = 4);
    REFUSED(BATCH, BACKWARD_APPLY, BAD_POINTER, "tensors.sums", f.t[SUMS].data = NULL);
    fresh_of(GROUP, FORWARD, NORMFUSE_F64, N, C, H, W, GROUPS);
    f.t[X].byte_offset = 4;
    expect_refused(__LINE__, NORMFUSE_BAD_POINTER, "tensors.x");
    fresh_of(GROUP, FORWARD, NORMFUSE_BF16, N, C, H, W, GROUPS);
    f.t[X].byte_offset = 2;
    expect_accepted(__LINE__);
}

/* ---- strides and overlap -------------------------------------------------------------------------------------- */

static void strides(enum slot slot, int64_t n, int64_t c, int64_t h, int64_t w)
{
    memcpy(f.axes[slot].strides, (int64_t[]){n, c, h, w}, 4 * sizeof(int64_t));
}

static void strides_of_all(int64_t n, int64_t c, int64_t h, int64_t w)
{
    for (int slot = 0; slot < SLOTS; slot++)
        if (is_big(slot))
            strides((enum slot)slot, n, c, h, w);
}

static void test_strides(void)
{
    enum { S = H * W, WIDE = 2 * C };
    ACCEPTED(GROUP, FORWARD, f.t[X].strides = NULL; f.t[WEIGHT].strides = NULL; f.t[MEAN].strides = NULL);
    ACCEPTED(GROUP, FORWARD, strides_of_all(C * S, 1, W * C, C)); /* channels-last */
    ACCEPTED(GROUP, FORWARD, strides(X, C * S, 1, W * C, C));     /* y in the other layout */
    ACCEPTED(GROUP, BACKWARD, strides(DY, C * S, 1, W * C, C));
    ACCEPTED(GROUP, FORWARD, strides_of_all(WIDE * S, S, W, 1));                           /* channel slice */
    ACCEPTED(GROUP, FORWARD, strides_of_all(WIDE * S, 1, W * WIDE, WIDE));                 /* of channels-last */
    ACCEPTED(GROUP, FORWARD, strides(X, 2 * C * S, S, W, 1));                              /* every other sample */
    ACCEPTED(GROUP, FORWARD, strides(X, 0, S, W, 1));                                      /* one sample, broadcast */
    ACCEPTED(GROUP, FORWARD, strides(X, -C * S, S, W, 1); f.t[X].byte_offset = C * S * 4); /* backwards */
    ACCEPTED(GROUP, FORWARD, strides_of_all(S, N * S, W, 1));                              /* C, N, spatial in memory */
    ACCEPTED(GROUP, FORWARD, strides(X, C * (S + 1), S + 1, W, 1));                        /* padded channels */
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "strides of tensors.x", strides(X, C * S, S, W, 2));
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "strides of tensors.x", strides(X, C * S, S, W + 1, 1));
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "strides of tensors.x", strides(X, C * S, S, 1, H));
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "strides of tensors.x", strides(X, C * S, S - 1, W, 1));
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "strides of tensors.x", strides(X, C * S, 0, W, 1));
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "strides of tensors.x", strides(X, C * S, -S, W, 1));
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "strides of tensors.x", strides(X, C * S, S, W, -1));
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "strides of tensors.x", strides(X, C * S, 1, W * (C - 1), C - 1));
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "strides of tensors.y", strides(Y, C * S, S, W, 2));
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "strides of tensors.x", strides(X, C * S, S, INT64_MAX, INT64_MAX / 2));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "strides of tensors.x", strides(X, INT64_MAX, S, W, 1));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "strides of tensors.x", strides(X, INT64_MIN, S, W, 1));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "strides of tensors.x", strides(X, -(INT64_C(1) << 60), S, W, 1));
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "strides of tensors.x", strides(X, C * S, INT64_MAX / 4, W, 1));
    /* 3 * stride is 2 modulo 2^64. */
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "strides of tensors.x", strides(X, C * S, INT64_C(6148914691236517206), W, 1));
    REFUSED(GROUP, FORWARD, UNSUPPORTED, "tensors.mean is not row-major", f.axes[MEAN].strides[1] = 2);
    REFUSED(BATCH, APPLY, UNSUPPORTED, "tensors.stats is not row-major", f.axes[STATS].strides[0] = 4);
    REFUSED(GROUP, FORWARD, BAD_SHAPE, "strides of tensors.weight", f.axes[WEIGHT].strides[0] = INT64_MAX / 2);

    /* Parameters of any strides; those written must not overlap themselves. */
    ACCEPTED(GROUP, FORWARD, f.axes[WEIGHT].strides[0] = 7);
    ACCEPTED(GROUP, FORWARD, f.axes[WEIGHT].strides[0] = 0);
    ACCEPTED(GROUP, FORWARD, f.axes[WEIGHT].strides[0] = -1; f.t[WEIGHT].byte_offset = 12);
    ACCEPTED(GROUP, FORWARD, f.axes[SCALE].strides[0] = 1; f.axes[SCALE].strides[1] = N);
    ACCEPTED(GROUP, BACKWARD, f.axes[DSCALE].strides[0] = 1; f.axes[DSCALE].strides[1] = N);
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dweight", f.axes[DWEIGHT].strides[0] = 0);
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dscale", f.axes[DSCALE].strides[0] = 0);
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dscale", f.axes[DSCALE].strides[0] = 3);
    REFUSED(BATCH, FORWARD, OVERLAP, "tensors.running_mean", add_running(); f.axes[RUNNING_MEAN].strides[0] = 0);
    ACCEPTED(BATCH, FORWARD, evaluate(); f.axes[RUNNING_MEAN].strides[0] = 0);
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.y", strides(Y, 0, S, W, 1));
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.y", strides(Y, S, S, W, 1));
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.u", strides(U, S * C - 1, S, W, 1));

    /* Strides of axes of one element are ignored. */
    fresh_of(GROUP, FORWARD, NORMFUSE_F32, 1, C, H, 1, GROUPS);
    strides(X, INT64_MIN, H, 1, INT64_MAX);
    strides(Y, 0, H, 1, 0);
    expect_accepted(__LINE__);
    fresh_of(GROUP, FORWARD, NORMFUSE_F32, N, 1, H, W, 1);
    strides(X, S, -9, W, 1);
    expect_accepted(__LINE__);
    strides(X, 8 * S, 3, 8 * W, 8); /* one channel of a channels-last tensor of eight */
    expect_accepted(__LINE__);
    fresh_of(GROUP, FORWARD, NORMFUSE_F32, N, C, 1, 1, GROUPS);
    strides(X, 1, N, -1, -1);
    expect_accepted(__LINE__);
}

static void test_overlap(void)
{
    enum { S = H * W, ALL = C * S };
    /* In place. */
    static const enum slot pairs[][2] = {{Y, X}, {Y, PRE_ADD}, {Y, POST_ADD}, {U, X}, {U, PRE_ADD}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        const enum slot output = pairs[i][0], input = pairs[i][1];
        ACCEPTED(GROUP, FORWARD, place(output, input, 0));
        ACCEPTED(BATCH, FORWARD, strides_of_all(ALL, 1, W * C, C); place(output, input, 0));
        REFUSED(GROUP, FORWARD, OVERLAP, output == Y ? "tensors.y" : "tensors.u", place(output, input, 1));
        REFUSED(GROUP, FORWARD, OVERLAP, "an output, overlaps", place(output, input, S));
        REFUSED(GROUP, FORWARD, OVERLAP, "an output, overlaps", place(output, input, 2 * ALL - 1));
        REFUSED(GROUP, FORWARD, OVERLAP, "an output, overlaps", place(output, input, 0);
                strides(output, ALL, 1, W * C, C));
        ACCEPTED(GROUP, FORWARD, place(output, input, 2 * ALL));
    }
    ACCEPTED(GROUP, FORWARD, place(Y, X, 0); place(U, PRE_ADD, 0));
    static const enum slot backward[][2] = {{DX, DY}, {DX, X}, {DX, DU}, {DPOST_ADD, DY}};
    for (size_t i = 0; i < sizeof backward / sizeof *backward; i++)
        ACCEPTED(GROUP, BACKWARD, place(backward[i][0], backward[i][1], 0));
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.u", place(U, POST_ADD, 0));
    REFUSED(GROUP, FORWARD, OVERLAP, "overlaps tensors.u", place(Y, X, 0); place(U, X, 0));
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.u", place(U, X, 0); place(POST_ADD, X, 0)); /* read after u is written */
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dx", place(DX, PRE_ADD, 0));
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dx", place(DX, POST_ADD, 0));
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dpost_add", place(DPOST_ADD, X, 0));
    REFUSED(GROUP, BACKWARD, OVERLAP, "overlaps tensors.dpost_add", place(DX, DY, 0); place(DPOST_ADD, DY, 0));
    /* Inputs may overlap as they like. */
    ACCEPTED(GROUP, FORWARD, place(PRE_ADD, X, 0); place(POST_ADD, X, 3); place(BIAS, WEIGHT, 1));

    /* Slices of one buffer. */
    ACCEPTED(GROUP, FORWARD, strides_of_all(2 * ALL, S, W, 1); place(Y, X, ALL));           /* halves of the channels */
    ACCEPTED(GROUP, FORWARD, strides_of_all(2 * ALL, 1, 2 * W * C, 2 * C); place(Y, X, C)); /* of channels-last */
    ACCEPTED(GROUP, FORWARD, strides_of_all(2 * ALL, S, W, 1); place(X, Y, ALL));           /* the other way round */
    ACCEPTED(GROUP, FORWARD, strides_of_all(3 * ALL, S, W, 1); place(U, X, ALL); place(Y, X, 2 * ALL));
    ACCEPTED(GROUP, FORWARD, strides_of_all(3 * ALL, 1, 3 * W * C, 3 * C); place(U, X, 2 * C); place(Y, X, C));
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.y", strides_of_all(2 * ALL, S, W, 1); place(Y, X, ALL - 1));
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.y", strides_of_all(2 * ALL, S, W, 1); place(Y, X, ALL + 1));
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.y", strides_of_all(2 * ALL, 1, 2 * W * C, 2 * C); place(Y, X, C - 1));
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.y", strides_of_all(2 * ALL, 1, 2 * W * C, 2 * C); place(Y, X, C + 1));
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.y", strides_of_all(2 * ALL, 1, 2 * W * C, 2 * C); place(Y, X, 2 * C));
    /* The halves of a chunked embedding's gradient. */
    ACCEPTED(GROUP, BACKWARD, f.axes[DSCALE].strides[0] = f.axes[DSHIFT].strides[0] = 2 * C; place(DSHIFT, DSCALE, C));
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dscale", f.axes[DSCALE].strides[0] = f.axes[DSHIFT].strides[0] = 2 * C;
            place(DSHIFT, DSCALE, C - 1));
    ACCEPTED(GROUP, BACKWARD, f.axes[DWEIGHT].strides[0] = f.axes[DBIAS].strides[0] = 2; place(DBIAS, DWEIGHT, 1));
    /* Samples backwards in memory: the second one lies before the address of the first. */
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.y", strides(X, -ALL, S, W, 1); place(X, X, 2 * ALL); place(Y, X, 0));
    ACCEPTED(GROUP, FORWARD, strides(X, -ALL, S, W, 1); place(X, X, 3 * ALL); place(Y, X, 0));

    /* Parameters and statistics. */
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dweight", place(DWEIGHT, WEIGHT, 0));
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dweight", place(DWEIGHT, DBIAS, 2));
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dbias", place(DBIAS, X, 5));
    REFUSED(GROUP, BACKWARD, OVERLAP, "tensors.dx", place(MEAN, DX, 5));
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.mean", place(MEAN, RSTD, 1));
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.y", place(RSTD, Y, 7));
    REFUSED(GROUP, FORWARD, OVERLAP, "tensors.y", place(WEIGHT, Y, 0));
    REFUSED(BATCH, FORWARD, OVERLAP, "tensors.running_mean", add_running(); place(RUNNING_MEAN, RUNNING_VAR, 0));
    REFUSED(BATCH, FORWARD, OVERLAP, "tensors.running_mean", add_running(); place(RUNNING_MEAN, WEIGHT, 0));
    ACCEPTED(BATCH, FORWARD, evaluate(); place(RUNNING_MEAN, WEIGHT, 0));
    REFUSED(BATCH, STATISTICS, OVERLAP, "tensors.stats", place(STATS, X, 0));
    REFUSED(BATCH, BACKWARD_SUMS, OVERLAP, "tensors.sums", place(SUMS, DY, 2));
    REFUSED(BATCH, APPLY, OVERLAP, "tensors.y", place(STATS, Y, 2));
    ACCEPTED(BATCH, BACKWARD, place(MEAN, WEIGHT, 0); place(RSTD, WEIGHT, 2));
}

/* Every pair of slices x and y of one small buffer: refused if and only if they share an element, for strides that do
 * not interleave. */
static void test_overlap_exhaustively(void)
{
    static const int64_t layouts[][4] = {{16, 4, 2, 1}, {24, 4, 2, 1},  {4, 8, 2, 1},  {24, 5, 2, 1},
                                         {16, 1, 8, 4}, {32, 1, 10, 5}, {40, 1, 16, 8}};
    for (size_t layout = 0; layout < sizeof layouts / sizeof *layouts; layout++)
        for (int64_t distance = -90; distance <= 90; distance++) {
            fresh_of(AFFINE, FORWARD, NORMFUSE_F32, 2, 4, 2, 2, 1);
            absent(POST_ADD);
            const int64_t *const s = layouts[layout];
            strides(X, s[0], s[1], s[2], s[3]);
            strides(Y, s[0], s[1], s[2], s[3]);
            place(X, X, 100);
            place(Y, X, 100 + distance);
            bool taken[512] = {0}, shared = false;
            for (int pass = 0; pass < 2; pass++)
                for (int64_t i = 0; i < 32; i++) {
                    const int64_t at = 100 + pass * distance + (i >> 4) * s[0] + (i >> 2 & 3) * s[1] +
                                       (i >> 1 & 1) * s[2] + (i & 1) * s[3];
                    shared |= pass == 1 && taken[at];
                    taken[at] |= pass == 0;
                }
            const bool legal = distance == 0 || !shared;
            const normfuse_status status = call_it();
            CHECK(status == (legal ? NORMFUSE_OK : NORMFUSE_OVERLAP), "layout %zu, distance %d: status %d", layout,
                  (int)distance, (int)status);
        }
}

/* ---- the picture of a problem ---------------------------------------------------------------------------------- */

static bool is_view(const struct normfuse_view *view, enum slot slot, ptrdiff_t batch, ptrdiff_t channel,
                    ptrdiff_t position)
{
    return view->data == (char *)f.t[slot].data + f.t[slot].byte_offset && view->batch == batch &&
           view->channel == channel && view->position == position;
}

static void test_pictures(void)
{
    enum { S = H * W, ALL = C * S };
    fresh(GROUP, FORWARD);
    struct normfuse_problem p = problem_of_fixture();
    CHECK(!p.columns && p.n == N && p.c == C && p.s == S && p.groups == GROUPS && p.sets == NORMFUSE_SETS_GROUP &&
              p.phases == (NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_APPLY) && p.set_values == C / GROUPS * S &&
              !p.has_running_momentum && !p.accumulate && !p.evaluate && p.dy.data == NULL && p.stats == NULL,
          "group norm of contiguous x");
    CHECK(is_view(&p.x, X, ALL, S, 1) && is_view(&p.y, Y, ALL, S, 1), "contiguous views");
    CHECK(p.mean.batch == GROUPS && p.mean.channel == 1 && p.mean.type == NORMFUSE_F32, "mean of group norm");
    CHECK(p.weight.batch == 0 && p.weight.channel == 1 && p.scale.batch == C && p.scale.channel == 1, "parameters");

    strides(X, ALL, 1, W * C, C);
    p = problem_of_fixture();
    CHECK(p.columns && is_view(&p.x, X, ALL, 1, C) && is_view(&p.y, Y, ALL, S, 1), "channels-last x, contiguous y");
    absent(Y);
    CHECK(problem_of_fixture().phases == NORMFUSE_PHASE_STATISTICS, "without y: statistics alone");

    fresh_of(BATCH, FORWARD, NORMFUSE_F32, N, C, 1, 1, 1);
    add_running();
    f.batch.momentum = 0.25;
    p = problem_of_fixture();
    CHECK(p.columns && is_view(&p.x, X, C, 1, 0) && p.sets == NORMFUSE_SETS_BATCH && p.groups == C &&
              p.set_values == N && p.has_running_momentum && p.momentum == 0.25 && p.mean.batch == 0,
          "batch norm of [N, C, 1, 1]: rows of columns");
    f.batch.flags = NORMFUSE_CUMULATIVE;
    f.batch.batches_seen = 3;
    CHECK(problem_of_fixture().momentum == 0.25, "cumulative average");
    strides(X, 1, N, 1, 1);
    p = problem_of_fixture();
    CHECK(!p.columns && is_view(&p.x, X, 1, N, 1) && is_view(&p.y, Y, C, 1, 1), "transposed [N, C]: rows of 1");

    fresh_of(GROUP, FORWARD, NORMFUSE_F32, N, 1, H, W, 1);
    p = problem_of_fixture();
    CHECK(!p.columns && is_view(&p.x, X, S, 0, 1), "one channel: rows");
    strides(X, 8 * S, 1, 8 * W, 8);
    p = problem_of_fixture();
    CHECK(p.columns && is_view(&p.x, X, 8 * S, 1, 8) && is_view(&p.y, Y, S, 1, 1), "one channel of eight: columns");
    fresh_of(GROUP, FORWARD, NORMFUSE_F32, 1, 1, 1, 1, 1);
    p = problem_of_fixture();
    CHECK(!p.columns && is_view(&p.x, X, 0, 0, 1), "one value: rows");

    fresh(BATCH, BACKWARD);
    evaluate();
    p = problem_of_fixture();
    CHECK(p.sets == NORMFUSE_SETS_NONE && p.evaluate && p.mean.data == NULL &&
              p.running_var.data == (char *)arena[RUNNING_VAR] && !p.has_running_momentum,
          "evaluation");
    fresh(BATCH, BACKWARD_APPLY);
    f.batch.set_values = 1000;
    p = problem_of_fixture();
    CHECK(p.set_values == 1000 && p.phases == NORMFUSE_PHASE_BACKWARD_APPLY && p.sums == (double *)(void *)arena[SUMS],
          "backward_apply");
    fresh(AFFINE, BACKWARD);
    f.affine.activation = NORMFUSE_LEAKY_RELU;
    f.affine.flags = NORMFUSE_ACCUMULATE;
    p = problem_of_fixture();
    CHECK(p.sets == NORMFUSE_SETS_NONE && !p.evaluate && p.accumulate && p.act_param == 0.01, "affine backward");
    SHAPE(WEIGHT, NORMFUSE_F16, N, C);
    SHAPE(BIAS, NORMFUSE_F32, N, C);
    SHAPE(DWEIGHT, NORMFUSE_F32, N, C);
    SHAPE(DBIAS, NORMFUSE_F32, N, C);
    f.affine.flags = NORMFUSE_HAS_ACT_PARAM;
    p = problem_of_fixture();
    CHECK(p.weight.batch == C && p.weight.type == NORMFUSE_F16 && p.act_param == 0.0, "affine per sample");
}

/* ---- the rest of the interface --------------------------------------------------------------------------------- */

/* ---- tensors without elements --------------------------------------------------------------------------------- */

static bool holds(enum slot slot, double value)
{
    const normfuse_tensor *const tensor = &f.t[slot];
    int64_t elements = 1;
    for (int32_t a = 0; a < tensor->ndim; a++)
        elements *= tensor->shape[a];
    for (int64_t i = 0; i < elements; i++)
        if (tensor->dtype.bits == 64 ? ((double *)(void *)arena[slot])[i] != value
                                     : ((float *)(void *)arena[slot])[i] != (float)value)
            return false;
    return true;
}

/* The outputs of a call of the fixture, whose x has no element: means of 0, the rstd of a variance of 0, sums of 0 and
 * counts of 0; nothing where it accumulates. And no byte else. */
static void expect_empty(int line)
{
    const uint32_t flags = f.operator == GROUP ? f.group.flags : f.operator == BATCH ? f.batch.flags
                           : f.operator == AFFINE ? f.affine.flags : f.channel.flags;
    const bool continues = (flags & NORMFUSE_ACCUMULATE) != 0, forward = f.call == FORWARD;
    poison();
    memcpy(before, arena, sizeof arena);
    const normfuse_status got = call_it();
    harness_check(got == NORMFUSE_OK, __FILE__, line, "status %d: %s", (int)got, normfuse_last_error());
    for (int slot = 0; slot < SLOTS; slot++) {
        const normfuse_tensor *const *const given = &f.tensors.x + slot;
        const bool is_output = forward                ? slot == MEAN || slot == RSTD
                               : f.call == STATISTICS ? slot == STATS && !continues
                               : f.call == BACKWARD_SUMS
                                   ? slot == SUMS && !continues
                                   : ((slot == DWEIGHT || slot == DBIAS || slot == DPRE_BIAS) && !continues) ||
                                       slot == DSCALE ||
                                         slot == DSHIFT || (slot == DSLOPE && !continues);
        if (f.call == BACKWARD_SUMS && slot == DSLOPE && !continues && *given != NULL) {
            harness_check(holds(DSLOPE, 0), __FILE__, line, "dslope over no values");
            continue;
        }
        if (is_output && *given != NULL)
            harness_check(holds((enum slot)slot, slot == RSTD ? 1 / sqrt(1e-5) : 0), __FILE__, line,
                          "operator %d, call %d, flags %u, output %d: %g", (int)f.operator, (int)f.call, flags, slot,
                          ((float *)(void *)arena[slot])[0]);
        else
            harness_check(memcmp(arena[slot], before[slot], SLOT_BYTES) == 0, __FILE__, line,
                          "operator %d, call %d, flags %u: slot %d was written", (int)f.operator, (int)f.call, flags,
                          slot);
    }
}

static void test_empty(void)
{
    static const int64_t sizes[][4] = {{0, C, H, W}, {N, C, 0, W}, {N, 0, H, W}, {0, 0, 0, 0}, {N, C, H, 0}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int operator = GROUP; operator <= CHANNEL; operator++)
            for (int call = FORWARD; call <= (operator >= AFFINE ? BACKWARD : BACKWARD_SUMS); call++)
                for (int option = 0; option < 3; option++) {
                    const int64_t *const of = sizes[i];
                    if (call == APPLY)
                        continue;
                    fresh_of((enum operator)operator, (enum call)call, NORMFUSE_F32, of[0], of[1], of[2], of[3],
                             GROUPS);
                    if (option == 1 && call != FORWARD)
                        f.group.flags = f.batch.flags = f.affine.flags = f.channel.flags = NORMFUSE_ACCUMULATE;
                    if (option == 1 && call == FORWARD && operator == BATCH)
                        add_running(); /* and nothing to update it with */
                    if (option == 2 && (call > BACKWARD || operator >= AFFINE))
                        continue;
                    if (option == 2)
                        evaluate();
                    expect_empty(__LINE__);
                    if (call == STATISTICS)
                        continue;
                    prelu(of[1]);
                    expect_empty(__LINE__);
                    prelu(1);
                    expect_empty(__LINE__);
                }
    /* One statistic alone */
    fresh_of(GROUP, FORWARD, NORMFUSE_F32, N, C, 0, W, GROUPS);
    absent(RSTD);
    poison();
    CHECK(call_it() == NORMFUSE_OK && holds(MEAN, 0), "means over no values: %s", normfuse_last_error());
    /* Gradients from merged sums, one row of the group's and one of the batch's */
    for (int operator = GROUP; operator <= BATCH; operator++) {
        fresh_of((enum operator)operator, BACKWARD_APPLY, NORMFUSE_F32, N, C, 0, W, GROUPS);
        for (int i = 0; i < N * C; i++) {
            memcpy(arena[SUMS] + i * 16, (double[]){2, 3}, 16);
            memcpy(arena[RSTD] + i * 4, (float[]){0.5f}, 4);
            memcpy(arena[SCALE] + i * 4, (float[]){1}, 4);
            memcpy(arena[WEIGHT] + i * 4, (float[]){5}, 4);
            memcpy(arena[BIAS] + i * 4, (float[]){7}, 4);
        }
        CHECK(call_it() == NORMFUSE_OK && holds(DBIAS, operator == GROUP ? N * 2 * 2 : 2) &&
                  holds(DWEIGHT, operator == GROUP ? N * 2 * 1.5 : 1.5),
              "gradients from sums: %s", normfuse_last_error());
        if (operator == GROUP)
            CHECK(holds(DSCALE, 5 * 1.5 + 7 * 2) && holds(DSHIFT, 2), "gradients per sample from sums");
    }
    /* Instance norm: running statistics of merged ones, the mean over the samples that have values */
    fresh_of(GROUP, APPLY, NORMFUSE_F32, N, C, 0, W, C);
    add_running();
    f.group.momentum = 1;
    for (int i = 0; i < N * C; i++)
        memcpy(arena[STATS] + i * 24, (double[]){5, i < C ? 1.5 : 2.5, 8}, 24);
    CHECK(call_it() == NORMFUSE_OK && holds(RUNNING_MEAN, 2) && holds(RUNNING_VAR, 2) &&
              ((float *)(void *)arena[MEAN])[N * C - 1] == 2.5f,
          "merged statistics of instance norm: %s", normfuse_last_error());
}

/* NORMFUSE_ACCUMULATE of a backward: dweight, dbias and dpre_bias are added to, what else there is is written. */
static void test_accumulate(void)
{
    for (int operator = GROUP; operator <= CHANNEL; operator++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            fresh((enum operator)operator, BACKWARD);
            f.group.flags = f.batch.flags = f.affine.flags = f.channel.flags = accumulate ? NORMFUSE_ACCUMULATE : 0;
            memset(arena, 0, sizeof arena);
            static const enum slot ones[] = {X, DY, WEIGHT, RSTD};
            for (size_t i = 0; i < sizeof ones / sizeof *ones; i++)
                for (int j = 0; j < N * C * H * W; j++)
                    ((float *)(void *)arena[ones[i]])[j] = 1;
            for (int i = 0; i < N * C; i++)
                ((float *)(void *)arena[DWEIGHT])[i] = ((float *)(void *)arena[DBIAS])[i] =
                    ((float *)(void *)arena[DSHIFT])[i] = ((float *)(void *)arena[DPRE_BIAS])[i] = 12;
            const double before_it = accumulate ? 12 : 0;
            CHECK(call_it() == NORMFUSE_OK && holds(DWEIGHT, before_it + N * H * W) &&
                  holds(DBIAS, before_it + N * H * W),
                  "operator %d, accumulate %d: %s", operator, accumulate, normfuse_last_error());
            if (operator == AFFINE) /* where dx is 1 */
                CHECK(holds(DPRE_BIAS, before_it + N * H * W), "accumulate %d: dpre_bias", accumulate);
            if (operator == GROUP || operator == CHANNEL)
                CHECK(holds(DSHIFT, H * W), "accumulate %d: dshift", accumulate);
        }
    /* Gradients [N, C] of one sample are not [C]. */
    fresh_of(AFFINE, BACKWARD, NORMFUSE_F32, 1, C, H, W, 1);
    prelu(C);
    static const enum slot of_samples[] = {WEIGHT, BIAS, DWEIGHT, DBIAS, PRE_BIAS, DPRE_BIAS};
    for (size_t i = 0; i < sizeof of_samples / sizeof *of_samples; i++)
        SHAPE(of_samples[i], NORMFUSE_F32, 1, C);
    f.affine.flags = NORMFUSE_ACCUMULATE;
    memset(arena, 0, sizeof arena);
    for (int i = 0; i < C * H * W; i++)
        ((float *)(void *)arena[DY])[i] = ((float *)(void *)arena[WEIGHT])[i] = 1;
    for (int i = 0; i < C * H * W; i++)
        ((float *)(void *)arena[POST_ADD])[i] = i % (H * W) < 7 ? -3 : 5;
    for (int i = 0; i < C; i++)
        ((float *)(void *)arena[DWEIGHT])[i] = ((float *)(void *)arena[DBIAS])[i] =
            ((float *)(void *)arena[DPRE_BIAS])[i] =
            ((float *)(void *)arena[DSLOPE])[i] = 12;
    CHECK(call_it() == NORMFUSE_OK && holds(DBIAS, H * W - 7) && holds(DWEIGHT, 0) && holds(DPRE_BIAS, H * W - 7) &&
              holds(DSLOPE, 12 - 3 * 7),
          "gradients of one sample: %s", normfuse_last_error());
}

/* dslope is added to, or written: by channel or for all. */
static void test_slope_gradient(void)
{
    for (int operator = GROUP; operator <= CHANNEL; operator++)
        for (int form = 0; form < 8; form++) {
            const bool accumulate = form & 1, one = form & 2, sums = form & 4;
            if (operator >= AFFINE && sums)
                continue;
            fresh((enum operator)operator, sums ? BACKWARD_SUMS : BACKWARD);
            prelu(one ? 1 : C);
            f.group.flags = f.batch.flags = f.affine.flags = f.channel.flags = accumulate ? NORMFUSE_ACCUMULATE : 0;
            memset(arena, 0, sizeof arena);
            for (int j = 0; j < N * C * H * W; j++) {
                ((float *)(void *)arena[DY])[j] = 2;
                ((float *)(void *)arena[POST_ADD])[j] = j % (H * W) < 7 ? -3 : 5; /* all of z */
            }
            for (int i = 0; i < C; i++)
                ((float *)(void *)arena[DSLOPE])[i] = 7;
            const double of_channel = -3 * 2 * N * 7;
            CHECK(call_it() == NORMFUSE_OK && holds(DSLOPE, (accumulate ? 7 : 0) + (one ? C * of_channel : of_channel)),
                  "operator %d, form %d: %g %s", operator, form, (double)((float *)(void *)arena[DSLOPE])[0],
                  normfuse_last_error());
        }
}

/* Sizes whose products or whose loops would never end, where no tensor has an element. */
static void test_vast_and_empty(void)
{
    enum { MANY = 40, MOST = 57 };
    static const struct {
        int64_t n, c, s, groups;
    } shapes[] = {{0, INT64_C(1) << MOST, 1, INT64_C(1) << 56}, {0, INT64_C(1) << MOST, 1, 1},
                  {0, INT64_C(1) << MOST, 1, INT64_C(1) << MOST}, {INT64_C(1) << MANY, 4, 0, 2},
                  {INT64_C(1) << (MOST - 1), 2, 0, 1}, {0, 4, INT64_C(1) << 55, 2},
                      {2, INT64_C(1) << 54, 0, INT64_C(1) << 20},
                  {5, 0, 1, INT64_C(1) << 62}, {INT64_C(1) << MOST, 0, 1, INT64_C(1) << 62},
                  {1, 0, INT64_C(1) << 56, INT64_C(1) << 62}};
    int called = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int operator = GROUP; operator <= CHANNEL; operator++)
            for (int call = FORWARD; call <= BACKWARD_SCRATCH; call++)
                for (int channels_last = 0; channels_last < 2; channels_last++) {
                    if (operator >= AFFINE && call > BACKWARD && call < FORWARD_SCRATCH)
                        continue;
                    fresh_of((enum operator)operator, (enum call)call, NORMFUSE_F64, shapes[i].n, shapes[i].c,
                             shapes[i].s, 1, shapes[i].groups);
                    bool possible = true;
                    for (int slot = 0; slot < SLOTS; slot++) {
                        if ((&f.tensors.x)[slot] == NULL)
                            continue;
                        double elements = 1;
                        for (int32_t a = 0; a < f.t[slot].ndim; a++)
                            elements *= (double)f.axes[slot].shape[a];
                        if (is_big(slot))
                            shape((enum slot)slot, NORMFUSE_F64, channels_last, 4,
                                  (int64_t[]){shapes[i].n, shapes[i].c, shapes[i].s, 1});
                        else if (elements * 8 > SLOT_BYTES && (slot == STATS || slot == SUMS || call == BACKWARD ||
                                                               (call >= BACKWARD_SUMS && call != FORWARD_SCRATCH)))
                            possible = possible && slot != STATS && slot != SUMS && slot != MEAN && slot != RSTD;
                        if (!is_big(slot) && elements * 8 > SLOT_BYTES)
                            absent((enum slot)slot);
                    }
                    if (!possible)
                        continue;
                    called++;
                    poison();
                    asked_bytes = 0;
                    CHECK(call_it() == NORMFUSE_OK && asked_bytes == 0,
                          "shape %zu, operator %d, call %d: %zu bytes, %s", i,
                          operator, call, asked_bytes, normfuse_last_error());
                }
    CHECK(called > 150, "only %d calls", called);
}

/* A tensor that is nowhere: asking how much it needs reads nothing. */
static normfuse_status ask_scratch(int64_t n, int64_t c, int64_t s, int32_t threads)
{
    fresh(BATCH, BACKWARD_SCRATCH);
    for (int slot = 0; slot < SLOTS; slot++)
        if (is_big(slot) && (&f.tensors.x)[slot] != NULL) {
            shape((enum slot)slot, NORMFUSE_F16, true, 3, (int64_t[]){n, c, s});
            f.t[slot].data = (void *)(uintptr_t)64;
            if (slot != X && slot != DY)
                absent((enum slot)slot);
        } else if ((&f.tensors.x)[slot] != NULL) {
            shape((enum slot)slot, NORMFUSE_F32, false, 1, &c);
            f.t[slot].data = (void *)(uintptr_t)64;
            if (slot != MEAN && slot != RSTD)
                absent((enum slot)slot);
        }
    f.exec.threads = threads;
    return call_it();
}

static void test_vast_scratch(void)
{
    /* 2^18 threads would each have their share */
    CHECK(ask_scratch(1 << 10, 1 << 10, 1 << 23, 1024) == NORMFUSE_OK, "%s", normfuse_last_error());
    const size_t of_most = asked_bytes;
    CHECK(ask_scratch(1 << 10, 1 << 10, 1 << 23, INT32_MAX) == NORMFUSE_OK && asked_bytes == of_most,
          "%zu bytes, for 1024 threads %zu", asked_bytes, of_most);
    fresh_of(GROUP, BACKWARD_SCRATCH, NORMFUSE_F16, 1, INT64_C(1) << 57, 1, 1, 1);
    for (int slot = 0; slot < SLOTS; slot++)
        if (slot == X || slot == DY || slot == MEAN || slot == RSTD)
            f.t[slot].data = (void *)(uintptr_t)64;
        else if ((&f.tensors.x)[slot] != NULL)
            absent((enum slot)slot);
    f.exec.threads = 1024;
    CHECK(call_it() == NORMFUSE_OUT_OF_MEMORY && strstr(normfuse_last_error(), "overflow") != NULL, "%zu bytes: %s",
          asked_bytes, normfuse_last_error());
    CHECK(ask_scratch(INT64_C(1) << 56, 2, 1, INT32_MAX) == NORMFUSE_OK && asked_bytes != 0, "%s",
          normfuse_last_error());
}

/* The bounds of docs/promises.md: what a thread has for each channel, and two threads for all of a call. */
static double of_channel(enum operator operator)
{
    return operator == CHANNEL ? 1024 : 256;
}
static double of_two_threads(enum operator operator)
{
    return operator == CHANNEL ? 4 << 20 : 1 << 20;
}
static double most_scratch(enum operator operator, double n, double c, double s, double groups, double threads)
{
    const double elements = n * c * s, norm_groups = operator == GROUP ? n * groups : operator == BATCH ? c : n;
    threads = fmax(1, fmin(threads, floor(elements / 8192)));
    return elements / 4 + 128 * c + threads * ((704 << 10) + of_channel(operator) * c) +
           4 * norm_groups * (threads + 2);
}

/* A call with every tensor that it takes but pre_bias, with which u may be in scratch memory, too; all are nowhere, as
 * contiguous memory or as slices. */
static normfuse_status ask_scratch_of_all(enum operator operator, enum call call, normfuse_type type,
                                          bool channels_last,
                                          const int64_t sizes[3], int64_t groups, bool sliced, int32_t threads)
{
    fresh_of(operator, call, type, sizes[0], sizes[1], sizes[2], 1, groups);
    f.exec.threads = threads;
    for (int slot = 0; slot < SLOTS; slot++) {
        if ((&f.tensors.x)[slot] == NULL)
            continue;
        if (is_big(slot)) {
            shape((enum slot)slot, type, channels_last, 4, (int64_t[]){sizes[0], sizes[1], sizes[2], 1});
            if (sliced)
                f.axes[slot].strides[0] *= 2;
        }
        f.t[slot].data = (void *)((uintptr_t)(slot + 1) << 42);
    }
    absent(PRE_BIAS);
    if ((&f.tensors.x)[DPRE_BIAS] != NULL)
        absent(DPRE_BIAS);
    if (sizes[1] % 2 == 1 || sizes[0] % 4 == 0) {
        prelu(sizes[1]);
        f.t[SLOPE].data = (void *)((uintptr_t)(SLOPE + 1) << 42);
        f.t[DSLOPE].data = (void *)((uintptr_t)(DSLOPE + 1) << 42);
    }
    return call_it();
}

static void test_most_scratch(void)
{
    uint64_t state = 20261202;
    int asked = 0;
    double largest = 0;
    for (int i = 0; i < 20000; i++) {
        int64_t sizes[3], elements = 1;
        for (int a = 0; a < 3; a++) {
            state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            const int64_t power = INT64_C(1) << (state >> 32) % 21;
            sizes[a] = (state >> 40) % 3 == 0 ? power : power + (int64_t)((state >> 42) % (uint64_t)power);
            elements *= sizes[a];
            if (elements > INT64_C(1) << 34)
                break;
        }
        if (elements > INT64_C(1) << 34)
            continue;
        const enum operator operator = (enum operator)(i / 2 % 4);
        if (operator == BATCH && sizes[0] * sizes[2] == 1)
            continue;
        const int64_t c = sizes[1], groups = i % 4 == 0 ? c : i % 4 == 1 && c % 32 == 0 ? 32 : 1;
        const int32_t threads = 1 << (state >> 20) % 11;
        const enum call call = i % 2 ? FORWARD_SCRATCH : BACKWARD_SCRATCH;
        const normfuse_status status =
            ask_scratch_of_all(operator, call, (normfuse_type)(state >> 24 & 3), (state & 1 << 26) != 0, sizes, groups,
                               (state & 1 << 27) != 0, threads);
        const double more = f.tensors.dslope != NULL ? 1.5 : 1;
        const double most = more * most_scratch(operator, (double)sizes[0], (double)c, (double)sizes[2], (double)groups,
                                                threads);
        largest = fmax(largest, (double)asked_bytes / most);
        if (c <= 2048) { /* the share that two threads need, without sharded halves */
            struct normfuse_problem problem = problem_of_fixture();
            problem.stats = problem.sums = NULL;
            f.exec.threads = 2;
            const double bytes = (double)elements * (double)normfuse_type_bytes(problem.type);
            const size_t of_two = normfuse_cpu_scratch_bytes(&problem, &f.exec);
            CHECK((double)of_two <= more * (bytes / 16 + of_two_threads(operator)),
                  "operator %d, call %d, %lld x %lld x %lld, %lld groups: %zu bytes of scratch for %.0f",
                  (int)operator, (int)call, (long long)sizes[0], (long long)c, (long long)sizes[2], (long long)groups,
                  of_two, bytes);
        }
        asked++;
        if (status != NORMFUSE_OK || (double)asked_bytes > most)
            CHECK(false, "operator %d, call %d, %lld x %lld x %lld, %lld groups, %d threads: %zu bytes, not %.0f: %s",
                  (int)operator, (int)call, (long long)sizes[0], (long long)c, (long long)sizes[2], (long long)groups,
                  (int)threads, asked_bytes, most, normfuse_last_error());
    }
    CHECK(asked > 4000 && largest > 0.8, "%d problems need %g of the bound at most", asked, largest);
}

/* Scratch is a small part of large tensors. */
static void test_share_of_scratch(void)
{
    static const struct {
        enum operator operator;
        int64_t sizes[3], groups;
    } shapes[] = {{BATCH, {256, 65536, 1}, 1},     {BATCH, {256, 262144, 1}, 1},  {BATCH, {256, 8192, 1}, 1},
                     {BATCH, {4, 1536, 224}, 1},
                  {BATCH, {64, 2048, 49}, 1},      {BATCH, {128, 1024, 196}, 1},  {BATCH, {1000, 6144, 1}, 1},
                        {BATCH, {76, 4096, 2}, 1},
                  {AFFINE, {32, 512, 784}, 1},     {AFFINE, {3136, 2048, 1}, 1},  {AFFINE, {256, 65536, 1}, 1},
                       {GROUP, {128, 256, 784}, 32},
                  {GROUP, {1, 128, 262144}, 32},   {GROUP, {88, 1824, 39}, 1824}, {GROUP, {3, 836, 5928}, 1},
                         {GROUP, {1, 512, 16384}, 32},
                  {GROUP, {4096, 4096, 1}, 1},     {GROUP, {1024, 8192, 1}, 1},    {GROUP, {64, 1280, 64}, 32},
                        {GROUP, {2, 1280, 1024}, 32},
                  {CHANNEL, {1, 96, 400000}, 1},   {CHANNEL, {4, 768, 4096}, 1},   {CHANNEL, {8192, 2048, 1}, 1},
                       {CHANNEL, {64, 384, 3136}, 8},
                  {GROUP, {16, 2048, 256}, 2048},  {GROUP, {1, 8192, 1024}, 32},  {GROUP, {8, 64, 4096}, 64},
                         {GROUP, {20000, 77, 1}, 7}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int form = 0; form < 16; form++) {
            const normfuse_type type = form & 1 ? NORMFUSE_BF16 : NORMFUSE_F32;
            const int64_t *sizes = shapes[i].sizes;
            const double bytes = (double)(sizes[0] * sizes[1] * sizes[2]) * (type == NORMFUSE_BF16 ? 2 : 4);
            const normfuse_status status = ask_scratch_of_all(shapes[i].operator, form & 2 ? BACKWARD_SCRATCH
                                                              : FORWARD_SCRATCH, type, form & 4,
                                                              sizes, shapes[i].groups, form & 8, 2);
            const double most = (f.tensors.dslope != NULL ? 1.5
                                 : 1) * (bytes / 16 + of_two_threads(shapes[i].operator));
            struct normfuse_problem problem = problem_of_fixture();
            problem.stats = problem.sums = NULL; /* those of sharded halves */
            for (int adds = 1; adds >= 0; adds--) { /* pre_add, or pre_bias: a backend has one of them */
                if (!adds) {
                    problem.pre_bias = (struct normfuse_parameter){.data = (char *)&problem, .channel = 1,
                                                                   .type = NORMFUSE_F32};
                    problem.pre_add = problem.u = (struct normfuse_view){0};
                }
                const size_t scratch_bytes = normfuse_cpu_scratch_bytes(&problem, &f.exec);
                CHECK(status == NORMFUSE_OK && (double)scratch_bytes <= most,
                      "operator %d, form %d, %lld x %lld x %lld, %lld groups: %zu bytes, not %.0f",
                      (int)shapes[i].operator, form, (long long)sizes[0], (long long)sizes[1], (long long)sizes[2],
                      (long long)shapes[i].groups, scratch_bytes, most);
            }
        }
}

static void test_scratch(void)
{
    for (int operator = GROUP; operator <= CHANNEL; operator++)
        for (int backward = 0; backward < 2; backward++) {
            fresh_of((enum operator)operator, backward ? BACKWARD : FORWARD, NORMFUSE_F32, N, C, H, W, GROUPS);
            size_t bytes = SIZE_MAX;
            const normfuse_status status =
                operator == GROUP
                    ? (backward ? normfuse_group_norm_backward_scratch_bytes
                                : normfuse_group_norm_forward_scratch_bytes)(&f.group, &f.tensors, NULL, &bytes)
                : operator == BATCH
                    ? (backward ? normfuse_batch_norm_backward_scratch_bytes
                                : normfuse_batch_norm_forward_scratch_bytes)(&f.batch, &f.tensors, NULL, &bytes)
                : operator == CHANNEL
                    ? (backward ? normfuse_channel_norm_backward_scratch_bytes
                                : normfuse_channel_norm_forward_scratch_bytes)(&f.channel, &f.tensors, NULL, &bytes)
                    : (backward ? normfuse_affine_backward_scratch_bytes
                                : normfuse_affine_forward_scratch_bytes)(&f.affine, &f.tensors, NULL, &bytes);
            if (!CHECK(status == NORMFUSE_OK && bytes <= sizeof scratch, "scratch_bytes: %s", normfuse_last_error()))
                continue;
            f.exec.scratch = scratch;
            f.exec.scratch_bytes = bytes;
            expect_accepted(__LINE__);
            /* The pass that is run may need less than the most that either does. */
            f.exec.scratch_bytes = 0;
            if (bytes != 0)
                CHECK(call_it() == NORMFUSE_OK || strstr(normfuse_last_error(), "exec.scratch_bytes") != NULL,
                      "too little scratch: %s", normfuse_last_error());
            CHECK((operator == GROUP   ? normfuse_group_norm_forward_scratch_bytes(&f.group, &f.tensors, NULL, NULL)
                   : operator == BATCH ? normfuse_batch_norm_forward_scratch_bytes(&f.batch, &f.tensors, NULL, NULL)
                   : operator == CHANNEL
                       ? normfuse_channel_norm_forward_scratch_bytes(&f.channel, &f.tensors, NULL, NULL)
                                       : normfuse_affine_forward_scratch_bytes(&f.affine, &f.tensors, NULL, NULL)) ==
                      NORMFUSE_BAD_ARGUMENT,
                  "bytes NULL");
        }
}

/* The halves of a sharded call get the scratch that is asked for the whole. */
static void test_scratch_of_halves(void)
{
    for (int operator = GROUP; operator <= BATCH; operator++)
        for (int backward = 0; backward < 2; backward++)
            for (int32_t threads = 1; threads <= 4; threads++) {
                fresh_of((enum operator)operator, backward ? BACKWARD_SCRATCH : FORWARD_SCRATCH, NORMFUSE_F32, 2, 8192,
                         16, 16, GROUPS);
                for (int slot = 0; slot < SLOTS; slot++)
                    if (slot == X || slot == (backward ? DY : Y) || (backward && slot == DX))
                        f.t[slot].data = (void *)((uintptr_t)1 << 60); /* nothing is there, nor read */
                    else if (!backward || (slot != MEAN && slot != RSTD))
                        absent((enum slot)slot);
                f.exec.threads = threads;
                CHECK(call_it() == NORMFUSE_OK, "%s", normfuse_last_error());
                struct normfuse_problem half = problem_of_fixture();
                for (int second = 0; second < 2; second++) {
                    half.phases = backward ? (second ? NORMFUSE_PHASE_BACKWARD_APPLY : NORMFUSE_PHASE_BACKWARD_SUMS)
                                           : (second ? NORMFUSE_PHASE_APPLY : NORMFUSE_PHASE_STATISTICS);
                    const size_t needed = normfuse_cpu_scratch_bytes(&half, &f.exec);
                    CHECK(needed <= asked_bytes,
                          "operator %d, backward %d, half %d, %d threads: %zu bytes, of the whole %zu",
                          operator, backward, second, (int)threads, needed, asked_bytes);
                }
            }
}

/* The first half of a batch norm with a bias [N, C] writes u to scratch memory, where the whole has y or dx for it. */
static void test_scratch_of_biases(void)
{
    enum { SAMPLES = 4 };
    for (int backward = 0; backward < 2; backward++) {
        fresh_of(BATCH, backward ? BACKWARD_SCRATCH : FORWARD_SCRATCH, NORMFUSE_F32, SAMPLES, C, H, W, GROUPS);
        absent(PRE_ADD);
        if (!backward)
            absent(U);
        SHAPE(PRE_BIAS, NORMFUSE_F32, SAMPLES, C);
        CHECK(call_it() == NORMFUSE_OK, "%s", normfuse_last_error());
        CHECK(asked_bytes >= sizeof(float) * SAMPLES * C * H * W, "backward %d: %zu bytes hold no u", backward,
              asked_bytes);
    }
}

static void test_small_functions(void)
{
    CHECK(strcmp(normfuse_version(), "0.1.0") == 0, "version %s", normfuse_version());
    static const int known[] = {0, 10, 11, 12, 13, 20, 30, 31, 32, 33, 40, 41, 50};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        CHECK(strcmp(normfuse_status_text((normfuse_status)known[i]), "unknown status") != 0, "status %d", known[i]);
    CHECK(strcmp(normfuse_status_text((normfuse_status)1), "unknown status") == 0, "an unknown status");

    const int64_t sizes[] = {2, 3, 4, 5, 6};
    normfuse_axes axes;
    normfuse_tensor tensor = normfuse_tensor_contiguous(arena, NORMFUSE_BF16, 5, sizes, &axes);
    CHECK(tensor.data == arena && tensor.ndim == 5 && tensor.dtype.code == 4 && tensor.dtype.bits == 16 &&
              tensor.dtype.lanes == 1 && tensor.device.device_type == NORMFUSE_CPU && tensor.byte_offset == 0 &&
              memcmp(tensor.shape, sizes, sizeof sizes) == 0 &&
              memcmp(tensor.strides, (int64_t[]){360, 120, 30, 6, 1}, sizeof sizes) == 0,
          "a contiguous tensor");
    tensor = normfuse_tensor_channels_last(arena, NORMFUSE_F64, 5, sizes, &axes);
    CHECK(tensor.dtype.code == 2 && tensor.dtype.bits == 64 &&
              memcmp(tensor.strides, (int64_t[]){360, 1, 90, 18, 3}, sizeof sizes) == 0,
          "a channels-last tensor");
    tensor = normfuse_tensor_channels_last(arena, NORMFUSE_F32, 2, sizes, &axes);
    CHECK(memcmp(tensor.strides, (int64_t[]){3, 1}, 2 * sizeof *sizes) == 0, "channels-last [N, C]");
    CHECK(normfuse_tensor_contiguous(arena, NORMFUSE_F32, 6, sizes, &axes).ndim == 0, "6 axes");
    CHECK(normfuse_tensor_contiguous(arena, NORMFUSE_F32, 0, sizes, &axes).ndim == 0, "no axes");

    fresh(GROUP, FORWARD);
    int64_t quantum = 0;
    CHECK(normfuse_sample_quantum(&f.t[X], &quantum) == NORMFUSE_OK && quantum >= 1, "sample quantum %d", (int)quantum);
    CHECK(normfuse_sample_quantum(NULL, &quantum) == NORMFUSE_BAD_ARGUMENT, "x NULL");
    CHECK(normfuse_sample_quantum(&f.t[X], NULL) == NORMFUSE_BAD_ARGUMENT, "samples NULL");
    f.axes[X].strides[3] = 2;
    CHECK(normfuse_sample_quantum(&f.t[X], &quantum) == NORMFUSE_UNSUPPORTED, "strides");
    f.axes[X].shape[1] = 0;
    CHECK(normfuse_sample_quantum(&f.t[X], &quantum) == NORMFUSE_OK && quantum >= 1, "empty x");
    /* Any number of samples, none included, in either layout. */
    for (int last = 0; last < 2; last++) {
        int64_t quanta[2];
        for (int64_t n = 0; n < 2; n++) {
            shape(X, NORMFUSE_F32, last == 1, 4, (int64_t[]){4 * n, 9, 40, 40});
            CHECK(normfuse_sample_quantum(&f.t[X], &quanta[n]) == NORMFUSE_OK, "%s", normfuse_last_error());
        }
        CHECK(quanta[0] == quanta[1], "%d samples are a quantum where there are none, else %d", (int)quanta[0],
              (int)quanta[1]);
    }

#ifndef NORMFUSE_HAVE_CUDA
    fresh(GROUP, FORWARD);
    for (int slot = 0; slot < SLOTS; slot++)
        f.t[slot].device.device_type = NORMFUSE_CUDA;
    expect_refused(__LINE__, NORMFUSE_NO_DRIVER, "without CUDA");
    CHECK(normfuse_sample_quantum(&f.t[X], &quantum) == NORMFUSE_NO_DRIVER, "sample quantum on CUDA");
#endif
}

/* ---- values of every dtype ------------------------------------------------------------------------------------- */

/* Room for the widest type: the compiler does not see that 16-bit types alone get here. */
static double load_16(uint16_t bits, int32_t type)
{
    const uint16_t room[4] = {bits};
    return normfuse_load(room, type);
}

static uint16_t store_16(int32_t type, double value)
{
    uint16_t room[4] = {0};
    normfuse_store(room, type, value);
    return room[0];
}

static void test_scalar(void)
{
    static const int32_t types[] = {NORMFUSE_F16, NORMFUSE_BF16};
    for (int t = 0; t < 2; t++) {
        const int32_t type = types[t];
        const uint16_t infinity = type == NORMFUSE_F16 ? 0x7c00 : 0x7f80;
        int wrong = 0;
        for (uint32_t bits = 0; bits < 0x10000; bits++) {
            const uint16_t in = (uint16_t)bits, magnitude = in & 0x7fff;
            const double value = load_16(in, type);
            uint16_t out = store_16(type, value);
            if (magnitude > infinity) {
                wrong += value == value || (out & 0x7fff) <= infinity;
                continue;
            }
            wrong += out != in;
            if (magnitude >= infinity)
                continue;
            /* Around the midpoint to the next value; beyond the largest finite one that is where infinity begins. */
            const uint16_t next = (uint16_t)(in + 1);
            const double step = (in & 0x8000) != 0 ? -1.0 : 1.0;
            const int precision = type == NORMFUSE_F16 ? 11 : 8;
            const double above = (next & 0x7fff) == infinity
                                     ? value + step * ldexp(1.0, (type == NORMFUSE_F16 ? 15 : 127) - precision + 1)
                                     : load_16(next, type);
            const double middle = value + (above - value) / 2;
            out = store_16(type, middle);
            wrong += out != (in % 2 == 0 ? in : next);
            out = store_16(type, nextafter(middle, value));
            wrong += out != in;
            out = store_16(type, nextafter(middle, above));
            wrong += out != next;
        }
        CHECK(wrong == 0, "%d wrong conversions of %s", wrong, type == NORMFUSE_F16 ? "f16" : "bf16");
        uint16_t out = store_16(type, -DBL_MAX);
        CHECK(out == (infinity | 0x8000), "-DBL_MAX is -infinity, got %04x", out);
        out = store_16(type, -DBL_TRUE_MIN);
        CHECK(out == 0x8000, "the least double is -0, got %04x", out);
    }
    float out;
    normfuse_store(&out, NORMFUSE_F32, 1.0 + 0x1.8p-24);
    CHECK(out == 1.0f + FLT_EPSILON && normfuse_load(&out, NORMFUSE_F32) == 1.0 + FLT_EPSILON, "f32");
}

/* ---- merging --------------------------------------------------------------------------------------------------- */

static uint64_t random_state = 7;

static double random_between(double low, double high)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return low + (high - low) * ((double)(random_state >> 11) * 0x1p-53);
}

enum { VALUES = N * C * H * W };

/* A legal call of the tensors that most calls have, of random values, each `elements` f32 behind the start of its memory.
 */
static void fresh_small(enum call call, int64_t elements, uint64_t seed)
{
    const enum slot others[] = {PRE_ADD, POST_ADD, SCALE, SHIFT, PRE_BIAS, U, DU, DSCALE, DSHIFT, DPOST_ADD, DPRE_BIAS};
    fresh(GROUP, call);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        absent(others[i]);
    random_state = seed;
    for (int slot = 0; slot < SLOTS; slot++) {
        place((enum slot)slot, (enum slot)slot, elements);
        for (size_t i = 0; i < VALUES; i++) {
            const float value = (float)random_between(0.5, 2);
            memcpy(arena[slot] + ((size_t)elements + i) * sizeof value, &value, sizeof value);
        }
    }
}

/* The third call has the plan of the first one and other addresses. The fourth one, at odd multiples of 4, is checked and
 * planned anew and says what the third one is to give. */
static void test_calls_as_before(void)
{
    for (enum call call = FORWARD; call <= BACKWARD; call++) {
        static const struct {
            int64_t elements;
            uint64_t seed;
        } runs[] = {{0, 5}, {0, 6}, {VALUES + 2, 7}, {1, 7}};
        for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
            fresh_small(call, runs[i].elements, runs[i].seed);
            CHECK(call_it() == NORMFUSE_OK, "run %zu: %s", i, normfuse_last_error());
        }
        for (int slot = 0; slot < SLOTS; slot++)
            CHECK(memcmp(arena[slot] + 4, arena[slot] + (VALUES + 2) * 4, VALUES * 4) == 0, "slot %d, call %d", slot,
                  (int)call);
        const enum slot output = call == FORWARD ? Y : DX;
#define LEGAL fresh_small(call, 0, 5)
        LEGAL, f.t[X].data = NULL;
        expect_refused(__LINE__, NORMFUSE_BAD_POINTER, "tensors.x.data is NULL");
        LEGAL, f.t[output].byte_offset = 2;
        expect_refused(__LINE__, NORMFUSE_BAD_POINTER, "not a multiple of 4");
        LEGAL, f.t[WEIGHT].byte_offset = UINT64_MAX - 7;
        expect_refused(__LINE__, NORMFUSE_BAD_SHAPE, "outside of the address space");
        LEGAL, place(output, WEIGHT, 2);
        expect_refused(__LINE__, NORMFUSE_OVERLAP, "overlaps tensors.weight");
        LEGAL, place(output, X, 0);
        expect_accepted(__LINE__);
#undef LEGAL
    }
}

static normfuse_tensor f64_tensor(void *data, normfuse_axes *axes, int32_t ndim, int64_t a, int64_t b, int64_t c)
{
    return normfuse_tensor_contiguous(data, NORMFUSE_F64, ndim, (int64_t[]){a, b, c}, axes);
}

static void test_merge(void)
{
    enum { SHARDS = 9, SETS = 5 };
    static double in[SHARDS][SETS][3], out[SETS][3];
    normfuse_axes in_axes, out_axes;
    normfuse_tensor in_tensor = f64_tensor(in, &in_axes, 3, SHARDS, SETS, 3);
    normfuse_tensor out_tensor = f64_tensor(out, &out_axes, 2, SETS, 3, 0);
    for (int round = 0; round < 50; round++) {
        const double centre = round % 3 == 0 ? 0 : round % 3 == 1 ? 1e4 : -1e9;
        for (int k = 0; k < SHARDS; k++)
            for (int i = 0; i < SETS; i++) {
                const bool is_empty = (k + i + round) % 4 == 0 || i == 4;
                in[k][i][0] = is_empty ? 0 : floor(random_between(1, 100000));
                in[k][i][1] = is_empty ? NAN : centre + random_between(-1, 1); /* of no value: not looked at */
                in[k][i][2] = is_empty ? NAN : in[k][i][0] * random_between(0.1, 2);
            }
        CHECK(normfuse_stats_merge(&in_tensor, &out_tensor, NULL) == NORMFUSE_OK, "%s", normfuse_last_error());
        for (int i = 0; i < SETS; i++) {
            long double count = 0, mean = 0, m2 = 0;
            double largest = 0, range = 2;
            for (int k = 0; k < SHARDS; k++)
                if (in[k][i][0] != 0) {
                    count += in[k][i][0];
                    mean += (long double)in[k][i][0] * in[k][i][1];
                    largest = fmax(largest, fabs(in[k][i][1]));
                }
            mean = count != 0 ? mean / count : 0;
            for (int k = 0; k < SHARDS; k++)
                if (in[k][i][0] != 0)
                    m2 += in[k][i][2] + in[k][i][0] * (in[k][i][1] - mean) * (in[k][i][1] - mean);
            /* A join rounds delta, share, their product and the sum, of which only the last is not small against the
             * range of the means; earlier errors shrink. M2 takes delta^2 * weight with sum(weight * delta^2) <= M2 and
             * sum(weight * |delta|) <= sqrt(count * M2). The reference's own error is 2^-11 of this. */
            const double u = DBL_EPSILON / 2, mean_bound = SHARDS * u * (largest + 4 * range);
            const double m2_bound = u * (SHARDS + 7) * (double)m2 + 2 * mean_bound * sqrt((double)(count * m2)) +
                                    mean_bound * mean_bound * (double)count;
            CHECK(out[i][0] == (double)count, "count %g, expected %Lg", out[i][0], count);
            CHECK(fabsl(out[i][1] - mean) <= mean_bound * 1.01, "mean %.17g, expected %.17Lg", out[i][1], mean);
            CHECK(fabsl(out[i][2] - m2) <= m2_bound * 1.01, "M2 %.17g, expected %.17Lg", out[i][2], m2);
        }
        CHECK(out[4][0] == 0 && out[4][1] == 0 && out[4][2] == 0, "no values in any shard");
    }
    in[1][0][0] = in[2][0][0] = 10;
    in[2][0][1] = NAN;
    in[2][0][2] = 1;
    double expected[SETS][3];
    CHECK(normfuse_stats_merge(&in_tensor, &out_tensor, NULL) == NORMFUSE_OK && out[0][1] != out[0][1] &&
              out[0][2] != out[0][2] && out[1][1] == out[1][1],
          "a NaN spreads in its own set alone");
    memcpy(expected, out, sizeof out);
    out_tensor.data = in;
    CHECK(normfuse_stats_merge(&in_tensor, &out_tensor, NULL) == NORMFUSE_OK && memcmp(in, expected, sizeof out) == 0,
          "out may be the first shard");

    static double sums_in[SHARDS][SETS][2], sums[SETS][2];
    normfuse_tensor sums_in_tensor = f64_tensor(sums_in, &in_axes, 3, SHARDS, SETS, 2);
    normfuse_tensor sums_tensor = f64_tensor(sums, &out_axes, 2, SETS, 2, 0);
    for (int k = 0; k < SHARDS; k++)
        for (int i = 0; i < SETS * 2; i++)
            sums_in[k][i / 2][i % 2] = random_between(-1, 1) * pow(10, random_between(0, 10));
    CHECK(normfuse_sums_merge(&sums_in_tensor, &sums_tensor, NULL) == NORMFUSE_OK, "%s", normfuse_last_error());
    for (int i = 0; i < SETS * 2; i++) {
        long double sum = 0, magnitude = 0;
        for (int k = 0; k < SHARDS; k++) {
            sum += sums_in[k][i / 2][i % 2];
            magnitude += fabs(sums_in[k][i / 2][i % 2]);
        }
        CHECK(fabsl(sums[i / 2][i % 2] - sum) <= SHARDS * (DBL_EPSILON / 2) * magnitude, "sum %d", i);
    }

    /* Per value: a count for each pair, and one for all; a set without values has sums of 0. */
    double stats[SETS][3] = {{0}}, per_value[SETS][2];
    normfuse_axes stats_axes, per_value_axes;
    const normfuse_tensor per_value_tensor = f64_tensor(per_value, &per_value_axes, 2, SETS, 2, 0);
    for (int triples = SETS; triples >= 1; triples -= SETS - 1) {
        const normfuse_tensor stats_tensor = f64_tensor(stats, &stats_axes, 2, triples, 3, 0);
        for (int i = 0; i < SETS; i++)
            stats[i][0] = i == 1 ? 0 : 7 + i;
        CHECK(normfuse_sums_merge_per_value(&sums_in_tensor, &stats_tensor, &per_value_tensor, NULL) == NORMFUSE_OK,
              "%s", normfuse_last_error());
        for (int i = 0; i < SETS * 2; i++) {
            const double count = stats[triples == 1 ? 0 : i / 2][0];
            CHECK(per_value[i / 2][i % 2] == sums[i / 2][i % 2] * NORMFUSE_PER_VALUE / (count < 1 ? 1 : count),
                  "sum %d per value, %d counts", i, triples);
        }
    }
    normfuse_tensor bad_stats = f64_tensor(stats, &stats_axes, 2, SETS, 2, 0);
    CHECK(normfuse_sums_merge_per_value(&sums_in_tensor, &bad_stats, &per_value_tensor, NULL) == NORMFUSE_BAD_SHAPE,
          "stats of pairs");
    bad_stats = f64_tensor(stats, &stats_axes, 2, SETS - 1, 3, 0);
    CHECK(normfuse_sums_merge_per_value(&sums_in_tensor, &bad_stats, &per_value_tensor, NULL) == NORMFUSE_BAD_SHAPE,
          "a triple for no whole number of pairs");
    CHECK(normfuse_sums_merge_per_value(&sums_in_tensor, NULL, &per_value_tensor, NULL) == NORMFUSE_BAD_ARGUMENT,
          "stats NULL");
    bad_stats = f64_tensor(stats, &stats_axes, 2, SETS, 3, 0);
    bad_stats.device.device_type = NORMFUSE_CUDA;
    CHECK(normfuse_sums_merge_per_value(&sums_in_tensor, &bad_stats, &per_value_tensor, NULL) == NORMFUSE_UNSUPPORTED,
          "stats on another device");
    bad_stats.device.device_type = NORMFUSE_CPU;
    bad_stats.dtype.bits = 32;
    CHECK(normfuse_sums_merge_per_value(&sums_in_tensor, &bad_stats, &per_value_tensor, NULL) == NORMFUSE_UNSUPPORTED,
          "stats in f32");

    /* Refusals. */
    const double untouched = sums[0][0];
    normfuse_axes axes;
    normfuse_tensor bad = f64_tensor(sums, &axes, 2, SETS, 3, 0);
    CHECK(normfuse_sums_merge(NULL, &sums_tensor, NULL) == NORMFUSE_BAD_ARGUMENT, "in NULL");
    CHECK(normfuse_sums_merge(&sums_in_tensor, NULL, NULL) == NORMFUSE_BAD_ARGUMENT, "out NULL");
    CHECK(normfuse_sums_merge(&sums_in_tensor, &bad, NULL) == NORMFUSE_BAD_SHAPE, "out of another width");
    bad = f64_tensor(sums, &axes, 2, SETS - 1, 2, 0);
    CHECK(normfuse_sums_merge(&sums_in_tensor, &bad, NULL) == NORMFUSE_BAD_SHAPE, "out of fewer sets");
    CHECK(normfuse_stats_merge(&sums_in_tensor, &sums_tensor, NULL) == NORMFUSE_BAD_SHAPE, "pairs as triples");
    bad = f64_tensor(sums, &axes, 1, 2, 0, 0);
    CHECK(normfuse_sums_merge(&bad, &bad, NULL) == NORMFUSE_BAD_SHAPE, "in without shards");
    bad = sums_tensor;
    bad.dtype.bits = 32;
    CHECK(normfuse_sums_merge(&sums_in_tensor, &bad, NULL) == NORMFUSE_UNSUPPORTED, "out in f32");
    bad = sums_tensor;
    bad.data = NULL;
    CHECK(normfuse_sums_merge(&sums_in_tensor, &bad, NULL) == NORMFUSE_BAD_POINTER, "out.data NULL");
    bad.data = &sums_in[0][1][0];
    CHECK(normfuse_sums_merge(&sums_in_tensor, &bad, NULL) == NORMFUSE_OVERLAP, "out inside of in");
    bad = sums_tensor;
    bad.device.device_type = NORMFUSE_CUDA;
    CHECK(normfuse_sums_merge(&sums_in_tensor, &bad, NULL) == NORMFUSE_UNSUPPORTED, "two devices");
    CHECK(sums[0][0] == untouched, "a refused merge wrote");
    in_axes.shape[0] = 0;
    CHECK(normfuse_sums_merge(&sums_in_tensor, &sums_tensor, NULL) == NORMFUSE_OK && sums[0][0] == 0, "no shards");
    /* No norm groups */
    for (int64_t width = 2; width <= 3; width++) {
        normfuse_axes none[3];
        const normfuse_tensor from = normfuse_tensor_contiguous(NULL, NORMFUSE_F64, 3, (int64_t[]){2, 0, width},
                                                                &none[0]),
                              to = normfuse_tensor_contiguous(NULL, NORMFUSE_F64, 2, (int64_t[]){0, width}, &none[1]),
                              of = normfuse_tensor_contiguous(NULL, NORMFUSE_F64, 2, (int64_t[]){0, 3}, &none[2]);
        CHECK((width == 3 ? normfuse_stats_merge : normfuse_sums_merge)(&from, &to, NULL) == NORMFUSE_OK,
              "no groups: %s", normfuse_last_error());
        CHECK(width == 3 || normfuse_sums_merge_per_value(&from, &of, &to, NULL) == NORMFUSE_OK, "no groups: %s",
              normfuse_last_error());
    }
}

/* ---- folding --------------------------------------------------------------------------------------------------- */

/* Half a unit in the last place of a value of `type`. */
static double half_ulp(int32_t type, double value)
{
    static const int precisions[] = {53, 24, 11, 8}, least[] = {-1022, -126, -14, -126};
    const int exponent = value == 0 ? least[type] : ilogb(value);
    return ldexp(1.0, (exponent < least[type] ? least[type] : exponent) - precisions[type]);
}

static void test_fold(void)
{
    enum { O = 6, I = 3, K = 4 };
    static _Alignas(64) char w[O * I * K * 8], new_w[O * I * K * 8], b[O * 8], new_b[O * 8], parameter[4][O * 8];
    for (int round = 0; round < 64; round++) {
        const int32_t type = round % 4, other = round / 4 % 4;
        const bool transposed = round & 16, with_bias = round & 32, in_place = type == other;
        const double eps = 1e-5;
        normfuse_axes axes[8];
        const int64_t sizes[] = {transposed ? I : O, transposed ? O : I, 2, 2}, channels = O;
        normfuse_tensor t_w = normfuse_tensor_contiguous(w, (normfuse_type)type, 4, sizes, &axes[0]);
        normfuse_tensor t_new_w =
            normfuse_tensor_contiguous(in_place ? w : new_w, (normfuse_type)other, 4, sizes, &axes[1]);
        normfuse_tensor t_b = normfuse_tensor_contiguous(b, (normfuse_type)type, 1, &channels, &axes[2]);
        normfuse_tensor t_new_b =
            normfuse_tensor_contiguous(in_place ? b : new_b, (normfuse_type)other, 1, &channels, &axes[3]);
        normfuse_tensor t_p[4];
        double old_w[O * I * K], old_b[O], p[4][O];
        for (int i = 0; i < 4; i++) {
            t_p[i] =
                normfuse_tensor_contiguous(parameter[i], (normfuse_type)((round + i) % 4), 1, &channels, &axes[4 + i]);
            for (int o = 0; o < O; o++) {
                void *const at = parameter[i] + (size_t)o * normfuse_type_bytes((round + i) % 4);
                normfuse_store(at, (round + i) % 4, random_between(i == 1 ? 0.01 : -2, 2)); /* 1 is the variance */
                p[i][o] = normfuse_load(at, (round + i) % 4);
            }
        }
        for (int i = 0; i < O * I * K; i++) {
            normfuse_store(w + (size_t)i * normfuse_type_bytes(type), type, random_between(-1, 1));
            old_w[i] = normfuse_load(w + (size_t)i * normfuse_type_bytes(type), type);
        }
        for (int o = 0; o < O; o++) {
            normfuse_store(b + (size_t)o * normfuse_type_bytes(type), type, random_between(-1, 1));
            old_b[o] = with_bias ? normfuse_load(b + (size_t)o * normfuse_type_bytes(type), type) : 0;
        }
        normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .running_mean = &t_p[0], .running_var = &t_p[1]};
        if (round % 3 != 0)
            tensors.weight = &t_p[2];
        if (round % 3 != 1)
            tensors.bias = &t_p[3];
        const normfuse_status status =
            normfuse_batch_norm_fold(&tensors, eps, transposed ? NORMFUSE_FOLD_TRANSPOSED : 0, &t_w,
                                     with_bias ? &t_b : NULL, &t_new_w, &t_new_b);
        if (!CHECK(status == NORMFUSE_OK, "fold: %s", normfuse_last_error()))
            continue;
        /* In double: var + eps, the root, the division and the product round once each, the bias twice more; then one
         * rounding to the dtype written. */
        const double u = DBL_EPSILON / 2;
        for (int i = 0; i < O * I * K; i++) {
            const int o = transposed ? i / K % O : i / (I * K);
            const long double want =
                (long double)old_w[i] * (tensors.weight != NULL ? p[2][o] : 1) / sqrtl((long double)p[1][o] + eps);
            const double got = normfuse_load((char *)t_new_w.data + (size_t)i * normfuse_type_bytes(other), other);
            CHECK(fabsl(got - want) <= (4 * u * fabsl(want) + half_ulp(other, (double)want)) * 1.001L,
                  "round %d weight %d: %.17g, expected %.17Lg", round, i, got, want);
        }
        for (int o = 0; o < O; o++) {
            const long double scaled = ((long double)old_b[o] - p[0][o]) * (tensors.weight != NULL ? p[2][o] : 1) /
                                       sqrtl((long double)p[1][o] + eps);
            const long double want = scaled + (tensors.bias != NULL ? p[3][o] : 0);
            const double got = normfuse_load((char *)t_new_b.data + (size_t)o * normfuse_type_bytes(other), other);
            CHECK(fabsl(got - want) <=
                      (5 * u * fabsl(scaled) + u * fabsl(want) + half_ulp(other, (double)want)) * 1.001L,
                  "round %d bias %d: %.17g, expected %.17Lg", round, o, got, want);
        }
    }

    /* Refusals. */
    normfuse_axes axes[6];
    const int64_t sizes[] = {O, I, K}, channels = O, five = 5;
    normfuse_tensor t_w = normfuse_tensor_contiguous(w, NORMFUSE_F32, 3, sizes, &axes[0]), bad = t_w;
    normfuse_tensor t_new_w = normfuse_tensor_contiguous(new_w, NORMFUSE_F32, 3, sizes, &axes[1]);
    normfuse_tensor t_new_b = normfuse_tensor_contiguous(new_b, NORMFUSE_F32, 1, &channels, &axes[2]);
    normfuse_tensor t_mean = normfuse_tensor_contiguous(parameter[0], NORMFUSE_F32, 1, &channels, &axes[3]);
    normfuse_tensor t_var = normfuse_tensor_contiguous(parameter[1], NORMFUSE_F32, 1, &channels, &axes[4]);
    normfuse_tensor t_five = normfuse_tensor_contiguous(parameter[2], NORMFUSE_F32, 1, &five, &axes[5]);
    normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .running_mean = &t_mean, .running_var = &t_var};
    memset(new_w, 0x5a, sizeof new_w);
#define FOLD(flags, weight, bias, out_weight, out_bias)                                                                \
    normfuse_batch_norm_fold(&tensors, 1e-5, flags, weight, bias, out_weight, out_bias)
    CHECK(FOLD(2, &t_w, NULL, &t_new_w, &t_new_b) == NORMFUSE_BAD_ARGUMENT, "unknown flag");
    CHECK(FOLD(0, NULL, NULL, &t_new_w, &t_new_b) == NORMFUSE_BAD_ARGUMENT, "conv_weight NULL");
    CHECK(FOLD(0, &t_w, NULL, NULL, &t_new_b) == NORMFUSE_BAD_ARGUMENT, "new_weight NULL");
    CHECK(FOLD(0, &t_w, NULL, &t_new_w, NULL) == NORMFUSE_BAD_ARGUMENT, "new_bias NULL");
    CHECK(FOLD(0, &t_w, NULL, &t_new_w, &t_five) == NORMFUSE_BAD_SHAPE, "new_bias of 5");
    CHECK(FOLD(0, &t_w, &t_five, &t_new_w, &t_new_b) == NORMFUSE_BAD_SHAPE, "conv_bias of 5");
    CHECK(FOLD(1, &t_w, NULL, &t_new_w, &t_new_b) == NORMFUSE_BAD_SHAPE, "3 output channels, transposed");
    CHECK(FOLD(0, &t_w, NULL, &t_w, &t_w) == NORMFUSE_BAD_SHAPE, "new_bias is the weight");
    bad.data = w + 4;
    CHECK(FOLD(0, &t_w, NULL, &bad, &t_new_b) == NORMFUSE_OVERLAP, "new_weight shifted onto conv_weight");
    bad = t_new_b;
    bad.data = w + 4;
    CHECK(FOLD(0, &t_w, NULL, &t_new_w, &bad) == NORMFUSE_OVERLAP, "new_bias in conv_weight");
    bad.data = parameter[1];
    CHECK(FOLD(0, &t_w, NULL, &t_new_w, &bad) == NORMFUSE_OVERLAP, "new_bias is running_var");
    bad = t_w;
    bad.strides = (int64_t[]){1, O, I * O};
    CHECK(FOLD(0, &bad, NULL, &t_new_w, &t_new_b) == NORMFUSE_UNSUPPORTED, "conv_weight transposed");
    bad = t_w;
    bad.device.device_type = NORMFUSE_CUDA;
    CHECK(FOLD(0, &bad, NULL, &t_new_w, &t_new_b) == NORMFUSE_UNSUPPORTED, "conv_weight on CUDA");
    tensors.weight = &t_five;
    CHECK(FOLD(0, &t_w, NULL, &t_new_w, &t_new_b) == NORMFUSE_BAD_SHAPE, "weight of 5");
    tensors.weight = NULL;
    tensors.x = &t_w;
    CHECK(FOLD(0, &t_w, NULL, &t_new_w, &t_new_b) == NORMFUSE_BAD_ARGUMENT, "x is not taken");
    tensors.x = NULL;
    tensors.running_var = NULL;
    CHECK(FOLD(0, &t_w, NULL, &t_new_w, &t_new_b) == NORMFUSE_BAD_ARGUMENT, "running_var NULL");
    tensors.running_var = tensors.running_mean;
    const int64_t vast[] = {INT64_C(1) << 57, tensors.running_mean->shape[0], 0};
    normfuse_axes of_vast;
    const normfuse_tensor t_vast = normfuse_tensor_contiguous(NULL, NORMFUSE_F32, 3, vast, &of_vast);
    CHECK(FOLD(NORMFUSE_FOLD_TRANSPOSED, &t_vast, NULL, &t_vast, &t_new_b) == NORMFUSE_OK,
          "a weight without elements: %s", normfuse_last_error());
#undef FOLD
    CHECK(new_w[0] == 0x5a && memcmp(new_w, new_w + 1, sizeof new_w - 1) == 0, "a refused fold wrote");
}

int main(void)
{
    CHECK(strcmp(normfuse_last_error(), "") == 0, "last_error before the first refusal");
    test_structs();
    test_options();
    test_presence();
    test_derivative_of_y();
    test_channel_norm();
    test_slope();
    test_slope_gradient();
    test_shapes();
    test_types_and_devices();
    test_pointers();
    test_strides();
    test_overlap();
    test_overlap_exhaustively();
    test_calls_as_before();
    test_pictures();
    test_empty();
    test_accumulate();
    test_vast_and_empty();
    test_vast_scratch();
    test_most_scratch();
    test_share_of_scratch();
    test_scratch();
    test_scratch_of_halves();
    test_scratch_of_biases();
    test_small_functions();
    test_scalar();
    test_merge();
    test_fold();
    return harness_close();
}
