#pragma once

// Loops that compilers turn into vector instructions, built for what wide registers a processor may
// have: the loader takes the widest. The results are the same, since all arithmetic is of integers,
// or, in squares.cpp, rounded operation by operation.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define INFINITY_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define INFINITY_CLONES
#endif
