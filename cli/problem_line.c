/* SPDX-License-Identifier: MIT
 *
 * problem_line.c - the one spelling of a problem: see problem_line.h. */
#define _GNU_SOURCE
#include "problem_line.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "suggest.h"

/* The longest word that a problem may hold; a longer one is not a problem's. */
enum { WORD_BYTES = 256 };

/* More words than every key once, the operator and the sizes. */
enum { MAX_WORDS = 32 };

static const char *const operator_names[] = { "group_norm", "instance_norm", "batch_norm", "affine", "channel_norm" };
static const char *const type_names[] = { "f64", "f32", "f16", "bf16" };
static const char *const activation_names[] = {
#define ACTIVATION(number, name, parameter) #name,
#include "src/activations.def"
#undef ACTIVATION
};
static const char *const layout_names[] = { "nchw", "nhwc" };
static const char *const mode_names[] = { "train", "eval" };
static const char *const per_names[] = { "channel", "sample" };
static const char *const statistics_names[] = { "layer", "rms" };
static const char *const eps_kind_names[] = { "added", "norm" };
static const char *const direction_names[] = { "fwd", "bwd" };
static const char *const device_names[] = { "cpu", "cuda" };
static const char *const key_names[] = { "groups", "dtype", "weight_dtype", "y_dtype", "layout", "act", "act_param",
                                         "mode", "per", "stat", "eps_kind", "eps", "dir", "device" };

/* Names of these values in other libraries. */
static const struct {
    const char *word, *name;
} other_names[] = {
    { "float64", "f64" },         { "double", "f64" },           { "fp64", "f64" },
    { "float32", "f32" },         { "float", "f32" },            { "fp32", "f32" },
    { "float16", "f16" },         { "half", "f16" },             { "fp16", "f16" },
    { "bfloat16", "bf16" },       { "swish", "silu" },           { "none", "identity" },
    { "leakyrelu", "leaky_relu" }, { "hard_swish", "hardswish" }, { "channels_first", "nchw" },
    { "channels_last", "nhwc" },  { "forward", "fwd" },          { "backward", "bwd" },
    { "gpu", "cuda" },
};

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* +adagn is what +scale was called before. */
static const struct {
    const char *word;
    size_t offset;
} additions[] = {
    { "+pre_add", offsetof(struct problem_line, pre_add) },
    { "+pre_bias", offsetof(struct problem_line, pre_bias) },
    { "+pre_bias=sample", offsetof(struct problem_line, sample_bias) },
    { "+u", offsetof(struct problem_line, write_u) },
    { "+post_add", offsetof(struct problem_line, post_add) },
    { "+scale", offsetof(struct problem_line, scale_shift) },
    { "+adagn", offsetof(struct problem_line, scale_shift) },
    { "+one_slope", offsetof(struct problem_line, one_slope) },
    { "+mixed", offsetof(struct problem_line, mixed) },
    { "+mixed=inputs", offsetof(struct problem_line, mixed_inputs) },
    { "+mixed=outputs", offsetof(struct problem_line, mixed_outputs) },
};

static const double default_eps = 1e-5;

const char *problem_operator_name(enum problem_operator op)
{
    return (int)op >= 0 && (int)op < COUNT(operator_names) ? operator_names[op] : "?";
}

const char *problem_type_name(normfuse_type type)
{
    return (int)type >= 0 && (int)type < COUNT(type_names) ? type_names[type] : "?";
}

const char *problem_activation_name(int32_t activation)
{
    return activation >= 0 && activation < COUNT(activation_names) ? activation_names[activation] : "?";
}

static bool takes_act_param(int32_t activation)
{
    return activation == NORMFUSE_LEAKY_RELU || activation == NORMFUSE_ELU;
}

static double default_act_param(int32_t activation)
{
    return activation == NORMFUSE_LEAKY_RELU ? 0.01 : activation == NORMFUSE_ELU ? 1.0 : 0.0;
}

struct problem_line problem_line_default(enum problem_operator op)
{
    return (struct problem_line){ .op = op,
                                  .type = NORMFUSE_F32,
                                  .weight_type = NORMFUSE_F32,
                                  .activation = NORMFUSE_IDENTITY,
                                  .eps = default_eps,
                                  .groups = op == CHANNEL_NORM,
                                  .device = NORMFUSE_CPU };
}

