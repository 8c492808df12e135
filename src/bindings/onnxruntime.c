/* SPDX-License-Identifier: MIT
 *
 * onnxruntime.c - libnormfuse_onnxruntime.so: the operators as custom operators of ONNX Runtime, domain "normfuse", in
 * plain C. docs/onnx.md has their inputs and attributes.
 *
 * ONNX Runtime calls RegisterCustomOps. The structs below are the part of its C interface that is used here, declared
 * by ourselves. The interface is a table of function pointers that only grows; OrtCustomOp begins with the version that
 * it is written for. Both are those of version 18.
 *
 * All inputs are required. ONNX Runtime's shape inference of custom operators reads through a null pointer where an
 * optional input is left out. */
#include "onnxruntime.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "package.h"

/* ---- ONNX Runtime's interface ---------------------------------------------------------------------------------- */

enum { API_VERSION = 18 };
enum { CODE_FAIL = 1, CODE_INVALID_ARGUMENT = 2, CODE_NOT_IMPLEMENTED = 9 };
enum { TYPE_UNDEFINED = 0, TYPE_F32 = 1, TYPE_F16 = 10, TYPE_F64 = 11, TYPE_BF16 = 16 };
enum { REQUIRED = 0, OPTIONAL = 1 };

struct ort_status;  /* NULL is success; else the receiver releases it */
struct ort_options;
struct ort_domain;
struct ort_info;    /* of a node, while its kernel is made */
struct ort_context; /* of a call of a kernel */
struct ort_value;
struct ort_shape;   /* OrtTensorTypeAndShapeInfo */
struct ort_memory;
struct ort_inference;
struct ort_op;

struct ort_api {
    struct ort_status *(*create_status)(int code, const char *message);
    int (*get_error_code)(const struct ort_status *);
    const char *(*get_error_message)(const struct ort_status *);
    void *unused_3[23];
    struct ort_status *(*create_domain)(const char *name, struct ort_domain **);
    struct ort_status *(*domain_add)(struct ort_domain *, const struct ort_op *);
    struct ort_status *(*add_domain)(struct ort_options *, struct ort_domain *);
    void *unused_29[22];
    struct ort_status *(*get_data)(struct ort_value *, void **data);
    void *unused_52[8];
    struct ort_status *(*get_type)(const struct ort_shape *, int *type);
    struct ort_status *(*get_rank)(const struct ort_shape *, size_t *rank);
    struct ort_status *(*get_sizes)(const struct ort_shape *, int64_t *sizes, size_t rank);
    struct ort_status *(*get_symbols)(const struct ort_shape *, const char **names, size_t rank);
    void *unused_64[1];
    struct ort_status *(*get_shape)(const struct ort_value *, struct ort_shape **);
    void *unused_66[6];
    struct ort_status *(*get_device)(const struct ort_memory *, int *id);
    void *unused_73[12];
    struct ort_status *(*attribute_float)(const struct ort_info *, const char *name, float *);
    struct ort_status *(*attribute_int)(const struct ort_info *, const char *name, int64_t *);
    struct ort_status *(*attribute_string)(const struct ort_info *, const char *name, char *, size_t *size);
    void *unused_88[1];
    struct ort_status *(*output_count)(const struct ort_context *, size_t *);
    struct ort_status *(*get_input)(const struct ort_context *, size_t index, const struct ort_value **);
    struct ort_status *(*get_output)(struct ort_context *, size_t index, const int64_t *sizes, size_t rank,
                                     struct ort_value **);
    void *unused_92[1];
    void (*release_status)(struct ort_status *);
    void *unused_94[5];
    void (*release_shape)(struct ort_shape *);
    void *unused_100[1];
    void (*release_domain)(struct ort_domain *);
    void *unused_102[60];
    struct ort_status *(*attribute_floats)(const struct ort_info *, const char *name, float *, size_t *size);
    void *unused_163[30];
    struct ort_status *(*get_stream)(const struct ort_context *, void **stream);
    struct ort_status *(*get_memory)(const struct ort_value *, const struct ort_memory **);
    void *unused_195[73];
    struct ort_status *(*inferred_input)(const struct ort_inference *, size_t index, struct ort_shape **);
    void *unused_269[1];
    struct ort_status *(*infer_output)(const struct ort_inference *, size_t index, const struct ort_shape *);
    void *unused_271[3];
    struct ort_status *(*parallel_for)(const struct ort_context *, void (*task)(void *, size_t), size_t tasks,
                                       size_t batches, void *);
};

/* python/tests/test_onnx.py reads these lines and calls some of them by their numbers. */
#define SLOT(number, field, name)                                                                                      \
    _Static_assert(offsetof(struct ort_api, field) == (number) * sizeof(void *), name " is in its place")
SLOT(0, create_status, "CreateStatus");
SLOT(1, get_error_code, "GetErrorCode");
SLOT(2, get_error_message, "GetErrorMessage");
SLOT(26, create_domain, "CreateCustomOpDomain");
SLOT(27, domain_add, "CustomOpDomain_Add");
SLOT(28, add_domain, "AddCustomOpDomain");
SLOT(51, get_data, "GetTensorMutableData");
SLOT(60, get_type, "GetTensorElementType");
SLOT(61, get_rank, "GetDimensionsCount");
SLOT(62, get_sizes, "GetDimensions");
SLOT(63, get_symbols, "GetSymbolicDimensions");
SLOT(65, get_shape, "GetTensorTypeAndShape");
SLOT(72, get_device, "MemoryInfoGetId");
SLOT(85, attribute_float, "KernelInfoGetAttribute_float");
SLOT(86, attribute_int, "KernelInfoGetAttribute_int64");
SLOT(87, attribute_string, "KernelInfoGetAttribute_string");
SLOT(89, output_count, "KernelContext_GetOutputCount");
SLOT(90, get_input, "KernelContext_GetInput");
SLOT(91, get_output, "KernelContext_GetOutput");
SLOT(93, release_status, "ReleaseStatus");
SLOT(99, release_shape, "ReleaseTensorTypeAndShapeInfo");
SLOT(101, release_domain, "ReleaseCustomOpDomain");
SLOT(162, attribute_floats, "KernelInfoGetAttributeArray_float");
SLOT(193, get_stream, "KernelContext_GetGPUComputeStream");
SLOT(194, get_memory, "GetTensorMemoryInfo");
SLOT(268, inferred_input, "ShapeInferContext_GetInputTypeShape");
SLOT(270, infer_output, "ShapeInferContext_SetOutputTypeShape");
SLOT(274, parallel_for, "KernelContext_ParallelFor");

