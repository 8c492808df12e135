/* SPDX-License-Identifier: MIT
 *
 * nccl_batch_norm.c - synchronized batch norm with ReLU over the GPUs of one process: statistics of the samples of all GPUs,
 * sent by NCCL on the caller's streams. It needs two GPUs to show anything; with one it runs, and sends nothing.
 *
 *     cc -std=c11 nccl_batch_norm.c -o nccl_batch_norm $(pkg-config --cflags --libs normfuse) -lnccl -lcudart -lm
 *
 * (and -I and -L for CUDA and NCCL where the compiler does not find them). Forward: one ncclAllGather of three doubles for
 * each channel. Backward: one of two doubles for each channel. Gathers, not ncclAllReduce: every GPU merges in rank order,
 * so all GPUs have the same bits. Nothing waits for the device between the kernels and the gathers: all of them are in
 * order on one stream a GPU, and could be captured into a graph. The results are compared with the whole batch on the CPU. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <nccl.h>
#include <normfuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 8, N = 4, C = 32, H = 14, W = 14, VALUES = N * C * H * W };

static void stop(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static void check(normfuse_status status, const char *what)
{
    if (status != NORMFUSE_OK)
        stop(what, normfuse_last_error());
}

static void check_cuda(cudaError_t error, const char *what)
{
    if (error != cudaSuccess)
        stop(what, cudaGetErrorString(error));
}

static void check_nccl(ncclResult_t result, const char *what)
{
    if (result != ncclSuccess)
        stop(what, ncclGetErrorString(result));
}

/* Zeroed memory of the current device. cudaMalloc aligns to 256 bytes, as scratch and sync memory need to 64. */
static void *device_memory(size_t bytes)
{
    void *memory = NULL;
    check_cuda(cudaMalloc(&memory, bytes != 0 ? bytes : 1), "cudaMalloc");
    check_cuda(cudaMemset(memory, 0, bytes), "cudaMemset");
    return memory;
}

/* A tensor with its axes. */
struct held {
    normfuse_tensor tensor;
    normfuse_axes axes;
};

/* On CUDA device `device`, or with -1 in `data`, memory of the CPU. */
static void hold(struct held *held, void *data, int device, normfuse_type type, int32_t ndim, const int64_t *sizes)
{
    size_t bytes = type == NORMFUSE_F64 ? 8 : 4;
    for (int32_t a = 0; a < ndim; a++)
        bytes *= (size_t)sizes[a];
    held->tensor = normfuse_tensor_contiguous(device < 0 ? data : device_memory(bytes), type, ndim, sizes, &held->axes);
    if (device >= 0)
        held->tensor.device = (normfuse_device){NORMFUSE_CUDA, device};
}

/* One GPU: its part of the batch, and what it needs. */
struct worker {
    int device;
    cudaStream_t stream;
    struct held x, y, dy, dx, weight, bias, mean, rstd, dweight, dbias;
    struct held stats, every_stats, merged, sums, every_sums, merged_sums;
    void *scratch, *sync;
    size_t scratch_bytes, sync_bytes;
};

static normfuse_tensors forward_of(const struct worker *w, const struct held *stats)
{
    return (normfuse_tensors){.struct_bytes = sizeof(normfuse_tensors),
                              .x = &w->x.tensor,
                              .y = &w->y.tensor,
                              .weight = &w->weight.tensor,
                              .bias = &w->bias.tensor,
                              .mean = &w->mean.tensor,
                              .rstd = &w->rstd.tensor,
                              .stats = stats != NULL ? &stats->tensor : NULL};
}

static normfuse_tensors backward_of(const struct worker *w, const struct held *sums)
{
    return (normfuse_tensors){.struct_bytes = sizeof(normfuse_tensors),
                              .x = &w->x.tensor,
                              .dy = &w->dy.tensor,
                              .weight = &w->weight.tensor,
                              .bias = &w->bias.tensor,
                              .mean = &w->mean.tensor,
                              .rstd = &w->rstd.tensor,
                              .sums = sums != NULL ? &sums->tensor : NULL};
}

static normfuse_tensors with_gradients(normfuse_tensors tensors, const struct worker *w)
{
    tensors.dx = &w->dx.tensor;
    tensors.dweight = &w->dweight.tensor;
    tensors.dbias = &w->dbias.tensor;
    return tensors;
}

static normfuse_exec exec_of(const struct worker *w)
{
    return (normfuse_exec){.struct_bytes = sizeof(normfuse_exec),
                           .stream = w->stream,
                           .scratch = w->scratch,
                           .scratch_bytes = w->scratch_bytes,
                           .sync = w->sync,
                           .sync_bytes = w->sync_bytes};
}

