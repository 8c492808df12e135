/* SPDX-License-Identifier: MIT
 *
 * fake_nvrtc.c - a libnvrtc.so.13 for tests, which compiles nothing: its machine code is the ELF magic, the options and
 * the text. FAKE_NVRTC has words that say what it does; the environment is read at every call.
 *
 *   version=12.4        what it says its version is; 13.0
 *   fail=NAME:RESULT    this function fails so
 *   slow=MILLISECONDS   a compilation takes so long
 *   meet=N              a compilation ends once N are under way; it fails after five seconds without
 *   rubbish=WORD        empty, huge or text: what machine code is
 *   die                 the process is killed in a compilation
 *
 * FAKE_NVRTC_LOG=PATH: every compilation appends a byte to the file. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cuda/nvrtc.h"

#define PROTOTYPE(type, name, parameters) type name parameters;
NORMFUSE_NVRTC_LIST(PROTOTYPE)
#undef PROTOTYPE

struct _nvrtcProgram {
    char code[16384];
    const char *log;
};

/* The text that follows `name` in FAKE_NVRTC; NULL: it has no such word. */
static const char *word(const char *name)
{
    const char *const words = getenv("FAKE_NVRTC");
    const char *const found = words != NULL ? strstr(words, name) : NULL;
    return found != NULL ? found + strlen(name) : NULL;
}

/* 0, or what this function is to fail with. */
static int failure(const char *name)
{
    char wanted[64];
    snprintf(wanted, sizeof wanted, "fail=%s:", name);
    const char *const result = word(wanted);
    return result != NULL ? atoi(result) : NVRTC_SUCCESS;
}

static void pause_for(long milliseconds)
{
    nanosleep(&(struct timespec){milliseconds / 1000, milliseconds % 1000 * 1000000}, NULL);
}

int nvrtcVersion(int *major, int *minor)
{
    const char *const version = word("version=");
    *major = 13;
    *minor = 0;
    if (version != NULL)
        sscanf(version, "%d.%d", major, minor);
    return failure("nvrtcVersion");
}

const char *nvrtcGetErrorString(int result)
{
    static _Thread_local char text[32];
    snprintf(text, sizeof text, "FAKE_ERROR_%d", result);
    return text;
}

int nvrtcCreateProgram(nvrtcProgram *program, const char *text, const char *name, int headers,
                       const char *const *header_texts, const char *const *header_names)
{
    const int result = failure("nvrtcCreateProgram");
    if (result != NVRTC_SUCCESS)
        return result;
    *program = calloc(1, sizeof **program);
    if (*program == NULL)
        return NVRTC_ERROR_OUT_OF_MEMORY;
    (*program)->log = "ptxas info    : 8 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
                      "ptxas info    : Used 42 registers\n";
    snprintf((*program)->code, sizeof(*program)->code, "\177ELF %s\n%s", name, text);
    for (int i = 0; i < headers; i++) {
        const size_t at = strlen((*program)->code);
        snprintf((*program)->code + at, sizeof(*program)->code - at, "%s:\n%s", header_names[i], header_texts[i]);
    }
    return NVRTC_SUCCESS;
}

int nvrtcDestroyProgram(nvrtcProgram *program)
{
    free(*program);
    *program = NULL;
    return failure("nvrtcDestroyProgram");
}

static void note_compilation(void)
{
    const char *const path = getenv("FAKE_NVRTC_LOG");
    const int file = path != NULL ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (file >= 0 && write(file, "c", 1) != 1)
        abort();
    if (file >= 0)
        close(file);
}

int nvrtcCompileProgram(nvrtcProgram program, int count, const char *const *options)
{
    static _Atomic(int) under_way;
    const char *const slow = word("slow="), *const meet = word("meet=");
    note_compilation();
    if (word("die") != NULL)
        raise(SIGKILL);
    if (slow != NULL)
        pause_for(atol(slow));
    atomic_fetch_add(&under_way, 1);
    for (int waited = 0; meet != NULL && atomic_load(&under_way) < atoi(meet); waited++) {
        if (waited == 5000)
            return 11; /* an internal error */
        pause_for(1);
    }
    const int result = failure("nvrtcCompileProgram");
    if (result == NVRTC_ERROR_COMPILATION)
        program->log = "single.cuh(7): warning #177-D: unused\n"
                       "single.cuh(8): error: identifier \"lane\" is undefined\n\n1 error detected\n";
    for (int i = 0; i < count; i++) {
        const size_t at = strlen(program->code);
        snprintf(program->code + at, sizeof program->code - at, "option %s\n", options[i]);
    }
    return result;
}

int nvrtcGetCUBINSize(nvrtcProgram program, size_t *bytes)
{
    const char *const rubbish = word("rubbish=");
    *bytes = strlen(program->code) + 1;
    if (rubbish != NULL && strncmp(rubbish, "empty", 5) == 0)
        *bytes = 0;
    if (rubbish != NULL && strncmp(rubbish, "huge", 4) == 0)
        *bytes = SIZE_MAX;
    return failure("nvrtcGetCUBINSize");
}

int nvrtcGetCUBIN(nvrtcProgram program, char *code)
{
    const char *const rubbish = word("rubbish=");
    strcpy(code, program->code);
    if (rubbish != NULL && strncmp(rubbish, "text", 4) == 0)
        memcpy(code, "rubb", 4);
    return failure("nvrtcGetCUBIN");
}

int nvrtcGetProgramLogSize(nvrtcProgram program, size_t *bytes)
{
    *bytes = strlen(program->log) + 1;
    return failure("nvrtcGetProgramLogSize");
}

int nvrtcGetProgramLog(nvrtcProgram program, char *log)
{
    strcpy(log, program->log);
    return failure("nvrtcGetProgramLog");
}