struct ort_api_base {
    const struct ort_api *(*get_api)(uint32_t version);
    const char *(*get_version)(void);
};

/* OrtCustomOp of version 18. Functions that are NULL here: those of variadic inputs, which no operator has; versions of
 * an operator; the older create_kernel and kernel_compute, which cannot report an error; alias maps. */
struct ort_op {
    uint32_t version;
    void *create_kernel;
    const char *(*get_name)(const struct ort_op *);
    const char *(*get_provider)(const struct ort_op *);
    int (*get_input_type)(const struct ort_op *, size_t index);
    size_t (*get_input_count)(const struct ort_op *);
    int (*get_output_type)(const struct ort_op *, size_t index);
    size_t (*get_output_count)(const struct ort_op *);
    void *kernel_compute;
    void (*kernel_destroy)(void *kernel);
    int (*get_input_characteristic)(const struct ort_op *, size_t index);
    int (*get_output_characteristic)(const struct ort_op *, size_t index);
    int (*get_input_memory)(const struct ort_op *, size_t index);
    int (*get_variadic_input_arity)(const struct ort_op *);
    int (*get_variadic_input_homogeneity)(const struct ort_op *);
    int (*get_variadic_output_arity)(const struct ort_op *);
    int (*get_variadic_output_homogeneity)(const struct ort_op *);
    struct ort_status *(*create_kernel_2)(const struct ort_op *, const struct ort_api *, const struct ort_info *,
                                          void **kernel);
    struct ort_status *(*kernel_compute_2)(void *kernel, struct ort_context *);
    struct ort_status *(*infer)(const struct ort_op *, struct ort_inference *);
    int (*get_start_version)(const struct ort_op *);
    int (*get_end_version)(const struct ort_op *);
    size_t (*get_may_inplace)(int **inputs, int **outputs);
    void (*release_may_inplace)(int *inputs, int *outputs);
    size_t (*get_alias_map)(int **inputs, int **outputs);
    void (*release_alias_map)(int *inputs, int *outputs);
};
_Static_assert(sizeof(struct ort_op) == 26 * sizeof(void *), "as many fields as version 18 has");

/* ---- operators ------------------------------------------------------------------------------------------------- */

enum kind {
    GROUP_NORM,
    SKIP_GROUP_NORM,
    INSTANCE_NORM,
    BATCH_NORM,
    CHANNEL_NORM,
    CHANNEL_AFFINE,
    ONNX_GROUP_NORM,
    ONNX_INSTANCE_NORM,
    ONNX_BATCH_NORM,
    KINDS
};

/* Attributes that an operator has. */
enum {
    GROUPS = 1,
    NUM_GROUPS = 2,
    EPSILON = 4,
    ACTIVATION = 8,
    CHANNELS_LAST = 16,
    TRAINING_MODE = 32,
    STATISTICS = 64, /* statistics, eps_kind, and groups where they are not 1 */
};

enum { X, WEIGHT, BIAS, SKIP, MEAN = 3, VAR = 4, MAX_INPUTS = 5 };
enum { Y, SUM, NEW_MEAN = 1, NEW_VAR = 2 }; /* outputs */

static const struct {
    const char *name;
    size_t inputs, outputs;
    int attributes;
} kinds[KINDS] = {
    [GROUP_NORM] = {"GroupNorm", 3, 1, GROUPS | EPSILON | ACTIVATION | CHANNELS_LAST},
    [SKIP_GROUP_NORM] = {"SkipGroupNorm", 4, 2, GROUPS | EPSILON | ACTIVATION | CHANNELS_LAST},
    [INSTANCE_NORM] = {"InstanceNorm", 3, 1, EPSILON | ACTIVATION | CHANNELS_LAST},
    [BATCH_NORM] = {"BatchNorm", 5, 1, EPSILON | ACTIVATION | CHANNELS_LAST},
    [CHANNEL_NORM] = {"ChannelNorm", 3, 1, STATISTICS | EPSILON | ACTIVATION | CHANNELS_LAST},
    [CHANNEL_AFFINE] = {"ChannelAffine", 3, 1, ACTIVATION | CHANNELS_LAST},
    [ONNX_GROUP_NORM] = {"GroupNormalization", 3, 1, NUM_GROUPS | EPSILON},
    [ONNX_INSTANCE_NORM] = {"InstanceNormalization", 3, 1, EPSILON},
    [ONNX_BATCH_NORM] = {"BatchNormalization", 5, 3, EPSILON | TRAINING_MODE},
};

static const int types[] = {TYPE_F32, TYPE_F16, TYPE_BF16, TYPE_F64};
enum { TYPES = sizeof types / sizeof types[0], DEVICES = 2, OPERATORS = KINDS * TYPES * DEVICES };

/* One for each kind, type of x and device: ONNX Runtime chooses by the types that each says. */
struct operator {
    struct ort_op op; /* first: ONNX Runtime passes its address back */
    const struct ort_api *api;
    enum kind kind;
    int type;
    int32_t device_type;
};

struct kernel {
    const struct ort_api *api;
    enum kind kind;
    int32_t device_type;
    bool channels_last;
    int64_t groups;
    bool trains;
    double eps, act_param, momentum;
    int32_t activation, statistics, eps_kind;
    uint32_t flags;
};

static const struct operator *operator_of(const struct ort_op *op)
{
    return (const struct operator *)op;
}

static const char *get_name(const struct ort_op *op)
{
    return kinds[operator_of(op)->kind].name;
}

static const char *get_provider(const struct ort_op *op)
{
    return operator_of(op)->device_type == NORMFUSE_CUDA ? "CUDAExecutionProvider" : NULL;
}

/* Parameters may be of any type; the library refuses those that it does not take. */
static int get_input_type(const struct ort_op *op, size_t index)
{
    return index == X ? operator_of(op)->type : TYPE_UNDEFINED;
}

static size_t get_input_count(const struct ort_op *op)
{
    return kinds[operator_of(op)->kind].inputs;
}

/* New running statistics have the type of the last input, which is what ONNX Runtime gives to an open type. */
static int get_output_type(const struct ort_op *op, size_t index)
{
    return index == Y || operator_of(op)->kind == SKIP_GROUP_NORM ? operator_of(op)->type : TYPE_UNDEFINED;
}

