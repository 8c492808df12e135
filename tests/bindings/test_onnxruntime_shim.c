/* SPDX-License-Identifier: MIT
 *
 * test_onnxruntime_shim.c - src/bindings/onnxruntime.c against a table of functions in the place of ONNX Runtime's:
 * each call that may fail fails once, for each operator. The error is passed on then, and nothing is left: no status,
 * no shape. Here functions are known by their numbers alone, so that the table that src/bindings/onnxruntime.c declares
 * is tested too. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "bindings/onnxruntime.h"

enum { F32 = 1, INT64 = 7, SLOTS = 275, MAX_AXES = 80, OPERATORS = 72 };
enum { CREATE = 17, COMPUTE = 18, INFER = 19, DESTROY = 9, NAME = 2, PROVIDER = 3, INPUT_TYPE = 4, INPUTS = 5,
       OUTPUT_TYPE = 6, OUTPUTS = 7, MAY_INPLACE = 22, RELEASE_INPLACE = 23 };

typedef void (*function)(void);

struct status {
    int code;
    char text[256];
};

struct shape {
    int type;
    size_t rank;
    int64_t sizes[MAX_AXES];
    const char *names[MAX_AXES];
};

struct value {
    struct shape shape;
    void *data;
};

struct context {
    const struct value *inputs[5];
    struct value made[3];
    float *outputs[3]; /* NULL: the model does not use it */
    size_t output_count;
};

struct attribute {
    const char *name;
    char kind; /* i, f, s */
    int64_t integer;
    float number;
    const char *text;
};

struct inference {
    struct shape x;
    int outputs; /* that a node has */
    int set;     /* outputs whose shape was set */
};

static function table[SLOTS];
static int live_statuses, live_shapes, live_domains, domains_made;
static int until_failure, until_no_memory; /* 0: no call fails */
static const void *added[OPERATORS + 1];
static int added_count;
static void *added_domain;
static int tasks_to_run; /* of a parallel_for; -1: all, backwards */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);

void *__wrap_malloc(size_t bytes)
{
    return until_no_memory > 0 && --until_no_memory == 0 ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return until_no_memory > 0 && --until_no_memory == 0 ? NULL : __real_calloc(count, bytes);
}

static struct status *create_status(int code, const char *text)
{
    struct status *const status = __real_calloc(1, sizeof *status);
    status->code = code;
    strncpy(status->text, text, sizeof status->text - 1);
    live_statuses++;
    return status;
}

static void release_status(struct status *status)
{
    live_statuses--;
    free(status);
}

static struct status *planted(void)
{
    return until_failure > 0 && --until_failure == 0 ? create_status(1, "planted") : NULL;
}

#define MAY_FAIL                                                                                                       \
    do {                                                                                                               \
        struct status *const failure = planted();                                                                      \
        if (failure != NULL)                                                                                           \
            return failure;                                                                                            \
    } while (0)

static struct status *create_domain(const char *name, void **domain)
{
    MAY_FAIL;
    CHECK(strcmp(name, "normfuse") == 0, "the domain is %s", name);
    live_domains++;
    domains_made++;
    *domain = __real_malloc(1);
    added_count = 0;
    return NULL;
}

static void release_domain(void *domain)
{
    live_domains--;
    free(domain);
}

static struct status *domain_add(void *domain, const void *op)
{
    (void)domain;
    MAY_FAIL;
    added[added_count++] = op;
    return NULL;
}

static struct status *add_domain(void *options, void *domain)
{
    (void)options;
    MAY_FAIL;
    added_domain = domain;
    return NULL;
}

static const struct attribute *find(const struct attribute *attributes, const char *name)
{
    for (; attributes->name != NULL; attributes++)
        if (strcmp(attributes->name, name) == 0)
            return attributes;
    return NULL;
}

static struct status *attribute_int(const struct attribute *attributes, const char *name, int64_t *value)
{
    const struct attribute *const found = find(attributes, name);
    if (found == NULL || found->kind != 'i')
        return create_status(1, "no such integer");
    *value = found->integer;
    return NULL;
}

