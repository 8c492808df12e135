/* SPDX-License-Identifier: MIT
 *
 * single.cuh - what the kernels that load one element at a time have in common: lines.cu and tile.cu. */
#ifndef NORMFUSE_CUDA_SINGLE_CUH
#define NORMFUSE_CUDA_SINGLE_CUH

#include "activation.cuh"
#include "body.cuh"

/* Values of a thread that are worked on together; slots that are used are a multiple of this. */
constexpr int slots_at_once = 4;

template <typename T> __device__ __forceinline__ compute<T> number_of(const raw<T, 1> &value)
{
    compute<T> number[1];
    unpack<T, 1>(value, number);
    return number[0];
}
template <typename T> __device__ __forceinline__ raw<T, 1> rounded_to(compute<T> number)
{
    const compute<T> numbers[1] = {number};
    return make_vector<T, 1>(numbers);
}
/* Not a streaming store: several stores fill a sector. */
template <typename T> __device__ __forceinline__ void store_number(char *to, compute<T> number)
{
    *reinterpret_cast<raw<T, 1> *>(to) = rounded_to<T>(number);
}

/* work(slot) for the first `used` of a thread's slots, rounded up to slots_at_once. */
template <int K, typename Work> __device__ __forceinline__ void in_slots(int used, Work work)
{
#pragma unroll
    for (int k = 0; k < K; k++) {
        if (k % slots_at_once == 0 && k >= used)
            break;
        work(k);
    }
}

/* x with what is added to it, rounded as it would be in memory. */
template <typename T, int K>
__device__ __forceinline__ void add_slots(int used, const raw<T, 1> (&more)[K], compute<T> (&x)[K])
{
    in_slots<K>(used, [&](int k) { x[k] = number_of<T>(rounded_to<T>(x[k] + number_of<T>(more[k]))); });
}

/* out = act(out), or, of a derivative, out *= act'(z). The rare activations are long: their slots go
 * through memory of the thread, so that there is one loop over them and not as many copies as registers would need. */
template <bool fast, bool derivative, typename R, int K>
__device__ __forceinline__ void activate_slots(int used, R (&z)[K], R (&out)[K], int activation, R p)
{
    choose_activation<true, true>(activation, [&](auto chosen) {
        constexpr int constant = decltype(chosen)::constant;
        constexpr bool rare = constant < 0;
        R held_z[rare ? K : 1], held[rare ? K : 1];
        if (derivative && constant == NORMFUSE_IDENTITY)
            return;
        if (rare)
            in_slots<K>(used, [&](int k) {
                held_z[rare ? k : 0] = z[k];
                held[rare ? k : 0] = out[k];
            });
        const R factor = takes_half<fast, true>(constant) ? R(0.5) : R(1);
#pragma unroll(rare ? 1 : K / slots_at_once)
        for (int begin = 0; begin < K; begin += slots_at_once) {
            if (begin >= used)
                break;
            R few_z[slots_at_once], few[slots_at_once];
            each<slots_at_once>([&](int i) {
                few_z[i] = rare ? held_z[rare ? begin + i : 0] : z[begin + i] * factor;
                few[i] = rare ? held[rare ? begin + i : 0] : out[begin + i] * factor;
            });
            if constexpr (derivative)
                differentiate_by<fast>(few, few_z, chosen, activation, p);
            else
                activate<fast, true>(few, chosen, activation, p);
            each<slots_at_once>([&](int i) { (rare ? held[rare ? begin + i : 0] : out[begin + i]) = few[i]; });
        }
        if (rare)
            in_slots<K>(used, [&](int k) { out[k] = held[rare ? k : 0]; });
    });
}

/* Those values that the thread has, `step` bytes apart. */
template <typename T, int K, typename Step, typename Has>
__device__ __forceinline__ void store_slots(int used, char *to, Step step, const compute<T> (&values)[K], Has has)
{
    in_slots<K>(used, [&](int k) {
        if (has(k))
            store_number<T>(to, values[k]);
        to += step;
    });
}

/* value / divisor, rounded once but for the last bit, exact where the quotient is; share is 1 / divisor. */
template <typename R> __device__ __forceinline__ R quotient(R value, R divisor, R share)
{
    const R near = value * share;
    return fma(fma(-near, divisor, value), share, near);
}

#endif
