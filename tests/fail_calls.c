/* SPDX-License-Identifier: MIT
 *
 * fail_calls.c - a library for LD_PRELOAD under which chosen calls of a program fail; tests/test_program.py builds it.
 *
 * FAIL_CALLS=NAME:K:ERRNO,... makes the K-th call of NAME fail, K+ every one from the K-th on. NAME is allocate (malloc
 * and its kin), map, thread, tmpfile (open of a file without a name), link, rename, mode or flush. When the K-th one of
 * the last name fails the file FAIL_MARK is made. TRACE_CALLS=PATH: link, rename and flush are logged there. For glibc
 * only. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

/* Sets errno when this call of `name` is to fail; *calls counts them. Allocates nothing. */
static bool is_to_fail(const char *name, atomic_long *calls)
{
    const char *wanted = getenv("FAIL_CALLS"), *mark = getenv("FAIL_MARK");
    size_t length = strlen(name);
    while (wanted && !(strncmp(wanted, name, length) == 0 && wanted[length] == ':'))
        wanted = (wanted = strchr(wanted, ',')) ? wanted + 1 : NULL;
    if (!wanted)
        return false;
    char *end;
    long from = strtol(wanted + length + 1, &end, 10), now = atomic_fetch_add(calls, 1) + 1;
    bool onwards = *end == '+';
    if (now != from && !(onwards && now > from))
        return false;
    if (mark && now == from && !strchr(end, ','))
        close((int)syscall(SYS_openat, AT_FDCWD, mark, O_WRONLY | O_CREAT, 0600));
    errno = atoi(end + (onwards ? 2 : 1));
    return true;
}

/* One counter for all calls that allocate, one for each other name, which has one place each. */
static atomic_long allocations;
#define FAILS(name) __extension__({ static atomic_long calls; is_to_fail(name, &calls); })

static void trace(const char *call, const char *path)
{
    const char *log = getenv("TRACE_CALLS");
    char line[600];
    if (!log)
        return;
    int length = snprintf(line, sizeof line, "%s %s\n", call, path);
    int to = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (write(to, line, (size_t)length) < 0)
        abort();
    close(to);
}

void *malloc(size_t bytes)
{
    return is_to_fail("allocate", &allocations) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
    return is_to_fail("allocate", &allocations) ? NULL : __libc_calloc(count, bytes);
}

void *realloc(void *memory, size_t bytes)
{
    return is_to_fail("allocate", &allocations) ? NULL : __libc_realloc(memory, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    return is_to_fail("allocate", &allocations) ? NULL : __libc_memalign(alignment, bytes);
}

void *mmap(void *address, size_t bytes, int protection, int flags, int descriptor, off_t offset)
{
    return FAILS("map") ? MAP_FAILED
                        : (void *)syscall(SYS_mmap, address, bytes, protection, flags, descriptor, offset);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    return FAILS("thread") ? errno : real(thread, attributes, start, argument);
}

int open(const char *path, int flags, ...)
{
    va_list list;
    va_start(list, flags);
    bool has_mode = (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE;
    mode_t mode = has_mode ? va_arg(list, mode_t) : 0;
    va_end(list);
    if ((flags & O_TMPFILE) == O_TMPFILE && FAILS("tmpfile"))
        return -1;
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int linkat(int from_folder, const char *from, int folder, const char *path, int flags)
{
    trace("link", path);
    return FAILS("link") ? -1 : (int)syscall(SYS_linkat, from_folder, from, folder, path, flags);
}

int rename(const char *from, const char *path)
{
    trace("rename", path);
    return FAILS("rename") ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, path, 0);
}

int fchmod(int descriptor, mode_t mode)
{
    return FAILS("mode") ? -1 : (int)syscall(SYS_fchmod, descriptor, mode);
}

int fsync(int descriptor)
{
    struct stat status;
    trace("flush", fstat(descriptor, &status) == 0 && S_ISDIR(status.st_mode) ? "folder" : "file");
    return FAILS("flush") ? -1 : (int)syscall(SYS_fsync, descriptor);
}
