/* SPDX-License-Identifier: MIT
 *
 * isa.inl - turns one vec_<isa>.h into one exported table. Included by isa_<isa>.c, which defines ISA and USABLE (an
 * expression: this CPU and its OS have the instructions), and NORMFUSE_REST_OF where all but bf16 is another's. */
#include <math.h>

#include "cpu/kernels.h"
#include "normfuse.h"

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define CAT3_(a, b, c) a##_##b##_##c
#define CAT3(a, b, c) CAT3_(a, b, c)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

#if defined(NORMFUSE_NO_INLINE_FORMS)
#define SILU_PASSES(PASS)
#else
#define NORMFUSE_SILU_PASSES
#define SILU_PASSES NORMFUSE_FOR_EACH_SILU_PASS
#endif

/* Names in passes.inl: the pass that a body is of; a form that is no activation; values of a stage, of a row
 * that always goes through one, and of one whose coefficients are repeated. */
enum { AFFINE, AFFINE2, DOT2 };
enum { STAGED = -1, STAGE = 512, SHORT_ROW = 64, REPEATED_ROW = 64 };

/* Activations with loops of their own: those that are cheap beside the memory; in f32 all of them where a vector is one
 * register. A stage costs 10 to 40 % there, and nothing with 16-bit types (docs/decisions/0012). The table in plain C
 * stays small. relu6 has loops in f32 alone: 10 KB of code a table, and the 16-bit ones as much each. */
#if defined(NORMFUSE_NO_INLINE_FORMS)
#define FORMS_16(FORM) FORM(NORMFUSE_IDENTITY)
#else
#define FORMS_16(FORM)                                                                             \
    FORM(NORMFUSE_IDENTITY) FORM(NORMFUSE_RELU) FORM(NORMFUSE_LEAKY_RELU) FORM(NORMFUSE_HARDSWISH) \
    FORM(NORMFUSE_SILU)
#endif
#if defined(NORMFUSE_NO_INLINE_FORMS)
#define FORMS_PRELU(FORM)
#else
#define FORMS_PRELU(FORM) FORM(NORMFUSE_PRELU)
#endif
#if defined(NORMFUSE_ALL_INLINE_FORMS)
#define FORMS_F32(FORM) FORM(NORMFUSE_IDENTITY) FOR_EACH_ACTIVATION(FORM)
#elif defined(NORMFUSE_NO_INLINE_FORMS)
#define FORMS_F32 FORMS_16
#else
#define FORMS_F32(FORM) FORMS_16(FORM) FORM(NORMFUSE_RELU6)
#endif

#define OP(name) vf_##name
#define R float
#define RT f32
#define V vf
#define W 16
#include "cpu/activation.inl"
#include "cpu/activate.inl"
#if !defined(NORMFUSE_REST_OF)
#include "cpu/small_sets.inl"
#if !defined(NORMFUSE_NO_INLINE_FORMS)
#define NORMFUSE_SHORT_ROWS
#endif
#include "cpu/channels.inl"
#undef NORMFUSE_SHORT_ROWS
#define T float
#define DT f32
#define INLINE_FORMS FORMS_F32
#define PRELU_FORMS FORMS_PRELU
#define FORWARD_SILU_STAGED 0
#include "cpu/passes.inl"
#define T uint16_t
#define DT f16
#define INLINE_FORMS FORMS_16
#define PRELU_FORMS(FORM)
#define FORWARD_SILU_STAGED 0
#include "cpu/passes.inl"
#endif
#define T uint16_t
#define DT bf16
#define INLINE_FORMS FORMS_16
#define PRELU_FORMS FORMS_PRELU
#define FORWARD_SILU_STAGED VF_ROUNDS_BF16
#include "cpu/passes.inl"
#undef OP
#undef R
#undef RT
#undef V
#undef W

#undef NORMFUSE_SILU_PASSES
#if !defined(NORMFUSE_REST_OF)
#define OP(name) vd_##name
#define R double
#define RT f64
#define V vd
#define W 8
#define OF_DOUBLE
#include "cpu/activation.inl"
#include "cpu/activate.inl"
#undef OF_DOUBLE
#include "cpu/small_sets.inl"
#include "cpu/channels.inl"
#define T double
#define DT f64
#define INLINE_FORMS(FORM) FORM(NORMFUSE_IDENTITY) FORM(NORMFUSE_RELU)
#define PRELU_FORMS(FORM)
#define FORWARD_SILU_STAGED 0
#include "cpu/passes.inl"

#undef OP
#undef R
#undef RT
#undef V
#undef W