static size_t get_output_count(const struct ort_op *op)
{
    return kinds[operator_of(op)->kind].outputs;
}

static int get_input_characteristic(const struct ort_op *op, size_t index)
{
    (void)op;
    (void)index;
    return REQUIRED;
}

static int get_output_characteristic(const struct ort_op *op, size_t index)
{
    (void)op;
    return index == Y ? REQUIRED : OPTIONAL;
}

/* The execution provider's own memory. */
static int get_input_memory(const struct ort_op *op, size_t index)
{
    (void)op;
    (void)index;
    return 0;
}

/* y may have the memory of x. */
static size_t get_may_inplace(int **inputs, int **outputs)
{
    static int input = X, output = Y;
    *inputs = &input;
    *outputs = &output;
    return 1;
}

static void release_may_inplace(int *inputs, int *outputs)
{
    (void)inputs;
    (void)outputs;
}

/* ---- attributes ------------------------------------------------------------------------------------------------ */

static struct ort_status *refuse(const struct ort_api *api, const char *operator, const char *attribute,
                                 const char *problem)
{
    char message[256];
    snprintf(message, sizeof message, "normfuse: %s: %s %s", operator, attribute, problem);
    return api->create_status(CODE_INVALID_ARGUMENT, message);
}

/* True if the status is success; otherwise it is released. */
static bool succeeded(const struct ort_api *api, struct ort_status *status)
{
    if (status == NULL)
        return true;
    api->release_status(status);
    return false;
}

/* An array's length is found whatever the attribute's type is, so this fails where there is no such attribute. */
static bool has_attribute(const struct ort_api *api, const struct ort_info *info, const char *name)
{
    size_t size = 0;
    int64_t integer;
    float number;
    return succeeded(api, api->attribute_floats(info, name, NULL, &size)) ||
           succeeded(api, api->attribute_int(info, name, &integer)) ||
           succeeded(api, api->attribute_float(info, name, &number)) ||
           succeeded(api, api->attribute_string(info, name, NULL, &size));
}

static struct ort_status *read_int(const struct ort_api *api, const struct ort_info *info, const char *operator,
                                   const char *name, bool required, int64_t *value)
{
    if (succeeded(api, api->attribute_int(info, name, value)))
        return NULL;
    if (has_attribute(api, info, name))
        return refuse(api, operator, name, "is not an integer");
    return required ? refuse(api, operator, name, "is missing") : NULL;
}

static struct ort_status *read_float(const struct ort_api *api, const struct ort_info *info, const char *operator,
                                     const char *name, double *value, bool *found)
{
    float number;
    *found = succeeded(api, api->attribute_float(info, name, &number));
    if (*found)
        *value = (double)number;
    else if (has_attribute(api, info, name))
        return refuse(api, operator, name, "is not a float");
    return NULL;
}

/* The number of a word, where the attribute is there. `problem`: what is said of any other. */
static struct ort_status *read_word(const struct ort_api *api, const struct ort_info *info, const char *operator,
                                    const char *name, const char *const *words, int32_t count, const char *problem,
                                    int32_t *number)
{
    char text[32];
    size_t size = sizeof text;
    if (!succeeded(api, api->attribute_string(info, name, text, &size)))
        return has_attribute(api, info, name) ? refuse(api, operator, name, problem) : NULL;
    for (int32_t i = 0; i < count; i++) {
        if (strcmp(text, words[i]) != 0)
            continue;
        *number = i;
        return NULL;
    }
    return refuse(api, operator, name, problem);
}

static struct ort_status *read_activation(const struct ort_api *api, const struct ort_info *info, const char *operator,
                                          int32_t *activation)
{
    static const char *const names[] = {
#define ACTIVATION(number, name, parameter) #name,
#include "activations.def"
#undef ACTIVATION
    };
    _Static_assert(NORMFUSE_PRELU + 1 == sizeof names / sizeof names[0], "the last one needs a tensor");
    return read_word(api, info, operator, "activation", names, NORMFUSE_PRELU, "is not a name of an activation",
                     activation);
}

static struct ort_status *read_statistics(struct kernel *kernel, const struct ort_info *info)
{
    static const char *const statistics[] = {"mean_and_variance", "mean_square"};
    static const char *const kinds_of_eps[] = {"added", "of_norm"};
    const char *const operator = kinds[kernel->kind].name;
    kernel->groups = 1;
    struct ort_status *status = read_int(kernel->api, info, operator, "groups", false, &kernel->groups);
    if (status == NULL)
        status = read_word(kernel->api, info, operator, "statistics", statistics, NORMFUSE_MEAN_SQUARE + 1,
                           "is neither mean_and_variance nor mean_square", &kernel->statistics);
    if (status == NULL)
        status = read_word(kernel->api, info, operator, "eps_kind", kinds_of_eps, NORMFUSE_EPS_OF_NORM + 1,
                           "is neither added nor of_norm", &kernel->eps_kind);
    return status;
}

static struct ort_status *read_switch(const struct ort_api *api, const struct ort_info *info, const char *operator,
                                      const char *name, bool *value)
{
    int64_t number = 0;
    struct ort_status *const status = read_int(api, info, operator, name, false, &number);
    if (status == NULL && (number < 0 || number > 1))
        return refuse(api, operator, name, "is neither 0 nor 1");
    *value = number == 1;
    return status;
}

static struct ort_status *read_training(struct kernel *kernel, const struct ort_info *info)
{
    const char *const operator = kinds[kernel->kind].name;
    bool found;
    struct ort_status *const status = read_switch(kernel->api, info, operator, "training_mode", &kernel->trains);
    if (status != NULL)
        return status;
    if (kernel->trains && kernel->device_type == NORMFUSE_CUDA)
        return refuse(kernel->api, operator, "training_mode", "is 1, which CUDA has no kernel for");
    return read_float(kernel->api, info, operator, "momentum", &kernel->momentum, &found);
}

