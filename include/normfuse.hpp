// SPDX-License-Identifier: MIT
//
// normfuse.hpp - normfuse.h for C++17: tensors as values, options as aggregates with defaults, errors as exceptions or
// as results. Every function calls the one C function of its name; shapes, units and rules are those of normfuse.h.
//
//     const normfuse::tensor in = normfuse::contiguous(x, {2, 64, 56, 56});      // float *x: N, C, H, W
//     normfuse::tensors tensors;
//     tensors.x = in;
//     tensors.y = normfuse::contiguous(y, {2, 64, 56, 56});
//     normfuse::group_norm_options options;
//     options.groups = 8;
//     options.activation = normfuse::activation::silu;
//     normfuse::group_norm_forward(options, tensors);
//
// Memory. The header allocates none: a tensor is a view of the caller's memory and holds its sizes and strides, a call
// needs a few KiB of stack beside the C library's. Scratch memory is the caller's (execution::scratch, with the size
// that ..._scratch_bytes says); without it the C library allocates it for CPU tensors and refuses CUDA tensors.
//
// Errors. A status other than NORMFUSE_OK is thrown as normfuse::error, which holds the status and the library's text.
// With NORMFUSE_NO_EXCEPTIONS defined, or exceptions turned off in the compiler, functions return normfuse::result
// instead. Files of one program may differ in that.
#ifndef NORMFUSE_HPP
#define NORMFUSE_HPP

#include <normfuse.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <optional>
#include <type_traits>

#if !defined(NORMFUSE_NO_EXCEPTIONS) && !defined(__cpp_exceptions)
#define NORMFUSE_NO_EXCEPTIONS 1
#endif

namespace normfuse
{

// ---- tensors --------------------------------------------------------------------------------------------------------

enum class type { f64 = NORMFUSE_F64, f32 = NORMFUSE_F32, f16 = NORMFUSE_F16, bf16 = NORMFUSE_BF16 };

// The type of elements of T. Specialize it for 16-bit types of the program:
//     template <> struct normfuse::element<_Float16> { static constexpr type value = type::f16; };
template <class T> struct element;
template <> struct element<double> {
    static constexpr type value = type::f64;
};
template <> struct element<float> {
    static constexpr type value = type::f32;
};

// A view of the caller's memory; a default-constructed tensor is absent, which is NULL in normfuse_tensors. Copies view
// the same memory. Made by contiguous, channels_last and strided. It has 1 to 8 axes; one that is made with fewer or
// more has 0 axes, and every operator refuses it.
class tensor
{
public:
    static constexpr std::int32_t max_axes = 8; // operators take up to 5, batch_norm_fold up to 8

    tensor() = default;

    // sizes: `axes` of them. strides: in elements, as many; null: row-major. read_only: calls that would write it are
    // refused with NORMFUSE_BAD_ARGUMENT.
    tensor(void *data, type element_type, const std::int64_t *sizes, const std::int64_t *strides, std::int32_t axes,
           bool read_only = false) noexcept
        : data_(data), type_(element_type), axes_(axes >= 1 && axes <= max_axes ? axes : 0), present_(true),
          read_only_(read_only), row_major_(strides == nullptr)
    {
        for (std::int32_t a = 0; a < axes_; a++) {
            shape_[a] = sizes[a];
            strides_[a] = strides != nullptr ? strides[a] : 0;
        }
    }

    // The same memory on a device, NORMFUSE_CPU (the default) or NORMFUSE_CUDA.
    [[nodiscard]] tensor on(std::int32_t device_type, std::int32_t device_id) const noexcept
    {
        tensor other = *this;
        other.device_ = {device_type, device_id};
        return other;
    }

    [[nodiscard]] bool present() const noexcept { return present_; }
    [[nodiscard]] bool read_only() const noexcept { return read_only_; }
    [[nodiscard]] std::int32_t axes() const noexcept { return axes_; }
    [[nodiscard]] std::int64_t size(std::int32_t axis) const noexcept { return shape_[axis]; } // axis below axes()
    [[nodiscard]] void *data() const noexcept { return data_; }

