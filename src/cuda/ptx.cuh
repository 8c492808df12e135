/* SPDX-License-Identifier: MIT
 *
 * ptx.cuh - every instruction that CUDA C has no word for, behind a function. tests/emulator/device.h has the
 * same functions in C++, for CPUs. */
#ifndef NORMFUSE_CUDA_PTX_CUH
#define NORMFUSE_CUDA_PTX_CUH

#include <stdint.h>

/* ---- dynamic shared memory --------------------------------------------------------------------------------------- */

/* Declares it. No function: a pointer that one returns made other machine code of 59 kernels. */
#define NORMFUSE_DYNAMIC_SHARED(name) extern __shared__ uint4 name[]

__device__ __forceinline__ unsigned shared_address(const void *pointer)
{
    return (unsigned)__cvta_generic_to_shared(pointer);
}

/* ---- what the compiler may not see through ----------------------------------------------------------------------- */

/* Keeps the compiler from holding values that can be had again from what it holds anyway: without it unpacked copies of
 * all vectors of a thread live from the sums to the stores and spill. */
__device__ __forceinline__ void compiler_barrier(uint4 &vector)
{
    asm volatile("" : "+r"(vector.x), "+r"(vector.y), "+r"(vector.z), "+r"(vector.w));
}
__device__ __forceinline__ void compiler_barrier(unsigned short &vector)
{
    asm volatile("" : "+h"(vector));
}
__device__ __forceinline__ void compiler_barrier(float &vector)
{
    asm volatile("" : "+f"(vector));
}
__device__ __forceinline__ void compiler_barrier(double &vector)
{
    asm volatile("" : "+d"(vector));
}
__device__ __forceinline__ void compiler_barrier(int &value)
{
    asm volatile("" : "+r"(value));
}
__device__ __forceinline__ void compiler_barrier(int &value, int &other)
{
    asm volatile("" : "+r"(value), "+r"(other));
}
/* Hides from the compiler how a value was found: it holds the value in a register instead of finding it again. */
__device__ __forceinline__ void make_opaque(unsigned &value)
{
    asm("" : "+r"(value));
}
__device__ __forceinline__ void make_opaque(int &value)
{
    asm("" : "+r"(value));
}
__device__ __forceinline__ void make_opaque(int64_t &value)
{
    asm("" : "+l"(value));
}
__device__ __forceinline__ char *opaque(char *address)
{
    asm("" : "+l"(address));
    return address;
}

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

/* 1/x within 1 ulp, and 0 beyond 2^126. */
__device__ __forceinline__ float reciprocal(float x)
{
    float found;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
    return found;
}

__device__ __forceinline__ float fast_tanh(float z)
{
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(z));
    return t;
}

/* maximum that keeps a NaN */
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

/* ---- loads ------------------------------------------------------------------------------------------------------- */

/* A uint4 past the L1. No function: one made other machine code of rows_unaligned_backward. */
#define NORMFUSE_LOAD_UINT4(value, address)                                                                            \
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"                                            \
                 : "=r"((value).x), "=r"((value).y), "=r"((value).z), "=r"((value).w)                                  \
                 : "l"(address))

/* Loads where they are wanted, without a branch, at whose end all of them would be waited for. */
__device__ __forceinline__ void load_uint4_where(bool wanted, uint4 &vector, const char *data)
{
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 "setp.ne.s32 wanted, %5, 0;\n"
                 "@wanted ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 "}"
                 : "+r"(vector.x), "+r"(vector.y), "+r"(vector.z), "+r"(vector.w)
                 : "l"(data), "r"((int)wanted));
}

/* ld.global.`type` to a register of `constraint`, whose value stays where none is wanted. */
#define NORMFUSE_LOAD_IF(wanted, type, constraint, value, data, ...)                                                   \
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.s32 wanted, %2, 0;\n@wanted ld.global." type " %0, [%1];\n}"          \
                 : "+" constraint(value)                                                                               \
                 : "l"(data), "r"((int)(wanted))                                                                       \
                 __VA_ARGS__)

/* load_where: 0 where none is wanted. request_where: the value stays, and the load is in order with other accesses to
 * memory. */
#define NORMFUSE_LOADS_WHERE(number, type, constraint)                                                                 \
    __device__ __forceinline__ void load_where(bool wanted, number &value, const char *data)                           \
    {                                                                                                                  \
        value = 0;                                                                                                     \
        NORMFUSE_LOAD_IF(wanted, type, constraint, value, data);                                                       \
    }                                                                                                                  \
    __device__ __forceinline__ void request_where(bool wanted, number &value, const char *data)                        \
    {                                                                                                                  \
        NORMFUSE_LOAD_IF(wanted, type, constraint, value, data, : "memory");                                           \
    }
NORMFUSE_LOADS_WHERE(unsigned short, "u16", "h")
NORMFUSE_LOADS_WHERE(unsigned, "u32", "r")
NORMFUSE_LOADS_WHERE(float, "f32", "f")
NORMFUSE_LOADS_WHERE(double, "f64", "d")
#undef NORMFUSE_LOADS_WHERE