static struct ort_status *read_attributes(struct kernel *kernel, const struct ort_info *info)
{
    const struct ort_api *const api = kernel->api;
    const char *const operator = kinds[kernel->kind].name;
    const int attributes = kinds[kernel->kind].attributes;
    struct ort_status *status = NULL;
    bool found = false;
    if ((attributes & (GROUPS | NUM_GROUPS)) != 0)
        status = read_int(api, info, operator, (attributes & GROUPS) != 0 ? "groups" : "num_groups", true,
                          &kernel->groups);
    if (status == NULL && (attributes & EPSILON) != 0)
        status = read_float(api, info, operator, "epsilon", &kernel->eps, &found);
    if (status == NULL && (attributes & CHANNELS_LAST) != 0)
        status = read_switch(api, info, operator, "channels_last", &kernel->channels_last);
    if (status == NULL && (attributes & TRAINING_MODE) != 0)
        status = read_training(kernel, info);
    if (status == NULL && (attributes & STATISTICS) != 0)
        status = read_statistics(kernel, info);
    if (status != NULL || (attributes & ACTIVATION) == 0)
        return status;
    status = read_activation(api, info, operator, &kernel->activation);
    if (status == NULL)
        status = read_float(api, info, operator, "act_param", &kernel->act_param, &found);
    if (found && kernel->activation != NORMFUSE_LEAKY_RELU && kernel->activation != NORMFUSE_ELU)
        return refuse(api, operator, "act_param", "means nothing with this activation");
    kernel->flags = found ? NORMFUSE_HAS_ACT_PARAM : 0;
    return status;
}

static struct ort_status *create_kernel(const struct ort_op *op, const struct ort_api *api,
                                        const struct ort_info *info, void **made)
{
    struct kernel *const kernel = calloc(1, sizeof *kernel);
    if (kernel == NULL)
        return api->create_status(CODE_FAIL, "normfuse: out of memory");
    kernel->api = api;
    kernel->kind = operator_of(op)->kind;
    kernel->device_type = operator_of(op)->device_type;
    kernel->eps = (double)1e-5F;
    kernel->momentum = (double)0.9F;
    struct ort_status *const status = read_attributes(kernel, info);
    if (status != NULL) {
        free(kernel);
        return status;
    }
    *made = kernel;
    return NULL;
}

static void destroy_kernel(void *kernel)
{
    free(kernel);
}

/* ---- shapes before a run --------------------------------------------------------------------------------------- */

enum { MAX_AXES = 64 }; /* that a tensor may have here; the library folds positions into one axis */

/* A size that is neither known nor named cannot be passed on. */
static bool is_described(const struct ort_api *api, const struct ort_shape *shape)
{
    size_t rank;
    int64_t sizes[MAX_AXES];
    const char *names[MAX_AXES];
    if (!succeeded(api, api->get_rank(shape, &rank)) || rank == 0 || rank > MAX_AXES ||
        !succeeded(api, api->get_sizes(shape, sizes, rank)) || !succeeded(api, api->get_symbols(shape, names, rank)))
        return false;
    for (size_t axis = 0; axis < rank; axis++)
        if (sizes[axis] < 0 && names[axis][0] == '\0')
            return false;
    return true;
}

/* Y and the sum have the shape of x. A node may have no sum; then the call for it fails. */
static struct ort_status *infer(const struct ort_op *op, struct ort_inference *inference)
{
    const struct ort_api *const api = operator_of(op)->api;
    struct ort_shape *shape;
    if (!succeeded(api, api->inferred_input(inference, X, &shape)) || !is_described(api, shape))
        return NULL;
    succeeded(api, api->infer_output(inference, Y, shape));
    if (operator_of(op)->kind == SKIP_GROUP_NORM)
        succeeded(api, api->infer_output(inference, SUM, shape));
    return NULL;
}

/* ---- tensors --------------------------------------------------------------------------------------------------- */

struct described {
    normfuse_tensor tensor;
    int64_t sizes[NORMFUSE_MAX_AXES], strides[NORMFUSE_MAX_AXES];
};

/* A tensor of ONNX Runtime, whose axes are in the order of its memory. */
struct given {
    void *data;
    int type;
    size_t rank;
    int64_t sizes[MAX_AXES];
};

/* A call of a kernel. */
struct call {
    const struct kernel *kernel;
    struct ort_context *context;
    normfuse_device device;
    struct given given[MAX_INPUTS];
    struct described x, y, sum, skip;
    bool has_sum; /* the model uses that output */
    struct described parameters[MAX_INPUTS];
    normfuse_exec exec;
};

static struct ort_status *read_shape(const struct ort_api *api, const struct ort_shape *shape, struct given *given)
{
    struct ort_status *status = api->get_type(shape, &given->type);
    if (status == NULL)
        status = api->get_rank(shape, &given->rank);
    if (status == NULL && given->rank > MAX_AXES)
        return api->create_status(CODE_INVALID_ARGUMENT, "normfuse: an input has more than 64 axes");
    return status != NULL ? status : api->get_sizes(shape, given->sizes, given->rank);
}

static struct ort_status *read_input(const struct call *call, size_t index, struct given *given)
{
    const struct ort_api *const api = call->kernel->api;
    const struct ort_value *value = NULL;
    struct ort_status *status = api->get_input(call->context, index, &value);
    if (status != NULL)
        return status;
    if (value == NULL)
        return api->create_status(CODE_INVALID_ARGUMENT, "normfuse: an input is missing");
    struct ort_shape *shape = NULL;
    status = api->get_shape(value, &shape);
    if (status != NULL)
        return status;
    status = read_shape(api, shape, given);
    api->release_shape(shape);
    return status != NULL ? status : api->get_data((struct ort_value *)(uintptr_t)value, &given->data);
}

/* A type that the library does not know has no bits, and it refuses that. */
static normfuse_dtype dtype_of(int type)
{
    switch (type) {
    case TYPE_F32: return (normfuse_dtype){2, 32, 1};
    case TYPE_F16: return (normfuse_dtype){2, 16, 1};
    case TYPE_F64: return (normfuse_dtype){2, 64, 1};
    case TYPE_BF16: return (normfuse_dtype){4, 16, 1};
    default: return (normfuse_dtype){0, 0, 1};
    }
}

/* Row-major strides of sizes in the order of memory. Sizes that are too many are the library's to refuse. */
static void set_tensor(struct described *described, const struct given *given, normfuse_device device, size_t rank,
                       const int64_t *sizes, bool channels_last)
{
    uint64_t stride = 1;
    for (size_t axis = rank; axis-- > 0;) {
        const size_t to = !channels_last || axis == 0 ? axis : axis == rank - 1 ? 1 : axis + 1;
        described->sizes[to] = sizes[axis];
        described->strides[to] = (int64_t)stride;
        stride *= (uint64_t)sizes[axis];
    }
    described->tensor = (normfuse_tensor){.data = given->data, .device = device, .ndim = (int32_t)rank,
                                          .dtype = dtype_of(given->type), .shape = described->sizes,
                                          .strides = described->strides};
}

