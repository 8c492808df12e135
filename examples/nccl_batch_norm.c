/* SPDX-License-Identifier: MIT
 *
 * nccl_batch_norm.c - synchronized batch norm with ReLU over the GPUs of one process: statistics of the samples of all
 * GPUs, sent by NCCL on the caller's streams. It needs two GPUs to show anything; with one it runs, and sends nothing.
 *
 *     cc -std=c11 nccl_batch_norm.c -o nccl_batch_norm $(pkg-config --cflags --libs normfuse) \
 *         -lnccl -lcudart -lpthread -lm
 *     ./nccl_batch_norm               compares the results with those of the whole batch on the CPU
 *     ./nccl_batch_norm 32 256 14 14  and then times layers of that shape, [N, C, H, W] of each GPU
 *
 * (-I and -L for CUDA and NCCL where the compiler does not find them.) Forward: one ncclAllGather of three doubles for
 * each channel. Backward: one of two doubles for each channel. Gathers, not ncclAllReduce: every GPU merges in rank
 * order, so all GPUs have the same bits. Nothing waits for the device between the kernels and the gathers: all of them
 * are in order on one stream a GPU, and can be captured into a graph. A thread drives each GPU. */
#define _POSIX_C_SOURCE 200809L /* pthread_barrier_t */
#include <cuda_runtime_api.h>
#include <math.h>
#include <nccl.h>
#include <normfuse.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 8, LAYERS = 50, ROUNDS = 21 };

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
    int device, ranks;
    int64_t sizes[4]; /* N, C, H, W of its part */
    normfuse_batch_norm_options options;
    ncclComm_t communicator;
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

/* Tensors of a worker; device -1: the whole batch on the CPU, in `host`. */
static void make(struct worker *w, float *const host[4], float *const parameters[4], double *mean, float *rstd)
{
    const int device = w->device;
    const int64_t channels = w->sizes[1], triple[] = {channels, 3}, pair[] = {channels, 2};
    const int64_t triples[] = {w->ranks, channels, 3}, pairs[] = {w->ranks, channels, 2};
    struct held *const images[] = {&w->x, &w->dy, &w->y, &w->dx};
    struct held *const of_channels[] = {&w->weight, &w->bias, &w->dweight, &w->dbias};
    w->options = (normfuse_batch_norm_options){
        .struct_bytes = sizeof w->options, .eps = 1e-5, .activation = NORMFUSE_RELU, .momentum = 0.1};
    for (int i = 0; i < 4; i++) {
        hold(images[i], host[i], device, NORMFUSE_F32, 4, w->sizes);
        hold(of_channels[i], parameters[i], device, NORMFUSE_F32, 1, &channels);
    }
    hold(&w->mean, mean, device, NORMFUSE_F64, 1, &channels);
    hold(&w->rstd, rstd, device, NORMFUSE_F32, 1, &channels);
    if (device < 0)
        return;
    hold(&w->stats, NULL, device, NORMFUSE_F64, 2, triple);
    hold(&w->merged, NULL, device, NORMFUSE_F64, 2, triple);
    hold(&w->every_stats, NULL, device, NORMFUSE_F64, 3, triples);
    hold(&w->sums, NULL, device, NORMFUSE_F64, 2, pair);
    hold(&w->merged_sums, NULL, device, NORMFUSE_F64, 2, pair);
    hold(&w->every_sums, NULL, device, NORMFUSE_F64, 3, pairs);
}

