/* SPDX-License-Identifier: MIT
 *
 * test_tuning.c - tunings without a GPU: the fit on rows whose truth is known, that the planner takes what the fit says
 * it takes, and the planner held against the rows that were measured on GPUs (bench/tuning/). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <glob.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "cuda/tuning.h"
#include "fake_driver.h"
#include "harness.h"
#include "tune_fit.h"
#include "tune_plan.h"
#include "tune_rows.h"

/* ---- rows ------------------------------------------------------------------------------------------------------ */

static char path[64];

static const char *read_text(const char *text, struct tune_rows *rows)
{
    FILE *const file = fopen(path, "w");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0, "%s cannot be written", path);
    *rows = (struct tune_rows){0};
    return tune_rows_read(path, rows);
}

#define START "{\"problem\":\"p\",\"layout\":\"rows\",\"dir\":\"bwd\",\"schedule\":\"grid, two\""
#define REST ",\"us\":12.5,\"estimate_us\":3,\"gpu\":\"A\",\"cc\":\"12.0\""

static void test_rows(void)
{
    static const struct {
        const char *text, *reason;
    } bad[] = {
        {"[]", "line 1 is no JSON object"},
        {START REST, "line 1 is no JSON object of"},
        {START REST "} x", "line 1 is no JSON object of"},
        {START REST ",}", "line 1 is no JSON object of"},
        {"\n" START "}\n", "line 2 lacks one of"},
        {START REST ",\"us\":-1}", "\"us\" that means nothing"},
        {START REST ",\"us\":nan}", "\"us\" that means nothing"},
        {START REST ",\"layout\":\"nchw\"}", "\"layout\" that means nothing"},
        {START REST ",\"cc\":\"new\"}", "\"cc\" that means nothing"},
        {START REST ",\"schedule\":\"a name that no schedule has\"}", "\"schedule\" that means nothing"},
    };
    struct tune_rows rows;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *const reason = read_text(bad[i].text, &rows);
        CHECK(reason != NULL && strstr(reason, bad[i].reason) != NULL, "%s: %s", bad[i].text, reason);
        free(rows.rows);
    }
    /* What is written is read again, whatever the driver's words. */
    const struct tune_row row = {.problem = "p",
                                 .schedule = "grid, two",
                                 .gpu = "A \"B\"",
                                 .capability = 120,
                                 .backward = true,
                                 .taken = true,
                                 .us = 12.5,
                                 .estimate = 3};
    char text[2048];
    tune_row_text(&row, text, sizeof text);
    const char *const reason = read_text(text, &rows);
    CHECK(reason == NULL && rows.count == 1, "%s: %s", text, reason);
    if (rows.count == 1) {
        const struct tune_row *const got = rows.rows;
        CHECK(strcmp(got->problem, "p") == 0 && strcmp(got->schedule, "grid, two") == 0 &&
                  strcmp(got->gpu, "A  B ") == 0 && got->capability == 120 && got->backward && !got->columns &&
                  got->taken && !got->in_order && got->us == 12.5 && got->estimate == 3,
              "%s is read as something else", text);
    }
    free(rows.rows);
    CHECK(tune_rows_read("/nowhere/rows.jsonl", &rows) != NULL, "a file that is not there");
}

/* ---- the fit --------------------------------------------------------------------------------------------------- */

