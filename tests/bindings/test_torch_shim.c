/* SPDX-License-Identifier: MIT
 *
 * test_torch_shim.c - src/bindings/torch.c against a libtorch without torch: each call of it that may fail fails once
 * in each operator. The operator raises that error then, and neither an output nor anything else is left. */
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fake_torch.h"
#include "harness.h"
#include "bindings/torch.h"

static const struct fake_torch_table *torch;

enum { N = 2, C = 4, H = 128, W = 128, GROUPS = 2, MAX_ARGUMENTS = 20, MAX_OUTPUTS = 8, SILU = 3, PRELU = 10 };

static uint64_t as_value(const void *pointer)
{
    return (uintptr_t)pointer;
}

static uint64_t number(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void *tensor(int64_t axes, const int64_t *sizes, int32_t dtype)
{
    return torch->tensor(axes, sizes, dtype);
}

static uint64_t big(void)
{
    return as_value(tensor(4, (const int64_t[]){N, C, H, W}, FAKE_F32));
}

/* Tensors that the library does not walk are copied. */
static uint64_t transposed(void)
{
    void *const made = tensor(4, (const int64_t[]){N, C, H, W}, FAKE_F32);
    torch->set_strides(made, (const int64_t[]){C * H * W, H * W, 1, H});
    return as_value(made);
}

static uint64_t given(void *made)
{
    return as_value(torch->cell(made));
}

static uint64_t channels(void)
{
    return given(tensor(1, (const int64_t[]){C}, FAKE_F32));
}

static uint64_t by_group(int32_t dtype)
{
    return as_value(tensor(2, (const int64_t[]){N, GROUPS}, dtype));
}

/* Each fills the stack of one call. */
static void lean_group_norm(uint64_t *s)
{
    *s++ = big();
    *s++ = channels();
    *s++ = channels();
    *s++ = GROUPS;
    *s++ = number(1e-5);
    *s++ = SILU;
    *s = number(0.0);
}

static void group_norm(uint64_t *s)
{
    *s++ = transposed();
    *s++ = channels();
    *s++ = channels();
    *s++ = given(tensor(2, (const int64_t[]){N, C}, FAKE_F32));
    *s++ = given(tensor(2, (const int64_t[]){N, C}, FAKE_F32));
    *s++ = given(tensor(2, (const int64_t[]){N, C}, FAKE_F32));
    *s++ = given((void *)(uintptr_t)transposed());
    *s++ = given((void *)(uintptr_t)big());
    *s++ = channels();
    *s++ = GROUPS;
    *s++ = number(1e-5);
    *s++ = PRELU;
    *s++ = number(0.0);
    *s = 0;
}

/* The arguments x, pre_bias and slope. */
static void group_norm_backward(uint64_t *s)
{
    *s++ = big();
    *s++ = 0;
    *s++ = big();
    *s++ = by_group(FAKE_F64);
    *s++ = by_group(FAKE_F32);
    *s++ = channels();
    *s++ = channels();
    *s++ = 0;
    *s++ = 0;
    *s++ = channels();
    *s++ = 0;
    *s++ = given(tensor(1, (const int64_t[]){1}, FAKE_F32));
    *s++ = GROUPS;
    *s++ = number(1e-5);
    *s++ = PRELU;
    *s++ = number(0.0);
    *s = 7 | 128 | 512;
}

static void batch_norm(uint64_t *s)
{
    *s++ = big();
    for (int i = 0; i < 5; i++)
        *s++ = channels();
    *s++ = 0;
    *s++ = 0;
    *s++ = 0;
    *s++ = number(0.1);
    *s++ = number(1e-5);
    *s++ = 0;
    *s++ = number(0.0);
    *s = 1;
}

static void lean_group_norm_backward(uint64_t *s)
{
    *s++ = big();
    *s++ = big();
    *s++ = by_group(FAKE_F64);
    *s++ = by_group(FAKE_F32);
    *s++ = channels();
    *s++ = channels();
    *s++ = GROUPS;
    *s++ = 0;
    *s++ = number(0.0);
    *s = 7;
}

static void native_group_norm_backward(uint64_t *s)
{
    *s++ = big();
    *s++ = big();
    *s++ = by_group(FAKE_F32);
    *s++ = by_group(FAKE_F32);
    *s++ = channels();
    *s++ = N;
    *s++ = C;
    *s++ = H * W;
    *s++ = GROUPS;
    *s = as_value(torch->mask(true, true, false));
}

/* aten takes what the library refuses: eps of 0, and one value a channel. */
static void native_batch_norm(uint64_t *s)
{
    *s++ = big();
    for (int i = 0; i < 4; i++)
        *s++ = channels();
    *s++ = 1;
    *s++ = number(0.1);
    *s = number(0.0);
}

static void native_batch_norm_of_one_value(uint64_t *s)
{
    native_batch_norm(s);
    torch->release((void *)(uintptr_t)s[0]);
    s[0] = as_value(tensor(2, (const int64_t[]){1, C}, FAKE_F32));
}

static uint64_t of_channels(int64_t rows, int64_t width)
{
    return as_value(tensor(2, (const int64_t[]){rows * C, width}, FAKE_F64));
}

static void batch_norm_apply(uint64_t *s)
{
    *s++ = big();
    *s++ = of_channels(3, 3);
    for (int i = 0; i < 4; i++)
        *s++ = channels();
    *s++ = 0;
    *s++ = 0;
    *s++ = number(0.1);
    *s++ = number(1e-5);
    *s++ = SILU;
    *s = number(0.0);
}

/* The arguments x, weight, bias and pre_bias. */
static void batch_norm_backward_apply(uint64_t *s)
{
    *s++ = big();
    *s++ = 0;
    *s++ = big();
    *s++ = as_value(tensor(1, (const int64_t[]){C}, FAKE_F64));
    *s++ = as_value(tensor(1, (const int64_t[]){C}, FAKE_F32));
    *s++ = of_channels(1, 2);
    *s++ = of_channels(3, 2);
    *s++ = of_channels(1, 3);
    for (int i = 0; i < 3; i++)
        *s++ = channels();
    *s++ = 0;
    *s++ = 0;
    *s++ = SILU;
    *s++ = number(0.0);
    *s = 7 | 128;
}

static const struct {
    const char *library, *name;
    void (*fill)(uint64_t *stack);
    int inputs, outputs;
    bool is_parallel;
} operators[] = {
    {"normfuse", "lean_group_norm", lean_group_norm, 7, 3, true},
    {"normfuse", "group_norm", group_norm, 14, 4, true},
    {"normfuse", "group_norm_backward", group_norm_backward, 17, 8, true},
    {"normfuse", "batch_norm", batch_norm, 14, 4, true},
    {"normfuse", "lean_group_norm_backward", lean_group_norm_backward, 10, 3, true},
    {"aten", "native_group_norm_backward", native_group_norm_backward, 10, 3, true},
    {"aten", "native_batch_norm", native_batch_norm, 8, 3, true},
    {"aten", "native_batch_norm", native_batch_norm_of_one_value, 8, 3, false},
    {"normfuse", "batch_norm_apply", batch_norm_apply, 12, 4, true},
    {"normfuse", "batch_norm_backward_apply", batch_norm_backward_apply, 16, 4, true},
};

static void test_every_failure(void)
{
    struct fake_torch *const state = torch->state;
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
        state->library = operators[i].library;
        fake_kernel *const kernel = torch->kernel_of(operators[i].name);
        if (!CHECK(kernel != NULL, "%s is not registered", operators[i].name))
            continue;
        int calls = 0;
        for (int fails_at = 0; fails_at <= calls; fails_at++) {
            uint64_t stack[MAX_ARGUMENTS] = {0};
            operators[i].fill(stack);
            state->fails_at = fails_at;
            state->calls = state->raised = state->loops = 0;
            state->failed = NULL;
            kernel(stack, (uint64_t)operators[i].inputs, (uint64_t)operators[i].outputs);
            if (fails_at == 0) {
                calls = state->calls;
                CHECK(state->raised == 0, "%s: %s", operators[i].name, state->message);
                CHECK(state->loops > 0 || !operators[i].is_parallel, "%s ran on one thread", operators[i].name);
                for (int k = 0; state->raised == 0 && k < operators[i].outputs; k++)
                    torch->release((void *)(uintptr_t)stack[k]);
            } else {
                CHECK(state->raised == 1 && state->failed != NULL && strstr(state->message, state->failed) != NULL,
                      "%s: %s failed, call %d: raised %d times, %s", operators[i].name, state->failed, fails_at,
                      state->raised, state->message);
                /* The result of a call that failed unseen. */
                for (int k = 0; state->raised == 0 && k < operators[i].outputs; k++)
                    torch->release((void *)(uintptr_t)stack[k]);
            }
            CHECK(state->live == 0, "%s: %s failed, call %d: %d tensors, cells or lists left", operators[i].name,
                  state->failed, fails_at, state->live);
            state->live = 0;
        }
        CHECK(calls > 5, "%s: %d calls", operators[i].name, calls);
    }
    state->fails_at = 0;
}