static struct status *attribute_float(const struct attribute *attributes, const char *name, float *value)
{
    const struct attribute *const found = find(attributes, name);
    if (found == NULL || found->kind != 'f')
        return create_status(1, "no such float");
    *value = found->number;
    return NULL;
}

static struct status *attribute_string(const struct attribute *attributes, const char *name, char *text, size_t *size)
{
    const struct attribute *const found = find(attributes, name);
    if (found == NULL || found->kind != 's')
        return create_status(1, "no such string");
    const size_t given = *size;
    *size = strlen(found->text) + 1;
    if (text == NULL)
        return NULL;
    if (given < *size)
        return create_status(2, "the buffer is too small");
    memcpy(text, found->text, *size);
    return NULL;
}

static struct status *attribute_floats(const struct attribute *attributes, const char *name, float *values,
                                       size_t *size)
{
    (void)values;
    *size = 0;
    return find(attributes, name) == NULL ? create_status(1, "no such attribute") : NULL;
}

static struct status *get_input(const struct context *context, size_t index, const struct value **value)
{
    MAY_FAIL;
    *value = context->inputs[index];
    return NULL;
}

static struct status *output_count(const struct context *context, size_t *count)
{
    MAY_FAIL;
    *count = context->output_count;
    return NULL;
}

static struct status *get_output(struct context *context, size_t index, const int64_t *sizes, size_t rank,
                                 struct value **value)
{
    MAY_FAIL;
    const struct shape *const x = &context->inputs[0]->shape;
    CHECK((rank == x->rank && memcmp(sizes, x->sizes, rank * sizeof *sizes) == 0) ||
              (context->output_count == 3 && index > 0 && rank == 1 && sizes[0] == x->sizes[1]),
          "output %zu has another shape", index);
    context->made[index].data = context->outputs[index];
    *value = context->outputs[index] == NULL ? NULL : &context->made[index];
    return NULL;
}

static struct status *get_shape(const struct value *value, const struct shape **shape)
{
    MAY_FAIL;
    live_shapes++;
    *shape = &value->shape;
    return NULL;
}

static void release_shape(struct shape *shape)
{
    (void)shape;
    live_shapes--;
}

static struct status *get_type(const struct shape *shape, int *type)
{
    MAY_FAIL;
    *type = shape->type;
    return NULL;
}

static struct status *get_rank(const struct shape *shape, size_t *rank)
{
    MAY_FAIL;
    *rank = shape->rank;
    return NULL;
}

static struct status *get_sizes(const struct shape *shape, int64_t *sizes, size_t rank)
{
    MAY_FAIL;
    memcpy(sizes, shape->sizes, rank * sizeof *sizes);
    return NULL;
}

static struct status *get_symbols(const struct shape *shape, const char **names, size_t rank)
{
    MAY_FAIL;
    memcpy(names, shape->names, rank * sizeof *names);
    return NULL;
}

static struct status *get_data(struct value *value, void **data)
{
    MAY_FAIL;
    *data = value->data;
    return NULL;
}

static struct status *get_memory(const struct value *value, const void **memory)
{
    MAY_FAIL;
    *memory = value;
    return NULL;
}

static struct status *get_device(const void *memory, int *id)
{
    (void)memory;
    MAY_FAIL;
    *id = 0;
    return NULL;
}

static struct status *get_stream(const struct context *context, void **stream)
{
    (void)context;
    MAY_FAIL;
    *stream = NULL;
    return NULL;
}

static struct status *parallel_for(const struct context *context, void (*task)(void *, size_t), size_t tasks,
                                   size_t batches, void *data)
{
    (void)context;
    CHECK(batches == 0, "%zu batches", batches);
    const int count = tasks_to_run < 0 || tasks_to_run > (int)tasks ? (int)tasks : tasks_to_run;
    for (int i = count; i-- > 0;)
        task(data, (size_t)i);
    MAY_FAIL; /* behind the tasks that were run: a failure may leave some, all or none */
    return NULL;
}

static struct status *inferred_input(const struct inference *inference, size_t index, const struct shape **shape)
{
    MAY_FAIL;
    CHECK(index == 0, "input %zu is asked for", index);
    *shape = &inference->x;
    return NULL;
}