#undef NORMFUSE_LOAD_IF
/* Not from L1: other blocks wrote it. */
__device__ __forceinline__ void request_where(bool wanted, float4 &value, const char *data)
{
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 "setp.ne.s32 wanted, %5, 0;\n"
                 "@wanted ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 "}"
                 : "+f"(value.x), "+f"(value.y), "+f"(value.z), "+f"(value.w)
                 : "l"(data), "r"((int)wanted)
                 : "memory");
}

/* An element of a parameter: of f64 both words, of f32 the low one, of 16 bits the high one, of a negative type none.
 * The types are those of normfuse.h, 16-bit ones beyond f32. Through the L1: lines of the L2 that all multiprocessors
 * want are slow, [3484, 256] f16 in eight groups 21.0 us, 7.3. */
template <int f32_type, int f64_type>
__device__ __forceinline__ void load_parameter(unsigned &low, unsigned &high, const char *address, int type)
{
    /* Of two loads into one register the second waits for the first, if that is done: rare ones come first. */
    asm volatile("{\n"
                 ".reg .pred twice, word, half;\n"
                 "setp.eq.s32 twice, %3, %5;\n"
                 "setp.eq.or.s32 word, %3, %4, twice;\n"
                 "setp.gt.s32 half, %3, %4;\n"
                 "@twice ld.global.u32 %1, [%2 + 4];\n"
                 "@half ld.global.u16 %1, [%2];\n"
                 "@word ld.global.u32 %0, [%2];\n"
                 "}"
                 : "+r"(low), "+r"(high)
                 : "l"(address), "r"(type), "n"(f32_type), "n"(f64_type));
}

/* What load_parameter() found, of any type but f64. No branch: the compiler's would be a jump by a table, whose entry
 * each warp waits for, as for any first read of constants. */
template <int f16_type, int bf16_type>
__device__ __forceinline__ float single_of(unsigned low, unsigned high, int type)
{
    float found;
    asm("{\n"
        ".reg .pred half, brain;\n"
        ".reg .b16 bits;\n"
        ".reg .f32 of_half, of_brain, of_others;\n"
        ".reg .b32 shifted;\n"
        "setp.eq.s32 half, %3, %4;\n"
        "setp.eq.s32 brain, %3, %5;\n"
        "cvt.u16.u32 bits, %2;\n"
        "cvt.f32.f16 of_half, bits;\n"
        "shl.b32 shifted, %2, 16;\n"
        "mov.b32 of_brain, shifted;\n"
        "mov.b32 of_others, %1;\n"
        "selp.f32 of_others, of_half, of_others, half;\n"
        "selp.f32 %0, of_brain, of_others, brain;\n"
        "}"
        : "=f"(found)
        : "r"(low), "r"(high), "r"(type), "n"(f16_type), "n"(bf16_type));
    return found;
}

/* f32 or f64, each at its own address. */
template <int f32_type, int f64_type>
__device__ __forceinline__ void load_statistic(float &single, double &twice, const char *at_single,
                                               const char *at_twice, int type)
{
    asm volatile("{\n"
                 ".reg .pred is_single, is_double;\n"
                 "setp.eq.s32 is_single, %4, %5;\n"
                 "setp.eq.s32 is_double, %4, %6;\n"
                 "@is_single ld.global.f32 %0, [%2];\n"
                 "@is_double ld.global.f64 %1, [%3];\n"
                 "}"
                 : "+f"(single), "+d"(twice)
                 : "l"(at_single), "l"(at_twice), "r"(type), "n"(f32_type), "n"(f64_type));
}

/* ---- copies to shared memory ------------------------------------------------------------------------------------- */

/* Each thread copies what it alone reads, so waiting is enough and no barrier is needed. */
__device__ __forceinline__ void copy_ahead(uint4 *to, const char *data, int64_t bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(data + bytes) : "memory");
}
/* What is read once is the first that the L2 gives up: batch norm 64x1024x14x14 backward 58.6 to 55.7 us, 32x10x200x200
 * 69.8 to 64.8. */
__device__ __forceinline__ void copy_once(uint4 *to, const char *data, int64_t bytes)
{
    uint64_t first_to_go;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first_to_go));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(data + bytes), "l"(first_to_go)
                 : "memory");
}
/* The same of what is before `bytes` from there on, and zeros. */
__device__ __forceinline__ void copy_before(uint4 *to, const char *data, int64_t bytes)
{
    const int own = bytes < 0 ? 0 : bytes > 16 ? 16 : (int)bytes;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(data), "r"(own)
                 : "memory");
}
__device__ __forceinline__ void wait_for_copies()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Of copies in order: a group for each commit, of which all but the last `behind` are waited for. */
__device__ __forceinline__ void commit_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int behind> __device__ __forceinline__ void wait_for_older_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(behind) : "memory");
}

/* ---- barriers of a block ----------------------------------------------------------------------------------------- */

