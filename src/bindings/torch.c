/* SPDX-License-Identifier: MIT
 *
 * torch.c - the kernels of PyTorch's operators normfuse::*, in plain C, through libtorch's stable C interface. Its
 * symbols are looked up in the libtorch that the process has loaded, so the library needs no torch to be built or
 * loaded, and serves every torch that has them. Schemas, fake kernels and gradients are in Python
 * (python/normfuse/torch), as are kernels over ctypes that do the same as these where the symbols are missing.
 *
 * The same kernels, with other arguments and outputs, can take the place of aten's own group and batch norms.
 *
 * A kernel is called with a stack of 64-bit values: a tensor or a list is an owned handle, an optional tensor a cell on
 * the heap that holds one, or 0. It leaves its outputs there, owned by the caller. */
#include "huge_pages.h"

#include "package.h"
#include "torch.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t stack_value;
typedef struct torch_tensor *tensor_handle;
typedef struct torch_library *library_handle;
typedef struct torch_list *list_handle;
typedef int32_t torch_error; /* 0: none */
typedef void kernel(stack_value *stack, uint64_t inputs, uint64_t outputs);

static struct {
    torch_error (*aoti_torch_library_init_impl)(const char *, const char *, const char *, uint32_t, library_handle *);
    torch_error (*aoti_torch_library_impl)(library_handle, const char *, kernel *);
    torch_error (*aoti_torch_delete_library_object)(library_handle);
    torch_error (*aoti_torch_get_dim)(tensor_handle, int64_t *);
    torch_error (*aoti_torch_get_sizes)(tensor_handle, int64_t **);
    torch_error (*aoti_torch_get_strides)(tensor_handle, int64_t **);
    torch_error (*aoti_torch_get_dtype)(tensor_handle, int32_t *);
    torch_error (*aoti_torch_get_device_type)(tensor_handle, int32_t *);
    torch_error (*aoti_torch_get_device_index)(tensor_handle, int32_t *);
    torch_error (*torch_get_mutable_data_ptr)(tensor_handle, void **);
    torch_error (*torch_get_const_data_ptr)(tensor_handle, const void **);
    torch_error (*aoti_torch_empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t,
                                            tensor_handle *);
    torch_error (*aoti_torch_copy_)(tensor_handle, tensor_handle, int32_t);
    torch_error (*aoti_torch_delete_tensor_object)(tensor_handle);
    void (*aoti_torch_check)(bool, const char *, const char *, uint32_t, const char *); /* throws */
    torch_error (*torch_get_num_threads)(uint32_t *);
    torch_error (*torch_parallel_for)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *);
    int32_t (*aoti_torch_dtype_float64)(void);
    int32_t (*aoti_torch_dtype_float32)(void);
    int32_t (*aoti_torch_dtype_float16)(void);
    int32_t (*aoti_torch_dtype_bfloat16)(void);
    int32_t (*aoti_torch_dtype_uint8)(void);
    int32_t (*aoti_torch_device_type_cuda)(void);
    /* what aten's operators alone need */
    torch_error (*aoti_torch_is_defined)(tensor_handle, bool *);
    torch_error (*aoti_torch_new_uninitialized_tensor)(tensor_handle *);
    torch_error (*aoti_torch__reinterpret_tensor)(tensor_handle, int64_t, const int64_t *, const int64_t *, int64_t,
                                                  tensor_handle *);
    torch_error (*torch_list_get_item)(list_handle, size_t, stack_value *);
    torch_error (*torch_delete_list)(list_handle);
    torch_error (*aoti_torch_call_dispatcher)(const char *, const char *, stack_value *);
    /* optional */
    torch_error (*torch_delete_stable_ivalue)(stack_value *); /* 2.13; before, the cells are C++'s new */
    void (*operator_delete)(void *);
    const char *(*torch_exception_get_what_without_backtrace)(void);
    torch_error (*aoti_torch_get_current_cuda_stream)(int32_t, void **);
    /* what the functions above say, asked once */
    int32_t f64, f32, f16, bf16, uint8, cuda;
} torch;

/* ---- operators ------------------------------------------------------------------------------------------------- */

/* An argument or an output: a tensor by its place in normfuse_tensors, or a number. */
enum {
#define SLOT(number, member, kind) number,
#include "slots.def"
#undef SLOT
    SLOTS,
    PARTS = SLOTS, /* stats or sums of all shards, in rank order; a handle of its own */
    GROUPS, EPS, MOMENTUM, ACTIVATION, ACT_PARAM, WANTED, RETURN_SUM, STATISTICS, EPS_KIND, Y_DTYPE, CHANNELS_LAST,
    /* aten's */
    SAMPLES, CHANNELS, POSITIONS, TRAIN, MASK, RESERVE,
    OPTIONAL = 64,
    END = 255
};
_Static_assert(sizeof(normfuse_tensors) == offsetof(normfuse_tensors, x) + SLOTS * sizeof(void *),
               "every tensor has a slot");
_Static_assert(offsetof(normfuse_tensors, dslope) == offsetof(normfuse_tensors, x) + DSLOPE * sizeof(void *),
               "slots are in the order of normfuse_tensors");

enum {
    MAX_ARGUMENTS = 20,
    MAX_OUTPUTS = 8,
    MAX_AXES = 64,
    MAX_ON_ONE_THREAD = 16384 /* elements, which the library gives to one thread however many there are */
};

/* The bits of `wanted`. FROM_Y: the operator's post_add is y, see normfuse.h. FROM_U: its input is u, which has
 * pre_bias in it. */
enum {
    WANT_X = 1,
    WANT_WEIGHT = 2,
    WANT_BIAS = 4,
    WANT_SCALE = 8,
    WANT_SHIFT = 16,
    WANT_POST_ADD = 32,
    FROM_Y = 64,
    WANT_PRE_BIAS = 128, /* with WANT_X */
    FROM_U = 256,
    WANT_SLOPE = 512
};

enum kind { GROUP_NORM, INSTANCE_NORM, BATCH_NORM, AFFINE, CHANNEL_NORM };

typedef normfuse_status group_norm_call(const normfuse_group_norm_options *, const normfuse_tensors *,
                                        const normfuse_exec *);
typedef normfuse_status batch_norm_call(const normfuse_batch_norm_options *, const normfuse_tensors *,
                                        const normfuse_exec *);
typedef normfuse_status affine_call(const normfuse_affine_options *, const normfuse_tensors *, const normfuse_exec *);
typedef normfuse_status channel_norm_call(const normfuse_channel_norm_options *, const normfuse_tensors *,
                                          const normfuse_exec *);

struct operation {
    enum kind kind;
    bool is_backward;
    bool evaluates;
    bool is_lean; /* refuses x of one value a group */
    bool is_aten; /* one of aten's operators */
    bool merges;  /* PARTS; the gradients of parameters are of SUMS alone */
    uint8_t arguments[MAX_ARGUMENTS]; /* in the order of the schema */
    uint8_t outputs[MAX_OUTPUTS + 1];
    group_norm_call *group_norm; /* the one that `kind` says; of aten's batch norms both */
    batch_norm_call *batch_norm;
    affine_call *affine;
    channel_norm_call *channel_norm;
};

union options {
    normfuse_group_norm_options group_norm;
    normfuse_batch_norm_options batch_norm;
    normfuse_affine_options affine;
    normfuse_channel_norm_options channel_norm;
};

/* ---- tensors --------------------------------------------------------------------------------------------------- */

/* A tensor's shape, as torch has it; borrowed of its handle. */
struct shape {
    int64_t axes, *sizes, *strides;
};

/* One call: its handles are let go at its end, but for the outputs of one that succeeded. */
struct call {
    tensor_handle handles[SLOTS]; /* inputs */
    int32_t input_count;
    uint8_t inputs[MAX_ARGUMENTS]; /* the slots of those that were given */
    tensor_handle copies[SLOTS];  /* of inputs that the library does not walk */
    tensor_handle outputs[MAX_OUTPUTS];
    tensor_handle scratch, parts, shared; /* shared: the sums of all shards, per value */
    enum kind kind;
    int32_t dtype;   /* x's, as torch numbers it */
    int32_t y_dtype; /* that of y, post_add and their gradients: x's but for channel norm's */
    int32_t device_type, device_index;
    double eps, momentum, act_param;
    int64_t groups, activation, wanted;
    int64_t statistics, eps_kind; /* channel norm's */
    int64_t asked_y_dtype;        /* 0: x's, 1: f32, 2: f16, 3: bf16 */
    bool is_y_channels_last;      /* whatever x is */
    bool evaluates;
    bool returns_sum; /* u is an output; with pre_add it always is */
    /* aten's group norm: what x has, whatever its shape; or `positions` is -1 and the shape says. */
    int64_t samples, channels, positions;
    bool is_reshaped;
    struct shape x, walked; /* of x, and of its copy where it has one */
    tensor_handle transposed_y; /* y as [C, N, ...]; see separate_channels */
    tensor_handle running[2];   /* of one value a channel, likewise: mean and variance */
    const char *problem;        /* why it failed, where the library was not asked; "": torch says */
    bool has_failed_tasks;      /* torch's threads did not run them all */
    /* written where they are used */
    normfuse_tensor tensors[SLOTS];
    int64_t part_axes[2][2][4]; /* of `parts` and `shared`, likewise */
    int64_t axes[SLOTS][2][3]; /* shape and strides of those that the library sees with other axes than torch */
};

static bool fail(struct call *call, const char *problem)
{
    if (call->problem == NULL)
        call->problem = problem;
    return false;
}

static bool get_shape(struct call *call, struct shape *shape, tensor_handle handle)
{
    return (torch.aoti_torch_get_dim(handle, &shape->axes) == 0 &&
            torch.aoti_torch_get_sizes(handle, &shape->sizes) == 0 &&
            torch.aoti_torch_get_strides(handle, &shape->strides) == 0) ||
           fail(call, "");
}