static struct status *infer_output(struct inference *inference, size_t index, const struct shape *shape)
{
    (void)shape;
    if ((int)index >= inference->outputs)
        return create_status(2, "there is no such output");
    MAY_FAIL;
    inference->set |= 1 << index;
    return NULL;
}

static const char *version_text = "1.32.0";
static bool has_table = true;

static const void *get_api(uint32_t version)
{
    CHECK(version == 1 || version == 18, "version %u is asked for", version);
    return version == 1 || has_table ? table : NULL;
}

static const char *get_version(void)
{
    return version_text;
}

static const function base[] = {(function)get_api, (function)get_version};

static void fill_table(void)
{
#define SET(number, name) table[number] = (function)(name)
    SET(0, create_status), SET(26, create_domain), SET(27, domain_add), SET(28, add_domain), SET(51, get_data);
    SET(60, get_type), SET(61, get_rank), SET(62, get_sizes), SET(63, get_symbols), SET(65, get_shape);
    SET(72, get_device), SET(85, attribute_float), SET(86, attribute_int), SET(87, attribute_string);
    SET(89, output_count), SET(90, get_input), SET(91, get_output), SET(93, release_status), SET(99, release_shape);
    SET(101, release_domain), SET(162, attribute_floats), SET(193, get_stream), SET(194, get_memory);
    SET(268, inferred_input), SET(270, infer_output), SET(274, parallel_for);
#undef SET
}

/* ---- OrtCustomOp, by the numbers of its fields ----------------------------------------------------------------- */

static function field(const void *op, int number)
{
    function found;
    memcpy(&found, (const char *)op + (size_t)number * sizeof found, sizeof found);
    return found;
}

static const char *text_of(const void *op, int number)
{
    return ((const char *(*)(const void *))field(op, number))(op);
}

static size_t count_of(const void *op, int number)
{
    return ((size_t(*)(const void *))field(op, number))(op);
}

static int type_of(const void *op, int number, size_t index)
{
    return ((int (*)(const void *, size_t))field(op, number))(op, index);
}

static struct status *create(const void *op, const struct attribute *attributes, void **kernel)
{
    typedef struct status *(*creator)(const void *, const void *, const void *, void **);
    return ((creator)field(op, CREATE))(op, table, attributes, kernel);
}

static struct status *compute(const void *op, void *kernel, struct context *context)
{
    return ((struct status * (*)(void *, void *)) field(op, COMPUTE))(kernel, context);
}

static void destroy(const void *op, void *kernel)
{
    ((void (*)(void *))field(op, DESTROY))(kernel);
}

static const void *find_operator(const char *name, bool cuda)
{
    for (int i = 0; i < added_count; i++)
        if (strcmp(text_of(added[i], NAME), name) == 0 && type_of(added[i], INPUT_TYPE, 0) == F32 &&
            (text_of(added[i], PROVIDER) != NULL) == cuda)
            return added[i];
    return NULL;
}

/* Releases a status; whether it said that. */
static bool says(struct status *status, const char *text)
{
    if (status == NULL)
        return false;
    const bool found = strstr(status->text, text) != NULL;
    if (!found)
        printf("it says: %s\n", status->text);
    release_status(status);
    return found;
}

static void check_nothing_left(const char *what)
{
    CHECK(live_statuses == 0 && live_shapes == 0, "%s: %d statuses and %d shapes are left", what, live_statuses,
          live_shapes);
    live_statuses = live_shapes = 0;
}

/* ---- registration ---------------------------------------------------------------------------------------------- */

static void test_versions(void)
{
    static const char *const old[] = {"1.17.3", "0.99.0", "1.2", "1", "", "1.0.18"};
    for (size_t i = 0; i < sizeof old / sizeof old[0]; i++) {
        version_text = old[i];
        CHECK(says(RegisterCustomOps(NULL, base), "expected 1.18 or newer"), "version %s", old[i]);
    }
    version_text = "1.18.0";
    has_table = false;
    CHECK(says(RegisterCustomOps(NULL, base), "expected 1.18 or newer"), "without a table");
    has_table = true;
    CHECK(domains_made == 0, "a domain for a version that is too old");
    check_nothing_left("versions");
}

