/* SPDX-License-Identifier: MIT
 *
 * test_processes.c - processes.h, which test_operators --jobs is made of: tasks that fail, skip, end their process and
 * take too long are counted once each and named; every other task runs once. */
#define _GNU_SOURCE
#include "processes.h"

enum { TASKS = 400, PROCESSES = 3, ENDINGS = 4 };

static atomic_int *runs; /* of each task */
static atomic_int *seen; /* of each process */

static void name_task(int64_t task, char *text, size_t bytes)
{
    snprintf(text, bytes, "task %lld", (long long)task);
}

static void run_one(int64_t task)
{
    atomic_fetch_add(&runs[task], 1);
    atomic_fetch_add(&seen[process_index], 1);
    switch (task) {
    case 7: CHECK(false, "task 7 is wrong"); return;
    case 50: raise(SIGKILL); return;
    case 51: harness_skip("task 51"); return;
    case 120:
        signal(SIGTERM, SIG_DFL);
        raise(SIGTERM);
        return;
    case 250: _Exit(3);
    case TASKS - 1: /* the last one, while others wait for nothing */
        for (;;)
            pause();
    default: harness_passed++;
    }
}

static void end_at_once(int64_t task)
{
    (void)task;
    raise(SIGKILL);
}

/* The output and the counts of a call, kept out of this program's own. */
struct report {
    char text[8192];
    int passed, failed, skipped;
};

static struct report report_of(int processes, const struct tasks *tasks)
{
    struct report report = {.text = ""};
    const int passed = harness_passed, failed = harness_failed, skipped = harness_skipped;
    FILE *file = tmpfile();
    const int own = dup(STDOUT_FILENO);
    fflush(stdout);
    dup2(fileno(file), STDOUT_FILENO);
    run_in_processes(processes, tasks);
    fflush(stdout);
    dup2(own, STDOUT_FILENO);
    close(own);
    rewind(file);
    report.text[fread(report.text, 1, sizeof report.text - 1, file)] = 0;
    fclose(file);
    report.passed = harness_passed - passed;
    report.failed = harness_failed - failed;
    report.skipped = harness_skipped - skipped;
    harness_passed = passed;
    harness_failed = failed;
    harness_skipped = skipped;
    return report;
}

static void test_endings(void)
{
    static const char *const lines[ENDINGS] = {
        "FAIL a process ended, signal 9 (Killed): task 50\n",
            "FAIL a process ended, signal 15 (Terminated): task 120\n",
        "FAIL a process ended, exit status 3: task 250\n", "FAIL a process ended, more than 1 s: task 399\n"};
    const struct tasks tasks = {TASKS, run_one, name_task, 1};
    const struct report report = report_of(PROCESSES, &tasks);
    CHECK(report.passed == TASKS - ENDINGS - 2 && report.failed == ENDINGS + 1 && report.skipped == 1,
          "%d passed, %d failed, %d skipped", report.passed, report.failed, report.skipped);
    for (int i = 0; i < ENDINGS; i++)
        CHECK(strstr(report.text, lines[i]), "is not printed: %s", lines[i]);
    CHECK(strstr(report.text, "task 7 is wrong\n"), "a failure's message is not printed");
    CHECK(strstr(report.text, "skipped: task 51\n"), "what is skipped is not printed");
    int others = 0;
    for (int i = 0; i < TASKS; i++)
        others += atomic_load(&runs[i]) != 1;
    CHECK(others == 0, "%d tasks did not run once", others);
    CHECK(atomic_load(&seen[0]) + atomic_load(&seen[1]) + atomic_load(&seen[2]) == TASKS, "tasks of other processes");
}

/* A program whose tasks all end their process ends, too. */
static void test_all_end(void)
{
    const struct tasks tasks = {TASKS, end_at_once, name_task, 1};
    const struct report report = report_of(PROCESSES, &tasks);
    CHECK(report.passed == 0 && report.failed > MAX_PROCESSES_ENDED && report.failed < TASKS, "%d passed, %d failed",
          report.passed, report.failed);
    CHECK(strstr(report.text, "tasks were not run"), "tasks that were not run are not reported");
}

/* In this process, in their order. */
static int64_t tasks_run;

static void run_in_order(int64_t task)
{
    CHECK(task == tasks_run, "task %lld runs as number %lld", (long long)task, (long long)tasks_run);
    tasks_run++;
}

static void test_one_process(void)
{
    const struct tasks tasks = {10, run_in_order, name_task, 1};
    const struct report report = report_of(1, &tasks);
    CHECK(report.passed == 10 && report.failed == 0 && tasks_run == 10, "%d passed, %d failed", report.passed,
          report.failed);
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    runs = processes_shared(TASKS * sizeof *runs);
    seen = processes_shared(PROCESSES * sizeof *seen);
    if (!runs || !seen)
        return 2;
    test_endings();
    test_all_end();
    test_one_process();
    return harness_close();
}
