/* gen: sessions. A session is one timeline of tokens; this layer plans its passes
 * (kv/residency.c), runs them (model/pass.h) and keeps its ids.
 *
 * Layer: above model. */
#ifndef KVD_GEN_SESSION_H
#define KVD_GEN_SESSION_H

#include "kvd/kvd.h"
#include "kvd/kvd_lab.h"
#include "model/pass.h"

enum { KVD__PIECE_TOKENS = 512 }; /* rows of a pass while everything stays resident */

struct kvd_session {
    struct kvd_model *m; /* borrowed */
    kvd_session_options o;
    kvd_kv_shape shape;
    kvd_kvtype stream_type;
    kvd_kv *kv;
    kvd_compact *compact; /* of a lossy policy, in place of kv; NULL: exact */
    int32_t *ids;        /* [capacity]: the checkpoint of every position */
    int64_t n, capacity;
    float *logits;       /* [n_vocab] of position n - 1, if has_logits */
    bool has_logits;
    kvd_session_stats stats; /* sums; the rest is filled when asked */
    kvd_progress_fn progress;
    void *progress_ctx;
    kvd_lab_taps lab;
    bool has_lab;
    bool feeding;            /* what is called from a callback must not change it */
    kvd_rates rates;         /* for the planner, if has_rates */
    bool has_rates;
    /* The disk tier (disk.c). */
    kvd_evict_to evict_to;   /* what was chosen, if AUTO was asked for */
    char *spill_dir;         /* owned */
    kvd_spill *spill;        /* NULL: not (yet) in use */
    char *disk_block;        /* a block on its way to it */
    int64_t spill_tokens;    /* it has room for so many */
    int64_t spill_bytes;     /* context memory of its buffers */
    const kvd_spill_ops *spill_ops; /* for tests to stand in between; NULL: the system's */
    void *spill_ops_ctx;
    int64_t disk_end;        /* positions [0, disk_end) of global layers are in it */
    int64_t reserve_tokens;  /* the length that generation will reach */
    bool disk_off;
    kvd_error disk_error;    /* why it is off */
    struct kvd__candidate *candidates; /* the sampler's, [n_vocab] */
};

/* Least context memory for n tokens with the tiers that this session has (grows with
 * n), and the longest context that fits. */
int64_t kvd__session_least_bytes(const kvd_session *s, const kvd_limits *lim, int64_t n);
int64_t kvd__session_max_tokens(const kvd_session *s, const kvd_limits *lim);

/* The limits of this session under what the budget leaves to it now, the spill's
 * buffers included. */
kvd_limits kvd__session_limits(const kvd_session *s);

/* --evict-to auto: the faster tier for what is about to be done (planner.c). A
 * session that has begun to use the disk stays with it. */
void kvd__session_choose_tier(kvd_session *s, int64_t n_prompt, int64_t n_new);

static inline bool kvd__is_lossy(kvd_policy p) { return p >= KVD_POLICY_WINDOW; }

/* One computing call at a time: threads and scratch are the model's. KVD_E_ARG if there
 * is one already, as when a callback asks for another. */
int kvd__model_claim(struct kvd_model *m, kvd_error *err);
void kvd__model_release(struct kvd_model *m);

/* A copy of the session's taps in *own, which a callback may set anew meanwhile, and as
 * a pass takes them in *taps. NULL: there are none. */
const kvd_taps *kvd__lab_taps(const kvd_session *s, kvd_lab_taps *own, kvd_taps *taps);

kvd_kvtype kvd__kvtype_of(kvd_float_type t);

#endif
