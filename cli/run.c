/* SPDX-License-Identifier: MIT
 *
 * run.c - `normfuse run`: one operator, forward and backward, on .npy files.
 *
 * The work is done a block of samples at a time, the blocks in order, and always by the same calls, so that the results
 * do not depend on how many blocks there are: gradients that sum over samples are accumulated in f64 and rounded once,
 * and batch statistics go through the library's stats and apply. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "commands.h"
#include "mirror.h"
#include "numbers.h"
#include "operator_call.h"
#include "problem_line.h"
#include "report.h"
#include "stream.h"

/* ---- the command line ------------------------------------------------------------------------------------------- */

enum {
    OPTION_OUTPUT,
    OPTION_WEIGHT,
    OPTION_BIAS,
    OPTION_PRE_ADD,
    OPTION_PRE_BIAS,
    OPTION_SUM_OUT,
    OPTION_POST_ADD,
    OPTION_SCALE,
    OPTION_SHIFT,
    OPTION_SLOPE,
    OPTION_MEAN,
    OPTION_RSTD,
    OPTION_RUNNING_MEAN,
    OPTION_RUNNING_VAR,
    OPTION_NEW_RUNNING_MEAN,
    OPTION_NEW_RUNNING_VAR,
    OPTION_BACKWARD,
    OPTION_DU,
    OPTION_DX,
    OPTION_DWEIGHT,
    OPTION_DBIAS,
    OPTION_DSCALE,
    OPTION_DSHIFT,
    OPTION_DPOST_ADD,
    OPTION_DPRE_BIAS,
    OPTION_DSLOPE,
    OPTION_THREADS,
    OPTION_BLOCK_BYTES,
    OPTION_SYNC,
    OPTION_QUIET,
    OPTION_COUNT
};

static const struct option options[OPTION_COUNT] = {
    [OPTION_OUTPUT] = {"output", 'o', "Y.npy", "Write y, the result of the forward: x's axes and dtype."},
    [OPTION_WEIGHT] = {"weight", 'w', "FILE", "Read the weight of each channel, [C]; affine per=sample: [N, C]. Any of "
                       "the dtypes. Absent: 1."},
    [OPTION_BIAS] = {"bias", 'b', "FILE", "Read the bias, as the weight. Absent: 0."},
    [OPTION_PRE_ADD] = {"pre-add", 0, "FILE", "Read a tensor like x that is added to x before the statistics."},
    [OPTION_PRE_BIAS] = {"pre-bias", 0, "FILE", "Read a value for each channel, [C], or each sample and channel, [N, C], "
                         "that is added to x before the statistics. Any of the dtypes."},
    [OPTION_SUM_OUT] = {"sum-out", 0, "FILE", "Write u = x [+ pre_bias] [+ pre_add] as it was normalized, rounded to x's "
                        "dtype."},
    [OPTION_POST_ADD] = {"post-add", 0, "FILE", "Read a tensor like x that is added before the activation."},
    [OPTION_SCALE] = {"scale", 0, "FILE", "Group, instance and channel norm: read the scale of each sample and channel, "
                      "[N, C]; the normalized value is multiplied by 1 + scale after weight and bias."},
    [OPTION_SHIFT] = {"shift", 0, "FILE", "Group, instance and channel norm: read the shift of each sample and channel, "
                      "[N, C], added after the scale."},
    [OPTION_SLOPE] = {"slope", 0, "FILE", "act=prelu, which needs it: read the slope of each channel, [C], or of all, [1]. "
                      "Any of the dtypes."},
    [OPTION_MEAN] = {"mean", 0, "FILE", "Write the means: [N, groups], batch norm [C], channel norm [N, groups, spatial]; f32, "
                     "f64 for f64 x."},
    [OPTION_RSTD] = {"rstd", 0, "FILE", "Write 1/sqrt(variance + eps), as the means."},
    [OPTION_RUNNING_MEAN] = {"running-mean", 0, "FILE", "Batch and instance norm: read the running mean, [C]; needed "
                             "with mode=eval, otherwise what the update starts from."},
    [OPTION_RUNNING_VAR] = {"running-var", 0, "FILE", "Read the running variance, [C]; both or neither."},
    [OPTION_NEW_RUNNING_MEAN] = {"new-running-mean", 0, "FILE", "Write the updated running mean: the dtype of the old "
                                 "one."},
    [OPTION_NEW_RUNNING_VAR] = {"new-running-var", 0, "FILE", "Write the updated running variance."},
    [OPTION_BACKWARD] = {"backward", 0, "DY.npy", "Run the backward too: read dy, the gradient of y, like x."},
    [OPTION_DU] = {"du", 0, "FILE", "Read the gradient of u, like x; it is added to dx."},
    [OPTION_DX] = {"dx", 0, "FILE", "Write the gradient of x (and of pre_add): x's axes and dtype."},
    [OPTION_DWEIGHT] = {"dweight", 0, "FILE", "Write the gradient of the weight: the weight's axes and dtype; without "
                        "--weight those it would have (weight_dtype)."},
    [OPTION_DBIAS] = {"dbias", 0, "FILE", "Write the gradient of the bias, likewise."},
    [OPTION_DSCALE] = {"dscale", 0, "FILE", "Write the gradient of the scale, [N, C]."},
    [OPTION_DSHIFT] = {"dshift", 0, "FILE", "Write the gradient of the shift, [N, C]."},
    [OPTION_DPOST_ADD] = {"dpost-add", 0, "FILE", "Write the gradient of post_add: x's axes and dtype."},
    [OPTION_DPRE_BIAS] = {"dpre-bias", 0, "FILE", "Write the gradient of pre_bias, the sum of what --dx writes: its axes "
                          "and dtype; without --pre-bias [C] and x's dtype."},
    [OPTION_DSLOPE] = {"dslope", 0, "FILE", "Write the gradient of the slope: its axes and dtype."},
    [OPTION_THREADS] = {"threads", 0, "N", "Use at most N threads. Results do not depend on it."},
    [OPTION_BLOCK_BYTES] = {"block-bytes", 0, "BYTES", "Work on blocks of samples whose tensors take about this much "
                            "memory (64K, 256M, 1G; default 256M, or less where memory is limited). Results do not "
                            "depend on it."},
    [OPTION_SYNC] = {"sync", 0, NULL, "End only when the outputs and their names are on the disk (fsync)."},
    [OPTION_QUIET] = {"quiet", 'q', NULL, "No progress bar. There is none either when standard error is no terminal."},
};

static const char sections[] =
    "KEYS\n"
    "    groups=G           group_norm, required: number of groups, a divisor of C;\n"
    "                       channel_norm: of channels that are normalized together (1)\n"
    "    stat=layer|rms     channel_norm: mean and variance (default), or the mean square\n"
    "    eps_kind=added|norm\n"
    "                       channel_norm: eps is added under the root (default), or the least\n"
    "                       L2 norm\n"
    "    y_dtype=...        channel_norm: what y, dy and post_add hold, where it is not x's: f32\n"
    "                       where x has 16 bits, f16 or bf16 where it is f32\n"
    "    layout=nchw|nhwc   axes of the file: N, C, spatial (default) or N, spatial, C\n"
    "    act=NAME           identity (default), or one of these; prelu takes --slope:\n"
    "       "
