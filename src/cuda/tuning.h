/* SPDX-License-Identifier: MIT
 *
 * tuning.h - what was measured of the schedules on a GPU: for each schedule, layout and direction two numbers that
 * correct the schedule's own estimate. A tuning comes from the built-in tables, from a file, or from `normfuse tune`
 * itself, which measures a schedule by a tuning that forbids all others. */
#ifndef NORMFUSE_CUDA_TUNING_H
#define NORMFUSE_CUDA_TUNING_H

#include "loader.h"

/* A start with which a schedule is taken only where nothing else fits. */
#define NORMFUSE_CUDA_FORBIDDEN 1e9

/* Microseconds that the schedule takes: start + factor * its own estimate. */
struct normfuse_cuda_tuning_line {
    uint16_t schedule; /* normfuse_cuda_schedule_code of its name */
    uint8_t columns, backward;
    float start, factor;
};

/* Names would be most of a table. No two schedules have one code; test_cuda_host.c sees to it. */
static inline uint16_t normfuse_cuda_schedule_code(const char *name)
{
    uint32_t code = 0;
    for (; *name != '\0'; name++)
        code = (code * 31 + (unsigned char)*name) % 65521;
    return (uint16_t)code;
}

struct normfuse_cuda_tuning {
    char gpu[48];
    int32_t capability; /* 90; of the devices that it is for */
    int32_t count;
    const struct normfuse_cuda_tuning_line *lines;
};

/* What was loaded; NULL: nothing, the built-in tables hold. What this points to never changes and is never freed. */
const struct normfuse_cuda_tuning *normfuse_cuda_loaded_tuning(void);
/* Takes the place of what was loaded; NULL: back to the built-in tables. The caller never changes nor frees it, and
 * gives no second one at the same address: plans are remembered by it. */
void normfuse_cuda_use_tuning(const struct normfuse_cuda_tuning *tuning);
/* The one for a device: `loaded` where it has the device's capability, else the built-in one of its name, of its
 * capability, or of the nearest. */
const struct normfuse_cuda_tuning *normfuse_cuda_tuning_of(const struct normfuse_cuda_tuning *loaded,
                                                           const struct normfuse_cuda_device *device);
/* NULL: the tuning has none. */
const struct normfuse_cuda_tuning_line *normfuse_cuda_tuning_line_of(const struct normfuse_cuda_tuning *tuning,
                                                                     const char *schedule, bool columns, bool backward);

/* normfuse_load_tuning. Thread-safe. */
normfuse_status normfuse_cuda_load_tuning(const char *call, const char *path);
/* Loads the file that NORMFUSE_TUNING names, once for a process. Of a bad file the first call that `reports` says so;
 * before and after that the built-in tables hold. */
normfuse_status normfuse_cuda_tuning_of_environment(bool reports);

#endif