/* Index in names of a value, in capitals or small letters, or of what other libraries call it; -1. */
static int find_value(const char *const *names, int count, const char *text)
{
    for (int i = 0; i < COUNT(other_names); i++)
        if (strcasecmp(other_names[i].word, text) == 0)
            text = other_names[i].name;
    for (int i = 0; i < count; i++)
        if (strcasecmp(names[i], text) == 0)
            return i;
    return -1;
}

/* Index of `text` in names, or -1. */
static int find_name(const char *const *names, int count, const char *text)
{
    for (int i = 0; i < count; i++)
        if (strcmp(names[i], text) == 0)
            return i;
    return -1;
}

__attribute__((format(printf, 3, 4))) static void complain(char *error, size_t error_bytes, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (error_bytes)
        vsnprintf(error, error_bytes, format, arguments);
    va_end(arguments);
}

/* A value out of a list of names; -1 with a message that lists them. */
static int parse_choice(const char *const *names, int count, const char *word, const char *value, char *error,
                        size_t error_bytes)
{
    int found = find_value(names, count, value);
    if (found >= 0)
        return found;
    char list[160] = "";
    for (int i = 0; i < count; i++) {
        strncat(list, i ? ", " : "", sizeof list - strlen(list) - 1);
        strncat(list, names[i], sizeof list - strlen(list) - 1);
    }
    complain(error, error_bytes, "'%.80s': the value must be one of %s%s", word, list,
             suggest_words("", value, strlen(value), names, count));
    return -1;
}

static bool parse_number(const char *word, const char *value, double *number, char *error, size_t error_bytes)
{
    char *end;
    *number = strtod(value, &end);
    if (end != value && !*end && isfinite(*number))
        return true;
    complain(error, error_bytes, "'%.80s': the value must be a finite number", word);
    return false;
}

/* Decimal digits only, up to `end`; false when there are none or the value is beyond int64_t. */
static bool parse_size(const char *text, const char *end, int64_t *size)
{
    if (text == end)
        return false;
    int64_t value = 0;
    for (; text < end; text++) {
        if (*text < '0' || *text > '9')
            return false;
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *text - '0', &value))
            return false;
    }
    *size = value;
    return true;
}

enum key_result { KEY_TAKEN, KEY_UNKNOWN, KEY_BAD };