static void test_registration(void)
{
    enum { CALLS = 1 + OPERATORS + 1 };
    for (int i = 1; i <= CALLS; i++) {
        until_failure = i;
        CHECK(says(RegisterCustomOps(NULL, base), "planted"), "registration: call %d fails", i);
        CHECK(live_domains == (i == CALLS), "registration: call %d fails, %d domains are left", i, live_domains);
        if (i == 1) {
            until_failure = 0;
            until_no_memory = 1;
            CHECK(says(RegisterCustomOps(NULL, base), "out of memory"), "registration without memory");
        }
    }
    until_failure = 0;
    const int made = domains_made;
    void *const domain = added_domain;
    version_text = "2.0.1";
    CHECK(RegisterCustomOps(NULL, base) == NULL && domains_made == made, "a second registration makes a domain");
    CHECK(added_domain != NULL && (domain == NULL || domain == added_domain), "the domain is added");
    CHECK(added_count == OPERATORS, "%d operators", added_count);
    check_nothing_left("registration");
}

static void test_descriptions(void)
{
    for (int i = 0; i < added_count; i++) {
        uint32_t version;
        memcpy(&version, added[i], sizeof version);
        CHECK(version == 18, "version %u", version);
        const int type = type_of(added[i], INPUT_TYPE, 0);
        for (size_t k = 0; k < count_of(added[i], OUTPUTS); k++)
            CHECK(type_of(added[i], OUTPUT_TYPE, k) == (k > 0 && count_of(added[i], OUTPUTS) == 3 ? 0 : type),
                  "output %zu of %s has another type", k, text_of(added[i], NAME));
        for (size_t k = 1; k < count_of(added[i], INPUTS); k++)
            CHECK(type_of(added[i], INPUT_TYPE, k) == 0, "a parameter has a fixed type");
        int *inputs = NULL, *outputs = NULL;
        const size_t pairs = ((size_t(*)(int **, int **))field(added[i], MAY_INPLACE))(&inputs, &outputs);
        CHECK(pairs == 1 && *inputs == 0 && *outputs == 0, "in place");
        ((void (*)(int *, int *))field(added[i], RELEASE_INPLACE))(inputs, outputs);
    }
}

/* ---- calls ----------------------------------------------------------------------------------------------------- */

enum { N = 2, C = 4, H = 128, W = 128, ELEMENTS = N * C * H * W };

static float x[ELEMENTS], skip[ELEMENTS], y[ELEMENTS], sum[ELEMENTS], want[ELEMENTS];
static float variances[C], scale[C] = {1, 2, 3, 4}, shift[C] = {0.5F, -1, 0, 2}, variance[C] = {1, 2, 0.25F, 1};
static const struct attribute attributes[] = {{"groups", 'i', 2, 0, NULL}, {"num_groups", 'i', 2, 0, NULL},
                                              {"epsilon", 'f', 0, 1e-3F, NULL}, {NULL, 0, 0, 0, NULL}};
static const struct attribute training[] = {{"training_mode", 'i', 1, 0, NULL}, {NULL, 0, 0, 0, NULL}};
static const char *const names[] = {"GroupNorm", "SkipGroupNorm", "InstanceNorm", "BatchNorm", "ChannelNorm",
                                    "ChannelAffine", "GroupNormalization", "InstanceNormalization",
                                        "BatchNormalization"};

static struct value big(float *data)
{
    return (struct value){{F32, 4, {N, C, H, W}, {NULL}}, data};
}

static struct value channels(float *data)
{
    return (struct value){{F32, 1, {C}, {NULL}}, data};
}

struct arguments {
    struct value x, scale, shift, third, fourth;
    struct context context;
};

static void fill_arguments(struct arguments *arguments, const char *name)
{
    *arguments = (struct arguments){.x = big(x), .scale = channels(scale), .shift = channels(shift),
                                    .third = strcmp(name, "SkipGroupNorm") == 0 ? big(skip) : channels(shift),
                                    .fourth = channels(variance)};
    arguments->context = (struct context){.inputs = {&arguments->x, &arguments->scale, &arguments->shift,
                                                     &arguments->third, &arguments->fourth},
                                          .outputs = {y, sum, variances},
                                          .output_count = strcmp(name, "SkipGroupNorm") == 0 ? 2 : 1};
}