/* Tensors of a worker with `samples` of the batch; device -1: the whole batch on the CPU, in `host`. */
static void make(struct worker *w, int device, int ranks, float *const host[4], float *const parameters[4], double *mean,
                 float *rstd)
{
    const int64_t samples = device < 0 ? N * ranks : N;
    const int64_t big[] = {samples, C, H, W}, channels[] = {C}, triple[] = {C, 3}, pair[] = {C, 2};
    const int64_t triples[] = {ranks, C, 3}, pairs[] = {ranks, C, 2};
    w->device = device;
    struct held *const images[] = {&w->x, &w->dy, &w->y, &w->dx};
    struct held *const of_channels[] = {&w->weight, &w->bias, &w->dweight, &w->dbias};
    for (int i = 0; i < 4; i++) {
        hold(images[i], host[i], device, NORMFUSE_F32, 4, big);
        hold(of_channels[i], parameters[i], device, NORMFUSE_F32, 1, channels);
    }
    hold(&w->mean, mean, device, NORMFUSE_F64, 1, channels);
    hold(&w->rstd, rstd, device, NORMFUSE_F32, 1, channels);
    if (device < 0)
        return;
    hold(&w->stats, NULL, device, NORMFUSE_F64, 2, triple);
    hold(&w->merged, NULL, device, NORMFUSE_F64, 2, triple);
    hold(&w->every_stats, NULL, device, NORMFUSE_F64, 3, triples);
    hold(&w->sums, NULL, device, NORMFUSE_F64, 2, pair);
    hold(&w->merged_sums, NULL, device, NORMFUSE_F64, 2, pair);
    hold(&w->every_sums, NULL, device, NORMFUSE_F64, 3, pairs);
}

/* Device memory for scratch: the larger of both directions'. */
static void make_scratch(struct worker *w, const normfuse_batch_norm_options *options)
{
    check(normfuse_sync_bytes(w->device, &w->sync_bytes), "normfuse_sync_bytes");
    w->sync = device_memory(w->sync_bytes);
    const normfuse_exec exec = exec_of(w);
    const normfuse_tensors forward = forward_of(w, NULL), backward = with_gradients(backward_of(w, NULL), w);
    size_t bytes = 0;
    check(normfuse_batch_norm_forward_scratch_bytes(options, &forward, &exec, &bytes), "forward_scratch_bytes");
    check(normfuse_batch_norm_backward_scratch_bytes(options, &backward, &exec, &w->scratch_bytes), "backward_scratch_bytes");
    if (w->scratch_bytes < bytes)
        w->scratch_bytes = bytes;
    w->scratch = device_memory(w->scratch_bytes);
}

/* One collective over all GPUs: `doubles` of each, in rank order. */
static void gather(struct worker *workers, ncclComm_t *communicators, int ranks, size_t doubles, int backward)
{
    check_nccl(ncclGroupStart(), "ncclGroupStart"); /* one thread drives all GPUs */
    for (int r = 0; r < ranks; r++) {
        struct worker *const w = &workers[r];
        check_nccl(ncclAllGather(backward ? w->sums.tensor.data : w->stats.tensor.data,
                                 backward ? w->every_sums.tensor.data : w->every_stats.tensor.data, doubles, ncclDouble,
                                 communicators[r], w->stream),
                   "ncclAllGather");
    }
    check_nccl(ncclGroupEnd(), "ncclGroupEnd");
}

static float *floats(size_t count)
{
    float *const memory = calloc(count, sizeof *memory);
    if (memory == NULL)
        stop("memory", "there is none");
    return memory;
}