/* dtype sets weight_type too, so that weight_dtype, where it is given, must come after it. */
int problem_line_key(struct problem_line *line, const char *word, char *error, size_t error_bytes)
{
    const char *equals = strchr(word, '=');
    if (!equals) {
        complain(error, error_bytes, "'%.80s': not a key=value word", word);
        return KEY_UNKNOWN;
    }
    size_t key_bytes = (size_t)(equals - word);
    const char *value = equals + 1;
#define IS(name) (key_bytes == sizeof(name) - 1 && memcmp(word, name, sizeof(name) - 1) == 0)
#define CHOICE(names) parse_choice(names, COUNT(names), word, value, error, error_bytes)
    int choice;
    double number;
    if (IS("groups") && (line->op == GROUP_NORM || line->op == CHANNEL_NORM)) {
        int64_t groups;
        if (!parse_size(value, value + strlen(value), &groups) || groups < 1) {
            complain(error, error_bytes, "'%.80s': groups must be a whole number above 0", word);
            return KEY_BAD;
        }
        line->groups = groups;
    } else if (IS("dtype")) {
        if ((choice = CHOICE(type_names)) < 0)
            return KEY_BAD;
        line->type = line->weight_type = (normfuse_type)choice;
    } else if (IS("weight_dtype")) {
        if ((choice = CHOICE(type_names)) < 0)
            return KEY_BAD;
        line->weight_type = (normfuse_type)choice;
    } else if (IS("y_dtype") && line->op == CHANNEL_NORM) {
        if ((choice = CHOICE(type_names)) < 0)
            return KEY_BAD;
        line->y_type = (normfuse_type)choice;
        line->has_y_type = true;
    } else if (IS("layout")) {
        if ((choice = CHOICE(layout_names)) < 0)
            return KEY_BAD;
        line->channels_last = choice == 1;
    } else if (IS("act")) {
        if ((choice = CHOICE(activation_names)) < 0)
            return KEY_BAD;
        line->activation = choice;
    } else if (IS("act_param")) {
        if (!parse_number(word, value, &number, error, error_bytes))
            return KEY_BAD;
        line->has_act_param = true;
        line->act_param = number;
    } else if (IS("mode") && line->op == BATCH_NORM) {
        if ((choice = CHOICE(mode_names)) < 0)
            return KEY_BAD;
        line->evaluate = choice == 1;
    } else if (IS("per") && line->op == AFFINE) {
        if ((choice = CHOICE(per_names)) < 0)
            return KEY_BAD;
        line->per_sample = choice == 1;
    } else if (IS("stat") && line->op == CHANNEL_NORM) {
        if ((choice = CHOICE(statistics_names)) < 0)
            return KEY_BAD;
        line->statistics = choice;
    } else if (IS("eps_kind") && line->op == CHANNEL_NORM) {
        if ((choice = CHOICE(eps_kind_names)) < 0)
            return KEY_BAD;
        line->eps_kind = choice;
    } else if (IS("eps") && line->op != AFFINE) {
        if (!parse_number(word, value, &number, error, error_bytes))
            return KEY_BAD;
        line->eps = number;
    } else if (IS("dir")) {
        if ((choice = CHOICE(direction_names)) < 0)
            return KEY_BAD;
        line->backward = choice == 1;
    } else if (IS("device")) {
        if ((choice = CHOICE(device_names)) < 0)
            return KEY_BAD;
        line->device = choice == 1 ? NORMFUSE_CUDA : NORMFUSE_CPU;
    } else {
        bool exists = IS("groups") || IS("mode") || IS("per") || IS("eps") || IS("stat") || IS("eps_kind") || IS("y_dtype");
        if (exists)
            complain(error, error_bytes, "'%.80s': %s does not take this key", word, problem_operator_name(line->op));
        else
            complain(error, error_bytes, "'%.80s': not a key of %s%s", word, problem_operator_name(line->op),
                     suggest_words("", word, key_bytes, key_names, COUNT(key_names)));
        return KEY_UNKNOWN;
    }
#undef IS
#undef CHOICE
    return KEY_TAKEN;
}

static bool take_addition(struct problem_line *line, const char *word, char *error, size_t error_bytes)
{
    for (int i = 0; i < COUNT(additions); i++)
        if (strcmp(word, additions[i].word) == 0) {
            *(bool *)((char *)line + additions[i].offset) = true;
            return true;
        }
    const char *names[COUNT(additions)];
    for (int i = 0; i < COUNT(additions); i++)
        names[i] = additions[i].word;
    complain(error, error_bytes,
             "'%.80s': an addition must be one of +pre_add, +pre_bias, +pre_bias=sample, +u, +post_add, +scale, "
             "+one_slope, +mixed, +mixed=inputs, +mixed=outputs%s",
             word, suggest_words("", word, strlen(word), names, COUNT(additions)));
    return false;
}

/* "2x320x64x64". The elements in f64 must be addressable even where another axis is 0: views are made of strides. */
static bool parse_sizes(const char *word, struct problem_line *line, char *error, size_t error_bytes)
{
    int32_t ndim = 0;
    int64_t bytes = (int64_t)sizeof(double);
    for (const char *text = word;; ndim++) {
        const char *end = strchr(text, 'x');
        const char *stop = end ? end : text + strlen(text);
        if (ndim == NORMFUSE_MAX_AXES) {
            complain(error, error_bytes, "'%.80s': sizes are N, C and at most 3 spatial axes", word);
            return false;
        }
        for (const char *digit = text; digit < stop; digit++)
            if (*digit < '0' || *digit > '9')
                stop = text;
        if (stop == text) {
            complain(error, error_bytes, "'%.80s': sizes must be 2 to 5 whole numbers joined by x, like 2x320x64x64",
                     word);
            return false;
        }
        int64_t size;
        if (!parse_size(text, stop, &size) || (size && __builtin_mul_overflow(bytes, size, &bytes))) {
            complain(error, error_bytes, "'%.80s': the sizes overflow", word);
            return false;
        }
        line->sizes[ndim] = size;
        if (!end)
            break;
        text = end + 1;
    }
    line->ndim = ndim + 1;
    if (line->ndim < 2) {
        complain(error, error_bytes, "'%.80s': sizes must be 2 to 5 whole numbers joined by x, like 2x320x64x64", word);
        return false;
    }
    return true;
}

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v';
}