static int64_t product(const int64_t *sizes, size_t count)
{
    uint64_t elements = 1;
    for (size_t i = 0; i < count; i++)
        elements *= (uint64_t)sizes[i];
    return (int64_t)elements;
}

/* N, C and positions. More than three axes of positions are as one. */
static void describe_big(const struct call *call, const struct given *given, struct described *described)
{
    const bool last = call->kernel->channels_last && given->rank > 1;
    const size_t rank = given->rank;
    if (rank <= NORMFUSE_MAX_AXES) {
        set_tensor(described, given, call->device, rank, given->sizes, last);
        return;
    }
    const int64_t positions = product(given->sizes + (last ? 1 : 2), rank - 2);
    const int64_t folded[] = {given->sizes[0], last ? positions : given->sizes[1],
                              last ? given->sizes[rank - 1] : positions};
    set_tensor(described, given, call->device, 3, folded, last);
}

/* A tensor that has x's axes, with or without N, and positions of size 1, as [C] or [N, C]. False: it has others. */
static bool describe_channels(const struct call *call, const struct given *given, struct described *described)
{
    const struct given *const x = &call->given[X];
    if (x->rank < 3 || given->rank > x->rank || given->rank + 1 < x->rank)
        return false;
    const size_t missing = x->rank - given->rank;
    const size_t channel = (call->kernel->channels_last ? x->rank - 1 : 1) - missing;
    for (size_t axis = 1 - missing; axis < given->rank; axis++)
        if (given->sizes[axis] != (axis == channel ? x->sizes[channel + missing] : 1))
            return false;
    const int64_t sizes[] = {missing == 0 ? given->sizes[0] : 1, given->sizes[channel]};
    const bool is_shared = sizes[0] == 1;
    set_tensor(described, given, call->device, is_shared ? 1 : 2, is_shared ? sizes + 1 : sizes, false);
    return true;
}

static struct ort_status *describe_parameter(const struct call *call, const struct given *given,
                                             struct described *described)
{
    if (describe_channels(call, given, described))
        return NULL;
    if (given->rank > NORMFUSE_MAX_AXES)
        return call->kernel->api->create_status(CODE_INVALID_ARGUMENT, "normfuse: a parameter has more than 5 axes");
    set_tensor(described, given, call->device, given->rank, given->sizes, false);
    return NULL;
}

static struct ort_status *describe_parameters(struct call *call)
{
    const enum kind kind = call->kernel->kind;
    struct ort_status *status = NULL;
    for (size_t i = WEIGHT; status == NULL && i < kinds[kind].inputs; i++)
        if (kind != SKIP_GROUP_NORM || i != SKIP)
            status = describe_parameter(call, &call->given[i], &call->parameters[i]);
    return status;
}

static struct ort_status *find_device(struct call *call)
{
    const struct ort_api *const api = call->kernel->api;
    call->device = (normfuse_device){call->kernel->device_type, 0};
    if (call->kernel->device_type == NORMFUSE_CPU)
        return NULL;
    const struct ort_value *value = NULL;
    const struct ort_memory *memory = NULL;
    int id = 0;
    struct ort_status *status = api->get_input(call->context, X, &value);
    if (status == NULL)
        status = api->get_memory(value, &memory);
    if (status == NULL)
        status = api->get_device(memory, &id);
    if (status == NULL)
        status = api->get_stream(call->context, &call->exec.stream);
    call->device.device_id = id;
    return status;
}

static struct ort_status *read_inputs(struct call *call)
{
    struct ort_status *status = find_device(call);
    for (size_t i = 0; status == NULL && i < kinds[call->kernel->kind].inputs; i++)
        status = read_input(call, i, &call->given[i]);
    if (status != NULL)
        return status;
    describe_big(call, &call->given[X], &call->x);
    return describe_parameters(call);
}

/* An output of the shape and type of `like`: its memory, and whether the model uses it. */
static struct ort_status *make_output(const struct call *call, size_t index, const struct given *like,
                                      struct given *output, bool *is_used)
{
    const struct ort_api *const api = call->kernel->api;
    size_t outputs = 0;
    struct ort_status *status = api->output_count(call->context, &outputs);
    struct ort_value *value = NULL;
    if (status == NULL && index < outputs)
        status = api->get_output(call->context, index, like->sizes, like->rank, &value);
    *output = *like;
    output->data = NULL;
    if (status == NULL && value != NULL)
        status = api->get_data(value, &output->data);
    *is_used = value != NULL;
    return status;
}

static struct ort_status *make_big_output(struct call *call, size_t index, struct described *described, bool *is_used)
{
    struct given output;
    struct ort_status *const status = make_output(call, index, &call->given[X], &output, is_used);
    describe_big(call, &output, described);
    return status;
}

/* ---- ONNX Runtime's threads ------------------------------------------------------------------------------------ */

/* Each task is taken once. What ONNX Runtime has not run when its function returns, this thread runs. */
struct tasks {
    void (*task)(void *context, int64_t i);
    void *context;
    int64_t count;
    atomic_int_fast64_t next;
};

static void run_one(void *data, size_t unused)
{
    struct tasks *const tasks = data;
    (void)unused;
    const int64_t i = atomic_fetch_add(&tasks->next, 1);
    if (i < tasks->count)
        tasks->task(tasks->context, i);
}

static void parallel_for(void *pool, int64_t count, void (*task)(void *context, int64_t i), void *context)
{
    const struct call *const call = pool;
    const struct ort_api *const api = call->kernel->api;
    struct tasks tasks = {.task = task, .context = context, .count = count};
    atomic_init(&tasks.next, 0);
    if (count > 1)
        succeeded(api, api->parallel_for(call->context, run_one, (size_t)count, 0, &tasks));
    while (atomic_load(&tasks.next) < count)
        run_one(&tasks, 0);
}

/* ---- calls of the library -------------------------------------------------------------------------------------- */

enum function { GROUP, BATCH, BATCH_STATS, BATCH_APPLY, CHANNEL, AFFINE };

union options {
    normfuse_group_norm_options group;
    normfuse_batch_norm_options batch;
    normfuse_channel_norm_options channel;
    normfuse_affine_options affine;
};

