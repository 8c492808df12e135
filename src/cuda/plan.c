/* SPDX-License-Identifier: MIT
 *
 * plan.c - the steps of a call, each a kernel with its geometry: kernels that hold what they read on the chip where
 * that is possible, else two passes, and the small kernels of the body `finish` between and after them; and the memory
 * of plans. */
#include "schedules.h"

#include <pthread.h>
#include <stdio.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* Threads that share each of `items`, which has so many parts: few enough of those that all are on their way at once,
 * but no more threads than a GPU holds. Affine 9x6x58192 bf16 backward, 198 parts: a warp each 24.0 us, a block 16. */
static __attribute__((noinline)) int64_t lanes_of(int64_t items, int64_t parts)
{
    enum { PARTS_A_LANE = 4, MAX_LANES = 256, RESIDENT_THREADS = 1 << 17 };
    int64_t lanes = 1;
    while (lanes < MAX_LANES && lanes * PARTS_A_LANE < parts && (lanes < 32 || items * lanes * 2 <= RESIDENT_THREADS))
        lanes *= 2;
    return lanes;
}

/* One of the body `finish`, over `items` sets, shares or channels that have at most `parts` parts each of the sums to
 * join. Its type is double, whatever the call's, unless the work finds a root or running statistics. */
static struct step *add_finish(struct plan *plan, const struct normfuse_problem *p, int32_t work, int64_t items,
                               int64_t parts)
{
    const int64_t lanes = lanes_of(items, parts), threads = maximum(lanes, 128);
    struct step *const step = &plan->steps[plan->count++];
    *step = (struct step){
        .signature = {.body = NORMFUSE_BODY_finish,
                      .work = work,
                      .type = NORMFUSE_F64,
                      .backward = work == NORMFUSE_WORK_PARTS || work == NORMFUSE_WORK_GRADIENTS,
                      .statistics = p->sets == NORMFUSE_SETS_BATCH  ? NORMFUSE_STATISTICS_CHANNEL
                                    : p->sets != NORMFUSE_SETS_NONE ? NORMFUSE_STATISTICS_GROUP
                                    : p->evaluate                   ? NORMFUSE_STATISTICS_RUNNING
                                                                    : NORMFUSE_STATISTICS_NONE},
        .launch = {.threads = (uint32_t)threads, .grid = divide_up(items, threads / lanes)},
        .finish = {.lanes = (int32_t)lanes,
                   .items = (int32_t)items,
                   .samples = (int32_t)p->n,
                   .channels = (int32_t)p->c,
                   .by_groups = divisor_of(p->groups),
                   .by_set_channels = divisor_of(group_of(p))}};
    return step;
}

/* The type of statistics. */
static int32_t computed_type(const struct normfuse_problem *p)
{
    return p->type == NORMFUSE_F64 ? NORMFUSE_F64 : NORMFUSE_F32;
}

static void set_running(const struct normfuse_problem *p, struct normfuse_cuda_signature *of)
{
    of->updates_running = 1;
    of->running_mean = normfuse_cuda_code_of(&p->running_mean);
    of->running_var = normfuse_cuda_code_of(&p->running_var);
}

/* The statistics of `sets` sets of which each has so many parts: where these are very many, a few blocks a set first
 * join shares of them. `keeps`: later kernels read them. */
static void add_statistics(struct plan *plan, const struct normfuse_problem *p, int64_t sets, int64_t parts, bool keeps)
{
    enum { MANY_PARTS = 4096, SHARE = 1024, MAX_SHARES = 256 };
    int64_t share = 1, joined = parts;
    if (parts > MANY_PARTS && sets * MAX_SHARES < INT32_MAX) {
        const int64_t shares = minimum(MAX_SHARES, divide_up(parts, SHARE));
        share = divide_up(parts, shares);
        joined = divide_up(parts, share);
        struct normfuse_finish_arguments *const of =
            &add_finish(plan, p, NORMFUSE_WORK_SHARES, sets * shares, parts)->finish;
        of->by_shares = divisor_of(shares);
        of->triples = (int32_t)parts;
        of->share = (int32_t)share;
    }
    struct step *const step = add_finish(plan, p, NORMFUSE_WORK_STATISTICS, sets, joined);
    struct normfuse_cuda_signature *const of = &step->signature;
    step->finish.triples = (int32_t)parts;
    step->finish.share = (int32_t)share;
    step->finish.joined = (int32_t)joined;
    of->writes_shard = (p->phases & NORMFUSE_PHASE_STATISTICS) != 0 && p->stats != NULL;
    if (of->writes_shard)
        return;
    of->type = computed_type(p);
    of->mean = normfuse_cuda_code_of(&p->mean);
    of->rstd = normfuse_cuda_code_of(&p->rstd);
    of->keeps_statistics = keeps;
    if (p->has_running_momentum && p->sets == NORMFUSE_SETS_BATCH)
        set_running(p, of);
}