/* The words of one problem, cut out of arguments. */
struct split_words {
    int count;
    char word[MAX_WORDS][WORD_BYTES];
};

/* Cuts words[0..count) at spaces, up to the next operator's name at the start of an argument. Returns the arguments
 * taken, 0 with a message. */
static size_t split_problem(char *const *words, size_t count, struct split_words *split, char *error,
                            size_t error_bytes)
{
    split->count = 0;
    for (size_t i = 0; i < count; i++) {
        bool first_of_argument = true;
        for (const char *text = words[i]; *text;) {
            if (is_space(*text)) {
                text++;
                continue;
            }
            size_t bytes = 0;
            while (text[bytes] && !is_space(text[bytes]))
                bytes++;
            if (bytes >= WORD_BYTES || split->count == MAX_WORDS) {
                complain(error, error_bytes, bytes >= WORD_BYTES ? "'%.40s...': the word is too long"
                                                                 : "'%.40s': too many words for one problem",
                         text);
                return 0;
            }
            char *word = split->word[split->count];
            memcpy(word, text, bytes);
            word[bytes] = 0;
            if (split->count && find_name(operator_names, COUNT(operator_names), word) >= 0) {
                if (first_of_argument)
                    return i;
                complain(error, error_bytes, "'%.80s': a quoted argument holds one problem only", word);
                return 0;
            }
            split->count++;
            first_of_argument = false;
            text += bytes;
        }
    }
    return count;
}

static size_t key_length(const char *word)
{
    const char *equals = strchr(word, '=');
    return equals ? (size_t)(equals - word) + 1 : strlen(word);
}

size_t problem_line_parse(char *const *words, size_t count, struct problem_line *line, char *error, size_t error_bytes)
{
    struct split_words split;
    size_t taken = split_problem(words, count, &split, error, error_bytes);
    if (!taken && count)
        return 0;
    if (!split.count) {
        complain(error, error_bytes, "a problem must start with an operator: group_norm, instance_norm, batch_norm, "
                                     "affine, channel_norm");
        return 0;
    }
    int op = find_name(operator_names, COUNT(operator_names), split.word[0]);
    if (op < 0) {
        complain(error, error_bytes,
                 "'%.80s': a problem must start with an operator: group_norm, instance_norm, batch_norm, affine, "
                 "channel_norm%s",
                 split.word[0],
                 suggest_words("", split.word[0], strlen(split.word[0]), operator_names, COUNT(operator_names)));
        return 0;
    }
    *line = problem_line_default((enum problem_operator)op);
    if (split.count < 2) {
        complain(error, error_bytes, "'%s': the sizes are missing, like 2x320x64x64", split.word[0]);
        return 0;
    }
    if (!parse_sizes(split.word[1], line, error, error_bytes))
        return 0;
    /* dtype first: it sets weight_dtype's default. */
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 2; i < split.count; i++) {
            const char *word = split.word[i];
            size_t key_bytes = key_length(word);
            for (int other = 2; other < i; other++) {
                if (key_length(split.word[other]) == key_bytes && memcmp(split.word[other], word, key_bytes) == 0) {
                    complain(error, error_bytes, "'%.80s': the key is given twice", word);
                    return 0;
                }
            }
            if (word[0] == '+') {
                if (!take_addition(line, word, error, error_bytes))
                    return 0;
                continue;
            }
            bool is_dtype = strncmp(word, "dtype=", 6) == 0;
            if (is_dtype == (pass == 0) && problem_line_key(line, word, error, error_bytes) != KEY_TAKEN)
                return 0;
        }
    }
    if (line->op == INSTANCE_NORM)
        line->groups = line->sizes[1];
    if (line->op == GROUP_NORM && !line->groups) {
        complain(error, error_bytes, "'%s': groups=N is required", split.word[0]);
        return 0;
    }
    if (line->op != INSTANCE_NORM && line->groups && line->sizes[1] % line->groups) {
        complain(error, error_bytes, "'groups=%lld': groups must divide C, which is %lld", (long long)line->groups,
                 (long long)line->sizes[1]);
        return 0;
    }
    int64_t bytes;
    bool overflows = __builtin_mul_overflow(line->sizes[0], line->groups, &bytes) ||
                     __builtin_mul_overflow(bytes, (int64_t)sizeof(double), &bytes);
    for (int32_t axis = 2; axis < line->ndim && line->op == CHANNEL_NORM; axis++)
        overflows |= __builtin_mul_overflow(bytes, line->sizes[axis], &bytes);
    if (overflows) {
        complain(error, error_bytes, "'groups=%lld': the statistics overflow", (long long)line->groups);
        return 0;
    }
    if (line->has_act_param && !takes_act_param(line->activation)) {
        complain(error, error_bytes, "'act_param': only leaky_relu and elu take it, not %s",
                 problem_activation_name(line->activation));
        return 0;
    }
    const normfuse_type y_type = problem_line_y_type(line);
    if (y_type != line->type && (line->type == NORMFUSE_F64 || y_type == NORMFUSE_F64 ||
                                 (line->type != NORMFUSE_F32 && y_type != NORMFUSE_F32))) {
        complain(error, error_bytes, "'y_dtype=%s': it must be dtype, or one of them f32 and the other one 16 bits",
                 problem_type_name(y_type));
        return 0;
    }
    if (line->pre_bias && line->sample_bias) {
        complain(error, error_bytes, "'+pre_bias=sample': +pre_bias is there, expected one of them");
        return 0;
    }
    if (line->mixed + line->mixed_inputs + line->mixed_outputs > 1) {
        complain(error, error_bytes, "'+mixed%s': another +mixed is there, expected one of them",
                 line->mixed_outputs ? "=outputs" : "=inputs");
        return 0;
    }
    if (line->write_u && !problem_line_adds(line)) {
        complain(error, error_bytes, "'+u': +pre_add or +pre_bias is missing, without which u is x");
        return 0;
    }
    if (line->scale_shift && (line->op == BATCH_NORM || line->op == AFFINE)) {
        complain(error, error_bytes, "'+scale': only group_norm, instance_norm and channel_norm take it, not %s",
                 problem_operator_name(line->op));
        return 0;
    }
    if (line->one_slope && line->activation != NORMFUSE_PRELU) {
        complain(error, error_bytes, "'+one_slope': only act=prelu has a slope, not %s",
                 problem_activation_name(line->activation));
        return 0;
    }
    return taken;
}