/* tests/tuning/synthetic.jsonl: times are exactly start + factor * estimate. */
static void test_fit(void)
{
    struct tune_rows rows = {0};
    struct tune_fit fit;
    const char *wrong = tune_rows_read(NORMFUSE_TESTS_DIR "/tuning/synthetic.jsonl", &rows);
    CHECK(wrong == NULL && rows.count == 68, "synthetic.jsonl: %s, %zu rows", wrong, rows.count);
    wrong = tune_fit(rows.rows, rows.count, &fit);
    CHECK(wrong == NULL && fit.count == 6 && fit.problems == 24, "%s: %d lines, %d problems", wrong, fit.count,
          fit.problems);
    CHECK(fabs(fit.before.mean - 0.0979) < 1e-3 && fabs(fit.before.worst - 0.758) < 1e-2, "regret before: %g, worst %g",
          fit.before.mean, fit.before.worst);
    CHECK(fit.after.mean < 1e-9 && fit.after.worst < 1e-9, "regret after: %g, worst %g", fit.after.mean,
          fit.after.worst);
    for (int i = 0; i < fit.count; i++) {
        const struct tune_line *const line = &fit.lines[i];
        CHECK(line->is_written && line->error_after < 0.12 && line->error_after < line->error_before,
              "%s: estimates are off by %g, before by %g", line->schedule, line->error_after, line->error_before);
    }
    /* Where the rules are right already, they hold. */
    for (size_t i = 0; i < rows.count; i++)
        rows.rows[i].us = rows.rows[i].taken ? 1 : 2;
    wrong = tune_fit(rows.rows, rows.count, &fit);
    CHECK(wrong == NULL && !fit.lines[0].is_written && fit.after.mean < 1e-9, "%s: a fit in the place of right rules",
          wrong);
    /* What is no set of rows. */
    rows.rows[3].capability = 80;
    wrong = tune_fit(rows.rows, rows.count, &fit);
    CHECK(wrong != NULL && strstr(wrong, "two GPUs") != NULL, "rows of two GPUs: %s", wrong);
    rows.rows[3].capability = 90;
    rows.rows[1] = rows.rows[0];
    wrong = tune_fit(rows.rows, rows.count, &fit);
    CHECK(wrong != NULL && strstr(wrong, "two rows") != NULL, "a schedule twice: %s", wrong);
    rows.rows[1].backward = !rows.rows[1].backward;
    wrong = tune_fit(rows.rows, rows.count, &fit);
    CHECK(wrong != NULL && strstr(wrong, "two layouts") != NULL, "a problem of two directions: %s", wrong);
    CHECK(tune_fit(rows.rows, 0, &fit) != NULL, "a fit of nothing");
    free(rows.rows);
}

/* ---- the planner ----------------------------------------------------------------------------------------------- */

/* A device on which as many blocks are resident as on a real one. */
static void use_device(const char *gpu, int capability)
{
    fake_driver_reset();
    const int found = fake_driver_read_registers(NORMFUSE_KERNEL_LIMITS);
    CHECK(found == NORMFUSE_CUDA_KERNELS, "%s names %d of %d kernels", NORMFUSE_KERNEL_LIMITS, found,
          NORMFUSE_CUDA_KERNELS);
    fake_driver.device[0].name = gpu;
    fake_driver.device[0].capability = capability;
    fake_driver_use();
}

/* The tensors as the program measures them, at addresses of nothing. False: the problem is none. */
static bool describe(struct bench *bench, const char *problem)
{
    char text[PROBLEM_NAME_BYTES], error[256];
    char *words[] = {text};
    struct problem_line line;
    snprintf(text, sizeof text, "%s", problem);
    if (!CHECK(problem_line_parse(words, 1, &line, error, sizeof error) == 1, "%s: %s", problem, error))
        return false;
    bench_describe(bench, &line, problem, 256);
    bench->sets = 1;
    bench->arena = (char *)(uintptr_t)0x100000000000;
    bench->exec.sync = (void *)(uintptr_t)0x200000000000;
    bench->exec.sync_bytes = NORMFUSE_CUDA_SYNC_BYTES;
    bench_make_smalls(bench);
    for (int i = 0; i < BENCH_SMALLS; i++)
        bench->smalls[i].device.device_type = NORMFUSE_CUDA;
    bench_take_set(bench);
    return true;
}

static void forget(struct bench *bench)
{
    for (int i = 0; i < BENCH_SMALLS; i++)
        free(bench->small_data[i]);
}

