/* SPDX-License-Identifier: MIT
 *
 * info.c - `normfuse info`: what this build is and what it runs on. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "device.h"
#include "json.h"
#include "report.h"

#ifndef NORMFUSE_COMMIT
#define NORMFUSE_COMMIT "unknown"
#endif

enum { OPTION_JSON, OPTION_COUNT };

static const struct option options[OPTION_COUNT] = {
    [OPTION_JSON] = {"json", 'j', NULL, "Print one JSON object on one line."},
};

static int info_main(const struct arguments *arguments);

const struct command info_command = {
    .name = "info",
    .summary = "say what this build is and what it runs on",
    .synopsis = "info [--json]\n",
    .description = "Prints the version and the commit; the instruction sets that were built, those that this\n"
                   "CPU has and the one that runs; the default number of threads; the caches, the CPU and the\n"
                   "compiler. Of CUDA it prints the state, NVRTC, which compiles kernels at run time, where they\n"
                   "are kept, and the GPU and its driver where there is one.\n",
    .options = options,
    .option_count = OPTION_COUNT,
    .sections = {"ENVIRONMENT\n"
                "    NORMFUSE_MAX_ISA       scalar, avx2, avx512, avx512bf16 or neon: no better one is used\n"
                "    NORMFUSE_NUM_THREADS   threads used by default\n"
                "    NORMFUSE_VERBOSE       dispatch: print which kernels run, and why\n"
                "                           plan: on a GPU, what each schedule would take\n"
                "                           compile: on a GPU, what is compiled, and where the source is\n"
                "    NORMFUSE_NVRTC         the libnvrtc.so that compiles kernels of GPUs\n"
                "    NORMFUSE_CACHE_DIR     the folder that they are kept in; empty: none\n"
                "\n"
                "EXAMPLES\n"
                "    normfuse info --json | python3 -m json.tool\n"},
    .main = info_main,
};

static void print_bytes(const char *name, int64_t bytes)
{
    if (bytes <= 0)
        printf("%-14s unknown\n", name);
    else if (bytes < INT64_C(1) << 20)
        printf("%-14s %" PRId64 " KiB\n", name, bytes >> 10);
    else
        printf("%-14s %.4g MiB\n", name, (double)bytes / (1 << 20));
}

/* NORMFUSE_MAX_ISA where it names no instruction set that was built, which the library ignores; else NULL. */
static const char *ignored_cap(const char *isas_built)
{
    const char *const cap = getenv("NORMFUSE_MAX_ISA");
    if (cap == NULL || *cap == 0)
        return NULL;
    const size_t length = strlen(cap);
    for (const char *word = isas_built; *word != 0; word += strspn(word, " ")) {
        const size_t word_length = strcspn(word, " ");
        if (word_length == length && memcmp(word, cap, length) == 0)
            return NULL;
        word += word_length;
    }
    return cap;
}

static int info_main(const struct arguments *arguments)
{
    normfuse_information info = {.struct_bytes = sizeof info};
    if (arguments->word_count > 0)
        report_usage("info", "'%s': info takes no words", arguments->words[0]);
    normfuse_status status = normfuse_info(&info);
    if (status != NORMFUSE_OK)
        report_refusal("info", "normfuse_info", status);
    normfuse_compiler_information compiler = {.struct_bytes = sizeof compiler};
    const bool has_compiler = normfuse_compiler_info(&compiler) == NORMFUSE_OK;
    const char *const ignored = ignored_cap(info.isas_built);
    const struct device_facts *gpu = device_open() ? device_facts() : NULL;
    char capability[16] = "";
    if (gpu)
        snprintf(capability, sizeof capability, "%" PRId32 ".%" PRId32, gpu->capability / 10, gpu->capability % 10);
    if (arguments_has(arguments, OPTION_JSON)) {
        if (ignored != NULL)
            fprintf(stderr, "normfuse info: NORMFUSE_MAX_ISA=%s is ignored: it is none of %s\n", ignored,
                    info.isas_built);
        json_open();
        json_string("version", info.version);
        json_string("commit", NORMFUSE_COMMIT);
        json_words("isas_built", info.isas_built);
        json_words("isas_usable", info.isas_usable);
        json_string("isa", info.isa);
        json_integer("threads", info.threads);
        json_integer("l1_bytes", info.l1_bytes);
        json_integer("l2_bytes", info.l2_bytes);
        json_integer("llc_bytes", info.llc_bytes);
        json_string("cpu", info.cpu);
        json_string("compiler", info.compiler);
        json_string("cuda", info.cuda);
        json_string("nvrtc", has_compiler ? compiler.compiler : NULL);
        json_string("kernel_cache", has_compiler ? compiler.cache : NULL);
        json_string("kernel_cache_problem", has_compiler ? compiler.cache_problem : NULL);
        json_integer("kernel_cache_kernels", has_compiler ? compiler.cache_kernels : 0);
        json_integer("kernel_cache_bytes", has_compiler ? compiler.cache_bytes : 0);
        json_string("gpu", gpu ? gpu->name : NULL);
        json_string("driver", gpu ? gpu->driver : NULL);
        json_string("cc", gpu ? capability : NULL);
        json_integer("gpu_l2_bytes", gpu ? (int64_t)gpu->l2_bytes : 0);
        json_integer("gpu_memory_bytes", gpu ? (int64_t)gpu->memory_bytes : 0);
        json_close();
        return CODE_OK;
    }
    printf("%-14s %s (%s)\n", "normfuse", info.version, NORMFUSE_COMMIT);
    printf("%-14s %s", "ISA", info.isa);
    if (ignored != NULL)
        printf(" (NORMFUSE_MAX_ISA=%s is ignored: it is none of those built)", ignored);
    putchar('\n');
    printf("%-14s %s\n", "ISAs built", info.isas_built);
    printf("%-14s %s\n", "ISAs usable", info.isas_usable);
    printf("%-14s %d\n", "threads", info.threads);
    print_bytes("L1 data cache", info.l1_bytes);
    print_bytes("L2 cache", info.l2_bytes);
    print_bytes("last level", info.llc_bytes);
    printf("%-14s %s\n", "CPU", info.cpu);
    printf("%-14s %s\n", "compiler", info.compiler);
    printf("%-14s %s\n", "CUDA", info.cuda);
    if (has_compiler) {
        printf("%-14s %s\n", "NVRTC", compiler.compiler);
        printf("%-14s %s", "kernel cache", compiler.cache[0] != '\0' ? compiler.cache : "none");
        if (compiler.cache[0] != '\0' && compiler.cache_problem[0] != '\0')
            printf(": not used, it %s", compiler.cache_problem);
        else if (compiler.cache[0] != '\0')
            printf(": %" PRId64 " kernels, %.4g MiB", compiler.cache_kernels, (double)compiler.cache_bytes / (1 << 20));
        putchar('\n');
    }
    if (gpu) {
        printf("%-14s %s, compute capability %s\n", "GPU", gpu->name, capability);
        printf("%-14s %s\n", "driver", gpu->driver);
        print_bytes("GPU L2 cache", (int64_t)gpu->l2_bytes);
        print_bytes("GPU memory", (int64_t)gpu->memory_bytes);
    }
    return CODE_OK;
}
