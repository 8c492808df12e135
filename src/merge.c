/* SPDX-License-Identifier: MIT
 *
 * merge.c - joins the statistics and the sums of shards, in the order given, in double. */
#include "backend.h"
#include "caller.h"
#include "exact_math.h"
#include "package.h"

#include <inttypes.h>

struct shards {
    struct normfuse_flat in, out;
    normfuse_device device;
    int64_t count, values; /* shards, doubles a shard */
    struct normfuse_flat stats; /* of ..._per_value: triples; data is NULL elsewhere */
};

/* in: [shards, ..., width], out: [..., width]. */
static normfuse_status check(struct shards *shards, const char *call, const normfuse_tensor *in,
                             const normfuse_tensor *out, const normfuse_exec *exec, int64_t width)
{
    if (in == NULL || out == NULL)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: %s is NULL", call, in == NULL ? "in" : "out");
    if (exec != NULL) {
        const normfuse_status status = normfuse_check_struct(call, "exec", exec->struct_bytes, sizeof *exec);
        if (status != NORMFUSE_OK)
            return status;
        if ((exec->flags & ~(uint32_t)NORMFUSE_PREPARE) != 0 || exec->reserved != 0)
            return normfuse_refuse(NORMFUSE_BAD_ARGUMENT,
                                   "%s: exec.flags must be 0 or NORMFUSE_PREPARE, and exec.reserved 0", call);
    }
    struct normfuse_flat flat_in, flat_out;
    normfuse_status status = normfuse_flat_tensor(&flat_in, call, "in", in);
    if (status == NORMFUSE_OK)
        status = normfuse_flat_tensor(&flat_out, call, "out", out);
    if (status != NORMFUSE_OK)
        return status;
    if (flat_in.type != NORMFUSE_F64 || flat_out.type != NORMFUSE_F64)
        return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: %s must be f64", call,
                               flat_in.type != NORMFUSE_F64 ? "in" : "out");
    if (in->shape[in->ndim - 1] != width || in->ndim < 2)
        return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: in must be [shards, ..., %" PRId64 "]", call, width);
    if (out->shape[out->ndim - 1] != width)
        return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: out must be [..., %" PRId64 "]", call, width);
    int64_t values = 1;
    for (int32_t a = 1; a < in->ndim; a++)
        values *= in->shape[a];
    if (flat_out.elements != values)
        return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: out has %" PRId64 " elements, a shard of in has %" PRId64, call,
                               flat_out.elements, values);
    if (in->device.device_type != out->device.device_type || in->device.device_id != out->device.device_id)
        return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: out is on another device than in", call);
    if (in->device.device_type != NORMFUSE_CPU && in->device.device_type != NORMFUSE_CUDA)
        return normfuse_refuse(NORMFUSE_UNSUPPORTED,
                               "%s: in is on a device of type %d; CPU (1) and CUDA (2) are supported", call,
                               (int)in->device.device_type);
    *shards = (struct shards){
        .in = flat_in, .out = flat_out, .device = in->device, .count = in->shape[0], .values = values};
    const uintptr_t in_low = (uintptr_t)flat_in.data, in_high = in_low + (uintptr_t)flat_in.elements * sizeof(double);
    const uintptr_t out_low = (uintptr_t)flat_out.data, out_high = out_low + (uintptr_t)values * sizeof(double);
    if (flat_in.elements != 0 && in_low != out_low && in_low < out_high && out_low < in_high)
        return normfuse_refuse(NORMFUSE_OVERLAP, "%s: out overlaps in, but is not its first shard", call);
    return NORMFUSE_OK;
}

/* stats: [..., 3], whose triples divide the pairs of out. */
static normfuse_status check_stats(struct shards *shards, const char *call, const normfuse_tensor *stats)
{
    if (stats == NULL)
        return normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: stats is NULL", call);
    const normfuse_status status = normfuse_flat_tensor(&shards->stats, call, "stats", stats);
    if (status != NORMFUSE_OK)
        return status;
    if (shards->stats.type != NORMFUSE_F64)
        return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: stats must be f64", call);
    const int64_t triples = shards->stats.elements / 3, pairs = shards->values / 2;
    if (stats->shape[stats->ndim - 1] != 3 || (triples == 0 ? pairs != 0 : pairs % triples != 0))
        return normfuse_refuse(NORMFUSE_BAD_SHAPE, "%s: stats must be [..., 3], a triple for as many pairs of out each",
                               call);
    if (stats->device.device_type != shards->device.device_type || stats->device.device_id != shards->device.device_id)
        return normfuse_refuse(NORMFUSE_UNSUPPORTED, "%s: stats is on another device than in", call);
    return NORMFUSE_OK;
}