#define ACTIVATION(number, name, parameter) " " #name
#include "src/activations.def"
#undef ACTIVATION
    "\n"
    "    act_param=V        slope of leaky_relu (0.01), alpha of elu (1)\n"
    "    eps=V              added to the variance (1e-5)\n"
    "    mode=train|eval    batch_norm, instance_norm: statistics of the batch (default), or\n"
    "                       the running ones\n"
    "    momentum=V         batch_norm, instance_norm: running = (1 - V)*running + V*new;\n"
    "                       absent: the cumulative average, V = 1/(seen + 1)\n"
    "    seen=K             batches that the running statistics have seen (0)\n"
    "    per=channel|sample affine: weight and bias are [C] (default) or [N, C]\n"
    "    dtype=f64|f32|f16|bf16\n"
    "                       what the files hold; needed only for bf16, which .npy has no\n"
    "                       name for: files of <u2, <i2 or |V2 are then read as bf16\n"
    "    weight_dtype=...   what the parameters hold, where it is not x's\n"
    "    device=cpu|cuda    where the operator runs (cpu); blocks are copied to the GPU and back\n"
    "\n"
    "FILES\n"
    "    .npy of versions 1 to 3, C or Fortran order, little- or big-endian, of 2 to 5 axes (N, C\n"
    "    and up to three spatial ones). They are mapped, not read whole: files may be larger than\n"
    "    memory. Outputs are in C order; they appear when all of them are complete, and not at all\n"
    "    when anything fails or a signal ends the program. An output may replace an input. Links\n"
    "    are followed. Pipes, devices and open files (/dev/stdout, /dev/fd/3) are written to as the\n"
    "    work goes on; normfuse(1) has more.\n"
    "\n"
    "EXAMPLES\n"
    "    normfuse run group_norm x.npy groups=32 act=silu -o y.npy --weight w.npy --bias b.npy\n"
    "    normfuse run batch_norm x.npy layout=nhwc momentum=0.1 -o y.npy \\\n"
    "        --running-mean rm.npy --running-var rv.npy \\\n"
    "        --new-running-mean rm.npy --new-running-var rv.npy\n"
    "    normfuse run group_norm x.npy groups=8 --backward dy.npy --dx dx.npy --dweight dw.npy\n";

static int run_main(const struct arguments *arguments);

const struct command run_command = {
    .name = "run",
    .summary = "run an operator on .npy files",
    .synopsis = "run group_norm X.npy groups=G [KEY=VALUE]... [OPTION]...\n"
                "run instance_norm|batch_norm|affine|channel_norm X.npy [KEY=VALUE]... [OPTION]...\n",
    .description = "Normalizes the tensor in X.npy and writes what is asked for: the forward's outputs, with\n"
                   "--backward the gradients, or both in one run. Every output is optional; there must be one.\n"
                   "\n"
                   "    u = x [+ pre_bias] [+ pre_add]\n"
                   "    z = ((u - mean) * rstd * weight + bias) [* (1 + scale) + shift] [+ post_add]\n"
                   "    y = act(z)\n"
                   "\n"
                   "affine has no statistics: z = weight * u + bias [+ post_add].\n",
    .options = options,
    .option_count = OPTION_COUNT,
    .sections = {sections},
    .main = run_main,
};

/* ---- what goes in and out --------------------------------------------------------------------------------------- */

enum shape_kind {
    BIG,         /* x's */
    PER_CHANNEL, /* [C] */
    PER_SAMPLE,  /* [N, C] */
    PARAMETER,   /* [C], or [N, C] with per=sample */
    EITHER,      /* [C], or [N, C] where pre_bias is */
    SHARED,      /* [C], or [1] where the slope is */
    STATISTICS   /* [N, groups], [C], or [N, groups, spatial] */
};

enum { GROUP = 1 << GROUP_NORM, INSTANCE = 1 << INSTANCE_NORM, BATCH = 1 << BATCH_NORM, PLAIN = 1 << AFFINE,
       CHANNEL = 1 << CHANNEL_NORM };
enum { STATISTICAL = GROUP | INSTANCE | BATCH | CHANNEL, ANY = STATISTICAL | PLAIN,
       SCALED = GROUP | INSTANCE | CHANNEL };

enum input {
    X, PRE_ADD, POST_ADD, DY, DU, WEIGHT, BIAS, SCALE, SHIFT, PRE_BIAS, SLOPE, RUNNING_MEAN, RUNNING_VAR, INPUTS
};
enum output_id {
    Y, U, MEAN, RSTD, NEW_RUNNING_MEAN, NEW_RUNNING_VAR, DX, DPOST_ADD, DWEIGHT, DBIAS, DSCALE, DSHIFT, DPRE_BIAS,
    DSLOPE, OUTPUTS
};

struct role {
    int option; /* -1: the word X.npy */
    enum shape_kind kind;
    unsigned operators; /* that take it */
    bool backward;      /* only with --backward */
    size_t field;       /* of normfuse_tensors */
    int model;          /* outputs: the input whose dtype it has */
};

#define FIELD(name) offsetof(normfuse_tensors, name)

static const struct role input_roles[INPUTS] = {
    [X] = {-1, BIG, ANY, false, FIELD(x), 0},
    [PRE_ADD] = {OPTION_PRE_ADD, BIG, ANY, false, FIELD(pre_add), 0},
    [POST_ADD] = {OPTION_POST_ADD, BIG, ANY, false, FIELD(post_add), 0},
    [DY] = {OPTION_BACKWARD, BIG, ANY, true, FIELD(dy), 0},
    [DU] = {OPTION_DU, BIG, ANY, true, FIELD(du), 0},
    [WEIGHT] = {OPTION_WEIGHT, PARAMETER, ANY, false, FIELD(weight), 0},
    [BIAS] = {OPTION_BIAS, PARAMETER, ANY, false, FIELD(bias), 0},
    [SCALE] = {OPTION_SCALE, PER_SAMPLE, SCALED, false, FIELD(scale), 0},
    [SHIFT] = {OPTION_SHIFT, PER_SAMPLE, SCALED, false, FIELD(shift), 0},
    [PRE_BIAS] = {OPTION_PRE_BIAS, EITHER, ANY, false, FIELD(pre_bias), 0},
    [SLOPE] = {OPTION_SLOPE, SHARED, ANY, false, FIELD(slope), 0},
    [RUNNING_MEAN] = {OPTION_RUNNING_MEAN, PER_CHANNEL, INSTANCE | BATCH, false, FIELD(running_mean), 0},
    [RUNNING_VAR] = {OPTION_RUNNING_VAR, PER_CHANNEL, INSTANCE | BATCH, false, FIELD(running_var), 0},
};