/* ---- names ---------------------------------------------------------------------------------------------------- */

/* snprintf at name + length, counting on past the end of the room. */
__attribute__((format(printf, 4, 5))) static size_t append(char *name, size_t bytes, size_t length, const char *format,
                                                           ...)
{
    va_list arguments;
    va_start(arguments, format);
    int more = vsnprintf(length < bytes ? name + length : NULL, length < bytes ? bytes - length : 0, format, arguments);
    va_end(arguments);
    return length + (more > 0 ? (size_t)more : 0);
}

/* The fewest digits that read back as the same double. */
static size_t append_number(char *name, size_t bytes, size_t length, const char *key, double value)
{
    char text[40];
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    return append(name, bytes, length, " %s=%s", key, text);
}

size_t problem_line_name(const struct problem_line *line, char *name, size_t bytes)
{
    size_t length = append(name, bytes, 0, "%s", problem_operator_name(line->op));
    for (int32_t i = 0; i < line->ndim; i++)
        length = append(name, bytes, length, "%c%lld", i ? 'x' : ' ', (long long)line->sizes[i]);
    if (line->op == GROUP_NORM || (line->op == CHANNEL_NORM && line->groups != 1))
        length = append(name, bytes, length, " groups=%lld", (long long)line->groups);
    if (line->statistics != NORMFUSE_MEAN_AND_VARIANCE)
        length = append(name, bytes, length, " stat=%s", statistics_names[line->statistics]);
    if (line->eps_kind != NORMFUSE_EPS_ADDED)
        length = append(name, bytes, length, " eps_kind=%s", eps_kind_names[line->eps_kind]);
    if (line->type != NORMFUSE_F32)
        length = append(name, bytes, length, " dtype=%s", problem_type_name(line->type));
    if (line->weight_type != line->type)
        length = append(name, bytes, length, " weight_dtype=%s", problem_type_name(line->weight_type));
    if (problem_line_y_type(line) != line->type)
        length = append(name, bytes, length, " y_dtype=%s", problem_type_name(line->y_type));
    if (line->channels_last)
        length = append(name, bytes, length, " layout=nhwc");
    if (line->activation != NORMFUSE_IDENTITY)
        length = append(name, bytes, length, " act=%s", problem_activation_name(line->activation));
    if (line->has_act_param && line->act_param != default_act_param(line->activation))
        length = append_number(name, bytes, length, "act_param", line->act_param);
    if (line->op == BATCH_NORM && line->evaluate)
        length = append(name, bytes, length, " mode=eval");
    if (line->op == AFFINE && line->per_sample)
        length = append(name, bytes, length, " per=sample");
    if (line->op != AFFINE && line->eps != default_eps)
        length = append_number(name, bytes, length, "eps", line->eps);
    if (line->backward)
        length = append(name, bytes, length, " dir=bwd");
    if (line->device == NORMFUSE_CUDA)
        length = append(name, bytes, length, " device=cuda");
    if (line->pre_add)
        length = append(name, bytes, length, " +pre_add");
    if (line->pre_bias)
        length = append(name, bytes, length, " +pre_bias");
    if (line->sample_bias)
        length = append(name, bytes, length, " +pre_bias=sample");
    if (line->write_u)
        length = append(name, bytes, length, " +u");
    if (line->post_add)
        length = append(name, bytes, length, " +post_add");
    if (line->scale_shift)
        length = append(name, bytes, length, " +scale");
    if (line->one_slope)
        length = append(name, bytes, length, " +one_slope");
    if (problem_line_is_mixed(line))
        length = append(name, bytes, length, " +mixed%s",
                        line->mixed ? "" : line->mixed_inputs ? "=inputs" : "=outputs");
    return length;
}

