/* SPDX-License-Identifier: MIT
 *
 * test_problem_line.c - the spelling of problems: what is taken, what is refused and in which words, and that a name
 * reads back as the problem it names; and random ones: the same on every machine, valid, in the shares they should
 * have. */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/problem_line.h"
#include "cli/random.h"

static int passed, failed;

static void check(bool good, const char *what, const char *detail)
{
    if (good) {
        passed++;
    } else {
        failed++;
        printf("FAIL %s: %s\n", what, detail);
    }
}

/* Text that must be taken, and the name that it gives. */
static const struct {
    const char *text, *name;
} good_lines[] = {
    { "group_norm 2x320x64x64 groups=32", "group_norm 2x320x64x64 groups=32" },
    { "group_norm 128x256x28x28 groups=32 dtype=f32 layout=nchw act=silu dir=fwd",
      "group_norm 128x256x28x28 groups=32 act=silu" },
    { "group_norm 2x6 groups=1 weight_dtype=f32 dtype=bf16", "group_norm 2x6 groups=1 dtype=bf16 weight_dtype=f32" },
    { "  group_norm\t1x6x5  groups=3 weight_dtype=f16 ", "group_norm 1x6x5 groups=3 weight_dtype=f16" },
    { "instance_norm 2x32x64x96x96 act=leaky_relu", "instance_norm 2x32x64x96x96 act=leaky_relu" },
    { "instance_norm 2x3x4 act_param=0.2 act=leaky_relu", "instance_norm 2x3x4 act=leaky_relu act_param=0.2" },
    { "instance_norm 2x3x4 act_param=1 act=elu", "instance_norm 2x3x4 act=elu" },
    { "batch_norm 2x3x4 mode=eval eps=1e-3 dir=bwd device=cuda",
      "batch_norm 2x3x4 mode=eval eps=0.001 dir=bwd device=cuda" },
    { "batch_norm 2x3x4 mode=train eps=0.1 layout=nhwc", "batch_norm 2x3x4 layout=nhwc eps=0.1" },
    { "affine 2x3x4 per=sample act=mish dtype=f64", "affine 2x3x4 dtype=f64 act=mish per=sample" },
    { "affine 0x3x0 per=channel", "affine 0x3x0" },
    { "group_norm 3x0x5 groups=4 eps=0", "group_norm 3x0x5 groups=4 eps=0" },
    { "group_norm 3x8x5 groups=4 eps=-0.25", "group_norm 3x8x5 groups=4 eps=-0.25" },
    { "group_norm 3x8x5 +scale +u groups=4 +post_add dir=bwd +pre_add device=cuda",
      "group_norm 3x8x5 groups=4 dir=bwd device=cuda +pre_add +u +post_add +scale" },
    { "instance_norm 3x8x5 +adagn", "instance_norm 3x8x5 +scale" },
    { "affine 3x8x5 +pre_add +u", "affine 3x8x5 +pre_add +u" },
    { "batch_norm 3x8x5 act=prelu dir=bwd", "batch_norm 3x8x5 act=prelu dir=bwd" },
    { "group_norm 3x8x5 +one_slope act=prelu groups=2 +scale",
      "group_norm 3x8x5 groups=2 act=prelu +scale +one_slope" },
    { "affine 3x8x5 +pre_bias +u", "affine 3x8x5 +pre_bias +u" },
    { "batch_norm 3x8x5 +pre_bias=sample +pre_add", "batch_norm 3x8x5 +pre_add +pre_bias=sample" },
    { "batch_norm 3x8x5 +mixed +post_add", "batch_norm 3x8x5 +post_add +mixed" },
    { "affine 3x8x5 layout=nhwc +mixed=inputs", "affine 3x8x5 layout=nhwc +mixed=inputs" },
    { "channel_norm 1x96x4x8x8 groups=1 stat=layer eps_kind=added", "channel_norm 1x96x4x8x8" },
    { "channel_norm 1x96x4 eps_kind=norm eps=1e-12 stat=rms groups=4 act=silu layout=nhwc dir=bwd +scale",
      "channel_norm 1x96x4 groups=4 stat=rms eps_kind=norm layout=nhwc act=silu eps=1e-12 dir=bwd +scale" },
    { "channel_norm 7x16 stat=rms", "channel_norm 7x16 stat=rms" },
    { "channel_norm 7x16 y_dtype=f32 dtype=bf16", "channel_norm 7x16 dtype=bf16 y_dtype=f32" },
    { "channel_norm 7x16 y_dtype=f32", "channel_norm 7x16" },
    { "affine 3x8x5 +mixed=outputs dir=bwd", "affine 3x8x5 dir=bwd +mixed=outputs" },
    { "affine 2x8x3 dtype=float16 layout=NHWC act=swish dir=backward",
      "affine 2x8x3 dtype=f16 layout=nhwc act=silu dir=bwd" },
    { "affine 2x8x3 dtype=BF16 act=SiLU device=GPU layout=channels_last",
      "affine 2x8x3 dtype=bf16 layout=nhwc act=silu device=cuda" },
    { "affine 2x8x3 act=LeakyReLU dtype=double", "affine 2x8x3 dtype=f64 act=leaky_relu" },
};

