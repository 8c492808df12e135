/* SPDX-License-Identifier: MIT
 *
 * fake_torch.c - see fake_torch.h. Made into a libtorch_cpu.so for tests. */
#include "fake_torch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int32_t torch_error;

enum { MAX_AXES = 8, MAX_KERNELS = 128 };

struct torch_tensor {
    int64_t axes, sizes[MAX_AXES], strides[MAX_AXES];
    int32_t dtype;
    bool is_view;
    char *data;
};

struct torch_list {
    bool items[3];
};

static struct fake_torch state = {.library = "normfuse"};

static struct {
    char library[16], name[64];
    fake_kernel *kernel;
} kernels[MAX_KERNELS];
static int kernel_count;
static char libraries[4][16]; /* those of CPU kernels; "" of others */
static int library_count;

/* The error of a call that may fail: 1 where its turn has come. */
static torch_error fails(const char *name)
{
    if (++state.calls != state.fails_at)
        return 0;
    state.failed = name;
    return 1;
}

#define FAILS fails(__func__)

static int64_t bytes_of(int32_t dtype)
{
    return dtype == FAKE_F64 ? 8 : dtype == FAKE_F32 ? 4 : dtype == FAKE_UINT8 ? 1 : 2;
}

static struct torch_tensor *make_tensor(int64_t axes, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                                        char *data)
{
    struct torch_tensor *const tensor = calloc(1, sizeof *tensor);
    if (tensor == NULL || axes > MAX_AXES)
        abort();
    int64_t elements = 1;
    tensor->axes = axes;
    for (int64_t a = 0; a < axes; a++) {
        tensor->sizes[a] = sizes[a];
        tensor->strides[a] = strides[a];
        elements += (sizes[a] - 1) * strides[a];
    }
    tensor->dtype = dtype;
    tensor->is_view = data != NULL;
    tensor->data = data != NULL ? data : aligned_alloc(64, (size_t)(elements * 8 + 63) / 64 * 64);
    if (tensor->data == NULL)
        abort();
    if (data == NULL)
        memset(tensor->data, 0xff, (size_t)(elements * bytes_of(dtype)));
    state.live++;
    return tensor;
}

static void row_major(int64_t axes, const int64_t *sizes, int64_t *strides)
{
    int64_t step = 1;
    for (int64_t a = axes - 1; a >= 0; a--) {
        strides[a] = step;
        step *= sizes[a];
    }
}

static void release(void *handle)
{
    struct torch_tensor *const tensor = handle;
    if (!tensor->is_view)
        free(tensor->data);
    free(tensor);
    state.live--;
}

/* The offset in elements of the i-th element in row-major order. */
static int64_t offset_of(const struct torch_tensor *tensor, int64_t i)
{
    int64_t offset = 0;
    for (int64_t a = tensor->axes - 1; a >= 0; a--) {
        offset += i % tensor->sizes[a] * tensor->strides[a];
        i /= tensor->sizes[a];
    }
    return offset;
}

static int64_t elements_of(const struct torch_tensor *tensor)
{
    int64_t elements = 1;
    for (int64_t a = 0; a < tensor->axes; a++)
        elements *= tensor->sizes[a];
    return elements;
}

/* ---- what tests call ------------------------------------------------------------------------------------------ */

static void *test_tensor(int64_t axes, const int64_t *sizes, int32_t dtype)
{
    int64_t strides[MAX_AXES];
    row_major(axes, sizes, strides);
    struct torch_tensor *const tensor = make_tensor(axes, sizes, strides, dtype, NULL);
    for (int64_t i = 0; i < elements_of(tensor); i++) {
        const double value = 0.5 + (double)(i % 2);
        const float narrow = (float)value;
        if (dtype == FAKE_F64)
            memcpy(tensor->data + i * 8, &value, sizeof value);
        else if (dtype == FAKE_F32)
            memcpy(tensor->data + i * 4, &narrow, sizeof narrow);
        else
            memset(tensor->data + i * bytes_of(dtype), 0, (size_t)bytes_of(dtype));
    }
    return tensor;
}

