/* SPDX-License-Identifier: MIT
 *
 * test_driver_headers.c - what the project declares of CUDA's driver interface is what cuda.h declares: values, sizes,
 * offsets, names of functions. Without a cuda.h it is skipped. */
#include <string.h>

#include "driver_facts.h"
#include "harness.h"

int main(void)
{
#if defined(NORMFUSE_TEST_CUDA_H)
    const struct driver_fact *theirs = facts_of_cuda_h;
    for (const struct driver_fact *ours = facts_of_ours; ours->name != NULL; ours++, theirs++)
        CHECK(ours->value == theirs->value && strcmp(ours->text, theirs->text) == 0,
              "%s: %lld %s here, %lld %s in cuda.h", ours->name, ours->value, ours->text, theirs->value, theirs->text);
#else
    harness_skip("the declarations of CUDA: there is no cuda.h to compare them with");
#endif
    return harness_close();
}
