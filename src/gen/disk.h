/* gen: the disk tier of a session. What leaves the budget is written to a spill
 * file once (kv/spill.h) and read back in every pass; whatever goes wrong with the
 * disk ends the tier, and the session recomputes from then on. */
#ifndef KVD_GEN_DISK_H
#define KVD_GEN_DISK_H

#include "gen/session.h"

/* Does this session evict to disk (asked for, and not given up)? */
bool kvd__disk_wanted(const kvd_session *s);

/* The spill's options for a session of n_tokens under a budget. */
kvd_spill_options kvd__disk_options(const struct kvd_model *m, const kvd_kv_shape *shape, const char *dir, int64_t n_tokens,
                                    int64_t budget_bytes);

/* Context memory of the spill's buffers for n_tokens under a budget. */
int64_t kvd__disk_spill_bytes(const kvd_session *s, int64_t n_tokens);

/* The next pass from `at` towards total tokens. plan->n_before may lie below at:
 * where what is on disk ends. KVD_E_BUDGET; KVD_E_IO when there can be no spill
 * (then the tier is off: plan again without it). */
int kvd__disk_next(kvd_session *s, int64_t at, int64_t total, kvd_pass_plan *plan, kvd_error *err);

/* Write what the plan drops. KVD_E_IO: the tier is off, nothing was dropped. */
int kvd__disk_write(kvd_session *s, const kvd_pass_plan *plan, kvd_error *err);

/* Positions from n on are no more. */
void kvd__disk_cut(kvd_session *s, int64_t n);

/* Give the tier up because of err; the file is gone after it. */
void kvd__disk_off(kvd_session *s, const kvd_error *err);

#endif
