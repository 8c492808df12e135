/* SPDX-License-Identifier: MIT
 *
 * columns_grid_registers.cu - backward of group norm over adjacent channels (NHWC) of all samples at once, each spread
 * over as many blocks as have a multiprocessor: a block has whole rows, and its threads hold them in registers while
 * all blocks send one another their sums. A cluster's blocks are narrow, which memory is slow at, and a pipeline that
 * one thread fills takes longer to begin. */
#include "columns_grid.cuh"

struct grid_registers_place : pipeline_place {
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

/* The block's sums of channels, of this sample, into memory, one block's beside one another. Four channels a thread. */
__device__ __forceinline__ void write_channels(const normfuse_cuda_arguments &all, const float4 *plain,
                                               const float4 *centred, const float2 *of_groups, int channels)
{
    const normfuse_cuda_columns &a = all.columns;
    const int quads = channels / 4;
    float4 *const to = reinterpret_cast<float4 *>(all.sums) + (int64_t)blockIdx.x * (channels / 2);
#pragma unroll 1
    for (int quad = (int)threadIdx.x; quad < quads; quad += (int)blockDim.x) {
        float sum[4] = {}, product[4] = {};
        sum_rows(plain, centred, quad, quads, 0, a.at_once, 1, sum, product);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 of_group = of_groups[divide(4 * quad + i, a.by_group)];
            product[i] = (product[i] - of_group.x * sum[i]) * of_group.y;
        }
        __stcg(to + 2 * quad, make_float4(sum[0], product[0], sum[1], product[1]));
        __stcg(to + 2 * quad + 1, make_float4(sum[2], product[2], sum[3], product[3]));
    }
}

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
    const int threads = (int)blockDim.x, channels = a.width * V;
    const bool gives = all.sums != nullptr;
    /* Of each row and channel two sums, one after the other; two sums of each thread in a group; of each group what its
     * mean leaves out and rstd, and what dx takes of x - mean and what else. */
    const normfuse_grid_layout at =
        normfuse_lay_out_grid_backward(0, a.width, channels, a.groups, a.at_once, false, gives);
    float *const of_plain = in_shared<float>(dynamic, at.plain), *const of_centred =
                                                                     in_shared<float>(dynamic, at.centred);
    float2 *const entries = in_shared<float2>(dynamic, at.entries), *const of_groups =
                                                                        in_shared<float2>(dynamic, at.groups);
    float2 *const of_totals = in_shared<float2>(dynamic, at.totals);

    grid_registers_place place(a);
    /* What is needed of the parameters comes first, so that vectors are summed as they come. */
    place.find_groups<V>(a, place.column);
    const int mean_type = type_of(a, COLUMNS_MEAN), rstd_type = type_of(a, COLUMNS_RSTD);
    saved_statistic requested_means[2], requested_rstds[2];
#pragma unroll
    for (int side = 0; side < 2; side++) {
        requested_means[side].request(a.mean, place.n * a.mean_batch + place.groups[side], mean_type);
        requested_rstds[side].request(a.rstd, place.n * a.rstd_batch + place.groups[side], rstd_type);
    }
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
    uint32_t *const grid_barrier = all.grid_barriers + (gives ? 0 : place.n) * grid_barrier_stride;
    uint32_t before = 0;
    if (threadIdx.x == 0)
        before = look_at_grid_barrier(grid_barrier);
    side_values rests = {{}, place.split}, rstds = rests, about = rests;
#pragma unroll
    for (int side = 0; side < 2; side++) {
        rstds.of[side] = (float)requested_rstds[side].receive(rstd_type);
        split_mean<T>(requested_means[side].receive(mean_type), about.of[side], rests.of[side]);
    }
    if (place.has_rows() && place.beside == 0) {
        of_groups[place.groups[0]] = make_float2(rests.of[0], rstds.of[0]);
        of_groups[place.groups[1]] = make_float2(rests.of[1], rstds.of[1]);
    }
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
    if (place.has_rows())
        write_thread_sums<V>(a, place, slope, first, second, factor, gives, channels, entries, of_plain, of_centred);
    meet(MEETING_OF_CONSUMERS, threads);

    /* ---- the totals of the groups ---- */
    write_totals<V>(all, place.n, place.part, 0, entries, threads);
    if (gives)
        write_channels(all, reinterpret_cast<const float4 *>(of_plain), reinterpret_cast<const float4 *>(of_centred),
                       of_groups, channels);
    meet_blocks(grid_barrier, gives ? (int)blockIdx.x : place.part, gives ? (int)gridDim.x : a.parts, before, threads);
    join_totals(all, place.n, 0, of_groups, of_totals, threads);
    /* Each warp of the grid has two channels; their sums arrive while results are written. */
    channel_gradients<float> gradients(all, channels);
    const int first_channel = 2 * ((int)threadIdx.x / 32 * (int)gridDim.x + (int)blockIdx.x);
    if (gives)
        gradients.request(first_channel);
    meet(MEETING_OF_CONSUMERS, threads);

    /* ---- results ---- */
    const float2 of_first = of_totals[place.groups[0]], of_second = of_totals[place.groups[1]];
    const side_values of_x = {{of_first.x, of_second.x}, place.split}, level = {{of_first.y, of_second.y}, place.split};
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
        for (int c = first_channel; c < channels; c += 2 * (threads / 32) * (int)gridDim.x) {
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