/* The stride of the spatial axes taken as one, 0 where there is one position; -1 where they are not one. */
static int64_t spatial_stride(int64_t axes, const int64_t *sizes, const int64_t *strides, int64_t *positions)
{
    int64_t stride = 0, expected = 0;
    *positions = 1;
    for (int64_t a = axes - 1; a >= 2; a--) {
        if (sizes[a] == 1)
            continue;
        if (stride == 0)
            stride = expected = strides[a];
        if (strides[a] != expected || stride <= 0)
            return -1;
        expected *= sizes[a];
        *positions *= sizes[a];
    }
    return stride;
}

static bool is_empty(int64_t axes, const int64_t *sizes)
{
    for (int64_t a = 0; a < axes; a++)
        if (sizes[a] == 0)
            return true;
    return false;
}

static int64_t elements_of(int64_t axes, const int64_t *sizes)
{
    int64_t elements = 1;
    for (int64_t a = 0; a < axes; a++)
        elements *= sizes[a];
    return elements;
}

/* n * c * positions of them, a product that may not be an int64_t. */
static bool has_elements(int64_t axes, const int64_t *sizes, int64_t n, int64_t c, int64_t positions)
{
    const int64_t elements = elements_of(axes, sizes);
    if (n < 0 || c < 0 || positions < 0)
        return false;
    if (n == 0 || c == 0 || positions == 0)
        return elements == 0;
    return elements % n == 0 && elements / n % c == 0 && elements / n / c == positions;
}

/* Contiguous, channels-last, or a slice of either along N or C. */
static bool is_walkable(int64_t axes, const int64_t *sizes, const int64_t *strides)
{
    if (is_empty(axes, sizes))
        return true;
    int64_t positions;
    const int64_t position = spatial_stride(axes, sizes, strides, &positions), channels = sizes[1],
                  channel = strides[1];
    if (position < 0)
        return false;
    if (channels == 1)
        return true;
    if (positions == 1)
        return channel >= 1;
    return (position == 1 && channel >= positions) || (channel == 1 && position >= channels);
}

static bool is_contiguous(int64_t axes, const int64_t *sizes, const int64_t *strides)
{
    if (is_empty(axes, sizes))
        return true;
    int64_t expected = 1;
    for (int64_t a = axes - 1; a >= 0; a--) {
        if (sizes[a] != 1 && strides[a] != expected)
            return false;
        expected *= sizes[a];
    }
    return true;
}

/* As torch makes them: sizes of 0 count as 1. */
static void contiguous_strides(int64_t axes, const int64_t *sizes, int64_t *strides)
{
    uint64_t step = 1; /* sizes that are too many are torch's or the library's to refuse */
    for (int64_t a = axes - 1; a >= 0; a--) {
        strides[a] = (int64_t)step;
        step *= sizes[a] == 0 ? 1 : (uint64_t)sizes[a];
    }
}

static bool empty(struct call *call, tensor_handle *handle, int64_t axes, const int64_t *sizes, const int64_t *strides,
                  int32_t dtype)
{
    return torch.aoti_torch_empty_strided(axes, sizes, strides, dtype, call->device_type, call->device_index, handle) ==
                   0
               ? true
               : fail(call, "");
}

static bool empty_contiguous(struct call *call, tensor_handle *handle, int64_t axes, const int64_t *sizes,
                             int32_t dtype)
{
    int64_t strides[MAX_AXES];
    contiguous_strides(axes, sizes, strides);
    return empty(call, handle, axes, sizes, strides, dtype);
}

/* A tensor of another one's shape. */
static bool empty_shaped(struct call *call, tensor_handle *handle, tensor_handle like, int32_t dtype)
{
    int64_t axes, *sizes;
    if (torch.aoti_torch_get_dim(like, &axes) || torch.aoti_torch_get_sizes(like, &sizes))
        return fail(call, "");
    return axes > MAX_AXES ? fail(call, "a tensor has too many dimensions")
                            : empty_contiguous(call, handle, axes, sizes, dtype);
}

static bool copy_to(struct call *call, tensor_handle to, tensor_handle from)
{
    return torch.aoti_torch_copy_(to, from, 0) == 0 || fail(call, "");
}

static bool describe_dtype(struct call *call, normfuse_dtype *dtype, int32_t torch_dtype)
{
    dtype->lanes = 1;
    dtype->code = torch_dtype == torch.bf16 ? 4 : 2;
    if (torch_dtype == torch.f32)
        dtype->bits = 32;
    else if (torch_dtype == torch.f64)
        dtype->bits = 64;
    else if (torch_dtype == torch.f16 || torch_dtype == torch.bf16)
        dtype->bits = 16;
    else
        return fail(call, "normfuse is implemented for tensors of f64, f32, f16 and bf16 only");
    return true;
}

/* The tensor of `slot` is contiguous and seen as one of three axes. */
static void view_as(struct call *call, int slot, const int64_t shape[3])
{
    normfuse_tensor *tensor = &call->tensors[slot];
    tensor->ndim = 3;
    tensor->shape = memcpy(call->axes[slot][0], shape, 3 * sizeof *shape);
    tensor->strides = call->axes[slot][1];
    contiguous_strides(3, shape, tensor->strides);
}

static bool is_big(int slot)
{
    return slot <= POST_ADD || slot == Y || slot == U || slot == DY || slot == DU || slot == DX || slot == DPOST_ADD;
}

/* Reading through const keeps copy-on-write tensors shared. */
static bool get_data(struct call *call, void **data, tensor_handle handle, bool is_output)
{
    if (is_output)
        return torch.torch_get_mutable_data_ptr(handle, data) == 0 || fail(call, "");
    const void *read_only = NULL;
    if (torch.torch_get_const_data_ptr(handle, &read_only))
        return fail(call, "");
    memcpy(data, &read_only, sizeof read_only);
    return true;
}

static void put_shape(struct call *call, int slot, const struct shape *shape)
{
    normfuse_tensor *tensor = &call->tensors[slot];
    tensor->ndim = (int32_t)shape->axes;
    tensor->shape = shape->sizes;
    tensor->strides = shape->strides;
    if (!is_big(slot))
        return;
    if (call->is_reshaped) {
        view_as(call, slot, (const int64_t[]){call->samples, call->channels, call->positions});
    } else if (shape->axes > NORMFUSE_MAX_AXES) {
        int64_t(*merged)[3] = call->axes[slot], positions = 1;
        for (int64_t a = 2; a < shape->axes; a++)
            positions *= shape->sizes[a];
        merged[0][0] = shape->sizes[0];
        merged[0][1] = shape->sizes[1];
        merged[0][2] = positions;
        merged[1][0] = shape->strides[0];
        merged[1][1] = shape->strides[1];
        merged[1][2] =
            positions == 0 ? 1 : spatial_stride(shape->axes, shape->sizes, shape->strides, &positions);
        tensor->ndim = 3;
        tensor->shape = merged[0];
        tensor->strides = merged[1];
    }
}

/* The library's view of a tensor. It lives as long as the handle, whose shape and strides it borrows. */
static bool describe_as(struct call *call, int slot, tensor_handle handle, bool is_output, const struct shape *shape)
{
    normfuse_tensor *tensor = &call->tensors[slot];
    int32_t dtype, device_type, device_index;
    if (torch.aoti_torch_get_dtype(handle, &dtype) || torch.aoti_torch_get_device_type(handle, &device_type) ||
        (device_type == torch.cuda && torch.aoti_torch_get_device_index(handle, &device_index)))
        return fail(call, "");
    tensor->byte_offset = 0;
    tensor->device.device_type = device_type == torch.cuda ? NORMFUSE_CUDA : NORMFUSE_CPU;
    tensor->device.device_id = device_type == torch.cuda ? device_index : 0;
    put_shape(call, slot, shape);
    return get_data(call, &tensor->data, handle, is_output) && describe_dtype(call, &tensor->dtype, dtype);
}

static bool describe(struct call *call, int slot, tensor_handle handle, bool is_output)
{
    struct shape shape;
    return get_shape(call, &shape, handle) && describe_as(call, slot, handle, is_output, &shape);
}

/* For sizes above 0. */
static void channels_last_strides(int64_t axes, const int64_t *sizes, int64_t *strides)
{
    int64_t step = 1;
    for (int64_t i = 0; i < axes; i++) {
        const int64_t a = i == 0 ? 1 : i == axes - 1 ? 0 : axes - i; /* C, the positions from the last axis on, N */
        strides[a] = step;
        step *= sizes[a];
    }
}

/* Strides of a tensor of x's shape without gaps: x's strides where x is contiguous, else channels-last where x's
 * channels are adjacent, and contiguous otherwise. */
static void strides_like_x(const struct call *call, int64_t *strides)
{
    const int64_t axes = call->x.axes, *sizes = call->x.sizes;
    if (is_contiguous(axes, sizes, call->x.strides)) {
        memcpy(strides, call->x.strides, (size_t)axes * sizeof *strides);
    } else if (!call->is_reshaped && axes > 2 && sizes[1] > 1 && call->x.strides[1] == 1 &&
               is_walkable(axes, sizes, call->x.strides)) {
        channels_last_strides(axes, sizes, strides);
    } else {
        contiguous_strides(axes, sizes, strides);
    }
}

/* An input of x's kind, copied where the library does not walk it: to x's layout, which the kernels want of all tensors
 * (the expanded gradient of an average over positions: 256x2048x7x7 bf16 channels-last 1.2 ms on an H200, copied to
 * channels-first). */
