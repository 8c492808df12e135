/* SPDX-License-Identifier: MIT
 *
 * tuning_tables.h - the built-in tunings, made by
 *
 *     normfuse tune --from-rows bench/tuning/h100.jsonl bench/tuning/h200.jsonl --source -o src/cuda/tuning_tables.h
 *
 * A line is the code of a schedule, whether of columns, whether of backwards, its start and its factor. */
/* clang-format off */
static const struct normfuse_cuda_tuning tables[] = {
    {"NVIDIA H100", 90, 0, NULL},
    {"NVIDIA H200", 90, 0, NULL},
};
/* clang-format on */
