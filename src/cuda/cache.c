/* SPDX-License-Identifier: MIT
 *
 * cache.c - see cache.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const int64_t MAX_BYTES = INT64_C(256) << 20, MAX_CODE_BYTES = INT64_C(64) << 20;
static const time_t TEMPORARY_SECONDS = 3600; /* after these a temporary file is one that its process left behind */
static const char ending[] = ".kernel", temporary_ending[] = ".part";

/* A file is this, the code, and a SHA-256 digest of both. */
struct header {
    char magic[16];
    struct normfuse_cuda_key key;
    int64_t bytes; /* of code */
    int32_t compiler, registers, stack, reserved;
};
static const char magic[16] = "normfuse cache 1";

bool normfuse_cuda_cache_path(char path[static NORMFUSE_CACHE_PATH_BYTES])
{
    /* Programs that run with another's rights must not load what their caller names. */
    const char *const own = secure_getenv("NORMFUSE_CACHE_DIR"), *const cache = secure_getenv("XDG_CACHE_HOME"),
                     *const home = secure_getenv("HOME");
    int length = 0;
    if (own != NULL)
        length = snprintf(path, NORMFUSE_CACHE_PATH_BYTES, "%s", own);
    else if (cache != NULL && cache[0] == '/') /* others are void by the rules of XDG_CACHE_HOME */
        length = snprintf(path, NORMFUSE_CACHE_PATH_BYTES, "%s/normfuse", cache);
    else if (home != NULL && home[0] == '/')
        length = snprintf(path, NORMFUSE_CACHE_PATH_BYTES, "%s/.cache/normfuse", home);
    if (length >= NORMFUSE_CACHE_PATH_BYTES)
        length = 0;
    path[length] = '\0';
    return length > 0;
}

/* NULL, or what forbids to trust it. */
static const char *distrust(const struct stat *status)
{
    if (status->st_uid != geteuid() && status->st_uid != 0)
        return "belongs to another user";
    return (status->st_mode & (S_IWGRP | S_IWOTH)) != 0 ? "can be written by other users" : NULL;
}

/* glibc has functions for this since 2.33 alone, and wheels run on older ones. The kernel's struct is libc's where
 * there is CUDA: x86-64 and aarch64. */
static bool get_status(int file, struct stat *status)
{
    return syscall(SYS_newfstatat, file, "", status, AT_EMPTY_PATH) == 0;
}

static bool get_status_of(int in, const char *name, struct stat *status)
{
    return syscall(SYS_newfstatat, in, name, status, AT_SYMLINK_NOFOLLOW) == 0;
}

static void make_folders(char *path)
{
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(path, 0755);
        *slash = '/';
    }
    (void)mkdir(path, 0755);
}

/* A descriptor of the folder, or -1, errno, and *problem. */
static int open_folder(bool makes, const char **problem)
{
    char path[NORMFUSE_CACHE_PATH_BYTES];
    struct stat status;
    errno = 0;
    *problem = "there is none";
    if (!normfuse_cuda_cache_path(path))
        return -1;
    if (makes)
        make_folders(path);
    const size_t length = strlen(path);
    if (length > 1 && path[length - 1] == '/') /* behind which a link would be followed */
        path[length - 1] = '\0';
    const int folder = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder < 0) {
        *problem = errno == ENOTDIR || errno == ELOOP ? "is a symbolic link, or no folder" : "cannot be opened";
        return -1;
    }
    *problem = !get_status(folder, &status) ? "cannot be opened" : distrust(&status);
    if (*problem == NULL)
        return folder;
    close(folder);
    errno = 0;
    return -1;
}

enum { NAME_BYTES = 2 * NORMFUSE_DIGEST_BYTES + 64 };

static void name_of(const struct normfuse_cuda_key *key, char name[static NAME_BYTES])
{
    for (int i = 0; i < NORMFUSE_DIGEST_BYTES; i++)
        snprintf(name + 2 * i, 3, "%02x", key->digest[i]);
    strcpy(name + 2 * (size_t)NORMFUSE_DIGEST_BYTES, ending);
}