static const struct role output_roles[OUTPUTS] = {
    [Y] = {OPTION_OUTPUT, BIG, ANY, false, FIELD(y), X},
    [U] = {OPTION_SUM_OUT, BIG, ANY, false, FIELD(u), X},
    [MEAN] = {OPTION_MEAN, STATISTICS, STATISTICAL, false, FIELD(mean), -1},
    [RSTD] = {OPTION_RSTD, STATISTICS, STATISTICAL, false, FIELD(rstd), -1},
    [NEW_RUNNING_MEAN] = {OPTION_NEW_RUNNING_MEAN, PER_CHANNEL, INSTANCE | BATCH, false, FIELD(running_mean),
                          RUNNING_MEAN},
    [NEW_RUNNING_VAR] = {OPTION_NEW_RUNNING_VAR, PER_CHANNEL, INSTANCE | BATCH, false, FIELD(running_var), RUNNING_VAR},
    [DX] = {OPTION_DX, BIG, ANY, true, FIELD(dx), X},
    [DPOST_ADD] = {OPTION_DPOST_ADD, BIG, ANY, true, FIELD(dpost_add), X},
    [DWEIGHT] = {OPTION_DWEIGHT, PARAMETER, ANY, true, FIELD(dweight), WEIGHT},
    [DBIAS] = {OPTION_DBIAS, PARAMETER, ANY, true, FIELD(dbias), BIAS},
    [DSCALE] = {OPTION_DSCALE, PER_SAMPLE, SCALED, true, FIELD(dscale), SCALE},
    [DSHIFT] = {OPTION_DSHIFT, PER_SAMPLE, SCALED, true, FIELD(dshift), SHIFT},
    [DPRE_BIAS] = {OPTION_DPRE_BIAS, EITHER, ANY, true, FIELD(dpre_bias), PRE_BIAS},
    [DSLOPE] = {OPTION_DSLOPE, SHARED, ANY, true, FIELD(dslope), SLOPE},
};

#define BIT(name) (1u << (name))

enum {
    STATISTICS_INPUTS = 1 << X | 1 << PRE_ADD | 1 << PRE_BIAS,
    PARAMETER_INPUTS = 1 << WEIGHT | 1 << BIAS | 1 << SCALE | 1 << SHIFT | 1 << SLOPE,
    FORWARD_INPUTS = STATISTICS_INPUTS | 1 << POST_ADD | PARAMETER_INPUTS,
    RUNNING_INPUTS = 1 << RUNNING_MEAN | 1 << RUNNING_VAR,
    SUMMED = 1 << DWEIGHT | 1 << DBIAS | 1 << DPRE_BIAS | 1 << DSLOPE, /* over samples, where they are [C] */
    GRADIENTS = 1 << DX | 1 << DPOST_ADD | 1 << DSCALE | 1 << DSHIFT | SUMMED,
    NEW_RUNNING = 1 << NEW_RUNNING_MEAN | 1 << NEW_RUNNING_VAR
};

/* A small tensor in memory. */
struct buffer {
    void *data;
    size_t bytes;
    normfuse_axes axes;
    normfuse_tensor tensor;
};

struct run {
    const struct arguments *arguments;
    const char *x_path;
    struct problem_line line;
    bool has_dtype, has_weight_dtype, has_momentum, has_seen;
    double momentum;
    int64_t seen;

    unsigned given, wanted; /* bits of inputs and outputs */
    char arguments_named[INPUTS][24]; /* "--weight" */
    struct stream_input inputs[INPUTS];
    struct stream_output outputs[OUTPUTS];
    int64_t n, c, s, groups;
    int64_t samples; /* that are looked at: n, or 0 where none has anything to read or to write */
    int64_t block;   /* samples of a block */
    normfuse_exec exec;
    struct mirror mirror; /* device=cuda */

    struct buffer mean, rstd; /* of the block; batch norm: of the batch */
    struct buffer stats, sums;
    struct buffer summed[OUTPUTS]; /* f64: gradients that are summed over the blocks */
    struct buffer running[2];     /* mean, variance, updated in place */
    struct buffer slopes;         /* [C] of a slope [1]: its gradient is summed by channel, whatever the blocks */
    double *sample_sums[2];       /* instance norm: [C], sums over samples of the mean and of the unbiased variance */

    bool show_progress;
    double done_samples, total_samples;
    struct timespec progress_time;
};

static bool is_running_average(const struct run *run)
{
    return (run->wanted & NEW_RUNNING) != 0;
}

/* ---- reading the words ------------------------------------------------------------------------------------------ */

static bool is_operator(const char *word, enum problem_operator *op)
{
    for (int i = GROUP_NORM; i <= CHANNEL_NORM; i++)
        if (strcmp(word, problem_operator_name((enum problem_operator)i)) == 0) {
            *op = (enum problem_operator)i;
            return true;
        }
    return false;
}

/* "key=": letters and underscores, so that a path with a '=' can be written as ./a=b.npy. */
static bool is_key(const char *word)
{
    size_t length = strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_");
    return length > 0 && word[length] == '=';
}

static const char *value_of(const char *word, const char *key)
{
    size_t length = strlen(key);
    return strncmp(word, key, length) == 0 && word[length] == '=' ? word + length + 1 : NULL;
}

/* Keys that only `run` has. True when the word was one. */
static bool read_own_key(struct run *run, const char *word)
{
    bool averages = run->line.op == BATCH_NORM || run->line.op == INSTANCE_NORM;
    const char *value;
    char *end;
    if ((value = value_of(word, "momentum")) && averages) {
        run->momentum = strtod(value, &end);
        run->has_momentum = true;
        if (end == value || *end || !isfinite(run->momentum))
            report_usage("run", "'%s': momentum is not a finite number", word);
        return true;
    }
    if ((value = value_of(word, "seen")) && averages) {
        errno = 0;
        run->seen = strtoll(value, &end, 10);
        run->has_seen = true;
        if (end == value || *end || errno || run->seen < 0 || run->seen == INT64_MAX)
            report_usage("run", "'%s': seen is not a whole number from 0 on", word);
        return true;
    }
    if ((value = value_of(word, "mode")) && run->line.op == INSTANCE_NORM) {
        run->line.evaluate = strcmp(value, "eval") == 0;
        if (!run->line.evaluate && strcmp(value, "train") != 0)
            report_usage("run", "'%s': mode is train or eval", word);
        return true;
    }
    if (value_of(word, "dir"))
        report_usage("run", "'%s': a direction is asked for by its files: -o, --backward", word);
    return false;
}

static void read_key(struct run *run, int index)
{
    char *const *words = run->arguments->words;
    const char *word = words[index];
    size_t key_length = strcspn(word, "=") + 1;
    char error[512];
    for (int i = 0; i < index; i++)
        if (strncmp(words[i], word, key_length) == 0)
            report_usage("run", "'%s': the key is given twice", word);
    if (read_own_key(run, word))
        return;
    if (problem_line_key(&run->line, word, error, sizeof error) != 0)
        report_usage("run", "%s", error);
    run->has_dtype |= value_of(word, "dtype") != NULL;
    run->has_weight_dtype |= value_of(word, "weight_dtype") != NULL;
}

