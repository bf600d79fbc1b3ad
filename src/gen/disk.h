/* gen: the disk tier of a session. What leaves the budget is written to a spill
 * file once (kv/spill.h) and read back in every pass; whatever goes wrong with the
 * disk ends the tier, and the session recomputes from then on. */
#ifndef KVD_GEN_DISK_H
#define KVD_GEN_DISK_H

#include "gen/session.h"

/* Does this session evict to disk (asked for, and not given up)? */
bool kvd__disk_wanted(const kvd_session *s);

/* The spill's options for a session of n_tokens under a budget: buffers as large as
 * is useful, but a small part of it, and as small as need be for n_tokens to fit. */
kvd_spill_options kvd__disk_options(const struct kvd_model *m, const kvd_kv_shape *shape, const char *dir, int64_t n_tokens,
                                    int64_t budget_bytes);

/* Blocks of the largest segment that those may have; KVD__TILE_BLOCKS is the smallest. */
int64_t kvd__disk_largest_segment(const kvd_kv_shape *shape);

/* The least budget with which n_tokens run on this tier, smallest buffers included.
 * Grows with n_tokens. */
int64_t kvd__disk_need(const struct kvd_model *m, const kvd_kv_shape *shape, int64_t n_tokens);

/* The same if all may also stay, and the longest context that fits lim: what a session
 * of this tier takes. */
int64_t kvd__disk_least(const struct kvd_model *m, const kvd_kv_shape *shape, const kvd_limits *lim, int64_t n_tokens);
int64_t kvd__disk_max_tokens(const struct kvd_model *m, const kvd_kv_shape *shape, const kvd_limits *lim);

/* The next pass from s->kv->end towards total tokens under lim (kvd__session_limits).
 * Makes the spill if there is none; its buffers may cost the newest blocks, which are
 * then behind kv->end. plan->n_before may lie below kv->end: where what is on disk
 * ends. KVD_E_BUDGET before anything is changed; KVD_E_IO, KVD_E_UNSUPPORTED when
 * there can be no spill. */
int kvd__disk_next(kvd_session *s, const kvd_limits *lim, int64_t total, kvd_pass_plan *plan, kvd_error *err);

/* Write what the plan drops. On failure nothing was dropped. */
int kvd__disk_write(kvd_session *s, const kvd_pass_plan *plan, kvd_error *err);

/* Positions from n on are no more: other tokens may come there. */
void kvd__disk_cut(kvd_session *s, int64_t n);

/* Give the file and its buffers back; a later pass may make another. */
void kvd__disk_drop(kvd_session *s);

/* Give the tier up because of err; the file is gone after it. */
void kvd__disk_off(kvd_session *s, const kvd_error *err);

/* Add what the spill in use has done to st. */
void kvd__disk_add_stats(const kvd_session *s, kvd_session_stats *st);

#endif
