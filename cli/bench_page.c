/* SPDX-License-Identifier: MIT
 *
 * bench_page.c - writes the page as XHTML that HTML parsers read too: every element is closed, every text escaped. */
#define _GNU_SOURCE
#include "bench_page.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "report.h"

/* Okabe and Ito's blue and vermilion, which all kinds of colour vision tell apart; forward and backward differ in
 * shape, too. */
static const char style[] =
    ":root { color-scheme: light dark; --page: #ffffff; --text: #20242c; --dim: #5a6270; --grid: #d5d9e0;\n"
    "        --fwd: #0067a5; --bwd: #c14a00 }\n"
    "@media (prefers-color-scheme: dark) {\n"
    ":root { --page: #16191f; --text: #e7eaf0; --dim: #aab2c0; --grid: #3b414c; --fwd: #64b5f6; --bwd: #ff9a5c } }\n"
    "body { background: var(--page); color: var(--text); font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto;\n"
    "       max-width: 76rem; padding: 0 1rem }\n"
    "table { border-collapse: collapse; margin: 1rem 0 } th { text-align: left; font-weight: 600 }\n"
    "th, td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--grid); vertical-align: top }\n"
    ".n { text-align: right; font-variant-numeric: tabular-nums } .scroll { overflow-x: auto }\n"
    "svg { width: 100%; height: auto } svg text { fill: var(--dim); font-size: 12px }\n"
    ".grid { stroke: var(--grid); fill: none } .roof { stroke: var(--text); stroke-width: 2 }\n"
    ".gap { stroke: var(--dim) } .fwd { fill: var(--fwd) } .bwd { fill: var(--bwd) }\n";

/* The length of the UTF-8 sequence that text begins with; 0: none does, or a character that XML forbids. */
static size_t sequence_length(const unsigned char *text)
{
    size_t length = 1;
    if (text[0] >= 0x80)
        length = text[0] < 0xC2 || text[0] > 0xF4 ? 0 : 2u + (text[0] >= 0xE0) + (text[0] >= 0xF0);
    uint32_t code = length > 1 ? text[0] & (0x7Fu >> length) : text[0];
    for (size_t i = 1; i < length; i++) {
        if ((text[i] & 0xC0) != 0x80)
            return 0;
        code = code << 6 | (text[i] & 0x3Fu);
    }
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    bool forbidden = code < least[length] || (code < 0x20 && code != '\t' && code != '\n') || code == 0x7F ||
                     (code >= 0xD800 && code < 0xE000) || (code & 0xFFFE) == 0xFFFE || code > 0x10FFFF;
    return forbidden ? 0 : length;
}

static void put_text(FILE *file, const char *text, size_t bytes)
{
    const unsigned char *const end = (const unsigned char *)text + bytes;
    for (const unsigned char *at = end - bytes; at < end;) {
        size_t length = sequence_length(at);
        if (length == 0)
            fputs("&#xFFFD;", file);
        else if (strchr("&<>\"'", *at))
            fprintf(file, "&#%d;", *at);
        else
            fwrite(at, 1, length, file);
        at += length ? length : 1;
    }
}

static void put_fact(FILE *file, const char *name, const char *value)
{
    fprintf(file, "<tr><th>%s</th><td>", name);
    put_text(file, value, strlen(value));
    fputs("</td></tr>\n", file);
}

/* A cell as --json has the number. */
static void put_number(FILE *file, double value, int decimals)
{
    if (isfinite(value))
        fprintf(file, "<td class=\"n\">%.*f</td>", decimals, value);
    else
        fputs("<td class=\"n\">-</td>", file);
}

static void put_name(FILE *file, const char *element, const struct problem_line *line)
{
    char name[PROBLEM_NAME_BYTES];
    size_t bytes = problem_line_name(line, name, sizeof name);
    fprintf(file, "<%s>", element);
    put_text(file, name, bytes);
    fprintf(file, "</%s>", element);
}

/* ---- the command and the machine -------------------------------------------------------------------------------- */

