/* SPDX-License-Identifier: MIT
 *
 * output.c - temporary files, renamed at the end. */
#define _GNU_SOURCE
#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "report.h"

struct output {
    const char *path; /* as the user wrote it */
    char *target;     /* where it goes: path with symbolic links followed; NULL: written to directly */
    char *temporary;
    int descriptor;
};

static struct output outputs[OUTPUTS_MAX];
static int output_count;

/* What the signal handlers may touch: the temporaries that exist. */
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
    (void)number;
    remove_temporaries();
    ssize_t ignored = write(STDERR_FILENO, message, sizeof message - 1);
    (void)ignored;
    _exit(CODE_FILE);
}

static void install_handlers(void)
{
    static const int ending[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
    struct sigaction action = {.sa_flags = (int)SA_RESETHAND};
    sigemptyset(&action.sa_mask);
    action.sa_handler = on_signal;
    for (size_t i = 0; i < sizeof ending / sizeof ending[0]; i++) {
        struct sigaction before;
        /* nohup and background jobs have these ignored: leave it so. */
        if (sigaction(ending[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            sigaction(ending[i], &action, NULL);
    }
    action.sa_handler = on_bus_error;
    sigaction(SIGBUS, &action, NULL);
    /* A file size limit shall be an error of write, not a death that leaves temporaries. */
    signal(SIGXFSZ, SIG_IGN);
    atexit(remove_temporaries);
}

static bool open_temporary(struct output *output)
{
    const char *slash = strrchr(output->target, '/');
    int directory_length = slash ? (int)(slash - output->target) + 1 : 0;
    size_t bytes = (size_t)directory_length + 64;
    output->temporary = malloc(bytes);
    if (!output->temporary)
        return false;
    for (int attempt = 0; attempt < 1000; attempt++) {
        snprintf(output->temporary, bytes, "%.*s.normfuse-%ld-%d-%d.tmp", directory_length, output->target,
                 (long)getpid(), output_count, attempt);
        output->descriptor = open(output->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (output->descriptor >= 0) {
            existing[output_count] = output->temporary;
            return true;
        }
        if (errno != EEXIST)
            return false;
    }
    return false;
}

char *output_canonical(const char *path)
{
    char *whole = realpath(path, NULL);
    if (whole)
        return whole;
    const char *slash = strrchr(path, '/');
    char *folder = slash == path ? strdup("/") : slash ? strndup(path, (size_t)(slash - path)) : strdup(".");
    char *real_folder = folder ? realpath(folder, NULL) : NULL;
    if (real_folder && asprintf(&whole, "%s/%s", real_folder, slash ? slash + 1 : path) < 0)
        whole = NULL;
    free(folder);
    free(real_folder);
    return whole;
}

struct output *output_open(const char *path, int64_t total_bytes)
{
    if (output_count == 0)
        install_handlers();
    struct output *output = &outputs[output_count];
    struct stat status;
    *output = (struct output){.path = path, .descriptor = -1};
    bool exists = stat(path, &status) == 0;
    if (!exists && errno != ENOENT)
        report_failure(path, "cannot be written: %s", strerror(errno));
    if (exists && S_ISDIR(status.st_mode))
        report_failure(path, "cannot be written: is a directory");
    if (exists && !S_ISREG(status.st_mode)) {
        output->descriptor = open(path, O_WRONLY | O_CLOEXEC);
        if (output->descriptor < 0)
            report_failure(path, "cannot be written: %s", strerror(errno));
        output_count++;
        return output;
    }
    if (exists && access(path, W_OK) != 0)
        report_failure(path, "cannot be written: %s", strerror(errno));
    output->target = output_canonical(path);
    if (!output->target || !open_temporary(output))
        report_failure(path, "cannot be written: %s", strerror(errno));
    if (exists)
        (void)fchmod(output->descriptor, status.st_mode & 07777);
    /* File systems that cannot reserve say so; then write() finds a full disk. */
    if (total_bytes > 0 && fallocate(output->descriptor, FALLOC_FL_KEEP_SIZE, 0, (off_t)total_bytes) != 0 &&
        (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
        report_failure(path, "cannot be written: %s", strerror(errno));
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
        if (written < 0)
            report_failure(output->path, "cannot be written: %s", strerror(errno));
        at += written;
        bytes -= (size_t)written;
    }
}

void outputs_commit(void)
{
    /* Network file systems report a full disk at close: look before the first name changes. */
    for (int i = 0; i < output_count; i++)
        if (close(outputs[i].descriptor) != 0)
            report_failure(outputs[i].path, "cannot be written: %s", strerror(errno));
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    for (int i = 0; i < output_count; i++) {
        if (outputs[i].temporary) {
            if (rename(outputs[i].temporary, outputs[i].target) != 0)
                report_failure(outputs[i].path, "cannot be written: %s", strerror(errno));
            existing[i] = NULL;
        }
        free(outputs[i].temporary);
        free(outputs[i].target);
    }
    output_count = 0;
    sigprocmask(SIG_SETMASK, &before, NULL);
}
