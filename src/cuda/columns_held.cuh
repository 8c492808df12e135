/* SPDX-License-Identifier: MIT
 *
 * columns_held.cuh - a thread's vectors of a tensor over columns in registers, for all that a kernel does with them. */
#ifndef NORMFUSE_CUDA_COLUMNS_HELD_CUH
#define NORMFUSE_CUDA_COLUMNS_HELD_CUH

#include "columns_parameters.cuh"

/* Up to K vectors of x and of dy, of every at_once-th row. `few`: of no hardswish and relu6. */
template <int K, bool few> struct held_rows {
    const normfuse_cuda_columns &a;
    const int left;      /* rows from the thread's first on; not above 0: the thread has none */
    const unsigned at;   /* bytes from the sample's beginning to the thread's first vector */
    const unsigned step; /* from one row of the thread to the next */
    uint4 x[K], dy[K];

    __device__ __forceinline__ held_rows(const normfuse_cuda_columns &a, int left, unsigned at)
        : a(a), left(left), at(at), step((unsigned)a.at_once * a.row_bytes)
    {
    }
    /* work(k) */
    template <typename Work> __device__ __forceinline__ void walk(Work work) const
    {
        walk_rows<0, K>(left, a.at_once, work);
    }
    /* Of a sample. */
    template <bool both> __device__ __forceinline__ void request(const char *x_from, const char *dy_from)
    {
        x_from += at;
        dy_from += at;
        walk([&](int k) {
            NORMFUSE_LOAD_UINT4(x[k], x_from);
            x_from += step;
            if (both) {
                NORMFUSE_LOAD_UINT4(dy[k], dy_from);
                dy_from += step;
            }
        });
    }
    /* Vectors are held, not what the sums made of them. */
    __device__ __forceinline__ void forget()
    {
        each<K>([&](int k) {
            compiler_barrier(x[k]);
            compiler_barrier(dy[k]);
        });
    }
    /* As choose_activation; few: two loops, since each is a third of the kernel. None is leaky_relu of slope 1. */
    template <typename Work> __device__ __forceinline__ void choose_derivative(Work work) const
    {
        if constexpr (!few)
            choose_activation<true, false>(a.activation, work);
        else if (a.activation == NORMFUSE_SILU)
            work(chosen_activation<NORMFUSE_SILU>());
        else
            work(chosen_activation<NORMFUSE_LEAKY_RELU>());
    }
    /* Sums of dy' and of dy' (x - mean). */
    template <int V, typename Differentiate>
    __device__ __forceinline__ void sum_gradients(Differentiate differentiate, float (&first)[V], float (&second)[V])
    {
        choose_derivative([&](auto chosen) {
            walk([&](int k) {
                float x_here[V], dy_here[V];
                differentiate(chosen, x[k], dy[k], x_here, dy_here);
                add_products(x_here, dy_here, first, second);
            });
        });
    }
    /* dx into the sample from `to` on. Called as a pipeline's, which has to know whether it is the last sample. */
    template <typename T, int V, typename Differentiate, typename Values>
    __device__ __forceinline__ void store_gradients(char *to, bool /* is_last */, Differentiate differentiate,
                                                    const float (&slope)[V], const Values &of_x, const Values &level)
    {
        forget();
        to += at;
        choose_derivative([&](auto chosen) {
            walk([&](int k) {
                float x_here[V], dy_here[V];
                differentiate(chosen, x[k], dy[k], x_here, dy_here);
                store_gradient<T, V>(slope, of_x, level, x_here, dy_here, to);
                to += step;
            });
        });
    }
};

#endif
