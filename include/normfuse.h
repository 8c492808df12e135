/* SPDX-License-Identifier: MIT
 *
 * normfuse.h - the whole public interface of normfuse: normalization layers of neural networks.
 *
 *   u = x [+ pre_bias] [+ pre_add]                             rounded to x's dtype where it is a tensor
 *   z = ((u - mean) * rstd * weight + bias) [* (1 + scale) + shift] [+ post_add]
 *   y = act(z)
 *
 * group norm     mean, rstd over the C/groups channels and all positions of one sample; instance norm is groups = C
 * batch norm     mean, rstd over all samples and positions of one channel, or given running statistics
 * channel norm   mean, rstd over the C/groups channels of one position: layer norm and RMS norm of channels
 * affine         no statistics: y = act(weight * u + bias [+ post_add])
 *
 * pre_bias is one value a channel, or one a sample and channel: the bias of a convolution before the norm, an embedding.
 * With pre_add, where u is written, in channel norm, and in the batch norm of a batch with a bias [N, C], u is a tensor:
 * it is summed in the compute type (f32; f64 for f64 x) in this order and rounded once. Else pre_bias is a part of the
 * mean: u is not rounded, and nothing more is read or written than without it.
 *
 * Tensors have the axes N, C and zero to three spatial axes, in this order. Their strides say how they lie in memory.
 * S below is the product of the spatial sizes. A norm group is the values that share a mean and a variance.
 *
 * No function aborts, prints (but for NORMFUSE_VERBOSE) or changes errno. A refused call writes nothing to any tensor.
 * normfuse_last_error() names the argument and the rule. Results depend neither on the number of threads, nor on the
 * instruction set, nor on the caller's floating-point environment. Error bounds: docs/numerics.md. Words:
 * docs/glossary.md.
 *
 * Promises to programs, with reasons and tests: docs/promises.md. In short:
 *
 * Versions        A patch version changes nothing in this header. Before 1.0 a minor version may change it, and the
 *                 soname with it. struct_bytes has one accepted value for each struct: its sizeof in this header.
 * Threads         Every function may be called from several threads at once, none from a signal handler. One call at a
 *                 time has the built-in pool; another runs its tasks in its own thread. The threads of the pool are
 *                 made when a call first needs them, 1023 at most, and never end.
 * Stack           A call on CPU tensors needs at most 64 KiB, and so does a task.
 * Signals         Threads of the pool block every signal but SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP and SIGSYS: the
 *                 process's handler gets a fault in a task, in the thread that faulted. It must return or end the
 *                 process.
 * fork            The child may call every function on CPU tensors, whatever other threads did at the fork, and makes a
 *                 pool of its own. CUDA works in a child only if the parent never started the driver;
 *                 otherwise operators return NORMFUSE_DEVICE_ERROR there.
 * Unloading       libnormfuse.so stays loaded after dlclose. A shared object that holds the static library must stay
 *                 loaded too: link it with -z nodelete, as the CMake package and pkg-config --static do.
 * Cancellation    No function is a cancellation point, but for what NORMFUSE_VERBOSE prints and what the CUDA driver
 *                 does. A thread must not be cancelled asynchronously inside a call.
 * Floating point  Calls and tasks compute in the standard environment (to nearest, subnormals kept, no traps), and
 *                 leave their thread's environment and its flags as they were.
 * Memory          A call on CPU tensors leaves no memory behind. It and its tasks need at most 64 KiB of stack each.
 * Read once       The first calls of a process read the CPU affinity, /proc/cpuinfo, /sys/devices/system/cpu, the
 *                 cgroups' CPU quotas, NORMFUSE_MAX_ISA, NORMFUSE_NUM_THREADS and NORMFUSE_VERBOSE. What could not be
 *                 read stays unknown; that costs time, never bits. No thread may call setenv meanwhile. Compilations of
 *                 CUDA kernels read NORMFUSE_NVRTC, NORMFUSE_CACHE_DIR and what stands in for them (docs/compilation.md)
 *                 each time. */
#ifndef NORMFUSE_H
#define NORMFUSE_H

#include <stddef.h>
#include <stdint.h>

#define NORMFUSE_VERSION_MAJOR 0
#define NORMFUSE_VERSION_MINOR 1
#define NORMFUSE_VERSION_PATCH 0

#if defined(__GNUC__)
#define NORMFUSE_API __attribute__((visibility("default")))
#else
#define NORMFUSE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status -------------------------------------------------------------------------------------------------- */

