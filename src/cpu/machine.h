/* SPDX-License-Identifier: MIT
 *
 * machine.h - what dispatch.c learned once about this machine and its environment variables. */
#ifndef NORMFUSE_CPU_MACHINE_H
#define NORMFUSE_CPU_MACHINE_H

#include <stdbool.h>
#include <stdint.h>

struct normfuse_machine {
    int64_t l1_bytes, l2_bytes, llc_bytes; /* 0: unknown */
    bool verbose_dispatch;                 /* NORMFUSE_VERBOSE=dispatch */
    bool capped;                           /* NORMFUSE_MAX_ISA keeps a better usable table from running */
};

const struct normfuse_machine *normfuse_machine_known(void);

#endif
