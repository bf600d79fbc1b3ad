/* Text that a model or a file gave, made fit for JSON and for a page: such text may
 * hold any bytes, a JSON string may not. */
#include "lab/lab.h"

#include <stdlib.h>
#include <string.h>

size_t lab_utf8(const char *text, size_t n)
{
    const unsigned char *p = (const unsigned char *)text;
    if (n == 0)
        return 0;
    unsigned char c = p[0];
    size_t len = c < 0x80 ? 1 : c >= 0xc2 && c < 0xe0 ? 2 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0;
    if (!len || len > n)
        return 0;
    for (size_t i = 1; i < len; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    /* overlong, surrogates, beyond U+10FFFF */
    if ((c == 0xe0 && p[1] < 0xa0) || (c == 0xed && p[1] > 0x9f) || (c == 0xf0 && p[1] < 0x90) || (c == 0xf4 && p[1] > 0x8f))
        return 0;
    return len;
}

bool lab_is_control(const char *text, size_t k)
{
    const unsigned char *p = (const unsigned char *)text;
    return k == 1 ? p[0] < 0x20 || p[0] == 0x7f : k == 2 && p[0] == 0xc2 && p[1] < 0xa0;
}

json_t *lab_text(const char *text, size_t n)
{
    char *out = malloc(3 * n + 1);
    size_t len = 0;
    for (size_t i = 0; out && i < n;) {
        size_t k = lab_utf8(text + i, n - i);
        memcpy(out + len, k ? text + i : "\xef\xbf\xbd", k ? k : 3);
        len += k ? k : 3;
        i += k ? k : 1;
    }
    json_t *s = out ? json_stringn_nocheck(out, len) : NULL;
    free(out);
    return s;
}