static bool take_big(struct call *call, int slot)
{
    tensor_handle handle = call->handles[slot];
    struct shape shape;
    if (!get_shape(call, &shape, handle))
        return false;
    if (shape.axes > MAX_AXES || (shape.axes < 2 && call->positions < 0))
        return fail(call, "expected a tensor of at least 2 dimensions, [N, C, ...]");
    if (call->positions >= 0) {
        call->is_reshaped =
            shape.axes < 2 || shape.sizes[0] != call->samples || shape.sizes[1] != call->channels;
        if (call->is_reshaped &&
            !has_elements(shape.axes, shape.sizes, call->samples, call->channels, call->positions))
            return fail(call, "expected a tensor of N * C * HxW elements");
    }
    if (slot == X)
        call->x = shape;
    if (call->is_reshaped ? !is_contiguous(shape.axes, shape.sizes, shape.strides)
                          : !is_walkable(shape.axes, shape.sizes, shape.strides)) {
        int32_t dtype;
        int64_t strides[MAX_AXES];
        if (torch.aoti_torch_get_dtype(handle, &dtype))
            return fail(call, "");
        if (shape.axes == call->x.axes &&
            memcmp(shape.sizes, call->x.sizes, (size_t)shape.axes * sizeof *shape.sizes) == 0)
            strides_like_x(call, strides);
        else
            contiguous_strides(shape.axes, shape.sizes, strides);
        if (!empty(call, &call->copies[slot], shape.axes, shape.sizes, strides, dtype) ||
            !copy_to(call, call->copies[slot], handle) || !get_shape(call, &shape, call->copies[slot]))
            return false;
        handle = call->copies[slot];
    }
    if (slot == X)
        call->walked = shape;
    return describe_as(call, slot, handle, false, &shape);
}

/* An output of x's shape. */
static bool make_like_x(struct call *call, int slot, tensor_handle *handle)
{
    const int64_t axes = call->x.axes, *sizes = call->x.sizes;
    const int32_t dtype = slot == Y || slot == DPOST_ADD ? call->y_dtype : call->dtype;
    int64_t strides[MAX_AXES];
    if (slot == Y && call->is_y_channels_last && !is_empty(axes, sizes))
        channels_last_strides(axes, sizes, strides);
    else
        strides_like_x(call, strides);
    if (!empty(call, handle, axes, sizes, strides, dtype))
        return false;
    if (memcmp(strides, call->walked.strides, (size_t)axes * sizeof *strides) != 0)
        return describe(call, slot, *handle, true);
    call->tensors[slot] = call->tensors[X];
    return describe_dtype(call, &call->tensors[slot].dtype, dtype) &&
           get_data(call, &call->tensors[slot].data, *handle, true);
}

/* A contiguous output of x's device. */
static bool make(struct call *call, int slot, tensor_handle *handle, int64_t axes, const int64_t *sizes, int32_t dtype)
{
    if (axes > 3)
        return empty_contiguous(call, handle, axes, sizes, dtype) && describe(call, slot, *handle, true);
    normfuse_tensor *tensor = &call->tensors[slot];
    *tensor = (normfuse_tensor){.ndim = (int32_t)axes, .device = call->tensors[X].device,
                                .shape = call->axes[slot][0], .strides = call->axes[slot][1]};
    for (int64_t a = 0; a < axes; a++)
        tensor->shape[a] = sizes[a];
    contiguous_strides(axes, sizes, tensor->strides);
    return describe_dtype(call, &tensor->dtype, dtype) &&
           empty(call, handle, axes, sizes, tensor->strides, dtype) && get_data(call, &tensor->data, *handle, true);
}

/* ---- a call ---------------------------------------------------------------------------------------------------- */

static tensor_handle as_tensor(stack_value value)
{
    return (tensor_handle)(uintptr_t)value;
}

static double as_double(stack_value value)
{
    double number;
    memcpy(&number, &value, sizeof number);
    return number;
}

/* [x, weight, bias], a list of truth values. */
static int64_t take_mask(struct call *call, stack_value value)
{
    static const int64_t bits[] = {WANT_X, WANT_WEIGHT, WANT_BIAS};
    const list_handle list = (list_handle)(uintptr_t)value;
    int64_t wanted = 0;
    for (size_t i = 0; i < sizeof bits / sizeof bits[0]; i++) {
        stack_value is_wanted = 0;
        if (torch.torch_list_get_item(list, i, &is_wanted))
            fail(call, "");
        else if (is_wanted & 1)
            wanted |= bits[i];
    }
    (void)torch.torch_delete_list(list);
    return wanted;
}

/* Takes the arguments off the stack, which owns nothing afterwards, also where one of them is refused. */
static void take_arguments(struct call *call, const struct operation *operation, const stack_value *stack)
{
    for (int i = 0; operation->arguments[i] != END; i++) {
        const stack_value value = stack[i];
        switch (operation->arguments[i]) {
        case GROUPS: call->groups = (int64_t)value; break;
        case EPS: call->eps = as_double(value); break;
        case MOMENTUM: call->momentum = as_double(value); break;
        case ACTIVATION: call->activation = (int64_t)value; break;
        case ACT_PARAM: call->act_param = as_double(value); break;
        case WANTED: call->wanted = (int64_t)value; break;
        case PARTS: call->parts = as_tensor(value); break;
        case SAMPLES: call->samples = (int64_t)value; break;
        case CHANNELS: call->channels = (int64_t)value; break;
        case POSITIONS: call->positions = (int64_t)value; break;
        case RETURN_SUM: call->returns_sum = value & 1; break;
        case STATISTICS: call->statistics = (int64_t)value; break;
        case EPS_KIND: call->eps_kind = (int64_t)value; break;
        case Y_DTYPE: call->asked_y_dtype = (int64_t)value; break;
        case CHANNELS_LAST: call->is_y_channels_last = value & 1; break;
        case TRAIN: call->evaluates = (value & 1) == 0; break;
        case MASK: call->wanted = take_mask(call, value); break;
        case RESERVE: (void)torch.aoti_torch_delete_tensor_object(as_tensor(value)); break;
        default:
            if (value == 0)
                break;
            call->inputs[call->input_count++] = (uint8_t)(operation->arguments[i] & (OPTIONAL - 1));
            if (!(operation->arguments[i] & OPTIONAL)) {
                call->handles[operation->arguments[i]] = as_tensor(value);
            } else {
                stack_value *cell = (stack_value *)(uintptr_t)value;
                call->handles[operation->arguments[i] & (OPTIONAL - 1)] = as_tensor(*cell);
                if (torch.torch_delete_stable_ivalue != NULL)
                    (void)torch.torch_delete_stable_ivalue(cell);
                else
                    torch.operator_delete(cell);
            }
        }
    }
}

static void let_go(tensor_handle *handles, int count)
{
    for (int i = 0; i < count; i++)
        if (handles[i] != NULL)
            (void)torch.aoti_torch_delete_tensor_object(handles[i]);
}

/* aten says "none" by tensors that are undefined or empty, too, and gives a backward the statistics of both modes. */
static bool drop_what_is_none(struct call *call, const struct operation *operation)
{
    for (int32_t i = 0; i < call->input_count; i++) {
        const int slot = call->inputs[i];
        tensor_handle *handle = &call->handles[slot];
        const bool is_running = slot == RUNNING_MEAN || slot == RUNNING_VAR;
        const bool is_saved = slot == MEAN || slot == RSTD;
        if (!is_running && !is_saved && slot != WEIGHT && slot != BIAS)
            continue;
        bool is_given = !operation->is_backward || !(call->evaluates ? is_saved : is_running);
        if (is_given && torch.aoti_torch_is_defined(*handle, &is_given))
            return fail(call, "");
        if (is_given && is_running) {
            int64_t axes, *sizes;
            if (torch.aoti_torch_get_dim(*handle, &axes) || torch.aoti_torch_get_sizes(*handle, &sizes))
                return fail(call, "");
            is_given = !is_empty(axes, sizes);
        }
        if (!is_given) {
            let_go(handle, 1);
            *handle = NULL;
        }
    }
    return true;
}

static int32_t statistics_dtype(const struct call *call)
{
    return call->dtype == torch.f64 ? torch.f64 : torch.f32;
}

/* Before anything is made of their number. */
static bool has_possible_groups(struct call *call)
{
    const normfuse_tensor *x = &call->tensors[X];
    if (call->kind != GROUP_NORM && call->kind != CHANNEL_NORM)
        return true;
    if (call->groups <= 0 || x->shape[1] % call->groups != 0)
        return fail(call, "groups must be greater than 0 and divide the number of channels");
    int64_t limit = INT64_MAX / 32;
    for (int32_t a = 0; a < (call->kind == CHANNEL_NORM ? x->ndim : 1); a++)
        limit /= a == 1 || x->shape[a] == 0 ? 1 : x->shape[a];
    return call->groups <= limit || fail(call, "there are too many groups");
}

/* aten's own kernels save statistics of 16 bits, and hooks on saved tensors may give another dtype back. */
static bool has_statistics_dtype(const struct call *call, int slot)
{
    const int bits = call->tensors[slot].dtype.bits, expected = call->dtype == torch.f64 ? 64 : 32;
    return bits == expected || (slot == MEAN && bits == 64);
}

static bool take_y_dtype(struct call *call)
{
    const int32_t dtypes[] = {call->dtype, torch.f32, torch.f16, torch.bf16};
    if (call->kind == CHANNEL_NORM && call->handles[DY] != NULL)
        return torch.aoti_torch_get_dtype(call->handles[DY], &call->y_dtype) == 0 || fail(call, "");
    if (call->asked_y_dtype < 0 || call->asked_y_dtype >= (int64_t)(sizeof dtypes / sizeof dtypes[0]))
        return fail(call, "y_dtype is not one that the library knows");
    call->y_dtype = dtypes[call->asked_y_dtype];
    return true;
}