static void digest_of(const struct header *header, const unsigned char *code,
                      unsigned char digest[static NORMFUSE_DIGEST_BYTES])
{
    struct normfuse_hash hash;
    normfuse_hash_begin(&hash);
    normfuse_hash_add(&hash, header, sizeof *header);
    normfuse_hash_add(&hash, code, (size_t)header->bytes);
    normfuse_hash_end(&hash, digest);
}

/* Reads all of the bytes, or writes them. */
static bool move_all(int file, void *data, size_t bytes, bool writes)
{
    char *at = data;
    while (bytes > 0) {
        const ssize_t count = writes ? write(file, at, bytes) : read(file, at, bytes);
        if (count == 0 || (count < 0 && errno != EINTR))
            return false;
        at += count > 0 ? count : 0;
        bytes -= count > 0 ? (size_t)count : 0;
    }
    return true;
}

static bool read_code(int file, const struct normfuse_cuda_key *key, struct normfuse_cuda_code *code)
{
    struct stat status;
    struct header header;
    unsigned char stored[NORMFUSE_DIGEST_BYTES], digest[NORMFUSE_DIGEST_BYTES];
    if (!get_status(file, &status) || !S_ISREG(status.st_mode) || distrust(&status) != NULL ||
        !move_all(file, &header, sizeof header, false) || memcmp(header.magic, magic, sizeof magic) != 0 ||
        memcmp(&header.key, key, sizeof *key) != 0 || header.bytes <= 0 || header.bytes > MAX_CODE_BYTES ||
        status.st_size != (off_t)sizeof header + header.bytes + NORMFUSE_DIGEST_BYTES)
        return false;
    unsigned char *const bytes = malloc((size_t)header.bytes);
    if (bytes == NULL)
        return false;
    if (move_all(file, bytes, (size_t)header.bytes, false) && move_all(file, stored, sizeof stored, false)) {
        digest_of(&header, bytes, digest);
        if (memcmp(digest, stored, sizeof digest) == 0) {
            *code = (struct normfuse_cuda_code){.bytes = bytes,
                                                .count = (size_t)header.bytes,
                                                .compiler = header.compiler,
                                                .registers = header.registers,
                                                .stack = header.stack};
            return true;
        }
    }
    free(bytes);
    return false;
}

bool normfuse_cuda_cache_read(const struct normfuse_cuda_key *key, struct normfuse_cuda_code *code)
{
    char name[NAME_BYTES];
    const char *problem;
    const int folder = open_folder(false, &problem);
    if (folder < 0)
        return false;
    name_of(key, name);
    /* O_NONBLOCK: of a pipe in its place nothing is waited for. */
    const int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    close(folder);
    if (file < 0)
        return false;
    const bool is_read = read_code(file, key, code);
    if (is_read) /* the last use, by which the cache is kept small */
        (void)futimens(file, NULL);
    close(file);
    return is_read;
}

/* ---- what the folder holds -------------------------------------------------------------------------------------- */

struct entry {
    struct timespec used;
    int64_t bytes;
    char name[NAME_BYTES];
};

struct listing {
    struct entry *entries;
    size_t count, room;
    int64_t bytes;
};

static bool ends_with(const char *name, const char *wanted)
{
    const size_t length = strlen(name), of_wanted = strlen(wanted);
    return length >= of_wanted && length < NAME_BYTES && strcmp(name + length - of_wanted, wanted) == 0;
}

/* Counts kernels. Removes temporary files that nobody writes any more, where `cleans`. What there is no memory for is
 * left out. Closes the folder. */