#define R float
#define REAL(name) CAT3(name, f32, ISA)
#define FROM vd_from_f32
#define TO vd_to_f32
#include "cpu/columns.inl"
#define R double
#define REAL(name) CAT3(name, f64, ISA)
#define FROM vd_load_f64
#define TO vd_store_f64
#include "cpu/columns.inl"

const struct normfuse_column_functions CAT(normfuse_columns_, ISA)[2] = {
    {CAT3(accumulate, f32, ISA), CAT3(join_columns, f32, ISA), CAT3(statistics, f32, ISA)},
    {CAT3(accumulate, f64, ISA), CAT3(join_columns, f64, ISA), CAT3(statistics, f64, ISA)}};
#define SMALL(name, rt) CAT3(small_##name, rt, ISA)
#define SMALL_SETS(rt, v)                                                                                             \
    {SMALL(moments, rt), SMALL(normalize, rt), SMALL(sums, rt), SMALL(dx, rt), v##_activate, v##_activate_gradient,    \
     SMALL(prelu, rt)}
const struct normfuse_small_set_functions CAT(normfuse_small_sets_, ISA)[2] = {SMALL_SETS(f32, vf), SMALL_SETS(f64, vd)};
#if defined(NORMFUSE_NO_INLINE_FORMS)
#define SHORT_PASSES
#else
#define SHORT_PASSES                                                  \
    .sums_silu = CAT3(channels_sums_silu, f32, ISA),                  \
    .short_moments = CAT3(channels_short_moments_of, f32, ISA),       \
    .short_apply = CAT3(channels_short_apply_to, f32, ISA),           \
    .short_sums = CAT3(channels_short_sums_of, f32, ISA),             \
    .short_dx = CAT3(channels_short_dx_of, f32, ISA)
#endif
const struct normfuse_channel_functions CAT(normfuse_channels_, ISA)[2] = {
    {.moments = CAT3(channels_moments, f32, ISA), .sums = CAT3(channels_sums, f32, ISA), SHORT_PASSES},
    {.moments = CAT3(channels_moments, f64, ISA), .sums = CAT3(channels_sums, f64, ISA)}};
#define NORMFUSE_REST_OF ISA
#define PASS(name) .name = CAT3(name, f64, ISA),
const struct normfuse_passes CAT(normfuse_passes_f64_, ISA) = {
    NORMFUSE_FOR_EACH_PASS(PASS) NORMFUSE_FOR_EACH_CHANNEL_PASS(PASS) PASS(load) PASS(store)};
#undef PASS
#define PASS(name) .name = CAT3(name, f32, ISA),
const struct normfuse_passes CAT(normfuse_passes_f32_, ISA) = {
    NORMFUSE_FOR_EACH_PASS(PASS) NORMFUSE_FOR_EACH_CHANNEL_PASS(PASS) SILU_PASSES(PASS) PASS(load) PASS(store)};
#undef PASS
#define PASS(name) .name = CAT3(name, f16, ISA),
const struct normfuse_passes CAT(normfuse_passes_f16_, ISA) = {
    NORMFUSE_FOR_EACH_PASS(PASS) NORMFUSE_FOR_EACH_CHANNEL_PASS(PASS) SILU_PASSES(PASS) PASS(load) PASS(store)};
#undef PASS
#endif
#define PASS(name) .name = CAT3(name, bf16, ISA),
const struct normfuse_passes CAT(normfuse_passes_bf16_, ISA) = {
    NORMFUSE_FOR_EACH_PASS(PASS) NORMFUSE_FOR_EACH_CHANNEL_PASS(PASS) SILU_PASSES(PASS) PASS(load) PASS(store)};
#undef PASS

static bool usable(void) { return USABLE; }
static void fence(void) { vf_fence(); }

const struct normfuse_table CAT(normfuse_table_, ISA) = {
    .isa = TEXT(ISA),
    .usable = usable,
    .fence = fence,
    .columns = CAT(normfuse_columns_, NORMFUSE_REST_OF),
    .small_sets = CAT(normfuse_small_sets_, NORMFUSE_REST_OF),
    .channels = CAT(normfuse_channels_, NORMFUSE_REST_OF),
    .of = {[NORMFUSE_F64] = &CAT(normfuse_passes_f64_, NORMFUSE_REST_OF),
           [NORMFUSE_F32] = &CAT(normfuse_passes_f32_, NORMFUSE_REST_OF),
           [NORMFUSE_F16] = &CAT(normfuse_passes_f16_, NORMFUSE_REST_OF),
           [NORMFUSE_BF16] = &CAT(normfuse_passes_bf16_, ISA)},
};