/* Numbers are fixed and never reused. */
typedef enum normfuse_status {
    NORMFUSE_OK = 0,
    NORMFUSE_BAD_ARGUMENT = 10, /* an option out of range, an unknown flag, a struct of an unknown size, a tensor that is
                                   missing or that this operator does not take */
    NORMFUSE_BAD_SHAPE = 11,    /* sizes are negative, overflow, or contradict each other or the options */
    NORMFUSE_BAD_POINTER = 12,  /* a data pointer is NULL or not aligned to its element */
    NORMFUSE_OVERLAP = 13,      /* an output overlaps another tensor other than in a permitted in-place pair */
    NORMFUSE_UNSUPPORTED = 20,  /* a dtype, a device or strides that the library has no kernel for */
    NORMFUSE_NO_DRIVER = 30,    /* CUDA: no driver on this machine, or the library was built without CUDA */
    NORMFUSE_OLD_DRIVER = 31,   /* CUDA: the driver is older than 12, or lacks a function */
    NORMFUSE_NO_KERNEL = 32,    /* CUDA: the library holds no kernel for this GPU */
    NORMFUSE_NO_COMPILER = 33,  /* CUDA: NVRTC, which compiles kernels at run time, is missing, too old or too new */
    NORMFUSE_SCRATCH = 40,      /* exec.scratch is smaller than ..._scratch_bytes, or missing where it is required */
    NORMFUSE_OUT_OF_MEMORY = 41,
    NORMFUSE_DEVICE_ERROR = 50  /* CUDA: the driver refused a call; outputs are undefined */
} normfuse_status;

/* One sentence, a static string. */
NORMFUSE_API const char *normfuse_status_text(normfuse_status status);

/* The objection of this thread's last refused call, "" before the first. Valid until this thread's next call. */
NORMFUSE_API const char *normfuse_last_error(void);

/* ---- tensors ------------------------------------------------------------------------------------------------- */

/* The three structs below are laid out exactly as DLPack's DLDevice, DLDataType and DLTensor. */
typedef struct normfuse_device {
    int32_t device_type; /* 1 CPU, 2 CUDA */
    int32_t device_id;
} normfuse_device;

typedef struct normfuse_dtype {
    uint8_t code; /* 2 IEEE float, 4 bfloat */
    uint8_t bits;
    uint16_t lanes; /* 1 */
} normfuse_dtype;

typedef struct normfuse_tensor {
    void *data;
    normfuse_device device;
    int32_t ndim;
    normfuse_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: row-major. Strides of axes of size 1 are ignored. */
    uint64_t byte_offset;
} normfuse_tensor;

enum { NORMFUSE_CPU = 1, NORMFUSE_CUDA = 2 };

typedef enum normfuse_type { NORMFUSE_F64 = 0, NORMFUSE_F32 = 1, NORMFUSE_F16 = 2, NORMFUSE_BF16 = 3 } normfuse_type;

enum { NORMFUSE_MAX_AXES = 5 }; /* N, C and three spatial axes */

/* Room for the shape and the strides of one tensor. */
typedef struct normfuse_axes {
    int64_t shape[NORMFUSE_MAX_AXES];
    int64_t strides[NORMFUSE_MAX_AXES];
} normfuse_axes;

/* A row-major tensor (NCHW, NCDHW, NCL, or a vector) in CPU memory; set .device afterwards for another. `sizes` are
 * copied into `axes`, which must live as long as the tensor. ndim is 1 to NORMFUSE_MAX_AXES; other values give a
 * tensor of ndim 0 that every operator refuses. */
NORMFUSE_API normfuse_tensor normfuse_tensor_contiguous(void *data, normfuse_type type, int32_t ndim,
                                                        const int64_t *sizes, normfuse_axes *axes);

/* The same with channels last in memory (NHWC, NDHWC, NLC). `sizes` are still N, C, spatial. */
NORMFUSE_API normfuse_tensor normfuse_tensor_channels_last(void *data, normfuse_type type, int32_t ndim,
                                                           const int64_t *sizes, normfuse_axes *axes);

/* The tensors of one call. Zero-initialize, set struct_bytes, and fill what the operator takes. A tensor that the
 * operator does not use must be NULL.
 *
 * Big tensors have x's shape and dtype (channel norm: see there) and each its own strides: contiguous, channels-last,
 * or a slice of either along N or C (any channel stride of at least S, any row stride of at least C, any batch stride).
 * Parameters are of any dtype and any strides: per channel [C], per (sample, channel) [N, C].
 * Statistics: [N, groups] (group norm), [C] (batch norm) or [N, groups, positions] (channel norm), any shape with that
 * many elements, row-major: whatever the layout of x, the positions of a group are adjacent.
 *
 * A tensor may have no element. Statistics of no value are mean 0, rstd 1/sqrt(eps), count 0. Sums and gradients over
 * no value are 0, or keep what they hold with NORMFUSE_ACCUMULATE. Running statistics keep theirs. Such a call needs no
 * scratch memory on the CPU.
 *
 * In place: y may be x, pre_add or post_add; u may be x or pre_add; dx may be dy, x or du; dpost_add may be dy; each
 * with equal strides. Any other overlap of an output is refused. */