static bool take_inputs(struct call *call)
{
    tensor_handle x = call->handles[X];
    if (torch.aoti_torch_get_dtype(x, &call->dtype) || torch.aoti_torch_get_device_type(x, &call->device_type) ||
        torch.aoti_torch_get_device_index(x, &call->device_index))
        return fail(call, "");
    if (!take_y_dtype(call) || !take_big(call, X))
        return false;
    for (int32_t i = 0; i < call->input_count; i++) {
        const int slot = call->inputs[i];
        if (slot == X || call->handles[slot] == NULL)
            continue;
        const bool is_updated = (slot == RUNNING_MEAN || slot == RUNNING_VAR) && !call->evaluates;
        if (is_big(slot) ? !take_big(call, slot) : !describe(call, slot, call->handles[slot], is_updated))
            return false;
        if ((slot == MEAN || slot == RSTD) && !has_statistics_dtype(call, slot) &&
            !(empty_shaped(call, &call->copies[slot], call->handles[slot], statistics_dtype(call)) &&
              copy_to(call, call->copies[slot], call->handles[slot]) &&
              describe(call, slot, call->copies[slot], false)))
            return false;
    }
    return true;
}

/* A gradient has its parameter's shape and dtype. */
static bool make_gradient(struct call *call, int slot, tensor_handle *handle, int parameter)
{
    const normfuse_tensor *like = &call->tensors[parameter];
    int32_t dtype;
    if (torch.aoti_torch_get_dtype(call->handles[parameter], &dtype))
        return fail(call, "");
    return like->ndim > MAX_AXES ? fail(call, "a parameter has too many dimensions")
                                  : make(call, slot, handle, like->ndim, like->shape, dtype);
}

static bool is_wanted(const struct call *call, const struct operation *operation, int slot)
{
    switch (slot) {
    case U: return call->handles[PRE_ADD] != NULL || (call->handles[PRE_BIAS] != NULL && call->returns_sum);
    case DX: return call->wanted & WANT_X;
    case DWEIGHT: return (call->wanted & WANT_WEIGHT) && call->handles[WEIGHT] != NULL;
    case DBIAS: return (call->wanted & WANT_BIAS) && (call->handles[BIAS] != NULL || operation->is_aten);
    case DSCALE: return (call->wanted & WANT_SCALE) && call->handles[SCALE] != NULL;
    case DSHIFT: return (call->wanted & WANT_SHIFT) && call->handles[SHIFT] != NULL;
    case DPOST_ADD: return (call->wanted & WANT_POST_ADD) && call->handles[POST_ADD] != NULL;
    case DPRE_BIAS: return (call->wanted & WANT_PRE_BIAS) && call->handles[PRE_BIAS] != NULL;
    case DSLOPE: return (call->wanted & WANT_SLOPE) && call->handles[SLOPE] != NULL;
    case MEAN: return !call->evaluates && call->statistics != NORMFUSE_MEAN_SQUARE;
    case RSTD: return !call->evaluates;
    case RESERVE: return false;
    default: return true;
    }
}

/* In the place of an output that is not wanted. */
static bool make_placeholder(struct call *call, const struct operation *operation, int slot, tensor_handle *handle)
{
    if (operation->is_aten && slot != MEAN && slot != RSTD && slot != RESERVE)
        return torch.aoti_torch_new_uninitialized_tensor(handle) == 0 || fail(call, "");
    return empty_contiguous(call, handle, 1, (const int64_t[]){0},
                            !operation->is_aten ? call->dtype
                            : slot == RESERVE   ? torch.uint8
                                                : statistics_dtype(call));
}

/* The copy of dy, where there is one and it is as a gradient of x is made: dx, or else dpost_add, may be in its place,
 * and is one tensor less. */
static bool is_copy_of_dy_like_x(struct call *call)
{
    const tensor_handle copy = call->copies[DY];
    const size_t bytes = (size_t)call->x.axes * sizeof *call->x.sizes;
    struct shape shape;
    int64_t strides[MAX_AXES];
    int32_t dtype;
    if (copy == NULL || torch.aoti_torch_get_dtype(copy, &dtype) || dtype != call->dtype ||
        !get_shape(call, &shape, copy) || shape.axes != call->x.axes)
        return false;
    strides_like_x(call, strides);
    return memcmp(shape.sizes, call->x.sizes, bytes) == 0 && memcmp(shape.strides, strides, bytes) == 0;
}

static bool make_output(struct call *call, const struct operation *operation, int slot, tensor_handle *handle)
{
    const normfuse_tensor *x = &call->tensors[X];
    const int64_t n = x->shape[0], c = x->shape[1];
    const bool of_channels = operation->kind == BATCH_NORM;
    switch (slot) {
    case DWEIGHT: return make_gradient(call, slot, handle, WEIGHT);
    case DBIAS:
        /* aten's backwards are not told bias: it is as weight is. */
        if (operation->is_aten && call->handles[WEIGHT] == NULL)
            return make(call, slot, handle, 1, &c, call->dtype);
        return make_gradient(call, slot, handle, operation->is_aten ? WEIGHT : BIAS);
    case DSCALE: return make_gradient(call, slot, handle, SCALE);
    case DSHIFT: return make_gradient(call, slot, handle, SHIFT);
    case DPRE_BIAS: return make_gradient(call, slot, handle, PRE_BIAS);
    case DSLOPE: return make_gradient(call, slot, handle, SLOPE);
    case MEAN:
    case RSTD:
        if (operation->kind == CHANNEL_NORM)
            return make(call, slot, handle, 3,
                        (const int64_t[]){n, call->groups, elements_of(x->ndim - 2, x->shape + 2)},
                        slot == MEAN ? torch.f64 : statistics_dtype(call));
        return make(call, slot, handle, of_channels ? 1 : 2,
                    of_channels ? (const int64_t[]){c} : (const int64_t[]){n, call->groups},
                    slot == MEAN && !operation->is_aten ? torch.f64 : statistics_dtype(call));
    case STATS:
        return make(call, slot, handle, of_channels ? 2 : 3,
                    of_channels ? (const int64_t[]){c, 3} : (const int64_t[]){n, call->groups, 3}, torch.f64);
    case SUMS:
        return make(call, slot, handle, of_channels ? 2 : 3,
                    of_channels ? (const int64_t[]){c, 2} : (const int64_t[]){n, c, 2}, torch.f64);
    default:
        if ((slot == DX || slot == DPOST_ADD) && is_copy_of_dy_like_x(call)) {
            *handle = call->copies[DY];
            call->copies[DY] = NULL;
            call->tensors[slot] = call->tensors[DY];
            return true;
        }
        if (!make_like_x(call, slot, handle))
            return false;
        if (call->device_type != torch.cuda)
            normfuse_advise_huge_pages(&call->tensors[slot]);
        return true;
    }
}

static bool make_outputs(struct call *call, const struct operation *operation)
{
    if (call->kind == INSTANCE_NORM)
        call->groups = call->tensors[X].shape[1];
    if (!has_possible_groups(call))
        return false;
    if (operation->is_lean && elements_of(call->x.axes, call->x.sizes) == call->groups)
        return fail(call, "expected more than 1 value per group");
    for (int i = 0; operation->outputs[i] != END; i++) {
        const int slot = operation->outputs[i];
        if (!(is_wanted(call, operation, slot) ? make_output : make_placeholder)(call, operation, slot,
                                                                                &call->outputs[i]))
            return false;
    }
    return true;
}

/* The tensor as [C, N, ...]. */
static bool transpose(struct call *call, tensor_handle handle, tensor_handle *view)
{
    struct shape shape;
    int64_t sizes[MAX_AXES], strides[MAX_AXES];
    if (!get_shape(call, &shape, handle))
        return false;
    for (int64_t a = 0; a < shape.axes; a++) {
        const int64_t from = a < 2 ? 1 - a : a;
        sizes[a] = shape.sizes[from];
        strides[a] = shape.strides[from];
    }
    return torch.aoti_torch__reinterpret_tensor(handle, shape.axes, sizes, strides, 0, view) == 0 || fail(call, "");
}

/* Calls that the library's batch norm refuses while training and aten's takes, since aten's instance norm ends there:
 * eps <= 0, and one value a channel. It runs as group norm of one sample with a group for each channel. */
static bool separate_channels(struct call *call, const struct operation *operation)
{
    const normfuse_tensor *x = &call->tensors[X];
    int64_t values = x->shape[0];
    for (int32_t a = 2; a < x->ndim; a++)
        values *= x->shape[a];
    if (call->evaluates || values == 0 || (values != 1 && (operation->is_backward || call->eps > 0.0)))
        return true;
    call->kind = INSTANCE_NORM;
    call->groups = x->shape[1];
    if (values == 1 && call->handles[RUNNING_MEAN] != NULL && call->handles[RUNNING_VAR] != NULL) {
        /* The variance over values - 1 is not a number: the library refuses that here, too. */
        for (int i = 0; i < 2; i++) {
            call->running[i] = call->handles[RUNNING_MEAN + i];
            call->handles[RUNNING_MEAN + i] = NULL;
        }
    }
    if (x->shape[0] == 1)
        return true;
    const int64_t shape[3] = {1, call->groups, values};
    tensor_handle view = NULL;
    if (!transpose(call, call->handles[X], &view))
        return false;
    let_go(&call->copies[X], 1);
    call->copies[X] = NULL;
    const bool is_copied = empty_shaped(call, &call->copies[X], view, call->dtype) &&
                           copy_to(call, call->copies[X], view) &&
                           empty_shaped(call, &call->transposed_y, view, call->dtype) &&
                           describe(call, X, call->copies[X], false) && describe(call, Y, call->transposed_y, true);
    let_go(&view, 1);
    view_as(call, X, shape);
    view_as(call, Y, shape);
    return is_copied;
}