/* One over sums of channels, as the kernel left them whose geometry this is; `joined`: those of a channel are one. */
static struct step *add_finish_of_sums(struct plan *plan, const struct normfuse_problem *p, int32_t work, int64_t items,
                                       int64_t parts, bool joined)
{
    const struct sums *const of = &plan->of_sums;
    struct step *const step = add_finish(plan, p, work, items, parts);
    const bool given = (p->phases & NORMFUSE_PHASE_BACKWARD_SUMS) == 0;
    const bool by_channel = given ? p->sets != NORMFUSE_SETS_GROUP : of->by_channel;
    step->signature.gradients = p->sets == NORMFUSE_SETS_POSITION ? NORMFUSE_GRADIENTS_OF_SAMPLES_NORMALIZED
                                : !by_channel                     ? NORMFUSE_GRADIENTS_OF_SAMPLES
                                : p->sets == NORMFUSE_SETS_GROUP ? NORMFUSE_GRADIENTS_NORMALIZED
                                                                 : NORMFUSE_GRADIENTS_OF_CHANNELS;
    step->finish.slot_stride = given ? 1 : of->slots;
    step->finish.slots = given || joined ? 1 : of->slots;
    step->finish.by_slots = divisor_of(step->finish.slots);
    return step;
}

/* Pairs of slopes that the blocks which come next join. One slope is joined at once where these are few; else each
 * channel's become one first. Returns the blocks. */
static int64_t join_slopes(const struct normfuse_problem *p, int64_t samples, struct step *step)
{
    enum { MANY_PAIRS = 1 << 14 };
    struct normfuse_finish_slopes *const of = &step->finish.slopes;
    const int64_t slots = maximum(1, step->finish.slot_stride), pairs = samples * p->c * slots;
    const bool is_one = p->dslope.channel == 0, at_once = is_one && (pairs <= MANY_PAIRS || normfuse_is_empty(p));
    of->leaves = is_one && !at_once;
    of->items = at_once ? 1 : (int32_t)p->c;
    of->outers = (int32_t)(normfuse_is_empty(p) ? 0 : at_once ? 1 : samples);
    of->apart = (int32_t)(p->c * slots);
    of->by_slots = divisor_of(at_once ? pairs : slots);
    of->lanes = (int32_t)lanes_of(of->items, at_once ? pairs : samples * slots);
    step->signature.dslope = normfuse_cuda_code_of(&p->dslope);
    step->launch.threads = (uint32_t)maximum(step->launch.threads, of->lanes);
    return divide_up((int64_t)of->items * of->lanes, step->launch.threads);
}

/* One slope, of what `gradients` left of each channel. */
static void add_slope(struct plan *plan, const struct normfuse_problem *p)
{
    struct step *const step = add_finish_of_sums(plan, p, NORMFUSE_WORK_GRADIENTS, 1, p->c, false);
    step->signature.dslope = normfuse_cuda_code_of(&p->dslope);
    step->finish.slopes = (struct normfuse_finish_slopes){.lanes = step->finish.lanes,
                                                          .items = 1,
                                                          .outers = (int32_t)p->c,
                                                          .apart = step->finish.slot_stride,
                                                          .by_slots = divisor_of(1)};
}

