#include "gen/receipt.h"

#include <string.h>
#define XXH_STATIC_LINKING_ONLY /* a state of our own memory */
#include <xxhash.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "receipts hash little-endian bytes: swap here before porting"
#endif

/* The incomplete type of the header is xxHash's state itself. */
static XXH3_state_t *state(kvd_receipt *r) { return (XXH3_state_t *)(void *)r; }

kvd_receipt *kvd__receipt_begin(const kvd_session *s, kvd_error *err)
{
    XXH3_state_t *h = kvd__alloc(s->m->ledger, KVD_ACC_HOST, sizeof *h, err);
    if (!h)
        return NULL;
    XXH3_INITSTATE(h);
    XXH3_128bits_reset(h);
    XXH3_128bits_update(h, "kvd receipt v1\n", 16); /* with its NUL */
    XXH3_128bits_update(h, s->m->fingerprint, 16);
    /* Settings that change bits. RoPE: 0 is absolute, the only one yet. */
    uint8_t set[8] = {(uint8_t)s->o.kv_type, (uint8_t)s->o.stream, s->m->activations_f32, 0};
    if (s->compact) {
        set[4] = (uint8_t)s->o.policy;
        set[5] = (uint8_t)s->o.positions;
    }
    XXH3_128bits_update(h, set, sizeof set);
    if (s->compact)
        XXH3_128bits_update(h, &s->o.kv_tokens, sizeof s->o.kv_tokens);
    uint64_t n = (uint64_t)s->n;
    XXH3_128bits_update(h, &n, sizeof n);
    XXH3_128bits_update(h, s->ids, (size_t)n * sizeof *s->ids);
    return (kvd_receipt *)(void *)h;
}

void kvd__receipt_add(kvd_receipt *r, int32_t id, const float *logits, int64_t n_vocab)
{
    if (!r)
        return;
    XXH3_128bits_update(state(r), &id, sizeof id);
    XXH3_128bits_update(state(r), logits, (size_t)n_vocab * sizeof *logits);
}

void kvd__hex(const uint8_t *bytes, int n, char *hex)
{
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < n; i++) {
        hex[2 * i] = digits[bytes[i] >> 4];
        hex[2 * i + 1] = digits[bytes[i] & 15];
    }
    hex[2 * n] = 0;
}

void kvd__receipt_end(kvd_receipt **r, char hex[33])
{
    XXH128_canonical_t c;
    memset(&c, 0, sizeof c);
    if (*r)
        XXH128_canonicalFromHash(&c, XXH3_128bits_digest(state(*r)));
    kvd__free(*r);
    *r = NULL;
    kvd__hex(c.digest, 16, hex);
}