/* For y that was computed as [C, N, ...]. */
static bool put_transposed(struct call *call)
{
    if (call->transposed_y == NULL)
        return true;
    tensor_handle view = NULL;
    const bool is_put = transpose(call, call->outputs[0], &view) &&
                        copy_to(call, view, call->transposed_y);
    let_go(&view, 1);
    return is_put;
}

/* The namespace of the operators, and the one of them that is called here. */
static char operators[64], update_name[128];

/* Running statistics of one value a channel, by an operator in Python: no call gets here that torch.nn.functional's
 * checks have seen. */
static bool update_running_of_one_value(struct call *call)
{
    if (call->running[0] == NULL)
        return true;
    stack_value stack[4] = {(uintptr_t)call->running[0], (uintptr_t)call->running[1], (uintptr_t)call->handles[X]};
    memcpy(&stack[3], &call->momentum, sizeof call->momentum);
    call->running[0] = call->running[1] = call->handles[X] = NULL; /* the callee's */
    return torch.aoti_torch_call_dispatcher(update_name, "", stack) == 0 || fail(call, "");
}

/* The library's tasks on torch's threads: a second pool would compete with them for the cores. */
struct tasks {
    void (*task)(void *context, int64_t i);
    void *context;
};

static void run_tasks(int64_t begin, int64_t end, void *context)
{
    const struct tasks *tasks = context;
    for (int64_t i = begin; i < end; i++)
        tasks->task(tasks->context, i);
}

/* `pool` is the struct call. The library cannot be told of a failure: whoever called it looks at has_failed_tasks. */
static void parallel_for(void *pool, int64_t count, void (*task)(void *context, int64_t i), void *context)
{
    struct call *const call = pool;
    struct tasks tasks = {task, context};
    if (torch.torch_parallel_for(0, count, 1, run_tasks, &tasks)) {
        call->has_failed_tasks = true;
        fail(call, "");
    }
}

/* The library's view of what all shards gave, [shards, ...], where one gave `one`. */
static bool view_parts(struct call *call, normfuse_tensor *view, const normfuse_tensor *one)
{
    struct shape shape;
    int32_t dtype, device_type, device_index;
    if (!get_shape(call, &shape, call->parts))
        return false;
    if (torch.aoti_torch_get_dtype(call->parts, &dtype) ||
        torch.aoti_torch_get_device_type(call->parts, &device_type) ||
        torch.aoti_torch_get_device_index(call->parts, &device_index))
        return fail(call, "");
    if (device_type != call->device_type || device_index != call->device_index)
        return fail(call, "parts is on another device than the input");
    int64_t elements = elements_of(shape.axes, shape.sizes), of_one = elements_of(one->ndim, one->shape);
    if (dtype != torch.f64 || one->ndim > 3 || !is_contiguous(shape.axes, shape.sizes, shape.strides) ||
        (of_one == 0 ? elements != 0 : elements % of_one != 0))
        return fail(call, "parts is not what the shards gave, one after the other");
    *view = *one;
    view->byte_offset = 0;
    view->ndim = one->ndim + 1;
    view->shape = call->part_axes[0][0];
    view->strides = call->part_axes[0][1];
    view->shape[0] = of_one == 0 ? 1 : elements / of_one;
    memcpy(view->shape + 1, one->shape, (size_t)one->ndim * sizeof *one->shape);
    contiguous_strides(view->ndim, view->shape, view->strides);
    return get_data(call, &view->data, call->parts, false);
}

/* Stats of all shards to the output of that name; sums to `shared`, per value. */
static bool merge_parts(struct call *call, const struct operation *operation, normfuse_tensor *shared,
                        const normfuse_exec *exec)
{
    normfuse_tensor parts;
    const normfuse_tensor *one = &call->tensors[operation->is_backward ? SUMS : STATS];
    if (!view_parts(call, &parts, one))
        return false;
    if (!operation->is_backward)
        return normfuse_stats_merge(&parts, one, exec) == NORMFUSE_OK || fail(call, normfuse_last_error());
    *shared = parts;
    shared->ndim = one->ndim;
    shared->shape = memcpy(call->part_axes[1][0], one->shape, (size_t)one->ndim * sizeof *one->shape);
    shared->strides = call->part_axes[1][1];
    contiguous_strides(shared->ndim, shared->shape, shared->strides);
    return empty(call, &call->shared, shared->ndim, shared->shape, shared->strides, torch.f64) &&
           get_data(call, &shared->data, call->shared, true) &&
           (normfuse_sums_merge_per_value(&parts, &call->tensors[STATS], shared, exec) == NORMFUSE_OK ||
            fail(call, normfuse_last_error()));
}

static normfuse_status scratch_bytes(enum kind kind, bool is_backward, const union options *options,
                                     const normfuse_tensors *tensors, const normfuse_exec *exec, size_t *bytes)
{
    switch (kind) {
    case GROUP_NORM:
    case INSTANCE_NORM:
        return (is_backward ? normfuse_group_norm_backward_scratch_bytes
                                       : normfuse_group_norm_forward_scratch_bytes)(&options->group_norm, tensors, exec,
                                                                                    bytes);
    case BATCH_NORM:
        return (is_backward ? normfuse_batch_norm_backward_scratch_bytes
                                       : normfuse_batch_norm_forward_scratch_bytes)(&options->batch_norm, tensors, exec,
                                                                                    bytes);
    case CHANNEL_NORM:
        return (is_backward ? normfuse_channel_norm_backward_scratch_bytes
                                       : normfuse_channel_norm_forward_scratch_bytes)(&options->channel_norm, tensors,
                                                                                      exec, bytes);
    default:
        return (is_backward ? normfuse_affine_backward_scratch_bytes
                                       : normfuse_affine_forward_scratch_bytes)(&options->affine, tensors, exec, bytes);
    }
}

static bool prepare_exec(struct call *call, normfuse_exec *exec)
{
    if (call->device_type != torch.cuda) {
        uint32_t threads = 1;
        const int64_t elements = elements_of(call->x.axes, call->x.sizes);
        if (elements > MAX_ON_ONE_THREAD && torch.torch_get_num_threads(&threads))
            return fail(call, "");
        exec->threads = (int32_t)threads;
        exec->parallel_for = parallel_for;
        exec->pool = call;
        return true;
    }
    if (torch.aoti_torch_get_current_cuda_stream == NULL)
        return fail(call, "libtorch_cuda.so was not loaded when normfuse.torch was imported");
    return torch.aoti_torch_get_current_cuda_stream(call->device_index, &exec->stream) == 0 || fail(call, "");
}

static bool add_scratch(struct call *call, const struct operation *operation, const union options *options,
                        const normfuse_tensors *tensors, normfuse_exec *exec)
{
    if (scratch_bytes(call->kind, operation->is_backward, options, tensors, exec, &exec->scratch_bytes) != NORMFUSE_OK)
        return fail(call, normfuse_last_error());
    /* torch's allocator orders the reuse of freed memory by the stream it was allocated on, this call's. */
    if (!empty_contiguous(call, &call->scratch, 1, (const int64_t[]){(int64_t)exec->scratch_bytes}, torch.uint8))
        return false;
    return torch.torch_get_mutable_data_ptr(call->scratch, &exec->scratch) == 0 ? true : fail(call, "");
}

static normfuse_status enqueue(const struct call *call, const struct operation *operation,
                               const union options *options, const normfuse_tensors *tensors,
                               const normfuse_exec *exec)
{
    switch (call->kind) {
    case GROUP_NORM:
    case INSTANCE_NORM: return operation->group_norm(&options->group_norm, tensors, exec);
    case BATCH_NORM: return operation->batch_norm(&options->batch_norm, tensors, exec);
    case CHANNEL_NORM: return operation->channel_norm(&options->channel_norm, tensors, exec);
    default: return operation->affine(&options->affine, tensors, exec);
    }
}

static bool call_library(struct call *call, const struct operation *operation, const union options *options,
                         const normfuse_tensors *tensors, normfuse_exec exec)
{
    void *const acquired = call->device_type == torch.cuda ? normfuse_stream_acquire(call->device_index, &exec) : NULL;
    normfuse_status status = enqueue(call, operation, options, tensors, &exec);
    normfuse_stream_release(acquired);
    if (status == NORMFUSE_SCRATCH) {
        exec.scratch = NULL;
        if (!add_scratch(call, operation, options, tensors, &exec))
            return false;
        status = enqueue(call, operation, options, tensors, &exec);
    }
    return status == NORMFUSE_OK && !call->has_failed_tasks ? true : fail(call, normfuse_last_error());
}

/* The gradients of parameters of this shard's sums, those of x and pre_bias of the sums of all. */
static bool call_library_of_shards(struct call *call, const struct operation *operation, const union options *options,
                                   normfuse_tensors tensors, const normfuse_exec *exec)
{
    normfuse_tensors of_parameters = tensors;
    of_parameters.dx = of_parameters.dpre_bias = of_parameters.du = of_parameters.pre_bias = NULL;
    of_parameters.stats = tensors.stats = NULL;
    if ((tensors.dweight != NULL || tensors.dbias != NULL || tensors.dscale != NULL || tensors.dshift != NULL) &&
        !call_library(call, operation, options, &of_parameters, *exec))
        return false;
    if (tensors.dx == NULL)
        return true;
    let_go(&call->scratch, 1);
    call->scratch = NULL;
    normfuse_tensor shared;
    tensors.dweight = tensors.dbias = tensors.dscale = tensors.dshift = NULL;
    tensors.sums = &shared;
    return merge_parts(call, operation, &shared, exec) && call_library(call, operation, options, &tensors, *exec);
}

