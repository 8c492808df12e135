/* SPDX-License-Identifier: MIT
 *
 * suggest.h - what a word that is not known was most likely meant to be. */
#ifndef NORMFUSE_CLI_SUGGEST_H
#define NORMFUSE_CLI_SUGGEST_H

#include <stddef.h>

/* The name that takes the fewest edits to become text[0..bytes), NULL where none is near. An edit replaces, inserts or
 * removes a letter, or swaps two neighbours; capitals count as small letters. A third of the longer word's letters may
 * be edited, one at least. Of equally near names the first. */
const char *suggest_nearest(const char *text, size_t bytes, const char *const *names, int count);

/* ", did you mean X?" for X = suggest_nearest(...), "" for NULL, in a buffer of the thread that the next call reuses.
 * */
const char *suggest_words(const char *prefix, const char *text, size_t bytes, const char *const *names, int count);

#endif
