/* SPDX-License-Identifier: MIT
 *
 * device.h - CUDA C for a C++ compiler: what nvcc knows without being told, and the functions of src/cuda/ptx.cuh, in
 * whose place this header is included before each kernel. emulator.cpp runs the threads.
 *
 * A thread is a fiber. Shared variables are thread-local ones of the operating system's thread that runs all fibers;
 * they are exchanged when it goes on with another block. */
#ifndef NORMFUSE_EMULATOR_DEVICE_H
#define NORMFUSE_EMULATOR_DEVICE_H
#define NORMFUSE_CUDA_PTX_CUH /* takes the place of src/cuda/ptx.cuh */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __host__
#undef __launch_bounds__
#undef __maxnreg__
#undef __noinline__
#undef __shared__
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __host__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __noinline__ __attribute__((noinline))
#define __shared__ thread_local

/* ---- emulator.cpp ------------------------------------------------------------------------------------------------ */

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
/* Memory is read now or when the copy is waited for. The first `own` of 16 bytes, and zeros. */
void copy_later(void *to, const void *from, int own);
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
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

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
inline float __expf(float z) { return expf(z); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

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

/* ---- ptx.cuh ----------------------------------------------------------------------------------------------------- */

#define NORMFUSE_DYNAMIC_SHARED(name) uint4 *const name = emulator::shared_memory()

template <typename T> inline void compiler_barrier(T &)
{
}
inline void compiler_barrier(int &, int &)
{
}
template <typename Value> inline void make_opaque(Value &) {}
inline char *opaque(char *address) { return address; }

inline float reciprocal(float x) { return fabsf(x) > 0x1p126f ? 0.0f : 1.0f / x; }
inline float fast_tanh(float z) { return tanhf(z); }
inline float relu_of(float z) { return z > 0.0f ? z : z != z ? z : 0.0f; }
inline float min_with_6(float z) { return z > 6.0f ? 6.0f : z; }

/* Vectors of the hardware are aligned to their size. */
template <typename T> inline const T *aligned(const void *address)
{
    if ((uintptr_t)address % sizeof(T) != 0)
        emulator::fail("%zu bytes are read at %p, which is not aligned to them", sizeof(T), address);
    return static_cast<const T *>(address);
}
#define NORMFUSE_LOAD_UINT4(value, address) ((value) = *aligned<uint4>(address))
template <typename T> inline void request_where(bool wanted, T &value, const char *data)
{
    if (wanted)
        value = *aligned<T>(data);
}
inline void load_uint4_where(bool wanted, uint4 &vector, const char *data) { request_where(wanted, vector, data); }
template <typename T> inline void load_where(bool wanted, T &value, const char *data)
{
    value = 0;
    request_where(wanted, value, data);
}
template <int f32_type, int f64_type>
inline void load_parameter(unsigned &low, unsigned &high, const char *address, int type)
{
    if (type == f64_type)
        high = *aligned<unsigned>(address + 4);
    if (type > f32_type)
        high = *aligned<unsigned short>(address);
    if (type == f32_type || type == f64_type)
        low = *aligned<unsigned>(address);
}
template <int f16_type, int bf16_type> inline float single_of(unsigned low, unsigned high, int type)
{
    const __half_raw half = {(unsigned short)high};
    return type == f16_type ? __half2float(__half(half)) : __uint_as_float(type == bf16_type ? high << 16 : low);
}
template <int f32_type, int f64_type>
inline void load_statistic(float &single, double &twice, const char *at_single, const char *at_twice, int type)
{
    request_where(type == f32_type, single, at_single);
    request_where(type == f64_type, twice, at_twice);
}

inline void copy_ahead(uint4 *to, const char *data, int64_t bytes) { emulator::copy_later(to, data + bytes, 16); }
inline void copy_once(uint4 *to, const char *data, int64_t bytes) { copy_ahead(to, data, bytes); }
inline void copy_before(uint4 *to, const char *data, int64_t bytes)
{
    emulator::copy_later(to, data, bytes < 0 ? 0 : bytes > 16 ? 16 : (int)bytes);
}
inline void wait_for_copies() { emulator::commit(), emulator::wait_for_groups(0); }
inline void commit_copies() { emulator::commit(); }
template <int behind> inline void wait_for_older_copies() { emulator::wait_for_groups(behind); }

inline void meet(int which, int threads) { (void)emulator::meet_block(which, threads, false); }
inline void announce(int which, int threads) { emulator::arrive_at_block(which, threads); }

inline void open_barrier(uint64_t &barrier, int arrivals) { emulator::barrier_open(barrier, arrivals); }
inline void admit_bulk_copies() {}
inline void announce_barriers() {}
inline void arrive(uint64_t &barrier) { emulator::barrier_arrive(barrier, 0); }
inline void expect_bytes(uint64_t &barrier, unsigned bytes) { emulator::barrier_arrive(barrier, bytes); }
inline void await(uint64_t &barrier, unsigned parity) { emulator::barrier_await(barrier, parity); }
inline void copy_bulk(uint4 *to, const char *from, unsigned bytes, uint64_t &barrier, uint64_t)
{
    emulator::bulk_copy(to, from, bytes, barrier);
}
struct l2_policies {
    uint64_t first = 0, last = 0;
};

inline void admit_next_kernel() {}
inline void await_last_kernel() {}
inline void follow_kernel() {}

struct cluster_mailbox {
    uint64_t barrier;
};
inline void open_mailbox(cluster_mailbox &mailbox, int bytes)
{
    if (threadIdx.x == 0) {
        emulator::barrier_open(mailbox.barrier, 1);
        emulator::barrier_arrive(mailbox.barrier, (unsigned)bytes);
    }
    __syncwarp();
}
inline void announce_mailboxes() { emulator::cluster_arrive(); }
inline void await_open_mailboxes() { emulator::cluster_await(); }
inline void send(cluster_mailbox &mailbox, double *place, int rank, double value)
{
    emulator::cluster_send(mailbox.barrier, place, rank, &value, sizeof value);
}
inline void send_four(cluster_mailbox &mailbox, float4 *place, int rank, float4 value)
{
    emulator::cluster_send(mailbox.barrier, place, rank, &value, sizeof value);
}
inline void await_mailbox(cluster_mailbox &mailbox) { emulator::barrier_await(mailbox.barrier, 0); }

inline void await_grid_barrier(const uint32_t *word, uint32_t before) { emulator::await_flip(word, before); }
inline uint32_t load_relaxed(const uint32_t *word) { return *word; }
inline uint32_t load_relaxed_where(bool wanted, const uint32_t *word) { return wanted ? *word : 0; }
inline void add_release(uint32_t *word, uint32_t share) { *word += share; }
inline uint32_t count_up(uint32_t *word, uint32_t last)
{
    const uint32_t before = *word;
    *word = before >= last ? 0 : before + 1;
    return before;
}

#endif
