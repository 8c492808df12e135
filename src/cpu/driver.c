/* SPDX-License-Identifier: MIT
 *
 * driver.c - runs a problem on the CPU: schedules its pieces (plan.h) on threads.
 *
 * The work is a sequence of bundles: norm groups that are walked together, one or several; or one sample where nothing
 * shares statistics. Each bundle has a reduce part (moments; backward: sums), a join, and an apply part. Bundles are
 * cut into pieces and pieces into chunks by shape alone, and everything is joined in one fixed order, so threads and
 * instruction sets cannot change a bit.
 *
 * A team of threads walks the bundles in order, one step a bundle: apply piece p of bundle b, then reduce piece p of
 * bundle b + 1, whose values the apply part has prefetched, so that reads from memory overlap the stores. Where bundles
 * are small each thread is a team of its own over a range of bundles; where they are large all threads are one team. A
 * step waits for the bundle before it to be joined; that never deadlocks, whatever runs the threads, since pieces are
 * claimed in order and a claimed piece waits for nothing but steps already claimed. */
#include <stdio.h>
#include <stdlib.h>

#include "caller.h"
#include "cpu/machine.h"
#include "cpu/plan.h"
#include "cpu/run.h"
#include "cpu/threads.h"

/* One thread walks bundles [first, last). */
static void walk_alone(const struct plan *plan, struct worker *w, int64_t first, int64_t last)
{
    const bool forward = !plan->back_and_forth;
    struct team *team = &w->own;
    for (int64_t bundle = first - 1; bundle < last; bundle++) {
        const bool reduces = plan->reduce && bundle + 1 < last,
                   applies = plan->apply && (plan->dependent || !plan->reduce) && bundle >= first;
        struct bundle_state *now = &team->state[bundle & 1], *then = &team->state[(bundle + 1) & 1];
        const int64_t next = reduces && plan->ahead ? bundle + 1 : -1;
        /* two states: with coefficients that never change, two bundles fill both */
        if (applies && !plan->reduce && !(plan->constant && bundle >= first + 2))
            normfuse_prepare_bundle(plan, team, now, bundle);
        if (reduces && !(plan->constant && bundle + 1 >= first + 2))
            normfuse_prepare_bundle(plan, team, then, bundle + 1);
        for (int64_t i = 0; i < plan->pieces; i++) {
            const int64_t index = forward || (bundle & 1) ? i : plan->pieces - 1 - i;
            if (applies)
                normfuse_apply_piece(plan, w, now, bundle, index, next);
            if (reduces)
                normfuse_reduce_piece(plan, w, then, bundle + 1, index);
        }
        if (reduces)
            normfuse_finish_bundle(plan, team, bundle + 1);
    }
}

enum { STEP_SPINS = 100 }; /* pauses before a wait for a bundle yields */

/* All threads walk all bundles; this is thread t. */
static void walk_together(struct plan *plan, int32_t t)
{
    struct worker *w = &plan->workers[t];
    struct team *team = &plan->shared;
    const int64_t pieces = plan->pieces;
    const int32_t threads = plan->threads;
    for (int64_t bundle = -1; bundle < plan->bundles; bundle++) {
        const bool reduces = bundle + 1 < plan->bundles, applies = plan->dependent && bundle >= 0;
        if (!reduces && !applies)
            break;
        if (bundle >= 0)
            normfuse_flag_wait(&plan->ready[bundle], STEP_SPINS);
        struct bundle_state *now = &team->state[bundle & 1], *then = &team->state[(bundle + 1) & 1];
        _Atomic int32_t *claims = plan->claims + (bundle + 1) * threads;
        for (int32_t j = 0; j < threads; j++) {
            /* its own range first, whose values are in its cache; then what slower threads have not begun */
            const int32_t owner = (t + j) % threads;
            const int64_t begin = pieces * owner / threads, end = pieces * (owner + 1) / threads;
            for (;;) {
                const int64_t claimed = atomic_fetch_add_explicit(&claims[owner], 1, memory_order_relaxed);
                if (begin + claimed >= end)
                    break;
                const int64_t index = !plan->back_and_forth || (bundle & 1) ? begin + claimed : end - 1 - claimed;
                if (applies)
                    normfuse_apply_piece(plan, w, now, bundle, index, reduces && plan->ahead ? bundle + 1 : -1);
                if (reduces) {
                    normfuse_reduce_piece(plan, w, then, bundle + 1, index);
                    if (atomic_fetch_add_explicit(&plan->finished[bundle + 1], 1, memory_order_acq_rel) == pieces - 1) {
                        normfuse_finish_bundle(plan, team, bundle + 1);
                        if (bundle + 2 < plan->bundles && !(plan->constant && bundle >= 0))
                            normfuse_prepare_bundle(plan, team, &team->state[bundle & 1], bundle + 2);
                        normfuse_flag_raise(&plan->ready[bundle + 1]);
                    }
                }
            }
        }
    }
}

