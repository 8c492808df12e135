/* SPDX-License-Identifier: MIT
 *
 * fake_torch.h - what src/bindings/torch.c calls of libtorch, without torch: tensors that are counted, and calls that
 * fail where they are told to. */
#ifndef NORMFUSE_TESTS_FAKE_TORCH_H
#define NORMFUSE_TESTS_FAKE_TORCH_H

#include <stdbool.h>
#include <stdint.h>

enum { FAKE_F64 = 7, FAKE_F32 = 6, FAKE_F16 = 5, FAKE_BF16 = 15, FAKE_UINT8 = 0, FAKE_CPU = 0, FAKE_CUDA = 1 };

typedef void fake_kernel(uint64_t *stack, uint64_t inputs, uint64_t outputs);

struct fake_torch {
    /* Settable */
    int fails_at;        /* this call, from 1 on, of those that may fail; 0: none */
    const char *library; /* whose kernels fake_kernel_of gives: "normfuse" or "aten" */
    /* Events so far */
    int calls;         /* of those that may fail */
    const char *failed; /* the name of the one that did */
    int live;          /* tensors, cells of optional ones, and lists */
    int loops;         /* parallel loops */
    int raised;
    char message[256]; /* of what was raised last */
};

/* The functions of the library that is opened, by their names. */
struct fake_torch_table {
    struct fake_torch *state;
    void *(*tensor)(int64_t axes, const int64_t *sizes, int32_t dtype); /* contiguous, of 0.5, 1.5, 0.5, ... */
    void (*set_strides)(void *tensor, const int64_t *strides);
    uint64_t *(*cell)(void *tensor);                 /* an optional tensor that is given */
    void *(*mask)(bool first, bool second, bool third); /* a list of truth values */
    void (*release)(void *tensor);
    const void *(*data)(void *tensor);
    fake_kernel *(*kernel_of)(const char *name); /* a CPU one that is registered; NULL: there is none */
};
const struct fake_torch_table *fake_torch_table(void);

#endif