/* Some of the block's threads, whole warps. */
__device__ __forceinline__ void meet(int which, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}
__device__ __forceinline__ void announce(int which, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

/* In shared memory: a phase ends when so many threads have arrived and all bytes are there that are expected. */
__device__ __forceinline__ void open_barrier(uint64_t &barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
/* Bulk copies that the thread then lets come are behind what it wrote, to shared memory and to any other. */
__device__ __forceinline__ void admit_bulk_copies()
{
    asm volatile("fence.proxy.async;" ::: "memory");
}
/* What was opened is known to copies, too. */
__device__ __forceinline__ void announce_barriers()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint64_t &barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
__device__ __forceinline__ void expect_bytes(uint64_t &barrier, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void await(uint64_t &barrier, unsigned parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again%=:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again%=;\n"
                 "}" ::"r"(shared_address(&barrier)),
                 "r"(parity)
                 : "memory");
}
__device__ __forceinline__ void copy_bulk(uint4 *to, const char *from, unsigned bytes, uint64_t &barrier,
                                          uint64_t policy)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&barrier)), "l"(policy)
        : "memory");
}

/* What the L2 keeps of what is read: what is read again next, and nothing else. */
struct l2_policies {
    uint64_t first, last; /* to go */

    __device__ __forceinline__ l2_policies()
    {
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
    }
};

/* ---- kernels of a call ------------------------------------------------------------------------------------------- */

/* The kernels of one call follow one another by dependent launch: the next may be brought up as soon as every block of
 * this one has begun, and waits until all that this one wrote is there. A first kernel has nobody to wait for. */
__device__ __forceinline__ void admit_next_kernel()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_last_kernel()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void follow_kernel()
{
    admit_next_kernel();
    await_last_kernel();
}

/* ---- clusters ---------------------------------------------------------------------------------------------------- */

/* Blocks of a cluster send one another numbers by asynchronous stores, whose bytes a barrier in the receiver's shared
 * memory counts: nobody waits for his own writes, as the fence of a cluster-wide barrier with release makes him (under
 * load that is a trip to memory and back). A block whose mailbox is full may leave, and one that waits for its own is
 * there to receive. */
struct cluster_mailbox {
    uint64_t barrier;
};

#if __CUDA_ARCH__ >= 900
/* By all threads of each block, early: `bytes` will come. */
__device__ __forceinline__ void open_mailbox(cluster_mailbox &mailbox, int bytes)
{
    const unsigned address = shared_address(&mailbox.barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    /* The compiler may make an instruction of the whole warp of the first, which racecheck takes for one of its other
     * threads'. */
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
__device__ __forceinline__ void send(cluster_mailbox &mailbox, double *place, int rank, double value)
{
    unsigned address, barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(place)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(shared_address(&mailbox.barrier)), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address),
                 "l"(__double_as_longlong(value)), "r"(barrier)
                 : "memory");
}
/* The same of four floats. */
__device__ __forceinline__ void send_four(cluster_mailbox &mailbox, float4 *place, int rank, float4 value)
{
    unsigned address, barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(place)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(shared_address(&mailbox.barrier)), "r"(rank));
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void await_mailbox(cluster_mailbox &mailbox)
{
    asm volatile("{\n"
                 ".reg .pred arrived;\n"
                 "again%=:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 arrived, [%0], 0;\n"
                 "@!arrived bra again%=;\n"
                 "}" ::"r"(shared_address(&mailbox.barrier))
                 : "memory");
}
#else
/* No launch requests clusters here. */
__device__ __forceinline__ void open_mailbox(cluster_mailbox &, int)
{
    __trap();
}
__device__ __forceinline__ void announce_mailboxes()
{
    __trap();
}
__device__ __forceinline__ void await_open_mailboxes()
{
    __trap();
}
__device__ __forceinline__ void send(cluster_mailbox &, double *, int, double)
{
    __trap();
}
__device__ __forceinline__ void send_four(cluster_mailbox &, float4 *, int, float4)
{
    __trap();
}
__device__ __forceinline__ void await_mailbox(cluster_mailbox &)
{
    __trap();
}
#endif

/* ---- words that blocks share ------------------------------------------------------------------------------------- */

/* Until the top bit of the word is not what it was `before`: join.cuh has the barrier of blocks that is made of it. */
__device__ __forceinline__ void await_grid_barrier(const uint32_t *grid_barrier, uint32_t before)
{
    uint32_t now;
    do
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(grid_barrier) : "memory");
    while (((now ^ before) & 0x80000000u) == 0);
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t *word)
{
    uint32_t now;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
    return now;
}
/* By a load that no branch surrounds, and where it waits without a register of every thread's. */
__device__ __forceinline__ uint32_t load_relaxed_where(bool wanted, const uint32_t *word)
{
    uint32_t now = 0;
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 "setp.ne.s32 wanted, %2, 0;\n"
                 "@wanted ld.relaxed.gpu.global.u32 %0, [%1];\n"
                 "}"
                 : "+r"(now)
                 : "l"(word), "r"((int)wanted)
                 : "memory");
    return now;
}
__device__ __forceinline__ void add_release(uint32_t *word, uint32_t share)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(share) : "memory");
}
/* The word is 0 again after `last`. What it said before. */
__device__ __forceinline__ uint32_t count_up(uint32_t *word, uint32_t last)
{
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(last) : "memory");
    return before;
}

#endif
