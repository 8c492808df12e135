/* SPDX-License-Identifier: MIT
 *
 * compile.c - see compile.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "compile.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "device/arguments.h"
#include "loader.h"
#include "nvrtc.h"

enum { OLDEST = 12080, OLDEST_CAPABILITY = 80, PATH_BYTES = 4096, MAX_LOG_BYTES = 1 << 20, MAX_CODE_BYTES = 64 << 20 };

/* The embedded ones. */
extern const struct normfuse_cuda_text normfuse_cuda_embedded_texts[];
const struct normfuse_cuda_text *normfuse_cuda_texts = normfuse_cuda_embedded_texts;

/* ---- text ------------------------------------------------------------------------------------------------------- */

/* The text ahead of the body. */
enum { HEAD_BYTES = 256 + 64 * NORMFUSE_SIGNATURE_FIELDS };

struct source {
    const char *text, *name;
    char head[HEAD_BYTES], own_name[NORMFUSE_KERNEL_NAME_BYTES];
};

static void write_source(const struct normfuse_cuda_compilation *of, struct source *source)
{
    const struct normfuse_cuda_signature *const signature = &of->signature;
    char *const head = source->head;
    source->text = of->text;
    source->name = of->name;
    if (of->text != NULL)
        return;
    source->text = head;
    source->name = normfuse_cuda_signature_name(signature, source->own_name);
    /* An enumerator has no address; a constexpr variable took 4 bytes of the GPU's memory and 250 of the file. */
    size_t at = (size_t)snprintf(head, HEAD_BYTES, "namespace signature {\nenum : int {\n");
#define FIELD(field)                                                                                                   \
    at += (size_t)snprintf(head + at, HEAD_BYTES - at, "    " #field " = %d,\n", (int)signature->field);
    NORMFUSE_SIGNATURE_LIST(FIELD)
#undef FIELD
#define BODY(name) #name ".cuh",
    static const char *const files[] = {NORMFUSE_BODY_LIST(BODY)};
#undef BODY
    snprintf(head + at, HEAD_BYTES - at, "};\n}\n#define NORMFUSE_KERNEL %s\n#include \"%s\"\n", source->name,
             files[signature->body]);
}

enum { OPTIONS = 5, ARCHITECTURE_BYTES = 40 };

static void write_options(int32_t capability, char architecture[static ARCHITECTURE_BYTES],
                          const char *options[static OPTIONS])
{
    /* Machine code of this very GPU: from 9.0 on with the instructions that no later one keeps. */
    snprintf(architecture, ARCHITECTURE_BYTES, "--gpu-architecture=sm_%d%s", (int)capability,
             capability >= 90 ? "a" : "");
    options[0] = architecture;
    options[1] = "-std=c++17";
    options[2] = "-fmad=false"; /* products and sums fuse where the source says so, and nowhere else */
    options[3] = "--device-as-default-execution-space";
    options[4] = "--ptxas-options=-v"; /* registers and stack, in the log */
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* Covers all files, since a body may include any of them. Takes a millisecond, so it is kept. */
static void digest_texts(unsigned char digest[static NORMFUSE_DIGEST_BYTES])
{
    static const struct normfuse_cuda_text *digested;
    static unsigned char kept[NORMFUSE_DIGEST_BYTES];
    pthread_mutex_lock(&mutex);
    if (digested != normfuse_cuda_texts) {
        struct normfuse_hash hash;
        normfuse_hash_begin(&hash);
        for (const struct normfuse_cuda_text *text = normfuse_cuda_texts; text->name != NULL; text++) {
            normfuse_hash_add(&hash, text->name, strlen(text->name) + 1);
            normfuse_hash_add(&hash, text->text, strlen(text->text) + 1);
        }
        normfuse_hash_end(&hash, kept);
        digested = normfuse_cuda_texts;
    }
    memcpy(digest, kept, sizeof kept);
    pthread_mutex_unlock(&mutex);
}

/* The version of NVRTC is no part of it: a machine without NVRTC finds kernels too. */
static void make_key(const struct source *source, int32_t capability, struct normfuse_cuda_key *key)
{
    char architecture[ARCHITECTURE_BYTES];
    const char *options[OPTIONS], *const version = normfuse_version();
    unsigned char texts[NORMFUSE_DIGEST_BYTES];
    struct normfuse_hash hash;
    write_options(capability, architecture, options);
    digest_texts(texts);
    normfuse_hash_begin(&hash);
    normfuse_hash_add(&hash, version, strlen(version) + 1);
    for (int i = 0; i < OPTIONS; i++)
        normfuse_hash_add(&hash, options[i], strlen(options[i]) + 1);
    normfuse_hash_add(&hash, source->text, strlen(source->text) + 1);
    normfuse_hash_add(&hash, texts, sizeof texts);
    normfuse_hash_end(&hash, key->digest);
}

/* ---- where NVRTC is --------------------------------------------------------------------------------------------- */

struct compiler {
    void *library;
    int32_t version; /* 12080; 0: none */
#define MEMBER(type, name, parameters) type(*name) parameters;
    NORMFUSE_NVRTC_LIST(MEMBER)
#undef MEMBER
    char path[PATH_BYTES];
};

/* Why the last kernel is not in the cache; NULL: it is, or there was none. */
static _Atomic(const char *) not_stored;

enum { MAX_GIVEN = 8 };

static struct compiler found;       /* opened for good. Under the mutex, as what follows */
static char *given[MAX_GIVEN]; /* normfuse_use_compiler */
static int given_count;

struct search {
    int32_t driver;
    struct compiler compiler; /* where it has a version */
    bool says;                /* why not, of the first one that was there */
    char problem[240];
};

__attribute__((format(printf, 2, 3))) static void reject(struct search *search, const char *format, ...)
{
    va_list arguments;
    if (search->says)
        return;
    va_start(arguments, format);
    vsnprintf(search->problem, sizeof search->problem, format, arguments);
    va_end(arguments);
    search->says = true;
}

/* True if this is one to compile with. `flags`: of dlopen. `insists`: that it is missing is worth saying. */
static bool try_compiler(struct search *search, const char *path, int flags, bool insists)
{
    struct compiler compiler = {.library = dlopen(path, RTLD_NOW | RTLD_LOCAL | flags)};
    if (compiler.library == NULL) {
        if (insists)
            reject(search, "%s", dlerror());
        return false;
    }
    const char *missing = NULL;
    /* ISO C has no cast from an object's to a function's address. */
#define FIND(type, name, parameters)                                                                                   \
    {                                                                                                                  \
        void *const address = dlsym(compiler.library, #name);                                                          \
        memcpy(&compiler.name, &address, sizeof address);                                                              \
        missing = address == NULL && missing == NULL ? #name : missing;                                                \
    }
    NORMFUSE_NVRTC_LIST(FIND)
#undef FIND
    int major = 0, minor = 0;
    Dl_info place;
    void *address;
    memcpy(&address, &compiler.nvrtcVersion, sizeof address);
    snprintf(compiler.path, sizeof compiler.path, "%s",
             address != NULL && dladdr(address, &place) != 0 && place.dli_fname != NULL ? place.dli_fname : path);
    if (compiler.nvrtcVersion != NULL && compiler.nvrtcVersion(&major, &minor) == NVRTC_SUCCESS)
        compiler.version = 1000 * major + 10 * minor;
    if (compiler.version == 0 || (compiler.version >= OLDEST && missing != NULL))
        reject(search, "%s has no function %s", compiler.path, missing != NULL ? missing : "that says its version");
    else if (compiler.version < OLDEST)
        reject(search, "%s is NVRTC %d.%d, which is older than 12.8", compiler.path, major, minor);
    else if (search->driver > 0 && major > search->driver / 1000)
        reject(search, "%s is NVRTC %d.%d, and the driver is of CUDA %d.%d", compiler.path, major, minor,
               (int)search->driver / 1000, (int)search->driver % 1000 / 10);
    else {
        search->compiler = compiler;
        return true;
    }
    dlclose(compiler.library);
    return false;
}

struct loaded_paths {
    int count;
    char paths[4][PATH_BYTES];
};

static int note_loaded(struct dl_phdr_info *info, size_t bytes, void *context)
{
    static const char name[] = "libnvrtc", builtins[] = "libnvrtc-builtins";
    struct loaded_paths *const loaded = context;
    const char *const slash = strrchr(info->dlpi_name, '/'), *const file = slash != NULL ? slash + 1 : info->dlpi_name;
    (void)bytes;
    if (strncmp(file, name, sizeof name - 1) == 0 && strncmp(file, builtins, sizeof builtins - 1) != 0 &&
        loaded->count < (int)(sizeof loaded->paths / sizeof *loaded->paths) && strlen(info->dlpi_name) < PATH_BYTES)
        strcpy(loaded->paths[loaded->count++], info->dlpi_name);
    return 0;
}

/* The newest that the driver may take goes first. */
static bool try_versions(struct search *search, const char *folder)
{
    char path[PATH_BYTES];
    for (int32_t major = 13; major >= OLDEST / 1000; major--)
        if ((search->driver == 0 || major <= search->driver / 1000) &&
            snprintf(path, sizeof path, "%slibnvrtc.so.%d", folder, (int)major) < (int)sizeof path &&
            try_compiler(search, path, 0, false))
            return true;
    return false;
}

static bool try_toolkit(struct search *search, const char *home)
{
    static const char *const parts[] = {"lib64", "lib"};
    char folder[PATH_BYTES];
    for (size_t i = 0; home != NULL && home[0] != '\0' && i < sizeof parts / sizeof *parts; i++)
        if (snprintf(folder, sizeof folder, "%s/%s/", home, parts[i]) < (int)sizeof folder &&
            try_versions(search, folder))
            return true;
    return false;
}

/* Under the mutex. What was found once is kept: kernels of a process are of one compiler. */
static bool find_compiler(struct search *search)
{
    if (found.version != 0 && (search->driver == 0 || found.version / 1000 <= search->driver / 1000)) {
        search->compiler = found;
        return true;
    }
    const char *const named = secure_getenv("NORMFUSE_NVRTC");
    bool has_found = false;
    if (named != NULL) { /* that one or none */
        if (named[0] == '\0')
            reject(search, "NORMFUSE_NVRTC is empty");
        has_found = named[0] != '\0' && try_compiler(search, named, 0, true);
    } else {
        struct loaded_paths *const loaded = calloc(1, sizeof *loaded);
        if (loaded != NULL)
            dl_iterate_phdr(note_loaded, loaded);
        for (int i = 0; loaded != NULL && i < loaded->count && !has_found; i++)
            has_found = try_compiler(search, loaded->paths[i], RTLD_NOLOAD, false);
        free(loaded);
        for (int i = 0; i < given_count && !has_found; i++)
            has_found = try_compiler(search, given[i], 0, true);
        has_found = has_found || try_toolkit(search, secure_getenv("CUDA_HOME")) ||
                    try_toolkit(search, secure_getenv("CUDA_PATH")) || try_toolkit(search, "/usr/local/cuda") ||
                    try_versions(search, "");
    }
    if (has_found)
        found = search->compiler;
    else if (!search->says)
        reject(search, "NVRTC was not found");
    return has_found;
}

/* In the words of a status. */
static bool get_compiler(struct search *search)
{
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    pthread_mutex_lock(&mutex);
    const bool has_found = find_compiler(search);
    pthread_mutex_unlock(&mutex);
    pthread_setcancelstate(state, NULL);
    return has_found;
}

normfuse_status normfuse_cuda_use_compiler(const char *call, const char *path)
{
    normfuse_status status = NORMFUSE_OK;
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    pthread_mutex_lock(&mutex);
    int i = 0;
    while (i < given_count && strcmp(given[i], path) != 0)
        i++;
    if (i == MAX_GIVEN)
        status = normfuse_refuse(NORMFUSE_BAD_ARGUMENT, "%s: %d paths were given before, which is the most", call,
                                 (int)MAX_GIVEN);
    else if (i == given_count && (given[given_count] = strdup(path)) != NULL)
        given_count++;
    else if (i == given_count)
        status = normfuse_refuse(NORMFUSE_OUT_OF_MEMORY, "%s: no memory for a path", call);
    pthread_mutex_unlock(&mutex);
    pthread_setcancelstate(state, NULL);
    return status;
}

void normfuse_cuda_describe_compiler(int32_t driver, normfuse_compiler_information *info)
{
    static _Thread_local char compiler[PATH_BYTES + 64], cache[NORMFUSE_CACHE_PATH_BYTES];
    struct search search = {.driver = driver};
    info->version = 0;
    if (get_compiler(&search)) {
        info->version = search.compiler.version;
        snprintf(compiler, sizeof compiler, "NVRTC %d.%d, %s", (int)info->version / 1000,
                 (int)info->version % 1000 / 10, search.compiler.path);
    } else {
        snprintf(compiler, sizeof compiler, "none: %s", search.problem);
    }
    const bool has_cache = normfuse_cuda_cache_path(cache);
    const char *problem = normfuse_cuda_cache_count(&info->cache_kernels, &info->cache_bytes);
    if (problem == NULL)
        problem = atomic_load(&not_stored);
    info->compiler = compiler;
    info->cache = cache;
    info->cache_problem = !has_cache ? "there is none" : problem != NULL ? problem : "";
}

void normfuse_cuda_forget_compiler(void)
{
    if (found.library != NULL)
        dlclose(found.library);
    found = (struct compiler){.version = 0};
    while (given_count > 0)
        free(given[--given_count]);
}

void normfuse_cuda_compiler_after_fork(void)
{
    pthread_mutex_init(&mutex, NULL);
}

/* ---- compilation ------------------------------------------------------------------------------------------------ */

/* Tells in words, if it is a failure, what it is. */
__attribute__((format(printf, 4, 5))) static void conclude(struct normfuse_cuda_compilation *compilation,
                                                           normfuse_status status, bool is_final, const char *format,
                                                           ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(compilation->problem, sizeof compilation->problem, format, arguments);
    va_end(arguments);
    compilation->status = status;
    compilation->is_final = is_final;
}

/* The line of the log that says what is wrong, else its first one. It ends with the log. */
static const char *first_error(char *log)
{
    char *const error = strstr(log, "error");
    char *line = error != NULL ? error : log;
    while (line > log && line[-1] != '\n')
        line--;
    line[strcspn(line, "\n")] = '\0';
    return line;
}

/* "ptxas info    : Used 40 registers"; "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" */
static void read_resources(const char *log, struct normfuse_cuda_code *code)
{
    const char *const used = strstr(log, "Used "), *stack = strstr(log, " bytes stack frame");
    code->registers = code->stack = -1;
    if (used != NULL)
        code->registers = (int32_t)strtol(used + strlen("Used "), NULL, 10);
    while (stack != NULL && stack > log && stack[-1] >= '0' && stack[-1] <= '9')
        stack--;
    if (stack != NULL)
        code->stack = (int32_t)strtol(stack, NULL, 10);
}

static bool write_text(const char *path, const char *text)
{
    FILE *const file = fopen(path, "we");
    if (file == NULL)
        return false;
    fputs(text, file);
    fclose(file);
    return true;
}

/* The folder that NORMFUSE_VERBOSE=compile keeps sources in, one of the process; NULL: there is none. */
static const char *kept_folder(void)
{
    static char folder[PATH_BYTES];
    pthread_mutex_lock(&mutex);
    if (folder[0] == '\0') {
        const char *const temporary = secure_getenv("TMPDIR");
        const int length = snprintf(folder, sizeof folder, "%s/normfuse-XXXXXX",
                                    temporary != NULL && temporary[0] != '\0' ? temporary : "/tmp");
        if (length >= (int)sizeof folder || mkdtemp(folder) == NULL)
            folder[0] = '\0';
        for (const struct normfuse_cuda_text *text = normfuse_cuda_texts; folder[0] != '\0' && text->name != NULL;
             text++) {
            char path[PATH_BYTES + 64];
            snprintf(path, sizeof path, "%s/%s", folder, text->name);
            (void)write_text(path, text->text);
        }
    }
    pthread_mutex_unlock(&mutex);
    return folder[0] != '\0' ? folder : NULL;
}

/* The place where the source is to be read; "" if it could not be kept. */
static void keep_source(const struct source *source, const struct normfuse_cuda_key *key, char *path, size_t bytes)
{
    const char *const folder = kept_folder();
    if (folder == NULL || snprintf(path, bytes, "%s/%s-%02x%02x%02x%02x.cu", folder, source->name, key->digest[0],
                                   key->digest[1], key->digest[2], key->digest[3]) >= (int)bytes ||
        !write_text(path, source->text))
        path[0] = '\0';
}

/* To be freed; NULL: none. */
static char *get_log(const struct compiler *compiler, nvrtcProgram program)
{
    size_t bytes = 0;
    if (compiler->nvrtcGetProgramLogSize(program, &bytes) != NVRTC_SUCCESS || bytes == 0 || bytes > MAX_LOG_BYTES)
        return NULL;
    char *const log = calloc(bytes + 1, 1);
    if (log != NULL && compiler->nvrtcGetProgramLog(program, log) != NVRTC_SUCCESS)
        log[0] = '\0';
    return log;
}

static void get_code(const struct compiler *compiler, nvrtcProgram program, struct normfuse_cuda_compilation *to)
{
    static const unsigned char magic[] = {0x7f, 'E', 'L', 'F'};
    size_t bytes = 0;
    const int result = compiler->nvrtcGetCUBINSize(program, &bytes);
    if (result != NVRTC_SUCCESS || bytes <= sizeof magic || bytes > MAX_CODE_BYTES) {
        conclude(to, NORMFUSE_NO_COMPILER, false, "%s gives no machine code: %s", compiler->path,
                 compiler->nvrtcGetErrorString(result));
        return;
    }
    to->code.bytes = malloc(bytes);
    to->code.count = bytes;
    if (to->code.bytes == NULL) {
        conclude(to, NORMFUSE_OUT_OF_MEMORY, false, "no memory for %zu bytes of machine code", bytes);
    } else if (compiler->nvrtcGetCUBIN(program, (char *)to->code.bytes) != NVRTC_SUCCESS ||
               memcmp(to->code.bytes, magic, sizeof magic) != 0) {
        free(to->code.bytes);
        to->code.bytes = NULL;
        conclude(to, NORMFUSE_NO_COMPILER, false, "%s gives no machine code", compiler->path);
    }
}

static void run_compiler(const struct compiler *compiler, const struct source *source,
                         struct normfuse_cuda_compilation *to, char **log)
{
    enum { MAX_FILES = 64 };
    const char *texts[MAX_FILES], *names[MAX_FILES], *options[OPTIONS];
    char architecture[ARCHITECTURE_BYTES], file[NORMFUSE_KERNEL_NAME_BYTES + 8];
    int files = 0;
    nvrtcProgram program = NULL;
    for (const struct normfuse_cuda_text *text = normfuse_cuda_texts; text->name != NULL && files < MAX_FILES; text++) {
        texts[files] = text->text;
        names[files++] = text->name;
    }
    write_options(to->capability, architecture, options);
    snprintf(file, sizeof file, "%s.cu", source->name);
    int result = compiler->nvrtcCreateProgram(&program, source->text, file, files, texts, names);
    if (result == NVRTC_SUCCESS) {
        result = compiler->nvrtcCompileProgram(program, OPTIONS, options);
        *log = get_log(compiler, program);
    }
    to->code = (struct normfuse_cuda_code){.compiler = compiler->version};
    if (result == NVRTC_SUCCESS) {
        get_code(compiler, program, to);
        read_resources(*log != NULL ? *log : "", &to->code);
    } else if (result == NVRTC_ERROR_COMPILATION) {
        /* A defect of this library, or a GPU for which a kernel was not meant. */
        char *const copy = *log != NULL ? strdup(*log) : NULL;
        conclude(to, NORMFUSE_NO_KERNEL, true, "%s does not compile for sm_%d: %s", source->name, (int)to->capability,
                 copy != NULL ? first_error(copy) : "no log");
        free(copy);
    } else if (result == NVRTC_ERROR_OUT_OF_MEMORY) {
        conclude(to, NORMFUSE_OUT_OF_MEMORY, false, "no memory to compile %s", source->name);
    } else if (result == NVRTC_ERROR_INVALID_OPTION) {
        conclude(to, NORMFUSE_NO_COMPILER, false,
                 "NVRTC %d.%d, %s, does not compile for GPUs of compute capability %d.%d: a newer one is needed",
                 (int)compiler->version / 1000, (int)compiler->version % 1000 / 10, compiler->path,
                 (int)to->capability / 10, (int)to->capability % 10);
    } else {
        conclude(to, NORMFUSE_NO_COMPILER, false, "%s fails: %s", compiler->path,
                 compiler->nvrtcGetErrorString(result));
    }
    if (program != NULL)
        (void)compiler->nvrtcDestroyProgram(&program);
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

bool normfuse_cuda_find_compiled(struct normfuse_cuda_compilation *compilation)
{
    struct normfuse_cuda_key key;
    struct source source;
    write_source(compilation, &source);
    make_key(&source, compilation->capability, &key);
    if (!normfuse_cuda_cache_read(&key, &compilation->code))
        return false;
    compilation->status = NORMFUSE_OK;
    compilation->is_cached = true;
    if (normfuse_cuda_verbose(NORMFUSE_VERBOSE_COMPILE))
        fprintf(stderr, "normfuse: compile: %s for sm_%d: from the cache, made by NVRTC %d.%d\n",
                source.name, (int)compilation->capability,
                (int)compilation->code.compiler / 1000, (int)compilation->code.compiler % 1000 / 10);
    return true;
}

void normfuse_cuda_compile(struct normfuse_cuda_compilation *compilation)
{
    struct search search = {.driver = compilation->driver};
    struct source source;
    char path[PATH_BYTES];
    struct normfuse_cuda_key key;
    char *log = NULL;
    compilation->is_cached = false;
    if (compilation->capability < OLDEST_CAPABILITY) {
        conclude(compilation, NORMFUSE_NO_KERNEL, true,
                 "GPUs of compute capability %d.%d are older than 8.0, the first that kernels are made for",
                 (int)compilation->capability / 10, (int)compilation->capability % 10);
        return;
    }
    if (!get_compiler(&search)) {
        const int major = compilation->driver > 0 && compilation->driver < 13000 ? 12 : 13;
        conclude(
            compilation, NORMFUSE_NO_COMPILER, false,
            "kernels are compiled at run time, and NVRTC, the compiler, is missing: %s. Install it with pip install "
            "nvidia-cuda-nvrtc%s, or with the CUDA toolkit",
            search.problem, major == 12 ? "-cu12" : "");
        return;
    }
    compilation->status = NORMFUSE_OK;
    compilation->problem[0] = '\0';
    write_source(compilation, &source);
    make_key(&source, compilation->capability, &key);
    const double begin = seconds();
    run_compiler(&search.compiler, &source, compilation, &log);
    const double taken = seconds() - begin;
    const char *problem = NULL;
    if (compilation->status == NORMFUSE_OK) {
        problem = normfuse_cuda_cache_write(&key, &compilation->code);
        atomic_store(&not_stored, problem);
    }
    if (normfuse_cuda_verbose(NORMFUSE_VERBOSE_COMPILE)) {
        keep_source(&source, &key, path, sizeof path);
        fprintf(stderr, "normfuse: compile: %s for sm_%d: %s in %.0f ms by NVRTC %d.%d, %s\n", source.name,
                (int)compilation->capability, compilation->status == NORMFUSE_OK ? "compiled" : compilation->problem,
                taken * 1e3, (int)search.compiler.version / 1000, (int)search.compiler.version % 1000 / 10,
                search.compiler.path);
        fprintf(stderr, "normfuse: compile: %s: %d registers, %d bytes of stack; source %s%s%s\n", source.name,
                (int)compilation->code.registers, (int)compilation->code.stack,
                path[0] != '\0' ? path : "not kept", problem != NULL ? "; not in the cache: it " : "",
                problem != NULL ? problem : "");
        if (log != NULL && log[0] != '\0')
            fprintf(stderr, "%s%s", log, log[strlen(log) - 1] == '\n' ? "" : "\n");
    }
    free(log);
}