static normfuse_status forward(enum function function, const union options *options, const normfuse_tensors *tensors,
                               const normfuse_exec *exec)
{
    switch (function) {
    case GROUP: return normfuse_group_norm_forward(&options->group, tensors, exec);
    case BATCH: return normfuse_batch_norm_forward(&options->batch, tensors, exec);
    case BATCH_STATS: return normfuse_batch_norm_stats(&options->batch, tensors, exec);
    case BATCH_APPLY: return normfuse_batch_norm_apply(&options->batch, tensors, exec);
    case CHANNEL: return normfuse_channel_norm_forward(&options->channel, tensors, exec);
    default: return normfuse_affine_forward(&options->affine, tensors, exec);
    }
}

/* Types of the functions that CUDA kernels call. */
static normfuse_status scratch_bytes(enum function function, const union options *options,
                                     const normfuse_tensors *tensors, const normfuse_exec *exec, size_t *bytes)
{
    switch (function) {
    case GROUP: return normfuse_group_norm_forward_scratch_bytes(&options->group, tensors, exec, bytes);
    case BATCH: return normfuse_batch_norm_forward_scratch_bytes(&options->batch, tensors, exec, bytes);
    case CHANNEL: return normfuse_channel_norm_forward_scratch_bytes(&options->channel, tensors, exec, bytes);
    default: return normfuse_affine_forward_scratch_bytes(&options->affine, tensors, exec, bytes);
    }
}

/* The stream's own memory, and where a call needs more than that the driver's pool. */
static normfuse_status enqueue(const struct call *call, enum function function, const union options *options,
                               const normfuse_tensors *tensors)
{
    const int32_t device = call->device.device_id;
    normfuse_exec exec = call->exec;
    void *const acquired = normfuse_stream_acquire(device, &exec);
    normfuse_status status = forward(function, options, tensors, &exec);
    normfuse_stream_release(acquired);
    if (status != NORMFUSE_SCRATCH)
        return status;
    exec.scratch = NULL;
    status = scratch_bytes(function, options, tensors, &exec, &exec.scratch_bytes);
    if (status != NORMFUSE_OK)
        return status;
    normfuse_stream_scratch(device, exec.stream, exec.scratch_bytes, &exec.scratch);
    if (exec.scratch == NULL)
        return NORMFUSE_OUT_OF_MEMORY;
    status = forward(function, options, tensors, &exec);
    normfuse_stream_scratch_free(device, exec.stream, exec.scratch);
    return status;
}

static struct ort_status *run(const struct call *call, enum function function, const union options *options,
                              const normfuse_tensors *tensors)
{
    const struct ort_api *const api = call->kernel->api;
    const normfuse_status status = call->kernel->device_type == NORMFUSE_CPU
                                       ? forward(function, options, tensors, &call->exec)
                                       : enqueue(call, function, options, tensors);
    if (status == NORMFUSE_OK)
        return NULL;
    const char *text = normfuse_last_error();
    if (text[0] == '\0' || status == NORMFUSE_OUT_OF_MEMORY)
        text = normfuse_status_text(status);
    const int code = status < NORMFUSE_UNSUPPORTED    ? CODE_INVALID_ARGUMENT
                     : status == NORMFUSE_UNSUPPORTED ? CODE_NOT_IMPLEMENTED
                                                      : CODE_FAIL;
    return api->create_status(code, text);
}

static union options group_options(const struct kernel *kernel, int64_t groups)
{
    return (union options){.group = {.struct_bytes = sizeof(normfuse_group_norm_options), .flags = kernel->flags,
                                     .groups = groups, .eps = kernel->eps, .activation = kernel->activation,
                                     .act_param = kernel->act_param}};
}

/* u = x [+ pre_bias] [+ pre_add], which goes to u where that is given. */
struct additions {
    const normfuse_tensor *pre_bias, *pre_add, *u;
};

static struct ort_status *run_group_norm(struct call *call, int64_t groups, struct additions additions)
{
    const union options options = group_options(call->kernel, groups);
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &call->x.tensor,
                                      .pre_bias = additions.pre_bias, .pre_add = additions.pre_add, .u = additions.u,
                                      .weight = &call->parameters[WEIGHT].tensor,
                                      .bias = &call->parameters[BIAS].tensor, .y = &call->y.tensor};
    return run(call, GROUP, &options, &tensors);
}

/* A scale and a bias for each group, as in version 18 of ONNX's GroupNormalization: the channels of a group become
 * positions of one channel. */
static void use_groups_as_channels(struct call *call, int64_t groups)
{
    const struct given *const x = &call->given[X], y = {.data = call->y.tensor.data, .type = x->type};
    const int64_t sizes[] = {x->sizes[0], groups, product(x->sizes + 1, x->rank - 1) / groups};
    set_tensor(&call->x, x, call->device, 3, sizes, false);
    set_tensor(&call->y, &y, call->device, 3, sizes, false);
}

static struct ort_status *run_plain_group_norm(struct call *call)
{
    const int64_t groups = call->kernel->groups;
    const struct given *const x = &call->given[X];
    const struct described *const weight = &call->parameters[WEIGHT];
    const bool is_by_group = !call->kernel->channels_last && x->rank > 1 && weight->tensor.ndim == 1 &&
                             weight->sizes[0] == groups && groups > 0 && x->sizes[1] % groups == 0;
    if (is_by_group && x->sizes[1] != groups)
        use_groups_as_channels(call, groups);
    return run_group_norm(call, groups, (struct additions){0});
}

static struct ort_status *run_instance_norm(struct call *call)
{
    return run_group_norm(call, call->x.tensor.ndim > 1 ? call->x.sizes[1] : 0, (struct additions){0});
}

/* ---- a skip ---------------------------------------------------------------------------------------------------- */

static bool has_same_shape(const struct given *a, const struct given *b)
{
    return a->rank == b->rank && memcmp(a->sizes, b->sizes, a->rank * sizeof a->sizes[0]) == 0;
}

/* A skip that is not of x's shape, as [C] or [N, C]. */
static bool describe_skip(struct call *call)
{
    const struct given *const skip = &call->given[SKIP];
    if (describe_channels(call, skip, &call->skip))
        return true;
    if (skip->rank == 0 || skip->rank > 2)
        return false;
    set_tensor(&call->skip, skip, call->device, skip->rank, skip->sizes, false);
    return true;
}

