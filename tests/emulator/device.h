/* SPDX-License-Identifier: MIT
 *
 * device.h - for a C++ compiler, the functions of src/cuda/ptx.cuh, in whose place this header is included before each
 * kernel of the build.
 *
 * Shared variables are thread-local ones of the operating system's thread that runs all fibers; they are exchanged when
 * it goes on with another block. */
#ifndef NORMFUSE_EMULATOR_DEVICE_H
#define NORMFUSE_EMULATOR_DEVICE_H
#define NORMFUSE_CUDA_PTX_CUH /* takes the place of src/cuda/ptx.cuh */

#include <math.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "language.h"

#undef __shared__
#define __shared__ thread_local

using emulator::aligned;

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

#define NORMFUSE_LOAD_UINT4(value, address) ((value) = *aligned<uint4>(address))
template <typename T> inline void request_where(bool wanted, T &value, const char *data)
{
    emulator::load_where(wanted, value, data);
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

inline void copy_ahead(uint4 *to, const char *data, int64_t bytes) { emulator::copy_later(to, data + bytes, 16, 16); }
inline void copy_once(uint4 *to, const char *data, int64_t bytes) { copy_ahead(to, data, bytes); }
inline void copy_before(uint4 *to, const char *data, int64_t bytes)
{
    emulator::copy_later(to, data, bytes < 0 ? 0 : bytes > 16 ? 16 : (int)bytes, 16);
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