static void list_folder(int folder, bool cleans, struct listing *listing)
{
    struct stat status;
    const time_t now = time(NULL);
    DIR *const open = fdopendir(folder);
    *listing = (struct listing){.count = 0};
    if (open == NULL) {
        close(folder);
        return;
    }
    for (const struct dirent *found = readdir(open); found != NULL; found = readdir(open)) {
        const bool is_kernel = ends_with(found->d_name, ending);
        if ((!is_kernel && !ends_with(found->d_name, temporary_ending)) ||
            !get_status_of(folder, found->d_name, &status) || !S_ISREG(status.st_mode))
            continue;
        if (!is_kernel) {
            if (cleans && now - status.st_mtime > TEMPORARY_SECONDS)
                (void)unlinkat(folder, found->d_name, 0);
            continue;
        }
        if (listing->count == listing->room) {
            const size_t room = 2 * listing->room + 64;
            struct entry *const more = realloc(listing->entries, room * sizeof *more);
            if (more == NULL)
                break;
            listing->entries = more;
            listing->room = room;
        }
        struct entry *const entry = &listing->entries[listing->count++];
        *entry = (struct entry){.used = status.st_mtim, .bytes = status.st_size};
        strcpy(entry->name, found->d_name);
        listing->bytes += entry->bytes;
    }
    closedir(open);
}

static int by_use(const void *one, const void *two)
{
    const struct timespec *const a = &((const struct entry *)one)->used, *const b = &((const struct entry *)two)->used;
    if (a->tv_sec != b->tv_sec)
        return a->tv_sec < b->tv_sec ? -1 : 1;
    return (a->tv_nsec > b->tv_nsec) - (a->tv_nsec < b->tv_nsec);
}

static void keep_small(int folder)
{
    struct listing listing;
    const int listed = fcntl(folder, F_DUPFD_CLOEXEC, 0);
    if (listed < 0)
        return;
    list_folder(listed, true, &listing);
    if (listing.bytes > MAX_BYTES)
        qsort(listing.entries, listing.count, sizeof *listing.entries, by_use);
    for (size_t i = 0; i < listing.count && listing.bytes > MAX_BYTES; i++) {
        (void)unlinkat(folder, listing.entries[i].name, 0);
        listing.bytes -= listing.entries[i].bytes;
    }
    free(listing.entries);
}

const char *normfuse_cuda_cache_write(const struct normfuse_cuda_key *key, const struct normfuse_cuda_code *code)
{
    static _Atomic(unsigned) serial;
    struct header header = {.key = *key,
                            .bytes = (int64_t)code->count,
                            .compiler = code->compiler,
                            .registers = code->registers,
                            .stack = code->stack};
    char name[NAME_BYTES], temporary[NAME_BYTES];
    unsigned char digest[NORMFUSE_DIGEST_BYTES];
    struct timespec now;
    const char *problem;
    const int folder = open_folder(true, &problem);
    if (folder < 0)
        return problem;
    memcpy(header.magic, magic, sizeof magic);
    digest_of(&header, code->bytes, digest);
    name_of(key, name);
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(temporary, sizeof temporary, "%jx-%x-%lx%s", (intmax_t)getpid(), atomic_fetch_add(&serial, 1),
             (unsigned long)now.tv_nsec, temporary_ending);
    const int file = openat(folder, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (file < 0) {
        problem = "cannot be written to";
    } else {
        bool is_stored = move_all(file, &header, sizeof header, true) &&
                         move_all(file, code->bytes, code->count, true) &&
                         move_all(file, digest, sizeof digest, true) && fsync(file) == 0;
        is_stored = close(file) == 0 && is_stored;
        if (is_stored && renameat(folder, temporary, folder, name) == 0) {
            keep_small(folder);
        } else {
            (void)unlinkat(folder, temporary, 0);
            problem = "cannot be written to";
        }
    }
    close(folder);
    return problem;
}

const char *normfuse_cuda_cache_count(int64_t *kernels, int64_t *bytes)
{
    struct listing listing;
    const char *problem;
    *kernels = *bytes = 0;
    const int folder = open_folder(false, &problem);
    if (folder < 0)
        return errno == ENOENT ? NULL : problem;
    list_folder(folder, false, &listing);
    *kernels = (int64_t)listing.count;
    *bytes = listing.bytes;
    free(listing.entries);
    return NULL;
}
