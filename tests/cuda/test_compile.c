/* SPDX-License-Identifier: MIT
 *
 * test_compile.c - kernels that are compiled at run time, on a driver without a GPU (fake_driver.h) and a compiler that
 * compiles nothing (fake_nvrtc.c): what goes wrong with a compiler and with the folder of the cache, and threads and
 * processes that want the same kernel. `test_compile --nvrtc PATH`: compiles with a real NVRTC. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda/compile.h"
#include "cuda/loader.h"
#include "cuda/specialize.h"
#include "fake_driver.h"
#include "harness.h"
#include "normfuse.h"

enum { PATH_BYTES = 512, MAX_FILES = 64 };

static const struct normfuse_cuda_text stand_ins[] = {
    {"single.cuh", "#pragma once\n"
                   "#include \"scale.cuh\"\n"
                   "extern \"C\" __global__ void __launch_bounds__(256) NORMFUSE_KERNEL(const float *x, float *y, int n)\n"
                   "{\n"
                   "    const int i = blockIdx.x * 256 + threadIdx.x;\n"
                   "    if (i < n)\n"
                   "        y[i] = scaled(x[i]) + signature::type;\n"
                   "}\n"},
    {"scale.cuh", "#pragma once\n"
                  "float scaled(float value)\n"
                  "{\n"
                  "    return value * (2 + signature::activation);\n"
                  "}\n"},
    {NULL, NULL}};

/* ---- what may be refused ---------------------------------------------------------------------------------------- */

/* The linker puts these in the place of libc's (--wrap): the refused_at-th call fails. */
static _Atomic(int) asked, refused_at;

static bool is_refused(int error)
{
    if (atomic_load(&refused_at) == 0 || atomic_fetch_add(&asked, 1) + 1 != atomic_load(&refused_at))
        return false;
    errno = error;
    return true;
}

#define WRAPPED(LIST)                                                                                                  \
    LIST(void *, malloc, (size_t bytes), (bytes), NULL, ENOMEM)                                                        \
    LIST(void *, calloc, (size_t count, size_t bytes), (count, bytes), NULL, ENOMEM)                                   \
    LIST(void *, realloc, (void *block, size_t bytes), (block, bytes), NULL, ENOMEM)                                   \
    LIST(char *, strdup, (const char *text), (text), NULL, ENOMEM)                                                     \
    LIST(void *, dlopen, (const char *path, int flags), (path, flags), NULL, ENOENT)                                   \
    LIST(int, pthread_create,                                                                                          \
         (pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument),                \
         (thread, attributes, start, argument), EAGAIN, EAGAIN)                                                        \
    LIST(int, open, (const char *path, int flags, mode_t mode), (path, flags, mode), -1, EMFILE)                       \
    LIST(int, openat, (int folder, const char *path, int flags, mode_t mode), (folder, path, flags, mode), -1, EMFILE) \
    LIST(ssize_t, read, (int file, void *to, size_t bytes), (file, to, bytes), -1, EIO)                                \
    LIST(ssize_t, write, (int file, const void *from, size_t bytes), (file, from, bytes), -1, ENOSPC)                  \
    LIST(int, fsync, (int file), (file), -1, EIO)                                                                      \
    LIST(int, renameat, (int from, const char *old, int to, const char *name), (from, old, to, name), -1, EACCES)      \
    LIST(DIR *, fdopendir, (int file), (file), NULL, ENOMEM)
#define WRAP(type, name, parameters, arguments, failure, error)                                                        \
    type __real_##name parameters;                                                                                     \
    type __wrap_##name parameters;                                                                                     \
    type __wrap_##name parameters                                                                                      \
    {                                                                                                                  \
        return is_refused(error) ? failure : __real_##name arguments;                                                  \
    }
WRAPPED(WRAP)
#undef WRAP

/* ---- a run ------------------------------------------------------------------------------------------------------ */

static char folder[PATH_BYTES]; /* of this run: caches, logs */

static struct normfuse_cuda_signature signature_of(int32_t activation)
{
    struct normfuse_cuda_signature signature;
    memset(&signature, 0, sizeof signature);
    signature.body = NORMFUSE_BODY_single;
    signature.type = NORMFUSE_F32;
    signature.activation = activation;
    return signature;
}

static char *path_of(const char *name)
{
    static _Thread_local char paths[4][PATH_BYTES + 300];
    static _Thread_local int next;
    char *const path = paths[next++ % 4];
    snprintf(path, sizeof *paths, "%s/%s", folder, name);
    return path;
}

static void remove_all(const char *path)
{
    char command[PATH_BYTES + 350];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    CHECK(system(command) == 0, "%s", command);
}

static int compilations(void)
{
    struct stat status;
    return stat(path_of("log"), &status) == 0 ? (int)status.st_size : 0;
}

static void fake_compiler(const char *words)
{
    setenv("FAKE_NVRTC", words, 1);
}

/* Everything as at the start of a process, but for the cache. */
static void restart(void)
{
    fake_driver_reset();
    fake_driver_use();
    normfuse_cuda_forget_compiler();
    fake_compiler("");
}

/* The same, with an empty cache, and no compilation counted. */
static void begin(void)
{
    remove_all(path_of("cache"));
    remove(path_of("log"));
    setenv("NORMFUSE_CACHE_DIR", path_of("cache"), 1);
    setenv("NORMFUSE_NVRTC", NORMFUSE_FAKE_NVRTC, 1);
    restart();
}

static const struct normfuse_cuda_device *device_of(int32_t ordinal)
{
    const struct normfuse_cuda_device *device = NULL;
    CHECK(normfuse_cuda_device("test", ordinal, &device) == NORMFUSE_OK, "%s", normfuse_last_error());
    return device;
}

static normfuse_status specialize(int32_t activation)
{
    const struct normfuse_cuda_signature signature = signature_of(activation);
    CUkernel kernel = NULL;
    const normfuse_status status = normfuse_cuda_specialized("test", device_of(0), &signature, NULL, &kernel);
    CHECK((status == NORMFUSE_OK) == (kernel != NULL), "status %d, kernel %p", (int)status, (void *)kernel);
    return status;
}

/* The kernel is there, after so many compilations since begin(). */
#define WORKS(activation, compiled) works(__LINE__, activation, compiled)
static void works(int line, int32_t activation, int compiled)
{
    const normfuse_status status = specialize(activation);
    CHECK(status == NORMFUSE_OK, "line %d: %d %s", line, (int)status, normfuse_last_error());
    CHECK(compilations() == compiled, "line %d: %d compilations, not %d", line, compilations(), compiled);
}

#define REFUSED(wanted, status, ...) refused(__LINE__, wanted, status, (const char *[]){__VA_ARGS__, NULL})
static void refused(int line, normfuse_status wanted, normfuse_status status, const char *const *words)
{
    CHECK(status == wanted, "line %d: status %d, not %d: %s", line, (int)status, (int)wanted, normfuse_last_error());
    for (; *words != NULL; words++)
        CHECK(strstr(normfuse_last_error(), *words) != NULL, "line %d: '%s' is not in: %s", line, *words,
              normfuse_last_error());
}

/* Files of the cache whose names end so; the first one's path. */
static int files_of(const char *ending, char *first)
{
    DIR *const open = opendir(path_of("cache"));
    int count = 0;
    for (const struct dirent *entry = NULL; open != NULL && (entry = readdir(open)) != NULL;) {
        const size_t length = strlen(entry->d_name), of_ending = strlen(ending);
        if (length < of_ending || strcmp(entry->d_name + length - of_ending, ending) != 0)
            continue;
        if (count++ == 0 && first != NULL)
            snprintf(first, PATH_BYTES + 300, "%s/%s", path_of("cache"), entry->d_name);
    }
    if (open != NULL)
        closedir(open);
    return count;
}

/* Runs `work` in a child; its exit status, or minus the signal that ended it. */
static int in_child(int (*work)(void))
{
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0)
        _exit(work());
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

/* ---- the hash, and what is compiled ----------------------------------------------------------------------------- */