/* Refused before anything is made of it, and the rest let go. */
static void test_numbers(void)
{
    static const struct {
        int argument;
        uint64_t value;
        const char *words;
    } cases[] = {{5, (1ull << 32) + 3, "activation"}, {5, (uint64_t)INT64_MIN, "activation"}, {3, 1ull << 62, "groups"},
                 {3, 0, "groups"}, {3, (uint64_t)-2, "groups"}, {3, 3, "groups"}};
    struct fake_torch *const state = torch->state;
    state->library = "normfuse";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t stack[MAX_ARGUMENTS];
        lean_group_norm(stack);
        stack[cases[i].argument] = cases[i].value;
        state->raised = 0;
        torch->kernel_of("lean_group_norm")(stack, 7, 3);
        CHECK(state->raised == 1 && strstr(state->message, cases[i].words) != NULL && state->live == 0,
              "argument %d of %llu: raised %d times, %s, %d left", cases[i].argument,
              (unsigned long long)cases[i].value, state->raised, state->message, state->live);
    }
}

/* Without channels the number of groups is any; its products are not. */
static void test_groups_without_channels(void)
{
    static const uint64_t groups[] = {1ull << 62, 1ull << 60, (1ull << 63) - 1};
    struct fake_torch *const state = torch->state;
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        uint64_t stack[MAX_ARGUMENTS] = {as_value(tensor(3, (const int64_t[]){16, 0, 5}, FAKE_F32)), 0, 0, groups[i],
                                          number(1e-5), 0, number(0.0)};
        state->raised = 0;
        torch->kernel_of("lean_group_norm")(stack, 7, 3);
        CHECK(state->raised == 1 && strstr(state->message, "too many groups") != NULL && state->live == 0,
              "%llu groups: raised %d times, %s", (unsigned long long)groups[i], state->raised, state->message);
    }
}

