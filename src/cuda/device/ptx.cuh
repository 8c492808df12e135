/* SPDX-License-Identifier: MIT
 *
 * ptx.cuh - every instruction that CUDA C has no word for, behind a function. tests/cuda/emulator/ptx.h has the same
 * functions in C++, for CPUs. */
#ifndef NORMFUSE_DEVICE_PTX_CUH
#define NORMFUSE_DEVICE_PTX_CUH

#define NORMFUSE_DYNAMIC_SHARED(name) extern __shared__ uint4 name[]

__device__ __forceinline__ unsigned shared_address(const void *pointer)
{
    return (unsigned)__cvta_generic_to_shared(pointer);
}

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

/* 1/x within 1 ulp, and 0 beyond 2^126. */
__device__ __forceinline__ float reciprocal(float x)
{
    float found;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
    return found;
}

/* Relative error 2^-11. */
__device__ __forceinline__ float fast_tanh(float z)
{
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(z));
    return t;
}

/* maximum of z and 0 that keeps a NaN */
__device__ __forceinline__ float relu_of(float z)
{
    float maximum;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(maximum) : "f"(z));
    return maximum;
}

/* minimum of z and 6 that keeps a NaN */
__device__ __forceinline__ float min_with_6(float z)
{
    float minimum;
    asm("min.NaN.f32 %0, %1, 0f40C00000;" : "=f"(minimum) : "f"(z));
    return minimum;
}