    // As C has it. Valid for as long as this object is where it is.
    [[nodiscard]] normfuse_tensor c_tensor() const noexcept
    {
        // Codes of DLPack: 2 an IEEE float, 4 a bfloat. The library writes to neither sizes nor strides.
        normfuse_tensor c{};
        c.data = data_;
        c.device = device_;
        c.ndim = axes_;
        c.dtype.code = type_ == type::bf16 ? 4 : 2;
        c.dtype.bits = type_ == type::f64 ? 64 : type_ == type::f32 ? 32 : 16;
        c.dtype.lanes = 1;
        c.shape = const_cast<std::int64_t *>(shape_);
        c.strides = row_major_ ? nullptr : const_cast<std::int64_t *>(strides_);
        return c;
    }

private:
    void *data_ = nullptr;
    type type_ = type::f32;
    std::int32_t axes_ = 0;
    normfuse_device device_ = {NORMFUSE_CPU, 0};
    bool present_ = false, read_only_ = false, row_major_ = true;
    std::int64_t shape_[max_axes] = {}, strides_[max_axes] = {};
};

namespace detail
{
inline std::int32_t count(std::initializer_list<std::int64_t> values) noexcept
{
    return values.size() <= static_cast<std::size_t>(tensor::max_axes) ? static_cast<std::int32_t>(values.size()) : 0;
}
template <class T> using element_of = element<std::remove_const_t<T>>;
} // namespace detail

// A row-major tensor (NCHW, NCDHW, NCL, [N, C], or a vector). Memory that is const is read only.
inline tensor contiguous(type element_type, void *data, std::initializer_list<std::int64_t> sizes) noexcept
{
    return {data, element_type, sizes.begin(), nullptr, detail::count(sizes)};
}
inline tensor contiguous(type element_type, const void *data, std::initializer_list<std::int64_t> sizes) noexcept
{
    return {const_cast<void *>(data), element_type, sizes.begin(), nullptr, detail::count(sizes), true};
}
template <class T> tensor contiguous(T *data, std::initializer_list<std::int64_t> sizes) noexcept
{
    using pointer = std::conditional_t<std::is_const_v<T>, const void *, void *>;
    return contiguous(detail::element_of<T>::value, static_cast<pointer>(data), sizes);
}

// Any strides, in elements, one for each size; a different number of them makes a tensor of 0 axes.
inline tensor strided(type element_type, void *data, std::initializer_list<std::int64_t> sizes,
                      std::initializer_list<std::int64_t> strides) noexcept
{
    return {data, element_type, sizes.begin(), strides.begin(),
            sizes.size() == strides.size() ? detail::count(sizes) : 0};
}
inline tensor strided(type element_type, const void *data, std::initializer_list<std::int64_t> sizes,
                      std::initializer_list<std::int64_t> strides) noexcept
{
    return {const_cast<void *>(data), element_type, sizes.begin(), strides.begin(),
            sizes.size() == strides.size() ? detail::count(sizes) : 0, true};
}
template <class T>
tensor strided(T *data, std::initializer_list<std::int64_t> sizes, std::initializer_list<std::int64_t> strides) noexcept
{
    using pointer = std::conditional_t<std::is_const_v<T>, const void *, void *>;
    return strided(detail::element_of<T>::value, static_cast<pointer>(data), sizes, strides);
}

// Channels last in memory (NHWC, NDHWC, NLC); `sizes` are still N, C, spatial.
inline tensor channels_last(type element_type, const void *data, std::initializer_list<std::int64_t> sizes,
                            bool read_only = true) noexcept
{
    std::int64_t strides[tensor::max_axes] = {};
    const std::int32_t axes = detail::count(sizes);
    const std::int64_t *const size = sizes.begin();
    std::uint64_t step = axes >= 2 ? static_cast<std::uint64_t>(size[1]) : 1; // unsigned: sizes that overflow are refused later
    for (std::int32_t a = axes - 1; a >= 0; a--) {
        if (a == 1 && axes >= 2) {
            strides[a] = 1;
            continue;
        }
        strides[a] = static_cast<std::int64_t>(step);
        step *= static_cast<std::uint64_t>(size[a]);
    }
    return {const_cast<void *>(data), element_type, size, strides, axes, read_only};
}
inline tensor channels_last(type element_type, void *data, std::initializer_list<std::int64_t> sizes) noexcept
{
    return channels_last(element_type, data, sizes, false);
}
template <class T> tensor channels_last(T *data, std::initializer_list<std::int64_t> sizes) noexcept
{
    return channels_last(detail::element_of<T>::value, data, sizes, std::is_const_v<T>);
}

// The tensors of one call, as normfuse_tensors; those that are absent are NULL.
struct tensors {
    tensor x, pre_add, post_add, weight, bias, scale, shift; // inputs
    tensor y, u;                                             // outputs of forward; y is an input of a backward
    tensor mean, rstd;                                       // saved by forward, read by backward
    tensor running_mean, running_var;                        // updated in training, read in evaluation
    tensor dy, du;                                           // inputs of backward
    tensor dx, dweight, dbias, dscale, dshift, dpost_add;    // outputs of backward
    tensor stats, sums;                                      // f64: of shards
    tensor pre_bias, dpre_bias;                              // an input, and an output of backward
    tensor slope, dslope;                                    // prelu's, likewise
};

// ---- options --------------------------------------------------------------------------------------------------------

enum class activation {
    identity = NORMFUSE_IDENTITY,
    relu = NORMFUSE_RELU,
    leaky_relu = NORMFUSE_LEAKY_RELU,
    silu = NORMFUSE_SILU,
    gelu = NORMFUSE_GELU,
    gelu_tanh = NORMFUSE_GELU_TANH,
    hardswish = NORMFUSE_HARDSWISH,
    elu = NORMFUSE_ELU,
    mish = NORMFUSE_MISH,
    relu6 = NORMFUSE_RELU6,
    prelu = NORMFUSE_PRELU
};

struct group_norm_options {
    std::int64_t groups = 0; // divides C; C for instance norm. It has no default: 0 is refused where C is not 0
    double eps = 1e-5;
    normfuse::activation activation = normfuse::activation::identity;
    std::optional<double> act_param = std::nullopt; // slope of leaky_relu, alpha of elu; absent: 0.01 and 1
    bool evaluate = false;                          // groups = C: normalize with running_mean and running_var
    bool accumulate = false;                        // continue from what stats, sums, dweight and dbias hold
    double momentum = 0.1;                          // groups = C: share of the new running statistics
    std::optional<std::int64_t> batches_seen = std::nullopt; // present: cumulative average, momentum 1/(batches_seen + 1)
    std::int64_t set_values = 0; // backward_apply: values that a group has over all shards; 0: those of x
};

struct batch_norm_options {
    double eps = 1e-5;
    normfuse::activation activation = normfuse::activation::identity;
    std::optional<double> act_param = std::nullopt;
    bool evaluate = false;
    bool accumulate = false;
    double momentum = 0.1;
    std::optional<std::int64_t> batches_seen = std::nullopt;
    std::int64_t set_values = 0;
};

enum class statistics {
    mean_and_variance = NORMFUSE_MEAN_AND_VARIANCE, // layer norm
    mean_square = NORMFUSE_MEAN_SQUARE              // RMS norm; tensors::mean is absent
};
enum class eps_kind { added = NORMFUSE_EPS_ADDED, of_norm = NORMFUSE_EPS_OF_NORM };

struct channel_norm_options {
    std::int64_t groups = 1; // of channels, divides C
    double eps = 1e-5;
    normfuse::statistics statistics = normfuse::statistics::mean_and_variance;
    normfuse::eps_kind eps_kind = normfuse::eps_kind::added;
    normfuse::activation activation = normfuse::activation::identity;
    std::optional<double> act_param = std::nullopt;
    bool accumulate = false;
};

struct affine_options {
    normfuse::activation activation = normfuse::activation::identity;
    std::optional<double> act_param = std::nullopt;
    bool accumulate = false;
};

// Threads and memory of a call, as normfuse_exec: threads of the built-in pool and the C library's scratch memory
// unless said.
struct execution {
    void *stream = nullptr;  // CUDA: the CUstream; null: the default stream
    void *scratch = nullptr; // 64-byte aligned
    std::size_t scratch_bytes = 0;
    void *sync = nullptr; // CUDA: sync_bytes(device) bytes, zeroed once
    std::size_t sync_bytes = 0;
    void (*parallel_for)(void *pool, std::int64_t tasks, void (*task)(void *context, std::int64_t i),
                         void *context) = nullptr; // no exception may leave it
    void *pool = nullptr;
    std::int32_t threads = 0; // at most so many; 0: the default
};

// ---- errors ---------------------------------------------------------------------------------------------------------

// The objection of a call: a status, and the library's text, at most 511 characters of it.
class error : public std::exception
{
public:
    explicit error(normfuse_status status, const char *text = "") noexcept : status_(status)
    {
        if (text[0] == '\0')
            text = normfuse_status_text(status);
        std::size_t i = 0;
        for (; i + 1 < sizeof text_ && text[i] != '\0'; i++)
            text_[i] = text[i];
        text_[i] = '\0';
    }
    [[nodiscard]] normfuse_status status() const noexcept { return status_; }
    [[nodiscard]] const char *what() const noexcept override { return text_; }

private:
    normfuse_status status_;
    char text_[512];
};

// Two namespaces, so that files of one program may choose differently.
#if defined(NORMFUSE_NO_EXCEPTIONS)
inline namespace with_results
{
// The result of a call: a value (none for void), or an error. value() may be called where there is no error only.
template <class T> class [[nodiscard]] result
{
public:
    result(T value) noexcept : value_(value), error_(NORMFUSE_OK) {}
    result(const normfuse::error &failure) noexcept : value_{}, error_(failure) {}
    explicit operator bool() const noexcept { return error_.status() == NORMFUSE_OK; }
    const T &value() const noexcept { return value_; }
    const normfuse::error &error() const noexcept { return error_; }

private:
    T value_;
    normfuse::error error_;
};
template <> class [[nodiscard]] result<void>
{
public:
    result() noexcept : error_(NORMFUSE_OK) {}
    result(const normfuse::error &failure) noexcept : error_(failure) {}
    explicit operator bool() const noexcept { return error_.status() == NORMFUSE_OK; }
    const normfuse::error &error() const noexcept { return error_; }

private:
    normfuse::error error_;
};
#else
inline namespace with_exceptions
{
// The result of a call: the value. Errors are thrown as normfuse::error.
template <class T> using result = T;
#endif

namespace detail
{

template <class T> result<T> fail(normfuse_status status, const char *text)
{
#if defined(NORMFUSE_NO_EXCEPTIONS)
    return normfuse::error(status, text);
#else
    throw normfuse::error(status, text);
#endif
}

inline result<void> finish(normfuse_status status)
{
    if (status != NORMFUSE_OK)
        return fail<void>(status, normfuse_last_error());
    return result<void>();
}
template <class T> result<T> finish(normfuse_status status, const T &value)
{
    if (status != NORMFUSE_OK)
        return fail<T>(status, normfuse_last_error());
    return value;
}

// Calls, as bits.
enum : unsigned { forward = 1, backward = 2, stats = 4, apply = 8, backward_sums = 16, backward_apply = 32, reads = 0 };

struct field {
    tensor tensors::*from;
    const normfuse_tensor *normfuse_tensors::*to;
    unsigned written_by;
    const char *text; // where the tensor is read-only and written
};

#define NORMFUSE_FIELD(name, written_by)                                                                               \
    {                                                                                                                  \
        &tensors::name, &normfuse_tensors::name, written_by, "tensors." #name " is written, and is a read-only tensor" \
    }
inline constexpr field fields[] = {
    NORMFUSE_FIELD(x, reads),
    NORMFUSE_FIELD(pre_add, reads),
    NORMFUSE_FIELD(post_add, reads),
    NORMFUSE_FIELD(weight, reads),
    NORMFUSE_FIELD(bias, reads),
    NORMFUSE_FIELD(scale, reads),
    NORMFUSE_FIELD(shift, reads),
    NORMFUSE_FIELD(y, forward | apply),
    NORMFUSE_FIELD(u, forward | stats),
    NORMFUSE_FIELD(mean, forward | apply),
    NORMFUSE_FIELD(rstd, forward | apply),
    NORMFUSE_FIELD(running_mean, forward | apply), // but in evaluation
    NORMFUSE_FIELD(running_var, forward | apply),
    NORMFUSE_FIELD(dy, reads),
    NORMFUSE_FIELD(du, reads),
    NORMFUSE_FIELD(dx, backward | backward_apply),
    NORMFUSE_FIELD(dweight, backward | backward_apply),
    NORMFUSE_FIELD(dbias, backward | backward_apply),
    NORMFUSE_FIELD(dscale, backward | backward_apply),
    NORMFUSE_FIELD(dshift, backward | backward_apply),
    NORMFUSE_FIELD(dpost_add, backward | backward_sums),
    NORMFUSE_FIELD(stats, stats),
    NORMFUSE_FIELD(sums, backward_sums),
    NORMFUSE_FIELD(pre_bias, reads),
    NORMFUSE_FIELD(dpre_bias, backward | backward_apply),
    NORMFUSE_FIELD(slope, reads),
    NORMFUSE_FIELD(dslope, backward | backward_sums),
};
#undef NORMFUSE_FIELD
inline constexpr std::size_t field_count = sizeof fields / sizeof fields[0];
static_assert(sizeof(normfuse_tensors) == 2 * sizeof(std::uint32_t) + field_count * sizeof(void *), "a field is missing");

// normfuse_tensors and what it points to. Not copied: it points to itself.
class c_tensors
{
public:
    explicit c_tensors(const tensors &from) noexcept
    {
        c.struct_bytes = sizeof c;
        for (std::size_t i = 0; i < field_count; i++)
            if ((from.*fields[i].from).present()) {
                held_[i] = (from.*fields[i].from).c_tensor();
                c.*fields[i].to = &held_[i];
            }
    }
    c_tensors(const c_tensors &) = delete;
    c_tensors &operator=(const c_tensors &) = delete;

    normfuse_tensors c{};

private:
    normfuse_tensor held_[field_count] = {};
};

// NULL, or what is wrong.
inline const char *written_read_only(const tensors &given, unsigned call, bool evaluate) noexcept
{
    for (const field &f : fields) {
        const bool is_running = f.to == &normfuse_tensors::running_mean || f.to == &normfuse_tensors::running_var;
        if ((f.written_by & call) != 0 && (given.*f.from).read_only() && !(is_running && evaluate))
            return f.text;
    }
    return nullptr;
}

template <class C, class Options> C shared_options(const Options &from) noexcept
{
    C c{};
    c.struct_bytes = sizeof c;
    c.activation = static_cast<std::int32_t>(from.activation);
    c.act_param = from.act_param.value_or(0.0);
    c.flags = (from.act_param ? static_cast<std::uint32_t>(NORMFUSE_HAS_ACT_PARAM) : 0u) |
              (from.accumulate ? static_cast<std::uint32_t>(NORMFUSE_ACCUMULATE) : 0u);
    return c;
}
template <class C, class Options> C norm_options(const Options &from) noexcept
{
    C c = shared_options<C>(from);
    c.flags |= (from.evaluate ? static_cast<std::uint32_t>(NORMFUSE_EVALUATE) : 0u) |
               (from.batches_seen ? static_cast<std::uint32_t>(NORMFUSE_CUMULATIVE) : 0u);
    c.eps = from.eps;
    c.momentum = from.momentum;
    c.batches_seen = from.batches_seen.value_or(0);
    c.set_values = from.set_values;
    return c;
}
inline normfuse_group_norm_options c_options(const group_norm_options &from) noexcept
{
    auto c = norm_options<normfuse_group_norm_options>(from);
    c.groups = from.groups;
    return c;
}
inline normfuse_batch_norm_options c_options(const batch_norm_options &from) noexcept
{
    return norm_options<normfuse_batch_norm_options>(from);
}
inline normfuse_channel_norm_options c_options(const channel_norm_options &from) noexcept
{
    auto c = shared_options<normfuse_channel_norm_options>(from);
    c.groups = from.groups;
    c.eps = from.eps;
    c.statistics = static_cast<std::int32_t>(from.statistics);
    c.eps_kind = static_cast<std::int32_t>(from.eps_kind);
    return c;
}
inline normfuse_affine_options c_options(const affine_options &from) noexcept
{
    return shared_options<normfuse_affine_options>(from);
}
inline bool evaluates(const affine_options &) noexcept
{
    return false;
}
inline bool evaluates(const channel_norm_options &) noexcept
{
    return false;
}
template <class Options> bool evaluates(const Options &options) noexcept
{
    return options.evaluate;
}

inline normfuse_exec c_exec(const execution &from) noexcept
{
    normfuse_exec c{};
    c.struct_bytes = sizeof c;
    c.stream = from.stream;
    c.scratch = from.scratch;
    c.scratch_bytes = from.scratch_bytes;
    c.sync = from.sync;
    c.sync_bytes = from.sync_bytes;
    c.parallel_for = from.parallel_for;
    c.pool = from.pool;
    c.threads = from.threads;
    return c;
}

template <class Options, class COptions>
result<void> call(normfuse_status (*function)(const COptions *, const normfuse_tensors *, const normfuse_exec *),
                  unsigned kind, const Options &options, const tensors &given, const execution &where)
{
    if (const char *const text = written_read_only(given, kind, evaluates(options)))
        return fail<void>(NORMFUSE_BAD_ARGUMENT, text);
    const COptions own = c_options(options);
    const c_tensors all(given);
    const normfuse_exec exec = c_exec(where);
    return finish(function(&own, &all.c, &exec));
}

template <class Options, class COptions>
result<std::size_t> bytes(normfuse_status (*function)(const COptions *, const normfuse_tensors *, const normfuse_exec *,
                                                      std::size_t *),
                          const Options &options, const tensors &given, const execution &where)
{
    const COptions own = c_options(options);
    const c_tensors all(given);
    const normfuse_exec exec = c_exec(where);
    std::size_t size = 0;
    const normfuse_status status = function(&own, &all.c, &exec, &size);
    return finish(status, size);
}

inline result<void> merge(normfuse_status (*function)(const normfuse_tensor *, const normfuse_tensor *,
                                                      const normfuse_exec *),
                          const tensor &in, const tensor &out, const execution &where)
{
    if (out.read_only())
        return fail<void>(NORMFUSE_BAD_ARGUMENT, "out is written, and is a read-only tensor");
    const normfuse_tensor c_in = in.c_tensor(), c_out = out.c_tensor();
    const normfuse_exec exec = c_exec(where);
    return finish(function(in.present() ? &c_in : nullptr, out.present() ? &c_out : nullptr, &exec));
}

} // namespace detail

// ---- operators ------------------------------------------------------------------------------------------------------

// Each is the C function of its name. ..._scratch_bytes: the size of execution::scratch for the call and for its
// phases.
#define NORMFUSE_OPERATOR(name)                                                                                        \
    inline result<void> name##_forward(const name##_options &options, const tensors &given,                            \
                                       const execution &where = {})                                                    \
    {                                                                                                                  \
        return detail::call(normfuse_##name##_forward, detail::forward, options, given, where);                        \
    }                                                                                                                  \
    inline result<std::size_t> name##_forward_scratch_bytes(const name##_options &options, const tensors &given,       \
                                                            const execution &where = {})                               \
    {                                                                                                                  \
        return detail::bytes(normfuse_##name##_forward_scratch_bytes, options, given, where);                          \
    }                                                                                                                  \
    inline result<void> name##_backward(const name##_options &options, const tensors &given,                           \
                                        const execution &where = {})                                                   \
    {                                                                                                                  \
        return detail::call(normfuse_##name##_backward, detail::backward, options, given, where);                      \
    }                                                                                                                  \
    inline result<std::size_t> name##_backward_scratch_bytes(const name##_options &options, const tensors &given,      \
                                                             const execution &where = {})                              \
    {                                                                                                                  \
        return detail::bytes(normfuse_##name##_backward_scratch_bytes, options, given, where);                         \
    }
NORMFUSE_OPERATOR(group_norm)
NORMFUSE_OPERATOR(batch_norm)
NORMFUSE_OPERATOR(channel_norm)
NORMFUSE_OPERATOR(affine)
#undef NORMFUSE_OPERATOR

// ---- sharded statistics ---------------------------------------------------------------------------------------------

// The four phases of a norm whose values are spread over workers: group_norm_stats, group_norm_apply,
// group_norm_backward_sums and group_norm_backward_apply, and those of batch_norm.
#define NORMFUSE_PHASE(name, phase)                                                                                    \
    inline result<void> name##_##phase(const name##_options &options, const tensors &given,                            \
                                       const execution &where = {})                                                    \
    {                                                                                                                  \
        return detail::call(normfuse_##name##_##phase, detail::phase, options, given, where);                          \
    }
NORMFUSE_PHASE(group_norm, stats)
NORMFUSE_PHASE(group_norm, apply)
NORMFUSE_PHASE(group_norm, backward_sums)
NORMFUSE_PHASE(group_norm, backward_apply)
NORMFUSE_PHASE(batch_norm, stats)
NORMFUSE_PHASE(batch_norm, apply)
NORMFUSE_PHASE(batch_norm, backward_sums)
NORMFUSE_PHASE(batch_norm, backward_apply)
#undef NORMFUSE_PHASE

// in: [shards, ..., 3] f64, shards in rank order; out: [..., 3].
inline result<void> stats_merge(const tensor &in, const tensor &out, const execution &where = {})
{
    return detail::merge(normfuse_stats_merge, in, out, where);
}

// in: [shards, ..., 2] f64; out: [..., 2].
inline result<void> sums_merge(const tensor &in, const tensor &out, const execution &where = {})
{
    return detail::merge(normfuse_sums_merge, in, out, where);
}

// Samples that a part of an accumulated batch is a multiple of, to have the bits of one call.
inline result<std::int64_t> sample_quantum(const tensor &x)
{
    const normfuse_tensor c = x.c_tensor();
    std::int64_t samples = 0;
    const normfuse_status status = normfuse_sample_quantum(x.present() ? &c : nullptr, &samples);
    return detail::finish(status, samples);
}

// Folds an evaluating batch norm into the convolution before it. given: running_mean, running_var, weight, bias.
// conv_bias may be absent. transposed: the output channels are axis 1 of conv_weight.
inline result<void> batch_norm_fold(const tensors &given, double eps, const tensor &conv_weight,
                                    const tensor &conv_bias, const tensor &new_weight, const tensor &new_bias,
                                    bool transposed = false)
{
    if (new_weight.read_only() || new_bias.read_only())
        return detail::fail<void>(NORMFUSE_BAD_ARGUMENT, new_weight.read_only()
                                                             ? "new_weight is written, and is a read-only tensor"
                                                             : "new_bias is written, and is a read-only tensor");
    const detail::c_tensors all(given);
    const tensor *const from[4] = {&conv_weight, &conv_bias, &new_weight, &new_bias};
    normfuse_tensor held[4] = {};
    const normfuse_tensor *c[4] = {};
    for (int i = 0; i < 4; i++)
        if (from[i]->present()) {
            held[i] = from[i]->c_tensor();
            c[i] = &held[i];
        }
    return detail::finish(normfuse_batch_norm_fold(&all.c, eps, transposed ? NORMFUSE_FOLD_TRANSPOSED : 0, c[0], c[1],
                                                   c[2], c[3]));
}

// ---- CUDA devices, and what the library is --------------------------------------------------------------------------

// Loads the kernels for a CUDA device ahead of the first call.
inline result<void> prepare(std::int32_t device)
{
    return detail::finish(normfuse_prepare(device));
}

// The same, and calls progress(context, done, all) while kernels are compiled.
inline result<void> prepare(std::int32_t device, void (*progress)(void *, std::int32_t, std::int32_t), void *context)
{
    return detail::finish(normfuse_prepare_with(device, progress, context));
}

// Adds a place where NVRTC may be.
inline result<void> use_compiler(const char *path)
{
    return detail::finish(normfuse_use_compiler(path));
}

inline result<normfuse_compiler_information> compiler_info()
{
    normfuse_compiler_information information{};
    information.struct_bytes = sizeof information;
    const normfuse_status status = normfuse_compiler_info(&information);
    return detail::finish(status, information);
}

// The size of execution::sync for a CUDA device.
inline result<std::size_t> sync_bytes(std::int32_t device)
{
    std::size_t size = 0;
    const normfuse_status status = normfuse_sync_bytes(device, &size);
    return detail::finish(status, size);
}

inline result<normfuse_information> info()
{
    normfuse_information information{};
    information.struct_bytes = sizeof information;
    const normfuse_status status = normfuse_info(&information);
    return detail::finish(status, information);
}

} // inline namespace

inline const char *version() noexcept
{
    return normfuse_version();
}

} // namespace normfuse

#endif
