/* gen: choosing a token from logits, deterministic on any machine: f64 in a fixed
 * order, our own exp and log, counter-based noise.
 *
 * Order: logit bias, penalties, temperature, top-k, top-p, min-p; then Gumbel-max
 * over the survivors, whose noise is a function of (seed, choice, position, id)
 * alone (docs/numerics.md, Choices). Source of Gumbel-max: Gumbel 1954; Maddison
 * et al., "A* sampling", 2014. */
#ifndef KVD_GEN_SAMPLER_H
#define KVD_GEN_SAMPLER_H

#include "gen/session.h"

typedef struct kvd__candidate {
    double value; /* logit after bias, penalties and temperature */
    int32_t id;
    int32_t count; /* among the tokens that penalties look at */
} kvd__candidate;

int kvd__sampling_check(const kvd_sampling *o, int32_t n_vocab, kvd_error *err);

/* The token for position pos = n_recent, whose predecessors are recent[0..pos).
 * work: [n_vocab]. */
int32_t kvd__sample(const kvd_sampling *o, const float *logits, int32_t n_vocab, const int32_t *recent, int64_t pos,
                    kvd__candidate *work);

/* Standard Gumbel noise of an id at a position. */
double kvd__gumbel(uint64_t seed, uint32_t choice, int64_t pos, int32_t id);

#endif