static void read_words(struct run *run)
{
    const struct arguments *arguments = run->arguments;
    bool has_operator = false;
    enum problem_operator op = GROUP_NORM, found;
    for (int i = 0; i < arguments->word_count; i++) {
        const char *word = arguments->words[i];
        if (is_key(word))
            continue;
        if (!has_operator && is_operator(word, &found)) {
            op = found;
            has_operator = true;
        } else if (!run->x_path) {
            run->x_path = word;
        } else {
            report_usage("run", "'%s': one operator and one file are wanted, and KEY=VALUE words", word);
        }
    }
    if (!has_operator)
        report_usage("run", "%s%s%sno operator: group_norm, instance_norm, batch_norm, affine or channel_norm",
                     run->x_path ? "'" : "", run->x_path ? run->x_path : "", run->x_path ? "': " : "");
    if (!run->x_path)
        report_usage("run", "no input file: run %s X.npy", problem_operator_name(op));
    run->line = problem_line_default(op);
    /* dtype first: weight_dtype follows it unless it is given. */
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < arguments->word_count; i++) {
            const char *word = arguments->words[i];
            if (is_key(word) && (value_of(word, "dtype") != NULL) == (pass == 0))
                read_key(run, i);
        }
    if (op == GROUP_NORM && !run->line.groups)
        report_usage("run", "group_norm needs groups=G");
    if (run->line.has_act_param && run->line.activation != NORMFUSE_LEAKY_RELU && run->line.activation != NORMFUSE_ELU)
        report_usage("run", "act_param is for leaky_relu and elu; the activation is %s",
                     problem_activation_name(run->line.activation));
    if ((run->line.activation == NORMFUSE_PRELU) != arguments_has(arguments, OPTION_SLOPE))
        report_usage("run", run->line.activation == NORMFUSE_PRELU ? "act=prelu needs --slope"
                                                                   : "option '--slope' is for act=prelu");
    if (run->has_momentum && run->has_seen)
        report_usage("run", "momentum and seen exclude each other: without momentum the average is cumulative");
}

/* Which files are named, and whether the operator takes them. */
static void read_files(struct run *run)
{
    const struct arguments *arguments = run->arguments;
    const char *name = problem_operator_name(run->line.op);
    bool backward = arguments_has(arguments, OPTION_BACKWARD);
    if (arguments_has(arguments, OPTION_MEAN) && run->line.statistics == NORMFUSE_MEAN_SQUARE)
        report_usage("run", "option '--mean': stat=rms has no mean");
    const char *paths[OUTPUTS];
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < (side ? (int)OUTPUTS : (int)INPUTS); i++) {
            const struct role *role = side ? &output_roles[i] : &input_roles[i];
            if (role->option >= 0 && !arguments_has(arguments, role->option))
                continue;
            const char *option = role->option >= 0 ? options[role->option].name : "";
            if (!(role->operators & 1u << run->line.op))
                report_usage("run", "option '--%s': %s does not take it", option, name);
            if (role->backward && !backward)
                report_usage("run", "option '--%s' needs --backward DY.npy", option);
            *(side ? &run->wanted : &run->given) |= BIT(i);
        }
    if (!run->wanted)
        report_usage("run", "no output is asked for: -o Y.npy writes the result");
    if (backward && !(run->wanted & GRADIENTS))
        report_usage("run", "option '--backward': no gradient is asked for (--dx, --dweight, ...)");
    if ((run->wanted & BIT(U)) && !(run->given & (BIT(PRE_ADD) | BIT(PRE_BIAS))))
        report_usage("run", "option '--sum-out' needs --pre-add or --pre-bias");
    if ((run->wanted & BIT(DPRE_BIAS)) && !(run->wanted & BIT(DX)))
        report_usage("run", "option '--dpre-bias' needs --dx, whose sum it is");
    if ((run->wanted & BIT(DSLOPE)) && run->line.activation != NORMFUSE_PRELU)
        report_usage("run", "option '--dslope' is for act=prelu");
    if (((run->given & RUNNING_INPUTS) != 0) != ((run->given & RUNNING_INPUTS) == RUNNING_INPUTS))
        report_usage("run", "--running-mean and --running-var go together");
    if (run->line.evaluate && !(run->given & RUNNING_INPUTS))
        report_usage("run", "mode=eval needs --running-mean and --running-var");
    if (run->line.evaluate && (run->wanted & (NEW_RUNNING | BIT(MEAN) | BIT(RSTD))))
        report_usage("run", "mode=eval makes no statistics: --mean, --rstd and --new-running-* are for mode=train");
    if (is_running_average(run) && !(run->given & RUNNING_INPUTS))
        report_usage("run", "--new-running-mean and --new-running-var need --running-mean and --running-var");

    char *canonical[OUTPUTS] = {NULL};
    for (int i = 0; i < OUTPUTS; i++) {
        if (!(run->wanted & BIT(i)))
            continue;
        paths[i] = arguments->values[output_roles[i].option];
        canonical[i] = output_canonical(paths[i]);
        for (int j = 0; j < i; j++)
            if (canonical[i] && canonical[j] && strcmp(canonical[i], canonical[j]) == 0)
                report_usage("run", "'--%s %s' and '--%s %s' name the same file", options[output_roles[j].option].name,
                             paths[j], options[output_roles[i].option].name, paths[i]);
    }
    for (int i = 0; i < OUTPUTS; i++)
        free(canonical[i]);
}

/* ---- opening the files ------------------------------------------------------------------------------------------ */

static struct stream_shape shape_of(const struct run *run, enum shape_kind kind)
{
    struct stream_shape shape = run->inputs[X].shape;
    bool by_sample = kind == PER_SAMPLE || (kind == PARAMETER && run->line.per_sample) ||
                     (kind == EITHER && run->line.sample_bias) ||
                     (kind == STATISTICS && run->line.op != BATCH_NORM);
    if (kind == BIG)
        return shape;
    shape = (struct stream_shape){.ndim = by_sample ? 2 : 1};
    if (by_sample)
        shape.sizes[0] = run->n;
    if (kind == STATISTICS && run->line.op == CHANNEL_NORM)
        for (shape.ndim = 2; shape.ndim < run->inputs[X].shape.ndim; shape.ndim++)
            shape.sizes[shape.ndim] = run->inputs[X].shape.sizes[shape.ndim];
    shape.sizes[by_sample] = kind == STATISTICS ? run->groups : kind == SHARED && run->line.one_slope ? 1 : run->c;
    return shape;
}

static bool has_sample_axis(const struct run *run, enum shape_kind kind)
{
    return kind == BIG || shape_of(run, kind).ndim == 2;
}

/* The files that are like x, or like y. */
static normfuse_type big_type(const struct run *run, bool of_y)
{
    return of_y && run->line.has_y_type ? run->line.y_type : run->inputs[X].type;
}