/* Text that must be refused, and the words that the message must hold. */
static const struct {
    const char *text, *word, *rule;
} bad_lines[] = {
    { "", "operator", "must start" },
    { "grup_norm 2x3", "'grup_norm'", "must start with an operator" },
    { "2x3x4", "'2x3x4'", "must start with an operator" },
    { "group_norm", "'group_norm'", "sizes are missing" },
    { "group_norm groups=4", "'groups=4'", "sizes must be" },
    { "group_norm 5 groups=4", "'5'", "sizes must be" },
    { "group_norm 1x2x3x4x5x6 groups=2", "'1x2x3x4x5x6'", "at most 3 spatial" },
    { "group_norm 2x-8x3 groups=4", "'2x-8x3'", "sizes must be" },
    { "group_norm 2xx3 groups=4", "'2xx3'", "sizes must be" },
    { "group_norm 2x8x groups=4", "'2x8x'", "sizes must be" },
    { "group_norm x8 groups=4", "'x8'", "sizes must be" },
    { "group_norm 2x+8 groups=4", "'2x+8'", "sizes must be" },
    { "affine 99999999999999999999x2", "'99999999999999999999x2'", "overflow" },
    { "affine 4294967296x4294967296", "'4294967296x4294967296'", "overflow" },
    { "affine 0x4294967296x4294967296", "'0x4294967296x4294967296'", "overflow" },
    { "affine 9223372036854775807x1", "'9223372036854775807x1'", "overflow" },
    { "group_norm 2x8x3", "'group_norm'", "groups=N is required" },
    { "group_norm 2x10x3 groups=4", "'groups=4'", "must divide C" },
    { "group_norm 2x8x3 groups=0", "'groups=0'", "above 0" },
    { "group_norm 2x8x3 groups=-2", "'groups=-2'", "above 0" },
    { "group_norm 2x8x3 groups=2.0", "'groups=2.0'", "above 0" },
    { "group_norm 2x8x3 groups=", "'groups='", "above 0" },
    { "group_norm 2x8x3 groups=2 groups=4", "'groups=4'", "given twice" },
    { "batch_norm 2x8x3 groups=2", "'groups=2'", "does not take" },
    { "channel_norm 2x8x3 groups=3", "'groups=3'", "divide C, which is 8" },
    { "channel_norm 2x8x3 stat=mean", "'stat=mean'", "layer, rms" },
    { "channel_norm 2x8x3 eps_kind=l2", "'eps_kind=l2'", "added, norm" },
    { "channel_norm 2x8x3 y_dtype=f64", "'y_dtype=f64'", "one of them f32" },
    { "channel_norm 2x8x3 dtype=f16 y_dtype=bf16", "'y_dtype=bf16'", "one of them f32" },
    { "group_norm 2x8x3 groups=2 y_dtype=f16", "'y_dtype=f16'", "does not take" },
    { "channel_norm 2x8x3 mode=eval", "'mode=eval'", "does not take" },
    { "channel_norm 1x0x1024 groups=1125899906842624", "'groups=1125899906842624'", "the statistics overflow" },
    { "group_norm 2x8x3 groups=2 stat=rms", "'stat=rms'", "does not take" },
    { "affine 2x8x3 eps_kind=norm", "'eps_kind=norm'", "does not take" },
    { "instance_norm 2x8x3 groups=8", "'groups=8'", "does not take" },
    { "affine 2x8x3 eps=1", "'eps=1'", "does not take" },
    { "affine 2x8x3 mode=eval", "'mode=eval'", "does not take" },
    { "batch_norm 2x8x3 per=sample", "'per=sample'", "does not take" },
    { "batch_norm 2x8x3 mode=test", "'mode=test'", "train, eval" },
    { "affine 2x8x3 per=batch", "'per=batch'", "channel, sample" },
    { "affine 2x8x3 dtype=fp8", "'dtype=fp8'", "f64, f32, f16, bf16" },
    { "affine 2x8x3 dtype=bf61", "'dtype=bf61'", "bf16, did you mean bf16?" },
    { "affine 2x8x3 dytpe=bf16", "'dytpe=bf16'", "not a key of affine, did you mean dtype?" },
    { "group_norm 2x8x3 gruops=2", "'gruops=2'", "did you mean groups?" },
    { "affine 2x8x3 act=sliu", "'act=sliu'", "did you mean silu?" },
    { "affine 2x8x3 act=nonsense", "'act=nonsense'", "relu6, prelu" },
    { "affine 2x8x3 +psot_add", "'+psot_add'", "did you mean +post_add?" },
    { "Groupnorm 2x8x3 groups=2", "'Groupnorm'", "did you mean group_norm?" },
    { "affine 2x8x3 weight_dtype=int8", "'weight_dtype=int8'", "f64, f32, f16, bf16" },
    { "affine 2x8x3 layout=hwcn", "'layout=hwcn'", "nchw, nhwc" },
    { "affine 2x8x3 act_param=0.1", "'act_param'", "only leaky_relu and elu" },
    { "affine 2x8x3 act=elu act_param=x", "'act_param=x'", "finite number" },
    { "batch_norm 2x8x3 eps=1e-5x", "'eps=1e-5x'", "finite number" },
    { "batch_norm 2x8x3 eps=", "'eps='", "finite number" },
    { "batch_norm 2x8x3 eps=nan", "'eps=nan'", "finite number" },
    { "affine 2x8x3 dir=both", "'dir=both'", "fwd, bwd" },
    { "affine 2x8x3 device=tpu", "'device=tpu'", "cpu, cuda" },
    { "affine 2x8x3 colour=red", "'colour=red'", "not a key" },
    { "affine 2x8x3 +residual", "'+residual'", "must be one of +pre_add" },
    { "affine 2x8x3 +pre_add=1", "'+pre_add=1'", "must be one of +pre_add" },
    { "affine 2x8x3 +post_add +post_add", "'+post_add'", "given twice" },
    { "affine 2x8x3 +u", "'+u'", "+pre_add or +pre_bias is missing" },
    { "affine 2x8x3 +pre_bias=channel", "'+pre_bias=channel'", "+pre_bias=sample" },
    { "affine 2x8x3 +pre_bias +pre_bias=sample", "'+pre_bias=sample'", "expected one of them" },
    { "batch_norm 2x8x3 +scale", "'+scale'", "not batch_norm" },
    { "affine 2x8x3 +one_slope", "'+one_slope'", "only act=prelu has a slope, not identity" },
    { "affine 2x8x3 act=leaky_relu +one_slope", "'+one_slope'", "not leaky_relu" },
    { "affine 2x8x3 act=prelu act_param=0.1", "'act_param'", "not prelu" },
    { "affine 2x8x3 +mixed=x", "'+mixed=x'", "+mixed=inputs, +mixed=outputs" },
    { "affine 2x8x3 +mixed +mixed=outputs", "'+mixed=outputs'", "expected one of them" },
    { "affine 2x8x3 affine 2x8x3", "'affine'", "one problem only" },
};

