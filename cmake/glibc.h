/* SPDX-License-Identifier: MIT
 *
 * Included ahead of every file of a wheel (NORMFUSE_PYTHON_WHEEL) on glibc of x86-64 and aarch64: the functions whose
 * newest version is younger than glibc 2.17, by their first version. The wheel then runs on every glibc from 2.17 on
 * (manylinux_2_17), whatever the glibc of the builder. A name that a file does not use has no effect. */
#ifdef __x86_64__
#define NORMFUSE_FIRST "GLIBC_2.2.5"
#else
#define NORMFUSE_FIRST "GLIBC_2.17"
#endif
#define NORMFUSE_OLD(ours, theirs) __asm__(".symver " #ours ", " #theirs "@" NORMFUSE_FIRST)
NORMFUSE_OLD(dladdr, dladdr);
NORMFUSE_OLD(dlclose, dlclose);
NORMFUSE_OLD(dlerror, dlerror);
NORMFUSE_OLD(dlopen, dlopen);
NORMFUSE_OLD(dlsym, dlsym);
NORMFUSE_OLD(exp, exp);
NORMFUSE_OLD(log2, log2);
NORMFUSE_OLD(pow, pow);
NORMFUSE_OLD(pthread_attr_setstacksize, pthread_attr_setstacksize);
NORMFUSE_OLD(pthread_create, pthread_create);
NORMFUSE_OLD(pthread_join, pthread_join);
NORMFUSE_OLD(pthread_mutex_trylock, pthread_mutex_trylock);
NORMFUSE_OLD(pthread_once, pthread_once);
NORMFUSE_OLD(pthread_sigmask, pthread_sigmask);
/* Headers of glibc 2.38 and newer give these in the place of strtol and sscanf; only what C23 added is lost. */
NORMFUSE_OLD(__isoc23_strtol, strtol);
NORMFUSE_OLD(__isoc23_sscanf, sscanf);