static void open_x(struct run *run)
{
    struct stream_input *x = &run->inputs[X];
    bool bf16 = run->has_dtype && run->line.type == NORMFUSE_BF16;
    stream_input_open(x, run->x_path, "x", bf16, run->line.channels_last);
    if (x->shape.ndim < 2)
        report_failure(run->x_path, "x: rank %d is not supported: N, C and up to three spatial axes are wanted",
                       x->shape.ndim);
    if (run->has_dtype && x->type != run->line.type)
        report_failure(run->x_path, "x: the file holds %s ('%s'), dtype=%s was asked for", problem_type_name(x->type),
                       x->file.header.descr, problem_type_name(run->line.type));
    run->n = x->shape.sizes[0];
    run->c = x->shape.sizes[1];
    run->s = 1;
    for (int32_t i = 2; i < x->shape.ndim; i++)
        run->s *= x->shape.sizes[i];
    bool grouped = run->line.op == GROUP_NORM || run->line.op == CHANNEL_NORM;
    run->groups = grouped ? run->line.groups : run->c;
    if (grouped && (run->groups < 1 || run->c % run->groups != 0))
        report_failure(run->x_path, "x: C = %" PRId64 " is not divisible by groups=%" PRId64, run->c, run->groups);
    bool training = !run->line.evaluate;
    if (run->line.op == BATCH_NORM && training && run->n * run->s == 1)
        report_failure(run->x_path, "x: batch_norm in training needs more than one value a channel");
    if (run->line.op == BATCH_NORM && training && !(run->line.eps > 0))
        report_usage("run", "eps=%g: batch_norm in training needs eps above 0", run->line.eps);
    if (run->line.op == INSTANCE_NORM && is_running_average(run) && (run->s < 2 || run->n < 1))
        report_failure(run->x_path, "x: running statistics need a sample and more than one value a channel in it");
}

static void open_input(struct run *run, enum input id)
{
    const struct role *role = &input_roles[id];
    struct stream_input *input = &run->inputs[id];
    const struct stream_input *x = &run->inputs[X];
    char *argument = run->arguments_named[id];
    char wanted[128], found[128];
    snprintf(argument, sizeof run->arguments_named[id], "--%s", options[role->option].name);
    bool big = role->kind == BIG;
    bool of_y = id == POST_ADD || id == DY;
    bool bf16 = (big ? big_type(run, of_y) : x->type) == NORMFUSE_BF16 ||
                (run->has_weight_dtype && run->line.weight_type == NORMFUSE_BF16 && !big);
    stream_input_open(input, run->arguments->values[role->option], argument, bf16,
                      big && run->line.channels_last);
    if (role->kind == EITHER)
        run->line.sample_bias = input->shape.ndim == 2;
    if (role->kind == SHARED)
        run->line.one_slope = input->shape.ndim == 1 && input->shape.sizes[0] == 1;
    struct stream_shape shape = shape_of(run, role->kind);
    if (!stream_shapes_equal(&shape, &input->shape)) {
        stream_shape_text(wanted, sizeof wanted, &shape);
        stream_shape_text(found, sizeof found, &input->shape);
        report_failure(input->path, "%s: the shape is %s, it must be %s", argument, found, wanted);
    }
    if (big && input->type != big_type(run, of_y))
        report_failure(input->path, "%s: the file holds %s, %s %s; they must be of one dtype", argument,
                       problem_type_name(input->type), of_y && run->line.has_y_type ? "y_dtype is" : "x holds",
                       problem_type_name(big_type(run, of_y)));
    if ((id == WEIGHT || id == BIAS) && run->has_weight_dtype && input->type != run->line.weight_type)
        report_failure(input->path, "%s: the file holds %s ('%s'), weight_dtype=%s was asked for", argument,
                       problem_type_name(input->type), input->file.header.descr,
                       problem_type_name(run->line.weight_type));
}

static void open_output(struct run *run, enum output_id id)
{
    const struct role *role = &output_roles[id];
    const struct stream_input *x = &run->inputs[X];
    struct stream_shape shape = shape_of(run, role->kind);
    normfuse_type type;
    const char *descr = NULL;
    if (role->model < 0) {
        type = x->type == NORMFUSE_F64 ? NORMFUSE_F64 : NORMFUSE_F32;
    } else if ((id == Y || id == DPOST_ADD) && big_type(run, true) != x->type) {
        type = run->line.y_type;
    } else if (run->given & BIT(role->model)) {
        type = run->inputs[role->model].type;
        descr = run->inputs[role->model].file.header.descr;
    } else {
        bool weight = role->model == WEIGHT || role->model == BIAS;
        type = weight && run->has_weight_dtype ? run->line.weight_type : x->type;
        if (type == x->type)
            descr = x->file.header.descr;
    }
    stream_output_open(&run->outputs[id], run->arguments->values[role->option], type, descr, &shape);
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static int64_t default_block_bytes(void)
{
    int64_t bytes = INT64_C(256) << 20;
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur / 4 < (rlim_t)bytes)
        bytes = (int64_t)(limit.rlim_cur / 4);
    int64_t memory = (int64_t)sysconf(_SC_PHYS_PAGES) * (int64_t)sysconf(_SC_PAGESIZE);
    if (memory > 0 && memory / 4 < bytes)
        bytes = memory / 4;
    return bytes;
}

/* The bytes of a sample more; the largest number where they are more. */
static void add_sample_bytes(int64_t *sum, const struct stream_shape *shape, normfuse_type type)
{
    int64_t bytes;
    if (__builtin_mul_overflow(stream_sample_elements(shape), (int64_t)number_bytes(type), &bytes) ||
        __builtin_add_overflow(*sum, bytes, sum))
        *sum = INT64_MAX;
}

static void choose_block(struct run *run)
{
    int64_t sample_bytes = 0;
    bool idle = run->n * run->c * run->s == 0;
    for (int i = 0; i < INPUTS; i++)
        if ((run->given & BIT(i)) && has_sample_axis(run, input_roles[i].kind))
            add_sample_bytes(&sample_bytes, &run->inputs[i].shape, run->inputs[i].type);
    for (int i = 0; i < OUTPUTS; i++)
        if ((run->wanted & BIT(i)) && has_sample_axis(run, output_roles[i].kind)) {
            const struct stream_shape *shape = &run->outputs[i].shape;
            add_sample_bytes(&sample_bytes, shape, run->outputs[i].type);
            idle &= shape->sizes[0] == 0 || stream_sample_elements(shape) == 0;
        }
    run->samples = idle ? 0 : run->n;
    int64_t budget = arguments_bytes(run->arguments, OPTION_BLOCK_BYTES, default_block_bytes());
    int64_t block = sample_bytes > 0 ? budget / sample_bytes : run->samples;
    int64_t quantum = 1;
    /* Sums over the samples have the bits of one call only when they are cut at the quantum. */
    bool sums = run->line.op == BATCH_NORM || (run->wanted & SUMMED);
    if (sums && block < run->samples) {
        normfuse_axes axes;
        normfuse_tensor x =
            run->line.channels_last
                ? normfuse_tensor_channels_last(NULL, run->inputs[X].type, run->inputs[X].shape.ndim,
                                                run->inputs[X].shape.sizes, &axes)
                : normfuse_tensor_contiguous(NULL, run->inputs[X].type, run->inputs[X].shape.ndim,
                                             run->inputs[X].shape.sizes, &axes);
        x.device.device_type = run->line.device;
        normfuse_status status = normfuse_sample_quantum(&x, &quantum);
        if (status != NORMFUSE_OK)
            report_refusal("run", run->x_path, status);
    }
    block = block / quantum * quantum;
    block = block < quantum ? quantum : block;
    run->block = block > run->samples ? run->samples : block;
}