/* Results of each channel: gradients of parameters, or a shard's sums. */
static void set_gradients(const struct normfuse_problem *p, struct normfuse_cuda_signature *of)
{
    of->writes_shard = (p->phases & NORMFUSE_PHASE_BACKWARD_APPLY) == 0;
    if (of->writes_shard)
        return;
    of->per_sample = p->sets == NORMFUSE_SETS_NONE && (p->dweight.batch != 0 || p->dbias.batch != 0);
    of->dweight = normfuse_cuda_code_of(&p->dweight);
    of->dbias = normfuse_cuda_code_of(&p->dbias);
    of->dscale = normfuse_cuda_code_of(&p->dscale);
    of->dshift = normfuse_cuda_code_of(&p->dshift);
}

static bool finds_gradients(const struct normfuse_cuda_signature *of)
{
    return (of->writes_shard | of->dweight | of->dbias | of->dscale | of->dshift) != 0;
}

/* The totals of `sets` sets, the parameters' gradients, those of prelu's slopes, or some of these. A block has the sums
 * of a set's channels; where these are very many, the parts of each channel become one first: group norm 1x157x289x82
 * in one group f32 NHWC backward has 62000, and took 111.5 us, 85 of them here. */
static void add_gradients(struct plan *plan, const struct normfuse_problem *p, int64_t sets, bool wants_gradients,
                          bool wants_slopes)
{
    enum { MANY_PARTS = 4096, PARTS_OF_CHANNEL = 4 };
    int64_t slots = maximum(1, plan->of_sums.slots);
    const int64_t samples = plan->of_sums.by_channel ? 1 : p->n;
    const int64_t outers = p->sets == NORMFUSE_SETS_BATCH ? samples : group_of(p); /* that a set has sums of */
    const bool joins = sets > 0 && slots >= PARTS_OF_CHANNEL && outers * slots > MANY_PARTS;
    if (joins) {
        add_finish_of_sums(plan, p, NORMFUSE_WORK_PARTS, samples * p->c, slots, false);
        slots = 1;
    }
    struct step *const step = add_finish_of_sums(plan, p, NORMFUSE_WORK_GRADIENTS, sets, outers * slots, joins);
    struct normfuse_cuda_signature *const of = &step->signature;
    /* A sample that gets something has a lane of its own, or a warp: affine 9x4x122x38 backward 9.4 us, where warps
     * have samples one after the other 15.6. */
    const int64_t of_samples = slots > 8 ? 128 * minimum(samples, 8) : 4 * minimum(samples, 32);
    const int64_t gradient_lanes = lanes_of(p->c, maximum(samples * slots, of_samples));
    of->totals = sets > 0;
    if (wants_gradients)
        set_gradients(p, of);
    of->weight = of->totals || of->dscale ? normfuse_cuda_code_of(&p->weight) : 0;
    of->bias = of->dscale ? normfuse_cuda_code_of(&p->bias) : 0;
    of->scale = normfuse_cuda_code_of(&p->scale);
    const bool finds = finds_gradients(of);
    const bool reads_statistics = finds && !of->writes_shard && of->gradients != NORMFUSE_GRADIENTS_NORMALIZED &&
                                  p->sets != NORMFUSE_SETS_POSITION;
    if (p->sets == NORMFUSE_SETS_NONE && p->evaluate && reads_statistics) {
        of->type = computed_type(p);
        of->running_var = normfuse_cuda_code_of(&p->running_var);
    }
    of->rstd = p->sets != NORMFUSE_SETS_NONE && (of->totals || reads_statistics) ? normfuse_cuda_code_of(&p->rstd) : 0;
    step->finish.gradient_lanes = (int32_t)gradient_lanes;
    if (finds)
        step->launch.threads = (uint32_t)maximum(step->launch.threads, gradient_lanes);
    const int64_t slope_blocks = wants_slopes ? join_slopes(p, samples, step) : 0;
    const int64_t threads = step->launch.threads;
    step->finish.totals_blocks = (int32_t)divide_up(sets * step->finish.lanes, threads);
    step->launch.grid = step->finish.totals_blocks + (finds ? divide_up(p->c * gradient_lanes, threads) : 0);
    step->finish.slopes.first_block = (int32_t)step->launch.grid;
    step->launch.grid += slope_blocks;
    if (step->finish.slopes.leaves)
        add_slope(plan, p);
}

