// SPDX-License-Identifier: MIT
//
// test_cpp.cpp - normfuse.hpp beside the C interface: the same bits of every tensor from every function, the same text
// of every refusal. Compiled with exceptions and without.
#include <normfuse.hpp>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "harness.h"

namespace nf = normfuse;

namespace
{

struct outcome {
    normfuse_status status;
    char text[512];
};

// The status and text of a call of normfuse.hpp.
template <class Call> outcome outcome_of(Call call)
{
    outcome got = {NORMFUSE_OK, ""};
#if defined(NORMFUSE_NO_EXCEPTIONS)
    const auto result = call();
    if (!result) {
        got.status = result.error().status();
        std::strcpy(got.text, result.error().what());
    }
#else
    try {
        call();
    } catch (const std::exception &caught) {
        got.status = static_cast<const nf::error &>(caught).status();
        std::strcpy(got.text, caught.what());
    }
#endif
    return got;
}

template <class Call> auto value_of(Call call)
{
#if defined(NORMFUSE_NO_EXCEPTIONS)
    const auto result = call();
    CHECK(static_cast<bool>(result), "refused: %s", result.error().what());
    return result.value();
#else
    return call();
#endif
}

// ---- tensors of calls -----------------------------------------------------------------------------------------------

// One tensor of a call, for both interfaces.
struct given {
    nf::tensor nf::tensors::*cpp;
    const normfuse_tensor *normfuse_tensors::*c;
    normfuse_type type;
    std::vector<std::int64_t> sizes;
    bool channels_last;
};

#define GIVEN(name, type, last, ...) given{&nf::tensors::name, &normfuse_tensors::name, type, {__VA_ARGS__}, last}

constexpr std::size_t SLOT = 8192; // bytes of a tensor

// Memory of one call: the same bytes for the same seed.
struct memory {
    explicit memory(const std::vector<given> &all) : bytes(all.size() * SLOT)
    {
        unsigned state = 7;
        for (std::size_t i = 0; i < all.size(); i++)
            for (std::size_t k = 0; k < SLOT / 8; k++) {
                state = state * 1664525u + 1013904223u;
                const float value = 0.25f + static_cast<float>(state >> 8) * 0x1p-24f;
                unsigned char *const slot = bytes.data() + i * SLOT;
                std::uint32_t bits;
                std::memcpy(&bits, &value, 4);
                const auto half = static_cast<std::uint16_t>(bits >> 16); // a bfloat; as f16 a number, too
                const double wide = static_cast<double>(value);
                switch (all[i].type) {
                case NORMFUSE_F64: std::memcpy(slot + 8 * k, &wide, 8); break;
                case NORMFUSE_F32: std::memcpy(slot + 4 * k, &value, 4); break;
                default: std::memcpy(slot + 2 * k, &half, 2);
                }
            }
    }
    std::vector<unsigned char> bytes;
};

struct c_side {
    explicit c_side(const std::vector<given> &all, memory &at) : axes(all.size()), held(all.size())
    {
        std::memset(&tensors, 0, sizeof tensors);
        tensors.struct_bytes = sizeof tensors;
        for (std::size_t i = 0; i < all.size(); i++) {
            const auto make = all[i].channels_last ? normfuse_tensor_channels_last : normfuse_tensor_contiguous;
            held[i] = make(at.bytes.data() + i * SLOT, all[i].type, static_cast<std::int32_t>(all[i].sizes.size()),
                           all[i].sizes.data(), &axes[i]);
            tensors.*all[i].c = &held[i];
        }
    }
    normfuse_tensors tensors;
    std::vector<normfuse_axes> axes;
    std::vector<normfuse_tensor> held;
};

nf::tensors cpp_side(const std::vector<given> &all, memory &at)
{
    nf::tensors tensors;
    for (std::size_t i = 0; i < all.size(); i++) {
        void *const data = at.bytes.data() + i * SLOT;
        const auto type = static_cast<nf::type>(all[i].type);
        const auto &s = all[i].sizes;
        tensors.*all[i].cpp = s.size() == 4 &&
                              all[i].channels_last ? nf::channels_last(type, data, {s[0], s[1], s[2], s[3]})
                                                                    : nf::tensor(data, type, s.data(), nullptr,
                                                                                 static_cast<std::int32_t>(s.size()));
    }
    return tensors;
}

// Both calls on memory of their own; every byte is compared. `changes`: the call is seen to write something.
template <class Function, class COptions, class Call, class Options>
void compare(const char *name, Function function, COptions c_options, Call call, const Options &options,
             const std::vector<given> &all)
{
    c_options.struct_bytes = sizeof c_options;
    memory of_c(all), of_cpp(all);
    const memory before(all);
    c_side c(all, of_c);
    const normfuse_status status = function(&c_options, &c.tensors, nullptr);
    CHECK(status == NORMFUSE_OK, "%s in C: %s", name, normfuse_last_error());
    const outcome got = outcome_of([&] { return call(options, cpp_side(all, of_cpp), nf::execution{}); });
    CHECK(got.status == NORMFUSE_OK, "%s: %s", name, got.text);
    CHECK(of_c.bytes == of_cpp.bytes, "%s: other bits than the C interface", name);
    CHECK(of_c.bytes != before.bytes, "%s wrote nothing", name);
}

#define COMPARE(name, c_options, options, all)                                                                         \
    compare(#name, normfuse_##name, c_options,                                                                         \
            [](const auto &o, const auto &t, const auto &e) { return nf::name(o, t, e); }, options, all)
#define COMPARE_BYTES(name, c_options, options, all)                                                                   \
    do {                                                                                                               \
        memory at(all);                                                                                                \
        c_side c(all, at);                                                                                             \
        (c_options).struct_bytes = sizeof(c_options);                                                                  \
        std::size_t want = 0;                                                                                          \
        CHECK(normfuse_##name(&(c_options), &c.tensors, nullptr, &want) == NORMFUSE_OK, #name);                        \
        CHECK(value_of([&] { return nf::name(options, cpp_side(all, at)); }) == want && want > 0, #name);              \
    } while (0)

std::vector<given> operator+(std::vector<given> a, const std::vector<given> &b)
{
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// ---- operators ------------------------------------------------------------------------------------------------------

void test_group_norm(normfuse_type type, bool last)
{
    const auto f32 = NORMFUSE_F32, f64 = NORMFUSE_F64;
    const auto wide = type == f64 ? f64 : f32;
    const std::vector<given> inputs = {GIVEN(pre_add, type, last, 2, 6, 5, 4), GIVEN(post_add, type, last, 2, 6, 5, 4),
                                       GIVEN(weight, f32, false, 6), GIVEN(bias, f64, false, 6),
                                       GIVEN(scale, f32, false, 2, 6), GIVEN(shift, f32, false, 2, 6)};
    const std::vector<given> x = {GIVEN(x, type, last, 2, 6, 5, 4)}, u = {GIVEN(u, type, last, 2, 6, 5, 4)};
    const std::vector<given> y = {GIVEN(y, type, false, 2, 6, 5, 4)}, dy = {GIVEN(dy, type, last, 2, 6, 5, 4)};
    const std::vector<given> saved = {GIVEN(mean, f64, false, 2, 3), GIVEN(rstd, wide, false, 2, 3)};
    const std::vector<given> gradients = {GIVEN(dx, type, last, 2, 6, 5, 4), GIVEN(dweight, f32, false, 6),
                                          GIVEN(dbias, f64, false, 6), GIVEN(dscale, f32, false, 2, 6),
                                          GIVEN(dshift, f32, false, 2, 6)};
    const std::vector<given> stats = {GIVEN(stats, f64, false, 2, 3, 3)}, sums = {GIVEN(sums, f64, false, 2, 6, 2)};
    const std::vector<given> dpost = {GIVEN(dpost_add, type, false, 2, 6, 5, 4)},
                                     du = {GIVEN(du, type, last, 2, 6, 5, 4)};

    normfuse_group_norm_options c = {};
    c.groups = 3;
    c.eps = 1e-3;
    c.activation = NORMFUSE_ELU;
    c.flags = NORMFUSE_HAS_ACT_PARAM;
    c.act_param = 0.5;
    nf::group_norm_options options;
    options.groups = 3;
    options.eps = 1e-3;
    options.activation = nf::activation::elu;
    options.act_param = 0.5;
    COMPARE(group_norm_forward, c, options, x + inputs + u + y + saved);
    COMPARE(group_norm_backward, c, options, x + inputs + saved + dy + du + gradients + dpost);
    COMPARE(group_norm_stats, c, options, x + std::vector<given>{inputs[0]} + u + stats);
    COMPARE(group_norm_apply, c, options, x + inputs + stats + y + saved);
    COMPARE(group_norm_backward_sums, c, options, x + inputs + saved + dy + sums + dpost);
    c.set_values = options.set_values = 200;
    COMPARE(group_norm_backward_apply, c, options, x + inputs + saved + dy + du + sums + gradients);
    c.set_values = options.set_values = 0;
    c.flags |= NORMFUSE_ACCUMULATE;
    options.accumulate = true;
    COMPARE(group_norm_backward, c, options, x + inputs + saved + dy + gradients);
    COMPARE(group_norm_stats, c, options, x + stats);
}

void test_scratch_bytes()
{
    const std::vector<given> all = {GIVEN(x, NORMFUSE_F32, false, 2, 6, 5, 4),
                                    GIVEN(y, NORMFUSE_F32, false, 2, 6, 5, 4)};
    const std::vector<given> back = {all[0], GIVEN(dy, NORMFUSE_F32, false, 2, 6, 5, 4),
                                     GIVEN(dx, NORMFUSE_F32, false, 2, 6, 5, 4),
                                     GIVEN(dweight, NORMFUSE_F32, false, 6)};
    normfuse_group_norm_options group = {};
    group.groups = 3;
    normfuse_batch_norm_options batch = {};
    batch.eps = 1e-5;
    normfuse_affine_options affine = {};
    nf::group_norm_options options;
    options.groups = 3;
    COMPARE_BYTES(group_norm_forward_scratch_bytes, group, options, all);
    COMPARE_BYTES(batch_norm_forward_scratch_bytes, batch, nf::batch_norm_options{}, all);
    COMPARE_BYTES(affine_forward_scratch_bytes, affine, nf::affine_options{}, all);
    COMPARE_BYTES(affine_backward_scratch_bytes, affine, nf::affine_options{}, back);
    const auto saved = back + std::vector<given>{GIVEN(mean, NORMFUSE_F64, false, 6),
                                                 GIVEN(rstd, NORMFUSE_F32, false, 6)};
    COMPARE_BYTES(batch_norm_backward_scratch_bytes, batch, nf::batch_norm_options{}, saved);
    COMPARE_BYTES(group_norm_backward_scratch_bytes, group, options, saved);

    // Scratch of the caller: enough of it is taken, less is refused.
    memory at(all);
    const std::size_t bytes =
        value_of([&] { return nf::group_norm_forward_scratch_bytes(options, cpp_side(all, at)); });
    void *const scratch = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    nf::execution where;
    where.scratch = scratch;
    where.scratch_bytes = bytes;
    where.threads = 1;
    CHECK(outcome_of([&] { return nf::group_norm_forward(options, cpp_side(all, at), where); }).status == NORMFUSE_OK,
          "scratch of the caller was refused");
    where.scratch_bytes = bytes - 1;
    CHECK(outcome_of([&] { return nf::group_norm_forward(options, cpp_side(all, at),
                                                         where); }).status == NORMFUSE_SCRATCH,
          "too little scratch was taken");
    std::free(scratch);
}

std::int64_t tasks_seen = 0;

void one_after_another(void *pool, std::int64_t tasks, void (*task)(void *context, std::int64_t i), void *context)
{
    *static_cast<std::int64_t *>(pool) += tasks;
    for (std::int64_t i = 0; i < tasks; i++)
        task(context, i);
}

void test_pool()
{
    std::vector<float> x(1 << 18, 1.0f), y(1 << 18);
    nf::tensors tensors;
    tensors.x = nf::contiguous(static_cast<const float *>(x.data()), {2, 8, 1 << 14});
    tensors.y = nf::contiguous(y.data(), {2, 8, 1 << 14});
    nf::group_norm_options options;
    options.groups = 2;
    nf::execution where;
    where.parallel_for = one_after_another;
    where.pool = &tasks_seen;
    where.threads = 2;
    CHECK(outcome_of([&] { return nf::group_norm_forward(options, tensors, where); }).status == NORMFUSE_OK, "a pool");
    CHECK(tasks_seen > 0, "the pool got no task");
}

void test_batch_norm()
{
    const auto f32 = NORMFUSE_F32, f64 = NORMFUSE_F64;
    const std::vector<given> base = {GIVEN(x, f32, true, 3, 4, 5, 2), GIVEN(weight, f32, false, 4),
                                     GIVEN(bias, f32, false, 4)};
    const std::vector<given> y = {GIVEN(y, f32, true, 3, 4, 5, 2)}, dy = {GIVEN(dy, f32, true, 3, 4, 5, 2)};
    const std::vector<given> saved = {GIVEN(mean, f64, false, 4), GIVEN(rstd, f32, false, 4)};
    const std::vector<given> running = {GIVEN(running_mean, f32, false, 4), GIVEN(running_var, f64, false, 4)};
    const std::vector<given> gradients = {GIVEN(dx, f32, true, 3, 4, 5, 2), GIVEN(dweight, f32, false, 4),
                                          GIVEN(dbias, f32, false, 4)};
    const std::vector<given> stats = {GIVEN(stats, f64, false, 4, 3)}, sums = {GIVEN(sums, f64, false, 4, 2)};

    normfuse_batch_norm_options c = {};
    c.eps = 1e-5;
    c.momentum = 0.1;
    nf::batch_norm_options options; // its defaults are these
    COMPARE(batch_norm_forward, c, options, base + y + saved + running);
    COMPARE(batch_norm_backward, c, options, base + saved + dy + gradients);
    COMPARE(batch_norm_stats, c, options, std::vector<given>{base[0]} + stats);
    COMPARE(batch_norm_apply, c, options, base + stats + y + saved + running);
    COMPARE(batch_norm_backward_sums, c, options, base + saved + dy + sums);
    c.set_values = options.set_values = 77;
    COMPARE(batch_norm_backward_apply, c, options, base + saved + dy + sums + gradients);
    c.set_values = options.set_values = 0;
    c.flags = NORMFUSE_CUMULATIVE;
    c.batches_seen = 4;
    options.batches_seen = 4;
    COMPARE(batch_norm_forward, c, options, base + y + saved + running);
    c.flags = NORMFUSE_EVALUATE;
    c.batches_seen = 0;
    options.batches_seen.reset();
    options.evaluate = true;
    COMPARE(batch_norm_forward, c, options, base + y + running);
    COMPARE(batch_norm_backward, c, options, base + running + dy + gradients);
}

void test_channel_norm()
{
    const auto f32 = NORMFUSE_F32;
    const std::vector<given> base = {GIVEN(x, f32, true, 3, 4, 5, 2), GIVEN(weight, f32, false, 4),
                                     GIVEN(bias, f32, false, 4)};
    const std::vector<given> y = {GIVEN(y, f32, true, 3, 4, 5, 2)}, dy = {GIVEN(dy, f32, true, 3, 4, 5, 2)};
    const std::vector<given> mean = {GIVEN(mean, NORMFUSE_F64, false, 3, 2, 10)},
                                    rstd = {GIVEN(rstd, f32, false, 3, 2, 10)};
    const std::vector<given> gradients = {GIVEN(dx, f32, true, 3, 4, 5, 2), GIVEN(dweight, f32, false, 4),
                                          GIVEN(dbias, f32, false, 4)};
    normfuse_channel_norm_options in_c = {};
    in_c.groups = 2;
    in_c.eps = 1e-5;
    nf::channel_norm_options options; // its other defaults are these
    options.groups = 2;
    COMPARE(channel_norm_forward, in_c, options, base + y + mean + rstd);
    COMPARE(channel_norm_backward, in_c, options, base + mean + rstd + dy + gradients);
    COMPARE_BYTES(channel_norm_forward_scratch_bytes, in_c, options, base + y);
    COMPARE_BYTES(channel_norm_backward_scratch_bytes, in_c, options, base + mean + rstd + dy + gradients);
    in_c.statistics = NORMFUSE_MEAN_SQUARE;
    options.statistics = nf::statistics::mean_square;
    in_c.eps_kind = NORMFUSE_EPS_OF_NORM;
    options.eps_kind = nf::eps_kind::of_norm;
    in_c.eps = options.eps = 2.0; // clamps some norms
    in_c.flags = NORMFUSE_HAS_ACT_PARAM;
    in_c.activation = NORMFUSE_ELU;
    options.activation = nf::activation::elu;
    in_c.act_param = 0.5;
    options.act_param = 0.5;
    COMPARE(channel_norm_forward, in_c, options, base + y + rstd);
    in_c.flags |= NORMFUSE_ACCUMULATE;
    options.accumulate = true;
    COMPARE(channel_norm_backward, in_c, options, base + rstd + dy + gradients);
}

void test_affine()
{
    const auto f32 = NORMFUSE_F32;
    const std::vector<given> base = {GIVEN(x, NORMFUSE_F16, true, 3, 4, 5, 2), GIVEN(weight, f32, false, 3, 4),
                                     GIVEN(bias, f32, false, 3, 4)};
    const std::vector<given> y = {GIVEN(y, NORMFUSE_F16, true, 3, 4, 5, 2)},
                                 dy = {GIVEN(dy, NORMFUSE_F16, true, 3, 4, 5, 2)};
    const std::vector<given> gradients = {GIVEN(dx, NORMFUSE_F16, true, 3, 4, 5, 2), GIVEN(dweight, f32, false, 3, 4),
                                          GIVEN(dbias, f32, false, 3, 4)};
    const std::vector<given> slope = {GIVEN(slope, NORMFUSE_BF16, false, 4)}, dslope = {GIVEN(dslope, f32, false, 4)};
    for (int activation = NORMFUSE_IDENTITY; activation <= NORMFUSE_PRELU; activation++) {
        const bool has_slope = activation == NORMFUSE_PRELU;
        const std::vector<given> inputs = has_slope ? base + slope : base,
                                          outputs = has_slope ? gradients + dslope : gradients;
        normfuse_affine_options c = {};
        c.activation = activation;
        nf::affine_options options;
        options.activation = static_cast<nf::activation>(activation);
        COMPARE(affine_forward, c, options, inputs + y);
        COMPARE(affine_backward, c, options, inputs + dy + outputs);
    }
}

void test_merges_and_fold()
{
    double in[3 * 4 * 3], want[4 * 3], got[4 * 3];
    for (int i = 0; i < 36; i++)
        in[i] = i % 3 == 0 ? 5.0 + i : 0.1 * i;
    const std::int64_t shards[] = {3, 4, 3}, sums_of[] = {3, 6, 2}, one[] = {4, 3}, sum[] = {6, 2};
    normfuse_axes axes[2];
    normfuse_tensor from = normfuse_tensor_contiguous(in, NORMFUSE_F64, 3, shards, &axes[0]);
    normfuse_tensor to = normfuse_tensor_contiguous(want, NORMFUSE_F64, 2, one, &axes[1]);
    CHECK(normfuse_stats_merge(&from, &to, nullptr) == NORMFUSE_OK, "stats_merge in C");
    const double *const read = in;
    CHECK(outcome_of([&] { return nf::stats_merge(nf::contiguous(read, {3, 4, 3}),
                                                  nf::contiguous(got, {4, 3})); }).status ==
              NORMFUSE_OK, "stats_merge");
    CHECK(std::memcmp(want, got, sizeof want) == 0, "stats_merge: other bits");
    from = normfuse_tensor_contiguous(in, NORMFUSE_F64, 3, sums_of, &axes[0]);
    to = normfuse_tensor_contiguous(want, NORMFUSE_F64, 2, sum, &axes[1]);
    CHECK(normfuse_sums_merge(&from, &to, nullptr) == NORMFUSE_OK, "sums_merge in C");
    CHECK(outcome_of([&] { return nf::sums_merge(nf::contiguous(read, {3, 6, 2}),
                                                 nf::contiguous(got, {6, 2})); }).status ==
              NORMFUSE_OK, "sums_merge");
    CHECK(std::memcmp(want, got, sizeof want) == 0, "sums_merge: other bits");

    // [3, 2, 3] convolution of 3 outputs; transposed [2, 3, 3].
    float conv[18], mean[3] = {1, 2, 3}, var[3] = {1, 4, 9}, weight[2][18], bias[2][3];
    for (int i = 0; i < 18; i++)
        conv[i] = static_cast<float>(i);
    for (int transposed = 0; transposed < 2; transposed++) {
        const std::int64_t sizes[] = {transposed ? 2 : 3, transposed ? 3 : 2, 3}, channels[] = {3};
        normfuse_axes a[5];
        const auto make = normfuse_tensor_contiguous;
        const normfuse_tensor c_conv = make(conv, NORMFUSE_F32, 3, sizes, &a[0]),
                                       c_mean = make(mean, NORMFUSE_F32, 1, channels, &a[1]),
                              c_var = make(var, NORMFUSE_F32, 1, channels, &a[2]),
                                      c_weight = make(weight[0], NORMFUSE_F32, 3, sizes, &a[3]),
                              c_bias = make(bias[0], NORMFUSE_F32, 1, channels, &a[4]);
        normfuse_tensors c = {};
        c.struct_bytes = sizeof c;
        c.running_mean = &c_mean;
        c.running_var = &c_var;
        CHECK(normfuse_batch_norm_fold(&c, 1e-5, transposed ? NORMFUSE_FOLD_TRANSPOSED : 0, &c_conv, nullptr, &c_weight,
                                       &c_bias) ==
                  NORMFUSE_OK, "fold in C: %s", normfuse_last_error());
        nf::tensors given;
        given.running_mean = nf::contiguous(mean, {3});
        given.running_var = nf::contiguous(var, {3});
        const outcome folded = outcome_of([&] {
            return nf::batch_norm_fold(given, 1e-5, nf::contiguous(conv, {sizes[0], sizes[1], 3}), {},
                                       nf::contiguous(weight[1], {sizes[0], sizes[1], 3}), nf::contiguous(bias[1], {3}),
                                       transposed != 0);
        });
        CHECK(folded.status == NORMFUSE_OK, "fold: %s", folded.text);
        CHECK(std::memcmp(weight[0], weight[1], sizeof conv) == 0 && std::memcmp(bias[0], bias[1], sizeof bias[0]) == 0,
              "fold: other bits");
    }
}

void test_tensors()
{
    float data[1];
    const std::int64_t sizes[] = {2, 3, 5, 7, 4};
    const nf::tensor made[2][5] = {
        {nf::contiguous(data, {2}), nf::contiguous(data, {2, 3}), nf::contiguous(data, {2, 3, 5}),
         nf::contiguous(data, {2, 3, 5, 7}), nf::contiguous(data, {2, 3, 5, 7, 4})},
        {nf::channels_last(data, {2}), nf::channels_last(data, {2, 3}), nf::channels_last(data, {2, 3, 5}),
         nf::channels_last(data, {2, 3, 5, 7}), nf::channels_last(data, {2, 3, 5, 7, 4})}};
    for (int last = 0; last < 2; last++)
        for (std::int32_t axes = 1; axes <= 5; axes++) {
            normfuse_axes held;
            const normfuse_tensor want = (last ? normfuse_tensor_channels_last : normfuse_tensor_contiguous)(
                data, NORMFUSE_F32, axes, sizes, &held);
            const nf::tensor &tensor = made[last][axes - 1];
            const normfuse_tensor got = tensor.c_tensor();
            bool same = got.ndim == want.ndim && got.data == want.data &&
                        got.device.device_type == want.device.device_type &&
                        got.dtype.code == want.dtype.code && got.dtype.bits == want.dtype.bits && got.dtype.lanes == 1;
            std::int64_t step = 1;
            for (std::int32_t a = axes - 1; a >= 0 && same; a--) {
                const std::int64_t stride = got.strides != nullptr ? got.strides[a] : step;
                same = got.shape[a] == want.shape[a] && stride == (want.strides != nullptr ? want.strides[a] : step);
                step *= sizes[a];
            }
            CHECK(same, "%s of %d axes is not C's", last ? "channels_last" : "contiguous", static_cast<int>(axes));
        }
    for (const auto type : {nf::type::f64, nf::type::f32, nf::type::f16, nf::type::bf16}) {
        normfuse_axes held;
        const normfuse_tensor want = normfuse_tensor_contiguous(data, static_cast<normfuse_type>(type), 1, sizes,
                                                                &held);
        const nf::tensor tensor = nf::contiguous(type, static_cast<void *>(data), {2});
        CHECK(tensor.c_tensor().dtype.code == want.dtype.code && tensor.c_tensor().dtype.bits == want.dtype.bits,
              "a dtype");
    }
    const nf::tensor there = nf::contiguous(data, {2}).on(NORMFUSE_CUDA, 3);
    CHECK(there.c_tensor().device.device_type == 2 && there.c_tensor().device.device_id == 3, "a device");
    CHECK(!nf::tensor().present() && there.present(), "absent tensors");
    CHECK(nf::contiguous(data, {1, 1, 1, 1, 1, 1, 1, 1, 1}).axes() == 0 && nf::strided(data, {2, 3}, {1}).axes() == 0,
          "axes");
    const float *const read = data;
    CHECK(nf::contiguous(read, {1}).read_only() && nf::channels_last(read, {1, 1, 1}).read_only() &&
              nf::strided(read, {1}, {1}).read_only() && !nf::channels_last(data, {1, 1, 1}).read_only(), "read_only");
    // A slice of channels 1 to 2 of [2, 4, 3] has the result of the dense tensor.
    float whole[24], dense[12], y[2][12];
    for (int i = 0; i < 24; i++)
        whole[i] = static_cast<float>(i * i % 13);
    for (int n = 0; n < 2; n++)
        std::memcpy(dense + 6 * n, whole + 12 * n + 3, 6 * sizeof(float));
    nf::group_norm_options options;
    options.groups = 1;
    nf::tensors tensors;
    tensors.x = nf::strided(whole + 3, {2, 2, 3}, {12, 3, 1});
    tensors.y = nf::contiguous(y[0], {2, 2, 3});
    const outcome sliced = outcome_of([&] { return nf::group_norm_forward(options, tensors); });
    tensors.x = nf::contiguous(dense, {2, 2, 3});
    tensors.y = nf::contiguous(y[1], {2, 2, 3});
    const outcome whole_of_it = outcome_of([&] { return nf::group_norm_forward(options, tensors); });
    CHECK(sliced.status == NORMFUSE_OK && whole_of_it.status == NORMFUSE_OK &&
          std::memcmp(y[0], y[1], sizeof y[0]) == 0, "strides: %s", sliced.text);
}

// ---- refusals -------------------------------------------------------------------------------------------------------

template <class Call> void expect(const char *name, normfuse_status status, const char *text, Call call)
{
    const outcome got = outcome_of(call);
    CHECK(got.status == status, "%s: status %d, expected %d", name, static_cast<int>(got.status),
          static_cast<int>(status));
    CHECK(std::strcmp(got.text, text) == 0, "%s: text \"%s\", expected \"%s\"", name, got.text, text);
}

// The same text as a C call that has the same fault.
template <class Change> void refused_alike(const char *name, Change change)
{
    float x[48] = {0}, y[24];
    nf::tensors tensors;
    tensors.x = nf::contiguous(x, {2, 4, 3});
    tensors.y = nf::contiguous(y, {2, 4, 3});
    normfuse_group_norm_options c = {};
    c.struct_bytes = sizeof c;
    c.groups = 2;
    c.eps = 1e-5;
    nf::group_norm_options options;
    options.groups = 2;
    change(c, options, tensors);
    const normfuse_tensor c_x = tensors.x.c_tensor(), c_y = tensors.y.c_tensor();
    normfuse_tensors c_tensors = {};
    c_tensors.struct_bytes = sizeof c_tensors;
    c_tensors.x = tensors.x.present() ? &c_x : nullptr;
    c_tensors.y = &c_y;
    const normfuse_status status = normfuse_group_norm_forward(&c, &c_tensors, nullptr);
    char text[512];
    std::strcpy(text, normfuse_last_error());
    CHECK(status != NORMFUSE_OK && text[0] != '\0', "%s: C takes it", name);
    expect(name, status, text, [&] { return nf::group_norm_forward(options, tensors); });
}

void test_refusals()
{
    using c_options = normfuse_group_norm_options;
    using options = nf::group_norm_options;
    refused_alike("no groups", [](c_options &c, options &o, nf::tensors &) { c.groups = o.groups = 0; });
    refused_alike("groups do not divide C", [](c_options &c, options &o, nf::tensors &) { c.groups = o.groups = 3; });
    refused_alike("no x", [](c_options &, options &, nf::tensors &t) { t.x = {}; });
    refused_alike("NULL data",
                  [](c_options &, options &,
                     nf::tensors &t) { t.x = nf::contiguous(static_cast<float *>(nullptr), {2, 4, 3}); });
    refused_alike("overlap", [](c_options &, options &, nf::tensors &t) {
        t.y = nf::contiguous(static_cast<float *>(t.x.data()) + 1, {2, 4, 3});
    });
    refused_alike("strides", [](c_options &, options &, nf::tensors &t) {
        t.x = nf::strided(static_cast<float *>(t.x.data()), {2, 4, 3}, {24, 6, 2});
    });
    refused_alike("axes", [](c_options &, options &, nf::tensors &t) {
        t.x = nf::contiguous(static_cast<float *>(t.x.data()), {2, 4, 3, 1, 1, 1});
    });
    refused_alike("too many axes", [](c_options &, options &, nf::tensors &t) {
        t.x = nf::contiguous(static_cast<float *>(t.x.data()), {2, 4, 3, 1, 1, 1, 1, 1, 1, 1});
    });
    refused_alike("shapes", [](c_options &, options &, nf::tensors &t) {
        t.x = nf::contiguous(static_cast<float *>(t.x.data()), {2, 4, 2});
    });
    refused_alike("activation", [](c_options &c, options &o, nf::tensors &) {
        c.activation = 99;
        o.activation = static_cast<nf::activation>(99);
    });
    refused_alike("device", [](c_options &, options &, nf::tensors &t) { t.x = t.x.on(9, 0); });

    float x[24] = {0};
    nf::tensors tensors;
    tensors.x = nf::contiguous(x, {2, 4, 3});
    tensors.y = nf::contiguous(static_cast<const float *>(x), {2, 4, 3});
    options two;
    two.groups = 2;
    expect("read-only y", NORMFUSE_BAD_ARGUMENT, "tensors.y is written, and is a read-only tensor",
           [&] { return nf::group_norm_forward(two, tensors); });
    tensors.running_mean = nf::contiguous(static_cast<const float *>(x), {4});
    tensors.y = {};
    expect("read-only running_mean", NORMFUSE_BAD_ARGUMENT,
           "tensors.running_mean is written, and is a read-only tensor",
           [&] { return nf::batch_norm_forward({}, tensors); });
    const double in[3] = {0, 0, 0};
    expect("read-only out", NORMFUSE_BAD_ARGUMENT, "out is written, and is a read-only tensor",
           [&] { return nf::stats_merge(nf::contiguous(in, {1, 3}), nf::contiguous(in, {3})); });
    normfuse_stats_merge(nullptr, nullptr, nullptr);
    char text[512];
    std::strcpy(text, normfuse_last_error());
    expect("absent in", NORMFUSE_BAD_ARGUMENT, text, [&] { return nf::stats_merge({}, {}); });
}

void test_information()
{
    std::int64_t want = 0;
    float x[24];
    const nf::tensor tensor = nf::contiguous(x, {2, 4, 3});
    const normfuse_tensor c = tensor.c_tensor();
    CHECK(normfuse_sample_quantum(&c, &want) == NORMFUSE_OK && want > 0, "sample_quantum in C");
    CHECK(value_of([&] { return nf::sample_quantum(tensor); }) == want, "sample_quantum");
    CHECK(std::strcmp(value_of([] { return nf::info(); }).version, normfuse_version()) == 0, "info");
    CHECK(std::strcmp(nf::version(), normfuse_version()) == 0, "version");
    std::size_t bytes = 0;
    CHECK(outcome_of([] { return nf::sync_bytes(0); }).status == normfuse_sync_bytes(0, &bytes), "sync_bytes");
    CHECK(outcome_of([] { return nf::prepare(1 << 20); }).status == normfuse_prepare(1 << 20), "prepare");
    CHECK(outcome_of([] { return nf::use_compiler(nullptr); }).status == NORMFUSE_BAD_ARGUMENT, "use_compiler");
    normfuse_compiler_information compiler{};
    compiler.struct_bytes = sizeof compiler;
    CHECK(outcome_of([] { return nf::compiler_info(); }).status == normfuse_compiler_info(&compiler), "compiler_info");
    CHECK(outcome_of([] { return nf::prepare(-1, nullptr, nullptr); }).status == normfuse_prepare(-1), "prepare");
}

} // namespace

int main()
{
    for (const auto type : {NORMFUSE_F64, NORMFUSE_F32, NORMFUSE_F16, NORMFUSE_BF16})
        for (const bool last : {false, true})
            test_group_norm(type, last);
    test_scratch_bytes();
    test_pool();
    test_batch_norm();
    test_channel_norm();
    test_affine();
    test_merges_and_fold();
    test_tensors();
    test_refusals();
    test_information();
    return harness_close();
}
