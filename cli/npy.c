/* SPDX-License-Identifier: MIT
 *
 * npy.c - reads and writes .npy headers. The header is a Python dict literal; only what NumPy itself writes there is
 * accepted: three keys, strings without escapes, True or False, and a tuple of whole numbers. */
#define _GNU_SOURCE
#include "npy.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PREFIX_V1 = 10, PREFIX_V2 = 12 };

struct reader {
    const char *at, *end;
    char *error;
    size_t error_bytes;
};

__attribute__((format(printf, 2, 3))) static bool refuse(const struct reader *reader, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(reader->error, reader->error_bytes, format, list);
    va_end(list);
    return false;
}

static void skip_space(struct reader *reader)
{
    while (reader->at < reader->end && (*reader->at == ' ' || *reader->at == '\n' || *reader->at == '\t'))
        reader->at++;
}

/* Takes one character after space, when it is the next. */
static bool take(struct reader *reader, char character)
{
    skip_space(reader);
    if (reader->at >= reader->end || *reader->at != character)
        return false;
    reader->at++;
    return true;
}

static bool take_word(struct reader *reader, const char *word)
{
    size_t length = strlen(word);
    skip_space(reader);
    if ((size_t)(reader->end - reader->at) < length || memcmp(reader->at, word, length) != 0)
        return false;
    reader->at += length;
    return true;
}

static bool read_string(struct reader *reader, char *out, size_t out_bytes)
{
    skip_space(reader);
    if (reader->at >= reader->end || (*reader->at != '\'' && *reader->at != '"'))
        return refuse(reader, "bad .npy header: a string was expected at byte %td from its end",
                      reader->end - reader->at);
    char quote = *reader->at++;
    size_t length = 0;
    while (reader->at < reader->end && *reader->at != quote) {
        unsigned char byte = (unsigned char)*reader->at++;
        if (byte < 0x20 || byte > 0x7e || byte == '\\')
            return refuse(reader, "bad .npy header: a string holds the byte 0x%02x", byte);
        if (length + 1 >= out_bytes)
            return refuse(reader, "bad .npy header: the string '%.*s...' is longer than any this program knows",
                          (int)length, out);
        out[length++] = (char)byte;
    }
    out[length] = '\0';
    if (!take(reader, quote))
        return refuse(reader, "bad .npy header: a string does not end");
    return true;
}

static bool read_size(struct reader *reader, int64_t *size)
{
    skip_space(reader);
    bool negative = reader->at < reader->end && *reader->at == '-';
    reader->at += negative;
    int64_t value = 0;
    const char *first = reader->at;
    while (reader->at < reader->end && *reader->at >= '0' && *reader->at <= '9')
        if (__builtin_mul_overflow(value, (int64_t)10, &value) ||
            __builtin_add_overflow(value, (int64_t)(*reader->at++ - '0'), &value))
            return refuse(reader, "shape: a size does not fit in 63 bits");
    if (reader->at == first)
        return refuse(reader, "bad .npy header: shape is not a tuple of whole numbers");
    if (negative && value > 0)
        return refuse(reader, "shape: the size -%" PRId64 " is negative", value);
    /* Python 2 wrote long integers so. */
    if (reader->at < reader->end && *reader->at == 'L')
        reader->at++;
    *size = value;
    return true;
}

static bool read_shape(struct reader *reader, struct npy_header *header)
{
    if (!take(reader, '('))
        return refuse(reader, "bad .npy header: shape is not a tuple of whole numbers");
    header->ndim = 0;
    while (!take(reader, ')')) {
        if (header->ndim == NPY_MAX_AXES)
            return refuse(reader, "shape: more than %d axes", NPY_MAX_AXES);
        if (!read_size(reader, &header->shape[header->ndim]))
            return false;
        header->ndim++;
        if (!take(reader, ',')) {
            if (header->ndim == 1 || !take(reader, ')'))
                return refuse(reader, "bad .npy header: shape is not a tuple of whole numbers");
            break;
        }
    }
    return true;
}

static bool read_descr(struct reader *reader, struct npy_header *header)
{
    skip_space(reader);
    if (reader->at < reader->end && (*reader->at == '[' || *reader->at == '('))
        return refuse(reader, "structured dtypes are not read; f2, f4, f8 (and, as bf16, u2, i2, V2) are");
    if (!read_string(reader, header->descr, sizeof header->descr))
        return false;
    const char *text = header->descr;
    char order = '=';
    if (strchr("<>|=", *text) && *text)
        order = *text++;
    header->kind = *text ? *text++ : '?';
    if (header->kind == 'O')
        return refuse(reader, "dtype '%s': arrays of Python objects (pickles) are not read", header->descr);
    bool digit = text[0] >= '0' && text[0] <= '9' && text[1] == '\0';
    header->item_bytes = digit ? text[0] - '0' : 0;
    bool known = (header->kind == 'f' &&
                  (header->item_bytes == 2 || header->item_bytes == 4 || header->item_bytes == 8) && order != '|') ||
                 ((header->kind == 'u' || header->kind == 'i') && header->item_bytes == 2 && order != '|') ||
                 (header->kind == 'V' && header->item_bytes == 2);
    if (!known)
        return refuse(reader, "dtype '%s' is not read; f2, f4, f8 (and, as bf16, u2, i2, V2) are", header->descr);
    header->swapped = npy_swapped(header->descr);
    return true;
}

