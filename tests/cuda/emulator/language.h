/* SPDX-License-Identifier: MIT
 *
 * language.h - CUDA C for a C++ compiler: what NVRTC knows without any header. emulator.cpp runs the threads: a
 * thread is a fiber. device.h and ptx.h say what a shared variable is. */
#ifndef NORMFUSE_EMULATOR_LANGUAGE_H
#define NORMFUSE_EMULATOR_LANGUAGE_H

#include <stdint.h>
#include <string.h>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __host__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __noinline__ __attribute__((noinline))

/* Vectors of the hardware, aligned to their size. */
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) double2 {
    double x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline double2 make_double2(double x, double y) { return {x, y}; }

/* ---- emulator.cpp ------------------------------------------------------------------------------------------------ */

#pragma GCC visibility push(default)
namespace emulator {

enum warp_meeting { WARP_SYNC, WARP_SHUFFLE, WARP_ANY };

struct index {
    unsigned x;
};
extern index thread, block, threads, blocks;

uint4 *shared_memory();
/* All that `mask` names call; the value of lane `from`, or of WARP_ANY the bits that one of them has. */
uint64_t meet_warp(warp_meeting what, unsigned mask, uint64_t value, unsigned from);
/* `expected` 0: all threads of the block. Whether any of them was `true`. */
bool meet_block(int which, int expected, bool value);
void arrive_at_block(int which, int expected);
/* Memory is read now or when the copy is waited for. The first `own` of so many bytes, and zeros. */
void copy_later(void *to, const void *from, int own, int bytes);
void commit();
void wait_for_groups(int behind);
void barrier_open(uint64_t &barrier, int arrivals);
void barrier_arrive(uint64_t &barrier, unsigned bytes);
void barrier_await(uint64_t &barrier, unsigned parity);
void bulk_copy(void *to, const void *from, unsigned bytes, uint64_t &barrier);
void cluster_arrive();
void cluster_await();
void cluster_send(uint64_t &barrier, void *place, int rank, const void *value, unsigned bytes);
void await_flip(const uint32_t *word, uint32_t before);
int64_t cycles();
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

} // namespace emulator
#pragma GCC visibility pop

#define threadIdx emulator::thread
#define blockIdx emulator::block
#define blockDim emulator::threads
#define gridDim emulator::blocks

/* ---- what CUDA C has --------------------------------------------------------------------------------------------- */

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }

template <typename To, typename From> inline To bits_as(From from)
{
    To to;
    static_assert(sizeof to == sizeof from, "bits of one size");
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
inline int __float_as_int(float value) { return bits_as<int>(value); }
inline double __longlong_as_double(int64_t bits) { return bits_as<double>(bits); }
inline int64_t __double_as_longlong(double value) { return bits_as<int64_t>(value); }
inline int __double2loint(double value) { return (int)(uint32_t)bits_as<uint64_t>(value); }
inline int __double2hiint(double value) { return (int)(bits_as<uint64_t>(value) >> 32); }
inline double __hiloint2double(int high, int low)
{
    return bits_as<double>((uint64_t)(uint32_t)high << 32 | (uint32_t)low);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift)
{
    return (unsigned)((((uint64_t)high << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift)
{
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline int __clz(int value) { return value ? __builtin_clz((unsigned)value) : 32; }
inline float __expf(float z) { return __builtin_expf(z); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }

template <typename T> inline T __ldcg(const T *address) { return *address; }
template <typename T> inline T __ldca(const T *address) { return *address; }
template <typename T> inline void __stcg(T *address, T value) { *address = value; }
template <typename T> inline void __stcs(T *address, T value) { *address = value; }

inline int __ffs(int value) { return __builtin_ffs(value); }
inline int64_t clock64() { return emulator::cycles(); }
inline void __trap() { emulator::fail("a kernel gives up: __trap"); }
inline void __syncthreads() { (void)emulator::meet_block(0, 0, false); }
inline int __syncthreads_or(int value) { return emulator::meet_block(0, 0, value != 0); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { (void)emulator::meet_warp(emulator::WARP_SYNC, mask, 0, 0); }
inline int __any_sync(unsigned mask, int value)
{
    return emulator::meet_warp(emulator::WARP_ANY, mask, value != 0, 0) != 0;
}
inline unsigned __ballot_sync(unsigned mask, int value)
{
    return (unsigned)emulator::meet_warp(emulator::WARP_ANY, mask, value != 0 ? 1u << threadIdx.x % 32 : 0, 0);
}
template <typename T> inline T __shfl_sync(unsigned mask, T value, int from)
{
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = emulator::meet_warp(emulator::WARP_SHUFFLE, mask, bits, (unsigned)from % 32);
    memcpy(&value, &bits, sizeof value);
    return value;
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int distance)
{
    return __shfl_sync(mask, value, (int)(threadIdx.x % 32 ^ (unsigned)distance));
}

template <typename T> inline T __shfl_up_sync(unsigned mask, T value, int distance)
{
    const int lane = (int)(threadIdx.x % 32);
    return __shfl_sync(mask, value, lane < distance ? lane : lane - distance);
}

template <typename T> inline T __shfl_down_sync(unsigned mask, T value, int distance)
{
    const int lane = (int)(threadIdx.x % 32);
    return __shfl_sync(mask, value, lane + distance > 31 ? lane : lane + distance);
}

/* Vectors of the hardware are aligned to their size. */
namespace emulator {
template <typename T> inline const T *aligned(const void *address)
{
    if ((uintptr_t)address % sizeof(T) != 0)
        fail("%zu bytes are read at %p, which is not aligned to them", sizeof(T), address);
    return static_cast<const T *>(address);
}
template <typename T> inline void load_where(bool wanted, T &value, const char *data)
{
    if (wanted)
        value = *aligned<T>(data);
}
} // namespace emulator

#endif