static struct ort_status *run_skip_group_norm(struct call *call)
{
    struct ort_status *const status = make_big_output(call, SUM, &call->sum, &call->has_sum);
    if (status != NULL)
        return status;
    struct additions additions = {.u = call->has_sum ? &call->sum.tensor : NULL};
    if (has_same_shape(&call->given[SKIP], &call->given[X])) {
        describe_big(call, &call->given[SKIP], &call->skip);
        additions.pre_add = &call->skip.tensor;
        return run_group_norm(call, call->kernel->groups, additions);
    }
    if (describe_skip(call)) {
        additions.pre_bias = &call->skip.tensor;
        return run_group_norm(call, call->kernel->groups, additions);
    }
    return call->kernel->api->create_status(CODE_INVALID_ARGUMENT,
                                            "normfuse: SkipGroupNorm: skip has neither the shape of X nor one of [C], "
                                            "[N, C] and X's with positions of size 1");
}

/* ---- the other kernels ----------------------------------------------------------------------------------------- */

/* [N] is [N, 1], as ONNX says. */
static void add_channel(struct call *call)
{
    const struct given *const x = &call->given[X], y = {.data = call->y.tensor.data, .type = x->type};
    const int64_t sizes[] = {x->sizes[0], 1};
    set_tensor(&call->x, x, call->device, 2, sizes, false);
    set_tensor(&call->y, &y, call->device, 2, sizes, false);
}

/* new = momentum * old + (1 - momentum) * the batch's, as a channel affine of one sample: it takes every type. */
static struct ort_status *update_running(struct call *call, size_t input, size_t output, const double *of_batch,
                                         double *factors, double *terms)
{
    const struct given *const old = &call->given[input];
    const int64_t channels = call->x.sizes[1], sizes[] = {1, channels};
    const double momentum = call->kernel->momentum;
    if (old->rank != 1 || old->sizes[0] != channels)
        return call->kernel->api->create_status(CODE_INVALID_ARGUMENT,
                                                "normfuse: BatchNormalization: mean or var is not of shape [C]");
    struct given new;
    bool is_used;
    struct ort_status *const status = make_output(call, output, old, &new, &is_used);
    if (status != NULL || !is_used)
        return status;
    for (int64_t c = 0; c < channels; c++) {
        factors[c] = momentum;
        terms[c] = (1 - momentum) * of_batch[c];
    }
    struct described from, to;
    set_tensor(&from, old, call->device, 2, sizes, false);
    set_tensor(&to, &new, call->device, 2, sizes, false);
    normfuse_axes axes;
    const normfuse_tensor weight = normfuse_tensor_contiguous(factors, NORMFUSE_F64, 1, &channels, &axes);
    normfuse_tensor bias = weight;
    bias.data = terms;
    const union options options = {.affine = {.struct_bytes = sizeof options.affine}};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &from.tensor, .weight = &weight,
                                      .bias = &bias, .y = &to.tensor};
    return run(call, AFFINE, &options, &tensors);
}

/* Statistics to [C, 3], then y. ONNX's running variance takes the biased variance of the batch, the library's own takes
 * the unbiased one, so both are updated here. `memory`: 7 doubles a channel. */
static struct ort_status *train(struct call *call, double *memory)
{
    const int64_t channels = call->x.sizes[1];
    double *const of_mean = memory + 3 * channels, *const of_var = of_mean + channels;
    normfuse_axes axes;
    const normfuse_tensor stats = normfuse_tensor_contiguous(memory, NORMFUSE_F64, 2, (int64_t[]){channels, 3}, &axes);
    const union options options = {.batch = {.struct_bytes = sizeof options.batch, .eps = call->kernel->eps}};
    normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &call->x.tensor, .stats = &stats};
    struct ort_status *status = run(call, BATCH_STATS, &options, &tensors);
    if (status != NULL)
        return status;
    for (int64_t c = 0; c < channels; c++) {
        of_mean[c] = memory[3 * c + 1];
        of_var[c] = memory[3 * c + 2] / memory[3 * c];
    }
    tensors.weight = &call->parameters[WEIGHT].tensor;
    tensors.bias = &call->parameters[BIAS].tensor;
    tensors.y = &call->y.tensor;
    status = run(call, BATCH_APPLY, &options, &tensors);
    double *const factors = of_var + channels, *const terms = factors + channels;
    if (status == NULL)
        status = update_running(call, MEAN, NEW_MEAN, of_mean, factors, terms);
    return status != NULL ? status : update_running(call, VAR, NEW_VAR, of_var, factors, terms);
}

static struct ort_status *run_training(struct call *call)
{
    const struct ort_api *const api = call->kernel->api;
    if (call->x.tensor.ndim < 2)
        return api->create_status(CODE_INVALID_ARGUMENT, "normfuse: BatchNormalization: X has no axis C");
    double *const memory = malloc((size_t)call->x.sizes[1] * 7 * sizeof *memory + 1);
    if (memory == NULL)
        return api->create_status(CODE_FAIL, "normfuse: out of memory");
    struct ort_status *const status = train(call, memory);
    free(memory);
    return status;
}

/* An evaluation has no new statistics; a model that uses them would read nothing. */
static struct ort_status *refuse_statistics(const struct call *call)
{
    for (size_t i = NEW_MEAN; i < kinds[call->kernel->kind].outputs; i++) {
        struct given output;
        bool is_used;
        struct ort_status *const status = make_output(call, i, &call->given[MEAN], &output, &is_used);
        if (status != NULL)
            return status;
        if (is_used)
            return call->kernel->api->create_status(
                CODE_INVALID_ARGUMENT, "normfuse: BatchNormalization: new statistics are outputs of training only");
    }
    return NULL;
}

static struct ort_status *run_batch_norm(struct call *call)
{
    if (call->given[X].rank == 1)
        add_channel(call);
    if (call->kernel->trains)
        return run_training(call);
    struct ort_status *const refused = refuse_statistics(call);
    if (refused != NULL)
        return refused;
    const struct kernel *const kernel = call->kernel;
    const union options options = {
        .batch = {.struct_bytes = sizeof options.batch, .flags = kernel->flags | NORMFUSE_EVALUATE, .eps = kernel->eps,
                  .activation = kernel->activation, .act_param = kernel->act_param}};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &call->x.tensor,
                                      .weight = &call->parameters[WEIGHT].tensor,
                                      .bias = &call->parameters[BIAS].tensor,
                                      .running_mean = &call->parameters[MEAN].tensor,
                                      .running_var = &call->parameters[VAR].tensor, .y = &call->y.tensor};
    return run(call, BATCH, &options, &tensors);
}