static void test_good_lines(void)
{
    for (size_t i = 0; i < sizeof good_lines / sizeof *good_lines; i++) {
        char error[400] = "", name[200] = "";
        struct problem_line line, again;
        char *words[] = { (char *)(uintptr_t)good_lines[i].text };
        check(problem_line_parse(words, 1, &line, error, sizeof error) == 1, good_lines[i].text, error);
        size_t length = problem_line_name(&line, name, sizeof name);
        check(strcmp(name, good_lines[i].name) == 0 && length == strlen(name), good_lines[i].text, name);
        words[0] = name;
        check(problem_line_parse(words, 1, &again, error, sizeof error) == 1, name, error);
        char second[200];
        problem_line_name(&again, second, sizeof second);
        check(strcmp(name, second) == 0, name, second);
        char tight[8];
        check(problem_line_name(&line, tight, sizeof tight) == length && strlen(tight) == 7, name, "a short buffer");
    }
}

static void test_bad_lines(void)
{
    for (size_t i = 0; i < sizeof bad_lines / sizeof *bad_lines; i++) {
        char error[400] = "";
        struct problem_line line;
        char *words[] = { (char *)(uintptr_t)bad_lines[i].text };
        size_t taken = problem_line_parse(words, 1, &line, error, sizeof error);
        check(taken == 0 && strstr(error, bad_lines[i].word) && strstr(error, bad_lines[i].rule), bad_lines[i].text,
              taken ? "was taken" : error);
    }
    static char long_word[5000];
    memset(long_word, 'a', sizeof long_word - 1);
    char error[400] = "";
    struct problem_line line;
    char *words[] = { long_word };
    check(problem_line_parse(words, 1, &line, error, sizeof error) == 0 && strstr(error, "too long"), "long word",
          error);
}

