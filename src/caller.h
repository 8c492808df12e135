/* SPDX-License-Identifier: MIT
 *
 * caller.h - what a call leaves as it found it in its caller's thread: errno, and the floating-point environment with
 * its flags. In between the environment is the standard one, for the same bits whatever the caller set: rounding to
 * nearest, subnormal numbers, no traps. */
#ifndef NORMFUSE_CALLER_H
#define NORMFUSE_CALLER_H

#include <errno.h>
#include <stdint.h>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <fenv.h>
#endif

struct normfuse_caller {
    int error;
#if defined(__x86_64__)
    uint32_t mxcsr;
#elif defined(__aarch64__)
    uint64_t control, flags;
#else
    fenv_t environment;
#endif
};

/* The clobbers keep loads and stores, and so the arithmetic between them, on their side. */
static inline struct normfuse_caller normfuse_enter(void)
{
    struct normfuse_caller caller = {.error = errno};
#if defined(__x86_64__)
    static const uint32_t standard = 0x1f80;
    __asm__ volatile("stmxcsr %0" : "=m"(caller.mxcsr) : : "memory");
    if ((caller.mxcsr & ~UINT32_C(0x3f)) != standard) /* but for the flags */
        __asm__ volatile("ldmxcsr %0" : : "m"(standard) : "memory");
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(caller.control), "=r"(caller.flags) : : "memory");
    if (caller.control != 0)
        __asm__ volatile("msr fpcr, xzr" : : : "memory");
#else
    fegetenv(&caller.environment);
    fesetenv(FE_DFL_ENV);
#endif
    return caller;
}

static inline void normfuse_leave(const struct normfuse_caller *caller)
{
#if defined(__x86_64__)
    __asm__ volatile("ldmxcsr %0" : : "m"(caller->mxcsr) : "memory");
#elif defined(__aarch64__)
    if (caller->control != 0)
        __asm__ volatile("msr fpcr, %0" : : "r"(caller->control) : "memory");
    __asm__ volatile("msr fpsr, %0" : : "r"(caller->flags) : "memory");
#else
    fesetenv(&caller->environment);
#endif
    errno = caller->error;
}

#endif