static void fill_data(void)
{
    for (int i = 0; i < ELEMENTS; i++) {
        x[i] = (float)(i * 37 % 101) / 10;
        skip[i] = (float)(i * 53 % 89) / 20;
    }
}

/* Each call that may fail fails once. The last round has no failure and gives the bits of the first. */
static void test_failures_of(const char *name, bool trains)
{
    const void *const op = find_operator(name, false);
    struct arguments arguments;
    void *kernel = NULL;
    if (!CHECK(op != NULL && create(op, trains ? training : attributes, &kernel) == NULL, "%s: a kernel", name))
        return;
    tasks_to_run = -1;
    until_failure = 0;
    fill_arguments(&arguments, name);
    if (trains)
        arguments.context.output_count = 3;
    CHECK(compute(op, kernel, &arguments.context) == NULL, "%s runs", name);
    memcpy(want, y, sizeof y);
    check_nothing_left(name);
    int failed = 0;
    for (int i = 1;; i++) {
        until_failure = i;
        memset(y, 0, sizeof y);
        struct status *const status = compute(op, kernel, &arguments.context);
        const bool reached = until_failure == 0;
        until_failure = 0;
        if (status == NULL)
            CHECK(memcmp(y, want, sizeof y) == 0, "%s: call %d fails, no error, another result", name, i);
        else
            CHECK(says(status, "planted"), "%s: call %d fails with another error", name, i);
        failed += status != NULL;
        check_nothing_left(name);
        if (!reached)
            break;
    }
    CHECK(failed >= 5 * (int)count_of(op, INPUTS), "%s: %d calls failed", name, failed);
    destroy(op, kernel);
}

static void test_training(void)
{
    const void *const op = find_operator("BatchNormalization", false);
    struct arguments arguments;
    void *kernel = NULL;
    CHECK(create(op, attributes, &kernel) == NULL, "a kernel that evaluates");
    fill_arguments(&arguments, "BatchNormalization");
    arguments.context.output_count = 3;
    CHECK(says(compute(op, kernel, &arguments.context), "outputs of training only"), "new statistics of an evaluation");
    destroy(op, kernel);
    kernel = NULL;
    CHECK(says(create(find_operator("BatchNormalization", true), training, &kernel), "training_mode is 1, which CUDA"),
          "training on CUDA");
    CHECK(create(op, training, &kernel) == NULL, "a kernel that trains");
    fill_arguments(&arguments, "BatchNormalization");
    arguments.context.output_count = 3;
    until_no_memory = 1;
    CHECK(says(compute(op, kernel, &arguments.context), "out of memory"), "training without memory");
    until_no_memory = 0;
    for (int wrong = 0; wrong < 2; wrong++) {
        fill_arguments(&arguments, "BatchNormalization");
        arguments.context.output_count = 3;
        (wrong == 0 ? &arguments.third : &arguments.fourth)->shape.sizes[0] = 3;
        CHECK(says(compute(op, kernel, &arguments.context), "not of shape [C]"), "a statistic of another size");
    }
    fill_arguments(&arguments, "BatchNormalization");
    arguments.x.shape.rank = 0;
    CHECK(says(compute(op, kernel, &arguments.context), "no axis C"), "training of a number");
    destroy(op, kernel);
    check_nothing_left("training");
}

/* The table may run some of the tasks, and the rest is the caller's. */
static void test_tasks(void)
{
    const void *const op = find_operator("GroupNorm", false);
    struct arguments arguments;
    void *kernel = NULL;
    CHECK(create(op, attributes, &kernel) == NULL, "a kernel");
    fill_arguments(&arguments, "GroupNorm");
    for (tasks_to_run = -1; tasks_to_run < 3; tasks_to_run++) {
        memset(y, 0, sizeof y);
        CHECK(compute(op, kernel, &arguments.context) == NULL, "%d tasks", tasks_to_run);
        if (tasks_to_run < 0)
            memcpy(want, y, sizeof y);
        CHECK(memcmp(y, want, sizeof y) == 0, "%d tasks are run, and the result is another one", tasks_to_run);
    }
    tasks_to_run = -1;
    destroy(op, kernel);
}