typedef struct normfuse_tensors {
    uint32_t struct_bytes; /* sizeof(normfuse_tensors) */
    uint32_t flags;        /* 0 */
    /* inputs of forward and backward */
    const normfuse_tensor *x;
    const normfuse_tensor *pre_add;  /* added to x before the statistics */
    const normfuse_tensor *post_add; /* added before the activation */
    const normfuse_tensor *weight;   /* [C] or, affine only, [N, C]; NULL: 1 */
    const normfuse_tensor *bias;     /* likewise; NULL: 0 */
    const normfuse_tensor *scale;    /* group and channel norm: [N, C]; NULL: 0 */
    const normfuse_tensor *shift;    /* group and channel norm: [N, C]; NULL: 0 */
    /* outputs of forward */
    const normfuse_tensor *y; /* in a backward an input, see below */
    const normfuse_tensor *u; /* x + pre_bias + pre_add as it was normalized; needs pre_add or pre_bias */
    /* saved: written by forward (each may be NULL), read by backward (both needed where there are statistics) */
    const normfuse_tensor *mean; /* f32 or f64; f64 for f64 x. f64 keeps the digits of dx and dweight at large mean */
    const normfuse_tensor *rstd; /* f32; f64 for f64 x */
    /* running statistics [C], any dtype: updated by a training forward, read by an evaluation */
    const normfuse_tensor *running_mean;
    const normfuse_tensor *running_var;
    /* inputs of backward */
    const normfuse_tensor *dy;
    const normfuse_tensor *du; /* gradient of u, added to dx */
    /* outputs of backward: each may be NULL */
    const normfuse_tensor *dx;        /* also the gradient of pre_add */
    const normfuse_tensor *dweight;   /* weight's shape */
    const normfuse_tensor *dbias;     /* bias's shape */
    const normfuse_tensor *dscale;    /* [N, C] */
    const normfuse_tensor *dshift;    /* [N, C] */
    const normfuse_tensor *dpost_add; /* a big tensor */
    /* sharded statistics, f64, row-major */
    const normfuse_tensor *stats; /* [N, groups, 3] or [C, 3]: count, mean, M2 = sum of (u - mean)^2 */
    const normfuse_tensor *sums;  /* [N, C, 2] or [C, 2]: sum of dy', sum of dy' * (u - mean); dy' = dy * act'(z) */
    /* added to x before the statistics, and its gradient */
    const normfuse_tensor *pre_bias;  /* input: [C] or [N, C]; NULL: 0 */
    const normfuse_tensor *dpre_bias; /* output of backward: [C] or [N, C], the sum of dx as it was written; needs dx */
    /* NORMFUSE_PRELU's, and its gradient */
    const normfuse_tensor *slope;  /* input: [C], or [1] for all channels */
    const normfuse_tensor *dslope; /* output of backward: slope's shape, the sum of dy * z where z <= 0 */
} normfuse_tensors;

/* ---- options ------------------------------------------------------------------------------------------------- */

typedef enum normfuse_activation {
    NORMFUSE_IDENTITY = 0,
    NORMFUSE_RELU = 1,
    NORMFUSE_LEAKY_RELU = 2, /* act_param: slope, default 0.01 */
    NORMFUSE_SILU = 3,
    NORMFUSE_GELU = 4,
    NORMFUSE_GELU_TANH = 5,
    NORMFUSE_HARDSWISH = 6,
    NORMFUSE_ELU = 7, /* act_param: alpha, default 1 */
    NORMFUSE_MISH = 8,
    NORMFUSE_RELU6 = 9,  /* min(max(z, 0), 6) */
    NORMFUSE_PRELU = 10  /* leaky_relu with tensors.slope as the slope */
} normfuse_activation;

/* Flags of the options. Bits that an operator does not know are refused. */
enum {
    NORMFUSE_HAS_ACT_PARAM = 1, /* act_param is set; without it the activation's default is used */
    NORMFUSE_EVALUATE = 2,      /* batch and instance norm: normalize with running_mean and running_var */
    NORMFUSE_CUMULATIVE = 4,    /* running statistics are the cumulative average over batches_seen + 1 batches */
    NORMFUSE_ACCUMULATE = 8     /* ..._stats, ..._backward_sums: continue from what stats or sums hold;
                                   ..._backward, ..._backward_apply: add to what dweight, dbias and dpre_bias hold,
                                   where they are [C]; ..._backward, ..._backward_sums: add to what dslope holds */
};