/* A kernel that does `phases`; `holds`: one that holds on chip what it reads. */
static bool add_step(const struct shape *shape, struct plan *plan, int32_t phases, bool holds)
{
    const int32_t of_sums = NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_BACKWARD_SUMS;
    const bool sums = (phases & of_sums) != 0, applies = (phases & ~of_sums) != 0;
    struct step *const step = &plan->steps[plan->count];
    if (!(holds ? normfuse_cuda_hold(shape, step) : normfuse_cuda_pass(shape, step, sums, applies)))
        return false;
    if (shape->explains) {
        char name[NORMFUSE_KERNEL_NAME_BYTES];
        fprintf(stderr, "normfuse: plan: %s: takes %s\n", shape->problem->name,
                normfuse_cuda_signature_name(&step->signature, name));
    }
    step->phases = phases;
    if (step->launch.cooperative)
        plan->partials = step->messages;
    if (sums)
        plan->of_sums = step->sums;
    plan->count++;
    return true;
}

/* The pass that writes; `goes_on`: from what the first one has stored. */
static bool add_second_pass(const struct shape *shape, struct plan *plan, int32_t phases, bool goes_on)
{
    struct normfuse_problem rest = *shape->problem;
    struct shape of_rest = *shape;
    if (goes_on) {
        go_on_from_first_pass(&rest);
        (void)normfuse_cuda_shape_of(&rest, &of_rest);
    }
    if (!add_step(goes_on ? &of_rest : shape, plan, phases, false))
        return false;
    plan->steps[plan->count - 1].goes_on = goes_on;
    return true;
}

/* One kernel that holds what it reads, or sums, statistics of them, and results from these: each where it is wanted. */
static bool plan_forward(const struct shape *shape, struct plan *plan)
{
    const struct normfuse_problem *const p = shape->problem;
    const int64_t sets = sets_of(p);
    const bool empty = normfuse_is_empty(p);
    const bool statistics = (p->phases & NORMFUSE_PHASE_STATISTICS) != 0;
    const bool applies = (p->phases & NORMFUSE_PHASE_APPLY) != 0 && p->y.data != NULL;
    if (p->sets == NORMFUSE_SETS_NONE)
        return empty || p->y.data == NULL || add_step(shape, plan, NORMFUSE_PHASE_APPLY, true) ||
               add_step(shape, plan, NORMFUSE_PHASE_APPLY, false);
    const bool holds = statistics && (applies || is_of_single(p)) && !empty &&
                       add_step(shape, plan, NORMFUSE_PHASE_STATISTICS | NORMFUSE_PHASE_APPLY, true);
    int64_t parts = statistics ? 0 : 1; /* of a set */
    if (!holds && statistics && !empty) {
        if (!add_step(shape, plan, NORMFUSE_PHASE_STATISTICS, false))
            return false;
        parts = plan->steps[0].stream.set_triples;
        plan->partials = (size_t)(sets * parts) * 24;
    }
    const bool updates_later = p->has_running_momentum && p->sets == NORMFUSE_SETS_GROUP;
    if (!holds && sets > 0)
        add_statistics(plan, p, sets, parts, (applies && !empty) || updates_later);
    if (!holds && applies && !empty) {
        plan->statistics = (size_t)sets * 24;
        if (!add_second_pass(shape, plan, NORMFUSE_PHASE_APPLY, statistics && p->u.data != NULL))
            return false;
    }
    if (updates_later && sets > 0) {
        struct normfuse_cuda_signature *const of = &add_finish(plan, p, NORMFUSE_WORK_RUNNING, p->c, p->n)->signature;
        of->type = computed_type(p);
        set_running(p, of);
        plan->statistics = (size_t)sets * 24;
    }
    return true;
}