/* Values that an error of torch's threads left undefined: y is what they compute where there is none. */
static void test_values(void)
{
    uint64_t stack[MAX_ARGUMENTS];
    torch->state->library = "normfuse";
    lean_group_norm(stack);
    stack[5] = 0;
    torch->kernel_of("lean_group_norm")(stack, 7, 3);
    const float *const y = torch->data((void *)(uintptr_t)stack[0]);
    double worst = 0.0;
    for (int i = 0; i < N * C * H * W; i++) {
        /* x is 1 -+ 0.5, weight and bias are 0.5 and 1.5 */
        const double parameter = 0.5 + (double)(i / (H * W) % 2);
        const double want = (i % 2 == 0 ? -0.5 : 0.5) / sqrt(0.25 + 1e-5) * parameter + parameter;
        worst = fmax(worst, fabs((double)y[i] - want));
    }
    CHECK(worst < 1e-6, "y is off by %g", worst);
    for (int i = 0; i < 3; i++)
        torch->release((void *)(uintptr_t)stack[i]);
}

/* Nothing stays registered where a registration fails. */
static void test_registration(void)
{
    struct fake_torch *const state = torch->state;
    const char *why = "";
    for (int fails_at = 1; why != NULL; fails_at++) {
        state->calls = 0;
        state->fails_at = fails_at;
        why = normfuse_torch_register("normfuse");
        CHECK((why != NULL) == (state->calls >= fails_at), "call %d failed: %s", fails_at, why);
    }
    for (int fails_at = 1; fails_at < 8; fails_at++) {
        state->calls = 0;
        state->fails_at = fails_at;
        CHECK(normfuse_torch_install() != NULL, "call %d failed unseen", fails_at);
    }
    state->fails_at = 0;
    CHECK(normfuse_torch_register("normfuse") == NULL && normfuse_torch_install() == NULL, "nothing is registered");
}

int main(void)
{
    CHECK(normfuse_torch_register("normfuse") != NULL, "kernels without torch");
    void *const library = dlopen(NORMFUSE_FAKE_LIBTORCH, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL, "dlopen: %s", dlerror());
    if (library == NULL)
        return harness_close();
    const struct fake_torch_table *(*table)(void);
    void *const address = dlsym(library, "fake_torch_table");
    memcpy(&table, &address, sizeof table);
    torch = table();
    test_registration();
    test_every_failure();
    test_numbers();
    test_groups_without_channels();
    test_values();
    return harness_close();
}