/* As a shell takes it. */
static void put_word(FILE *file, const char *word)
{
    bool quoted = word[strcspn(word, " \t\n\"'\\$&<>|;*?()#~`")] != '\0';
    fputs(quoted ? " '" : " ", file);
    for (size_t length; *word; word += length) {
        length = *word == '\'' ? 1 : strcspn(word, "'");
        if (*word == '\'')
            put_text(file, "'\\''", 4);
        else
            put_text(file, word, length);
    }
    fputs(quoted ? "'" : "", file);
}

static void put_machine(FILE *file, const struct bench_page *page, bool on_cpu, bool on_device)
{
    const struct arguments *arguments = page->arguments;
    const normfuse_information *info = page->info;
    char text[256];
    fputs("<h2>Machine</h2>\n<table id=\"machine\">\n<tr><th>command</th><td><code>normfuse bench", file);
    for (int i = 0; i < arguments->word_count; i++)
        put_word(file, arguments->words[i]);
    for (int i = 0; i < arguments->command->option_count; i++) {
        if (!arguments_has(arguments, i))
            continue;
        fprintf(file, " --%s", arguments->command->options[i].name);
        if (arguments->command->options[i].value)
            put_word(file, arguments->values[i]);
    }
    fputs("</code></td></tr>\n", file);
    put_fact(file, "date", page->date);
    put_fact(file, "CPU", info->cpu);
    if (on_cpu) {
        snprintf(text, sizeof text, "%s, %d thread%s", info->isa, page->threads, page->threads == 1 ? "" : "s");
        put_fact(file, "instruction set", text);
        snprintf(text, sizeof text, "%" PRId64 " KiB", info->llc_bytes >> 10);
        put_fact(file, "last-level cache", text);
    }
    if (on_device) {
        const struct device_facts *gpu = device_facts();
        put_fact(file, "GPU", gpu->name);
        snprintf(text, sizeof text, "%" PRId32 ".%" PRId32, gpu->capability / 10, gpu->capability % 10);
        put_fact(file, "compute capability", text);
        put_fact(file, "driver", gpu->driver);
        snprintf(text, sizeof text, "%zu KiB of L2, %zu MiB of memory", gpu->l2_bytes >> 10, gpu->memory_bytes >> 20);
        put_fact(file, "caches and memory", text);
    }
    put_fact(file, "caches", page->warm ? "warm" : "cold");
    snprintf(text, sizeof text, "%s, commit %s", info->version, page->commit);
    put_fact(file, "normfuse", text);
    put_fact(file, "compiler", info->compiler);
    fputs("</table>\n", file);
}

/* ---- the roofline ----------------------------------------------------------------------------------------------- */

enum { LEFT = 60, TOP = 10, WIDTH = 860, HEIGHT = 340 };

/* The place of a logarithm between two others, from 0 to `length`. */
static double place(double value, double low, double high, double length)
{
    return (log10(value) - low) / (high - low) * length;
}

static double gbps(const struct bench_row *row, double us)
{
    return row->bytes / us * 1e-3;
}

/* A tensor without elements has no place on logarithmic axes. */
static bool is_drawn(const struct bench_row *row, int32_t device)
{
    return row->line->device == device && row->bytes > 0 && row->result.floor_us > 0 && row->result.median_us > 0 &&
           isfinite(row->result.floor_us);
}

