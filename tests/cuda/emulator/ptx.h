/* SPDX-License-Identifier: MIT
 *
 * ptx.h - for a C++ compiler, the functions of src/cuda/device/ptx.cuh, in whose place this header is included before
 * the text of a kernel that is compiled at run time (nvrtc.c).
 *
 * Shared variables are those of one section of the shared object; they are exchanged when another block goes on. */
#ifndef NORMFUSE_EMULATOR_PTX_H
#define NORMFUSE_EMULATOR_PTX_H
#define NORMFUSE_DEVICE_PTX_CUH /* takes the place of src/cuda/device/ptx.cuh */

#include "emulator.h"
#include "language.h"

/* <cmath> takes a compiler as long as a kernel does. */
extern "C" {
double exp(double), expm1(double), erfc(double), tanh(double), frexp(double, int *), nearbyint(double);
float expf(float), expm1f(float), erfcf(float), tanhf(float), nextafterf(float, float);
}
inline double sqrt(double x) { return __builtin_sqrt(x); }
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline double fabs(double x) { return __builtin_fabs(x); }
inline float fabs(float x) { return __builtin_fabs(x); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fmin(double a, double b) { return __builtin_fmin(a, b); }
inline float fmin(float a, float b) { return __builtin_fminf(a, b); }
inline double fmax(double a, double b) { return __builtin_fmax(a, b); }
inline float fmax(float a, float b) { return __builtin_fmaxf(a, b); }

#undef __shared__
#define __shared__ static __attribute__((section("normfuse_shared"), used))

#define NORMFUSE_DYNAMIC_SHARED(name) uint4 *const name = emulator::shared_memory()

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

inline float reciprocal(float x) { return fabs(x) > 0x1p126f ? 0.0f : 1.0f / x; }
inline float fast_tanh(float z) { return tanhf(z); }
inline float relu_of(float z) { return z > 0.0f ? z : z != z ? z : 0.0f; }
inline float min_with_6(float z) { return z > 6.0f ? 6.0f : z; }

inline float f16_to_float(unsigned short bits)
{
    const unsigned sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    const float value = rest >= 0x7c00u  ? __uint_as_float(0x7f800000u | rest << 13)
                        : rest < 0x0400u ? (float)rest * 0x1p-24f
                                         : __uint_as_float((rest << 13) + (112u << 23));
    return __uint_as_float(__float_as_uint(value) | sign);
}
inline float2 f16_pair(unsigned bits)
{
    return {f16_to_float((unsigned short)bits), f16_to_float((unsigned short)(bits >> 16))};
}
/* Rounded once, to even where it lies halfway. */
inline unsigned short bits_of_f16(double value)
{
    const unsigned sign = __builtin_signbit(value) ? 0x8000u : 0;
    const double size = fabs(value);
    int exponent;
    const double fraction = frexp(size, &exponent);
    if (value != value)
        return 0x7fff;
    if (size >= 65520.0)
        return (unsigned short)(sign | 0x7c00u);
    if (size < 0x1p-14)
        return (unsigned short)(sign | (unsigned)nearbyint(size * 0x1p24));
    return (unsigned short)(sign |
                            (((unsigned)(exponent + 14) << 10) + (unsigned)nearbyint(fraction * 2048.0) - 1024u));
}
inline unsigned short bits_of_bf16_single(float value)
{
    const unsigned bits = __float_as_uint(value);
    return (unsigned short)(value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline unsigned bits_of_f16_pair(float low, float high)
{
    return bits_of_f16(low) | (unsigned)bits_of_f16(high) << 16;
}
inline unsigned bits_of_bf16_pair(float low, float high)
{
    return bits_of_bf16_single(low) | (unsigned)bits_of_bf16_single(high) << 16;
}
inline float __double2float_rz(double value)
{
    const float near = (float)value;
    return fabs((double)near) > fabs(value) ? nextafterf(near, 0.0f) : near;
}

/* ---- loads and stores -------------------------------------------------------------------------------------------- */

template <typename T> inline void load_once(bool wanted, T &to,
                                            const char *from) { emulator::load_where(wanted, to, from); }
template <typename T> inline void load_shared_by_many(bool wanted, T &to, const char *from)
{
    emulator::load_where(wanted, to, from);
}

/* ---- copies to shared memory ---------------------------------------------------------------------------------------
 * */

template <typename T> inline void copy_ahead(T *to, const char *from, bool wanted)
{
    if (wanted)
        emulator::copy_later(to, from, (int)sizeof(T), (int)sizeof(T));
}
inline void copy_ahead(unsigned short *to, const char *from, bool wanted)
{
    if (wanted)
        *to = *emulator::aligned<unsigned short>(from);
}
inline void commit_copies() { emulator::commit(); }
template <int behind> inline void await_older_copies() { emulator::wait_for_groups(behind); }

/* ---- words that blocks share ---------------------------------------------------------------------------------------
 * */

inline uint64_t load_past_l1(const uint64_t *from) { return *from; }
inline void store_past_l1(uint64_t *to, uint64_t value) { *to = value; }
inline uint32_t load_relaxed(const uint32_t *word) { return *word; }
inline void add_release(uint32_t *word, uint32_t share) { *word += share; }
inline void await_flip(const uint32_t *word, uint32_t before) { emulator::await_flip(word, before); }

/* ---- kernels of a call, clusters --------------------------------------------------------------------------------- */

inline void follow_kernel() {}

inline void open_mailbox(uint64_t &barrier, int bytes)
{
    if (threadIdx.x == 0) {
        emulator::barrier_open(barrier, 1);
        emulator::barrier_arrive(barrier, (unsigned)bytes);
    }
    __syncwarp();
}
inline void announce_mailboxes() { emulator::cluster_arrive(); }
inline void await_open_mailboxes() { emulator::cluster_await(); }
inline void send(uint64_t &mailbox, void *place, int rank, uint64_t value)
{
    emulator::cluster_send(mailbox, place, rank, &value, sizeof value);
}
inline void await_mailbox(uint64_t &barrier, unsigned parity) { emulator::barrier_await(barrier, parity); }

/* ---- what the driver finds in the shared object ------------------------------------------------------------------ */

extern "C" {
extern char __start_normfuse_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_normfuse_shared[] __attribute__((weak, visibility("hidden")));
}

namespace emulator {
template <typename Arguments> inline void call(void (*kernel)(Arguments), const void *arguments)
{
    kernel(*static_cast<const Arguments *>(arguments));
}
} // namespace emulator

/* Behind the text, once. */
#define NORMFUSE_EMULATED_NAME(name) #name
#define NORMFUSE_EMULATED(kernel)                                                                                      \
    static void call_kernel(const void *arguments) { emulator::call(kernel, arguments); }                              \
    extern "C" __attribute__((visibility("default"))) const struct emulated_kernel normfuse_emulated_kernel = {        \
        NORMFUSE_EMULATED_NAME(kernel), call_kernel, __start_normfuse_shared, __stop_normfuse_shared};

#endif