/* The smallest thing that is wrong with the arguments, and what the error says. */
static void test_refusals(void)
{
    const void *const op = find_operator("GroupNorm", false);
    struct arguments arguments;
    void *kernel = NULL;
    CHECK(create(op, attributes, &kernel) == NULL, "a kernel");
#define REFUSED(change, text)                                                                                          \
    fill_arguments(&arguments, "GroupNorm");                                                                           \
    change;                                                                                                            \
    CHECK(says(compute(op, kernel, &arguments.context), text), "%s", #change);                                         \
    check_nothing_left(#change)
    REFUSED(arguments.x.shape.rank = 65, "more than 64 axes");
    REFUSED(arguments.scale.shape.rank = 6, "more than 5 axes");
    REFUSED(arguments.scale.shape.type = INT64, "tensors.weight");
    REFUSED(arguments.scale.shape.sizes[0] = 3, "tensors.weight");
    REFUSED(arguments.scale.data = NULL, "tensors.weight");
    REFUSED(arguments.x.shape.rank = 0, "tensors.x");
    REFUSED(arguments.x.shape.rank = 1, "tensors.x");
    REFUSED(arguments.x.shape.sizes[1] = 5, "does not divide");
    REFUSED(arguments.x.shape.sizes[2] = INT64_MAX, "tensors.x");
    REFUSED(arguments.x.shape.sizes[3] = -1, "tensors.x");
    REFUSED(arguments.x.data = (char *)x + 1, "tensors.x");
    REFUSED(arguments.context.inputs[1] = NULL, "an input is missing");
    REFUSED(arguments.context.outputs[0] = NULL, "the output is missing");
    REFUSED(arguments.context.output_count = 0, "the output is missing");
#undef REFUSED
    destroy(op, kernel);
}

static void test_attributes(void)
{
    static const struct {
        const char *operator, *text; /* text NULL: accepted */
        struct attribute attributes[3];
    } cases[] = {
        {"GroupNorm", "groups is missing", {{NULL, 0, 0, 0, NULL}}},
        {"GroupNorm", "groups is not an integer", {{"groups", 'f', 0, 2, NULL}}},
        {"GroupNorm", "epsilon is not a float", {{"groups", 'i', 2, 0, NULL}, {"epsilon", 'i', 1, 0, NULL}}},
        {"GroupNorm", "channels_last is neither", {{"groups", 'i', 2, 0, NULL}, {"channels_last", 'i', 2, 0, NULL}}},
        {"GroupNorm", "not a name of an activation", {{"groups", 'i', 2, 0, NULL}, {"activation", 's', 0, 0, "silly"}}},
        {"GroupNorm", "not a name of an activation", {{"groups", 'i', 2, 0, NULL}, {"activation", 'i', 1, 0, NULL}}},
        {"GroupNorm", "not a name of an activation",
         {{"groups", 'i', 2, 0, NULL}, {"activation", 's', 0, 0, "longer than any name of an activation"}}},
        {"GroupNorm", NULL, {{"groups", 'i', 2, 0, NULL}, {"activation", 's', 0, 0, "leaky_relu"}}},
        {"InstanceNorm", "act_param is not a float", {{"act_param", 's', 0, 0, "x"}}},
        {"InstanceNorm", "act_param means nothing", {{"act_param", 'f', 0, 1, NULL}}},
        {"InstanceNorm", NULL, {{"act_param", 'f', 0, 1, NULL}, {"activation", 's', 0, 0, "elu"}}},
        {"GroupNormalization", "num_groups is missing", {{"groups", 'i', 2, 0, NULL}}},
        {"BatchNormalization", "training_mode is neither", {{"training_mode", 'i', 2, 0, NULL}}},
        {"BatchNormalization", "momentum is not a float", {{"momentum", 'i', 1, 0, NULL}}},
        {"BatchNormalization", NULL, {{"training_mode", 'i', 0, 0, NULL}}},
        {"ChannelAffine", NULL, {{NULL, 0, 0, 0, NULL}}},
        {"ChannelNorm", NULL, {{NULL, 0, 0, 0, NULL}}},
        {"ChannelNorm", NULL, {{"statistics", 's', 0, 0, "mean_square"}, {"eps_kind", 's', 0, 0, "of_norm"}}},
        {"ChannelNorm", "statistics is neither mean_and_variance nor", {{"statistics", 's', 0, 0, "mean"}}},
        {"ChannelNorm", "statistics is neither mean_and_variance nor", {{"statistics", 'i', 1, 0, NULL}}},
        {"ChannelNorm", "eps_kind is neither added nor of_norm", {{"eps_kind", 's', 0, 0, "norm"}}},
        {"ChannelNorm", "groups is not an integer", {{"groups", 'f', 0, 2, NULL}}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const void *const op = find_operator(cases[i].operator, false);
        void *kernel = NULL;
        struct status *const status = create(op, cases[i].attributes, &kernel);
        if (cases[i].text == NULL && CHECK(status == NULL && kernel != NULL, "attributes %zu are refused", i))
            destroy(op, kernel);
        if (cases[i].text != NULL)
            CHECK(says(status, cases[i].text) && kernel == NULL, "attributes %zu", i);
        check_nothing_left(cases[i].operator);
    }
    void *kernel = NULL;
    until_no_memory = 1;
    CHECK(says(create(find_operator("GroupNorm", false), attributes, &kernel), "out of memory"), "without memory");
}

static int infer(const void *op, struct inference *inference)
{
    inference->set = 0;
    struct status *const status = ((struct status * (*)(const void *, void *)) field(op, INFER))(op, inference);
    CHECK(status == NULL, "shape inference fails");
    check_nothing_left("shape inference");
    return inference->set;
}

static void test_inference(void)
{
    const void *const one = find_operator("GroupNorm", false), *const two = find_operator("SkipGroupNorm", false);
    struct inference inference = {{F32, 3, {2, -1, 5}, {"", "c", ""}}, 2, 0};
    CHECK(infer(one, &inference) == 1 && infer(two, &inference) == 3, "outputs have no shape");
    inference.outputs = 1;
    CHECK(infer(two, &inference) == 1, "an output that the node does not have");
    for (int i = 1; i <= 5; i++) {
        until_failure = i;
        infer(one, &inference);
    }
    until_failure = 0;
    inference.x.names[1] = "";
    CHECK(infer(one, &inference) == 0, "a size that is not known becomes -1");
    inference.x.names[1] = "c";
    inference.x.rank = 0;
    CHECK(infer(one, &inference) == 0, "a shape that is not known becomes that of a number");
    inference.x.rank = 65;
    CHECK(infer(one, &inference) == 0, "65 axes");
}

/* On a machine without a GPU the CUDA kernels report that, and each call of the table that they make may fail. */
static void test_cuda(void)
{
    if (normfuse_prepare(0) == NORMFUSE_OK) {
        harness_skip("CUDA kernels without a GPU: this machine has one");
        return;
    }
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
        const void *const op = find_operator(names[k], true);
        struct arguments arguments;
        void *kernel = NULL;
        if (!CHECK(op != NULL && strcmp(text_of(op, PROVIDER), "CUDAExecutionProvider") == 0 &&
                       create(op, attributes, &kernel) == NULL, "%s: a CUDA kernel", names[k]))
            continue;
        fill_arguments(&arguments, names[k]);
        for (int i = 1;; i++) {
            until_failure = i;
            struct status *const status = compute(op, kernel, &arguments.context);
            const bool reached = until_failure == 0;
            until_failure = 0;
            CHECK(says(status, reached ? "planted" : "CUDA"), "%s on CUDA: call %d", names[k], i);
            check_nothing_left(names[k]);
            if (!reached)
                break;
        }
        destroy(op, kernel);
    }
}

int main(void)
{
    fill_table();
    fill_data();
    test_versions();
    test_registration();
    test_descriptions();
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++)
        test_failures_of(names[k], false);
    test_failures_of("BatchNormalization", true);
    test_training();
    test_tasks();
    test_refusals();
    test_attributes();
    test_inference();
    test_cuda();
    return harness_close();
}
