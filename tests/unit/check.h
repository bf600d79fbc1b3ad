/* tests: cmocka, with what has to be included before it, and an assertion that says what
 * it is about. To be included before anything of the system. */
#ifndef KVD_TESTS_CHECK_H
#define KVD_TESTS_CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define check(ok, ...)                                                         \
    do {                                                                       \
        if (!(ok))                                                             \
            fail_msg(__VA_ARGS__);                                             \
    } while (0)

#endif