/* One kernel, or sums of dz, and dx from these or from given statistics: each where it is wanted. */
static bool plan_backward(const struct shape *shape, struct plan *plan)
{
    const struct normfuse_problem *const p = shape->problem;
    const int32_t both = NORMFUSE_PHASE_BACKWARD_SUMS | NORMFUSE_PHASE_BACKWARD_APPLY;
    const bool empty = normfuse_is_empty(p), centred = p->sets != NORMFUSE_SETS_NONE;
    const bool sums = (p->phases & NORMFUSE_PHASE_BACKWARD_SUMS) != 0;
    const bool wants_dx =
        (p->phases & NORMFUSE_PHASE_BACKWARD_APPLY) != 0 && (p->dx.data != NULL || p->dpost_add.data != NULL);
    bool wants_gradients = shape->wants_gradients,
         wants_slopes = sums && p->dslope.data != NULL; /* of a later kernel */
    struct step *const first = &plan->steps[0];
    if (empty) {
        plan->of_sums.by_channel = p->sets == NORMFUSE_SETS_BATCH;
    } else if (wants_dx && sums && !centred) {
        /* dx needs no sums: one reading in any case; small calls have one kernel for the gradients, too. */
        if (wants_gradients && add_step(shape, plan, both, true))
            wants_gradients = !first->finds_gradients;
        else if (!add_step(shape, plan, wants_gradients ? both : NORMFUSE_PHASE_BACKWARD_APPLY, false))
            return false;
    } else if ((wants_dx || (wants_gradients && is_of_single(p))) && sums && add_step(shape, plan, both, true)) {
        wants_gradients = wants_gradients && !first->finds_gradients;
    } else {
        if (sums && (wants_dx || wants_gradients || p->dpost_add.data != NULL) &&
            !add_step(shape, plan, NORMFUSE_PHASE_BACKWARD_SUMS, false))
            return false;
        if (wants_dx && centred) {
            add_gradients(plan, p, sets_of(p), wants_gradients, wants_slopes);
            wants_gradients = wants_slopes = false;
            plan->totals = (size_t)sets_of(p) * 16;
        }
        if (wants_dx && !add_second_pass(shape, plan, NORMFUSE_PHASE_BACKWARD_APPLY, first->stores_dz))
            return false;
    }
    /* If the call wants no sums, nothing reads them, but they have a place. */
    const int64_t pairs = (plan->of_sums.by_channel ? 1 : p->n) * p->c * plan->of_sums.slots;
    if (sums && (wants_gradients || plan->totals))
        plan->sums = empty ? 64 : (size_t)pairs * 16 * (p->dslope.data != NULL ? 2 : 1);
    if (wants_gradients || wants_slopes)
        add_gradients(plan, p, 0, wants_gradients, wants_slopes);
    return true;
}

static bool make_plan(const struct normfuse_problem *problem, const struct normfuse_cuda_device *device,
                      bool has_grid_barriers, bool explains, struct plan *plan)
{
    struct shape shape = {.device = device,
                          .policy = normfuse_cuda_policy(device->capability),
                          .has_grid_barriers = has_grid_barriers,
                          .explains = explains};
    *plan = (struct plan){.count = 0};
    if (!normfuse_cuda_shape_of(problem, &shape))
        return false;
    if (explains)
        fprintf(stderr, "normfuse: plan: %s: by figures of %s\n", problem->name,
                shape.policy->capability == device->capability ? "this kind of GPU"
                : shape.policy->capability > 0                 ? "compute capability 9.0, the newest measured"
                                                               : "no GPU, since none below 9.0 was measured");
    return shape.direction == FORWARD ? plan_forward(&shape, plan) : plan_backward(&shape, plan);
}

/* A call is planned twice, for its scratch and to run, and those of a network come again and again: planning takes some
 * 20 us, which a network of more layers than are remembered pays at every layer. So all threads together remember the
 * last plans, and each its own last one, which it need not lock. */
enum { PLANS_KEPT = 1024, PLACES_OF_A_PLAN = 8 };

/* All that a plan depends on, and nothing else: keys are compared byte by byte, padding too. */
struct plan_key {
    struct normfuse_problem problem;
    uint64_t device; /* its serial number; 0: no plan is here */
    const char *only; /* of normfuse_cuda_choice, as is `drawn` */
    uint64_t drawn;
    uint64_t has_grid_barriers;
};

