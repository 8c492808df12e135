/* SPDX-License-Identifier: MIT
 *
 * dispatch.c - which table runs, and the functions that the CPU offers as a backend. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend.h"
#include "cpu/kernels.h"
#include "cpu/machine.h"
#include "cpu/run.h"
#include "cpu/threads.h"

#if defined(__AVX__) && !defined(NORMFUSE_NATIVE)
#error "dispatch.c must be built for the baseline CPU: instruction-set flags belong to the isa_*.c files alone"
#endif

const struct normfuse_table *const normfuse_tables[] = {
#if defined(NORMFUSE_HAVE_AVX512)
    &normfuse_table_avx512bf16,
    &normfuse_table_avx512,
#endif
#if defined(NORMFUSE_HAVE_AVX2)
    &normfuse_table_avx2,
#endif
#if defined(NORMFUSE_HAVE_NEON)
    &normfuse_table_neon,
#endif
    &normfuse_table_scalar, NULL};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct normfuse_table *chosen;
static struct normfuse_machine machine;
static char built[64], usable[64], processor[128];

static void append(char *list, size_t bytes, const char *name)
{
    const size_t length = strlen(list);
    snprintf(list + length, bytes - length, "%s%s", length ? " " : "", name);
}

/* One cache size from sysfs, which knows aarch64 too where sysconf does not. `level` 0 is the highest there is. */
static int64_t cache_bytes(int level)
{
    int64_t best = 0;
    int best_level = 0;
    for (int index = 0; index < 8; index++) {
        char path[96], text[32];
        int this_level = 0;
        long size = 0;
        char unit = 0, type = 0;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/level", index);
        FILE *file = fopen(path, "re");
        if (!file)
            break;
        if (fgets(text, sizeof text, file))
            this_level = atoi(text);
        fclose(file);
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/type", index);
        if ((file = fopen(path, "re"))) {
            if (fgets(text, sizeof text, file))
                type = text[0];
            fclose(file);
        }
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
        if ((file = fopen(path, "re"))) {
            if (fgets(text, sizeof text, file) && sscanf(text, "%ld%c", &size, &unit) >= 1)
                size *= unit == 'K' ? 1024 : unit == 'M' ? 1024 * 1024 : 1;
            fclose(file);
        }
        if (type == 'I' || size <= 0)
            continue;
        if (level ? this_level == level : this_level > best_level) {
            best = size;
            best_level = this_level;
        }
    }
    return best;
}

static void read_processor_name(void)
{
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "re");
    snprintf(processor, sizeof processor, "unknown");
    if (!file)
        return;
    while (fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon) {
            colon[strcspn(colon, "\n")] = 0;
            snprintf(processor, sizeof processor, "%s", colon + 2);
            break;
        }
    }
    fclose(file);
}

static void choose(void)
{
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state); /* once: a thread that were cancelled in here would leave half */
    const char *cap = getenv("NORMFUSE_MAX_ISA");
    size_t first = 0;
    bool known = !cap || !*cap;
    for (size_t i = 0; normfuse_tables[i]; i++) {
        append(built, sizeof built, normfuse_tables[i]->isa);
        if (normfuse_tables[i]->usable())
            append(usable, sizeof usable, normfuse_tables[i]->isa);
        if (cap && strcmp(cap, normfuse_tables[i]->isa) == 0) {
            first = i;
            known = true;
        }
    }
    for (size_t i = first; normfuse_tables[i] && !chosen; i++)
        if (normfuse_tables[i]->usable())
            chosen = normfuse_tables[i];

    machine.l1_bytes = cache_bytes(1);
    machine.l2_bytes = cache_bytes(2);
    machine.llc_bytes = cache_bytes(0);
    const char *verbose = getenv("NORMFUSE_VERBOSE");
    machine.verbose_dispatch = verbose && strstr(verbose, "dispatch");
    if (machine.verbose_dispatch && !known)
        fprintf(stderr, "normfuse: NORMFUSE_MAX_ISA=%s is ignored: it is none of %s\n", cap, built);
    for (size_t i = 0; i < first; i++)
        machine.capped = machine.capped || normfuse_tables[i]->usable();
    read_processor_name();
    pthread_setcancelstate(state, NULL);
}

const struct normfuse_table *normfuse_table_chosen(void)
{
    pthread_once(&once, choose);
    return chosen;
}

const struct normfuse_machine *normfuse_machine_known(void)
{
    pthread_once(&once, choose);
    return &machine;
}

static void describe(normfuse_information *info)
{
    pthread_once(&once, choose);
    info->threads = normfuse_threads_default();
    info->isas_built = built;
    info->isas_usable = usable;
    info->isa = chosen->isa;
    info->l1_bytes = machine.l1_bytes;
    info->l2_bytes = machine.l2_bytes;
    info->llc_bytes = machine.llc_bytes;
    info->cpu = processor;
}

/* normfuse_cpu_run plans the call, and allocates scratch memory that it is not given. */
static normfuse_status prepare(const struct normfuse_problem *problem, const normfuse_exec *exec,
                               struct normfuse_prepared *prepared)
{
    const bool given = exec != NULL && exec->scratch != NULL;
    prepared->problem = problem;
    prepared->scratch_bytes = given ? normfuse_cpu_scratch_bytes(problem, exec) : 0;
    return NORMFUSE_OK;
}

static normfuse_status enqueue(const struct normfuse_prepared *prepared, const normfuse_exec *exec)
{
    return normfuse_cpu_run(prepared->problem, exec);
}

const struct normfuse_backend normfuse_cpu_backend = {.device_type = NORMFUSE_CPU,
                                                      .on_host = true,
                                                      .prepare = prepare,
                                                      .enqueue = enqueue,
                                                      .scratch_bytes = normfuse_cpu_scratch_bytes,
                                                      .sample_quantum = normfuse_cpu_sample_quantum,
                                                      .describe = describe};
