/* SPDX-License-Identifier: MIT
 *
 * test_cuda_kernels.cu - kernels of tests/cuda/test_cuda.c: one that occupies processors for a time, as a foreign
 * program's would, and two that fill and compare tensors of more elements than a test could upload. NVRTC compiles this file
 * without any header of C's or of CUDA's. */
typedef unsigned long long int count_type;

/* Each block stays for so many nanoseconds. */
extern "C" __global__ void test_spin(count_type nanoseconds)
{
    count_type begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begin < nanoseconds);
}

/* Element i of a tensor [N, C, positions], or with the channels last, is pattern[c][position % period]; the period is a
 * power of two. */
static __device__ unsigned short periodic(const unsigned short *pattern, count_type i, count_type channels,
                                          count_type positions,
                                    count_type period, int channels_last)
{
    const count_type c = channels_last ? i % channels : i / positions % channels;
    const count_type s = channels_last ? i / channels % positions : i % positions;
    return pattern[c * period + (s & (period - 1))];
}

extern "C" __global__ void test_fill(unsigned short *data, const unsigned short *pattern, count_type elements,
                                     count_type channels, count_type positions, count_type period, int channels_last)
{
    const count_type step = (count_type)gridDim.x * blockDim.x;
    for (count_type i = (count_type)blockIdx.x * blockDim.x + threadIdx.x; i < elements; i += step)
        data[i] = periodic(pattern, i, channels, positions, period, channels_last);
}

/* found[0]: how many elements differ; found[1]: the first of them. */
extern "C" __global__ void test_compare(const unsigned short *data, const unsigned short *pattern, count_type elements,
                                        count_type channels, count_type positions, count_type period, int channels_last,
                                        count_type *found)
{
    const count_type step = (count_type)gridDim.x * blockDim.x;
    for (count_type i = (count_type)blockIdx.x * blockDim.x + threadIdx.x; i < elements; i += step)
        if (data[i] != periodic(pattern, i, channels, positions, period, channels_last)) {
            atomicAdd(found, 1ull);
            atomicMin(found + 1, i);
        }
}