/* ---- lists of problems ---------------------------------------------------------------------------------------- */

struct line_list {
    struct problem_line *lines;
    size_t count, room;
};

static bool list_add(struct line_list *list, const struct problem_line *line)
{
    if (list->count == list->room) {
        size_t room = list->room ? 2 * list->room : 16;
        struct problem_line *lines = realloc(list->lines, room * sizeof *lines);
        if (!lines)
            return false;
        list->lines = lines;
        list->room = room;
    }
    list->lines[list->count++] = *line;
    return true;
}

const char problem_lines_no_memory[] = "out of memory";

/* One problem a line; # starts a comment. NULL or a message. */
static const char *read_file(const char *path, struct line_list *list, char *message, size_t message_bytes)
{
    FILE *file = fopen(path, "r");
    if (!file) {
        snprintf(message, message_bytes, "%s: %s", path, strerror(errno));
        return message;
    }
    char *text = NULL;
    size_t text_bytes = 0;
    const char *failure = NULL;
    errno = 0;
    for (long number = 1; !failure && getline(&text, &text_bytes, file) >= 0; number++) {
        text[strcspn(text, "#")] = 0;
        const char *start = text;
        while (is_space(*start))
            start++;
        if (!*start)
            continue;
        struct problem_line line;
        char error[400];
        if (!problem_line_parse(&text, 1, &line, error, sizeof error)) {
            snprintf(message, message_bytes, "%s:%ld: %s", path, number, error);
            failure = message;
        } else if (!list_add(list, &line)) {
            failure = problem_lines_no_memory;
        }
    }
    /* No memory for a line is no error of the file. */
    if (!failure && !feof(file)) {
        snprintf(message, message_bytes, "%s: %s", path, strerror(errno));
        failure = message;
    }
    free(text);
    fclose(file);
    return failure;
}

const char *problem_lines_read(int count, char *const *arguments, struct problem_line **lines, size_t *lines_count)
{
    static _Thread_local char message[1024];
    struct line_list list = { 0 };
    const char *failure = NULL;
    for (int at = 0; at < count && !failure;) {
        if (arguments[at][0] == '@') {
            failure = read_file(arguments[at] + 1, &list, message, sizeof message);
            at++;
            continue;
        }
        int end = at;
        while (end < count && arguments[end][0] != '@')
            end++;
        struct problem_line line;
        size_t taken = problem_line_parse(arguments + at, (size_t)(end - at), &line, message, sizeof message);
        if (!taken)
            failure = message;
        else if (!list_add(&list, &line))
            failure = problem_lines_no_memory;
        at += (int)taken;
    }
    if (failure) {
        free(list.lines);
        list.lines = NULL;
        list.count = 0;
    }
    *lines = list.lines;
    *lines_count = list.count;
    return failure;
}