/* Pieces that wait for nothing: any thread takes any. */
static void walk_pieces(struct plan *plan, int32_t t)
{
    struct worker *w = &plan->workers[t];
    const int64_t all = plan->bundles * plan->pieces;
    const int64_t grain = larger(1, smaller(all / (8 * plan->threads), 64));
    int64_t prepared = -1;
    for (;;) {
        const int64_t from = atomic_fetch_add_explicit(&plan->next_task, grain, memory_order_relaxed);
        if (from >= all)
            return;
        for (int64_t i = from; i < smaller(all, from + grain); i++) {
            const int64_t bundle = i / plan->pieces;
            if (prepared < 0 || (bundle != prepared && !plan->constant)) {
                normfuse_prepare_bundle(plan, &w->own, &w->own.state[0], bundle);
                prepared = bundle;
            }
            normfuse_apply_piece(plan, w, &w->own.state[0], bundle, i % plan->pieces, -1);
        }
    }
}

/* On any thread: its floating-point environment may be another than the caller's. */
static void run_thread(void *context, int64_t t)
{
    const struct normfuse_caller caller = normfuse_enter();
    struct plan *plan = context;
    const struct normfuse_problem *p = plan->p;
    if (plan->channel)
        normfuse_channels_begin(plan, &plan->workers[t].small);
    if (!plan->teams_of_one) {
        if (plan->reduce)
            walk_together(plan, (int32_t)t);
        else
            walk_pieces(plan, (int32_t)t);
    } else {
        for (;;) {
            const int64_t task = atomic_fetch_add_explicit(&plan->next_task, 1, memory_order_relaxed);
            if (task >= plan->tasks)
                break;
            struct worker *w = &plan->workers[t];
            if (plan->channel) {
                normfuse_channels_walk(plan, &w->small, task);
                continue;
            }
            if (plan->batch) {
                walk_alone(plan, w, task * plan->bundles_per_task,
                           smaller(plan->bundles, (task + 1) * plan->bundles_per_task));
                continue;
            }
            const int64_t block = task / plan->group_ranges, range = task % plan->group_ranges;
            const int64_t first = block * plan->blocks_per_task * plan->block_samples;
            const int64_t last = smaller(p->n, first + plan->blocks_per_task * plan->block_samples);
            const int64_t groups = plan->sample_bundles;
            if (plan->small_sets) {
                normfuse_small_sets_walk(plan, w, first, last, range * plan->bundles_per_task,
                                         smaller(groups, (range + 1) * plan->bundles_per_task));
                continue;
            }
            if (plan->group_ranges == 1) {
                walk_alone(plan, w, first * groups, last * groups);
            } else {
                for (int64_t n = first; n < last; n++)
                    walk_alone(plan, w, n * groups + range * plan->bundles_per_task,
                               n * groups + smaller(groups, (range + 1) * plan->bundles_per_task));
            }
        }
    }
    if (plan->channel)
        normfuse_channels_end(plan, &plan->workers[t].small);
    if (plan->stream)
        plan->table->fence();
    normfuse_leave(&caller);
}

size_t normfuse_cpu_scratch_bytes(const struct normfuse_problem *problem, const normfuse_exec *exec)
{
    if (normfuse_is_empty(problem))
        return 0;
    struct plan plan;
    normfuse_plan_make(&plan, problem, exec);
    return normfuse_plan_lay_out(&plan, NULL, 0);
}

_Static_assert(sizeof(struct plan) <= NORMFUSE_MEMO_WORDS * sizeof(uint64_t), "a memo has room for a plan");

