/* SPDX-License-Identifier: MIT
 *
 * output.c - files without names, which get them at the end. */
#define _GNU_SOURCE
#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <stdnoreturn.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "report.h"

struct output {
    const char *path; /* as the user wrote it */
    char *target;     /* where a regular file goes: path with symbolic links followed; NULL: written to directly */
    char *temporary;  /* its name until then, once existing[] has it */
    int descriptor;
};

static struct output outputs[OUTPUTS_MAX];
static int output_count;

/* ---- ways out of the program ------------------------------------------------------------------------------------ */

/* State that the signal handlers may touch: the temporaries that have a name. */
static char *volatile existing[OUTPUTS_MAX];

static void remove_temporaries(void)
{
    for (int i = 0; i < OUTPUTS_MAX; i++)
        if (existing[i]) {
            unlink(existing[i]);
            existing[i] = NULL;
        }
}

static void on_signal(int number)
{
    remove_temporaries();
    /* SA_RESETHAND has put the default action back: the parent sees the signal that ended us. */
    raise(number);
}

static void on_bus_error(int number)
{
    static const char message[] = "normfuse: an input file became shorter, or could not be read, while it was in use\n";
    static atomic_flag reported = ATOMIC_FLAG_INIT;
    (void)number;
    /* Every thread that reads the file comes here; the first one ends the program. */
    while (atomic_flag_test_and_set(&reported))
        pause();
    remove_temporaries();
    ssize_t ignored = write(STDERR_FILENO, message, sizeof message - 1);
    (void)ignored;
    _exit(CODE_FILE);
}

/* The signals whose default action is none or a stop. */
static bool is_survived(int number)
{
    static const int survived[] = {SIGCHLD, SIGCONT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG, SIGWINCH};
    for (size_t i = 0; i < sizeof survived / sizeof survived[0]; i++)
        if (number == survived[i])
            return true;
    return false;
}

static void install_handlers(void)
{
    struct sigaction action = {.sa_flags = (int)SA_RESETHAND}, before;
    sigemptyset(&action.sa_mask);
    action.sa_handler = on_signal;
    for (int number = 1; number <= SIGRTMAX; number++)
        /* nohup and background jobs have some ignored: leave it so. */
        if (!is_survived(number) && sigaction(number, NULL, &before) == 0 && before.sa_handler == SIG_DFL)
            sigaction(number, &action, NULL);
    action.sa_handler = on_bus_error;
    action.sa_flags = 0;
    sigaction(SIGBUS, &action, NULL);
    atexit(remove_temporaries);
}

/* No signal that the handlers know comes until the mask is put back: the library's threads have them blocked. */
static sigset_t block_signals(void)
{
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    return before;
}

/* ---- places ----------------------------------------------------------------------------------------------------- */

/* The path with symbolic links followed, a last one that leads to nothing too. *own: the number of the open file that
 * the path names (/dev/stdout, /dev/fd/3), which need not have another name; else -1. Allocated; NULL with errno. */
static char *resolve(const char *path, int *own)
{
    enum { LINKS_MOST = 40 }; /* the kernel's limit */
    char at[PATH_MAX], folder[PATH_MAX], whole[PATH_MAX], link[PATH_MAX], own_folder[PATH_MAX] = "";
    *own = -1;
    errno = ENAMETOOLONG;
    if (snprintf(at, sizeof at, "%s", path) >= (int)sizeof at)
        return NULL;
    if (!realpath("/proc/self/fd", own_folder))
        own_folder[0] = '\0';
    for (int links = 0; links < LINKS_MOST; links++) {
        char *slash = strrchr(at, '/');
        const char *name = slash ? slash + 1 : at;
        if (slash)
            *slash = '\0';
        if (!realpath(!slash ? "." : slash == at ? "/" : at, folder))
            return NULL;
        errno = ENAMETOOLONG;
        if (snprintf(whole, sizeof whole, "%s/%s", folder[1] ? folder : "", name) >= (int)sizeof whole)
            return NULL;
        if (strcmp(folder, own_folder) == 0 && name[0] && name[strspn(name, "0123456789")] == '\0') {
            long number = strtol(name, NULL, 10);
            *own = number < INT_MAX ? (int)number : INT_MAX; /* which no file has */
            return strdup(whole);
        }
        ssize_t length = readlink(whole, link, sizeof link - 1);
        if (length < 0)
            return strdup(whole);
        link[length] = '\0';
        errno = ENAMETOOLONG;
        if (snprintf(at, sizeof at, "%s%s%s", link[0] == '/' ? "" : folder, link[0] == '/' ? "" : "/", link) >=
            (int)sizeof at)
            return NULL;
    }
    errno = ELOOP;
    return NULL;
}