struct cached_plan {
    struct plan_key key;
    bool found;
    struct plan plan;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct cached_plan remembered[PLANS_KEPT]; /* each in one of a few places after that of its hash */

/* A pointer's facts: whether it is there, and where in a vector of 16 bytes it points. */
static char *place_of(const char *data)
{
    return (char *)(data != NULL ? 1 + (uintptr_t)data % 16 : 0);
}

static void keep_parameter(struct normfuse_parameter *key, const struct normfuse_parameter *given)
{
    key->batch = given->batch;
    if (given->data == NULL)
        return;
    key->data = place_of(given->data);
    key->channel = given->channel;
    key->type = given->type;
}

static void make_key(const struct normfuse_problem *problem, struct plan_key *of)
{
    struct normfuse_problem *const key = &of->problem;
    memset(of, 0, sizeof *of);
#define KEEP(name) key->name = problem->name;
    KEEP(name) KEEP(device) KEEP(sets) KEEP(phases) KEEP(type) KEEP(y_type) KEEP(columns) KEEP(activation)
    KEEP(evaluate) KEEP(has_running_momentum) KEEP(from_y) KEEP(n) KEEP(c) KEEP(s) KEEP(groups) KEEP(statistics)
    KEEP(eps_kind) KEEP(rounds_pre_bias)
#undef KEEP
    key->x = problem->x; /* strides are those of all */
#define KEEP(name) key->name.data = place_of(problem->name.data);
    NORMFUSE_CUDA_TENSORS(KEEP)
#undef KEEP
#define KEEP(name) keep_parameter(&key->name, &problem->name);
    NORMFUSE_CUDA_PARAMETERS(KEEP)
#undef KEEP
}

/* A plan has room for more steps than most have, and copying them takes longer than all else of finding it. */
static void copy_plan(struct cached_plan *to, const struct cached_plan *from)
{
    const size_t steps = sizeof from->plan.steps[0] * (size_t)from->plan.count;
    memcpy(&to->key, &from->key, sizeof to->key);
    to->found = from->found;
    memcpy(to->plan.steps, from->plan.steps, steps);
    memcpy((char *)&to->plan + offsetof(struct plan, count), (const char *)&from->plan + offsetof(struct plan, count),
           sizeof to->plan - offsetof(struct plan, count));
}

/* The place of this key's plan, filled or not. Under the mutex. */
static struct cached_plan *find_place(const struct plan_key *key)
{
    static unsigned next; /* of the places, the one that is given up where all are taken */
    _Static_assert(sizeof *key % sizeof(uint64_t) == 0, "a key is hashed word by word");
    uint64_t hash = 0, words[sizeof *key / sizeof(uint64_t)];
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        hash = (hash ^ words[i]) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
    }
    for (unsigned i = 0; i < PLACES_OF_A_PLAN; i++) {
        struct cached_plan *const place = &remembered[(hash + i) % PLANS_KEPT];
        if (place->key.device == 0 || memcmp(&place->key, key, sizeof *key) == 0)
            return place;
    }
    return &remembered[(hash + next++ % PLACES_OF_A_PLAN) % PLANS_KEPT];
}

void normfuse_cuda_plans_after_fork(void)
{
    pthread_mutex_init(&mutex, NULL);
}

const struct plan *normfuse_cuda_plan_of(const struct normfuse_problem *problem,
                                         const struct normfuse_cuda_device *device, bool has_grid_barriers,
                                         bool explains)
{
    static _Thread_local struct cached_plan last;
    struct plan_key key;
    make_key(problem, &key);
    key.device = device->serial;
    key.only = normfuse_cuda_choice()->only;
    key.drawn = normfuse_cuda_choice()->drawn;
    key.has_grid_barriers = has_grid_barriers;
    if (explains) {
        last.key.device = 0;
    } else if (memcmp(&last.key, &key, sizeof key) != 0) {
        pthread_mutex_lock(&mutex);
        copy_plan(&last, find_place(&key));
        pthread_mutex_unlock(&mutex);
    }
    if (memcmp(&last.key, &key, sizeof key) != 0) {
        last.key = key;
        last.found = make_plan(problem, device, has_grid_barriers, explains, &last.plan);
        pthread_mutex_lock(&mutex);
        copy_plan(find_place(&key), &last);
        pthread_mutex_unlock(&mutex);
    }
    return last.found ? &last.plan : NULL;
}
