/* SPDX-License-Identifier: MIT
 *
 * driver_facts.h - what a header says of CUDA's driver interface, in numbers and names. */
#ifndef NORMFUSE_TESTS_DRIVER_FACTS_H
#define NORMFUSE_TESTS_DRIVER_FACTS_H

struct driver_fact {
    const char *name;
    long long value;  /* of an enumerator; a size; an offset */
    const char *text; /* the name that a function is looked up by; "": not a function */
};

/* The facts of src/cuda/driver_types.h and driver.h and of cli/driver_functions.h, and those of cuda.h; up to a name of
 * NULL. */
extern const struct driver_fact facts_of_ours[], facts_of_cuda_h[];

#endif
