/* SPDX-License-Identifier: MIT
 *
 * nvrtc.c - a libnvrtc.so.13 that compiles kernels for the emulator: its machine code is a shared object, which the C++
 * compiler makes of the program's text behind ptx.h, and which driver.c opens. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda/nvrtc.h"

#define PROTOTYPE(type, name, parameters) type name parameters;
NORMFUSE_NVRTC_LIST(PROTOTYPE)
#undef PROTOTYPE

extern char **environ;

enum { MAX_FILES = 64, PATH_BYTES = 512, INTERNAL_ERROR = 11 };

struct _nvrtcProgram {
    char folder[64];
    char *files[MAX_FILES]; /* in the folder */
    int file_count;
    char *code, *log;
    size_t code_bytes, log_bytes;
};

int nvrtcVersion(int *major, int *minor)
{
    *major = 13;
    *minor = 0;
    return NVRTC_SUCCESS;
}

const char *nvrtcGetErrorString(int result)
{
    return result == NVRTC_ERROR_COMPILATION ? "the C++ compiler refuses the text" : "the emulator's compiler failed";
}

static void path_of(nvrtcProgram program, const char *file, char path[static PATH_BYTES])
{
    snprintf(path, PATH_BYTES, "%s/%s", program->folder, file);
}

static bool write_file(nvrtcProgram program, const char *name, const char *text, const char *more)
{
    char path[PATH_BYTES];
    path_of(program, name, path);
    FILE *const file = fopen(path, "we");
    char *const kept = strdup(name);
    if (file == NULL || kept == NULL || program->file_count == MAX_FILES) {
        if (file != NULL)
            fclose(file);
        free(kept);
        return false;
    }
    program->files[program->file_count++] = kept;
    const bool is_written = fputs(text, file) >= 0 && fputs(more, file) >= 0;
    return fclose(file) == 0 && is_written;
}

/* To be freed, with a 0 at its end; NULL: it cannot be read. */
static char *read_file(nvrtcProgram program, const char *name, size_t *bytes)
{
    char path[PATH_BYTES];
    struct stat facts;
    path_of(program, name, path);
    FILE *const file = fopen(path, "re");
    char *content = NULL;
    if (file != NULL && fstat(fileno(file), &facts) == 0 && (content = calloc((size_t)facts.st_size + 1, 1)) != NULL)
        *bytes = fread(content, 1, (size_t)facts.st_size, file);
    if (file != NULL)
        fclose(file);
    return content;
}

int nvrtcCreateProgram(nvrtcProgram *program, const char *text, const char *name, int headers,
                       const char *const *header_texts, const char *const *header_names)
{
    (void)name;
    const char *const temporary = getenv("TMPDIR");
    nvrtcProgram made = calloc(1, sizeof *made);
    if (made == NULL)
        return NVRTC_ERROR_OUT_OF_MEMORY;
    *program = made;
    snprintf(made->folder, sizeof made->folder, "%.40s/normfuse-XXXXXX", temporary != NULL ? temporary : "/tmp");
    if (mkdtemp(made->folder) == NULL) {
        made->folder[0] = '\0';
        return INTERNAL_ERROR;
    }
    bool is_written = write_file(made, "kernel.cpp", text, "\nNORMFUSE_EMULATED(NORMFUSE_KERNEL)\n");
    for (int i = 0; i < headers; i++)
        is_written = is_written && write_file(made, header_names[i], header_texts[i], "");
    return is_written ? NVRTC_SUCCESS : INTERNAL_ERROR;
}

int nvrtcDestroyProgram(nvrtcProgram *program)
{
    static const char *const made[] = {"kernel.so", "log"};
    char path[PATH_BYTES];
    for (int i = 0; i < (*program)->file_count; i++) {
        path_of(*program, (*program)->files[i], path);
        unlink(path);
        free((*program)->files[i]);
    }
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) {
        path_of(*program, made[i], path);
        unlink(path);
    }
    rmdir((*program)->folder);
    free((*program)->code);
    free((*program)->log);
    free(*program);
    *program = NULL;
    return NVRTC_SUCCESS;
}

/* The compiler is interrupted as any other process is, whatever signals this thread blocks. */
static int run(char *const *words, const char *log)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none;
    pid_t child;
    int status = -1;
    sigemptyset(&none);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 2, log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (posix_spawnp(&child, words[0], &actions, &attributes, words, environ) != 0 ||
        waitpid(child, &status, 0) != child)
        status = -1;
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    return status;
}

int nvrtcCompileProgram(nvrtcProgram program, int count, const char *const *options)
{
    static const char option[] = "--gpu-architecture=sm_";
    char architecture[64] = "", include[PATH_BYTES], source[PATH_BYTES], object[PATH_BYTES], log[PATH_BYTES];
    for (int i = 0; i < count; i++)
        if (strncmp(options[i], option, sizeof option - 1) == 0)
            snprintf(architecture, sizeof architecture, "-D__CUDA_ARCH__=%d",
                     10 * atoi(options[i] + sizeof option - 1));
    if (architecture[0] == '\0')
        return NVRTC_ERROR_INVALID_OPTION;
    snprintf(include, sizeof include, "-I%s", program->folder);
    path_of(program, "kernel.cpp", source);
    path_of(program, "kernel.so", object);
    path_of(program, "log", log);
    /* Functions of one name, and of other texts, are not this kernel's: hidden. What is read before it was written is
     * no number that could pass for one: variables are filled with a pattern. */
    const char *const words[] = {NORMFUSE_CXX_COMPILER, "-std=c++17", "-O1", "-w", "-pipe", "-fPIC", "-shared",
                                 "-ffp-contract=off", "-fvisibility=hidden", "-ftrivial-auto-var-init=pattern",
                                     architecture,
                                 include, "-I", NORMFUSE_EMULATOR_FOLDER, "-include", NORMFUSE_EMULATOR_FOLDER "/ptx.h",
                                     source, "-o", object, NULL};
    char *arguments[sizeof words / sizeof *words];
    memcpy(arguments, words, sizeof words);
    const int status = run(arguments, log);
    program->log = read_file(program, "log", &program->log_bytes);
    const bool is_refused = WIFEXITED(status) && program->log != NULL && program->log_bytes > 0;
    if (status != 0)
        return is_refused ? NVRTC_ERROR_COMPILATION : INTERNAL_ERROR;
    program->code = read_file(program, "kernel.so", &program->code_bytes);
    return program->code != NULL ? NVRTC_SUCCESS : NVRTC_ERROR_OUT_OF_MEMORY;
}

int nvrtcGetCUBINSize(nvrtcProgram program, size_t *bytes)
{
    *bytes = program->code_bytes;
    return NVRTC_SUCCESS;
}

int nvrtcGetCUBIN(nvrtcProgram program, char *code)
{
    memcpy(code, program->code, program->code_bytes);
    return NVRTC_SUCCESS;
}

int nvrtcGetProgramLogSize(nvrtcProgram program, size_t *bytes)
{
    *bytes = program->log != NULL ? program->log_bytes + 1 : 1;
    return NVRTC_SUCCESS;
}

int nvrtcGetProgramLog(nvrtcProgram program, char *log)
{
    memcpy(log, program->log != NULL ? program->log : "", program->log != NULL ? program->log_bytes + 1 : 1);
    return NVRTC_SUCCESS;
}
