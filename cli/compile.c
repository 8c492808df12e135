/* SPDX-License-Identifier: MIT
 *
 * compile.c - `normfuse compile`: fills a cache of kernels without a GPU. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "bench.h"
#include "commands.h"
#include "described_gpu.h"
#include "problems.h"
#include "report.h"

enum { OPTION_GPU = PROBLEMS_OPTIONS, OPTION_OUTPUT, OPTION_COUNT };

static const struct option options[OPTION_COUNT] = {
    PROBLEMS_OPTION_TABLE("Draw with this number (default 1)."),
    [OPTION_GPU] = {"gpu", 'g', "CC", "Compile for GPUs of this compute capability: 8.0, 8.6, 8.9, 9.0, 10.0 or 12.0."},
    [OPTION_OUTPUT] = {"output", 'o', "FOLDER", "Put the kernels there, and not in the cache of normfuse info."},
};

static int compile_main(const struct arguments *arguments);

const struct command compile_command = {
    .name = "compile",
    .summary = "compile the kernels of problems for a GPU that need not be there",
    .synopsis = "compile PROBLEM... --gpu CC [-o FOLDER] [--list]\n"
                "compile --random N --gpu CC [-o FOLDER] [--seed N]\n",
    .description = "Kernels of the GPU are compiled by NVRTC when a call first needs them, and kept in a folder.\n"
                   "This command does so ahead of the calls, without a GPU and its driver: for images, and for\n"
                   "machines without NVRTC. A kernel serves every size of its kind, with and without\n"
                   "synchronization memory. Whatever device a problem names, it is compiled for the GPU.\n"
                   "\n"
                   "NORMFUSE_CACHE_DIR=FOLDER makes later calls use the folder. It must belong to their user or\n"
                   "to root, and others must not be able to write it.\n",
    .options = options,
    .option_count = OPTION_COUNT,
    .sections = {problem_help, "EXAMPLES\n"
                               "    normfuse compile group_norm 2x320x64x64 groups=32 dtype=f16 act=silu --gpu 9.0\n"
                               "    normfuse compile @problems.txt --gpu 8.0 -o /opt/normfuse/kernels\n"},
    .main = compile_main,
};

/* Addresses of tensors on a GPU that is not there: aligned, apart from one another, and of nothing. */
static void place(struct bench *bench)
{
    uintptr_t next = (uintptr_t)1 << 40;
    for (int i = 0; i < bench->reads + bench->writes; i++) {
        bench->big[i].data = (void *)next; /* NOLINT: nothing is read there */
        next += bench->tensor_stride + 256;
    }
    for (int i = 0; i < BENCH_SMALLS; i++)
        bench->smalls[i].device = (normfuse_device){NORMFUSE_CUDA, 0};
    bench->exec.flags = NORMFUSE_PREPARE;
}

/* Notes the kernels of a problem. */
static void note(const struct problem_line *given)
{
    char name[PROBLEM_NAME_BYTES];
    struct problem_line line = *given;
    struct bench bench;
    size_t sync_bytes;
    line.device = NORMFUSE_CUDA;
    problem_line_name(&line, name, sizeof name);
    bench_describe(&bench, &line, name, 256);
    bench_make_smalls(&bench);
    place(&bench);
    for (int has_sync = 0; has_sync < 2; has_sync++) {
        normfuse_status status = normfuse_sync_bytes(0, &sync_bytes);
        bench.exec.sync = has_sync ? (void *)((uintptr_t)1 << 39) : NULL;
        bench.exec.sync_bytes = has_sync ? sync_bytes : 0;
        if (status == NORMFUSE_OK)
            status = bench_call(&bench, &bench.tensors, line.backward, NULL);
        if (status != NORMFUSE_OK)
            report_refusal("compile", name, status);
    }
    for (int i = 0; i < BENCH_SMALLS; i++)
        free(bench.small_data[i]);
}

static void show(void *context, int32_t done, int32_t all)
{
    char text[64];
    (void)context;
    snprintf(text, sizeof text, "%" PRId32 " of %" PRId32 " kernels", done, all);
    report_progress(text);
}

static int compile_main(const struct arguments *arguments)
{
    const char *const gpu = arguments->values[OPTION_GPU], *const folder = arguments->values[OPTION_OUTPUT];
    normfuse_compiler_information before = {.struct_bytes = sizeof before}, after = before;
    struct problems problems = problems_read(arguments, true, true);
    if (gpu == NULL)
        report_usage("compile", "--gpu is missing: %s", described_gpu_names());
    if (folder != NULL && setenv("NORMFUSE_CACHE_DIR", folder, 1) != 0)
        report_failure("memory", "no memory for a name");
    if (!described_gpu_use(gpu))
        report_usage("compile", "--gpu %s is none of %s", gpu, described_gpu_names());
    for (size_t i = 0; i < problems.count; i++)
        note(&problems.lines[i]);
    normfuse_status status = normfuse_compiler_info(&before);
    if (status == NORMFUSE_OK && (before.cache[0] == '\0' || before.cache_problem[0] != '\0'))
        report_failure(before.cache[0] != '\0' ? before.cache : "NORMFUSE_CACHE_DIR", "%s", before.cache_problem);
    if (status == NORMFUSE_OK)
        status = normfuse_prepare_with(0, isatty(STDERR_FILENO) ? show : NULL, NULL);
    report_progress(NULL);
    if (status == NORMFUSE_OK)
        status = normfuse_compiler_info(&after);
    if (status != NORMFUSE_OK)
        report_refusal("compile", "normfuse_prepare", status);
    if (after.cache_problem[0] != '\0')
        report_failure(after.cache, "%s", after.cache_problem);
    printf("%s holds %" PRId64 " kernels, %" PRId64 " of them new, %.1f MiB\n", after.cache, after.cache_kernels,
           after.cache_kernels - before.cache_kernels, (double)after.cache_bytes / (1 << 20));
    free(problems.lines);
    return report_finish(CODE_OK);
}
