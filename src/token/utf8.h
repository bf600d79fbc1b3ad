/* token: the two questions that are asked about UTF-8. Decoding itself is
 * utf8proc's; it refuses overlong forms, surrogates and values past U+10FFFF. */
#ifndef KVD_TOKEN_UTF8_H
#define KVD_TOKEN_UTF8_H

#include <stddef.h>
#include <stdint.h>
#include <utf8proc.h>

/* Bytes of the character at p (n > 0 left), or 0 if it is not well formed. */
static inline size_t kvd__utf8_length(const char *p, size_t n)
{
    if (!((unsigned char)*p & 0x80))
        return 1;
    utf8proc_int32_t code;
    utf8proc_ssize_t k = utf8proc_iterate((const utf8proc_uint8_t *)p, n < 4 ? (utf8proc_ssize_t)n : 4, &code);
    return k > 0 ? (size_t)k : 0;
}

/* Could the n bytes at p, n = 1..3, become one well-formed character if more
 * follow? (Unicode 15, table 3-7: the second byte tells overlong forms,
 * surrogates and too large values.) */
static inline int kvd__utf8_is_prefix(const char *p, size_t n)
{
    unsigned char a = (unsigned char)p[0];
    size_t need = a >= 0xc2 && a <= 0xdf ? 2 : a >= 0xe0 && a <= 0xef ? 3 : a >= 0xf0 && a <= 0xf4 ? 4 : 0;
    if (n >= need)
        return 0;
    if (n > 1) {
        unsigned char b = (unsigned char)p[1];
        unsigned char low = a == 0xe0 ? 0xa0 : a == 0xf0 ? 0x90 : 0x80;
        unsigned char high = a == 0xed ? 0x9f : a == 0xf4 ? 0x8f : 0xbf;
        if (b < low || b > high)
            return 0;
    }
    return n < 3 || ((unsigned char)p[2] & 0xc0) == 0x80;
}

#endif