typedef struct normfuse_group_norm_options {
    uint32_t struct_bytes; /* sizeof(normfuse_group_norm_options) */
    uint32_t flags;        /* NORMFUSE_HAS_ACT_PARAM, NORMFUSE_ACCUMULATE; groups = C: NORMFUSE_EVALUATE,
                              NORMFUSE_CUMULATIVE */
    int64_t groups;        /* divides C; C for instance norm */
    double eps;            /* any value: rstd = 1/sqrt(var + eps), the IEEE result */
    int32_t activation;    /* normfuse_activation; NORMFUSE_PRELU takes tensors.slope wherever y or dy is */
    int32_t reserved;      /* 0 */
    double act_param;
    double momentum;      /* instance norm with running statistics: running = (1 - momentum)*running + momentum*new,
                             new = the mean over the batch of mean and of unbiased variance */
    int64_t batches_seen; /* with NORMFUSE_CUMULATIVE: momentum is 1/(batches_seen + 1) */
    int64_t set_values;   /* ..._backward_apply: the values a group has over all shards; 0: those of x */
} normfuse_group_norm_options;

typedef struct normfuse_batch_norm_options {
    uint32_t struct_bytes; /* sizeof(normfuse_batch_norm_options) */
    uint32_t flags;        /* NORMFUSE_HAS_ACT_PARAM, NORMFUSE_EVALUATE, NORMFUSE_CUMULATIVE, NORMFUSE_ACCUMULATE */
    double eps;            /* above 0 when training; any value in evaluation */
    int32_t activation;
    int32_t reserved; /* 0 */
    double act_param;
    double momentum;      /* running = (1 - momentum)*running + momentum*new; the variance taken is the unbiased one */
    int64_t batches_seen; /* with NORMFUSE_CUMULATIVE: momentum is 1/(batches_seen + 1) */
    int64_t set_values;   /* ..._backward_apply: the values a channel has over all shards; 0: those of x */
} normfuse_batch_norm_options;

/* The statistics of channel norm. Numbers are fixed and never reused. */
typedef enum normfuse_statistics {
    NORMFUSE_MEAN_AND_VARIANCE = 0, /* layer norm: (u - mean) * rstd, rstd of the mean square of u - mean */
    NORMFUSE_MEAN_SQUARE = 1        /* RMS norm: u * rstd, rstd of the mean square of u; tensors.mean must be NULL */
} normfuse_statistics;

/* The place of eps, with D = C/groups and v = u - mean, or u. */
typedef enum normfuse_eps_kind {
    NORMFUSE_EPS_ADDED = 0,  /* rstd = 1/sqrt(sum of v^2 / D + eps) */
    NORMFUSE_EPS_OF_NORM = 1 /* rstd = sqrt(D)/max(sqrt(sum of v^2), eps), the norm of v is clamped */
} normfuse_eps_kind;

typedef struct normfuse_channel_norm_options {
    uint32_t struct_bytes; /* sizeof(normfuse_channel_norm_options) */
    uint32_t flags;        /* NORMFUSE_HAS_ACT_PARAM, NORMFUSE_ACCUMULATE */
    int64_t groups;        /* of channels, divides C; 1: all channels of a position are one norm group */
    double eps;            /* any value; with NORMFUSE_EPS_OF_NORM 0 or above */
    int32_t statistics;    /* normfuse_statistics */
    int32_t eps_kind;      /* normfuse_eps_kind */
    int32_t activation;    /* normfuse_activation; NORMFUSE_PRELU takes tensors.slope wherever y or dy is */
    int32_t reserved;      /* 0 */
    double act_param;
} normfuse_channel_norm_options;

typedef struct normfuse_affine_options {
    uint32_t struct_bytes; /* sizeof(normfuse_affine_options) */
    uint32_t flags;        /* NORMFUSE_HAS_ACT_PARAM, NORMFUSE_ACCUMULATE */
    int32_t activation;
    int32_t reserved; /* 0 */
    double act_param;
} normfuse_affine_options;

/* Flags of normfuse_exec. With NORMFUSE_PREPARE a call checks its arguments and launches nothing; on a CUDA device it
 * notes the kernels that it would launch, for normfuse_prepare to compile. No tensor is read or written: addresses may
 * be of nothing, if they are aligned as the real ones. scratch may be NULL; sync is NULL or not as in the real call. */
enum { NORMFUSE_PREPARE = 1 };

