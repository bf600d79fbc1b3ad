/* kvd tokenize: text to token ids, without weights. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

int cmd_tokenize(int argc, char **argv)
{
    cli c;
    char *text = NULL;
    size_t n_text = 0;
    int rc = cli_parse(&c, argc, argv, "tokenize", OPT_MODEL | OPT_PROMPT | OPT_TEXT | OPT_JSON, 0);
    if (rc)
        return rc;
    kvd_model *m = NULL;
    kvd_error err;
    if (kvd_model_load_vocab(&m, c.model, &err))
        return cli_file_error(c.model, &err);
    if (!(rc = cli_read_prompt(&c, &text, &n_text))) {
        int32_t *ids = NULL;
        int64_t n = 0;
        unsigned flags = (c.no_bos ? 0u : KVD_TOKENIZE_BOS) | (c.special ? KVD_TOKENIZE_SPECIAL : 0u);
        if (kvd_tokenize(m, text, n_text, flags, &ids, &n, &err))
            rc = cli_error("", &err);
        else if (c.json)
            rc = cli_print_json(json_pack("{s:o, s:I}", "tokens", cli_json_ids(ids, n), "n_tokens", (json_int_t)n));
        else {
            for (int64_t i = 0; i < n; i++) {
                size_t len;
                const char *piece = kvd_token_text(m, ids[i], true, &len);
                printf("%7d  ", ids[i]);
                for (size_t k = 0; k < len; k++) {
                    unsigned char ch = (unsigned char)piece[k];
                    if (ch < 0x20 || ch == 0x7f || ch == '\\')
                        printf("\\x%02x", ch);
                    else
                        putchar(ch);
                }
                putchar('\n');
            }
            rc = cli_close_stdout();
        }
        kvd_ids_free(ids);
    }
    free(text);
    kvd_model_free(&m);
    return rc;
}