static struct ort_status *run_channel_norm(struct call *call)
{
    const struct kernel *const kernel = call->kernel;
    const union options options = {
        .channel = {.struct_bytes = sizeof options.channel, .flags = kernel->flags, .groups = kernel->groups,
                    .eps = kernel->eps, .statistics = kernel->statistics, .eps_kind = kernel->eps_kind,
                    .activation = kernel->activation, .act_param = kernel->act_param}};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &call->x.tensor,
                                      .weight = &call->parameters[WEIGHT].tensor,
                                      .bias = &call->parameters[BIAS].tensor, .y = &call->y.tensor};
    return run(call, CHANNEL, &options, &tensors);
}

static struct ort_status *run_affine(struct call *call)
{
    const struct kernel *const kernel = call->kernel;
    const union options options = {.affine = {.struct_bytes = sizeof options.affine, .flags = kernel->flags,
                                              .activation = kernel->activation, .act_param = kernel->act_param}};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &call->x.tensor,
                                      .weight = &call->parameters[WEIGHT].tensor,
                                      .bias = &call->parameters[BIAS].tensor, .y = &call->y.tensor};
    return run(call, AFFINE, &options, &tensors);
}

static struct ort_status *compute(void *data, struct ort_context *context)
{
    const struct kernel *const kernel = data;
    struct call call;
    bool has_y = false;
    call.kernel = kernel;
    call.context = context;
    call.exec = (normfuse_exec){.struct_bytes = sizeof call.exec};
    if (kernel->device_type == NORMFUSE_CPU) {
        call.exec.parallel_for = parallel_for;
        call.exec.pool = &call;
    }
    struct ort_status *status = read_inputs(&call);
    if (status == NULL)
        status = make_big_output(&call, Y, &call.y, &has_y);
    if (status != NULL)
        return status;
    if (!has_y)
        return kernel->api->create_status(CODE_INVALID_ARGUMENT, "normfuse: the output is missing");
    switch (kernel->kind) {
    case SKIP_GROUP_NORM: return run_skip_group_norm(&call);
    case INSTANCE_NORM:
    case ONNX_INSTANCE_NORM: return run_instance_norm(&call);
    case BATCH_NORM:
    case ONNX_BATCH_NORM: return run_batch_norm(&call);
    case CHANNEL_NORM: return run_channel_norm(&call);
    case CHANNEL_AFFINE: return run_affine(&call);
    default: return run_plain_group_norm(&call);
    }
}

/* ---- registration ---------------------------------------------------------------------------------------------- */

static struct operator make_operator(const struct ort_api *api, enum kind kind, int type, int32_t device_type)
{
    return (struct operator){
        .op = {.version = API_VERSION, .get_name = get_name, .get_provider = get_provider,
               .get_input_type = get_input_type, .get_input_count = get_input_count,
               .get_output_type = get_output_type, .get_output_count = get_output_count,
               .kernel_destroy = destroy_kernel, .get_input_characteristic = get_input_characteristic,
               .get_output_characteristic = get_output_characteristic, .get_input_memory = get_input_memory,
               .create_kernel_2 = create_kernel, .kernel_compute_2 = compute, .infer = infer,
               .get_may_inplace = get_may_inplace, .release_may_inplace = release_may_inplace},
        .api = api, .kind = kind, .type = type, .device_type = device_type};
}

/* One for each copy of ONNX Runtime in the process, made at its first registration and never released: sessions point
 * to it. */
struct registered {
    const struct ort_api *api;
    struct ort_domain *domain;
    struct registered *next;
    struct operator operators[OPERATORS];
};

static void make_operators(struct registered *made)
{
    static const int32_t devices[DEVICES] = {NORMFUSE_CPU, NORMFUSE_CUDA};
    struct operator *next = made->operators;
    for (int kind = 0; kind < KINDS; kind++)
        for (int type = 0; type < TYPES; type++)
            for (int device = 0; device < DEVICES; device++)
                *next++ = make_operator(made->api, (enum kind)kind, types[type], devices[device]);
}

static struct ort_status *make_domain(struct registered *made)
{
    struct ort_status *status = made->api->create_domain("normfuse", &made->domain);
    if (status != NULL)
        return status;
    for (int i = 0; status == NULL && i < OPERATORS; i++)
        status = made->api->domain_add(made->domain, &made->operators[i].op);
    if (status != NULL)
        made->api->release_domain(made->domain);
    return status;
}

static struct ort_status *add_registered(const struct ort_api *api, struct registered **list)
{
    struct registered *const made = malloc(sizeof *made);
    if (made == NULL)
        return api->create_status(CODE_FAIL, "normfuse: out of memory");
    made->api = api;
    make_operators(made);
    struct ort_status *const status = make_domain(made);
    if (status != NULL) {
        free(made);
        return status;
    }
    made->next = *list;
    *list = made;
    return NULL;
}

static struct ort_status *find_domain(const struct ort_api *api, struct ort_domain **domain)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static struct registered *list;
    pthread_mutex_lock(&mutex);
    struct registered *found = list;
    while (found != NULL && found->api != api)
        found = found->next;
    struct ort_status *const status = found == NULL ? add_registered(api, &list) : NULL;
    if (status == NULL)
        *domain = found == NULL ? list->domain : found->domain;
    pthread_mutex_unlock(&mutex);
    return status;
}

/* Asked before the table: a version that is too old prints when it is asked for a newer table. */
static bool is_new_enough(const char *version)
{
    char *end;
    const long major = strtol(version, &end, 10);
    const long minor = *end == '.' ? strtol(end + 1, NULL, 10) : 0;
    return major > 1 || (major == 1 && minor >= API_VERSION);
}

static struct ort_status *refuse_version(const struct ort_api_base *base, const char *version)
{
    char message[128];
    snprintf(message, sizeof message, "normfuse: ONNX Runtime is %.32s, expected 1.%d or newer", version, API_VERSION);
    const struct ort_api *const first = base->get_api(1); /* every version has it, and without it there is no error */
    return first == NULL ? NULL : first->create_status(CODE_NOT_IMPLEMENTED, message);
}

void *RegisterCustomOps(void *options, const void *api_base)
{
    const struct ort_api_base *const base = api_base;
    const char *const version = base->get_version();
    const struct ort_api *const api = is_new_enough(version) ? base->get_api(API_VERSION) : NULL;
    if (api == NULL)
        return refuse_version(base, version);
    struct ort_domain *domain = NULL;
    struct ort_status *const status = find_domain(api, &domain);
    return status != NULL ? status : api->add_domain(options, domain);
}
