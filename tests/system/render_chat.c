/* Renders conversations for test_chat_jinja.py.
 *
 * usage: render_chat TEMPLATE-FILE < CASES
 *
 * A case is generate(0|1), thinking(0|1), then role and content of each message,
 * separated by bytes 0x1f and ended by 0x1e. Written: the name of the template
 * that the file was recognised as, then for each case "=" and the text or "!" and
 * why it was refused, each ended by 0x1e. Exit 1: not recognised. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "token/chat.h"

enum { MAX_BYTES = 1 << 20, MAX_MESSAGES = 64 };

static size_t read_all(FILE *f, char *out)
{
    size_t n = f ? fread(out, 1, MAX_BYTES - 1, f) : 0;
    out[n] = 0;
    if (f)
        fclose(f);
    return n;
}

static void render(kvd_chat c, char *text)
{
    char *fields[2 + 2 * MAX_MESSAGES] = {text};
    int n_fields = 1;
    for (char *p = text; (p = strchr(p, 0x1f)) != NULL && n_fields < 2 + 2 * MAX_MESSAGES;) {
        *p++ = 0;
        fields[n_fields++] = p;
    }
    kvd_chat_message messages[MAX_MESSAGES] = {{0}};
    int64_t n = 0;
    for (int i = 2; i + 1 < n_fields; i += 2)
        messages[n++] = (kvd_chat_message){fields[i], fields[i + 1]};
    kvd_ledger ledger;
    kvd_error err;
    kvd__ledger_init(&ledger, 0);
    char *out;
    size_t n_out;
    if (n_fields < 2 ||
        kvd__chat_render(c, messages, n, atoi(fields[0]), atoi(fields[1]), &ledger, &out, &n_out, &err)) {
        printf("!%s\x1e", n_fields < 2 ? "bad case" : err.message);
        return;
    }
    putchar('=');
    fwrite(out, 1, n_out, stdout);
    putchar(0x1e);
    kvd__free(out);
}

int main(int argc, char **argv)
{
    static char text[MAX_BYTES];
    if (argc != 2) {
        fprintf(stderr, "usage: render_chat TEMPLATE-FILE < CASES\n");
        return 2;
    }
    size_t n = read_all(fopen(argv[1], "rb"), text);
    kvd_chat c = kvd__chat_detect(text, n);
    printf("%s\x1e", kvd__chat_name(c));
    if (c == KVD_CHAT_NONE)
        return 1;
    read_all(stdin, text);
    char *end;
    for (char *p = text; (end = strchr(p, 0x1e)) != NULL; p = end + 1) {
        *end = 0;
        render(c, p);
    }
    return 0;
}