int main(void)
{
    int ranks = 0;
    check_cuda(cudaGetDeviceCount(&ranks), "cudaGetDeviceCount");
    if (ranks > MOST)
        ranks = MOST;

    /* The whole batch: x, dy, y, dx; weight, bias, dweight, dbias. */
    float *host[4], *parameters[4], rstd[C], *const part = floats(VALUES);
    double mean[C];
    for (int i = 0; i < 4; i++) {
        host[i] = floats((size_t)ranks * VALUES);
        parameters[i] = floats(C);
    }
    for (int i = 0; i < ranks * VALUES; i++) {
        host[0][i] = 2 + (float)(i / VALUES) + sinf(0.37f * (float)(i % 100003)); /* parts differ in their mean */
        host[1][i] = cosf(0.11f * (float)(i % 99991));
    }
    for (int c = 0; c < C; c++) {
        parameters[0][c] = 0.5f + 0.05f * (float)c;
        parameters[1][c] = 0.02f * (float)c - 0.3f;
    }

    normfuse_batch_norm_options options = {
        .struct_bytes = sizeof options, .eps = 1e-5, .activation = NORMFUSE_RELU, .momentum = 0.1};
    struct worker workers[MOST], whole;
    ncclComm_t communicators[MOST];
    int devices[MOST];
    for (int r = 0; r < ranks; r++) {
        devices[r] = r;
        check_cuda(cudaSetDevice(r), "cudaSetDevice");
        memset(&workers[r], 0, sizeof workers[r]);
        make(&workers[r], r, ranks, (float *[4]){NULL}, (float *[4]){NULL}, NULL, NULL);
        check_cuda(cudaStreamCreateWithFlags(&workers[r].stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        make_scratch(&workers[r], &options);
        const size_t bytes = VALUES * sizeof(float), at = (size_t)r * VALUES;
        check_cuda(cudaMemcpy(workers[r].x.tensor.data, host[0] + at, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
        check_cuda(cudaMemcpy(workers[r].dy.tensor.data, host[1] + at, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
        check_cuda(cudaMemcpy(workers[r].weight.tensor.data, parameters[0], sizeof rstd, cudaMemcpyHostToDevice), "cudaMemcpy");
        check_cuda(cudaMemcpy(workers[r].bias.tensor.data, parameters[1], sizeof rstd, cudaMemcpyHostToDevice), "cudaMemcpy");
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); /* copies are on the default stream */
    }
    check_nccl(ncclCommInitAll(communicators, ranks, devices), "ncclCommInitAll");

    /* Forward. */
    for (int r = 0; r < ranks; r++) {
        const struct worker *const w = &workers[r];
        const normfuse_exec exec = exec_of(w);
        const normfuse_tensors tensors = {
            .struct_bytes = sizeof tensors, .x = &w->x.tensor, .stats = &w->stats.tensor};
        check(normfuse_batch_norm_stats(&options, &tensors, &exec), "stats");
    }
    gather(workers, communicators, ranks, C * 3, 0);
    for (int r = 0; r < ranks; r++) {
        const struct worker *const w = &workers[r];
        const normfuse_exec exec = exec_of(w);
        const normfuse_tensors tensors = forward_of(w, &w->merged);
        check(normfuse_stats_merge(&w->every_stats.tensor, &w->merged.tensor, &exec), "stats_merge");
        check(normfuse_batch_norm_apply(&options, &tensors, &exec), "apply");
    }

    /* Backward. The host knows all parts' sizes, so it knows the count that a channel has over all GPUs. */
    options.set_values = (int64_t)ranks * N * H * W;
    for (int r = 0; r < ranks; r++) {
        const normfuse_exec exec = exec_of(&workers[r]);
        const normfuse_tensors tensors = backward_of(&workers[r], &workers[r].sums);
        check(normfuse_batch_norm_backward_sums(&options, &tensors, &exec), "backward_sums");
    }
    gather(workers, communicators, ranks, C * 2, 1);
    for (int r = 0; r < ranks; r++) {
        const struct worker *const w = &workers[r];
        const normfuse_exec exec = exec_of(w);
        const normfuse_tensors tensors = with_gradients(backward_of(w, &w->merged_sums), w);
        check(normfuse_sums_merge(&w->every_sums.tensor, &w->merged_sums.tensor, &exec), "sums_merge");
        check(normfuse_batch_norm_backward_apply(&options, &tensors, &exec), "backward_apply");
    }

    /* The whole batch on the CPU. */
    memset(&whole, 0, sizeof whole);
    make(&whole, -1, ranks, host, parameters, mean, rstd);
    options.set_values = 0;
    const normfuse_tensors forward = forward_of(&whole, NULL), backward = with_gradients(backward_of(&whole, NULL), &whole);
    check(normfuse_batch_norm_forward(&options, &forward, NULL), "forward of the whole");
    check(normfuse_batch_norm_backward(&options, &backward, NULL), "backward of the whole");

    float worst[2] = {0, 0}; /* y, dx */
    for (int r = 0; r < ranks; r++) {
        check_cuda(cudaSetDevice(r), "cudaSetDevice");
        check_cuda(cudaStreamSynchronize(workers[r].stream), "cudaStreamSynchronize");
        const void *const results[2] = {workers[r].y.tensor.data, workers[r].dx.tensor.data};
        for (int k = 0; k < 2; k++) {
            check_cuda(cudaMemcpy(part, results[k], VALUES * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
            for (int i = 0; i < VALUES; i++) {
                const float difference = fabsf(part[i] - host[2 + k][(size_t)r * VALUES + (size_t)i]);
                if (!(difference <= worst[k])) /* NaN, too */
                    worst[k] = difference;
            }
        }
        check_nccl(ncclCommDestroy(communicators[r]), "ncclCommDestroy");
    }
    printf("%d GPUs: y differs from the whole batch on the CPU by at most %.2g, dx by %.2g\n", ranks, (double)worst[0],
           (double)worst[1]);
    return worst[0] <= 1e-5f && worst[1] <= 1e-5f ? 0 : 1;
}