static const normfuse_tensor *reserve(struct buffer *buffer, normfuse_type type, int32_t ndim, const int64_t *sizes)
{
    size_t bytes = number_bytes(type);
    for (int32_t i = 0; i < ndim; i++)
        if (__builtin_mul_overflow(bytes, (size_t)sizes[i], &bytes))
            report_failure("memory", "a block is too large");
    stream_reserve(&buffer->data, &buffer->bytes, bytes);
    buffer->tensor = normfuse_tensor_contiguous(buffer->data, type, ndim, sizes, &buffer->axes);
    return &buffer->tensor;
}

static const normfuse_tensor *reserve_zeros(struct buffer *buffer, int32_t ndim, const int64_t *sizes)
{
    const normfuse_tensor *tensor = reserve(buffer, NORMFUSE_F64, ndim, sizes);
    memset(buffer->data, 0, buffer->bytes);
    return tensor;
}

static const normfuse_tensor *reserve_statistic(struct run *run, struct buffer *buffer, normfuse_type type,
                                                int64_t count)
{
    const int64_t sizes[2] = {count, run->groups * (run->line.op == CHANNEL_NORM ? run->s : 1)};
    return run->line.op == BATCH_NORM ? reserve(buffer, type, 1, &run->c) : reserve(buffer, type, 2, sizes);
}

/* Double is kept for the backward: an f32 mean would lose digits of the gradients where the mean is large. */
static void reserve_statistics(struct run *run, int64_t count)
{
    reserve_statistic(run, &run->mean, NORMFUSE_F64, count);
    reserve_statistic(run, &run->rstd, run->inputs[X].type == NORMFUSE_F64 ? NORMFUSE_F64 : NORMFUSE_F32, count);
}

static void set_statistics(struct run *run, normfuse_tensors *tensors)
{
    if (run->line.statistics != NORMFUSE_MEAN_SQUARE)
        tensors->mean = &run->mean.tensor;
    tensors->rstd = &run->rstd.tensor;
}

/* ---- calling the library ---------------------------------------------------------------------------------------- */

enum step { FORWARD, BACKWARD, STATS, APPLY, BACKWARD_SUMS, BACKWARD_APPLY };

/* Makes the call, or with scratch_bytes asks only for what it needs. */
static normfuse_status invoke(const struct run *run, enum step step, const normfuse_tensors *tensors, uint32_t flags,
                              size_t *scratch_bytes)
{
    typedef normfuse_status group_call(const normfuse_group_norm_options *, const normfuse_tensors *,
                                       const normfuse_exec *);
    typedef normfuse_status batch_call(const normfuse_batch_norm_options *, const normfuse_tensors *,
                                       const normfuse_exec *);
    static group_call *const group_calls[] = {normfuse_group_norm_forward,       normfuse_group_norm_backward,
                                              normfuse_group_norm_stats,         normfuse_group_norm_apply,
                                              normfuse_group_norm_backward_sums, normfuse_group_norm_backward_apply};
    static batch_call *const batch_calls[] = {normfuse_batch_norm_forward,       normfuse_batch_norm_backward,
                                              normfuse_batch_norm_stats,         normfuse_batch_norm_apply,
                                              normfuse_batch_norm_backward_sums, normfuse_batch_norm_backward_apply};
    const struct problem_line *line = &run->line;
    const normfuse_exec *exec = &run->exec;
    bool forward = step == FORWARD || step == STATS || step == APPLY;
    if (line->has_act_param)
        flags |= NORMFUSE_HAS_ACT_PARAM;
    if (line->evaluate)
        flags |= NORMFUSE_EVALUATE;
    if (tensors->running_mean && !line->evaluate && !run->has_momentum)
        flags |= NORMFUSE_CUMULATIVE;
    if (line->op == AFFINE)
        return affine_call(line, flags, forward, tensors, exec, scratch_bytes);
    if (line->op == CHANNEL_NORM)
        return channel_norm_call(line, flags, forward, tensors, exec, scratch_bytes);
    if (line->op == BATCH_NORM) {
        const normfuse_batch_norm_options batch = {.struct_bytes = sizeof batch,
                                                   .flags = flags,
                                                   .eps = line->eps,
                                                   .activation = line->activation,
                                                   .act_param = line->act_param,
                                                   .momentum = run->momentum,
                                                   .batches_seen = run->seen,
                                                   .set_values = step == BACKWARD_APPLY ? run->n * run->s : 0};
        if (scratch_bytes)
            return forward ? normfuse_batch_norm_forward_scratch_bytes(&batch, tensors, exec, scratch_bytes)
                           : normfuse_batch_norm_backward_scratch_bytes(&batch, tensors, exec, scratch_bytes);
        return batch_calls[step](&batch, tensors, exec);
    }
    const normfuse_group_norm_options group = {.struct_bytes = sizeof group,
                                               .flags = flags,
                                               .groups = run->groups,
                                               .eps = line->eps,
                                               .activation = line->activation,
                                               .act_param = line->act_param};
    if (scratch_bytes)
        return forward ? normfuse_group_norm_forward_scratch_bytes(&group, tensors, exec, scratch_bytes)
                       : normfuse_group_norm_backward_scratch_bytes(&group, tensors, exec, scratch_bytes);
    return group_calls[step](&group, tensors, exec);
}

static void call(struct run *run, enum step step, const normfuse_tensors *tensors, uint32_t flags)
{
    bool on_device = run->line.device == NORMFUSE_CUDA;
    normfuse_tensors moved;
    normfuse_status status = NORMFUSE_OK;
    if (on_device) {
        size_t bytes = 0;
        moved = mirror_upload(&run->mirror, tensors);
        status = invoke(run, step, &moved, flags, &bytes);
        if (status == NORMFUSE_OK)
            mirror_scratch(&run->mirror, bytes, &run->exec);
    }
    if (status == NORMFUSE_OK)
        status = invoke(run, step, on_device ? &moved : tensors, flags, NULL);
    if (status != NORMFUSE_OK)
        report_refusal("run", run->x_path, status);
    if (on_device)
        mirror_download(&run->mirror, tensors, !run->line.evaluate);
}

static void set(normfuse_tensors *tensors, size_t field, const normfuse_tensor *tensor)
{
    memcpy((char *)tensors + field, &tensor, sizeof tensor);
}

static normfuse_tensors block_inputs(struct run *run, unsigned inputs, int64_t first, int64_t count)
{
    normfuse_tensors tensors = {.struct_bytes = sizeof tensors};
    for (int i = 0; i < INPUTS; i++)
        if (inputs & run->given & BIT(i)) {
            struct stream_input *input = &run->inputs[i];
            bool cut = has_sample_axis(run, input_roles[i].kind);
            set(&tensors, input_roles[i].field,
                stream_input_block(input, cut ? first : 0, cut ? count : input->shape.sizes[0]));
        }
    if (tensors.slope && run->line.one_slope) {
        const normfuse_type type = run->inputs[SLOPE].type;
        const void *one = tensors.slope->data;
        tensors.slope = reserve(&run->slopes, type, 1, &run->c);
        for (int64_t i = 0; i < run->c; i++)
            memcpy((char *)run->slopes.data + (size_t)i * number_bytes(type), one, number_bytes(type));
    }
    return tensors;
}