static bool compute(struct call *call, const struct operation *operation)
{
    normfuse_tensors tensors = {.struct_bytes = sizeof tensors};
    const normfuse_tensor **slots = &tensors.x;
    for (int32_t i = 0; i < call->input_count; i++)
        if (call->handles[call->inputs[i]] != NULL)
            slots[call->inputs[i]] = &call->tensors[call->inputs[i]];
    if (operation->is_backward && (call->wanted & FROM_Y)) {
        slots[Y] = slots[POST_ADD];
        slots[POST_ADD] = NULL;
    }
    if (call->wanted & FROM_U)
        slots[PRE_BIAS] = NULL;
    for (int i = 0; operation->outputs[i] != END; i++) {
        const int slot = operation->outputs[i];
        if (is_wanted(call, operation, slot))
            slots[slot] = &call->tensors[slot];
    }

    const uint32_t flags = (call->evaluates ? NORMFUSE_EVALUATE : 0) | NORMFUSE_HAS_ACT_PARAM;
    const int32_t activation = (int32_t)call->activation;
    const int64_t set_values = operation->merges && operation->is_backward ? NORMFUSE_PER_VALUE : 0;
    const int32_t statistics = (int32_t)call->statistics, eps_kind = (int32_t)call->eps_kind;
    if (activation != call->activation)
        return fail(call, "activation is not one that the library knows");
    if (statistics != call->statistics || eps_kind != call->eps_kind)
        return fail(call, "statistics or eps_kind is not one that the library knows");
    union options options;
    switch (call->kind) {
    case GROUP_NORM:
    case INSTANCE_NORM:
        options.group_norm = (normfuse_group_norm_options){
            .struct_bytes = sizeof options.group_norm, .flags = flags, .groups = call->groups, .eps = call->eps,
            .activation = activation, .act_param = call->act_param, .momentum = call->momentum,
            .set_values = set_values};
        break;
    case BATCH_NORM:
        options.batch_norm = (normfuse_batch_norm_options){
            .struct_bytes = sizeof options.batch_norm, .flags = flags, .eps = call->eps, .activation = activation,
            .act_param = call->act_param, .momentum = call->momentum, .set_values = set_values};
        break;
    case AFFINE:
        options.affine = (normfuse_affine_options){.struct_bytes = sizeof options.affine, .flags = flags,
                                                   .activation = activation, .act_param = call->act_param};
        break;
    case CHANNEL_NORM:
        options.channel_norm = (normfuse_channel_norm_options){
            .struct_bytes = sizeof options.channel_norm, .flags = flags, .groups = call->groups, .eps = call->eps,
            .statistics = statistics, .eps_kind = eps_kind, .activation = activation, .act_param = call->act_param};
        break;
    }
    normfuse_exec exec = {.struct_bytes = sizeof exec};
    if (!prepare_exec(call, &exec))
        return false;
    if (!operation->merges)
        return call_library(call, operation, &options, &tensors, exec);
    if (operation->is_backward)
        return call_library_of_shards(call, operation, &options, tensors, &exec);
    return merge_parts(call, operation, NULL, &exec) && call_library(call, operation, &options, &tensors, exec);
}

/* Throws a C++ exception, which crosses this frame and its callers': nothing of theirs may be left to let go. */
static void raise_error(const char *problem)
{
    char message[1024];
    static const char unknown[] = "libtorch refused a call (out of memory?)";
    const char *said = unknown;
    if (problem[0] != '\0')
        said = problem;
    else if (torch.torch_exception_get_what_without_backtrace != NULL)
        said = torch.torch_exception_get_what_without_backtrace();
    if (said == NULL || said[0] == '\0')
        said = unknown;
    snprintf(message, sizeof message, "%s", said);
    torch.aoti_torch_check(false, "normfuse", "torch.c", 0, message);
}

static void run(const struct operation *operation, stack_value *stack)
{
    struct call call;
    memset(&call, 0, offsetof(struct call, tensors));
    call.kind = operation->kind;
    call.evaluates = operation->evaluates;
    call.eps = 1.0; /* of calls that have rstd instead */
    call.positions = -1;
    call.wanted = WANT_X | WANT_WEIGHT | WANT_BIAS; /* where nothing says */
    call.returns_sum = true;
    take_arguments(&call, operation, stack);
    if (operation->is_aten && operation->is_backward && !call.evaluates)
        call.eps = 1.0;
    const bool is_aten_batch_norm = operation->is_aten && operation->kind == BATCH_NORM;
    const bool succeeded = call.problem == NULL && (!operation->is_aten || drop_what_is_none(&call, operation)) &&
                           take_inputs(&call) && make_outputs(&call, operation) &&
                           (!is_aten_batch_norm || separate_channels(&call, operation)) && compute(&call, operation) &&
                           put_transposed(&call) && update_running_of_one_value(&call);
    for (int32_t i = 0; i < call.input_count; i++) {
        let_go(&call.handles[call.inputs[i]], 1);
        let_go(&call.copies[call.inputs[i]], 1);
    }
    let_go(&call.scratch, 1);
    let_go(&call.parts, 1);
    let_go(&call.shared, 1);
    let_go(&call.transposed_y, 1);
    let_go(call.running, 2);
    if (!succeeded) {
        let_go(call.outputs, MAX_OUTPUTS);
        raise_error(call.problem);
        return;
    }
    for (int i = 0; operation->outputs[i] != END; i++)
        stack[i] = (stack_value)(uintptr_t)call.outputs[i];
}

/* ---- the operators, in the order of their schemas --------------------------------------------------------------- */

#define O(argument) (argument | OPTIONAL)
#define NORM X, O(WEIGHT), O(BIAS)
#define GIVEN_NORM X, WEIGHT, BIAS
#define ADAPTIVE O(SCALE), O(SHIFT)
#define RUNNING O(RUNNING_MEAN), O(RUNNING_VAR)
#define GIVEN_RUNNING RUNNING_MEAN, RUNNING_VAR
#define AFTER O(POST_ADD), O(SLOPE)
#define ADDS O(PRE_BIAS), O(PRE_ADD), AFTER
#define BACK O(PRE_BIAS), AFTER
#define ACT ACTIVATION, ACT_PARAM
#define OF_CHANNELS STATISTICS, EPS_KIND
#define GRADIENT_OF(...) DY, O(DU), X, __VA_ARGS__, O(WEIGHT), O(BIAS)

/* The kernel is named after the operator; what follows the name fills a struct operation. */
#define OPERATION(name, ...)                                                                                           \
    static void name(stack_value *stack, uint64_t inputs, uint64_t outputs)                                            \
    {                                                                                                                  \
        static const struct operation operation = {__VA_ARGS__};                                                       \
        (void)inputs;                                                                                                  \
        (void)outputs;                                                                                                 \
        run(&operation, stack);                                                                                        \
    }

OPERATION(group_norm, .kind = GROUP_NORM, .group_norm = normfuse_group_norm_forward,
          .arguments = {NORM, ADAPTIVE, ADDS, GROUPS, EPS, ACT, RETURN_SUM, END}, .outputs = {Y, U, MEAN, RSTD, END})
OPERATION(group_norm_inference, .kind = GROUP_NORM, .group_norm = normfuse_group_norm_forward,
          .arguments = {NORM, ADAPTIVE, ADDS, GROUPS, EPS, ACT, END}, .outputs = {Y, END})
OPERATION(group_norm_backward, .kind = GROUP_NORM, .group_norm = normfuse_group_norm_backward, .is_backward = true,
          .arguments = {GRADIENT_OF(MEAN, RSTD), ADAPTIVE, BACK, GROUPS, EPS, ACT, WANTED, END},
          .outputs = {DX, DWEIGHT, DBIAS, DSCALE, DSHIFT, DPOST_ADD, DPRE_BIAS, DSLOPE, END})
OPERATION(instance_norm, .kind = INSTANCE_NORM, .group_norm = normfuse_group_norm_forward,
          .arguments = {NORM, RUNNING, ADDS, MOMENTUM, EPS, ACT, RETURN_SUM, END},
          .outputs = {Y, U, MEAN, RSTD, END})
OPERATION(batch_norm, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_forward,
          .arguments = {NORM, RUNNING, ADDS, MOMENTUM, EPS, ACT, RETURN_SUM, END},
          .outputs = {Y, U, MEAN, RSTD, END})
OPERATION(batch_norm_backward, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_backward, .is_backward = true,
          .arguments = {GRADIENT_OF(MEAN, RSTD), BACK, EPS, ACT, WANTED, END},
          .outputs = {DX, DWEIGHT, DBIAS, DPOST_ADD, DPRE_BIAS, DSLOPE, END})
OPERATION(batch_norm_evaluate, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_forward,
          .evaluates = true, .arguments = {NORM, GIVEN_RUNNING, ADDS, EPS, ACT, RETURN_SUM, END},
          .outputs = {Y, U, END})
OPERATION(batch_norm_inference, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_forward,
          .evaluates = true, .arguments = {NORM, GIVEN_RUNNING, ADDS, EPS, ACT, END}, .outputs = {Y, END})
OPERATION(batch_norm_evaluate_backward, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_backward,
          .evaluates = true, .is_backward = true,
          .arguments = {GRADIENT_OF(GIVEN_RUNNING), BACK, EPS, ACT, WANTED, END},
          .outputs = {DX, DWEIGHT, DBIAS, DPOST_ADD, DPRE_BIAS, DSLOPE, END})
OPERATION(channel_affine, .kind = AFFINE, .affine = normfuse_affine_forward,
          .arguments = {NORM, AFTER, ACT, END}, .outputs = {Y, END})
OPERATION(channel_affine_backward, .kind = AFFINE, .affine = normfuse_affine_backward, .is_backward = true,
          .arguments = {DY, NORM, AFTER, ACT, WANTED, END}, .outputs = {DX, DWEIGHT, DBIAS, DPOST_ADD, DSLOPE, END})
