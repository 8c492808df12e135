/* SPDX-License-Identifier: MIT
 *
 * verify_work.h - what the files of verify.c share: one problem's tensors and the steps of its verification. */
#ifndef NORMFUSE_VERIFY_WORK_H
#define NORMFUSE_VERIFY_WORK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tests/ref/reference.h"
#include "tests/ref/tolerance.h"
#include "verify.h"

enum {
    GUARD_BYTES = 512,
    UNTOUCHED = 0xA5, /* what surrounds tensors */
    UNWRITTEN = 0xFF, /* what outputs hold before the call: a NaN in every type */
    MAX_REFERENCE_THREADS = 16,
    NO_ROWS = -1 /* of a tensor of one axis */
};

/* Running statistics: momentum, and batches that cumulative averages have seen. */
#define VERIFY_RUNNING_MOMENTUM 0.125
#define VERIFY_BATCHES_SEEN INT64_C(4)

enum tensor_name {
    X, PRE_ADD, POST_ADD, WEIGHT, BIAS, SCALE, SHIFT, Y, U, MEAN, RSTD, RUNNING_MEAN, RUNNING_VAR, DY, DU,
    DX, DWEIGHT, DBIAS, DSCALE, DSHIFT, DPOST_ADD, STATS, SUMS, PRE_BIAS, DPRE_BIAS, SLOPE, DSLOPE,
    TENSORS
};

/* "x" ... */
extern const char *const verify_tensor_names[TENSORS];

/* A tensor in memory of its own, with guards around it. Element (n, c, s) is at data + (n*batch + c*channel +
 * s*position) elements. */
struct buffer {
    char *base;
    size_t bytes;
    char *data;
    char *mirror; /* base's counterpart on the device; NULL: on the CPU */
    size_t at;    /* its bytes in an image of the device */
    normfuse_type type;
    int64_t n, c, s;
    ptrdiff_t batch, channel, position;
    bool is_big, is_sample_wise; /* has x's shape; has an axis N */
    bool overwritten;            /* an output was put into it: what it held is known from the generator only */
    bool is_output, is_dense;
    uint64_t sum;                /* of an input before the call; of what a first run left */
    normfuse_tensor tensor;
    normfuse_axes axes;
};

/* Results of one thread of the comparison. */
struct tally {
    double budget_used, got, want;
    const char *tensor;
    char index[64];
    int64_t compared, beyond, unbounded;
    uint64_t hash;
};

/* Per set: what the reference says of its statistics, and the bounds. */
struct set_record {
    struct reference_statistics statistics;
    double mean, rstd; /* what it is normalized with */
    bool is_clamped;   /* rstd is the most that eps of a norm allows */
    struct tolerance_statistics tolerance;
};

/* Memory of the device beside the tensors: scratch, statistics of shards. GUARD_BYTES follow. */
struct device_room {
    char *data;
    size_t bytes;
};

struct work {
    const struct problem_line *line;
    const struct verify_options *options;
    struct verify_result *result;
    int64_t n, c, s;
    int64_t groups, group_channels, sets;
    bool set_is_group;   /* of one sample; otherwise of one channel over all samples */
    bool set_is_position; /* a group's channels at one position; a group's positions are adjacent sets */
    int64_t group_sets;   /* of a sample's group: 1, or its positions */
    bool has_statistics; /* made of x; not given and not absent */
    bool evaluates;
    bool gives_u; /* in x's place, without pre_add and pre_bias */
    double parameter;
    struct buffer buffers[TENSORS];
    const struct buffer *at[TENSORS]; /* NULL: absent. In place: another's buffer */
    struct set_record *records;
    double momentum;
    /* gradients of whole channels: value and bound, [N, C] for groups, [C] otherwise */
    double *dweight, *dweight_error, *dbias, *dbias_error, *dslope, *dslope_error;
    double *dscale, *dscale_error, *dshift, *dshift_error; /* of a sample's channels, where these have many sets */
    char *scratch;
    size_t scratch_bytes;
    double *statistics; /* of shards and parts */
    int32_t threads;    /* of a call */
    bool on_device;
    char *sync;
    size_t sync_bytes;
    struct device_room *rooms; /* in the order that calls ask for them, again in each run */
    size_t room_count, rooms_used;
    size_t image_bytes; /* of all mirrors */
    char *image;        /* what the first run left on the device */
};

/* ---- tensors: verify_data.c ----------------------------------------------------------------------------------- */

/* A sample of a tensor. */
struct sample {
    enum tensor_name name;
    int64_t n;
    uint64_t seed;
};

struct sample verify_sample_of(const struct work *work, enum tensor_name name, int64_t n);
/* The value that the generator gives a tensor there, before it is rounded to the tensor's type. */
double verify_generated(const struct work *work, const struct sample *sample, int64_t c, int64_t s);

static inline uint64_t verify_mix(uint64_t h)
{
    h ^= h >> 30;
    h *= 0xBF58476D1CE4E5B9u;
    h ^= h >> 27;
    h *= 0x94D049BB133111EBu;
    return h ^ h >> 31;
}

static inline char *verify_element(const struct buffer *buffer, int64_t n, int64_t c, int64_t s)
{
    return buffer->data + (n * buffer->batch + c * buffer->channel + s * buffer->position) *
                              (ptrdiff_t)reference_type_bytes(buffer->type);
}

/* False: no memory. */
bool verify_make_tensors(struct work *work);
void verify_free(struct work *work);
void verify_fill_generated(const struct work *work, enum tensor_name name);
/* Every element, and nothing between and around them. */
void verify_fill_bytes(const struct buffer *buffer, int byte);
/* As outputs are before a call. */
void verify_clear_output(const struct work *work, enum tensor_name name);
/* The sum of a buffer's bytes, guards included. */
uint64_t verify_sum_of(const struct buffer *buffer);
/* `absent` where there is no such parameter. */
double verify_parameter_value(const struct work *work, enum tensor_name name, int64_t n, int64_t c, double absent);
/* Threads of the reference. */
int verify_thread_count(const struct work *work);
/* Values of the largest set. */
int64_t verify_largest_set(const struct work *work);

/* ---- calls: verify_run.c -------------------------------------------------------------------------------------- */

/* Makes the calls, on the device where the problem is, and again with +twice and +graph. */
enum verify_outcome verify_run(struct work *work);
/* The name of a tensor whose surroundings, or which itself though an input, were changed; NULL when all is well.
 * Destroys the tensors. */
const char *verify_find_changed(struct work *work);
__attribute__((format(printf, 3, 4)))
enum verify_outcome verify_conclude(struct verify_result *result, enum verify_outcome outcome, const char *format, ...);
/* By the library. */
enum verify_outcome verify_conclude_refused(struct verify_result *result);

/* ---- the comparison: verify_compare.c ------------------------------------------------------------------------- */

/* The statistics of x, and for a backward the saved ones that the library is given. False: no memory. */
bool verify_make_statistics(struct work *work);
/* Every output beside the reference. False: no memory. */
bool verify_compare(struct work *work, struct tally *tally);

#endif