/* FIPS 180-4's examples. */
static void test_hash(void)
{
    static const struct {
        const char *text;
        int repeats;
        const char *digest;
    } examples[] = {
        {"", 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", 1, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 1,
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {"aaaaaaaaaa", 100000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"}};
    for (size_t i = 0; i < sizeof examples / sizeof *examples; i++) {
        struct normfuse_hash hash;
        unsigned char digest[NORMFUSE_DIGEST_BYTES];
        char text[2 * NORMFUSE_DIGEST_BYTES + 1];
        normfuse_hash_begin(&hash);
        for (int k = 0; k < examples[i].repeats; k++)
            normfuse_hash_add(&hash, examples[i].text, strlen(examples[i].text));
        normfuse_hash_end(&hash, digest);
        for (int k = 0; k < NORMFUSE_DIGEST_BYTES; k++)
            snprintf(text + 2 * k, 3, "%02x", digest[k]);
        CHECK(strcmp(text, examples[i].digest) == 0, "example %zu: %s", i, text);
    }
}

static void test_text(void)
{
    begin();
    struct normfuse_cuda_compilation compilation = {
        .signature = signature_of(3), .capability = 90, .driver = 13000};
    normfuse_cuda_compile(&compilation);
    CHECK(compilation.status == NORMFUSE_OK, "%s", compilation.problem);
    static const char *const wanted[] = {"normfuse_single_forward_f32.cu\n",
                                         "namespace signature {\nenum : int {\n    body = 0,\n",
                                         "    type = 1,\n",
                                         "    activation = 3,\n",
                                         "#define NORMFUSE_KERNEL normfuse_single_forward_f32\n",
                                         "#include \"single.cuh\"\n",
                                         "scale.cuh:\n#pragma once\n",
                                         "option --gpu-architecture=sm_90a\n",
                                         "option -fmad=false\n"};
    for (size_t i = 0; compilation.status == NORMFUSE_OK && i < sizeof wanted / sizeof *wanted; i++)
        CHECK(strstr((const char *)compilation.code.bytes, wanted[i]) != NULL, "no '%s' in %s", wanted[i],
              (const char *)compilation.code.bytes);
    CHECK(compilation.code.registers == 42 && compilation.code.stack == 8 && compilation.code.compiler == 13000,
          "%d registers, %d of stack, NVRTC %d", (int)compilation.code.registers, (int)compilation.code.stack,
          (int)compilation.code.compiler);
    free(compilation.code.bytes);
    /* The cache keeps what the log said. */
    struct normfuse_cuda_compilation again = {.signature = signature_of(3), .capability = 90, .driver = 13000};
    if (CHECK(normfuse_cuda_find_compiled(&again), "not in the cache")) {
        CHECK(again.code.registers == 42 && again.code.stack == 8 && again.code.compiler == 13000 &&
                  again.code.count == compilation.code.count,
              "the cache has %d, %d, %d", (int)again.code.registers, (int)again.code.stack, (int)again.code.compiler);
        free(again.code.bytes);
    }
    /* Whatever else it was asked for, it was not this. */
    struct normfuse_cuda_compilation other = {.signature = signature_of(3), .capability = 80, .driver = 13000};
    CHECK(!normfuse_cuda_find_compiled(&other), "code for another GPU");
    other.capability = 90;
    other.signature.backward = 1;
    CHECK(!normfuse_cuda_find_compiled(&other), "code of another signature");
    static const struct normfuse_cuda_text others[] = {{"single.cuh", "another"}, {NULL, NULL}};
    other = (struct normfuse_cuda_compilation){.signature = signature_of(3), .capability = 90, .driver = 13000};
    normfuse_cuda_texts = others;
    CHECK(!normfuse_cuda_find_compiled(&other), "code of another text");
    normfuse_cuda_texts = stand_ins;
    /* A text of the caller's own. */
    struct normfuse_cuda_compilation own = {
        .text = "__global__ void own();\n", .name = "own", .capability = 90, .driver = 13000};
    CHECK(!normfuse_cuda_find_compiled(&own), "code of another text");
    normfuse_cuda_compile(&own);
    if (CHECK(own.status == NORMFUSE_OK, "%s", own.problem)) {
        CHECK(strstr((const char *)own.code.bytes, "ELF own.cu\n__global__ void own();\n") != NULL, "it is %s",
              (const char *)own.code.bytes);
        free(own.code.bytes);
    }
    CHECK(normfuse_cuda_find_compiled(&own), "not in the cache");
    free(own.code.bytes);
    other.capability = 75;
    normfuse_cuda_compile(&other);
    CHECK(other.status == NORMFUSE_NO_KERNEL && other.is_final && strstr(other.problem, "7.5") != NULL, "%d %s",
          (int)other.status, other.problem);
}

/* ---- a compiler that fails -------------------------------------------------------------------------------------- */

static void test_compiler_failures(void)
{
    static const struct {
        const char *words;
        normfuse_status status; /* OK: it does without */
        const char *says;
        bool is_remembered;
    } cases[] = {
        {"fail=nvrtcVersion:11", NORMFUSE_NO_COMPILER, "version", false},
        {"fail=nvrtcCreateProgram:1", NORMFUSE_OUT_OF_MEMORY, "memory", false},
        {"fail=nvrtcCreateProgram:2", NORMFUSE_NO_COMPILER, "FAKE_ERROR_2", false},
        {"fail=nvrtcCompileProgram:1", NORMFUSE_OUT_OF_MEMORY, "memory", false},
        {"fail=nvrtcCompileProgram:5", NORMFUSE_NO_COMPILER, "compute capability 9.0", false},
        {"fail=nvrtcCompileProgram:6", NORMFUSE_NO_KERNEL, "single.cuh(8): error: identifier \"lane\" is undefined",
         true},
        {"fail=nvrtcCompileProgram:7", NORMFUSE_NO_COMPILER, "FAKE_ERROR_7", false},
        {"fail=nvrtcGetCUBINSize:11", NORMFUSE_NO_COMPILER, "FAKE_ERROR_11", false},
        {"fail=nvrtcGetCUBIN:11", NORMFUSE_NO_COMPILER, "machine code", false},
        {"fail=nvrtcGetProgramLogSize:11", NORMFUSE_OK, "", false},
        {"fail=nvrtcGetProgramLog:11", NORMFUSE_OK, "", false},
        {"fail=nvrtcDestroyProgram:11", NORMFUSE_OK, "", false},
        {"fail=nvrtcCompileProgram:6 fail=nvrtcGetProgramLogSize:11", NORMFUSE_NO_KERNEL, "no log", true},
        {"rubbish=empty", NORMFUSE_NO_COMPILER, "machine code", false},
        {"rubbish=huge", NORMFUSE_NO_COMPILER, "machine code", false},
        {"rubbish=text", NORMFUSE_NO_COMPILER, "machine code", false},
        {"version=12.7", NORMFUSE_NO_COMPILER, "NVRTC 12.7, which is older than 12.8", false},
        {"version=14.0", NORMFUSE_NO_COMPILER, "NVRTC 14.0, and the driver is of CUDA 13.", false},
        {"version=12.8", NORMFUSE_OK, "", false},
        {"version=13.9", NORMFUSE_OK, "", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin();
        fake_compiler(cases[i].words);
        errno = 77;
        const normfuse_status status = specialize(0);
        CHECK(status == cases[i].status, "%s: status %d, not %d: %s", cases[i].words, (int)status,
              (int)cases[i].status, normfuse_last_error());
        if (status == NORMFUSE_OK)
            continue;
        CHECK(strncmp(normfuse_last_error(), "test: ", 6) == 0 && strstr(normfuse_last_error(), cases[i].says) != NULL,
              "%s: '%s' is not in: %s", cases[i].words, cases[i].says, normfuse_last_error());
        CHECK(files_of(".kernel", NULL) == 0, "%s: something is in the cache", cases[i].words);
        fake_compiler("");
        const int before = compilations();
        const normfuse_status later = specialize(0);
        CHECK(later == (cases[i].is_remembered ? cases[i].status : NORMFUSE_OK), "%s: later %d %s", cases[i].words,
              (int)later, normfuse_last_error());
        CHECK(compilations() == before + !cases[i].is_remembered, "%s: compiled %d times more", cases[i].words,
              compilations() - before);
        /* Another process tries again. */
        restart();
        CHECK(specialize(0) == NORMFUSE_OK, "%s: %s", cases[i].words, normfuse_last_error());
    }
    CHECK(fake_driver.libraries == 1, "%d libraries are loaded", fake_driver.libraries);
}

static void test_missing_compiler(void)
{
    begin();
    setenv("NORMFUSE_NVRTC", "/none/libnvrtc.so.13", 1);
    REFUSED(NORMFUSE_NO_COMPILER, specialize(0), "test: ", "/none/libnvrtc.so.13", "pip install nvidia-cuda-nvrtc,");
    setenv("NORMFUSE_NVRTC", "", 1);
    REFUSED(NORMFUSE_NO_COMPILER, specialize(0), "NORMFUSE_NVRTC is empty");
    fake_driver.version = 12080;
    setenv("NORMFUSE_NVRTC", NORMFUSE_FAKE_NVRTC, 1);
    fake_driver_use();
    REFUSED(NORMFUSE_NO_COMPILER, specialize(0), "driver is of CUDA 12.8", "nvidia-cuda-nvrtc-cu12");
    /* A library that is none. */
    restart();
    setenv("NORMFUSE_NVRTC", "libm.so.6", 1);
    REFUSED(NORMFUSE_NO_COMPILER, specialize(0), "libm.so.6 has no function");
    /* It is installed later. */
    setenv("NORMFUSE_NVRTC", NORMFUSE_FAKE_NVRTC, 1);
    WORKS(0, 1);
    /* A kernel in the cache needs none. */
    restart();
    setenv("NORMFUSE_NVRTC", "", 1);
    WORKS(0, 1);
    REFUSED(NORMFUSE_NO_COMPILER, specialize(1), "NORMFUSE_NVRTC is empty");
}

static void copy_file(const char *from, const char *to)
{
    char command[3 * PATH_BYTES + 700];
    snprintf(command, sizeof command, "mkdir -p \"$(dirname '%s')\" && cp -L '%s' '%s'", to, from, to);
    CHECK(system(command) == 0, "%s", command);
}

static bool compiler_is_in(const char *part)
{
    normfuse_compiler_information info = {.struct_bytes = sizeof info};
    normfuse_cuda_forget_compiler();
    normfuse_cuda_describe_compiler(13000, &info);
    return CHECK(strstr(info.compiler, path_of(part)) != NULL && info.version == 13000, "'%s' is not in: %s", part,
                 info.compiler);
}

/* In a child, in which no NVRTC is loaded yet. */
static int search_in_order(void)
{
    unsetenv("NORMFUSE_NVRTC");
    setenv("CUDA_HOME", path_of("home"), 1);
    setenv("CUDA_PATH", path_of("path"), 1);
    copy_file(NORMFUSE_FAKE_NVRTC, path_of("path/lib/libnvrtc.so.13"));
    compiler_is_in("path/lib/");
    copy_file(NORMFUSE_FAKE_NVRTC, path_of("path/lib64/libnvrtc.so.12"));
    compiler_is_in("path/lib64/");
    copy_file(NORMFUSE_FAKE_NVRTC, path_of("path/lib64/libnvrtc.so.13"));
    compiler_is_in("path/lib64/libnvrtc.so.13");
    copy_file(NORMFUSE_FAKE_NVRTC, path_of("home/lib64/libnvrtc.so.13"));
    compiler_is_in("home/lib64/");
    /* forget_compiler forgets them, too, so it is called before. */
    copy_file(NORMFUSE_FAKE_NVRTC, path_of("given/libnvrtc.so.13"));
    normfuse_compiler_information info = {.struct_bytes = sizeof info};
    normfuse_cuda_forget_compiler();
    CHECK(normfuse_use_compiler(path_of("none/libnvrtc.so.13")) == NORMFUSE_OK, "%s", normfuse_last_error());
    CHECK(normfuse_use_compiler(path_of("given/libnvrtc.so.13")) == NORMFUSE_OK, "%s", normfuse_last_error());
    normfuse_cuda_describe_compiler(13000, &info);
    CHECK(strncmp(info.compiler, "NVRTC 13.0, ", 12) == 0 && strstr(info.compiler, "/given/") != NULL, "%s",
          info.compiler);
    copy_file(NORMFUSE_FAKE_NVRTC, path_of("loaded/libnvrtc-1a2b.so.13.0"));
    void *const loaded = dlopen(path_of("loaded/libnvrtc-1a2b.so.13.0"), RTLD_NOW | RTLD_LOCAL);
    CHECK(loaded != NULL, "%s", dlerror());
    compiler_is_in("loaded/");
    copy_file(NORMFUSE_FAKE_NVRTC, path_of("named/libnvrtc.so.13"));
    setenv("NORMFUSE_NVRTC", path_of("named/libnvrtc.so.13"), 1);
    compiler_is_in("named/");
    printf("%d passed, %d failed in the child\n", harness_passed, harness_failed);
    fflush(stdout);
    return harness_failed != 0;
}

static void test_search(void)
{
    begin();
    CHECK(in_child(search_in_order) == 0, "the order of the search");
    for (int i = 0; i < 8; i++) {
        char path[32];
        snprintf(path, sizeof path, "/none/%d", i);
        CHECK(normfuse_use_compiler(path) == NORMFUSE_OK, "%s", normfuse_last_error());
    }
    CHECK(normfuse_use_compiler("/none/3") == NORMFUSE_OK, "%s", normfuse_last_error());
    REFUSED(NORMFUSE_BAD_ARGUMENT, normfuse_use_compiler("/none/8"), "normfuse_use_compiler: ", "8 paths");
    REFUSED(NORMFUSE_BAD_ARGUMENT, normfuse_use_compiler(NULL), "normfuse_use_compiler: path is NULL");
}

/* ---- kernels ---------------------------------------------------------------------------------------------------- */

static void test_kernels(void)
{
    begin();
    fake_driver.devices = 2;
    fake_driver.fixed_shared[0] = 1024;
    const struct normfuse_cuda_signature signature = signature_of(0), other = signature_of(1);
    const struct normfuse_cuda_device *const device = device_of(0);
    const struct normfuse_cuda_launch launch = {
        .signature = &signature, .grid = 12, .threads = 256, .cluster = 2, .shared = 100000, .arguments = &signature};
    CHECK(normfuse_cuda_launch("test", device, NULL, &launch) == NORMFUSE_OK, "%s", normfuse_last_error());
    CHECK(fake_driver.launches == 1 && strcmp(fake_driver.launch[0].name, "normfuse_single_forward_f32") == 0 &&
              fake_driver.launch[0].grid == 12 && fake_driver.launch[0].shared == 100000,
          "%d launches, of %s", fake_driver.launches, fake_driver.launch[0].name);
    const struct fake_device *const fake = &fake_driver.device[0];
    CHECK(fake->dynamic_shared[0] == fake->shared_per_block - 1024 &&
              fake->large_clusters[0] && fake->functions_loaded[0] == 1,
          "what the kernel may be given: %d bytes", fake->dynamic_shared[0]);
    CHECK(normfuse_cuda_launch("test", device, NULL, &launch) == NORMFUSE_OK, "%s", normfuse_last_error());
    CHECK(compilations() == 1 && fake_driver.libraries == 1, "%d compilations, %d loaded", compilations(),
          fake_driver.libraries);
    WORKS(1, 2);
    CHECK(normfuse_cuda_find_specialized(device, &other) != normfuse_cuda_find_specialized(device, &signature),
          "two signatures have one kernel");
    /* Another device's kernel is another one, of the same code. */
    CUkernel kernel;
    CHECK(normfuse_cuda_specialized("test", device_of(1), &signature, NULL, &kernel) == NORMFUSE_OK &&
              kernel != normfuse_cuda_find_specialized(device, &signature) && compilations() == 2,
          "%s", normfuse_last_error());
    /* A refused launch names the kernel. */
    fake_driver.launch_result = CUDA_ERROR_LAUNCH_FAILED;
    REFUSED(NORMFUSE_DEVICE_ERROR, normfuse_cuda_launch("test", device, NULL, &launch), "normfuse_single_forward_f32");
    /* normfuse_prepare loads them into another context. */
    fake_driver_set_context(fake_driver_context(0, 1));
    CHECK(normfuse_prepare(0) == NORMFUSE_OK && fake->functions_loaded[0] == 2, "%s, loaded %d times",
          normfuse_last_error(), fake->functions_loaded[0]);
}

/* Each of many signatures has its kernel. */
static void test_many(void)
{
    begin();
    enum { MANY = 200 };
    CUkernel kernels[MANY];
    for (int32_t i = 0; i < MANY; i++) {
        const struct normfuse_cuda_signature signature = signature_of(i);
        CHECK(normfuse_cuda_specialized("test", device_of(0), &signature, NULL, &kernels[i]) == NORMFUSE_OK, "%d: %s",
              (int)i, normfuse_last_error());
    }
    for (int32_t i = 0; i < MANY; i++) {
        const struct normfuse_cuda_signature signature = signature_of(i);
        CHECK(normfuse_cuda_find_specialized(device_of(0), &signature) == kernels[i], "kernel %d", (int)i);
    }
    CHECK(compilations() == MANY, "%d compilations", compilations());
}

static void test_capture_and_reset(void)
{
    begin();
    (void)device_of(0);
    fake_driver.capturing = true;
    WORKS(0, 1);
    fake_driver.capturing = false;
    CHECK(fake_driver.invalidations == 0, "a capture was made invalid");
    fake_driver.device[0].is_reset = true;
    WORKS(1, 2);
    CHECK(!fake_driver.device[0].is_reset && fake_driver.libraries == 2, "the device was reset: %d are loaded",
          fake_driver.libraries);
}

static void test_driver_failures(void)
{
    begin();
    (void)device_of(0);
    /* A kernel that was just compiled, it does not take. */
    fake_driver.code_result = CUDA_ERROR_NO_BINARY_FOR_GPU;
    fake_driver.code_failures = 1;
    REFUSED(NORMFUSE_NO_KERNEL, specialize(0), "normfuse_single_forward_f32", "NVRTC 13.0");
    /* Nor a kernel in the cache: it is compiled anew. */
    fake_driver.code_failures = 1;
    WORKS(0, 2);
    restart();
    (void)device_of(0);
    fake_driver.code_result = CUDA_ERROR_OUT_OF_MEMORY;
    fake_driver.code_failures = 1;
    REFUSED(NORMFUSE_OUT_OF_MEMORY, specialize(0), "memory");
    WORKS(0, 2);
    CHECK(fake_driver.libraries == 1, "%d libraries are loaded", fake_driver.libraries);
    /* A kernel that cannot be loaded leaves no library behind. */
    restart();
    (void)device_of(0);
    fake_driver.device[0].function_result = CUDA_ERROR_OUT_OF_MEMORY;
    REFUSED(NORMFUSE_OUT_OF_MEMORY, specialize(0), "memory");
    CHECK(fake_driver.libraries == 0 && fake_driver_depth() == 0, "%d libraries are loaded", fake_driver.libraries);
    fake_driver.device[0].function_result = CUDA_SUCCESS;
    WORKS(0, 2);
}

/* A call of which the at-th request is refused; whether there was such a one. */
static bool refuse_request(int at, const char *kind, normfuse_status *status)
{
    const struct normfuse_cuda_signature signature = signature_of(0);
    const struct normfuse_cuda_device *const device = device_of(0);
    CUkernel kernel;
    asked = 0;
    refused_at = at;
    *status = normfuse_cuda_specialized("test", device, &signature, NULL, &kernel);
    refused_at = 0;
    CHECK(*status == NORMFUSE_OK || *status == NORMFUSE_OUT_OF_MEMORY || *status == NORMFUSE_NO_COMPILER,
          "%s, request %d: %d %s", kind, at, (int)*status, normfuse_last_error());
    CHECK(files_of(".part", NULL) == 0, "%s, request %d: a temporary file is left", kind, at);
    CHECK(specialize(0) == NORMFUSE_OK, "%s, request %d, later: %s", kind, at, normfuse_last_error());
    return atomic_load(&asked) >= at;
}

/* Each thing that a first call asks the system for is refused in turn: it does without or says so, and the next call
 * works. */
static void test_refusals(void)
{
    normfuse_status status;
    int requests = 0, refused = 0;
    for (bool is_any = true; is_any && requests < 100;) {
        begin();
        is_any = refuse_request(requests + 1, "without a cache", &status);
        requests += is_any;
        refused += status != NORMFUSE_OK;
        restart();
        CHECK(specialize(0) == NORMFUSE_OK, "request %d, in another process: %s", requests, normfuse_last_error());
    }
    CHECK(requests >= 15 && requests < 100 && refused >= 4, "%d requests, of which %d ended a call", requests, refused);
    requests = refused = 0;
    for (bool is_any = true; is_any && requests < 100;) {
        begin();
        WORKS(0, 1);
        restart();
        is_any = refuse_request(requests + 1, "from the cache", &status);
        requests += is_any;
        refused += status != NORMFUSE_OK;
    }
    /* Without memory to note the kernel in, or what is to be done; all else is about the cache, which is left aside. */
    CHECK(requests >= 5 && requests < 100 && refused == 2, "%d requests, of which %d ended a call", requests, refused);
}

/* ---- the cache -------------------------------------------------------------------------------------------------- */

static void test_cache_paths(void)
{
    char path[NORMFUSE_CACHE_PATH_BYTES];
    begin();
    unsetenv("NORMFUSE_CACHE_DIR");
    setenv("XDG_CACHE_HOME", "/xdg", 1);
    setenv("HOME", "/home/me", 1);
    CHECK(normfuse_cuda_cache_path(path) && strcmp(path, "/xdg/normfuse") == 0, "%s", path);
    setenv("XDG_CACHE_HOME", "relative", 1);
    CHECK(normfuse_cuda_cache_path(path) && strcmp(path, "/home/me/.cache/normfuse") == 0, "%s", path);
    unsetenv("XDG_CACHE_HOME");
    CHECK(normfuse_cuda_cache_path(path) && strcmp(path, "/home/me/.cache/normfuse") == 0, "%s", path);
    unsetenv("HOME");
    CHECK(!normfuse_cuda_cache_path(path) && path[0] == '\0', "%s", path);
    WORKS(0, 1);
    restart();
    WORKS(0, 2);
    /* Folders that are missing are made. */
    setenv("HOME", path_of("cache"), 1);
    restart();
    WORKS(0, 3);
    restart();
    WORKS(0, 3);
    CHECK(access(path_of("cache/.cache/normfuse"), F_OK) == 0, "no folder");
    setenv("NORMFUSE_CACHE_DIR", "", 1);
    CHECK(!normfuse_cuda_cache_path(path), "%s", path);
    restart();
    WORKS(0, 4);
    /* A path too long is none. */
    char *const long_path = calloc(1, 2 * NORMFUSE_CACHE_PATH_BYTES);
    memset(long_path, 'a', 2 * NORMFUSE_CACHE_PATH_BYTES - 1);
    setenv("NORMFUSE_CACHE_DIR", long_path, 1);
    CHECK(!normfuse_cuda_cache_path(path), "%s", path);
    free(long_path);
    restart();
    WORKS(0, 5);
    /* A name behind a slash, and a folder whose name ends with one. */
    char slash[PATH_BYTES + 300];
    snprintf(slash, sizeof slash, "%s/deep/er/", path_of("cache"));
    setenv("NORMFUSE_CACHE_DIR", slash, 1);
    restart();
    WORKS(0, 6);
    restart();
    WORKS(0, 6);
}

/* A compilation, since the cache cannot be used, and again in another process. */
#define COMPILES_ALWAYS(what) compiles_always(__LINE__, what)
static void compiles_always(int line, const char *what)
{
    for (int i = 0; i < 2; i++) {
        const int before = compilations();
        restart();
        CHECK(specialize(0) == NORMFUSE_OK, "line %d: %s: %s", line, what, normfuse_last_error());
        CHECK(compilations() == before + 1, "line %d: %s: %d compilations", line, what, compilations() - before);
    }
}

static void test_bad_folders(void)
{
    const char *reason;
    int64_t kernels, bytes;
    begin();
    WORKS(0, 1); /* makes the folder */
    if (geteuid() == 0) {
        CHECK(chown(path_of("cache"), 1234, 0) == 0, "chown");
        COMPILES_ALWAYS("a folder of another user");
        reason = normfuse_cuda_cache_count(&kernels, &bytes);
        CHECK(reason != NULL && strcmp(reason, "belongs to another user") == 0, "%s", reason);
        CHECK(chown(path_of("cache"), 0, 0) == 0, "chown");
    } else {
        harness_skip("folders of another user: this needs root");
    }
    CHECK(chmod(path_of("cache"), 0777) == 0, "chmod");
    COMPILES_ALWAYS("a folder that others may write");
    reason = normfuse_cuda_cache_count(&kernels, &bytes);
    CHECK(reason != NULL && strcmp(reason, "can be written by other users") == 0, "%s", reason);
    CHECK(chmod(path_of("cache"), 0775) == 0, "chmod");
    COMPILES_ALWAYS("a folder that its group may write");
    CHECK(chmod(path_of("cache"), 0755) == 0, "chmod");
    CHECK(rename(path_of("cache"), path_of("elsewhere")) == 0 && symlink(path_of("elsewhere"), path_of("cache")) == 0,
          "symlink");
    COMPILES_ALWAYS("a link to a folder");
    CHECK(remove(path_of("cache")) == 0 && rename(path_of("elsewhere"), path_of("cache")) == 0, "rename");
    const int before = compilations();
    restart();
    WORKS(0, before);
    /* A file in its place */
    remove_all(path_of("cache"));
    FILE *const file = fopen(path_of("cache"), "w");
    CHECK(file != NULL && fclose(file) == 0, "a file");
    COMPILES_ALWAYS("a file in the folder's place");
    remove(path_of("cache"));
}

static int as_nobody(void)
{
    return setgid(65534) != 0 || setuid(65534) != 0 ? 3 : specialize(7) != NORMFUSE_OK || specialize(0) != NORMFUSE_OK;
}

/* Root's cache serves others, who cannot write it. */
static void test_read_only(void)
{
    if (geteuid() != 0) {
        harness_skip("a folder of root's: this needs root");
        return;
    }
    begin();
    WORKS(0, 1);
    fake_driver_use();
    CHECK(chmod(folder, 0755) == 0 && chmod(path_of("log"), 0666) == 0, "chmod");
    CHECK(in_child(as_nobody) == 0, "another user's call");
    CHECK(compilations() == 2, "%d compilations", compilations());
    CHECK(files_of(".kernel", NULL) == 1 && files_of(".part", NULL) == 0, "files were added");
    /* Another user's file is believed by nobody. */
    char path[PATH_BYTES + 300];
    files_of(".kernel", path);
    CHECK(chown(path, 1234, 0) == 0, "chown");
    restart();
    WORKS(0, 3);
}

static void write_file(const char *path, const void *data, size_t bytes)
{
    FILE *const file = fopen(path, "w");
    CHECK(file != NULL && fwrite(data, 1, bytes, file) == bytes && fclose(file) == 0, "%s", path);
}

static void test_bad_files(void)
{
    char path[PATH_BYTES + 300];
    begin();
    WORKS(0, 1);
    CHECK(files_of(".kernel", path) == 1, "one file");
    FILE *const file = fopen(path, "r");
    static char good[65536], bad[65536];
    const size_t bytes = file != NULL ? fread(good, 1, sizeof good, file) : 0;
    if (!CHECK(bytes > 200 && bytes < sizeof good - 1, "%zu bytes", bytes))
        return;
    fclose(file);
    int expected = 1;
    for (size_t length = 0; length < bytes; length += length < 100 ? 7 : 113) { /* truncated */
        write_file(path, good, length);
        restart();
        WORKS(0, ++expected);
    }
    for (size_t at = 0; at < bytes; at += at < 100 ? 5 : 97) { /* one bit is another */
        memcpy(bad, good, bytes);
        bad[at] ^= 4;
        write_file(path, bad, bytes);
        restart();
        WORKS(0, ++expected);
    }
    memcpy(bad, good, bytes);
    write_file(path, bad, bytes + 1); /* a byte more */
    restart();
    WORKS(0, ++expected);
    memset(bad, 'x', sizeof bad); /* foreign */
    write_file(path, bad, sizeof bad);
    restart();
    WORKS(0, ++expected);
    /* Another kernel's file by this name */
    WORKS(1, ++expected);
    CHECK(files_of(".kernel", NULL) == 2, "two files");
    write_file(path, good, bytes);
    restart();
    WORKS(0, expected);
    WORKS(1, expected);
    DIR *const open = opendir(path_of("cache"));
    for (const struct dirent *entry = NULL; open != NULL && (entry = readdir(open)) != NULL;)
        if (entry->d_name[0] != '.') {
            snprintf(path, sizeof path, "%s/%s", path_of("cache"), entry->d_name);
            write_file(path, good, bytes);
        }
    closedir(open);
    restart();
    WORKS(0, expected);
    WORKS(1, ++expected);
    CHECK(chmod(path, 0666) == 0, "chmod");
    restart();
    (void)specialize(0);
    (void)specialize(1);
    expected++;
    CHECK(compilations() == expected, "a file that others may write: %d compilations", compilations() - expected);
    /* A link, a folder, a pipe in its place */
    remove_all(path_of("cache"));
    restart();
    WORKS(0, ++expected);
    CHECK(files_of(".kernel", path) == 1, "one file");
    CHECK(rename(path, path_of("target")) == 0 && symlink(path_of("target"), path) == 0, "symlink");
    restart();
    WORKS(0, ++expected);
    restart();
    WORKS(0, expected); /* the link was replaced */
    CHECK(remove(path) == 0 && mkdir(path, 0755) == 0, "mkdir");
    restart();
    WORKS(0, ++expected);
    restart();
    WORKS(0, ++expected);
    CHECK(files_of(".part", NULL) == 0, "a temporary file is left");
    CHECK(rmdir(path) == 0 && mkfifo(path, 0600) == 0, "mkfifo");
    restart();
    WORKS(0, ++expected);
    restart();
    WORKS(0, expected);
}

static int without_room(void)
{
    signal(SIGXFSZ, SIG_DFL);
    const struct rlimit limit = {100, 100};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
        return 3;
    return specialize(0) != NORMFUSE_OK;
}

static void test_full(void)
{
    begin();
    CHECK(in_child(without_room) == 0, "a process that may write 100 bytes");
    CHECK(files_of(".kernel", NULL) == 0 && files_of(".part", NULL) == 0, "a file is left");
    WORKS(0, 2);
    /* The oldest go where there is more than 256 MiB. */
    char path[PATH_BYTES + 300];
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%d.kernel", path_of("cache"), i);
        const int file = open(path, O_WRONLY | O_CREAT, 0600);
        CHECK(file >= 0 && ftruncate(file, (off_t)100 << 20) == 0, "%s", path);
        const struct timespec times[2] = {{1000 + 10 * (i ^ 1), 0}, {1000 + 10 * (i ^ 1), 0}};
        CHECK(futimens(file, times) == 0 && close(file) == 0, "%s", path);
    }
    const char *const others[] = {"left.part", "young.part", "a stranger"};
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", path_of("cache"), others[i]);
        write_file(path, "x", 1);
        const struct timespec times[2] = {{1000, 0}, {1000, 0}};
        CHECK(i == 1 || utimensat(AT_FDCWD, path, times, 0) == 0, "%s", path);
    }
    WORKS(1, 3);
    for (int i = 0; i < 4; i++) { /* by age: 1, 0, 3, 2 */
        snprintf(path, sizeof path, "%s/%d.kernel", path_of("cache"), i);
        CHECK((access(path, F_OK) == 0) == (i >= 2), "file %d of 100 MiB", i);
    }
    CHECK(files_of(".kernel", NULL) == 4, "%d files", files_of(".kernel", NULL));
    CHECK(files_of("left.part", NULL) == 0 && files_of("young.part", NULL) == 1 && files_of("stranger", NULL) == 1,
          "what else was there");
    int64_t kernels, bytes;
    CHECK(normfuse_cuda_cache_count(&kernels, &bytes) == NULL && kernels == 4 && bytes > 200 << 20 && bytes < 201 << 20,
          "%" PRId64 " kernels, %" PRId64 " bytes", kernels, bytes);
    /* Use makes young. */
    remove_all(path_of("cache"));
    restart();
    WORKS(0, 4);
    CHECK(files_of(".kernel", path) == 1, "one file");
    const struct timespec times[2] = {{1000, 0}, {1000, 0}};
    struct stat status;
    CHECK(utimensat(AT_FDCWD, path, times, 0) == 0, "utimensat");
    restart();
    WORKS(0, 4);
    CHECK(stat(path, &status) == 0 && status.st_mtime > 1000, "its use was not noted");
    /* A folder that is not there holds nothing. */
    remove_all(path_of("cache"));
    CHECK(normfuse_cuda_cache_count(&kernels, &bytes) == NULL && kernels == 0 && bytes == 0, "no folder");
}

static void test_info(void)
{
    normfuse_compiler_information info = {.struct_bytes = sizeof info - 1};
    REFUSED(NORMFUSE_BAD_ARGUMENT, normfuse_compiler_info(NULL), "info is NULL");
    REFUSED(NORMFUSE_BAD_ARGUMENT, normfuse_compiler_info(&info), "struct_bytes");
    begin();
    info.struct_bytes = sizeof info;
    CHECK(normfuse_compiler_info(&info) == NORMFUSE_OK && info.version == 13000 && info.cache_kernels == 0 &&
              strcmp(info.cache, path_of("cache")) == 0 && info.cache_problem[0] == '\0',
          "%s; %s, %s", info.compiler, info.cache, info.cache_problem);
    WORKS(0, 1);
    CHECK(normfuse_compiler_info(&info) == NORMFUSE_OK && info.cache_kernels == 1 && info.cache_bytes > 100,
          "%d kernels", (int)info.cache_kernels);
    CHECK(chmod(path_of("cache"), 0777) == 0, "chmod");
    CHECK(normfuse_compiler_info(&info) == NORMFUSE_OK && strstr(info.cache_problem, "other users") != NULL, "%s",
          info.cache_problem);
    setenv("NORMFUSE_CACHE_DIR", "", 1);
    setenv("NORMFUSE_NVRTC", "", 1);
    normfuse_cuda_forget_compiler();
    CHECK(normfuse_compiler_info(&info) == NORMFUSE_OK && info.version == 0 && info.cache[0] == '\0' &&
              info.cache_problem[0] != '\0' && strcmp(info.compiler, "none: NORMFUSE_NVRTC is empty") == 0,
          "%s; %s", info.compiler, info.cache_problem);
}

/* ---- threads and processes -------------------------------------------------------------------------------------- */

static int specialize_in_child(void)
{
    return specialize(0) != NORMFUSE_OK;
}

static void test_killed(void)
{
    begin();
    fake_compiler("die");
    CHECK(in_child(specialize_in_child) == -SIGKILL, "the child was not killed");
    fake_compiler("");
    WORKS(0, 2);
    restart();
    WORKS(0, 2);
}

static void test_processes(void)
{
    enum { PROCESSES = 8 };
    begin();
    fake_compiler("slow=50");
    pid_t children[PROCESSES];
    fflush(stdout);
    for (int i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        if (children[i] == 0)
            _exit(specialize(0) != NORMFUSE_OK || specialize(1) != NORMFUSE_OK);
    }
    for (int i = 0; i < PROCESSES; i++) {
        int status = 1;
        waitpid(children[i], &status, 0);
        CHECK(status == 0, "process %d: %d", i, status);
    }
    CHECK(compilations() >= 2 && compilations() <= 2 * PROCESSES, "%d compilations", compilations());
    CHECK(files_of(".kernel", NULL) == 2 && files_of(".part", NULL) == 0, "%d files", files_of("", NULL));
    const int before = compilations();
    restart();
    WORKS(0, before);
    WORKS(1, before);
}

static pthread_barrier_t barrier;
static _Atomic(CUkernel) first_kernel;
static const struct normfuse_cuda_device *shared_device;

static void *specialize_in_thread(void *context)
{
    pthread_barrier_wait(&barrier);
    const struct normfuse_cuda_signature signature = signature_of(*(const int32_t *)context);
    CUkernel kernel = NULL, none = NULL;
    if (normfuse_cuda_specialized("test", shared_device, &signature, NULL, &kernel) != NORMFUSE_OK)
        return (void *)(uintptr_t)"a thread was refused";
    if (signature.activation == 0 && !atomic_compare_exchange_strong(&first_kernel, &none, kernel) && none != kernel)
        return (void *)(uintptr_t)"threads have different kernels";
    return NULL;
}

static void run_threads(int32_t different)
{
    enum { THREADS = 8 };
    pthread_t threads[THREADS];
    int32_t activations[THREADS];
    pthread_barrier_init(&barrier, NULL, THREADS);
    atomic_store(&first_kernel, NULL);
    shared_device = device_of(0);
    for (int i = 0; i < THREADS; i++) {
        activations[i] = i % different;
        CHECK(pthread_create(&threads[i], NULL, specialize_in_thread, &activations[i]) == 0, "thread %d", i);
    }
    for (int i = 0; i < THREADS; i++) {
        void *problem;
        pthread_join(threads[i], &problem);
        CHECK(problem == NULL, "%s", (const char *)problem);
    }
    pthread_barrier_destroy(&barrier);
}

static void test_threads(void)
{
    begin();
    fake_compiler("slow=50");
    run_threads(1);
    CHECK(compilations() == 1 && fake_driver.libraries == 1, "%d compilations for eight threads", compilations());
    /* Different signatures side by side: each waits for all. */
    begin();
    fake_compiler("meet=8");
    run_threads(8);
    CHECK(compilations() == 8, "%d compilations", compilations());
}

/* The kernels of a call are compiled side by side, once; what fails of it is not the first one's failure. */
static void test_kernels_of_a_call(void)
{
    struct normfuse_cuda_signature signatures[3];
    struct normfuse_cuda_beside beside = {.count = 3};
    CUkernel kernel = NULL;
    begin();
    const struct normfuse_cuda_device *const device = device_of(0);
    for (int32_t i = 0; i < 3; i++) {
        signatures[i] = signature_of(i);
        beside.signatures[i] = &signatures[i];
    }
    fake_compiler("meet=3");
    CHECK(normfuse_cuda_specialized("test", device, &signatures[1], &beside, &kernel) == NORMFUSE_OK && kernel != NULL,
          "%s", normfuse_last_error());
    CHECK(compilations() == 3, "%d compilations", compilations());
    for (int32_t i = 0; i < 3; i++)
        CHECK(normfuse_cuda_find_specialized(device, &signatures[i]) != NULL, "kernel %d is not there", (int)i);
    /* Two of the three are on disk, and one of them is in use. */
    restart();
    const struct normfuse_cuda_device *const again = device_of(0);
    signatures[2] = signature_of(3);
    WORKS(0, 3);
    fake_driver.code_result = CUDA_ERROR_OUT_OF_MEMORY;
    fake_driver.code_failures = 1;
    fake_compiler("");
    CHECK(normfuse_cuda_specialized("test", again, &signatures[1], &beside, &kernel) == NORMFUSE_OUT_OF_MEMORY,
          "the first one's failure");
    CHECK(normfuse_cuda_specialized("test", again, &signatures[1], &beside, &kernel) == NORMFUSE_OK, "%s",
          normfuse_last_error());
    CHECK(normfuse_cuda_find_specialized(again, &signatures[2]) != NULL && compilations() == 4, "%d compilations",
          compilations());
}

static void *specialize_slowly(void *context)
{
    const struct normfuse_cuda_signature signature = signature_of(0);
    CUkernel kernel;
    (void)context;
    return (void *)(intptr_t)normfuse_cuda_specialized("test", shared_device, &signature, NULL, &kernel);
}

static void wait_for_compilation(void)
{
    for (int i = 0; i < 5000 && compilations() == 0; i++)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
}

static int specialize_anew(void)
{
    fake_compiler("");
    return specialize(0) != NORMFUSE_OK;
}

/* The child of a process whose thread compiles. */
static void test_fork(void)
{
    pthread_t thread;
    void *status = NULL;
#ifdef __SANITIZE_THREAD__
    harness_skip("a fork of a process with threads: TSan's cannot make threads");
    return;
#endif
    begin();
    shared_device = device_of(0);
    fake_compiler("slow=300");
    pthread_create(&thread, NULL, specialize_slowly, NULL);
    wait_for_compilation();
    CHECK(in_child(specialize_anew) == 0, "the child");
    pthread_join(thread, &status);
    CHECK(status == NULL && compilations() == 2, "status %d, %d compilations", (int)(intptr_t)status, compilations());
}

/* A thread that is cancelled while it compiles, or waits for one that does, ends its call first. */
static void test_cancellation(void)
{
    pthread_t threads[2];
    begin();
    shared_device = device_of(0);
    fake_compiler("slow=200");
    for (int i = 0; i < 2; i++) {
        pthread_create(&threads[i], NULL, specialize_slowly, NULL);
        wait_for_compilation();
    }
    for (int i = 0; i < 2; i++)
        pthread_cancel(threads[i]);
    for (int i = 0; i < 2; i++) {
        void *status;
        pthread_join(threads[i], &status);
        CHECK(status == NULL || status == PTHREAD_CANCELED, "status %d", (int)(intptr_t)status);
    }
    fake_compiler("");
    WORKS(0, 1);
}

/* ---- ahead of the calls ----------------------------------------------------------------------------------------- */

static int32_t progress_calls, progress_done, progress_all;

static void note_progress(void *context, int32_t done, int32_t all)
{
    CHECK(context == &progress_calls && done > progress_done && done <= all, "progress: %d of %d", (int)done, (int)all);
    progress_calls++;
    progress_done = done;
    progress_all = all;
}

static void test_prepare(void)
{
    begin();
    const struct normfuse_cuda_device *const device = device_of(0);
    for (int32_t i = 0; i < 4; i++) {
        const struct normfuse_cuda_signature signature = signature_of(i);
        CHECK(normfuse_cuda_note("test", device, &signature) == NORMFUSE_OK &&
                  normfuse_cuda_note("test", device, &signature) == NORMFUSE_OK,
              "%s", normfuse_last_error());
    }
    WORKS(3, 1);
    fake_compiler("meet=4"); /* with the one that there was */
    CHECK(normfuse_prepare_with(0, note_progress, &progress_calls) == NORMFUSE_OK, "%s", normfuse_last_error());
    CHECK(compilations() == 4 && fake_driver.libraries == 4, "%d compilations", compilations());
    CHECK(progress_calls > 0 && progress_done == 3 && progress_all == 3, "progress: %d of %d", (int)progress_done,
          (int)progress_all);
    fake_compiler("");
    CHECK(normfuse_prepare(0) == NORMFUSE_OK && compilations() == 4, "%s", normfuse_last_error());
    /* One that fails does not keep the others from being loaded. */
    begin();
    for (int32_t i = 0; i < 3; i++) {
        const struct normfuse_cuda_signature signature = signature_of(i);
        CHECK(normfuse_cuda_note("test", device_of(0), &signature) == NORMFUSE_OK, "%s", normfuse_last_error());
    }
    fake_driver.code_result = CUDA_ERROR_OUT_OF_MEMORY;
    fake_driver.code_failures = 1;
    REFUSED(NORMFUSE_OUT_OF_MEMORY, normfuse_prepare(0), "normfuse_prepare: ");
    CHECK(fake_driver.libraries == 2 && compilations() == 3, "%d kernels are loaded", fake_driver.libraries);
    CHECK(normfuse_prepare(0) == NORMFUSE_OK && fake_driver.libraries == 3 && compilations() == 3, "%s",
          normfuse_last_error());
    setenv("NORMFUSE_NVRTC", "", 1);
    restart();
    const struct normfuse_cuda_signature unknown = signature_of(9);
    CHECK(normfuse_cuda_note("test", device_of(0), &unknown) == NORMFUSE_OK, "%s", normfuse_last_error());
    REFUSED(NORMFUSE_NO_COMPILER, normfuse_prepare(0), "normfuse_prepare: ", "NVRTC");
}

/* A call of the public interface whose tensors are nowhere. */
static normfuse_status prepare_call(int32_t device_type, bool backward, const void *sync)
{
    const int64_t sizes[] = {2, 8, 5, 7}, channels[] = {8}, groups[] = {2, 4};
    normfuse_axes axes[4];
    normfuse_tensor big[3], small[2], saved[2];
    for (int i = 0; i < 3; i++)
        big[i] = normfuse_tensor_contiguous((void *)((uintptr_t)(i + 1) << 32), NORMFUSE_F32, 4, sizes, &axes[0]);
    for (int i = 0; i < 2; i++) {
        small[i] = normfuse_tensor_contiguous((void *)((uintptr_t)(i + 5) << 32), NORMFUSE_F32, 1, channels, &axes[1]);
        saved[i] = normfuse_tensor_contiguous((void *)((uintptr_t)(i + 8) << 32), NORMFUSE_F32, 2, groups, &axes[2]);
    }
    normfuse_tensor *const all[] = {&big[0], &big[1], &big[2], &small[0], &small[1], &saved[0], &saved[1]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        all[i]->device.device_type = device_type;
    const normfuse_group_norm_options options = {.struct_bytes = sizeof options, .groups = 4, .eps = 1e-5};
    const normfuse_exec exec = {.struct_bytes = sizeof exec,
                                .flags = NORMFUSE_PREPARE,
                                .sync = (void *)(uintptr_t)sync,
                                .sync_bytes = sync != NULL ? 65536 : 0};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors,
                                      .x = &big[0],
                                      .y = backward ? NULL : &big[1],
                                      .dy = backward ? &big[1] : NULL,
                                      .dx = backward ? &big[2] : NULL,
                                      .pre_bias = &small[0],
                                      .dpre_bias = backward ? &small[1] : NULL,
                                      .u = backward ? NULL : &big[2],
                                      .mean = &saved[0],
                                      .rstd = &saved[1]};
    return backward ? normfuse_group_norm_backward(&options, &tensors, &exec)
                    : normfuse_group_norm_forward(&options, &tensors, &exec);
}

/* A norm group that no chip holds: reduced, finished and applied by kernels of its own. */
static void test_call_of_several_kernels(void)
{
    const int64_t sizes[] = {1, 2, 4096, 4096};
    normfuse_axes axes[2];
    normfuse_tensor x = normfuse_tensor_contiguous((void *)((uintptr_t)1 << 32), NORMFUSE_F32, 4, sizes, &axes[0]);
    normfuse_tensor y = normfuse_tensor_contiguous((void *)((uintptr_t)2 << 32), NORMFUSE_F32, 4, sizes, &axes[1]);
    x.device.device_type = y.device.device_type = NORMFUSE_CUDA;
    const normfuse_group_norm_options options = {.struct_bytes = sizeof options, .groups = 1, .eps = 1e-5};
    const normfuse_tensors tensors = {.struct_bytes = sizeof tensors, .x = &x, .y = &y};
    normfuse_exec exec = {.struct_bytes = sizeof exec, .scratch = (void *)((uintptr_t)3 << 32)};
    begin();
    fake_compiler("meet=2");
    CHECK(normfuse_group_norm_forward_scratch_bytes(&options, &tensors, &exec, &exec.scratch_bytes) == NORMFUSE_OK &&
              normfuse_group_norm_forward(&options, &tensors, &exec) == NORMFUSE_OK,
          "%s", normfuse_last_error());
    CHECK(fake_driver.launches >= 3 && compilations() >= 2, "%d launches, %d compilations", fake_driver.launches,
          compilations());
}

/* Memory that is not there is not touched, and nothing is launched. */
static void test_prepared_calls(void)
{
    begin();
    for (int backward = 0; backward < 2; backward++)
        for (int has_sync = 0; has_sync < 2; has_sync++) {
            const void *const sync = has_sync ? (const void *)((uintptr_t)1 << 40) : NULL;
            CHECK(prepare_call(NORMFUSE_CPU, backward != 0, sync) == NORMFUSE_OK, "%s", normfuse_last_error());
            CHECK(prepare_call(NORMFUSE_CUDA, backward != 0, sync) == NORMFUSE_OK, "%s", normfuse_last_error());
        }
    const int64_t shards[] = {2, 4, 3}, one[] = {4, 3};
    normfuse_axes axes[2];
    normfuse_tensor in = normfuse_tensor_contiguous((void *)((uintptr_t)1 << 32), NORMFUSE_F64, 3, shards, &axes[0]);
    normfuse_tensor out = normfuse_tensor_contiguous((void *)((uintptr_t)2 << 32), NORMFUSE_F64, 2, one, &axes[1]);
    normfuse_exec exec = {.struct_bytes = sizeof exec, .flags = NORMFUSE_PREPARE};
    for (int32_t device_type = NORMFUSE_CPU; device_type <= NORMFUSE_CUDA; device_type++) {
        in.device.device_type = out.device.device_type = device_type;
        CHECK(normfuse_stats_merge(&in, &out, &exec) == NORMFUSE_OK, "%s", normfuse_last_error());
    }
    CHECK(fake_driver.launches == 0 && compilations() == 0, "%d launches", fake_driver.launches);
    exec.flags = 2;
    REFUSED(NORMFUSE_BAD_ARGUMENT, normfuse_stats_merge(&in, &out, &exec), "exec.flags");
    /* A merge has a kernel, which is noted and then compiled. */
    begin();
    exec.flags = NORMFUSE_PREPARE;
    CHECK(normfuse_stats_merge(&in, &out, &exec) == NORMFUSE_OK && normfuse_prepare(0) == NORMFUSE_OK, "%s",
          normfuse_last_error());
    CHECK(fake_driver.launches == 0 && compilations() == 1, "%d compilations", compilations());
    exec.flags = 0;
    CHECK(normfuse_stats_merge(&in, &out, &exec) == NORMFUSE_OK && fake_driver.launches == 1 && compilations() == 1,
          "%s", normfuse_last_error());
    CHECK(strcmp(fake_driver.launch[0].name, "normfuse_finish_merge_f64") == 0, "%s", fake_driver.launch[0].name);
    /* Calls are refused here for what they would be refused for. */
    fake_driver.devices = 0;
    fake_driver_use();
    REFUSED(NORMFUSE_BAD_ARGUMENT, prepare_call(NORMFUSE_CUDA, false, NULL), "no CUDA device");
}

/* ---- what is printed -------------------------------------------------------------------------------------------- */

/* In a child, whose environment nothing of the library has read yet. */
static int compile_aloud(void)
{
    setenv("NORMFUSE_VERBOSE", "compile", 1);
    setenv("TMPDIR", folder, 1);
    const int file = open(path_of("said"), O_WRONLY | O_CREAT, 0600);
    if (file < 0 || dup2(file, STDERR_FILENO) < 0 || specialize(0) != NORMFUSE_OK)
        return 1;
    restart();
    return specialize(0) != NORMFUSE_OK;
}

static void test_verbose(void)
{
    static char said[8192], source[4096];
    char path[PATH_BYTES] = "", command[3 * PATH_BYTES];
    begin();
    CHECK(in_child(compile_aloud) == 0, "the child");
    FILE *file = fopen(path_of("said"), "r");
    CHECK(file != NULL && fread(said, 1, sizeof said - 1, file) > 0 && fclose(file) == 0, "nothing was said");
    static const char *const wanted[] = {"normfuse: compile: normfuse_single_forward_f32 for sm_90: compiled in ",
                                         " by NVRTC 13.0, " NORMFUSE_FAKE_NVRTC "\n",
                                         "42 registers, 8 bytes of stack; source ",
                                         "ptxas info    : Used 42 registers",
                                         "for sm_90: from the cache, made by NVRTC 13.0\n"};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        CHECK(strstr(said, wanted[i]) != NULL, "'%s' is not in: %s", wanted[i], said);
    const char *const place = strstr(said, "; source ");
    if (!CHECK(place != NULL && sscanf(place, "; source %511s", path) == 1, "no source in: %s", said))
        return;
    file = fopen(path, "r");
    CHECK(file != NULL && fread(source, 1, sizeof source - 1, file) > 0 && fclose(file) == 0, "no file %s", path);
    CHECK(strstr(source, "#include \"single.cuh\"") != NULL, "the source is %s", source);
    snprintf(command, sizeof command, "grep -q scaled \"$(dirname '%s')/scale.cuh\"", path);
    CHECK(system(command) == 0, "its headers are not beside it");
}

/* ---- a real NVRTC ----------------------------------------------------------------------------------------------- */

static void test_nvrtc(const char *path)
{
    static const int32_t capabilities[] = {80, 90, 100, 120};
    setenv("NORMFUSE_NVRTC", path, 1);
    setenv("NORMFUSE_CACHE_DIR", "", 1);
    for (size_t i = 0; i < sizeof capabilities / sizeof *capabilities; i++) {
        struct normfuse_cuda_compilation compilation = {.signature = signature_of(1), .capability = capabilities[i]};
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        normfuse_cuda_compile(&compilation);
        clock_gettime(CLOCK_MONOTONIC, &end);
        CHECK(compilation.status == NORMFUSE_OK, "%d: %s", (int)capabilities[i], compilation.problem);
        CHECK(compilation.code.registers > 0 && compilation.code.stack == 0, "%d: %d registers, %d bytes of stack",
              (int)capabilities[i], (int)compilation.code.registers, (int)compilation.code.stack);
        printf("# sm_%d by NVRTC %d.%d: %.0f ms, %zu bytes, %d registers\n", (int)capabilities[i],
               (int)compilation.code.compiler / 1000, (int)compilation.code.compiler % 1000 / 10,
               (double)(end.tv_sec - start.tv_sec) * 1e3 + (double)(end.tv_nsec - start.tv_nsec) * 1e-6,
               compilation.code.count, (int)compilation.code.registers);
        free(compilation.code.bytes);
    }
    struct normfuse_cuda_compilation unknown = {.signature = signature_of(1), .capability = 990};
    normfuse_cuda_compile(&unknown);
    CHECK(unknown.status == NORMFUSE_NO_COMPILER && !unknown.is_final, "sm_990: %d %s", (int)unknown.status,
          unknown.problem);
    static const struct normfuse_cuda_text wrong[] = {{"single.cuh",
                                                       "extern \"C\" __global__ void NORMFUSE_KERNEL() { lane(); }"},
                                                      {NULL, NULL}};
    normfuse_cuda_texts = wrong;
    struct normfuse_cuda_compilation failed = {.signature = signature_of(1), .capability = 90};
    normfuse_cuda_compile(&failed);
    CHECK(failed.status == NORMFUSE_NO_KERNEL && failed.is_final && strstr(failed.problem, "lane") != NULL, "%d %s",
          (int)failed.status, failed.problem);
}

int main(int count, char **words)
{
    normfuse_cuda_texts = stand_ins;
    setenv("NORMFUSE_NUM_THREADS", "4", 1);
    if (count == 3 && strcmp(words[1], "--nvrtc") == 0) {
        test_nvrtc(words[2]);
        return harness_close();
    }
    const char *const temporary = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/test_compile-XXXXXX", temporary != NULL ? temporary : "/tmp");
    if (mkdtemp(folder) == NULL) {
        perror(folder);
        return 1;
    }
    setenv("FAKE_NVRTC_LOG", path_of("log"), 1);
    test_verbose(); /* before the environment is read */
    test_search();  /* before any NVRTC is loaded */
    test_hash();
    test_text();
    test_compiler_failures();
    test_missing_compiler();
    test_kernels();
    test_many();
    test_capture_and_reset();
    test_driver_failures();
    test_refusals();
    test_cache_paths();
    test_bad_folders();
    test_read_only();
    test_bad_files();
    test_full();
    test_info();
    test_killed();
    test_processes();
    test_threads();
    test_kernels_of_a_call();
    test_fork();
    test_cancellation();
    test_prepare();
    test_call_of_several_kernels();
    test_prepared_calls();
    remove_all(folder);
    return harness_close();
}