char *output_canonical(const char *path)
{
    int own;
    char *place = resolve(path, &own);
    char *behind = own >= 0 ? realpath(place, NULL) : NULL;
    if (!behind)
        return place;
    free(place);
    return behind;
}

static size_t folder_length(const char *target)
{
    return (size_t)(strrchr(target, '/') - target) + 1;
}

static int open_folder(const char *target, int flags, mode_t mode)
{
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%.*s", (int)folder_length(target), target);
    return open(folder, flags | O_CLOEXEC, mode);
}

/* ---- temporaries ------------------------------------------------------------------------------------------------ */

/* The name under which the system shows an open file. */
static const char *shown_name(int descriptor, char name[32])
{
    snprintf(name, 32, "/proc/self/fd/%d", descriptor);
    return name;
}

/* Names the file beside its target: links the open one, or creates one where none is open. */
static bool name_temporary(struct output *output, mode_t mode)
{
    int folder = (int)folder_length(output->target), index = (int)(output - outputs);
    size_t bytes = (size_t)folder + 64;
    char shown[32];
    bool named = false;
    free(output->temporary);
    output->temporary = malloc(bytes);
    if (!output->temporary)
        return false;
    sigset_t before = block_signals();
    for (int attempt = 0; attempt < 1000 && !named; attempt++) {
        snprintf(output->temporary, bytes, "%.*s.normfuse-%ld-%d-%d.tmp", folder, output->target, (long)getpid(),
                 index, attempt);
        if (output->descriptor >= 0) {
            named = linkat(AT_FDCWD, shown_name(output->descriptor, shown), AT_FDCWD, output->temporary,
                           AT_SYMLINK_FOLLOW) == 0;
        } else {
            output->descriptor = open(output->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
            named = output->descriptor >= 0;
        }
        if (named)
            existing[index] = output->temporary;
        else if (errno != EEXIST)
            break;
    }
    int error = errno;
    sigprocmask(SIG_SETMASK, &before, NULL);
    errno = error;
    return named;
}

/* Opens a file without a name, which is gone with the program however that ends. Without one where the file system
 * has none, and where it could not be linked later: no /proc, or the file is another user's. */
static void open_nameless(struct output *output, mode_t mode)
{
    char shown[32];
    struct stat status;
    int descriptor = open_folder(output->target, O_WRONLY | O_TMPFILE, mode);
    if (descriptor >= 0 && (access(shown_name(descriptor, shown), F_OK) != 0 || fstat(descriptor, &status) != 0 ||
                            status.st_uid != geteuid())) {
        close(descriptor);
        descriptor = -1;
    }
    output->descriptor = descriptor;
}

/* Permissions without the bits that run a program as another user. File systems that have none refuse, and show the
 * same ones for every file. */
static bool set_mode(int descriptor, mode_t mode)
{
    struct stat status;
    mode &= 0777;
    if (fchmod(descriptor, mode) == 0)
        return true;
    int error = errno;
    bool same = fstat(descriptor, &status) == 0 && (status.st_mode & 0777) == mode;
    errno = error;
    return same;
}

/* ---- outputs ---------------------------------------------------------------------------------------------------- */

static noreturn void fail(const struct output *output)
{
    report_failure(output->path, "cannot be written: %s", strerror(errno));
}

/* The file whose mode and owner the new one gets, NULL: a new one. */
static void open_temporary(struct output *output, const struct stat *status, int64_t total_bytes)
{
    /* Nobody whom the old file kept out may open the new one before it has the old one's permissions. */
    mode_t mode = status ? S_IRUSR | S_IWUSR : 0666;
    if (status && access(output->target, W_OK) != 0)
        fail(output);
    open_nameless(output, mode);
    if (output->descriptor < 0 && !name_temporary(output, mode))
        fail(output);
    if (status && !set_mode(output->descriptor, status->st_mode))
        fail(output);
    /* File systems that cannot reserve say so; then write() finds a full disk. */
    if (total_bytes > 0 && fallocate(output->descriptor, FALLOC_FL_KEEP_SIZE, 0, (off_t)total_bytes) != 0 &&
        (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
        fail(output);
}

struct output *output_open(const char *path, int64_t total_bytes)
{
    if (output_count == 0)
        install_handlers();
    struct output *output = &outputs[output_count];
    struct stat status;
    int own;
    *output = (struct output){.path = path, .target = resolve(path, &own), .descriptor = -1};
    if (!output->target)
        fail(output);
    bool exists = stat(output->target, &status) == 0;
    if (!exists && own < 0 && errno != ENOENT)
        fail(output);
    if (own < 0 && (!exists || S_ISREG(status.st_mode))) {
        open_temporary(output, exists ? &status : NULL, total_bytes);
    } else {
        if (own < 0 && S_ISDIR(status.st_mode))
            report_failure(path, "cannot be written: is a directory");
        /* A file opened again by its name in /proc would be written from its beginning. */
        output->descriptor =
            own >= 0 ? fcntl(own, F_DUPFD_CLOEXEC, 0) : open(output->target, O_WRONLY | O_CLOEXEC);
        if (output->descriptor < 0)
            fail(output);
        free(output->target);
        output->target = NULL;
    }
    output_count++;
    return output;
}

void output_write(struct output *output, const void *data, size_t bytes)
{
    const char *at = data;
    while (bytes > 0) {
        ssize_t written = write(output->descriptor, at, bytes);
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0 && errno == EAGAIN) { /* an inherited pipe that does not block */
            (void)poll(&(struct pollfd){.fd = output->descriptor, .events = POLLOUT}, 1, -1);
            continue;
        }
        if (written < 0)
            fail(output);
        at += written;
        bytes -= (size_t)written;
    }
}

/* Pipes and terminals have no disk to flush to. */
static bool flush(int descriptor)
{
    return fsync(descriptor) == 0 || errno == EINVAL || errno == EROFS || errno == ENOTSUP;
}

static bool flush_folder(const char *target)
{
    int descriptor = open_folder(target, O_RDONLY | O_DIRECTORY, 0);
    bool flushed = descriptor >= 0 && flush(descriptor);
    int error = errno;
    if (descriptor >= 0)
        close(descriptor);
    errno = error;
    return flushed;
}

void outputs_commit(bool to_disk)
{
    for (int i = 0; i < output_count; i++)
        if (outputs[i].target && !existing[i] && !name_temporary(&outputs[i], 0))
            fail(&outputs[i]);
    /* Network file systems report a full disk at close: look before the first name changes. */
    for (int i = 0; i < output_count; i++)
        if ((to_disk && !flush(outputs[i].descriptor)) || close(outputs[i].descriptor) != 0)
            fail(&outputs[i]);
    sigset_t before = block_signals();
    for (int i = 0; i < output_count; i++)
        if (outputs[i].target) {
            if (rename(outputs[i].temporary, outputs[i].target) != 0)
                fail(&outputs[i]);
            existing[i] = NULL;
        }
    sigprocmask(SIG_SETMASK, &before, NULL);
    for (int i = 0; i < output_count; i++) {
        if (to_disk && outputs[i].target && !flush_folder(outputs[i].target))
            report_failure(outputs[i].path, "is written, but may not be on the disk yet: %s", strerror(errno));
        free(outputs[i].temporary);
        free(outputs[i].target);
    }
    output_count = 0;
}
