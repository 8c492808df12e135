/* SPDX-License-Identifier: MIT
 *
 * fuzz_npy.c - libFuzzer target of the .npy reader: any bytes as a file. What is accepted must lie inside the file, and
 * a header written from it must be read back as the same array.
 *
 * clang -g -fsanitize=fuzzer,address,undefined -Icli tests/fuzz/fuzz_npy.c cli/npy.c */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "npy.h"

static void require(int condition)
{
    if (!condition)
        abort();
}

static void check_header(const struct npy_header *header, int64_t file_bytes)
{
    require(header->ndim >= 0 && header->ndim <= NPY_MAX_AXES);
    require(header->item_bytes == 2 || header->item_bytes == 4 || header->item_bytes == 8);
    int64_t elements = 1;
    for (int32_t i = 0; i < header->ndim; i++) {
        require(header->shape[i] >= 0);
        elements *= header->shape[i];
    }
    require(elements == header->elements);
    require(header->elements == 0 || header->data_offset + elements * header->item_bytes <= file_bytes);

    if (header->ndim > 8)
        return;
    char written[NPY_WRITTEN_HEADER_BYTES];
    char error[256];
    struct npy_header again;
    size_t length = npy_write_header(written, header->descr, header->ndim, header->shape);
    require(length % 64 == 0 && length <= sizeof written);
    require(npy_parse_header(written, length, (int64_t)length + elements * header->item_bytes, &again, error,
                             sizeof error));
    require(again.ndim == header->ndim && again.elements == elements && !again.fortran);
    require(strcmp(again.descr, header->descr) == 0);
    require(memcmp(again.shape, header->shape, (size_t)header->ndim * sizeof header->shape[0]) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char error[256] = "";
    struct npy_header header;
    /* A copy of its own size, so that a read past the end is seen. */
    uint8_t *copy = malloc(size ? size : 1);
    require(copy != NULL);
    if (size)
        memcpy(copy, data, size);
    if (npy_parse_header(copy, size, (int64_t)size, &header, error, sizeof error))
        check_header(&header, (int64_t)size);
    else
        require(error[0] != '\0' && memchr(error, '\0', sizeof error) != NULL);
    free(copy);

    /* The same through a file, whose data is mapped and read to its end. */
    static int descriptor = -1;
    if (descriptor < 0)
        descriptor = memfd_create("fuzz", 0);
    require(descriptor >= 0 && ftruncate(descriptor, 0) == 0);
    require(pwrite(descriptor, data, size, 0) == (ssize_t)size);
    char path[64];
    struct npy_file file;
    static const char prefix[] = "/proc/self/fd/";
    memcpy(path, prefix, sizeof prefix);
    path[sizeof prefix - 1] = (char)('0' + descriptor / 10 % 10);
    path[sizeof prefix] = (char)('0' + descriptor % 10);
    path[sizeof prefix + 1] = '\0';
    if (npy_open(&file, path, error, sizeof error)) {
        if (file.header.elements > 0) {
            struct npy_window window = {NULL, 0};
            size_t bytes = (size_t)(file.header.elements * file.header.item_bytes);
            const volatile uint8_t *mapped = npy_map(&window, &file, file.header.data_offset, bytes);
            require(mapped != NULL);
            uint8_t sum = (uint8_t)(mapped[0] ^ mapped[bytes - 1]);
            (void)sum;
            npy_unmap(&window);
        }
        npy_close(&file);
    }
    return 0;
}
