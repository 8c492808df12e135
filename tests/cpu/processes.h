/* SPDX-License-Identifier: MIT
 *
 * processes.h - runs the tasks of a test program in several processes. Each takes the next task when it has finished
 * one. The counts of a task in harness.h are added up in the parent. A process that ends within a task has failed it:
 * the task is named, and another process takes its place. */
#ifndef NORMFUSE_TESTS_PROCESSES_H
#define NORMFUSE_TESTS_PROCESSES_H

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "harness.h"

enum {
    MAX_PROCESSES = 256,
    MAX_PROCESSES_ENDED = 20 /* so many are replaced */
};

struct task_result {
    int passed, failed, skipped;
    double seconds;
};

struct tasks {
    int64_t count;
    void (*run)(int64_t task);
    void (*name)(int64_t task, char *text, size_t bytes); /* for messages */
    unsigned limit_s;                                     /* of a task */
};

/* 0 to processes - 1, of the process that a task is run in; 0 in the parent. */
static int process_index;

/* Zeros that the processes share; NULL: no memory. */
static inline void *processes_shared(size_t bytes)
{
    void *memory = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

struct processes {
    const struct tasks *tasks;
    struct task_result *results;
    atomic_llong next;
    atomic_llong at[MAX_PROCESSES]; /* the task that each is in; -1: none */
    pid_t ids[MAX_PROCESSES];
};

static inline void run_task(const struct tasks *tasks, int64_t task, struct task_result *result)
{
    const int passed = harness_passed, failed = harness_failed, skipped = harness_skipped;
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    tasks->run(task);
    clock_gettime(CLOCK_MONOTONIC, &end);
    result->passed = harness_passed - passed;
    result->failed = harness_failed - failed;
    result->skipped = harness_skipped - skipped;
    result->seconds = (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) * 1e-9;
}

static inline void start_process(struct processes *all, int index)
{
    atomic_store(&all->at[index], -1);
    const pid_t id = fork();
    if (id < 0)
        CHECK(false, "a process could not be started: %s", strerror(errno));
    if (id != 0) {
        all->ids[index] = id;
        return;
    }
    process_index = index;
    signal(SIGALRM, SIG_DFL); /* it may have been ignored since this program began */
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (long long task; (task = atomic_fetch_add(&all->next, 1)) < all->tasks->count;) {
        atomic_store(&all->at[index], task);
        alarm(all->tasks->limit_s);
        run_task(all->tasks, task, &all->results[task]);
        alarm(0);
        atomic_store(&all->at[index], -1);
    }
    exit(0);
}

/* The end of a process that did not end as it should. */
static inline void report_ended(struct processes *all, int index, int status)
{
    const long long task = atomic_load(&all->at[index]);
    char how[100], name[600] = "no task";
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        snprintf(how, sizeof how, "more than %u s", all->tasks->limit_s);
    else if (WIFSIGNALED(status))
        snprintf(how, sizeof how, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        snprintf(how, sizeof how, "exit status %d", WEXITSTATUS(status));
    if (task >= 0) {
        all->tasks->name(task, name, sizeof name);
        all->results[task] = (struct task_result){.failed = 1};
    } else {
        harness_failed++;
    }
    printf("FAIL a process ended, %s: %s\n", how, name);
}

/* The result of each task; NULL: no memory. One process is this one, and the tasks then run in their order. Several
 * print whole lines if stdout is line-buffered. */
static inline const struct task_result *run_in_processes(int processes, const struct tasks *tasks)
{
    struct processes *all = processes_shared(sizeof *all);
    struct task_result *results = processes_shared((size_t)tasks->count * sizeof *results);
    if (!all || !results) {
        CHECK(false, "no memory for the results of %lld tasks", (long long)tasks->count);
        return NULL;
    }
    for (int64_t task = 0; task < tasks->count && processes == 1; task++)
        run_task(tasks, task, &results[task]);
    if (processes == 1)
        return results;
    fflush(NULL);
    all->tasks = tasks;
    all->results = results;
    for (int i = 0; i < processes; i++)
        start_process(all, i);
    int status, ended = 0;
    for (pid_t id; (id = wait(&status)) > 0;)
        for (int i = 0; i < processes; i++) {
            if (all->ids[i] != id || status == 0)
                continue;
            report_ended(all, i, status);
            if (++ended < MAX_PROCESSES_ENDED)
                start_process(all, i);
        }
    for (int64_t task = 0; task < tasks->count; task++) {
        harness_passed += results[task].passed;
        harness_failed += results[task].failed;
        harness_skipped += results[task].skipped;
    }
    const int64_t left = tasks->count - atomic_load(&all->next);
    if (left > 0)
        CHECK(false, "%lld tasks were not run: %d processes ended within one", (long long)left, ended);
    return results;
}

#endif