bool npy_swapped(const char *descr)
{
    const bool raw = strchr(descr, 'V') != NULL, big = *descr == '>' && !raw, little = *descr == '<' || raw;
    return __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? little : big;
}

static bool read_dict(struct reader *reader, struct npy_header *header)
{
    enum { DESCR = 1, FORTRAN = 2, SHAPE = 4 };
    int seen = 0;
    if (!take(reader, '{'))
        return refuse(reader, "bad .npy header: it is not a dict");
    while (!take(reader, '}')) {
        char key[16];
        if (!read_string(reader, key, sizeof key))
            return false;
        int which = strcmp(key, "descr") == 0           ? DESCR
                    : strcmp(key, "fortran_order") == 0 ? FORTRAN
                    : strcmp(key, "shape") == 0         ? SHAPE
                                                        : 0;
        if (!which)
            return refuse(reader, "bad .npy header: unknown key '%s'", key);
        if (seen & which)
            return refuse(reader, "bad .npy header: key '%s' twice", key);
        seen |= which;
        if (!take(reader, ':'))
            return refuse(reader, "bad .npy header: no ':' after '%s'", key);
        if (which == DESCR && !read_descr(reader, header))
            return false;
        if (which == SHAPE && !read_shape(reader, header))
            return false;
        if (which == FORTRAN) {
            header->fortran = take_word(reader, "True");
            if (!header->fortran && !take_word(reader, "False"))
                return refuse(reader, "bad .npy header: fortran_order is neither True nor False");
        }
        if (!take(reader, ',')) {
            if (!take(reader, '}'))
                return refuse(reader, "bad .npy header: no ',' or '}' after the value of '%s'", key);
            break;
        }
    }
    if (seen != (DESCR | FORTRAN | SHAPE))
        return refuse(reader, "bad .npy header: key '%s' is missing",
                      !(seen & DESCR) ? "descr" : !(seen & FORTRAN) ? "fortran_order" : "shape");
    skip_space(reader);
    if (reader->at != reader->end)
        return refuse(reader, "bad .npy header: something follows the dict");
    return true;
}

bool npy_parse_header(const void *bytes, size_t count, int64_t file_bytes, struct npy_header *header, char *error,
                      size_t error_bytes)
{
    const unsigned char *prefix = bytes;
    struct reader reader = {.error = error, .error_bytes = error_bytes};
    memset(header, 0, sizeof *header);
    if (count >= 4 && memcmp(prefix, "PK\3\4", 4) == 0)
        return refuse(&reader, "this is a .npz archive; a .npy file is needed");
    if (count < 6 || memcmp(prefix, "\x93NUMPY", 6) != 0)
        return refuse(&reader, "not a .npy file: it does not begin with \\x93NUMPY");
    if (count < PREFIX_V1)
        return refuse(&reader, "truncated .npy file: it ends inside the header");
    int version = prefix[6];
    if (version < 1 || version > 3 || prefix[7] != 0)
        return refuse(&reader, ".npy version %d.%d is not read; 1.0, 2.0 and 3.0 are", prefix[6], prefix[7]);
    size_t prefix_bytes = version == 1 ? PREFIX_V1 : PREFIX_V2;
    if (count < prefix_bytes)
        return refuse(&reader, "truncated .npy file: it ends inside the header");
    uint32_t header_bytes = prefix[8] | (uint32_t)prefix[9] << 8;
    if (version > 1)
        header_bytes |= (uint32_t)prefix[10] << 16 | (uint32_t)prefix[11] << 24;
    if ((int64_t)header_bytes > file_bytes - (int64_t)prefix_bytes)
        return refuse(&reader, "truncated .npy file: a header of %" PRIu32 " bytes reaches past the end of the file",
                      header_bytes);
    if (header_bytes > NPY_MAX_HEADER_BYTES || header_bytes > count - prefix_bytes)
        return refuse(&reader, "a .npy header of %" PRIu32 " bytes is longer than the %d that this program reads",
                      header_bytes, NPY_MAX_HEADER_BYTES);
    reader.at = (const char *)bytes + prefix_bytes;
    reader.end = reader.at + header_bytes;
    header->data_offset = (int64_t)(prefix_bytes + header_bytes);
    if (!read_dict(&reader, header))
        return false;

    /* Zeros do not hide an overflow: strides are products of the other sizes. */
    int64_t product = 1;
    bool empty = false;
    for (int32_t i = 0; i < header->ndim; i++) {
        if (header->shape[i] == 0)
            empty = true;
        else if (__builtin_mul_overflow(product, header->shape[i], &product))
            return refuse(&reader, "shape: the product of the sizes overflows");
    }
    int64_t data_bytes;
    if (__builtin_mul_overflow(product, (int64_t)header->item_bytes, &data_bytes))
        return refuse(&reader, "shape: the product of the sizes overflows");
    header->elements = empty ? 0 : product;
    if (!empty && data_bytes > file_bytes - header->data_offset)
        return refuse(&reader,
                      "truncated .npy file: the header promises %" PRId64 " bytes of data, the file holds %" PRId64,
                      data_bytes, file_bytes - header->data_offset);
    return true;
}

