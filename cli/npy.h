/* SPDX-License-Identifier: MIT
 *
 * npy.h - NumPy's .npy files: headers of versions 1 to 3 read from hostile bytes, version 1 written.
 * The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html */
#ifndef NORMFUSE_CLI_NPY_H
#define NORMFUSE_CLI_NPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    NPY_MAX_AXES = 64,             /* NumPy's own limit */
    NPY_MAX_HEADER_BYTES = 1 << 16, /* longer ones belong to structured dtypes, which are refused anyway */
    NPY_WRITTEN_HEADER_BYTES = 1024, /* room for npy_write_header with up to 8 axes */
    NPY_DESCR_BYTES = 12
};

struct npy_header {
    char descr[NPY_DESCR_BYTES]; /* as the file spells it: "<f4" */
    char kind;                   /* f, u, i, V */
    int32_t item_bytes;          /* 2, 4, 8 */
    bool swapped;                /* npy_swapped(descr) */
    bool fortran;
    int32_t ndim;
    int64_t shape[NPY_MAX_AXES]; /* as in the file */
    int64_t elements;            /* elements * item_bytes bytes lie in the file at data_offset */
    int64_t data_offset;
};

/* Reads the header in bytes[0..count), the beginning of a file of file_bytes bytes. count may be less than the whole
 * file, but not less than NPY_MAX_HEADER_BYTES + 12 unless the file is. False with a message when the file is not one
 * whose elements this program reads: floats of 2, 4, 8 bytes, integers of 2 bytes, or raw V2. */
bool npy_parse_header(const void *bytes, size_t count, int64_t file_bytes, struct npy_header *header, char *error,
                      size_t error_bytes);

/* True if elements of this descr have the other byte order in a file than in this machine's memory. Without a mark, or
 * with '=', they have this machine's. V2 is raw bytes to NumPy: here, little-endian ones. */
bool npy_swapped(const char *descr);

/* Writes a version 1 header of row-major data, padded so that the data is 64-byte aligned. ndim is at most 8. Returns
 * its length. */
size_t npy_write_header(char out[NPY_WRITTEN_HEADER_BYTES], const char *descr, int32_t ndim, const int64_t *shape);

/* "(2, 3)" */
void npy_shape_text(char *out, size_t out_bytes, int32_t ndim, const int64_t *shape);

struct npy_file {
    int descriptor;
    int64_t file_bytes;
    struct npy_header header;
};

/* Opens a regular file and reads its header. False with a message. */
bool npy_open(struct npy_file *file, const char *path, char *error, size_t error_bytes);
void npy_close(struct npy_file *file);

/* A read-only view of part of a file. */
struct npy_window {
    void *base;
    size_t bytes;
};

/* Maps bytes [offset, offset + bytes) of the file; returns their address, NULL (with errno) on failure. A window that
 * was open is closed first. bytes is above 0. */
const void *npy_map(struct npy_window *window, const struct npy_file *file, int64_t offset, size_t bytes);
void npy_unmap(struct npy_window *window);

#endif
