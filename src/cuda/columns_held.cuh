/* SPDX-License-Identifier: MIT
 *
 * columns_held.cuh - a thread's vectors of a tensor over columns in registers, for all that a kernel does with them. */
#ifndef NORMFUSE_CUDA_COLUMNS_HELD_CUH
#define NORMFUSE_CUDA_COLUMNS_HELD_CUH

#include "columns_parameters.cuh"

/* Up to K vectors of x and, of two tensors, of dy, of every at_once-th row. `few`: of no hardswish and relu6. `lanes`:
 * of many samples one after the other, whose instructions are few: one loop of results for all but identity and SiLU.
 */
template <int K, int tensors, bool few = false, bool lanes = false> struct held_rows {
    static constexpr bool has_few_loops = lanes;
    const normfuse_cuda_columns &a;
    int left;            /* rows from the thread's first on; not above 0: the thread has none */
    const unsigned at;   /* bytes from the sample's beginning to the thread's first vector */
    const unsigned step; /* from one row of the thread to the next */
    const float act_param;
    uint4 held[K][tensors];

    /* None is leaky_relu of slope 1. */
    __device__ __forceinline__ held_rows(const normfuse_cuda_columns &a, int left, unsigned at)
        : a(a), left(left), at(at), step((unsigned)a.at_once * a.row_bytes),
          act_param(few && a.activation == NORMFUSE_IDENTITY ? 1.0f : a.act_param)
    {
    }
    /* Of sample n. */
    __device__ __forceinline__ void request(int n)
    {
        const char *x = a.x + n * a.batch_bytes + at, *dy = a.dy + n * a.batch_bytes + at;
        walk([&](int k) {
            NORMFUSE_LOAD_UINT4(held[k][0], x);
            x += step;
            if (tensors > 1) {
                NORMFUSE_LOAD_UINT4(held[k][tensors - 1], dy);
                dy += step;
            }
        });
    }
    /* work(k) */
    template <typename Work> __device__ __forceinline__ void walk(Work work) const
    {
        walk_rows<0, K>(left, a.at_once, work);
    }
    /* As choose_activation; few: two loops, since each is a third of the kernel. */
    template <typename Work> __device__ __forceinline__ void choose_derivative(Work work) const
    {
        if constexpr (!few)
            choose_activation<true, false>(a.activation, work);
        else if (a.activation == NORMFUSE_SILU)
            work(chosen_activation<NORMFUSE_SILU>());
        else
            work(chosen_activation<NORMFUSE_LEAKY_RELU>());
    }
    /* work(vectors, first, second), which adds to both. */
    template <int V, typename Work>
    __device__ __forceinline__ void sum(float (&first)[V], float (&second)[V], Work work) const
    {
        walk([&](int k) { work(held[k], first, second); });
    }
    /* Vectors are held, not what the sums made of them. */
    __device__ __forceinline__ void forget()
    {
        if (!lanes)
            each<K>([&](int k) { each<tensors>([&](int i) { compiler_barrier(held[k][i]); }); });
    }
    /* work(vectors, place) for the sample from `to` on. A pipeline has to know whether it is the last sample. */
    template <typename Work> __device__ __forceinline__ void store(char *to, bool /* is_last */, Work work) const
    {
        to += at;
        walk([&](int k) {
            work(held[k], to);
            to += step;
        });
    }
};

#endif