static void block_outputs(struct run *run, normfuse_tensors *tensors, unsigned outputs, int64_t count)
{
    for (int i = 0; i < OUTPUTS; i++)
        if (outputs & run->wanted & BIT(i)) {
            struct stream_output *output = &run->outputs[i];
            bool cut = has_sample_axis(run, output_roles[i].kind);
            set(tensors, output_roles[i].field, stream_output_block(output, cut ? count : output->shape.sizes[0]));
        }
}

static void flush_outputs(struct run *run, unsigned outputs)
{
    for (int i = 0; i < OUTPUTS; i++)
        if (outputs & run->wanted & BIT(i))
            stream_output_flush(&run->outputs[i]);
}

static void write_statistics(struct run *run, int64_t count)
{
    int64_t values = run->line.op == BATCH_NORM     ? run->c
                     : run->line.op == CHANNEL_NORM ? count * run->groups * run->s
                                                    : count * run->groups;
    if (run->wanted & BIT(MEAN))
        stream_output_write_f64(&run->outputs[MEAN], run->mean.data, values);
    if (run->wanted & BIT(RSTD))
        stream_output_write(&run->outputs[RSTD], run->rstd.data, values);
}

/* ---- progress --------------------------------------------------------------------------------------------------- */

static void progress(struct run *run, int64_t samples)
{
    struct timespec now;
    run->done_samples += (double)samples;
    if (!run->show_progress)
        return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t elapsed_ms =
        (now.tv_sec - run->progress_time.tv_sec) * 1000 + (now.tv_nsec - run->progress_time.tv_nsec) / 1000000;
    if (elapsed_ms < 100)
        return;
    run->progress_time = now;
    static const char full[] = "########################################";
    int width = (int)(sizeof full) - 1;
    double part = run->done_samples / run->total_samples;
    part = part > 1 ? 1 : part;
    int filled = (int)(part * width);
    char text[80];
    snprintf(text, sizeof text, "[%.*s%*s] %3d %%", filled, full, width - filled, "", (int)(part * 100));
    report_progress(text);
}

/* ---- operators whose samples stand alone, or whose statistics are given ------------------------------------------ */

/* Instance norm's running statistics: each sample's mean and unbiased variance are added in the order of the samples,
 * one after the other, whatever the blocks. */
static void add_sample_statistics(struct run *run, int64_t count)
{
    const double(*triples)[3] = run->stats.data;
    for (int64_t i = 0; i < count; i++)
        for (int64_t channel = 0; channel < run->c; channel++) {
            const double *triple = triples[i * run->c + channel];
            run->sample_sums[0][channel] += triple[1];
            run->sample_sums[1][channel] += triple[2] / (triple[0] - 1);
        }
}

static void write_sample_averages(struct run *run)
{
    double momentum = run->has_momentum ? run->momentum : 1.0 / ((double)run->seen + 1);
    for (int i = 0; i < 2; i++) {
        struct stream_input *old = &run->inputs[RUNNING_MEAN + i];
        struct stream_output *output = &run->outputs[NEW_RUNNING_MEAN + i];
        const void *data = stream_input_block(old, 0, run->c)->data;
        for (int64_t channel = 0; channel < run->c; channel++) {
            double mean = run->sample_sums[i][channel] / (double)run->n;
            run->sample_sums[i][channel] = (1 - momentum) * number_load(data, old->type, channel) + momentum * mean;
        }
        if (run->wanted & BIT(NEW_RUNNING_MEAN + i))
            stream_output_write_f64(output, run->sample_sums[i], run->c);
    }
}

static void forward_block(struct run *run, int64_t first, int64_t count)
{
    bool statistics = run->line.op != AFFINE && !run->line.evaluate;
    unsigned running = run->line.evaluate ? RUNNING_INPUTS : 0;
    normfuse_tensors tensors;
    bool from_stats = is_running_average(run);
    if (from_stats) {
        const int64_t sizes[3] = {count, run->c, 3};
        tensors = block_inputs(run, STATISTICS_INPUTS, first, count);
        block_outputs(run, &tensors, BIT(U), count);
        tensors.stats = reserve(&run->stats, NORMFUSE_F64, 3, sizes);
        call(run, STATS, &tensors, 0);
        flush_outputs(run, BIT(U));
        add_sample_statistics(run, count);
    }
    /* Without y the parameters have no use. */
    unsigned inputs = run->wanted & BIT(Y) ? FORWARD_INPUTS | running : (unsigned)STATISTICS_INPUTS | running;
    unsigned outputs = from_stats ? BIT(Y) : BIT(Y) | BIT(U);
    tensors = block_inputs(run, inputs, first, count);
    block_outputs(run, &tensors, outputs, count);
    if (from_stats)
        tensors.stats = &run->stats.tensor;
    if (statistics) {
        reserve_statistics(run, count);
        set_statistics(run, &tensors);
    }
    call(run, from_stats ? APPLY : FORWARD, &tensors, 0);
    flush_outputs(run, outputs);
    if (statistics)
        write_statistics(run, count);
}

/* Gradients that blocks add to. */
static unsigned summed_outputs(const struct run *run)
{
    return (run->line.per_sample ? 0 : BIT(DWEIGHT) | BIT(DBIAS)) | (run->line.sample_bias ? 0 : BIT(DPRE_BIAS)) |
           BIT(DSLOPE);
}

static void reserve_summed(struct run *run, unsigned summed)
{
    for (int i = 0; i < OUTPUTS; i++)
        if (summed & run->wanted & BIT(i))
            reserve_zeros(&run->summed[i], 1, &run->c);
}

static void set_summed(struct run *run, normfuse_tensors *tensors, unsigned summed)
{
    for (int i = 0; i < OUTPUTS; i++)
        if (summed & run->wanted & BIT(i))
            set(tensors, output_roles[i].field, &run->summed[i].tensor);
}

static void write_summed(struct run *run, unsigned summed)
{
    for (int i = 0; i < OUTPUTS; i++)
        if (summed & run->wanted & BIT(i)) {
            const double *sums = run->summed[i].data;
            double of_all = 0;
            bool is_one = i == DSLOPE && run->line.one_slope;
            for (int64_t c = 0; is_one && c < run->c; c++)
                of_all += sums[c];
            stream_output_write_f64(&run->outputs[i], is_one ? &of_all : sums, is_one ? 1 : run->c);
        }
}

static void backward_block(struct run *run, int64_t first, int64_t count)
{
    unsigned inputs = FORWARD_INPUTS | BIT(DY);
    if (run->wanted & BIT(DX))
        inputs |= BIT(DU);
    if (run->line.evaluate)
        inputs |= RUNNING_INPUTS;
    unsigned summed = summed_outputs(run);
    normfuse_tensors tensors = block_inputs(run, inputs, first, count);
    block_outputs(run, &tensors, GRADIENTS & ~summed, count);
    set_summed(run, &tensors, summed);
    if (run->line.op != AFFINE && !run->line.evaluate) {
        set_statistics(run, &tensors);
    }
    call(run, BACKWARD, &tensors, summed & run->wanted ? NORMFUSE_ACCUMULATE : 0);
    flush_outputs(run, GRADIENTS & ~summed);
}

