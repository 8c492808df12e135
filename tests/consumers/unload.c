/* SPDX-License-Identifier: MIT
 *
 * unload.c PLUGIN... - loads each plugin, runs it, unloads it, and does so again: the library and its threads outlive
 * that. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(int count, char **plugins)
{
    for (int i = 1; i < count; i++)
        for (int round = 0; round < 3; round++) {
            void *const plugin = dlopen(plugins[i], RTLD_NOW | RTLD_LOCAL);
            void *const symbol = plugin != NULL ? dlsym(plugin, "consumer_run") : NULL;
            const void *(*run)(void);
            memcpy(&run, &symbol, sizeof run);
            const void *const inside = run != NULL ? run() : NULL;
            if (inside == NULL) {
                fprintf(stderr, "%s, round %d: %s\n", plugins[i], round, run == NULL ? dlerror() : "a call failed");
                return 1;
            }
            dlclose(plugin);
            Dl_info info;
            if (dladdr(inside, &info) == 0) {
                fprintf(stderr, "%s, round %d: the library was unloaded\n", plugins[i], round);
                return 1;
            }
        }
    printf("unloaded\n");
    return 0;
}