static void test_fields(void)
{
    struct problem_line line;
    char error[400] = "";
    char *words[] = { "instance_norm", "2x3x4x5", "dtype=f16", "weight_dtype=f32", "layout=nhwc", "act=elu",
                      "act_param=0.5", "eps=0.25", "dir=bwd", "affine", "1x2" };
    check(problem_line_parse(words, 11, &line, error, sizeof error) == 9, "words up to the next operator", error);
    check(line.op == INSTANCE_NORM && line.ndim == 4 && line.sizes[0] == 2 && line.sizes[3] == 5 && line.groups == 3 &&
              line.type == NORMFUSE_F16 && line.weight_type == NORMFUSE_F32 && line.channels_last &&
              line.activation == NORMFUSE_ELU && line.has_act_param && line.act_param == 0.5 && line.eps == 0.25 &&
              line.backward && line.device == NORMFUSE_CPU,
          "fields", "differ");
    char *mixed[] = { "group_norm 2x8x3", "groups=4 act=relu", "dtype=f64" };
    check(problem_line_parse(mixed, 3, &line, error, sizeof error) == 3 && line.groups == 4 &&
              line.activation == NORMFUSE_RELU && line.type == NORMFUSE_F64,
          "a problem in several quoted words", error);
    line = problem_line_default(AFFINE);
    check(problem_line_key(&line, "per=sample", error, sizeof error) == 0 && line.per_sample, "key", error);
    check(problem_line_key(&line, "momentum=1", error, sizeof error) == 1, "unknown key", error);
    check(problem_line_key(&line, "per=x", error, sizeof error) == 2, "bad value", error);
    check(problem_line_key(&line, "per", error, sizeof error) == 1, "no key", error);
    check(problem_line_key(&line, "+pre_add", error, sizeof error) == 1, "additions are no keys", error);
}

static void test_lists(void)
{
    char path[] = "/tmp/normfuse_problems_XXXXXX";
    int descriptor = mkstemp(path);
    FILE *file = descriptor >= 0 ? fdopen(descriptor, "w") : NULL;
    if (!file) {
        check(false, "temporary file", path);
        return;
    }
    fputs("# problems\n\n  affine 1x2 # a comment\nbatch_norm 2x3x4", file);
    fclose(file);
    char at[64];
    snprintf(at, sizeof at, "@%s", path);
    struct problem_line *lines;
    size_t count;
    char *arguments[] = { "group_norm", "2x8x3", "groups=2", at, "affine 7x7", "affine", "8x8", at };
    const char *failure = problem_lines_read(8, arguments, &lines, &count);
    check(!failure && count == 7 && lines[0].groups == 2 && lines[1].op == AFFINE && lines[2].op == BATCH_NORM &&
              lines[3].sizes[0] == 7 && lines[4].sizes[0] == 8 && lines[6].ndim == 3,
          "a list", failure ? failure : "differs");
    free(lines);
    file = fopen(path, "w");
    if (file) {
        fputs("affine 1x2\n\naffine 1x2 dtype=q\n", file);
        fclose(file);
    }
    failure = problem_lines_read(1, &arguments[3], &lines, &count);
    check(failure && strstr(failure, ":3: 'dtype=q'") && !lines && !count, "file and line of an error",
          failure ? failure : "was taken");
    unlink(path);
    failure = problem_lines_read(1, &arguments[3], &lines, &count);
    check(failure && strstr(failure, path), "a file that is not there", failure ? failure : "was taken");
    char *directory[] = { "@/tmp" };
    failure = problem_lines_read(1, directory, &lines, &count);
    check(failure && strstr(failure, "/tmp"), "a directory", failure ? failure : "was taken");
    check(!problem_lines_read(0, NULL, &lines, &count) && count == 0, "no arguments", "");
    char *stray[] = { "affine", "1x2", "@nowhere", "dtype=f64" };
    failure = problem_lines_read(4, stray, &lines, &count);
    check(failure != NULL, "words after a file", "was taken");
}