OPERATION(channel_norm, .kind = CHANNEL_NORM, .channel_norm = normfuse_channel_norm_forward,
          .arguments = {NORM, ADAPTIVE, ADDS, GROUPS, EPS, OF_CHANNELS, ACT, Y_DTYPE, CHANNELS_LAST, RETURN_SUM, END},
          .outputs = {Y, U, MEAN, RSTD, END})
OPERATION(channel_norm_inference, .kind = CHANNEL_NORM, .channel_norm = normfuse_channel_norm_forward,
          .arguments = {NORM, ADAPTIVE, ADDS, GROUPS, EPS, OF_CHANNELS, ACT, Y_DTYPE, CHANNELS_LAST, END},
          .outputs = {Y, END})
OPERATION(channel_norm_backward, .kind = CHANNEL_NORM, .channel_norm = normfuse_channel_norm_backward,
          .is_backward = true,
          .arguments = {GRADIENT_OF(O(MEAN), RSTD), ADAPTIVE, BACK, GROUPS, EPS, OF_CHANNELS, ACT, WANTED, END},
          .outputs = {DX, DWEIGHT, DBIAS, DSCALE, DSHIFT, DPOST_ADD, DPRE_BIAS, DSLOPE, END})
OPERATION(group_norm_stats, .kind = GROUP_NORM, .group_norm = normfuse_group_norm_stats,
          .arguments = {X, O(PRE_BIAS), O(PRE_ADD), GROUPS, END}, .outputs = {STATS, U, END})
OPERATION(group_norm_apply, .kind = GROUP_NORM, .group_norm = normfuse_group_norm_apply,
          .merges = true,
          .arguments = {X, PARTS, O(WEIGHT), O(BIAS), ADAPTIVE, AFTER, GROUPS, EPS, ACT, END},
          .outputs = {Y, MEAN, RSTD, STATS, END})
OPERATION(group_norm_backward_sums, .kind = GROUP_NORM, .group_norm = normfuse_group_norm_backward_sums,
          .is_backward = true,
          .arguments = {DY, X, MEAN, RSTD, O(WEIGHT), O(BIAS), ADAPTIVE, AFTER, GROUPS, ACT, WANTED, END},
          .outputs = {SUMS, DPOST_ADD, DSLOPE, END})
OPERATION(group_norm_backward_apply, .kind = GROUP_NORM, .group_norm = normfuse_group_norm_backward_apply,
          .is_backward = true, .merges = true,
          .arguments = {GRADIENT_OF(MEAN, RSTD, SUMS, PARTS, STATS), ADAPTIVE, BACK, GROUPS, ACT,
                        WANTED, END},
          .outputs = {DX, DWEIGHT, DBIAS, DSCALE, DSHIFT, DPRE_BIAS, END})
OPERATION(batch_norm_stats, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_stats,
          .arguments = {X, O(PRE_BIAS), O(PRE_ADD), END}, .outputs = {STATS, U, END})
OPERATION(batch_norm_apply, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_apply,
          .merges = true,
          .arguments = {X, PARTS, O(WEIGHT), O(BIAS), RUNNING, AFTER, MOMENTUM, EPS, ACT, END},
          .outputs = {Y, MEAN, RSTD, STATS, END})
OPERATION(batch_norm_backward_sums, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_backward_sums,
          .is_backward = true,
          .arguments = {DY, X, MEAN, RSTD, O(WEIGHT), O(BIAS), AFTER, ACT, WANTED, END},
          .outputs = {SUMS, DPOST_ADD, DSLOPE, END})
OPERATION(batch_norm_backward_apply, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_backward_apply,
          .is_backward = true, .merges = true,
          .arguments = {GRADIENT_OF(MEAN, RSTD, SUMS, PARTS, STATS), BACK, ACT, WANTED, END},
          .outputs = {DX, DWEIGHT, DBIAS, DPRE_BIAS, END})

/* The same without what is seldom given: the eager path's, which pays for every argument and output. */
OPERATION(lean_group_norm, .is_lean = true, .kind = GROUP_NORM, .group_norm = normfuse_group_norm_forward,
          .arguments = {NORM, GROUPS, EPS, ACT, END}, .outputs = {Y, MEAN, RSTD, END})
OPERATION(lean_group_norm_inference, .is_lean = true, .kind = GROUP_NORM, .group_norm = normfuse_group_norm_forward,
          .arguments = {NORM, GROUPS, EPS, ACT, END}, .outputs = {Y, END})
OPERATION(lean_group_norm_backward, .kind = GROUP_NORM, .group_norm = normfuse_group_norm_backward, .is_backward = true,
          .arguments = {DY, X, MEAN, RSTD, O(WEIGHT), O(BIAS), GROUPS, ACT, WANTED, END},
          .outputs = {DX, DWEIGHT, DBIAS, END})
OPERATION(lean_batch_norm, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_forward,
          .arguments = {GIVEN_NORM, GIVEN_RUNNING, MOMENTUM, EPS, ACT, END}, .outputs = {Y, MEAN, RSTD, END})
OPERATION(lean_batch_norm_add, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_forward,
          .arguments = {GIVEN_NORM, POST_ADD, GIVEN_RUNNING, MOMENTUM, EPS, ACT, END}, .outputs = {Y, MEAN, RSTD, END})
OPERATION(lean_batch_norm_forward_only, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_forward,
          .arguments = {GIVEN_NORM, GIVEN_RUNNING, MOMENTUM, EPS, ACT, END}, .outputs = {Y, END})
OPERATION(lean_batch_norm_inference, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_forward,
          .evaluates = true, .arguments = {GIVEN_NORM, GIVEN_RUNNING, EPS, ACT, END}, .outputs = {Y, END})
OPERATION(lean_batch_norm_backward, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_backward, .is_backward = true,
          .arguments = {DY, X, MEAN, RSTD, WEIGHT, BIAS, ACT, WANTED, END},
          .outputs = {DX, DWEIGHT, DBIAS, END})
OPERATION(lean_batch_norm_add_backward, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_backward,
          .is_backward = true, .arguments = {DY, X, MEAN, RSTD, WEIGHT, BIAS, POST_ADD, ACT, WANTED, END},
          .outputs = {DX, DWEIGHT, DBIAS, DPOST_ADD, END})
OPERATION(lean_batch_norm_evaluate_backward, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_backward,
          .evaluates = true, .is_backward = true,
          .arguments = {DY, X, GIVEN_RUNNING, WEIGHT, BIAS, EPS, ACT, WANTED, END},
          .outputs = {DX, DWEIGHT, DBIAS, END})

OPERATION(lean_batch_norm_stats, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_stats,
          .arguments = {X, END}, .outputs = {STATS, END})
OPERATION(lean_batch_norm_apply, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_apply, .merges = true,
          .arguments = {X, PARTS, WEIGHT, BIAS, GIVEN_RUNNING, MOMENTUM, EPS, ACT, END},
          .outputs = {Y, MEAN, RSTD, STATS, END})
OPERATION(lean_batch_norm_backward_sums, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_backward_sums,
          .is_backward = true, .arguments = {DY, X, MEAN, RSTD, WEIGHT, BIAS, ACT, END}, .outputs = {SUMS, END})
OPERATION(lean_batch_norm_backward_apply, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_backward_apply,
          .is_backward = true, .merges = true,
          .arguments = {DY, X, MEAN, RSTD, SUMS, PARTS, STATS, WEIGHT, BIAS, ACT, WANTED, END},
          .outputs = {DX, DWEIGHT, DBIAS, END})

/* aten's own operators. What they save is what aten's kernels save, so that each may be differentiated by the other. */
#define ATEN_GROUP_NORM .is_aten = true, .kind = GROUP_NORM
#define ATEN_BATCH_NORM                                                                                                \
    .is_aten = true, .kind = BATCH_NORM, .batch_norm = normfuse_batch_norm_forward,                                    \
    .group_norm = normfuse_group_norm_forward
#define ATEN_BATCH_NORM_BACKWARD                                                                                       \
    .is_aten = true, .kind = BATCH_NORM, .is_backward = true, .batch_norm = normfuse_batch_norm_backward,              \
    .group_norm = normfuse_group_norm_backward
#define GIVEN_SAVED O(MEAN), O(RSTD)

OPERATION(native_group_norm, ATEN_GROUP_NORM, .group_norm = normfuse_group_norm_forward,
          .arguments = {NORM, SAMPLES, CHANNELS, POSITIONS, GROUPS, EPS, END}, .outputs = {Y, MEAN, RSTD, END})
OPERATION(native_group_norm_backward, ATEN_GROUP_NORM, .is_backward = true, .group_norm = normfuse_group_norm_backward,
          .arguments = {DY, X, MEAN, RSTD, O(WEIGHT), SAMPLES, CHANNELS, POSITIONS, GROUPS, MASK, END},
          .outputs = {DX, DWEIGHT, DBIAS, END})
OPERATION(native_batch_norm, ATEN_BATCH_NORM, .arguments = {NORM, RUNNING, TRAIN, MOMENTUM, EPS, END},
          .outputs = {Y, MEAN, RSTD, END})
OPERATION(native_batch_norm_backward, ATEN_BATCH_NORM_BACKWARD,
          .arguments = {DY, X, O(WEIGHT), RUNNING, GIVEN_SAVED, TRAIN, EPS, MASK, END},
          .outputs = {DX, DWEIGHT, DBIAS, END})
OPERATION(native_batch_norm_legit, ATEN_BATCH_NORM, .arguments = {NORM, GIVEN_RUNNING, TRAIN, MOMENTUM, EPS, END},
          .outputs = {Y, MEAN, RSTD, END})
OPERATION(native_batch_norm_legit_no_stats, ATEN_BATCH_NORM, .arguments = {NORM, TRAIN, MOMENTUM, EPS, END},
          .outputs = {Y, MEAN, RSTD, END})