/* The tensors of a GPU, which becomes the current one, with scratch memory for both directions. */
static void make_on_gpu(struct worker *w)
{
    check_cuda(cudaSetDevice(w->device), "cudaSetDevice");
    make(w, (float *[4]){NULL}, (float *[4]){NULL}, NULL, NULL);
    check_cuda(cudaStreamCreateWithFlags(&w->stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check(normfuse_sync_bytes(w->device, &w->sync_bytes), "normfuse_sync_bytes");
    w->sync = device_memory(w->sync_bytes);
    const normfuse_exec exec = exec_of(w);
    const normfuse_tensors forward = forward_of(w, NULL), backward = with_gradients(backward_of(w, NULL), w);
    size_t bytes = 0;
    check(normfuse_batch_norm_forward_scratch_bytes(&w->options, &forward, &exec, &bytes), "forward_scratch_bytes");
    check(normfuse_batch_norm_backward_scratch_bytes(&w->options, &backward, &exec, &w->scratch_bytes),
          "backward_scratch_bytes");
    if (w->scratch_bytes < bytes)
        w->scratch_bytes = bytes;
    w->scratch = device_memory(w->scratch_bytes);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); /* memory is zeroed on the default stream */
}

/* ---- a layer over all GPUs -------------------------------------------------------------------------------------- */

/* `doubles` of each GPU, in rank order. */
static void gather(const struct worker *w, const struct held *from, const struct held *to, size_t doubles)
{
    check_nccl(ncclAllGather(from->tensor.data, to->tensor.data, doubles, ncclDouble, w->communicator, w->stream),
               "ncclAllGather");
}

static void forward(const struct worker *w)
{
    const normfuse_exec exec = exec_of(w);
    const normfuse_tensors part = {.struct_bytes = sizeof part, .x = &w->x.tensor, .stats = &w->stats.tensor};
    const normfuse_tensors tensors = forward_of(w, &w->merged);
    check(normfuse_batch_norm_stats(&w->options, &part, &exec), "stats");
    gather(w, &w->stats, &w->every_stats, (size_t)w->sizes[1] * 3);
    check(normfuse_stats_merge(&w->every_stats.tensor, &w->merged.tensor, &exec), "stats_merge");
    check(normfuse_batch_norm_apply(&w->options, &tensors, &exec), "apply");
}

/* The host knows all parts' sizes, so it knows the count that a channel has over all GPUs. */
static void backward(const struct worker *w)
{
    const normfuse_exec exec = exec_of(w);
    const normfuse_tensors part = backward_of(w, &w->sums);
    const normfuse_tensors tensors = with_gradients(backward_of(w, &w->merged_sums), w);
    normfuse_batch_norm_options options = w->options;
    options.set_values = w->ranks * w->sizes[0] * w->sizes[2] * w->sizes[3];
    check(normfuse_batch_norm_backward_sums(&options, &part, &exec), "backward_sums");
    gather(w, &w->sums, &w->every_sums, (size_t)w->sizes[1] * 2);
    check(normfuse_sums_merge(&w->every_sums.tensor, &w->merged_sums.tensor, &exec), "sums_merge");
    check(normfuse_batch_norm_backward_apply(&options, &tensors, &exec), "backward_apply");
}

/* The layer without the other GPUs; device -1: on the CPU. */
static void forward_alone(const struct worker *w)
{
    const normfuse_exec exec = exec_of(w);
    const normfuse_tensors tensors = forward_of(w, NULL);
    check(normfuse_batch_norm_forward(&w->options, &tensors, w->device < 0 ? NULL : &exec), "forward");
}

static void backward_alone(const struct worker *w)
{
    const normfuse_exec exec = exec_of(w);
    const normfuse_tensors tensors = with_gradients(backward_of(w, NULL), w);
    check(normfuse_batch_norm_backward(&w->options, &tensors, w->device < 0 ? NULL : &exec), "backward");
}

static void *both(void *worker)
{
    const struct worker *const w = worker;
    check_cuda(cudaSetDevice(w->device), "cudaSetDevice");
    forward(w);
    backward(w);
    check_cuda(cudaStreamSynchronize(w->stream), "cudaStreamSynchronize");
    return NULL;
}

/* ---- times ------------------------------------------------------------------------------------------------------ */

static pthread_barrier_t all_gpus;

static double microseconds(void)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Time of one layer: the median over rounds of LAYERS of them, which all GPUs begin together. */
static double us_a_layer(const struct worker *w, void (*layer)(const struct worker *), int is_captured)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t replayed = NULL;
    if (is_captured) {
        check_cuda(cudaStreamBeginCapture(w->stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        for (int i = 0; i < LAYERS; i++)
            layer(w);
        check_cuda(cudaStreamEndCapture(w->stream, &graph), "cudaStreamEndCapture");
        check_cuda(cudaGraphInstantiate(&replayed, graph, 0), "cudaGraphInstantiate");
    }
    double us[ROUNDS];
    for (int round = -3; round < ROUNDS; round++) { /* the first ones warm up */
        pthread_barrier_wait(&all_gpus);
        const double start = microseconds();
        if (is_captured)
            check_cuda(cudaGraphLaunch(replayed, w->stream), "cudaGraphLaunch");
        for (int i = 0; i < LAYERS && !is_captured; i++)
            layer(w);
        check_cuda(cudaStreamSynchronize(w->stream), "cudaStreamSynchronize");
        if (round >= 0)
            us[round] = (microseconds() - start) / LAYERS;
    }
    if (is_captured) {
        check_cuda(cudaGraphExecDestroy(replayed), "cudaGraphExecDestroy");
        check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
    qsort(us, ROUNDS, sizeof us[0], ascending);
    return us[ROUNDS / 2];
}

static void *time_layers(void *worker)
{
    static const struct {
        const char *name;
        void (*shared)(const struct worker *), (*alone)(const struct worker *);
    } directions[] = {{"forward", forward, forward_alone}, {"backward", backward, backward_alone}};
    struct worker *const w = worker;
    make_on_gpu(w);
    for (int is_captured = 0; is_captured < 2; is_captured++)
        for (int d = 0; d < 2; d++) {
            const double alone = us_a_layer(w, directions[d].alone, is_captured);
            const double shared = us_a_layer(w, directions[d].shared, is_captured);
            if (w->device == 0)
                printf("%-8s  %-11s  %7.2f us a layer over %d GPUs, %7.2f us on its own: %6.2f us more\n",
                       directions[d].name, is_captured ? "in a graph" : "call by call", shared, w->ranks, alone,
                       shared - alone);
        }
    return NULL;
}

static void on_all(struct worker *workers, void *(*run)(void *))
{
    const int ranks = workers[0].ranks;
    pthread_t threads[MOST];
    for (int r = 0; r < ranks; r++)
        if (pthread_create(&threads[r], NULL, run, &workers[r]) != 0)
            stop("pthread_create", "it refuses");
    for (int r = 0; r < ranks; r++)
        pthread_join(threads[r], NULL);
}

static float *floats(size_t count)
{
    float *const memory = calloc(count, sizeof *memory);
    if (memory == NULL)
        stop("memory", "there is none");
    return memory;
}

/* Results of all GPUs beside those of the whole batch on the CPU. */
static int compare(struct worker *workers)
{
    enum { N = 4, C = 32, H = 14, W = 14, VALUES = N * C * H * W };
    const int ranks = workers[0].ranks;
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

    for (int r = 0; r < ranks; r++) {
        struct worker *const w = &workers[r];
        memcpy(w->sizes, (int64_t[4]){N, C, H, W}, sizeof w->sizes);
        make_on_gpu(w);
        const size_t bytes = VALUES * sizeof(float), at = (size_t)r * VALUES;
        check_cuda(cudaMemcpy(w->x.tensor.data, host[0] + at, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
        check_cuda(cudaMemcpy(w->dy.tensor.data, host[1] + at, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
        check_cuda(cudaMemcpy(w->weight.tensor.data, parameters[0], sizeof rstd, cudaMemcpyHostToDevice), "cudaMemcpy");
        check_cuda(cudaMemcpy(w->bias.tensor.data, parameters[1], sizeof rstd, cudaMemcpyHostToDevice), "cudaMemcpy");
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); /* copies are on the default stream */
    }
    on_all(workers, both);

    struct worker whole = {.device = -1, .ranks = ranks, .sizes = {(int64_t)N * ranks, C, H, W}};
    make(&whole, host, parameters, mean, rstd);
    forward_alone(&whole);
    backward_alone(&whole);

    float worst[2] = {0, 0}; /* y, dx */
    for (int r = 0; r < ranks; r++) {
        check_cuda(cudaSetDevice(r), "cudaSetDevice");
        const void *const results[2] = {workers[r].y.tensor.data, workers[r].dx.tensor.data};
        for (int k = 0; k < 2; k++) {
            check_cuda(cudaMemcpy(part, results[k], VALUES * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
            for (int i = 0; i < VALUES; i++) {
                const float difference = fabsf(part[i] - host[2 + k][(size_t)r * VALUES + (size_t)i]);
                if (!(difference <= worst[k])) /* NaN, too */
                    worst[k] = difference;
            }
        }
    }
    printf("%d GPUs: y differs from the whole batch on the CPU by at most %.2g, dx by %.2g\n", ranks, (double)worst[0],
           (double)worst[1]);
    return worst[0] <= 1e-5f && worst[1] <= 1e-5f ? 0 : 1;
}

int main(int count, char **words)
{
    int ranks = 0, devices[MOST];
    check_cuda(cudaGetDeviceCount(&ranks), "cudaGetDeviceCount");
    if (ranks > MOST)
        ranks = MOST;
    struct worker workers[MOST];
    ncclComm_t communicators[MOST];
    memset(workers, 0, sizeof workers);
    for (int r = 0; r < ranks; r++)
        devices[r] = r;
    check_nccl(ncclCommInitAll(communicators, ranks, devices), "ncclCommInitAll");
    for (int r = 0; r < ranks; r++) {
        workers[r].device = r;
        workers[r].ranks = ranks;
        workers[r].communicator = communicators[r];
    }
    const int status = compare(workers);
    if (count == 5) {
        pthread_barrier_init(&all_gpus, NULL, (unsigned)ranks);
        for (int r = 0; r < ranks; r++)
            for (int i = 0; i < 4; i++)
                workers[r].sizes[i] = strtoll(words[1 + i], NULL, 10);
        on_all(workers, time_layers);
    }
    for (int r = 0; r < ranks; r++)
        check_nccl(ncclCommDestroy(communicators[r]), "ncclCommDestroy");
    return status;
}