static void set_strides(void *tensor, const int64_t *strides)
{
    struct torch_tensor *const of = tensor;
    memcpy(of->strides, strides, (size_t)of->axes * sizeof *strides);
}

static uint64_t *cell(void *tensor)
{
    uint64_t *const made = malloc(sizeof *made);
    if (made == NULL)
        abort();
    *made = (uintptr_t)tensor;
    state.live++;
    return made;
}

static void *mask(bool first, bool second, bool third)
{
    struct torch_list *const list = malloc(sizeof *list);
    if (list == NULL)
        abort();
    *list = (struct torch_list){{first, second, third}};
    state.live++;
    return list;
}

static const void *data(void *tensor)
{
    return ((struct torch_tensor *)tensor)->data;
}

static fake_kernel *kernel_of(const char *name)
{
    for (int i = 0; i < kernel_count; i++)
        if (strcmp(kernels[i].library, state.library) == 0 && strcmp(kernels[i].name, name) == 0)
            return kernels[i].kernel;
    return NULL;
}

const struct fake_torch_table *fake_torch_table(void)
{
    static const struct fake_torch_table table = {&state,  test_tensor, set_strides, cell,
                                                  mask, release,     data,        kernel_of};
    return &table;
}

/* ---- what src/bindings/torch.c calls ---------------------------------------------------------------------------- */

#define DTYPE(name, value)                                                                                             \
    int32_t aoti_torch_##name(void);                                                                                   \
    int32_t aoti_torch_##name(void)                                                                                    \
    {                                                                                                                  \
        return value;                                                                                                  \
    }
DTYPE(dtype_float64, FAKE_F64)
DTYPE(dtype_float32, FAKE_F32)
DTYPE(dtype_float16, FAKE_F16)
DTYPE(dtype_bfloat16, FAKE_BF16)
DTYPE(dtype_uint8, FAKE_UINT8)
DTYPE(device_type_cuda, FAKE_CUDA)

/* Declares the function before it is defined, as -Wmissing-prototypes asks. */
#define FUNCTION(name, ...)                                                                                            \
    torch_error name(__VA_ARGS__);                                                                                     \
    torch_error name(__VA_ARGS__)

FUNCTION(aoti_torch_library_init_impl, const char *library, const char *key, const char *file, uint32_t line,
         void **handle)
{
    (void)file;
    (void)line;
    if (FAILS)
        return 1;
    snprintf(libraries[library_count], sizeof libraries[0], "%s", strcmp(key, "CPU") == 0 ? library : "");
    *handle = libraries[library_count++];
    return 0;
}

FUNCTION(aoti_torch_library_impl, void *library, const char *name, fake_kernel *kernel)
{
    if (FAILS)
        return 1;
    snprintf(kernels[kernel_count].library, sizeof kernels[0].library, "%s", (const char *)library);
    snprintf(kernels[kernel_count].name, sizeof kernels[0].name, "%s", name);
    kernels[kernel_count++].kernel = kernel;
    return 0;
}

FUNCTION(aoti_torch_delete_library_object, void *library)
{
    (void)library;
    kernel_count = library_count = 0; /* tests let go of all at once */
    return 0;
}

FUNCTION(aoti_torch_get_dim, struct torch_tensor *tensor, int64_t *axes)
{
    *axes = tensor->axes;
    return FAILS;
}

FUNCTION(aoti_torch_get_sizes, struct torch_tensor *tensor, int64_t **sizes)
{
    *sizes = tensor->sizes;
    return FAILS;
}

FUNCTION(aoti_torch_get_strides, struct torch_tensor *tensor, int64_t **strides)
{
    *strides = tensor->strides;
    return FAILS;
}

FUNCTION(aoti_torch_get_dtype, struct torch_tensor *tensor, int32_t *dtype)
{
    *dtype = tensor->dtype;
    return FAILS;
}

FUNCTION(aoti_torch_get_device_type, struct torch_tensor *tensor, int32_t *type)
{
    (void)tensor;
    *type = FAKE_CPU;
    return FAILS;
}

FUNCTION(aoti_torch_get_device_index, struct torch_tensor *tensor, int32_t *index)
{
    (void)tensor;
    *index = 0;
    return FAILS;
}