static void put_roofline(FILE *file, const struct bench_page *page, int32_t device)
{
    double low[2] = {HUGE_VAL, HUGE_VAL}, high[2] = {-HUGE_VAL, -HUGE_VAL};
    for (const struct bench_row *row = page->rows; row < page->rows + page->count; row++)
        if (is_drawn(row, device)) {
            double floor = gbps(row, row->result.floor_us), ours = gbps(row, row->result.median_us);
            low[0] = fmin(low[0], log10(row->bytes));
            high[0] = fmax(high[0], log10(row->bytes));
            low[1] = fmin(low[1], log10(fmin(floor, ours)));
            high[1] = fmax(high[1], log10(fmax(floor, ours)));
        }
    if (low[0] > high[0])
        return;
    for (int axis = 0; axis < 2; axis++) { /* whole decades */
        low[axis] = floor(low[axis]);
        high[axis] = fmax(ceil(high[axis]), low[axis] + 1);
    }
    fprintf(file,
            "<figure>\n<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\">\n"
            "<title>Roofline of the %s</title>\n",
            LEFT + WIDTH + 30, TOP + HEIGHT + 50, device == NORMFUSE_CUDA ? "GPU" : "CPU");
    for (int exponent = (int)low[0]; exponent <= (int)high[0]; exponent++) {
        double x = LEFT + place(pow(10, exponent), low[0], high[0], WIDTH);
        fprintf(
            file,
            "<path class=\"grid\" d=\"M%.1f %dV%d\"/>\n<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s%s</text>\n",
            x, TOP, TOP + HEIGHT, x, TOP + HEIGHT + 18, (const char *[]){"1", "10", "100"}[((exponent % 3) + 3) % 3],
            exponent >= 12  ? " TB"
            : exponent >= 9 ? " GB"
            : exponent >= 6 ? " MB"
            : exponent >= 3 ? " kB"
                            : " B");
    }
    for (int exponent = (int)low[1]; exponent <= (int)high[1]; exponent++) {
        double y = TOP + HEIGHT - place(pow(10, exponent), low[1], high[1], HEIGHT);
        fprintf(file,
                "<path class=\"grid\" d=\"M%d %.1fH%d\"/>\n<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n",
                LEFT, y, LEFT + WIDTH, LEFT - 6, y + 4, pow(10, exponent));
    }
    for (const struct bench_row *row = page->rows; row < page->rows + page->count; row++) {
        if (!is_drawn(row, device))
            continue;
        double x = LEFT + place(row->bytes, low[0], high[0], WIDTH);
        double roof = TOP + HEIGHT - place(gbps(row, row->result.floor_us), low[1], high[1], HEIGHT);
        double y = TOP + HEIGHT - place(gbps(row, row->result.median_us), low[1], high[1], HEIGHT);
        fputs("<g class=\"point\">", file);
        put_name(file, "title", row->line);
        fprintf(file, "<path class=\"roof\" d=\"M%.1f %.1fh12\"/><path class=\"gap\" d=\"M%.1f %.1fV%.1f\"/>", x - 6,
                roof, x, roof, y);
        if (row->line->backward)
            fprintf(file, "<path class=\"bwd\" d=\"M%.1f %.1fl5.5 5.5l-5.5 5.5l-5.5 -5.5z\"/></g>\n", x, y - 5.5);
        else
            fprintf(file, "<circle class=\"fwd\" cx=\"%.1f\" cy=\"%.1f\" r=\"4.5\"/></g>\n", x, y);
    }
    fprintf(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">bytes that the problem must move</text>\n</svg>\n",
            LEFT + WIDTH / 2, TOP + HEIGHT + 40);
    fputs("<figcaption>Gigabytes a second: a circle is a forward, a diamond a backward. The line above or below each "
          "is its roof, the\n"
          "floor: as many bytes moved by the fastest copy, timed in turn with the problem.</figcaption>\n</figure>\n",
          file);
}

/* ---- tables ----------------------------------------------------------------------------------------------------- */

