/* gen: the receipt, a hash that two runs share if and only if their settings,
 * tokens and logits are the same bits. Byte layout: docs/numerics.md, Receipt. */
#ifndef KVD_GEN_RECEIPT_H
#define KVD_GEN_RECEIPT_H

#include "gen/session.h"

typedef struct kvd_receipt kvd_receipt;

/* Begins with s's settings and ids so far (the prompt). Returns owned, NULL when
 * out of memory. */
kvd_receipt *kvd__receipt_begin(const kvd_session *s, kvd_error *err);
/* The logits of a generated position, and the id that was chosen from them. */
void kvd__receipt_add(kvd_receipt *r, int32_t id, const float *logits, int64_t n_vocab);
/* Write 32 hex digits and free. NULL is allowed: then 32 zeros. */
void kvd__receipt_end(kvd_receipt **r, char hex[33]);

void kvd__hex(const uint8_t *bytes, int n, char *hex);

#endif
