/* SPDX-License-Identifier: MIT
 *
 * main.c - the program `normfuse`: finds the subcommand. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "report.h"
#include "suggest.h"

static const struct command *const commands[] = {&info_command, &run_command, &check_command, &bench_command,
                                                 &compile_command};
enum { COMMAND_COUNT = sizeof commands / sizeof commands[0] };

const char problem_help[] =
    "PROBLEMS\n"
    "    A problem is an operator, its sizes and KEY=VALUE words, as separate words or quoted as\n"
    "    one; the name of an operator begins the next one:\n"
    "\n"
    "        group_norm 128x256x28x28 groups=32 dtype=bf16 layout=nhwc act=silu dir=bwd\n"
    "\n"
    "    @FILE stands for the problems in FILE, one a line; # begins a comment. The sizes are N, C\n"
    "    and up to three spatial ones, in this order whatever the layout.\n"
    "\n"
    "    group_norm, instance_norm, batch_norm, affine, channel_norm\n"
    "                       the operators; channel_norm on CUDA is channels last\n"
    "    groups=G           group_norm, required: number of groups; channel_norm: of them (1)\n"
    "    stat=layer|rms     channel_norm: mean and variance (default), or the mean square\n"
    "    eps_kind=added|norm\n"
    "                       channel_norm: eps is added under the root (default), or the least\n"
    "                       L2 norm\n"
    "    dtype=f64|f32|f16|bf16\n"
    "                       of the tensors (f32)\n"
    "    weight_dtype=...   of weight and bias (the tensors')\n"
    "    y_dtype=...        channel_norm: of y, dy and post_add (the tensors'); bench takes none\n"
    "    layout=nchw|nhwc   channels first (default) or last in memory\n"
    "    act=NAME           identity (default), or one of these; prelu has a tensor [C]:\n"
    "       "
#define ACTIVATION(number, name, parameter) " " #name
#include "src/activations.def"
#undef ACTIVATION
    "\n"
    "    act_param=V        slope of leaky_relu (0.01), alpha of elu (1)\n"
    "    mode=train|eval    batch_norm: statistics of the batch (default) or running ones\n"
    "    per=channel|sample affine: weight and bias are [C] (default) or [N, C]\n"
    "    eps=V              added to the variance (1e-5)\n"
    "    dir=fwd|bwd        forward (default), or dx, dweight and dbias from given mean and rstd\n"
    "    device=cpu|cuda    cpu\n"
    "    +pre_add           u = x + pre_add is normalized\n"
    "    +pre_bias          u = x + pre_bias [C] is normalized; backward writes dpre_bias\n"
    "    +pre_bias=sample   the same of [N, C]\n"
    "    +u                 with these: forward writes u; backward takes it, and du\n"
    "    +post_add          added before the activation; backward writes its gradient\n"
    "    +scale             group_norm, instance_norm, channel_norm: scale and shift, [N, C]\n"
    "    +one_slope         act=prelu: the slope is [1]\n"
    "    +mixed             all tensors of x's sizes, but not x, have the other layout;\n"
    "                       +mixed=inputs, +mixed=outputs: these of them\n";

static void print_help(void)
{
    printf("NAME\n"
           "    normfuse - normalization layers of neural networks\n"
           "\n"
           "SYNOPSIS\n"
           "    normfuse COMMAND [WORD]... [OPTION]...\n"
           "    normfuse --help | --version\n"
           "\n"
           "DESCRIPTION\n"
           "    Runs group norm, instance norm, batch norm, channel norm and channel affine, forward and\n"
           "    backward, on NumPy .npy files; checks them against a double-precision reference; and\n"
           "    times them beside the fastest copy that this machine makes.\n"
           "\n"
           "    Options are --name VALUE or --name=VALUE, in any order with the words; -- ends them.\n"
           "\n"
           "COMMANDS\n");
    for (int i = 0; i < COMMAND_COUNT; i++)
        printf("    %-8s%s\n", commands[i]->name, commands[i]->summary);
    printf("\n"
           "    'normfuse COMMAND --help' tells all about one.\n"
           "\n"
           "OPTIONS\n"
           "    -h, --help\n"
           "            Print this help and leave.\n"
           "    -V, --version\n"
           "            Print the version and leave.\n"
           "\n%s\n"
           "ENVIRONMENT\n"
           "    NORMFUSE_NUM_THREADS   threads used by default\n"
           "    NORMFUSE_MAX_ISA       scalar, avx2, avx512, avx512bf16 or neon: no better one is used\n"
           "    NORMFUSE_VERBOSE       dispatch: print which kernels run, and why\n"
           "                           plan: on a GPU, what each schedule would take\n"
           "                           compile: on a GPU, what is compiled, and where the source is\n"
           "    NORMFUSE_NVRTC         the libnvrtc.so that compiles kernels of GPUs\n"
           "    NORMFUSE_CACHE_DIR     the folder that they are kept in; empty: none\n"
           "\n"
           "EXIT STATUS\n"
           "    0   Everything went well.\n"
           "    1   A check failed (normfuse check).\n"
           "    2   The command line is wrong.\n"
           "    3   Something is wrong with a file or with what it holds, an output could not be\n"
           "        written, or this build or machine cannot run the problem.\n"
           "\n"
           "EXAMPLES\n"
           "    normfuse run group_norm x.npy groups=32 act=silu -o y.npy --weight w.npy --bias b.npy\n"
           "    normfuse check group_norm 2x320x64x64 groups=32 dtype=bf16 act=silu\n"
           "    normfuse bench 'batch_norm 32x512x28x28' 'batch_norm 32x512x28x28 dir=bwd' --threads 2\n"
           "    normfuse info\n",
           problem_help);
}

static const struct command *find_command(const char *word)
{
    for (int i = 0; i < COMMAND_COUNT; i++)
        if (strcmp(word, commands[i]->name) == 0)
            return commands[i];
    return NULL;
}

/* A file that is opened while one of these is closed would get its number, and the messages. They are opened for the
 * opposite of their use, so that reading and writing still fail. */
