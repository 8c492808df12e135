/* SPDX-License-Identifier: MIT
 *
 * threads.h - the built-in thread pool. */
#ifndef NORMFUSE_CPU_THREADS_H
#define NORMFUSE_CPU_THREADS_H

#include <stdatomic.h>
#include <stdint.h>

/* That a call may use: of NORMFUSE_NUM_THREADS, exec.threads, and the machine. */
enum { NORMFUSE_MAX_THREADS = 1024 };

/* Threads of the pool, the caller's included: NORMFUSE_NUM_THREADS, else what affinity and the cgroup quota allow. */
int32_t normfuse_threads_default(void);

/* Runs task(context, 0) on the caller's thread and, meanwhile, those of tasks 1 to count - 1 for which a thread of the
 * pool has time; returns when all begun are done. Task 0 by itself must do all the work that no other task has taken: a
 * thread that its CPU keeps waiting is not waited for. When the pool is busy with another caller's work, or threads
 * cannot be made, task 0 runs alone. */
void normfuse_threads_run(int32_t count, void (*task)(void *context, int64_t i), void *context);

/* A flag that is raised once, from 0 on. The wait spins (`spins` pauses), yields, then sleeps: a caller of higher
 * priority would otherwise keep the thread that it waits for from its CPU. */
void normfuse_flag_wait(_Atomic int32_t *flag, int spins);
void normfuse_flag_raise(_Atomic int32_t *flag);

#endif