/* ---- random problems ------------------------------------------------------------------------------------------- */

static int64_t positions_of(const struct problem_line *line)
{
    int64_t positions = 1;
    for (int32_t i = 2; i < line->ndim; i++)
        positions *= line->sizes[i];
    return positions;
}

static int64_t bytes_of(const struct problem_line *line)
{
    int64_t item = line->type == NORMFUSE_F64 ? 8 : line->type == NORMFUSE_F32 ? 4 : 2;
    return line->sizes[0] * line->sizes[1] * positions_of(line) * item;
}

/* Each name reads back as itself, and the list is what it was when the seed was first written into a report: bench's,
 * and check's, which has pre_bias besides. */
static void test_random_list(bool draws_pre_bias)
{
    const uint64_t golden = draws_pre_bias ? 0x28b7cee310c1f2b5u : 0xd7686d260269edb6u;
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (int64_t i = 0; i < 2000; i++) {
        struct problem_line line = random_problem(1, i, 65536, 268435456), again;
        if (draws_pre_bias)
            random_pre_bias(&line, 1, i);
        char name[PROBLEM_NAME_BYTES], second[PROBLEM_NAME_BYTES], error[400] = "";
        size_t length = problem_line_name(&line, name, sizeof name);
        char *words[] = { name };
        check(problem_line_parse(words, 1, &again, error, sizeof error) == 1, name, error);
        problem_line_name(&again, second, sizeof second);
        check(strcmp(name, second) == 0, name, second);
        for (size_t at = 0; at <= length; at++)
            hash = (hash ^ (unsigned char)(name[at] ? name[at] : '\n')) * 1099511628211u;
    }
    char text[80];
    snprintf(text, sizeof text, "0x%016llxu", (unsigned long long)hash);
    check(hash == golden, "the list of seed 1 has another hash", text);
}

/* The problem is what it was, but for pre_bias and u: shares of 10,000 draws as below. */
static void test_random_pre_bias(void)
{
    enum { DRAWS = 10000 };
    int64_t drawn = 0, of_samples = 0, written = 0, misshapen = 0;
    for (int64_t i = 0; i < DRAWS; i++) {
        const struct problem_line before = random_problem(7, i, 65536, 268435456);
        struct problem_line line = before;
        random_pre_bias(&line, 7, i);
        const bool has_bias = line.pre_bias || line.sample_bias;
        drawn += has_bias;
        of_samples += line.sample_bias;
        written += has_bias && !before.write_u && line.write_u;
        misshapen += (line.pre_bias && line.sample_bias) || (before.write_u && !line.write_u) ||
                     (line.sample_bias && positions_of(&line) < RANDOM_VALUES);
        line.pre_bias = line.sample_bias = false;
        line.write_u = before.write_u;
        char name[PROBLEM_NAME_BYTES], want[PROBLEM_NAME_BYTES];
        problem_line_name(&line, name, sizeof name);
        problem_line_name(&before, want, sizeof want);
        misshapen += strcmp(name, want) != 0;
    }
    char text[80];
    snprintf(text, sizeof text, "%d of %d, %d of samples, %d write u", (int)drawn, (int)DRAWS, (int)of_samples,
             (int)written);
    check(drawn > 1357 && drawn < 1643 && of_samples > drawn / 3 && of_samples < drawn / 2 && written > drawn / 6 &&
              written < drawn / 3, "pre_bias", text);
    check(misshapen == 0, "pre_bias", "the problem is another one");
}

/* 10 % of 10,000 draws that have enough channels are channel norms, with the shares that random.c says; the others, and
 * the rest of those, are what they were. */