FUNCTION(torch_get_mutable_data_ptr, struct torch_tensor *tensor, void **address)
{
    *address = tensor->data;
    return FAILS;
}

FUNCTION(torch_get_const_data_ptr, struct torch_tensor *tensor, const void **address)
{
    *address = tensor->data;
    return FAILS;
}

FUNCTION(aoti_torch_empty_strided, int64_t axes, const int64_t *sizes, const int64_t *strides, int32_t dtype,
         int32_t device_type, int32_t device_index, struct torch_tensor **made)
{
    (void)device_type;
    (void)device_index;
    if (FAILS)
        return 1;
    *made = make_tensor(axes, sizes, strides, dtype, NULL);
    return 0;
}

FUNCTION(aoti_torch_copy_, struct torch_tensor *to, struct torch_tensor *from, int32_t is_asynchronous)
{
    (void)is_asynchronous;
    if (FAILS)
        return 1;
    if (to->dtype != from->dtype)
        abort();
    const int64_t bytes = bytes_of(to->dtype);
    for (int64_t i = 0; i < elements_of(to); i++)
        memcpy(to->data + offset_of(to, i) * bytes, from->data + offset_of(from, i) * bytes, (size_t)bytes);
    return 0;
}

FUNCTION(aoti_torch_delete_tensor_object, struct torch_tensor *tensor)
{
    release(tensor);
    return 0;
}

FUNCTION(aoti_torch_is_defined, struct torch_tensor *tensor, bool *is_defined)
{
    *is_defined = tensor->data != NULL;
    return FAILS;
}

FUNCTION(aoti_torch_new_uninitialized_tensor, struct torch_tensor **made)
{
    if (FAILS)
        return 1;
    *made = make_tensor(0, NULL, NULL, FAKE_F32, NULL);
    return 0;
}

FUNCTION(aoti_torch__reinterpret_tensor, struct torch_tensor *tensor, int64_t axes, const int64_t *sizes,
         const int64_t *strides, int64_t offset, struct torch_tensor **view)
{
    if (FAILS)
        return 1;
    *view = make_tensor(axes, sizes, strides, tensor->dtype, tensor->data + offset * bytes_of(tensor->dtype));
    return 0;
}

FUNCTION(torch_list_get_item, struct torch_list *list, size_t i, uint64_t *item)
{
    *item = list->items[i];
    return FAILS;
}

FUNCTION(torch_delete_list, struct torch_list *list)
{
    free(list);
    state.live--;
    return 0;
}

/* The one operator in Python, whose arguments are two cells' tensors, x and a number. */
FUNCTION(aoti_torch_call_dispatcher, const char *name, const char *overload, uint64_t *stack)
{
    (void)overload;
    if (strcmp(name, "normfuse::update_running_of_one_value") != 0)
        abort();
    for (int i = 0; i < 3; i++)
        release((void *)(uintptr_t)stack[i]);
    return FAILS;
}

FUNCTION(torch_delete_stable_ivalue, uint64_t *made)
{
    free(made);
    state.live--;
    return 0;
}

FUNCTION(torch_get_num_threads, uint32_t *threads)
{
    *threads = 2;
    return FAILS;
}

FUNCTION(torch_parallel_for, int64_t begin, int64_t end, int64_t grain, void (*task)(int64_t, int64_t, void *),
         void *context)
{
    (void)grain;
    state.loops++;
    if (FAILS)
        return 1;
    task(begin, end, context);
    return 0;
}

/* libtorch's throws. */
void aoti_torch_check(bool condition, const char *function, const char *file, uint32_t line, const char *message);
void aoti_torch_check(bool condition, const char *function, const char *file, uint32_t line, const char *message)
{
    (void)function;
    (void)file;
    (void)line;
    if (condition)
        return;
    state.raised++;
    snprintf(state.message, sizeof state.message, "%s", message);
}

const char *torch_exception_get_what_without_backtrace(void);
const char *torch_exception_get_what_without_backtrace(void)
{
    static char what[128];
    snprintf(what, sizeof what, "fake failure of %s", state.failed != NULL ? state.failed : "nothing");
    return what;
}