OPERATION(batch_norm_with_update, ATEN_BATCH_NORM, .arguments = {NORM, GIVEN_RUNNING, MOMENTUM, EPS, END},
          .outputs = {Y, MEAN, RSTD, RESERVE, END})
OPERATION(batch_norm_no_update, ATEN_BATCH_NORM, .evaluates = true, .arguments = {NORM, RUNNING, MOMENTUM, EPS, END},
          .outputs = {Y, MEAN, RSTD, RESERVE, END})
OPERATION(aten_batch_norm_backward, ATEN_BATCH_NORM_BACKWARD,
          .arguments = {DY, X, WEIGHT, RUNNING, GIVEN_SAVED, TRAIN, EPS, MASK, RESERVE, END},
          .outputs = {DX, DWEIGHT, DBIAS, END})
OPERATION(cudnn_batch_norm, ATEN_BATCH_NORM, .arguments = {X, WEIGHT, O(BIAS), RUNNING, TRAIN, MOMENTUM, EPS, END},
          .outputs = {Y, MEAN, RSTD, RESERVE, END})
OPERATION(cudnn_batch_norm_backward, ATEN_BATCH_NORM_BACKWARD,
          .arguments = {X, DY, WEIGHT, RUNNING, GIVEN_SAVED, EPS, RESERVE, END}, .outputs = {DX, DWEIGHT, DBIAS, END})

/* ---- registration ---------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    kernel *kernel;
} kernels[] = {
#define KERNEL(name) {#name, name}
    KERNEL(group_norm),
    KERNEL(group_norm_inference),
    KERNEL(group_norm_backward),
    KERNEL(instance_norm),
    KERNEL(batch_norm),
    KERNEL(batch_norm_backward),
    KERNEL(batch_norm_evaluate),
    KERNEL(batch_norm_inference),
    KERNEL(batch_norm_evaluate_backward),
    KERNEL(channel_affine),
    KERNEL(channel_affine_backward),
    KERNEL(channel_norm),
    KERNEL(channel_norm_inference),
    KERNEL(channel_norm_backward),
    KERNEL(group_norm_stats),
    KERNEL(group_norm_apply),
    KERNEL(group_norm_backward_sums),
    KERNEL(group_norm_backward_apply),
    KERNEL(batch_norm_stats),
    KERNEL(batch_norm_apply),
    KERNEL(batch_norm_backward_sums),
    KERNEL(batch_norm_backward_apply),
    KERNEL(lean_group_norm),
    KERNEL(lean_group_norm_inference),
    KERNEL(lean_group_norm_backward),
    KERNEL(lean_batch_norm),
    KERNEL(lean_batch_norm_add),
    KERNEL(lean_batch_norm_forward_only),
    KERNEL(lean_batch_norm_inference),
    KERNEL(lean_batch_norm_backward),
    KERNEL(lean_batch_norm_add_backward),
    KERNEL(lean_batch_norm_evaluate_backward),
    KERNEL(lean_batch_norm_stats),
    KERNEL(lean_batch_norm_apply),
    KERNEL(lean_batch_norm_backward_sums),
    KERNEL(lean_batch_norm_backward_apply),
#undef KERNEL
};

/* The name of aten's operator, with its overload. */
static const struct {
    const char *name;
    kernel *kernel;
    bool is_of_cuda; /* alone */
} aten_kernels[] = {
    {"native_group_norm", native_group_norm, false},
    {"native_group_norm_backward", native_group_norm_backward, false},
    {"native_batch_norm", native_batch_norm, false},
    {"native_batch_norm_backward", native_batch_norm_backward, false},
    {"_native_batch_norm_legit", native_batch_norm_legit, false},
    {"_native_batch_norm_legit.no_stats", native_batch_norm_legit_no_stats, false},
    {"_batch_norm_with_update", batch_norm_with_update, false},
    {"_batch_norm_no_update", batch_norm_no_update, false},
    {"batch_norm_backward", aten_batch_norm_backward, false},
    {"cudnn_batch_norm", cudnn_batch_norm, true},
    {"cudnn_batch_norm_backward", cudnn_batch_norm_backward, true},
};

/* ISO C has no conversion from an object pointer to a function pointer; POSIX promises that this one works. */
static bool look_up(void *library, const char *name, void *function)
{
    void *const symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

static const char *look_up_all(void *library)
{
    static char missing[128];
#define NEEDED(name)                                                                                                   \
    if (!look_up(library, #name, &torch.name)) {                                                                       \
        snprintf(missing, sizeof missing, "this libtorch has no %s", #name);                                           \
        return missing;                                                                                                \
    }
    NEEDED(aoti_torch_library_init_impl)
    NEEDED(aoti_torch_library_impl)
    NEEDED(aoti_torch_delete_library_object)
    NEEDED(aoti_torch_get_dim)
    NEEDED(aoti_torch_get_sizes)
    NEEDED(aoti_torch_get_strides)
    NEEDED(aoti_torch_get_dtype)
    NEEDED(aoti_torch_get_device_type)
    NEEDED(aoti_torch_get_device_index)
    NEEDED(torch_get_mutable_data_ptr)
    NEEDED(torch_get_const_data_ptr)
    NEEDED(aoti_torch_empty_strided)
    NEEDED(aoti_torch_copy_)
    NEEDED(aoti_torch_delete_tensor_object)
    NEEDED(aoti_torch_check)
    NEEDED(torch_get_num_threads)
    NEEDED(torch_parallel_for)
    NEEDED(aoti_torch_dtype_float64)
    NEEDED(aoti_torch_dtype_float32)
    NEEDED(aoti_torch_dtype_float16)
    NEEDED(aoti_torch_dtype_bfloat16)
    NEEDED(aoti_torch_dtype_uint8)
    NEEDED(aoti_torch_device_type_cuda)
    NEEDED(aoti_torch_is_defined)
    NEEDED(aoti_torch_new_uninitialized_tensor)
    NEEDED(aoti_torch__reinterpret_tensor)
    NEEDED(torch_list_get_item)
    NEEDED(torch_delete_list)
    NEEDED(aoti_torch_call_dispatcher)
#undef NEEDED
    if (!look_up(library, "torch_delete_stable_ivalue", &torch.torch_delete_stable_ivalue) &&
        !look_up(library, "_ZdlPv", &torch.operator_delete))
        return "this process has no C++ operator delete to free optional arguments with";
    look_up(library, "torch_exception_get_what_without_backtrace", &torch.torch_exception_get_what_without_backtrace);
    void *const cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL);
    if (cuda != NULL && !look_up(cuda, "aoti_torch_get_current_cuda_stream", &torch.aoti_torch_get_current_cuda_stream))
        return "this libtorch_cuda has no aoti_torch_get_current_cuda_stream";
    return NULL;
}

static bool register_for(const char *dispatch_key, library_handle *library)
{
    if (torch.aoti_torch_library_init_impl(operators, dispatch_key, "torch.c", 0, library))
        return false;
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (torch.aoti_torch_library_impl(*library, kernels[i].name, kernels[i].kernel))
            return false;
    return true;
}

const char *normfuse_torch_register(const char *name_space)
{
    if (strlen(name_space) >= sizeof operators)
        return "the name of the operators' namespace is too long";
    /* Already there: `import torch` loads it. */
    void *const library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL);
    if (library == NULL)
        return "libtorch_cpu.so is not loaded";
    const char *const missing = look_up_all(library);
    if (missing != NULL)
        return missing;
    torch.f64 = torch.aoti_torch_dtype_float64();
    torch.f32 = torch.aoti_torch_dtype_float32();
    torch.f16 = torch.aoti_torch_dtype_float16();
    torch.bf16 = torch.aoti_torch_dtype_bfloat16();
    torch.uint8 = torch.aoti_torch_dtype_uint8();
    torch.cuda = torch.aoti_torch_device_type_cuda();
    (void)snprintf(operators, sizeof operators, "%s", name_space);
    (void)snprintf(update_name, sizeof update_name, "%s::update_running_of_one_value", name_space);
    /* Kept to the end of the process: letting them go takes the kernels back. */
    library_handle cpu = NULL, cuda = NULL;
    if (register_for("CPU", &cpu) && register_for("CUDA", &cuda))
        return NULL;
    if (cpu != NULL)
        (void)torch.aoti_torch_delete_library_object(cpu);
    if (cuda != NULL)
        (void)torch.aoti_torch_delete_library_object(cuda);
    return "libtorch refused the registration of a kernel";
}

static library_handle aten_cpu, aten_cuda;

const char *normfuse_torch_install(void)
{
    if (torch.aoti_torch_library_impl == NULL)
        return "normfuse_torch_register comes before";
    if (aten_cpu != NULL)
        return NULL;
    bool succeeded = torch.aoti_torch_library_init_impl("aten", "CPU", "torch.c", 0, &aten_cpu) == 0 &&
                     torch.aoti_torch_library_init_impl("aten", "CUDA", "torch.c", 0, &aten_cuda) == 0;
    for (size_t i = 0; succeeded && i < sizeof aten_kernels / sizeof aten_kernels[0]; i++) {
        const char *const name = aten_kernels[i].name;
        kernel *const function = aten_kernels[i].kernel;
        succeeded = (aten_kernels[i].is_of_cuda || torch.aoti_torch_library_impl(aten_cpu, name, function) == 0) &&
                    torch.aoti_torch_library_impl(aten_cuda, name, function) == 0;
    }
    if (succeeded)
        return NULL;
    normfuse_torch_uninstall();
    return "libtorch refused to override a kernel";
}

void normfuse_torch_uninstall(void)
{
    library_handle *const libraries[] = {&aten_cpu, &aten_cuda};
    for (int i = 0; i < 2; i++) {
        if (*libraries[i] != NULL)
            (void)torch.aoti_torch_delete_library_object(*libraries[i]);
        *libraries[i] = NULL;
    }
}