void npy_shape_text(char *out, size_t out_bytes, int32_t ndim, const int64_t *shape)
{
    size_t length = (size_t)snprintf(out, out_bytes, "(");
    for (int32_t i = 0; i < ndim && length < out_bytes; i++)
        length += (size_t)snprintf(out + length, out_bytes - length, "%s%" PRId64, i ? ", " : "", shape[i]);
    if (length < out_bytes)
        snprintf(out + length, out_bytes - length, ndim == 1 ? ",)" : ")");
}

size_t npy_write_header(char out[NPY_WRITTEN_HEADER_BYTES], const char *descr, int32_t ndim, const int64_t *shape)
{
    enum { ALIGNMENT = 64 };
    char sizes[256];
    npy_shape_text(sizes, sizeof sizes, ndim, shape);
    memcpy(out, "\x93NUMPY\1\0", 8);
    size_t length =
        PREFIX_V1 + (size_t)snprintf(out + PREFIX_V1, NPY_WRITTEN_HEADER_BYTES - PREFIX_V1,
                                     "{'descr': '%s', 'fortran_order': False, 'shape': %s, }", descr, sizes);
    size_t padded = (length + 1 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    memset(out + length, ' ', padded - length);
    out[padded - 1] = '\n';
    out[8] = (char)((padded - PREFIX_V1) & 0xff);
    out[9] = (char)((padded - PREFIX_V1) >> 8);
    return padded;
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

static ssize_t read_beginning(int descriptor, char *buffer, size_t bytes)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t got = pread(descriptor, buffer + done, bytes - done, (off_t)done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        done += (size_t)got;
    }
    return (ssize_t)done;
}

bool npy_open(struct npy_file *file, const char *path, char *error, size_t error_bytes)
{
    struct reader reader = {.error = error, .error_bytes = error_bytes};
    struct stat status;
    /* Opening a FIFO for reading would wait for a writer. */
    file->descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->descriptor < 0)
        return refuse(&reader, "%s", strerror(errno));
    char *beginning = NULL;
    bool good = false;
    if (fstat(file->descriptor, &status) != 0) {
        refuse(&reader, "%s", strerror(errno));
    } else if (!S_ISREG(status.st_mode)) {
        refuse(&reader, "%s", S_ISDIR(status.st_mode) ? "is a directory" : "is not a regular file");
    } else {
        file->file_bytes = (int64_t)status.st_size;
        size_t most = NPY_MAX_HEADER_BYTES + PREFIX_V2;
        size_t wanted = (uint64_t)file->file_bytes < most ? (size_t)file->file_bytes : most;
        beginning = malloc(wanted + 1);
        ssize_t got = beginning ? read_beginning(file->descriptor, beginning, wanted) : -1;
        if (got < 0)
            refuse(&reader, "%s", strerror(errno));
        else
            good = npy_parse_header(beginning, (size_t)got, file->file_bytes, &file->header, error, error_bytes);
    }
    free(beginning);
    if (!good)
        npy_close(file);
    return good;
}

void npy_close(struct npy_file *file)
{
    if (file->descriptor >= 0)
        close(file->descriptor);
    file->descriptor = -1;
}

const void *npy_map(struct npy_window *window, const struct npy_file *file, int64_t offset, size_t bytes)
{
    npy_unmap(window);
    int64_t page = (int64_t)sysconf(_SC_PAGESIZE);
    int64_t begin = offset / page * page;
    size_t length = bytes + (size_t)(offset - begin);
    void *base = mmap(NULL, length, PROT_READ, MAP_SHARED, file->descriptor, (off_t)begin);
    if (base == MAP_FAILED)
        return NULL;
    window->base = base;
    window->bytes = length;
    /* Advice only: the kernel starts to read ahead. */
    (void)madvise(base, length, MADV_WILLNEED);
    return (const char *)base + (offset - begin);
}

void npy_unmap(struct npy_window *window)
{
    if (window->base)
        munmap(window->base, window->bytes);
    window->base = NULL;
    window->bytes = 0;
}
