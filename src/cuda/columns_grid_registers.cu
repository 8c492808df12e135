/* SPDX-License-Identifier: MIT
 *
 * columns_grid_registers.cu - backward of group norm over adjacent channels (NHWC) of all samples at once, each spread
 * over as many blocks as have a multiprocessor: a block has whole rows, and its threads hold them in registers while
 * all blocks send one another their sums. A cluster's blocks are narrow, which memory is slow at, and a pipeline that
 * one thread fills takes longer to begin. */
#include "columns_grid.cuh"

struct grid_registers_place : consumer_place {
    int n, part;
    int left;      /* rows of the part from the thread's first on; not above 0: the thread has none */
    int64_t at;    /* bytes to the thread's first vector */
    unsigned step; /* from one row of the thread to the next */

    __device__ __forceinline__ explicit grid_registers_place(const normfuse_cuda_columns &a)
    {
        n = divide((int)blockIdx.x, a.by_parts);
        part = (int)blockIdx.x - n * a.parts;
        find(a);
        const int first_row = part * a.part_rows;
        left = has_rows() ? min(a.part_rows, a.rows - first_row) - beside : 0;
        at = n * a.batch_bytes + (unsigned)(first_row + beside) * a.row_bytes + (unsigned)column * 16u;
        step = (unsigned)a.at_once * a.row_bytes;
    }
};

/* As choose_activation: two loops, since each is a third of the kernel. None is leaky_relu of slope 1 here, and
 * hardswish and relu6 are left to other kernels. */
template <typename Work> __device__ __forceinline__ void choose_derivative(int activation, Work work)
{
    if (activation == NORMFUSE_SILU)
        work(chosen_activation<NORMFUSE_SILU>());
    else
        work(chosen_activation<NORMFUSE_LEAKY_RELU>());
}

template <typename T, int V, int K>
__device__ __forceinline__ void grid_registers_backward(const normfuse_cuda_arguments &all)
{
    follow_kernel();
    const normfuse_cuda_columns &a = all.columns;
    constexpr bool fast = sizeof(T) == 2;
    NORMFUSE_DYNAMIC_SHARED(dynamic);
    const int threads = (int)blockDim.x;
    grid_registers_place place(a);
    group_backward<T, V, false> group(all, place, place.n, place.part, dynamic, 0);
    const bool gives = group.gives;
    /* What is needed of the parameters comes first, so that vectors are summed as they come. */
    place.find_groups<V>(a, place.column);
    group.request_statistics(place.n);
    channel_parameters<V> parameters;
    parameters.request_weights(a, place.column * V);
    const char *x_from = a.x + place.at, *dy_from = a.dy + place.at;
    uint4 held_x[K], held_dy[K];
    const auto load = [&](int k) {
        held_x[k] = load_vector<T, V>(x_from, 0);
        held_dy[k] = load_vector<T, V>(dy_from, 0);
        x_from += place.step;
        dy_from += place.step;
    };
    walk_rows<0, K>(place.left, a.at_once, load);
    /* Where parameters want gradients, blocks of all samples meet. */
    grid_meeting meeting(all.grid_barriers + (gives ? 0 : place.n) * grid_barrier_stride);
    meeting.look();
    side_values about, rests, rstds, of_x, level;
    group.receive_statistics(place.n, about, rests, rstds);
    float slope[V], offset[V];
    parameters.receive_weights(a, slope, offset);
    const float factor = takes_half<fast, true>(a.activation) ? 0.5f : 1.0f;
    centre<V>(slope, offset, rests, rstds, factor);
    const float below = a.activation == NORMFUSE_IDENTITY ? 1.0f : a.act_param;
    /* Of the k-th vectors. */
    const auto differentiate = [&](auto chosen, int k, float(&x)[V], float(&dy)[V]) {
        unpack<T, V>(held_x[k], x);
        unpack<T, V>(held_dy[k], dy);
        differentiate_channels<fast, V>(a.activation, below, chosen, about, slope, offset, x, dy);
    };

    /* ---- sums ---- */
    float first[V] = {}, second[V] = {};
    choose_derivative(a.activation, [&](auto chosen) {
        const auto sum_up = [&](int k) {
            float x[V], dy[V];
            differentiate(chosen, k, x, dy);
            add_products(x, dy, first, second);
        };
        walk_rows<0, K>(place.left, a.at_once, sum_up);
    });
    group.write_sums(slope, first, second, factor);
    meet(MEETING_OF_CONSUMERS, threads);

    /* ---- the totals of the groups ---- */
    group.write_totals();
    if (gives)
        group.template write_channels<float>((int)threadIdx.x, threads, false);
    meeting.meet_blocks(gives ? (int)blockIdx.x : place.part, gives ? (int)gridDim.x : a.parts, threads);
    group.join_totals();
    /* Each warp of the grid has two channels; their sums arrive while results are written. */
    channel_gradients<float> gradients(all, group.channels);
    const int first_channel = 2 * ((int)threadIdx.x / 32 * (int)gridDim.x + (int)blockIdx.x);
    if (gives)
        gradients.request(first_channel);
    meet(MEETING_OF_CONSUMERS, threads);

    /* ---- results ---- */
    group.totals(of_x, level);
#pragma unroll
    for (int k = 0; k < K; k++) {
        compiler_barrier(held_x[k]);
        compiler_barrier(held_dy[k]);
    }
    char *to = a.out + place.at;
    choose_derivative(a.activation, [&](auto chosen) {
        const auto give = [&](int k) {
            float x[V], dy[V];
            differentiate(chosen, k, x, dy);
            store_gradient<T, V>(slope, of_x, level, x, dy, to);
            to += place.step;
        };
        walk_rows<0, K>(place.left, a.at_once, give);
    });
    if (gives) {
#pragma unroll 1
        for (int c = first_channel; c < group.channels; c += 2 * (threads / 32) * (int)gridDim.x) {
            if (c != first_channel)
                gradients.request(c);
            gradients.give(all, c);
        }
    }
}

#define INSTANCE(layout, schedule, direction, type, elements, vectors, threads, registers)                             \
    NORMFUSE_KERNEL(layout, schedule, direction, type, elements, vectors, registers)                                   \
    {                                                                                                                  \
        NORMFUSE_PIPELINE_BODY((grid_registers_##direction<type, elements, vectors>(a)));                              \
    }
NORMFUSE_KERNELS_COLUMNS_GRID_REGISTERS(INSTANCE)