/* Plans every problem of the rows; by what is loaded, or the built-in table. */
static struct tune_regret regret_of(const struct tune_rows *rows)
{
    static struct bench bench;
    struct tune_sum sum = {0};
    for (size_t i = 0; i < rows->count; i++) {
        const struct tune_row *const row = &rows->rows[i];
        if (!tune_is_first(rows->rows, i) || !describe(&bench, row->problem))
            continue;
        const char *const schedule = tune_taken(&bench, row->capability, row->gpu);
        CHECK(schedule != NULL && tune_sum_add(&sum, rows->rows, rows->count, i, schedule),
              "%s is run by %s, which has no row", row->problem, schedule != NULL ? schedule : "no schedule");
        forget(&bench);
    }
    return tune_sum_regret(&sum);
}

/* A number of a name, the same each time: in [0, 1). */
static double draw(const char *name, unsigned salt)
{
    uint64_t hash = salt + 1;
    for (; *name != '\0'; name++)
        hash = (hash ^ (uint64_t)(unsigned char)*name) * UINT64_C(0x9e3779b97f4a7c15), hash ^= hash >> 29;
    return (double)(hash >> 11) * 0x1p-53;
}

/* Rows of every problem of `normfuse tune`, of times that are made up from the schedules' estimates: with the tuning
 * that is fitted to them the planner takes what the fit says, and so has its regret. */
static void test_planner_follows(void)
{
    static struct bench bench;
    static struct normfuse_cuda_tuning_line lines[TUNE_LINES_MAX];
    struct tune_rows rows = {0};
    int problems = 0;
    use_device("NVIDIA H200", 90);
    for (const char *const *problem = tune_problems; *problem != NULL; problem++) {
        struct tune_row of_problem[TUNE_SCHEDULES_MAX];
        if (!describe(&bench, *problem))
            continue;
        const int count = tune_ask(&bench, *problem, 90, of_problem);
        int taken = 0;
        for (int i = 0; i < count; i++)
            taken += of_problem[i].taken;
        CHECK(count < 2 || taken == 1, "%s: %d of %d schedules are taken", *problem, taken, count);
        problems += count > 1;
        for (int i = 0; count > 1 && i < count; i++) {
            struct tune_row *const row = &of_problem[i];
            const unsigned group = 2u * row->columns + row->backward;
            row->us = 4 * draw(row->schedule, group) + row->estimate * (0.6 + draw(row->schedule, 9 + group));
            snprintf(row->gpu, sizeof row->gpu, "made up");
            CHECK(tune_rows_add(&rows, row), "no memory");
        }
        forget(&bench);
    }
    CHECK(problems > 50, "only %d problems have two schedules", problems);
    struct tune_fit fit;
    const char *const wrong = tune_fit(rows.rows, rows.count, &fit);
    CHECK(wrong == NULL && fit.problems == problems, "%s", wrong);
    CHECK(fit.before.mean > 0.03 && fit.after.mean < 0.3 * fit.before.mean, "regret %g, before %g", fit.after.mean,
          fit.before.mean);
    static const struct normfuse_cuda_tuning rules_alone = {"the rules alone", 90, 0, NULL};
    normfuse_cuda_use_tuning(&rules_alone);
    const struct tune_regret before = regret_of(&rows);
    CHECK(fabs(before.mean - fit.before.mean) < 1e-9, "the planner's regret is %g, by the fit %g", before.mean,
          fit.before.mean);
    struct normfuse_cuda_tuning tuning = {"made up", 90, 0, lines};
    for (int i = 0; i < fit.count; i++) {
        const struct tune_line *const from = &fit.lines[i];
        if (!from->is_written)
            continue;
        struct normfuse_cuda_tuning_line *const line = &lines[tuning.count++];
        *line = (struct normfuse_cuda_tuning_line){.schedule = normfuse_cuda_schedule_code(from->schedule),
                                                   .columns = from->columns,
                                                   .backward = from->backward,
                                                   .start = (float)from->start,
                                                   .factor = (float)from->factor};
    }
    static struct normfuse_cuda_tuning held;
    held = tuning;
    normfuse_cuda_use_tuning(&held);
    const struct tune_regret after = regret_of(&rows);
    CHECK(fabs(after.mean - fit.after.mean) < 1e-9 && fabs(after.worst - fit.after.worst) < 1e-9,
          "the planner's regret is %g, worst %g (%s), by the fit %g and %g (%s)", after.mean, after.worst,
          after.worst_problem, fit.after.mean, fit.after.worst, fit.after.worst_problem);
    tune_release();
    free(rows.rows);
}

