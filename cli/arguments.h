/* SPDX-License-Identifier: MIT
 *
 * arguments.h - the command line: one table of options for each subcommand drives both the parser and --help.
 *
 * Options are GNU style: --name VALUE, --name=VALUE, an unambiguous start of a name, -x VALUE, -xVALUE, in any order
 * with the words; "--" ends them. */
#ifndef NORMFUSE_CLI_ARGUMENTS_H
#define NORMFUSE_CLI_ARGUMENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct option {
    const char *name;  /* without the dashes */
    char letter;       /* 0: none */
    const char *value; /* what the value is called in the help; NULL: a flag */
    const char *help;
};

enum { ARGUMENTS_MAX_OPTIONS = 48 };

struct arguments;

struct command {
    const char *name;
    const char *summary;     /* a few words, lower case */
    const char *synopsis;    /* lines, each without the program's name */
    const char *description; /* paragraphs, already broken into lines */
    const struct option *options;
    int option_count;
    const char *sections[2]; /* what follows OPTIONS in the help, headings included; NULL: none */
    int (*main)(const struct arguments *arguments); /* returns the exit code */
};

struct arguments {
    const struct command *command;
    const char *values[ARGUMENTS_MAX_OPTIONS]; /* by index into command->options; "" for a flag; NULL: not given */
    char **words;
    int word_count;
};

/* Reads arguments[0..count), without the program's and the command's name. Ends the program on a usage error and after
 * --help. The words point into the given array. */
void arguments_read(struct arguments *arguments, const struct command *command, int count, char **given);

/* Prints the help of a command as a manual page does. */
void arguments_help(const struct command *command);

/* The value of an option as a number of the given range, or `absent` when it was not given; a usage error otherwise. */
int64_t arguments_number(const struct arguments *arguments, int option, int64_t least, int64_t most, int64_t absent);

/* The same for a number of bytes: 4096, 64K, 64KiB, 256M, 1G. */
int64_t arguments_bytes(const struct arguments *arguments, int option, int64_t absent);

static inline bool arguments_has(const struct arguments *arguments, int option)
{
    return arguments->values[option] != NULL;
}

#endif
