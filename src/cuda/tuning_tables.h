/* SPDX-License-Identifier: MIT
 *
 * tuning_tables.h - the built-in tunings. No rows were committed yet: each schedule is taken at its own estimate, whose
 * figures (policy.h) were measured on an H200. From rows this file is made by
 *
 *     normfuse tune --from-rows bench/tuning/h200.jsonl --source -o src/cuda/tuning_tables.h */
static const struct normfuse_cuda_tuning tables[] = {
    {"NVIDIA H200", 90, 0, NULL},
};
