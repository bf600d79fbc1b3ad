/* Renders one conversation for test_chat_jinja.py.
 *
 * usage: render_chat TEMPLATE-FILE generate(0|1) thinking(0|1) [ROLE CONTENT]...
 *
 * Writes the name of the template that the file was recognised as, an end of
 * line, and the text. Exit 1: not recognised; 2: refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "token/chat.h"

int main(int argc, char **argv)
{
    enum { MAX_BYTES = 1 << 20 };
    FILE *f = argc >= 4 ? fopen(argv[1], "rb") : NULL;
    char *text = f ? malloc(MAX_BYTES) : NULL;
    if (!text) {
        fprintf(stderr, "usage: render_chat TEMPLATE-FILE GENERATE THINKING [ROLE CONTENT]...\n");
        return 3;
    }
    size_t n = fread(text, 1, MAX_BYTES, f);
    fclose(f);
    kvd_chat c = kvd__chat_detect(text, n);
    free(text);
    printf("%s\n", kvd__chat_name(c));
    if (c == KVD_CHAT_NONE)
        return 1;
    kvd_ledger ledger;
    kvd__ledger_init(&ledger, 0);
    kvd_chat_message messages[64] = {{0}};
    int64_t n_messages = 0;
    for (int i = 4; i + 1 < argc && n_messages < 64; i += 2)
        messages[n_messages++] = (kvd_chat_message){argv[i], argv[i + 1]};
    char *out;
    kvd_error err;
    if (kvd__chat_render(c, messages, n_messages, atoi(argv[2]), atoi(argv[3]), &ledger, &out, &n, &err)) {
        fprintf(stderr, "%s\n", err.message);
        return 2;
    }
    fwrite(out, 1, n, stdout);
    kvd__free(out);
    return 0;
}