/* The stream, memory and threads of a call. NULL, or zero fields, are the defaults. */
typedef struct normfuse_exec {
    uint32_t struct_bytes; /* sizeof(normfuse_exec) */
    uint32_t flags;        /* 0 or NORMFUSE_PREPARE */
    void *stream;          /* CUDA: the CUstream; NULL: the default stream */
    void *scratch;         /* 64-byte aligned, droppable after the call (CUDA: once its kernels have run).
                              CPU: NULL lets the library allocate it. CUDA: required where ..._scratch_bytes is not 0 */
    size_t scratch_bytes;
    void *sync; /* CUDA: synchronization memory, normfuse_sync_bytes(device) bytes, 64-byte aligned. Zeroed once by the
                   caller, left ready by every call, not shared by calls that may overlap. NULL is allowed */
    size_t sync_bytes;
    /* CPU: runs task(context, i) once for every i in [0, tasks), in any order, on any threads, and returns when all are
     * done. Tasks never throw. It must return: no exception, longjmp or thread exit may leave it, since tasks may
     * still use the call's memory. NULL: the built-in pool. */
    void (*parallel_for)(void *pool, int64_t tasks, void (*task)(void *context, int64_t i), void *context);
    void *pool;      /* first argument of parallel_for */
    int32_t threads; /* maximum number of threads, or of tasks for parallel_for. 0: the default. Above 1024: 1024 */
    int32_t reserved;
} normfuse_exec;

/* ---- operators ----------------------------------------------------------------------------------------------- */

/* Group normalization (Wu and He 2018, arXiv:1803.08494), forward.
 * Takes x, y; optional: pre_add, pre_bias, post_add, weight, bias, scale, shift, u, mean, rstd (each its own output; y
 * alone may be NULL too, then only the statistics are written); with groups = C also running_mean, running_var. */
