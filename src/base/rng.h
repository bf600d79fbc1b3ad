/* base: counter-based noise. Philox4x32-10 (Salmon et al., "Parallel random
 * numbers: as easy as 1, 2, 3", SC 2011): a pure function of key and counter, so
 * a draw at a position does not depend on what was drawn before it. */
#ifndef KVD_BASE_RNG_H
#define KVD_BASE_RNG_H

#include <stdint.h>

void kvd__philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* SplitMix64 step: for test data and fuzzers, not for sampling. */
static inline uint64_t kvd__splitmix64(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

#endif