static void test_random_channel_norm(void)
{
    enum { DRAWS = 10000 };
    int64_t may = 0, drawn = 0, of_squares = 0, of_norm = 0, grouped = 0, changed = 0;
    for (int64_t i = 0; i < DRAWS; i++) {
        const struct problem_line before = random_problem(7, i, 65536, 268435456);
        struct problem_line line = before;
        random_channel_norm(&line, 7, i);
        may += line.sizes[1] >= RANDOM_VALUES;
        if (line.op != CHANNEL_NORM) {
            changed += memcmp(&line, &before, sizeof line) != 0;
            continue;
        }
        drawn++;
        of_squares += line.statistics == NORMFUSE_MEAN_SQUARE;
        of_norm += line.eps_kind == NORMFUSE_EPS_OF_NORM;
        grouped += line.groups > 1;
        changed += line.groups < 1 || line.sizes[1] % line.groups || line.sizes[1] / line.groups < RANDOM_VALUES ||
                   line.evaluate || line.per_sample || memcmp(line.sizes, before.sizes, sizeof line.sizes) != 0 ||
                   line.type != before.type || line.activation != before.activation || line.backward != before.backward;
    }
    char text[120];
    snprintf(text, sizeof text, "%d of %d, %d stat=rms, %d eps_kind=norm, %d of groups", (int)drawn, (int)may,
             (int)of_squares, (int)of_norm, (int)grouped);
    const double wide = 4 * sqrt(0.09 * (double)may);
    check(fabs((double)drawn - 0.1 * (double)may) < wide && of_squares > drawn * 2 / 5 && of_squares < drawn * 3 / 5 &&
              of_norm > drawn / 4 && of_norm < drawn * 2 / 5 && grouped > drawn / 10 && grouped < drawn * 3 / 10,
              "channel_norm", text);
    check(changed == 0, "channel_norm", "the problem is another one");
}

/* The problem is what it was, but for the activation; the share of 10,000 draws is 5 %, half of it with one slope. */
static void test_random_prelu(void)
{
    enum { DRAWS = 10000 };
    int64_t drawn = 0, of_all = 0, changed = 0;
    for (int64_t i = 0; i < DRAWS; i++) {
        const struct problem_line before = random_problem(7, i, 65536, 268435456);
        struct problem_line line = before;
        random_prelu(&line, 7, i);
        drawn += line.activation == NORMFUSE_PRELU;
        of_all += line.one_slope;
        changed += line.one_slope && line.activation != NORMFUSE_PRELU;
        line.activation = before.activation;
        line.one_slope = false;
        char name[PROBLEM_NAME_BYTES], want[PROBLEM_NAME_BYTES];
        problem_line_name(&line, name, sizeof name);
        problem_line_name(&before, want, sizeof want);
        changed += strcmp(name, want) != 0;
    }
    char text[80];
    snprintf(text, sizeof text, "%d of %d, %d with one slope", (int)drawn, (int)DRAWS, (int)of_all);
    check(drawn > 413 && drawn < 587 && of_all > drawn * 2 / 5 && of_all < drawn * 3 / 5, "prelu", text);
    check(changed == 0, "prelu", "the problem is another one");
}