static void open_standard_files(void)
{
    for (int i = STDIN_FILENO; i <= STDERR_FILENO; i++)
        if (fcntl(i, F_GETFD) < 0 && open("/dev/null", i == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0)
            report_failure("/dev/null", "%s", strerror(errno));
}

int main(int count, char **words)
{
    open_standard_files();
    /* A closed pipe and a limit of file sizes shall be errors of write, with a message and a code. */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    if (count < 2)
        report_usage(NULL, "no command\n"
                           "usage:    normfuse COMMAND [WORD]... [OPTION]...\n"
                           "commands: info, run, check, bench, compile\n"
                           "example:  normfuse check group_norm 2x320x64x64 groups=32 act=silu");
    /* Options may come before the command: its name is the first word that is one. */
    for (int i = 1; i < count && strcmp(words[i], "--") != 0; i++) {
        const struct command *command = find_command(words[i]);
        if (!command)
            continue;
        struct arguments arguments;
        memmove(words + 2, words + 1, (size_t)(i - 1) * sizeof *words);
        arguments_read(&arguments, command, count - 2, words + 2);
        return report_finish(command->main(&arguments));
    }
    for (int i = 1; i < count; i++) {
        if (strcmp(words[i], "--help") == 0 || strcmp(words[i], "-h") == 0) {
            print_help();
            return report_finish(CODE_OK);
        }
        if (strcmp(words[i], "--version") == 0 || strcmp(words[i], "-V") == 0) {
            printf("normfuse %s\n", normfuse_version());
            return report_finish(CODE_OK);
        }
    }
    if (words[1][0] == '-')
        report_usage(NULL, "unknown option '%s'", words[1]);
    const char *names[COMMAND_COUNT];
    for (int i = 0; i < COMMAND_COUNT; i++)
        names[i] = commands[i]->name;
    report_usage(NULL, "unknown command '%s': info, run, check, bench or compile%s", words[1],
                 suggest_words("", words[1], strlen(words[1]), names, COMMAND_COUNT));
}