/* The built-in tables against the rows that they are made of, as the planner takes schedules. */
static void test_committed_rows(void)
{
    const double most_mean = 0.03, most_worst = 0.20;
    glob_t found;
    if (glob(NORMFUSE_TESTS_DIR "/../bench/tuning/*.jsonl", 0, NULL, &found) != 0) {
        harness_skip("the planner against measured rows: bench/tuning/ has none");
        return;
    }
    for (size_t i = 0; i < found.gl_pathc; i++) {
        struct tune_rows rows = {0};
        const char *const wrong = tune_rows_read(found.gl_pathv[i], &rows);
        if (!CHECK(wrong == NULL && rows.count > 0, "%s: %s", found.gl_pathv[i], wrong))
            continue;
        use_device(rows.rows[0].gpu, rows.rows[0].capability);
        tune_release();
        const struct tune_regret regret = regret_of(&rows);
        printf("# %s: regret %.2f %%, worst %.1f %% (%s)\n", rows.rows[0].gpu, 100 * regret.mean, 100 * regret.worst,
               regret.worst_problem);
        CHECK(regret.mean <= most_mean, "%s: the geometric mean of the regret is %.2f %%", found.gl_pathv[i],
              100 * regret.mean);
        CHECK(regret.worst <= most_worst, "%s: the worst regret is %.1f %%, of %s", found.gl_pathv[i],
              100 * regret.worst, regret.worst_problem);
        free(rows.rows);
    }
    globfree(&found);
}

/* The rows of `file` with the estimates of the planner as it is now, and what it takes: times stay as measured. */
static void print_planned_anew(const char *file)
{
    static struct bench bench;
    struct tune_rows rows = {0};
    const char *const wrong = tune_rows_read(file, &rows);
    if (wrong != NULL || rows.count == 0) {
        fprintf(stderr, "%s: %s\n", file, wrong != NULL ? wrong : "no rows");
        exit(3);
    }
    use_device(rows.rows[0].gpu, rows.rows[0].capability);
    for (size_t first = 0; first < rows.count; first++) {
        struct tune_row planned[TUNE_SCHEDULES_MAX];
        if (!tune_is_first(rows.rows, first) || !describe(&bench, rows.rows[first].problem))
            continue;
        const int count = tune_ask(&bench, rows.rows[first].problem, rows.rows[first].capability, planned);
        for (size_t i = first; i < rows.count; i++)
            for (int k = 0; k < count; k++)
                if (strcmp(rows.rows[i].problem, planned[k].problem) == 0 &&
                    strcmp(rows.rows[i].schedule, planned[k].schedule) == 0) {
                    char text[2048];
                    rows.rows[i].estimate = planned[k].estimate;
                    rows.rows[i].taken = planned[k].taken;
                    rows.rows[i].in_order = planned[k].in_order;
                    fwrite(text, 1, tune_row_text(&rows.rows[i], text, sizeof text), stdout);
                }
        forget(&bench);
    }
    tune_release();
    free(rows.rows);
}

/* --plan FILE: prints its rows, planned anew. */
int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--plan") == 0) {
        print_planned_anew(argv[2]);
        return 0;
    }
    snprintf(path, sizeof path, "/tmp/normfuse-%ld.jsonl", (long)getpid());
    test_rows();
    test_fit();
    test_planner_follows();
    test_committed_rows();
    unlink(path);
    normfuse_cuda_use_driver(NULL);
    return harness_close();
}