/* Shares of 10,000 draws, in percent, within four standard deviations; sizes within the limits and log-uniform. */
static void test_random_shares(void)
{
    enum { DRAWS = 10000 };
    struct {
        const char *what;
        double share;
        int64_t count;
    } shares[] = {
        { "group norm", 45, 0 },     { "batch norm, training", 20, 0 }, { "batch norm, evaluation", 8, 0 },
        { "instance norm", 15, 0 },  { "affine", 12, 0 },               { "backward", 50, 0 },
        { "f64", 4, 0 },             { "f32", 32, 0 },                  { "bf16", 32, 0 },
        { "f16", 32, 0 },            { "identity", 25, 0 },             { "relu", 25, 0 },
        { "silu", 25, 0 },           { "another activation", 25, 0 },   { "+pre_add", 15, 0 },
        { "+u", 7.5, 0 },            { "+post_add", 20, 0 },            { "+scale", 4.5, 0 },
        { "f32 weights", 32, 0 },    { "first quarter of sizes", 25, 0 }, { "second quarter", 25, 0 },
        { "third quarter", 25, 0 },  { "last quarter", 25, 0 },
    };
    int64_t axes[4] = { 0 }, channels_last = 0, odd = 0, beyond = 0, few = 0, misshapen = 0;
    for (int64_t i = 0; i < DRAWS; i++) {
        struct problem_line line = random_problem(7, i, 65536, 268435456);
        int64_t bytes = bytes_of(&line), positions = positions_of(&line), samples = line.sizes[0];
        int64_t channels = line.sizes[1];
        bool is_half = line.type == NORMFUSE_F16 || line.type == NORMFUSE_BF16;
        const bool met[] = {
            line.op == GROUP_NORM, line.op == BATCH_NORM && !line.evaluate, line.op == BATCH_NORM && line.evaluate,
            line.op == INSTANCE_NORM, line.op == AFFINE, line.backward, line.type == NORMFUSE_F64,
            line.type == NORMFUSE_F32, line.type == NORMFUSE_BF16, line.type == NORMFUSE_F16,
            line.activation == NORMFUSE_IDENTITY, line.activation == NORMFUSE_RELU, line.activation == NORMFUSE_SILU,
            line.activation != NORMFUSE_IDENTITY && line.activation != NORMFUSE_RELU &&
                line.activation != NORMFUSE_SILU,
            line.pre_add, line.write_u, line.post_add, line.scale_shift, is_half && line.weight_type == NORMFUSE_F32,
            bytes < 65536 * 8, bytes >= 65536 * 8 && bytes < 65536 * 64, bytes >= 65536 * 64 && bytes < 65536 * 512,
            bytes >= 65536 * 512,
        };
        for (size_t k = 0; k < sizeof shares / sizeof *shares; k++)
            shares[k].count += met[k];
        axes[line.ndim - 2]++;
        channels_last += line.channels_last;
        odd += channels % 2;
        beyond += bytes < 65536 - 65536 / 8 || bytes > 268435456 + 268435456 / 8;
        int64_t per_set = line.op == GROUP_NORM ? channels / line.groups * positions
                          : line.op == INSTANCE_NORM || line.per_sample || line.scale_shift ? positions
                                                                                            : samples * positions;
        few += per_set < RANDOM_VALUES;
        misshapen += (line.op == GROUP_NORM && channels % line.groups) || (line.backward != (i % 2 == 1)) ||
                     (line.write_u && !line.pre_add) || (line.scale_shift && line.op != GROUP_NORM) ||
                     (line.weight_type != line.type && !is_half);
    }
    for (size_t k = 0; k < sizeof shares / sizeof *shares; k++) {
        double p = shares[k].share / 100, wide = 4 * sqrt(p * (1 - p) / DRAWS) * 100;
        double got = 100.0 * (double)shares[k].count / DRAWS;
        /* sizes may round over a quarter's end */
        wide += strstr(shares[k].what, "quarter") ? 1 : 0;
        char text[80];
        snprintf(text, sizeof text, "%.2f %% are, %.2f should be", got, shares[k].share);
        check(fabs(got - shares[k].share) <= wide, shares[k].what, text);
    }
    check(axes[0] > DRAWS / 20 && axes[1] > DRAWS / 10 && axes[2] > DRAWS / 10 && axes[3] > DRAWS / 10, "spatial axes",
          "too few of a kind");
    check(channels_last > DRAWS * 4 / 10 && channels_last < DRAWS / 2 && odd > DRAWS / 5 && odd < DRAWS / 2,
          "layouts and odd channels", "other shares");
    check(beyond == 0, "bytes", "beyond the limits by more than an eighth");
    check(few == 0 && misshapen == 0, "shapes", "few values or wrong ones");
}

static void test_random_limits(void)
{
    static const int64_t limits[] = { RANDOM_LEAST_BYTES, 100000, 1 << 20, (int64_t)1 << 33, RANDOM_MOST_BYTES };
    int64_t wrong = 0;
    for (size_t k = 0; k < sizeof limits / sizeof *limits; k++)
        for (int64_t i = 0; i < 3000; i++) {
            struct problem_line line = random_problem(k + 1, i, limits[k], limits[k]);
            int64_t error = bytes_of(&line) - limits[k];
            wrong += error > limits[k] / 8 || error < -limits[k] / 8 - 8;
        }
    check(wrong == 0, "one size", "missed by more than an eighth");
    struct problem_line one = random_problem(1, 3, 65536, 1 << 20), other = random_problem(2, 3, 65536, 1 << 20);
    check(memcmp(one.sizes, other.sizes, sizeof one.sizes) != 0, "another seed", "the same sizes");
}

int main(void)
{
    test_good_lines();
    test_bad_lines();
    test_fields();
    test_lists();
    test_random_list(false);
    test_random_list(true);
    test_random_pre_bias();
    test_random_prelu();
    test_random_channel_norm();
    test_random_shares();
    test_random_limits();
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed ? 1 : 0;
}