NORMFUSE_API normfuse_status normfuse_group_norm_forward(const normfuse_group_norm_options *options,
                                                         const normfuse_tensors *tensors, const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_group_norm_forward_scratch_bytes(const normfuse_group_norm_options *options,
                                                                       const normfuse_tensors *tensors,
                                                                       const normfuse_exec *exec, size_t *bytes);

/* Backward: takes x (or u in its place, without pre_add and pre_bias), dy, mean, rstd, and pre_add, pre_bias, post_add,
 * weight, bias, scale, shift as forward was given them; z is recomputed. A forward that wrote u rounded it: with pre_bias
 * alone a backward of x and pre_bias does not, and has another z, within rounding; a backward of u has the forward's.
 * Writes those of dx, dweight, dbias, dscale,
 * dshift, dpost_add, dpre_bias, dslope that are not NULL. With NORMFUSE_EVALUATE running_mean and running_var take the place of
 * mean and rstd.
 *
 * With relu, relu6 and leaky_relu of a slope above 0 every backward also takes the forward's y in the place of post_add.
 * act'(z) is then made from y, and what was added may have been overwritten. A z that was rounded to a kink of y, 0 or
 * relu6's 6, has the kink's derivative. Both given, or y with another activation, is refused. */
NORMFUSE_API normfuse_status normfuse_group_norm_backward(const normfuse_group_norm_options *options,
                                                          const normfuse_tensors *tensors, const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_group_norm_backward_scratch_bytes(const normfuse_group_norm_options *options,
                                                                        const normfuse_tensors *tensors,
                                                                        const normfuse_exec *exec, size_t *bytes);

/* Batch normalization (Ioffe and Szegedy 2015, arXiv:1502.03167). Training refuses one value a channel and eps that
 * is not above 0. Tensors as group norm's, without scale and shift; NORMFUSE_EVALUATE needs both running statistics
 * (forward and backward) and takes no mean and rstd. Running statistics: both or neither when training. */
NORMFUSE_API normfuse_status normfuse_batch_norm_forward(const normfuse_batch_norm_options *options,
                                                         const normfuse_tensors *tensors, const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_batch_norm_forward_scratch_bytes(const normfuse_batch_norm_options *options,
                                                                       const normfuse_tensors *tensors,
                                                                       const normfuse_exec *exec, size_t *bytes);
NORMFUSE_API normfuse_status normfuse_batch_norm_backward(const normfuse_batch_norm_options *options,
                                                          const normfuse_tensors *tensors, const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_batch_norm_backward_scratch_bytes(const normfuse_batch_norm_options *options,
                                                                        const normfuse_tensors *tensors,
                                                                        const normfuse_exec *exec, size_t *bytes);

/* Channel norm: each position is normalized over its channels, or those of one group. On a CUDA device norm groups of
 * more channels than docs/operators/channel-norm.md names may return NORMFUSE_UNSUPPORTED. Takes the tensors of group
 * norm without running statistics; weight and bias are [C]. y, dy, post_add and dpost_add have one dtype: x's, or f32
 * where x has 16 bits, or 16 bits where x is f32; u, du, dx and pre_add have x's.
 * With NORMFUSE_MEAN_SQUARE mean is 0: tensors.mean must be NULL, and a backward needs rstd alone.
 *
 * Backward, with g = dz * weight * (1 + scale), h = (u - mean) * rstd and means over the D channels of a norm group:
 *   dx = rstd * (g - mean(g) - h * mean(g*h)) [+ du]            NORMFUSE_MEAN_SQUARE: without mean(g)
 * If NORMFUSE_EPS_OF_NORM clamped the norm, rstd is a constant, and h * mean(g*h) is left out. That is where the given
 * rstd is at least sqrt(D)/eps, rounded to rstd's dtype, and eps is above 0. A norm that equals eps within that rounding
 * counts as clamped. */
NORMFUSE_API normfuse_status normfuse_channel_norm_forward(const normfuse_channel_norm_options *options,
                                                           const normfuse_tensors *tensors, const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_channel_norm_forward_scratch_bytes(const normfuse_channel_norm_options *options,
                                                                         const normfuse_tensors *tensors,
                                                                         const normfuse_exec *exec, size_t *bytes);
NORMFUSE_API normfuse_status normfuse_channel_norm_backward(const normfuse_channel_norm_options *options,
                                                            const normfuse_tensors *tensors, const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_channel_norm_backward_scratch_bytes(const normfuse_channel_norm_options *options,
                                                                          const normfuse_tensors *tensors,
                                                                          const normfuse_exec *exec, size_t *bytes);

/* Channel affine: y = act(weight*u + bias [+ post_add]), u = x [+ pre_bias] [+ pre_add]; weight and bias [C] or [N, C],
 * both alike. Backward writes dx, dweight = sum of dy' * u, dbias = sum of dy', dpost_add, dpre_bias, dslope. */
NORMFUSE_API normfuse_status normfuse_affine_forward(const normfuse_affine_options *options,
                                                     const normfuse_tensors *tensors, const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_affine_forward_scratch_bytes(const normfuse_affine_options *options,
                                                                   const normfuse_tensors *tensors,
                                                                   const normfuse_exec *exec, size_t *bytes);
NORMFUSE_API normfuse_status normfuse_affine_backward(const normfuse_affine_options *options,
                                                      const normfuse_tensors *tensors, const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_affine_backward_scratch_bytes(const normfuse_affine_options *options,
                                                                    const normfuse_tensors *tensors,
                                                                    const normfuse_exec *exec, size_t *bytes);

/* ---- sharded statistics -------------------------------------------------------------------------------------- */

/* For norm groups that are spread over workers: batch norm over many processes, group norm of an image cut in strips.
 *
 *   ..._stats           x [pre_add] [pre_bias] -> stats of this shard (and u)
 *   normfuse_stats_merge              joins the stats of all shards, in the order given
 *   ..._apply           x, stats and all of forward's inputs -> y, mean, rstd, running statistics. Where u was written
 *                       it takes x's place, and what was added is left out. On the CPU a count of 1 is refused for batch
 *                       norm and where running statistics are updated
 *   ..._backward_sums   backward's inputs -> sums of this shard (and dpost_add; dslope, this shard's only)
 *   normfuse_sums_merge               adds the sums of all shards, in the order given
 *   ..._backward_apply  backward's inputs, sums -> dx, dweight, dbias, dscale, dshift, dpre_bias; set options.set_values
 *                       to the count of the merged stats. Group norm: dweight and dbias are this worker's samples' only.
 *                       dpre_bias is this shard's only.
 *
 * NORMFUSE_ACCUMULATE joins this call's shard to what the tensor holds. Batch norm over a batch that arrives in parts
 * then has the same bits as in one call, if each part but the last is a multiple of normfuse_sample_quantum samples.
 * scratch: the size that ..._forward_scratch_bytes and ..._backward_scratch_bytes return for the same tensors. */
NORMFUSE_API normfuse_status normfuse_group_norm_stats(const normfuse_group_norm_options *options,
                                                       const normfuse_tensors *tensors, const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_group_norm_apply(const normfuse_group_norm_options *options,
                                                       const normfuse_tensors *tensors, const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_group_norm_backward_sums(const normfuse_group_norm_options *options,
                                                               const normfuse_tensors *tensors,
                                                               const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_group_norm_backward_apply(const normfuse_group_norm_options *options,
                                                                const normfuse_tensors *tensors,
                                                                const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_batch_norm_stats(const normfuse_batch_norm_options *options,
                                                       const normfuse_tensors *tensors, const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_batch_norm_apply(const normfuse_batch_norm_options *options,
                                                       const normfuse_tensors *tensors, const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_batch_norm_backward_sums(const normfuse_batch_norm_options *options,
                                                               const normfuse_tensors *tensors,
                                                               const normfuse_exec *exec);
NORMFUSE_API normfuse_status normfuse_batch_norm_backward_apply(const normfuse_batch_norm_options *options,
                                                                const normfuse_tensors *tensors,
                                                                const normfuse_exec *exec);

/* in: [shards, ..., 3] f64 row-major, shards in rank order; out: [..., 3]. A count of 0 is legal. out may be the first
 * shard of in. */
NORMFUSE_API normfuse_status normfuse_stats_merge(const normfuse_tensor *in, const normfuse_tensor *out,
                                                  const normfuse_exec *exec);
/* in: [shards, ..., 2] f64 row-major; out: [..., 2]. */
NORMFUSE_API normfuse_status normfuse_sums_merge(const normfuse_tensor *in, const normfuse_tensor *out,
                                                 const normfuse_exec *exec);

/* The sample quantum of tensors like x, whose N does not matter. An accumulated batch has the bits of one call if each
 * part but the last is a multiple of it. This holds for the statistics and sums of batch norm, and for dweight and
 * dbias (in f64) of every backward. On a CUDA device it is 1. There NORMFUSE_ACCUMULATE gives the same bits every time
 * the same parts come in the same order, and does not promise those of one call. */
NORMFUSE_API normfuse_status normfuse_sample_quantum(const normfuse_tensor *x, int64_t *samples);

/* Folds an evaluating batch norm into the convolution (or linear layer) before it:
 *   new_weight[o, ...] = conv_weight[o, ...] * weight[o] * rstd[o]
 *   new_bias[o]        = (conv_bias[o] - running_mean[o]) * weight[o] * rstd[o] + bias[o],  rstd = 1/sqrt(running_var + eps)
 * tensors: running_mean, running_var, weight, bias (NULL: 1, 0); flags: the axis of the output channels is 0, or 1 with
 * NORMFUSE_FOLD_TRANSPOSED (a transposed convolution's weight). conv_bias may be NULL (0); new_weight may be
 * conv_weight, new_bias may be conv_bias. Row-major tensors of any ndim from 1 to 8. CPU. */
enum { NORMFUSE_FOLD_TRANSPOSED = 1 };
NORMFUSE_API normfuse_status normfuse_batch_norm_fold(const normfuse_tensors *tensors, double eps, uint32_t flags,
                                                      const normfuse_tensor *conv_weight,
                                                      const normfuse_tensor *conv_bias,
                                                      const normfuse_tensor *new_weight,
                                                      const normfuse_tensor *new_bias);

/* ---- CUDA devices -------------------------------------------------------------------------------------------- */

/* A call with tensors on a CUDA device enqueues kernels on exec.stream and returns. The library allocates no device
 * memory, waits for nothing, and can be captured into a graph. The thread's current context is used where it belongs to
 * the tensors' device; otherwise the device's primary context, current for the length of the call only.
 *
 * The driver, libcuda.so.1, is opened by the first call that needs it and never closed. It must be of the CUDA major
 * version that the library was built with, or newer. Where no device was found, the next call looks again.
 *
 * NORMFUSE_OK means that the kernels are enqueued. A fault on the device shows in a later call, or when the caller
 * waits. From then on operators return NORMFUSE_DEVICE_ERROR, for as long as the context lives. Tensors, scratch and
 * synchronization memory must live until the kernels have run, for a captured call as long as its graph. The stream
 * must live until the call returns.
 *
 * After a device reset calls work once the caller has the device's context again, and has made memory, synchronization
 * memory and graphs anew. normfuse_prepare loads the kernels again. */

/* Kernels are compiled for the GPU and for the kind of call by NVRTC, a part of CUDA that is loaded at run time, when a
 * call first needs them: some 0.2 s each. They are kept for the process and in a folder for later ones:
 * NORMFUSE_CACHE_DIR, $XDG_CACHE_HOME/normfuse or ~/.cache/normfuse. A call whose kernels are there needs no NVRTC;
 * otherwise it returns NORMFUSE_NO_COMPILER where none is found. docs/compilation.md.
 *
 * normfuse_prepare loads every kernel for CUDA device `device`, into the context that a call of this thread would use.
 * First it compiles what calls with NORMFUSE_PREPARE noted, on as many threads as the built-in pool has. Without it the
 * first call that needs a kernel does the same. Where a stream is captured meanwhile, loading is no part of the graph
 * (the thread's capture mode is relaxed for its length). Once loaded, it asks the driver again. NORMFUSE_NO_DRIVER, also
 * where the library was built without CUDA; NORMFUSE_OLD_DRIVER; NORMFUSE_NO_KERNEL: none for this GPU;
 * NORMFUSE_NO_COMPILER; NORMFUSE_BAD_ARGUMENT: no such device; NORMFUSE_OUT_OF_MEMORY; NORMFUSE_DEVICE_ERROR. */
NORMFUSE_API normfuse_status normfuse_prepare(int32_t device);

/* The same, and calls progress(context, done, all) in this thread after each kernel, or some, of those to compile. It
 * must not call operators on CUDA tensors, which may wait for those kernels. */
NORMFUSE_API normfuse_status normfuse_prepare_with(int32_t device,
                                                   void (*progress)(void *context, int32_t done, int32_t all),
                                                   void *context);

/* Adds a place where NVRTC may be, such as ".../nvidia/cu13/lib/libnvrtc.so.13" of a Python package; 8 at most, tried
 * in this order. Ahead of them come NORMFUSE_NVRTC=PATH (that one or none) and an NVRTC that the process has loaded;
 * behind them CUDA_HOME, CUDA_PATH, /usr/local/cuda, and where the loader finds libnvrtc.so.13 or .12. It must be of
 * 12.8 or newer, and not of a newer major version than the driver. Loads nothing; a path of nothing is no error.
 * NORMFUSE_BAD_ARGUMENT: NULL, or the ninth; NORMFUSE_OUT_OF_MEMORY; NORMFUSE_UNSUPPORTED: the library was built
 * without CUDA. */
NORMFUSE_API normfuse_status normfuse_use_compiler(const char *path);

/* The size of exec.sync for calls on CUDA device `device`: 65536 on every device. The caller allocates it on that
 * device, aligned to 64 bytes, and zeroes it once, before the first call that is given it. Every call leaves it ready
 * for the next one. Calls that may overlap must not share it: one for each stream, and one for each graph that may run
 * beside another. If it is shared, not zeroed, or written to by others, values are wrong or a kernel never ends:
 * nothing detects it. Without it other kernels take the place of those in which all blocks wait for one another. That
 * is legal, and at times slower. Calls no driver. A library without CUDA returns NORMFUSE_NO_DRIVER. */
NORMFUSE_API normfuse_status normfuse_sync_bytes(int32_t device, size_t *bytes);

/* ---- what the library is ------------------------------------------------------------------------------------- */

NORMFUSE_API const char *normfuse_version(void); /* "0.1.0" */

typedef struct normfuse_information {
    uint32_t struct_bytes; /* set by the caller: sizeof(normfuse_information) */
    int32_t threads;       /* of the built-in pool: affinity, cgroup quota, NORMFUSE_NUM_THREADS */
    const char *version;
    const char *isas_built;    /* best first, separated by spaces: "avx512 avx2 scalar" */
    const char *isas_usable;   /* those that this CPU has */
    const char *isa;           /* the one that runs: usable, capped by NORMFUSE_MAX_ISA */
    int64_t l1_bytes;          /* data cache of one core; 0 where unknown */
    int64_t l2_bytes;          /* of one core */
    int64_t llc_bytes;         /* last-level cache as this machine reports it */
    const char *cpu;           /* model name */
    const char *compiler;      /* and flags */
    const char *cuda;          /* "not built", or the driver and its devices, in words:
                                  "driver 580.95.05 (CUDA 13.0), 1 device: NVIDIA H200 (9.0)" */
} normfuse_information;

/* Fills *info; strings are static. Starts the CUDA driver where there is one, without making a context: a process that
 * forks workers which use CUDA asks in the workers. */
NORMFUSE_API normfuse_status normfuse_info(normfuse_information *info);

/* The compiler of CUDA kernels, and what it has left on disk. */
typedef struct normfuse_compiler_information {
    uint32_t struct_bytes; /* set by the caller: sizeof(normfuse_compiler_information) */
    int32_t version;       /* of NVRTC, 1000 * major + 10 * minor: 13000; 0: none is found */
    const char *compiler;  /* "NVRTC 13.0, /path/libnvrtc.so.13", or "none: " and why */
    const char *cache;         /* the folder; "": none */
    const char *cache_problem; /* why kernels are not kept there; "": they are */
    int64_t cache_kernels, cache_bytes;
} normfuse_compiler_information;

/* Fills *info; its strings are valid until this thread's next call of this function. Looks for NVRTC as a call without
 * kernels would, and reads the folder. NORMFUSE_UNSUPPORTED: the library was built without CUDA. */
NORMFUSE_API normfuse_status normfuse_compiler_info(normfuse_compiler_information *info);

#ifdef __cplusplus
}
#endif
#endif