static normfuse_status merge_on_device(const struct shards *shards, const char *call, int32_t width,
                                       const normfuse_exec *exec)
{
    const struct normfuse_backend *const backend = normfuse_backend_of(shards->device.device_type);
    if (backend == NULL)
        return normfuse_refuse(NORMFUSE_NO_DRIVER,
                               "%s: in is on a CUDA device, and this library was built without CUDA", call);
    const normfuse_status status = backend->check(call, shards->device.device_id);
    if (status != NORMFUSE_OK || shards->values == 0)
        return status;
    return backend->merge(&shards->in, &shards->stats, &shards->out, width, shards->device.device_id, exec);
}

/* Chan, Golub and LeVeque 1979: the moments of two parts give those of the whole, without the cancellation of sums of
 * squares. A part without values is skipped, whatever its mean holds. */
static void merge_stats(const struct shards *shards)
{
    const double *const from = (const double *)(const void *)shards->in.data;
    double *const to = (double *)(void *)shards->out.data;
    for (int64_t i = 0; i < shards->values; i += 3) {
        double count = 0, mean = 0, m2 = 0;
        for (int64_t shard = 0; shard < shards->count; shard++) {
            const double *const part = from + shard * shards->values + i;
            if (part[0] == 0)
                continue;
            if (count == 0) {
                count = part[0];
                mean = part[1];
                m2 = part[2];
                continue;
            }
            const double total = count + part[0], share = part[0] / total, delta = part[1] - mean;
            m2 += part[2] + delta * delta * (count * share);
            mean += delta * share;
            count = total;
        }
        to[i] = count;
        to[i + 1] = mean;
        to[i + 2] = m2;
    }
}

static void merge_sums(const struct shards *shards)
{
    const double *const from = (const double *)(const void *)shards->in.data;
    double *const to = (double *)(void *)shards->out.data;
    const double *const stats = (const double *)(const void *)shards->stats.data;
    const int64_t triples = shards->stats.elements / 3, share = triples == 0 ? 1 : shards->values / triples;
    for (int64_t i = 0; i < shards->values; i++) {
        double sum = 0;
        for (int64_t shard = 0; shard < shards->count; shard++)
            sum += from[shard * shards->values + i];
        if (stats != NULL) {
            const double count = stats[i / share * 3];
            sum = sum * NORMFUSE_PER_VALUE / (count < 1 ? 1 : count);
        }
        to[i] = sum;
    }
}

static normfuse_status merge(const char *call, const normfuse_tensor *in, const normfuse_tensor *out,
                             const normfuse_exec *exec, int32_t width, void (*here)(const struct shards *),
                             bool per_value, const normfuse_tensor *stats)
{
    const struct normfuse_caller caller = normfuse_enter();
    struct shards shards;
    normfuse_status status = check(&shards, call, in, out, exec, width);
    if (status == NORMFUSE_OK && per_value)
        status = check_stats(&shards, call, stats);
    const bool prepares = exec != NULL && (exec->flags & NORMFUSE_PREPARE) != 0;
    if (status == NORMFUSE_OK && shards.device.device_type != NORMFUSE_CPU)
        status = merge_on_device(&shards, call, width, exec);
    else if (status == NORMFUSE_OK && !prepares)
        here(&shards);
    normfuse_leave(&caller);
    return status;
}

normfuse_status normfuse_stats_merge(const normfuse_tensor *in, const normfuse_tensor *out, const normfuse_exec *exec)
{
    return merge("stats_merge", in, out, exec, 3, merge_stats, false, NULL);
}

normfuse_status normfuse_sums_merge(const normfuse_tensor *in, const normfuse_tensor *out, const normfuse_exec *exec)
{
    return merge("sums_merge", in, out, exec, 2, merge_sums, false, NULL);
}

normfuse_status normfuse_sums_merge_per_value(const normfuse_tensor *in, const normfuse_tensor *stats,
                                              const normfuse_tensor *out, const normfuse_exec *exec)
{
    return merge("sums_merge_per_value", in, out, exec, 2, merge_sums, true, stats);
}