static void put_summary(FILE *file, const struct bench_page *page)
{
    fputs("<h2>Summary</h2>\n<p>Times over the floor: 1 is as fast as a copy.</p>\n<div class=\"scroll\"><table "
          "id=\"summary\">\n"
          "<thead><tr><th>device</th><th>dir</th><th>problems</th><th>geomean</th><th>p90</th><th>worst</th>"
          "<th>worst_problem</th></tr></thead>\n<tbody>\n",
          file);
    for (int i = 0; i < 4; i++) {
        int32_t device = i < 2 ? NORMFUSE_CPU : NORMFUSE_CUDA;
        struct bench_summary summary;
        if (!bench_summarize(page->rows, page->count, device, i % 2, &summary))
            continue;
        fprintf(file, "<tr><td>%s</td><td>%s</td><td class=\"n\">%" PRId64 "</td>",
                device == NORMFUSE_CUDA ? "cuda" : "cpu", i % 2 ? "bwd" : "fwd", summary.problems);
        put_number(file, summary.geomean, 4);
        put_number(file, summary.p90, 4);
        put_number(file, summary.worst, 4);
        put_name(file, "td", summary.worst_line);
        fputs("</tr>\n", file);
    }
    fputs("</tbody>\n</table></div>\n", file);
}

static void put_rows(FILE *file, const struct bench_page *page, bool on_device)
{
    fputs("<h2>Problems</h2>\n<p>Microseconds a call, the median with the 10th and 90th percentile, and the floor's "
          "median.</p>\n"
          "<div class=\"scroll\"><table "
          "id=\"rows\">\n<thead><tr><th>problem</th><th>median_us</th><th>p10_us</th><th>p90_us</th>"
          "<th>floor_us</th><th>ratio</th><th>gbps</th><th>bytes</th><th>samples</th>",
          file);
    if (on_device)
        fputs("<th>host_us</th><th>kernel</th><th>floor_kernel</th>", file);
    fputs("</tr></thead>\n<tbody>\n", file);
    for (const struct bench_row *row = page->rows; row < page->rows + page->count; row++) {
        const struct bench_result *result = &row->result;
        fputs("<tr>", file);
        put_name(file, "td", row->line);
        put_number(file, result->median_us, 3);
        put_number(file, result->p10_us, 3);
        put_number(file, result->p90_us, 3);
        put_number(file, result->floor_us, 3);
        put_number(file, result->median_us / result->floor_us, 4);
        put_number(file, gbps(row, result->median_us), 3);
        fprintf(file, "<td class=\"n\">%" PRId64 "</td><td class=\"n\">%" PRId64 "</td>", (int64_t)row->bytes,
                result->samples);
        if (row->line->device == NORMFUSE_CUDA) {
            put_number(file, result->host_us, 3);
            fputs("<td>", file);
            put_text(file, result->kernel, strlen(result->kernel));
            fputs("</td><td>", file);
            put_text(file, result->floor_name, strlen(result->floor_name));
            fputs("</td>", file);
        } else if (on_device) {
            fputs("<td></td><td></td><td></td>", file);
        }
        fputs("</tr>\n", file);
    }
    fputs("</tbody>\n</table></div>\n", file);
}

void bench_page_write(struct output *output, const struct bench_page *page)
{
    bool on_cpu = false, on_device = false;
    for (size_t i = 0; i < page->count; i++)
        *(page->rows[i].line->device == NORMFUSE_CPU ? &on_cpu : &on_device) = true;
    char *text = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&text, &bytes);
    if (!file)
        report_failure("memory", "%s", strerror(errno));
    fprintf(
        file,
        "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n<meta "
        "charset=\"utf-8\"/>\n"
        "<meta name=\"viewport\" content=\"width=device-width\"/>\n<title>normfuse bench</title>\n<style>\n%s</style>\n"
        "</head>\n<body>\n<h1>normfuse bench</h1>\n",
        style);
    put_machine(file, page, on_cpu, on_device);
    put_summary(file, page);
    fputs("<h2>Roofline</h2>\n", file);
    if (on_cpu)
        put_roofline(file, page, NORMFUSE_CPU);
    if (on_device)
        put_roofline(file, page, NORMFUSE_CUDA);
    put_rows(file, page, on_device);
    fputs("</body>\n</html>\n", file);
    bool failed = ferror(file);
    if (fclose(file) != 0 || failed || !text) /* what glibc cannot cut to size is gone without an error */
        report_failure("memory", "%s", strerror(ENOMEM));
    output_write(output, text, bytes);
    free(text);
}
