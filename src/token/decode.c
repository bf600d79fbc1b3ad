/* Streamed decoding. Only the last three bytes of what has been said so far can
 * be the beginning of a character that is not complete, so only they are ever
 * held back; everything before them is given at once, well formed or not. */
#include <string.h>

#include "token/tokenizer.h"
#include "token/utf8.h"

kvd_bytes kvd__token_bytes(const kvd_tokenizer *t, int32_t id, bool special)
{
    if (id < 0 || id >= t->n_tokens || (t->flags[id] & KVD__TOKEN_CONTROL && !special))
        return (kvd_bytes){"", 0};
    return kvd__piece(&t->pieces, (uint32_t)id);
}

size_t kvd__decoder_push(kvd_decoder *d, const kvd_tokenizer *t, int32_t id, bool special, char *out)
{
    kvd_bytes b = kvd__token_bytes(t, id, special);
    if (t->space_prefix && id >= 0 && id < t->n_tokens) {
        bool whole = t->flags[id] & KVD__TOKEN_WHOLE;
        if (!d->started && !whole && b.n && b.data[0] == ' ') {
            b.data++;
            b.n--;
        }
        d->started = !whole;
    }
    memcpy(out, d->pending, (size_t)d->n_pending);
    memcpy(out + d->n_pending, b.data, b.n);
    size_t n = (size_t)d->n_pending + b.n, hold = n < 3 ? n : 3;
    while (hold && !kvd__utf8_is_prefix(out + n - hold, hold))
        hold--;
    n -= hold;
    memcpy(d->pending, out + n, hold);
    d->n_pending = (int)hold;
    return n;
}

size_t kvd__decoder_flush(kvd_decoder *d, char *out)
{
    size_t n = (size_t)d->n_pending;
    memcpy(out, d->pending, n);
    d->n_pending = 0;
    return n;
}

size_t kvd__token_max_bytes(const kvd_tokenizer *t) { return t->max_bytes; }