__device__ __forceinline__ float f16_to_float(unsigned short bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

/* Two halves of a word, the first one low. */
__device__ __forceinline__ float2 f16_pair(unsigned bits)
{
    float2 pair;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(pair.x), "=f"(pair.y)
        : "r"(bits));
    return pair;
}
__device__ __forceinline__ unsigned bits_of_f16_pair(float low, float high)
{
    unsigned bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ unsigned bits_of_bf16_pair(float low, float high)
{
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
/* Rounded once. */
__device__ __forceinline__ unsigned short bits_of_f16(double value)
{
    unsigned short bits;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(value));
    return bits;
}

/* ---- loads and stores -------------------------------------------------------------------------------------------- */

/* Loads that no branch surrounds: at a branch's end what was loaded in it is waited for. `kind` 0: past the L1, what is read
 * once. 1: through it. The register stays where none is wanted. */
#define NORMFUSE_LOAD(name, instruction, words, outputs, number)                                                       \
    __device__ __forceinline__ void name(bool wanted, words, const char *from)                                         \
    {                                                                                                                  \
        asm volatile("{\n.reg .pred wanted;\nsetp.ne.s32 wanted, %" #number ", 0;\n@wanted " instruction "\n}"         \
                     : outputs                                                                                         \
                     : "l"(from), "r"((int)wanted));                                                                   \
    }
#define NORMFUSE_OUTPUTS(...) __VA_ARGS__
NORMFUSE_LOAD(load_once, "ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];", uint4 &to,
              NORMFUSE_OUTPUTS("+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)), 5)
NORMFUSE_LOAD(load_once, "ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];", uint2 &to,
              NORMFUSE_OUTPUTS("+r"(to.x), "+r"(to.y)), 3)
NORMFUSE_LOAD(load_once, "ld.global.u32 %0, [%1];", unsigned &to, "+r"(to), 2)
NORMFUSE_LOAD(load_once, "ld.global.u16 %0, [%1];", unsigned short &to, "+h"(to), 2)
NORMFUSE_LOAD(load_shared_by_many, "ld.global.v4.u32 {%0, %1, %2, %3}, [%4];", uint4 &to,
              NORMFUSE_OUTPUTS("+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)), 5)
NORMFUSE_LOAD(load_shared_by_many, "ld.global.v2.u32 {%0, %1}, [%2];", uint2 &to,
              NORMFUSE_OUTPUTS("+r"(to.x), "+r"(to.y)), 3)
NORMFUSE_LOAD(load_shared_by_many, "ld.global.u32 %0, [%1];", unsigned &to, "+r"(to), 2)
NORMFUSE_LOAD(load_shared_by_many, "ld.global.u16 %0, [%1];", unsigned short &to, "+h"(to), 2)
#undef NORMFUSE_LOAD
#undef NORMFUSE_OUTPUTS

/* ---- copies to shared memory --------------------------------------------------------------------------------------- */

/* Each thread copies what it alone reads: waiting is enough, no barrier is needed. */
#define NORMFUSE_COPY(words, bytes, cache)                                                                             \
    __device__ __forceinline__ void copy_ahead(words *to, const char *from, bool wanted)                               \
    {                                                                                                                  \
        asm volatile("{\n.reg .pred wanted;\nsetp.ne.s32 wanted, %2, 0;\n"                                             \
                     "@wanted cp.async." cache ".shared.global [%0], [%1], " #bytes ";\n}" ::"r"(shared_address(to)),  \
                     "l"(from), "r"((int)wanted)                                                                       \
                     : "memory");                                                                                      \
    }
NORMFUSE_COPY(uint4, 16, "cg")
NORMFUSE_COPY(uint2, 8, "ca")
NORMFUSE_COPY(unsigned, 4, "ca")
#undef NORMFUSE_COPY
/* There is no copy of two bytes. */
__device__ __forceinline__ void copy_ahead(unsigned short *to, const char *from, bool wanted)
{
    if (wanted)
        *to = *reinterpret_cast<const unsigned short *>(from);
}
__device__ __forceinline__ void commit_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* But for the last `behind` that were committed. */
template <int behind> __device__ __forceinline__ void await_older_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(behind) : "memory");
}

/* ---- words that blocks share --------------------------------------------------------------------------------------- */

/* Other blocks write these: not from the L1. */
__device__ __forceinline__ uint64_t load_past_l1(const uint64_t *from)
{
    return __ldcg(reinterpret_cast<const unsigned long long *>(from));
}
__device__ __forceinline__ void store_past_l1(uint64_t *to, uint64_t value)
{
    __stcg(reinterpret_cast<unsigned long long *>(to), value);
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t *word)
{
    uint32_t now;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    return now;
}
__device__ __forceinline__ void add_release(uint32_t *word, uint32_t share)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(share) : "memory");
}
/* Until the top bit of the word is not what it was `before`. */
__device__ __forceinline__ void await_flip(const uint32_t *word, uint32_t before)
{
    uint32_t now;
    do
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    while (((now ^ before) & 0x80000000u) == 0);
}

/* ---- kernels of a call ------------------------------------------------------------------------------------------- */

/* The kernels of one call follow one another by dependent launch: the next may be brought up as soon as every block of
 * this one has begun, and waits until all that this one wrote is there. */
__device__ __forceinline__ void follow_kernel()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* ---- clusters ---------------------------------------------------------------------------------------------------- */

#if __CUDA_ARCH__ >= 900
/* Blocks of a cluster send one another numbers by asynchronous stores, whose bytes a barrier in the receiver's shared memory
 * counts. By all threads of each block, early: `bytes` will come. */
__device__ __forceinline__ void open_mailbox(uint64_t &barrier, int bytes)
{
    const unsigned address = shared_address(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
    __syncwarp();
}
/* Once, by all threads, when the block's mailboxes are open. */
__device__ __forceinline__ void announce_mailboxes()
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
/* Once, by all threads, before the first is sent: every block has opened its mailbox. */
__device__ __forceinline__ void await_open_mailboxes()
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/* Eight bytes into the same place of another block's shared memory. */
__device__ __forceinline__ void send(uint64_t &mailbox, void *place, int rank, uint64_t value)
{
    unsigned address, barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(place)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(shared_address(&mailbox)), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address), "l"(value),
                 "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void await_mailbox(uint64_t &barrier, unsigned parity)
{
    asm volatile("{\n"
                 ".reg .pred arrived;\n"
                 "again%=:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 arrived, [%0], %1;\n"
                 "@!arrived bra again%=;\n"
                 "}" ::"r"(shared_address(&barrier)),
                 "r"(parity)
                 : "memory");
}
#endif

#endif