/* Plans a call and lays it out, but for what its memo has of that. Returns the bytes that it takes. */
static size_t plan_call(struct plan *plan, const struct normfuse_problem *p, const normfuse_exec *exec, char *base,
                        size_t room)
{
    if (p->memo && plan->table) {
        normfuse_plan_see(plan, p);
        if (plan->base == base && plan->bytes <= room) {
            *plan->workers = plan->worker;
            return plan->bytes;
        }
    } else {
        normfuse_plan_make(plan, p, exec);
    }
    plan->bytes = normfuse_plan_lay_out(plan, base, room);
    plan->base = plan->bytes <= room ? base : NULL;
    if (plan->base)
        plan->worker = *plan->workers;
    return plan->bytes;
}

normfuse_status normfuse_cpu_run(const struct normfuse_problem *p, const normfuse_exec *exec)
{
    struct plan local, *const plan = p->memo ? (struct plan *)(void *)p->memo : &local;
    if (normfuse_is_empty(p)) {
        normfuse_plan_say(plan, p, 1);
        normfuse_store_empty(plan);
        return NORMFUSE_OK;
    }
    _Alignas(ALIGNMENT) char stack[STACK_BYTES];
    const bool given = exec && exec->scratch;
    const size_t room = given ? exec->scratch_bytes : sizeof stack;
    const size_t bytes = plan_call(plan, p, exec, given ? exec->scratch : stack, room);
    if (bytes == SIZE_MAX)
        return normfuse_refuse(NORMFUSE_OUT_OF_MEMORY, "%s: the bytes of scratch overflow", p->name);
    if (given && bytes > room)
        return normfuse_refuse(NORMFUSE_SCRATCH, "%s: exec.scratch_bytes is %zu, %zu are needed", p->name, room, bytes);
    char *allocated = NULL;
    if (bytes > room) {
        allocated = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
        if (!allocated)
            return normfuse_refuse(NORMFUSE_OUT_OF_MEMORY, "%s: no memory for %zu bytes of scratch", p->name, bytes);
        normfuse_plan_lay_out(plan, allocated, bytes);
    }

    const struct normfuse_machine *machine = normfuse_machine_known();
    if (machine->verbose_dispatch)
        fprintf(stderr, "normfuse: %s -> cpu %s, %d %s%s%s%s\n", p->name, plan->table->isa, plan->threads,
                plan->threads == 1 ? "thread" : "threads",
                plan->channel        ? ", norm over channels"
                : plan->small_sets   ? ", many norm groups at a time"
                : plan->teams_of_one ? ", one bundle a thread"
                : plan->reduce       ? ", threads share bundles"
                                    : ", pieces",
                plan->stream ? ", streaming stores" : "", machine->capped ? " (capped by NORMFUSE_MAX_ISA)" : "");

    normfuse_read_parameters(plan);
    if (plan->sums_samples)
        memset(plan->sample_sums, 0, (size_t)(plan->blocks * p->c * 2) * 8);
    if (plan->sums_slopes)
        normfuse_begin_slopes(plan);
    if (!plan->reduce && !plan->backward && !plan->none)
        normfuse_store_given_statistics(plan);
    if (plan->backward && !(p->phases & NORMFUSE_PHASE_BACKWARD_SUMS))
        normfuse_store_given_gradients(plan);

    if ((plan->reduce || plan->apply) && plan->bundles > 0) {
        if (!plan->teams_of_one && plan->reduce) {
            for (int64_t i = 0; i < (plan->bundles + 1) * plan->threads; i++)
                atomic_init(&plan->claims[i], 0);
            for (int64_t i = 0; i <= plan->bundles; i++) {
                atomic_init(&plan->finished[i], 0);
                atomic_init(&plan->ready[i], 0);
            }
            normfuse_prepare_bundle(plan, &plan->shared, &plan->shared.state[0], 0);
        }
        atomic_init(&plan->next_task, 0);
        if (plan->threads == 1)
            run_thread(plan, 0);
        else if (exec && exec->parallel_for)
            exec->parallel_for(exec->pool, plan->threads, run_thread, plan);
        else
            normfuse_threads_run(plan->threads, run_thread, plan);
    }
    if (plan->channel)
        normfuse_channels_finish(plan);
    else
        normfuse_finish_samples(plan);
    if (plan->sums_slopes)
        normfuse_finish_slopes(plan);
    free(allocated);
    return NORMFUSE_OK;
}
