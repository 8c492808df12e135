/* SPDX-License-Identifier: MIT
 *
 * arguments.c - reads options from a table and prints the help of the same table. */
#include "arguments.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "report.h"
#include "suggest.h"

static const struct option help_option = {"help", 'h', NULL, "Print this help and leave."};

/* ---- reading --------------------------------------------------------------------------------------------------- */

/* The option of this name or of the only name that starts so; -1: --help. Ends the program when there is none. */
static int find_long(const struct command *command, const char *name, size_t length)
{
    int found = -2;
    for (int i = -1; i < command->option_count; i++) {
        const char *candidate = i < 0 ? help_option.name : command->options[i].name;
        if (strncmp(candidate, name, length) != 0)
            continue;
        if (candidate[length] == '\0')
            return i;
        if (found != -2)
            report_usage(command->name, "option '--%.*s' is ambiguous", (int)length, name);
        found = i;
    }
    if (found == -2) {
        const char *names[ARGUMENTS_MAX_OPTIONS + 1] = {help_option.name};
        for (int i = 0; i < command->option_count; i++)
            names[i + 1] = command->options[i].name;
        report_usage(command->name, "unknown option '--%.*s'%s", (int)length, name,
                     suggest_words("--", name, length, names, command->option_count + 1));
    }
    return found;
}

static int find_letter(const struct command *command, char letter)
{
    if (letter == help_option.letter)
        return -1;
    for (int i = 0; i < command->option_count; i++)
        if (command->options[i].letter == letter)
            return i;
    report_usage(command->name, "unknown option '-%c'", letter);
}

static void show_help(const struct command *command)
{
    arguments_help(command);
    exit(report_finish(CODE_OK));
}

void arguments_read(struct arguments *arguments, const struct command *command, int count, char **given)
{
    memset(arguments, 0, sizeof *arguments);
    arguments->command = command;
    arguments->words = given;
    for (int i = 0; i < count; i++) {
        char *word = given[i];
        if (word[0] != '-' || word[1] == '\0') {
            given[arguments->word_count++] = word;
            continue;
        }
        if (strcmp(word, "--") == 0) {
            while (++i < count)
                given[arguments->word_count++] = given[i];
            break;
        }
        int option;
        const char *value = NULL;
        if (word[1] == '-') {
            size_t length = strcspn(word + 2, "=");
            option = find_long(command, word + 2, length);
            if (word[2 + length] == '=')
                value = word + 2 + length + 1;
            if (option < 0 && !value)
                show_help(command);
            if (value && (option < 0 || !command->options[option].value))
                report_usage(command->name, "option '--%.*s' takes no value", (int)length, word + 2);
        } else {
            option = find_letter(command, word[1]);
            if (option < 0)
                show_help(command);
            if (word[2] != '\0') {
                if (!command->options[option].value)
                    report_usage(command->name, "option '-%c' takes no value", word[1]);
                value = word + 2;
            }
        }
        if (!command->options[option].value) {
            arguments->values[option] = "";
            continue;
        }
        if (!value) {
            if (i + 1 >= count)
                report_usage(command->name, "option '--%s' needs a value: %s", command->options[option].name,
                             command->options[option].value);
            value = given[++i];
        }
        if (value[0] == '\0')
            report_usage(command->name, "option '--%s': the value is empty", command->options[option].name);
        arguments->values[option] = value;
    }
}

static int64_t scaled_number(const struct arguments *arguments, int option, int64_t least, int64_t most, bool suffix)
{
    const char *text = arguments->values[option];
    const char *name = arguments->command->options[option].name;
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    bool overflow = errno == ERANGE;
    if (suffix && end != text && *end != '\0') {
        const char *units = "KMG";
        const char *unit = strchr(units, toupper((unsigned char)*end));
        if (unit && (end[1] == '\0' || strcasecmp(end + 1, "iB") == 0)) {
            overflow |= __builtin_mul_overflow(number, 1LL << (10 * (unit - units + 1)), &number);
            end += strlen(end);
        }
    }
    if (end == text || *end != '\0')
        report_usage(arguments->command->name, "option '--%s': '%s' is not a number%s", name, text,
                     suffix ? " of bytes (4096, 64K, 256MiB, 1G)" : "");
    if (overflow || number < least || number > most)
        report_usage(arguments->command->name, "option '--%s': '%s' is not between %lld and %lld", name, text,
                     (long long)least, (long long)most);
    return number;
}

int64_t arguments_number(const struct arguments *arguments, int option, int64_t least, int64_t most, int64_t absent)
{
    return arguments->values[option] ? scaled_number(arguments, option, least, most, false) : absent;
}

int64_t arguments_bytes(const struct arguments *arguments, int option, int64_t absent)
{
    return arguments->values[option] ? scaled_number(arguments, option, 1, INT64_MAX / 4, true) : absent;
}

/* ---- help ------------------------------------------------------------------------------------------------------ */

enum { HELP_WIDTH = 79, HELP_INDENT = 12 };

static void print_option(const struct option *option)
{
    printf("    ");
    if (option->letter)
        printf("-%c, ", option->letter);
    printf("--%s%s%s\n", option->name, option->value ? " " : "", option->value ? option->value : "");
    for (const char *text = option->help; *text;) {
        size_t room = HELP_WIDTH - HELP_INDENT;
        size_t length = strcspn(text, "\n");
        if (length > room) {
            length = room;
            while (length > 0 && text[length] != ' ')
                length--;
        }
        printf("%*s%.*s\n", HELP_INDENT, "", (int)length, text);
        text += length;
        while (*text == ' ' || *text == '\n')
            text++;
    }
}

static void print_indented(const char *text)
{
    while (*text) {
        size_t length = strcspn(text, "\n");
        printf("%s%.*s\n", length ? "    " : "", (int)length, text);
        text += length;
        if (*text == '\n')
            text++;
    }
}

void arguments_help(const struct command *command)
{
    printf("NAME\n    normfuse %s - %s\n\nSYNOPSIS\n", command->name, command->summary);
    for (const char *line = command->synopsis; *line;) {
        size_t length = strcspn(line, "\n");
        printf("    %s%.*s\n", line[0] == ' ' ? "" : "normfuse ", (int)length, line);
        line += length;
        if (*line == '\n')
            line++;
    }
    printf("\nDESCRIPTION\n");
    print_indented(command->description);
    printf("\nOPTIONS\n");
    for (int i = 0; i < command->option_count; i++)
        print_option(&command->options[i]);
    print_option(&help_option);
    for (int i = 0; i < 2; i++)
        if (command->sections[i])
            printf("\n%s", command->sections[i]);
    printf("\nEXIT STATUS\n"
           "    0   Everything went well.\n"
           "    1   A check failed (normfuse check).\n"
           "    2   The command line is wrong.\n"
           "    3   Something is wrong with a file or with what it holds, an output could not be\n"
           "        written, or this build or machine cannot run the problem.\n");
}