static void run_by_sample(struct run *run)
{
    bool backward = (run->given & BIT(DY)) != 0;
    bool statistics = run->line.op != AFFINE && !run->line.evaluate;
    bool forward = (run->wanted & ~(unsigned)GRADIENTS) || statistics;
    run->total_samples = (double)run->samples;
    reserve_summed(run, summed_outputs(run));
    if (is_running_average(run))
        for (int i = 0; i < 2; i++) {
            run->sample_sums[i] = calloc((size_t)run->c + 1, sizeof(double));
            if (!run->sample_sums[i])
                report_failure("memory", "%s", strerror(errno));
        }
    int64_t first = 0;
    do { /* once for an empty batch too: its arguments are checked and its sums are 0 */
        int64_t count = run->samples - first < run->block ? run->samples - first : run->block;
        if (forward)
            forward_block(run, first, count);
        if (backward)
            backward_block(run, first, count);
        first += count;
        progress(run, count);
    } while (first < run->samples);
    write_summed(run, summed_outputs(run));
    if (is_running_average(run))
        write_sample_averages(run);
    free(run->sample_sums[0]);
    free(run->sample_sums[1]);
}

/* ---- batch norm in training -------------------------------------------------------------------------------------- */

/* A pass over the batch, or where only what follows from the whole batch's sums is wanted, of its first block.
 * `summed`: outputs that every block adds to. */
static void batch_pass(struct run *run, enum step step, unsigned inputs, unsigned outputs, unsigned summed, bool whole)
{
    int64_t first = 0;
    do {
        int64_t count = run->samples - first < run->block ? run->samples - first : run->block;
        normfuse_tensors tensors = block_inputs(run, inputs, first, count);
        block_outputs(run, &tensors, outputs, count);
        set_summed(run, &tensors, summed);
        if (step == STATS || step == APPLY)
            tensors.stats = &run->stats.tensor;
        if (step == BACKWARD_SUMS || step == BACKWARD_APPLY) {
            tensors.sums = &run->sums.tensor;
            tensors.mean = &run->mean.tensor;
            tensors.rstd = &run->rstd.tensor;
        }
        bool accumulates = step == STATS || step == BACKWARD_SUMS || (summed & run->wanted);
        call(run, step, &tensors, accumulates ? NORMFUSE_ACCUMULATE : 0);
        flush_outputs(run, outputs);
        first += count;
        progress(run, count);
    } while (whole && first < run->samples);
}

/* mean, rstd and the running statistics, from the statistics of the batch. */
static void finish_batch_statistics(struct run *run)
{
    normfuse_tensors tensors = block_inputs(run, STATISTICS_INPUTS, 0, run->block);
    reserve_statistics(run, run->block);
    tensors.stats = &run->stats.tensor;
    tensors.mean = &run->mean.tensor;
    tensors.rstd = &run->rstd.tensor;
    if (is_running_average(run))
        for (int i = 0; i < 2; i++) {
            const normfuse_tensor *old = stream_input_block(&run->inputs[RUNNING_MEAN + i], 0, run->c);
            const normfuse_tensor *copy = reserve(&run->running[i], run->inputs[RUNNING_MEAN + i].type, 1, &run->c);
            memcpy(copy->data, old->data, (size_t)run->c * number_bytes(run->inputs[RUNNING_MEAN + i].type));
            set(&tensors, output_roles[NEW_RUNNING_MEAN + i].field, copy);
        }
    call(run, APPLY, &tensors, 0);
    write_statistics(run, run->n);
    for (int i = 0; i < 2; i++)
        if (run->wanted & BIT(NEW_RUNNING_MEAN + i)) {
            const normfuse_tensor *out = stream_output_block(&run->outputs[NEW_RUNNING_MEAN + i], run->c);
            memcpy(out->data, run->running[i].data,
                   (size_t)run->c * number_bytes(run->inputs[RUNNING_MEAN + i].type));
            stream_output_flush(&run->outputs[NEW_RUNNING_MEAN + i]);
        }
}

static void run_batch_training(struct run *run)
{
    const int64_t triples[2] = {run->c, 3}, pairs[2] = {run->c, 2};
    bool backward = (run->given & BIT(DY)) != 0;
    bool last_pass = (run->wanted & BIT(DX)) != 0;
    run->total_samples = (double)run->samples * (1 + ((run->wanted & BIT(Y)) != 0) + (backward ? 1 + last_pass : 0)) +
                         (backward && !last_pass);
    reserve_zeros(&run->stats, 2, triples);
    batch_pass(run, STATS, STATISTICS_INPUTS, BIT(U), 0, true);
    finish_batch_statistics(run);
    if (run->wanted & BIT(Y))
        batch_pass(run, APPLY, FORWARD_INPUTS, BIT(Y), 0, true);
    if (!backward)
        return;
    reserve_zeros(&run->sums, 2, pairs);
    reserve_summed(run, BIT(DSLOPE));
    batch_pass(run, BACKWARD_SUMS, FORWARD_INPUTS | BIT(DY), BIT(DPOST_ADD), BIT(DSLOPE), true);
    write_summed(run, BIT(DSLOPE));
    unsigned inputs = FORWARD_INPUTS | BIT(DY) | (last_pass ? BIT(DU) : 0);
    unsigned parameters = BIT(DWEIGHT) | BIT(DBIAS), summed = summed_outputs(run) & BIT(DPRE_BIAS);
    if (run->wanted & parameters)
        batch_pass(run, BACKWARD_APPLY, inputs & ~BIT(DU), parameters, 0, false);
    if (!last_pass)
        return;
    reserve_summed(run, summed);
    batch_pass(run, BACKWARD_APPLY, inputs, (BIT(DX) | BIT(DPRE_BIAS)) & ~summed, summed, true);
    write_summed(run, summed);
}

/* ---- the command ------------------------------------------------------------------------------------------------- */

static int run_main(const struct arguments *arguments)
{
    static struct run run; /* large, and zero */
    run.arguments = arguments;
    read_words(&run);
    read_files(&run);
    run.exec = (normfuse_exec){.struct_bytes = sizeof run.exec,
                               .threads = (int32_t)arguments_number(arguments, OPTION_THREADS, 1, THREADS_MAX, 0)};
    (void)arguments_bytes(arguments, OPTION_BLOCK_BYTES, 1);
    if (run.line.device == NORMFUSE_CUDA)
        mirror_open(&run.mirror, run.x_path, &run.exec);
    open_x(&run);
    for (int i = X + 1; i < INPUTS; i++)
        if (run.given & BIT(i))
            open_input(&run, (enum input)i);
    for (int i = 0; i < OUTPUTS; i++)
        if (run.wanted & BIT(i))
            open_output(&run, (enum output_id)i);
    choose_block(&run);
    run.show_progress = !arguments_has(arguments, OPTION_QUIET) && isatty(STDERR_FILENO) && run.block < run.samples;
    if (run.line.op == BATCH_NORM && !run.line.evaluate)
        run_batch_training(&run);
    else
        run_by_sample(&run);
    report_progress(NULL);
    outputs_commit(arguments_has(arguments, OPTION_SYNC));
    return CODE_OK;
}
