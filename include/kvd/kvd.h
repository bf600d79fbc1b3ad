/* KV-Direct: decoder-only language models from GGUF files, on CPUs, inside a
 * fixed memory budget for context, with output that is bit-identical to an
 * unlimited cache.
 *
 * Two objects. A kvd_model is a loaded file, its threads and its ledger; it is
 * immutable but for the ledger. A kvd_session is one mutable timeline of tokens
 * over a model. Callers think in tokens; which keys and values are resident,
 * dropped or being rebuilt never shows in the results (docs/numerics.md), only
 * in the time and in kvd_session_stats().
 *
 * Conventions
 *   Functions return 0 or a negative KVD_E_*; results through out-parameters,
 *   untouched on failure unless stated. A kvd_error may be passed for the detail
 *   (NULL is fine). Positions are absolute and 0-based. Sizes are bytes (_bytes)
 *   or tokens (_tokens). The library never prints, exits or reads the
 *   environment.
 * Thread safety
 *   One caller at a time per session, and one *computing* call (feed, generate)
 *   at a time per model: its thread pool is shared. Everything else on a model
 *   may be called from any thread. A second one meanwhile, from a callback or
 *   another thread, is KVD_E_ARG and changes nothing. A callback may not rewind
 *   (KVD_E_ARG), park (does nothing) or free the session that it is called for.
 *   A forked child has the model, but not its threads: with one thread it can go
 *   on computing (a disk tier then gets a file of its own), with more such calls
 *   are KVD_E_ARG. It may free what it was given; the parent loses nothing by it. */
#ifndef KVD_KVD_H
#define KVD_KVD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvd/kvd_error.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVD_API __attribute__((visibility("default")))
#else
#define KVD_API
#endif

#define KVD_VERSION "0.1.0"

typedef struct kvd_model kvd_model;
typedef struct kvd_session kvd_session;

/* ---- settings ------------------------------------------------------------- */

/* What of the KV cache may be dropped. The first two are exact: the same bits,
 * whatever is dropped. The others are the field's lossy baselines (docs/baselines.md):
 * each attends to kv_tokens positions at most, the new one included, and what is
 * dropped is gone. kv_tokens must then be 8 or more, there is no disk tier; a session
 * can be rewound to 0 only, parking does nothing, and after a failed feed it must be
 * rewound to 0. Each feed is one pass. */
typedef enum kvd_policy {
    KVD_POLICY_KV_DIRECT,     /* over the budget: drop the oldest, recompute in the pass */
    KVD_POLICY_FULL,          /* keep everything; KVD_E_BUDGET when it does not fit */
    KVD_POLICY_WINDOW,        /* the last kv_tokens */
    KVD_POLICY_STREAMING_LLM, /* the first four and the last ones; arXiv 2309.17453 */
    KVD_POLICY_H2O,           /* accumulated attention and the last ones, per KV head; arXiv 2306.14048 */
    KVD_POLICY_SNAPKV,        /* what the prompt's end attends to, pooled, per KV head; arXiv 2404.14469 */
    KVD_POLICY_TOVA           /* what the last token attends to, per layer; arXiv 2401.06104 */
} kvd_policy;
/* "kv-direct", "full", "window", "streaming-llm", "h2o", "snapkv", "tova" */
KVD_API const char *kvd_policy_name(kvd_policy p);

/* Of a lossy policy: where keys stand for RoPE. */
typedef enum kvd_positions {
    KVD_POSITIONS_ORIGINAL, /* where they stood in the text */
    KVD_POSITIONS_RENUMBER  /* 0, 1, 2, ... among what is kept (StreamingLLM's own way) */
} kvd_positions;

/* Where what is dropped comes from again. */
typedef enum kvd_evict_to {
    KVD_EVICT_AUTO,      /* the faster one here */
    KVD_EVICT_RECOMPUTE, /* from the token ids, in the pass */
    KVD_EVICT_DISK       /* written to a file once, read back in each pass. A folder that does not serve is
                            KVD_E_IO before any work; a disk that fails later: recomputed from then on */
} kvd_evict_to;

/* Rates of this machine for one model and one set of settings, for the planner
 * (docs/memory.md, "The planner"). A plain value: keep it in a file if you like. */
enum { KVD_RATE_POINTS = 5 };
typedef struct kvd_rates {
    int64_t rows[KVD_RATE_POINTS];  /* ascending, rows[0] == 1 */
    double rows_s[KVD_RATE_POINTS]; /* seconds of a pass of so many rows, attention aside */
    double head_s;                  /* of the output head for one row, and of choosing from its logits */
    double pair_alone_s;            /* one query position against one key position, all layers: a single row */
    double pair_chunk_s;            /* the same in a chunk of rows */
    double disk_pass_s;             /* of a pass that reads, beside bytes and segments */
    double disk_segment_s;          /* each segment that is read, whatever its size */
    double disk_read_bytes_s, disk_write_bytes_s; /* of spill_dir, beside that; 0: no disk tier */
} kvd_rates;

/* Types of stored K and V, and of the residual stream between layers. */
typedef enum kvd_float_type { KVD_TYPE_F16, KVD_TYPE_BF16, KVD_TYPE_F32 } kvd_float_type;

typedef enum kvd_isa { KVD_ISA_AUTO, KVD_ISA_SCALAR, KVD_ISA_AVX2, KVD_ISA_AVX512, KVD_ISA_NEON } kvd_isa;

typedef struct kvd_model_options {
    int n_threads;           /* 1..256; 0 (default): the CPUs this process may use */
    kvd_isa isa;             /* default KVD_ISA_AUTO: the best there is */
    int chunk_tokens;        /* rows of a pass computed together, 1..4096; default 256 */
    bool activations_f32;    /* dequantised weights x f32 activations; default false:
                                8-bit activations with quantised weights. Changes bits. */
    int64_t kv_budget_bytes; /* context memory of all sessions together; 0 (default): no limit */
} kvd_model_options;

KVD_API void kvd_model_options_defaults(kvd_model_options *o);

typedef struct kvd_session_options {
    kvd_policy policy;       /* default KVD_POLICY_KV_DIRECT. Lossy ones change bits. */
    kvd_positions positions; /* default KVD_POSITIONS_ORIGINAL */
    kvd_float_type kv_type;  /* default KVD_TYPE_F16. Changes bits. */
    kvd_float_type stream;   /* default KVD_TYPE_F32. Changes bits. */
    kvd_evict_to evict_to;   /* default KVD_EVICT_AUTO */
    const char *spill_dir;   /* an existing folder for KVD_EVICT_DISK, not in memory (tmpfs); borrowed for
                                the call; default NULL: no disk tier, AUTO recomputes */
    const kvd_rates *rates;  /* for KVD_EVICT_AUTO with spill_dir: kvd_generate then takes the tier that
                                the planner finds fastest; borrowed for the call; default NULL: recompute */
    int64_t kv_tokens;       /* B: positions kept resident, from 16*floor((T-B)/16) on;
                                0: none; -1 (default): as many as the budget allows.
                                Lossy policies: the budget of each KV head */
} kvd_session_options;

KVD_API void kvd_session_options_defaults(kvd_session_options *o);

/* ---- model ---------------------------------------------------------------- */

typedef struct kvd_model_info {
    const char *name;         /* general.name, may be "" */
    const char *architecture; /* "llama" */
    const char *chat_template; /* recognised template, or "" */
    bool has_chat_template;   /* the file has one, recognised or not */
    const char *tokenizer, *pretokenizer; /* tokenizer.ggml.model and .pre, "" if absent */
    char fingerprint[33];     /* hex; identifies the file's contents; "" until loaded */
    char isa[16];
    int n_threads;
    int64_t n_layers, d_model, n_heads, n_kv_heads, d_head, d_ffn, n_vocab;
    int64_t trained_context_tokens;
    int64_t window_tokens;    /* sliding window of local layers; 0: there are none */
    int64_t n_local_layers;   /* of n_layers; the others see all positions */
    int64_t n_params, weight_bytes, file_bytes;
    bool tied_head;
} kvd_model_info;

/* Read a GGUF file (v2, v3) and its weights.
 *
 * @param out      Returned owned; free with kvd_model_free.
 * @param options  NULL: the defaults.
 * @return 0; KVD_E_GGUF_* and KVD_E_IO for the file; KVD_E_UNSUPPORTED names an
 *         architecture, tensor type or tokeniser that this build does not know;
 *         KVD_E_RANGE for options; KVD_E_NOMEM.
 * Memory: weights stay near the file's size, plus compute scratch that depends on
 * chunk_tokens and not on context. */
KVD_API int kvd_model_load(kvd_model **out, const char *path, const kvd_model_options *options, kvd_error *err);

/* The same without weights: for information, tokenising and planning. A session
 * can not be made from it. Works on vocabulary-only files. */
KVD_API int kvd_model_load_vocab(kvd_model **out, const char *path, kvd_error *err);

/* Frees the model and sets *m to NULL. Its sessions must be gone. NULL inside is fine. */
KVD_API void kvd_model_free(kvd_model **m);

/* Strings inside are borrowed from m. */
KVD_API void kvd_model_get_info(const kvd_model *m, kvd_model_info *info);

/* Does layer (0 .. n_layers - 1) attend to a sliding window only? */
KVD_API bool kvd_model_layer_is_local(const kvd_model *m, int layer);

/* Time spent in each stage of the passes since profiling was switched on, i from
 * 0; false when there are no more. Switching it on sets the sums to zero. */
KVD_API void kvd_model_set_profile(kvd_model *m, bool on);
KVD_API bool kvd_model_profile(const kvd_model *m, int i, const char **stage, double *seconds);

/* What one token costs: multiply-adds and weight bytes of all layers, and of the
 * output head (rows whose logits are wanted). */
typedef struct kvd_model_cost {
    int64_t layer_macs, head_macs, layer_bytes, head_bytes;
} kvd_model_cost;
KVD_API void kvd_model_get_cost(const kvd_model *m, kvd_model_cost *cost);

/* One tensor type's share of the weights, i from 0; false when there are no more. */
KVD_API bool kvd_model_format_share(const kvd_model *m, int i, const char **type, int64_t *n_tensors, int64_t *bytes);

/* ---- text ----------------------------------------------------------------- */

enum {
    KVD_TOKENIZE_BOS = 1,    /* add BOS where the file's rules want it */
    KVD_TOKENIZE_SPECIAL = 2 /* parse control tokens written in the text */
};

/* *ids: returned owned, [*n_ids]; free with kvd_ids_free. Any bytes are allowed. */
KVD_API int kvd_tokenize(const kvd_model *m, const char *text, size_t n, unsigned flags, int32_t **ids,
                         int64_t *n_ids, kvd_error *err);
KVD_API void kvd_ids_free(int32_t *ids);

/* Bytes of one token, borrowed from m, not terminated; control tokens are empty
 * unless special. May be part of a UTF-8 sequence. */
KVD_API const char *kvd_token_text(const kvd_model *m, int32_t id, bool special, size_t *n);
/* Does generation end with this token? */
KVD_API bool kvd_token_is_end(const kvd_model *m, int32_t id);
/* Ids of BOS and EOS, -1 if the vocabulary has none. */
KVD_API int32_t kvd_token_bos(const kvd_model *m);
KVD_API int32_t kvd_token_eos(const kvd_model *m);
/* Does KVD_TOKENIZE_BOS add BOS in front? EOS at the end? */
KVD_API bool kvd_tokenize_adds_bos(const kvd_model *m);
KVD_API bool kvd_tokenize_adds_eos(const kvd_model *m);

typedef struct kvd_chat_turn {
    const char *role; /* "system", "user", "assistant" */
    const char *content;
} kvd_chat_turn;

enum {
    KVD_CHAT_CLOSED = 1,  /* end with the last turn, without the assistant's opening */
    KVD_CHAT_NO_THINK = 2 /* Qwen3, DeepSeek-R1: an answer without thoughts; others ignore it */
};

/* Render turns with the file's chat template (or the named one), ending with the
 * opening of the assistant's turn. flags: KVD_CHAT_*. *text: returned owned, free
 * with kvd_text_free. Tokenise with BOS and SPECIAL. KVD_E_UNSUPPORTED: the file's
 * template is not one of those known; KVD_E_ARG: template_name is none of them, or
 * the template refuses this order of roles. Any thread.
 * The text of a conversation need not be a prefix of its continuation's: some
 * templates drop earlier thoughts, trim answers or move the system message. */
KVD_API int kvd_chat_render(const kvd_model *m, const char *template_name, const kvd_chat_turn *turns, int64_t n,
                            unsigned flags, char **text, size_t *n_text, kvd_error *err);
KVD_API void kvd_text_free(char *text);

/* ---- session -------------------------------------------------------------- */

/* An empty session. *s: returned owned; m is borrowed and must outlive it.
 * options NULL: the defaults. KVD_E_RANGE for options; KVD_E_NOMEM. */
KVD_API int kvd_session_create(kvd_session **s, kvd_model *m, const kvd_session_options *options, kvd_error *err);
KVD_API void kvd_session_free(kvd_session **s);

/* Tokens so far, and their ids ([*n], borrowed until the next call on s). */
KVD_API int64_t kvd_session_tokens(const kvd_session *s, const int32_t **ids);

/**
 * Continue a session by n tokens and leave the logits of the last one.
 *
 * Positions that were evicted are rebuilt on the way (docs/memory.md); the
 * logits are the same bits as with an unlimited cache (docs/numerics.md).
 *
 * @param s       Borrowed. One caller at a time per session.
 * @param ids     [n] token ids, borrowed for the call; each below n_vocab.
 * @param n       1 .. room left in the trained context.
 * @param logits  [n_vocab] f32, borrowed from s until the next call on s. May be NULL.
 * @return 0, or with s's tokens and *logits unchanged: KVD_E_RANGE; KVD_E_BUDGET,
 *         then err->need_bytes says how many and err->max_tokens the longest
 *         context that fits (KVD_EVICT_DISK: also when the disk failed and recomputing
 *         does not fit); KVD_E_IO, see KVD_EVICT_DISK; KVD_E_NOMEM, a retry is safe; KVD_E_NUMERIC;
 *         KVD_E_CANCELLED when the progress callback said so.
 * Memory: charges the KV, stream, layer and checkpoint accounts, never past the
 *         budget.
 * Source: arXiv 2603.19664, Algorithm 1. We deviate: docs/memory.md, "The pass".
 */
KVD_API int kvd_session_feed(kvd_session *s, const int32_t *ids, int64_t n, const float **logits, kvd_error *err);

/* Called with the logits of one row ([n_vocab], borrowed for the call) at
 * position pos; rows ascend. Return 0 to go on, anything else to cancel. */
typedef int (*kvd_logits_fn)(void *ctx, int64_t pos, const float *logits);

/* As kvd_session_feed, with the logits of each of the last n_logits new tokens
 * (n_logits <= n). */
KVD_API int kvd_session_feed_all(kvd_session *s, const int32_t *ids, int64_t n, int64_t n_logits, kvd_logits_fn fn,
                                 void *ctx, kvd_error *err);

/* Forget all tokens from position n_tokens on (0..current). */
KVD_API int kvd_session_rewind(kvd_session *s, int64_t n_tokens, kvd_error *err);

/* Drop all K and V, in memory and on disk; the next feed rebuilds what it needs. The
 * tokens stay. */
KVD_API void kvd_session_park(kvd_session *s);

/* Progress of a pass: rows x layers done of all; recomputed says how many of the
 * pass's rows are rebuilt ones. Return non-zero to cancel (also from another
 * thread or a signal handler by way of a flag it reads). Called on the caller's
 * thread, many times a second. */
typedef int (*kvd_progress_fn)(void *ctx, int64_t done, int64_t total, int64_t rows, int64_t recomputed);
KVD_API void kvd_session_set_progress(kvd_session *s, kvd_progress_fn fn, void *ctx);

typedef struct kvd_session_stats {
    int64_t n_tokens;
    int64_t resident_tokens;   /* positions whose K and V are in memory */
    int64_t evicted_tokens;    /* the others */
    int64_t recomputed_tokens; /* sum of rebuilt positions over all passes */
    int64_t passes;
    int64_t drafted, accepted; /* speculation: none yet, always 0 */
    const char *tier;          /* of the passes now: "full", "recompute", "disk"; "dropped": a lossy policy */
    bool disk;                 /* a spill file is in use */
    int64_t disk_read_bytes, disk_written_bytes;
    double disk_wait_s;        /* passes waited for the disk */
    const char *disk_error;    /* why the disk tier was given up, borrowed from s; NULL: it was not */
} kvd_session_stats;
KVD_API void kvd_session_get_stats(const kvd_session *s, kvd_session_stats *st);

/* ---- memory --------------------------------------------------------------- */

/* One account of the model's ledger, i from 0; false when there are no more.
 * context: counts against the budget. Any thread. */
KVD_API bool kvd_memory_account(const kvd_model *m, int i, const char **name, bool *context, int64_t *now_bytes,
                                int64_t *peak_bytes);
/* Sum and peak of the sum over the context accounts; budget 0: no limit. */
KVD_API void kvd_memory_context(const kvd_model *m, int64_t *now_bytes, int64_t *peak_bytes, int64_t *budget_bytes);
/* Set the budget; KVD_E_BUDGET if more is in use already. 0: no limit. Any thread; a
 * pass that is under way may then fail with KVD_E_BUDGET, its session unchanged. */
KVD_API int kvd_memory_set_budget(kvd_model *m, int64_t budget_bytes, kvd_error *err);

/* What a session needs, before it is made. Pure arithmetic on the model's shapes. */
typedef struct kvd_plan {
    int64_t kv_bytes_per_token;       /* K and V of all layers */
    int64_t residual_bytes_per_token; /* one vector of the stream */
    int64_t evicted_bytes_per_token;  /* during a pass: stream + one layer of K and V + id */
    int64_t full_bytes;               /* context memory to keep n_tokens resident */
    int64_t least_bytes;              /* the smallest budget that can run n_tokens */
    int64_t max_tokens;               /* T_max of the budget, at most the trained context */
} kvd_plan;
/* For n_tokens of context (at most the trained one) of which the first n_prompt come
 * at once. budget 0: no limit. */
KVD_API void kvd_plan_session(const kvd_model *m, const kvd_session_options *o, int64_t n_prompt, int64_t n_tokens,
                              int64_t budget_bytes, kvd_plan *plan);

/* Measure the rates, in some two seconds: passes over few rows, attention over made-up
 * blocks, and o->spill_dir if there is one. One computing call at a time per model. */
KVD_API int kvd_calibrate(kvd_model *m, const kvd_session_options *o, kvd_rates *rates, kvd_error *err);

/* A model of the file's shapes and formats with made-up weights: to calibrate and to
 * plan before the real ones are read. Sessions over it work and say nonsense. */
KVD_API int kvd_model_load_synthetic(kvd_model **out, const char *path, const kvd_model_options *options, kvd_error *err);

typedef struct kvd_tier_plan {
    const char *name;           /* "full", "recompute", "disk" */
    bool fits, chosen;
    int64_t need_bytes;         /* the least budget with which the tier runs this */
    int64_t max_tokens;         /* T_max of the budget with this tier */
    int64_t resident_tokens;    /* at the end */
    double prefill_tokens_per_s, decode_tokens_per_s; /* predicted; 0 if it does not fit */
} kvd_tier_plan;
/* All tiers for n_prompt tokens and n_new more under a budget (0: no limit), i from
 * 0; false when there are no more. Pure arithmetic. */
KVD_API bool kvd_plan_tier(const kvd_model *m, const kvd_session_options *o, const kvd_rates *rates, int64_t n_prompt,
                           int64_t n_new, int64_t budget_bytes, int i, kvd_tier_plan *plan);

/* Bytes this process can still get: the least of MemAvailable, the cgroup's
 * limit minus use, and RLIMIT_AS minus the address space in use. */
KVD_API int64_t kvd_memory_available(void);

/* ---- generation ----------------------------------------------------------- */

typedef struct kvd_logit_bias {
    int32_t id;
    float bias;
} kvd_logit_bias;

/* Applied in this order: bias, penalties, temperature, top-k, top-p, min-p. */
typedef struct kvd_sampling {
    float temperature;       /* default 0: greedy, ties to the lowest id */
    int32_t top_k;           /* default 40; 0: off */
    float top_p;             /* default 0.95; 1: off */
    float min_p;             /* default 0.05; 0: off */
    float repeat_penalty;    /* default 1: off */
    float presence_penalty;  /* default 0: off */
    float frequency_penalty; /* default 0: off */
    int32_t penalty_tokens;  /* the last tokens that penalties look at; default 64; -1: all */
    uint64_t seed;           /* default 0 */
    uint32_t choice;         /* of n > 1 choices; default 0 */
    const kvd_logit_bias *bias;
    int64_t n_bias;
} kvd_sampling;
KVD_API void kvd_sampling_defaults(kvd_sampling *o);

typedef enum kvd_stop_reason { KVD_STOP_LENGTH, KVD_STOP_END, KVD_STOP_STRING, KVD_STOP_CONTEXT, KVD_STOP_INTERRUPTED } kvd_stop_reason;
/* "length", "end", "stop", "context", "interrupted" */
KVD_API const char *kvd_stop_reason_name(kvd_stop_reason r);

/* A new token and the text that became certain with it (whole UTF-8 characters,
 * [n_text], maybe empty; text that could begin a stop string is held back).
 * id < 0: text only, at the end. Return non-zero to stop after this token. */
typedef int (*kvd_token_fn)(void *ctx, int32_t id, const char *text, size_t n_text);

typedef struct kvd_generate_options {
    int64_t max_tokens;       /* default 256; -1: until an end token or T_max */
    kvd_sampling sampling;
    bool ignore_end;          /* end tokens are ordinary; default false */
    bool special;             /* control tokens appear in the text; default false */
    const char *const *stop;  /* [n_stop] strings, none empty */
    int64_t n_stop;
    kvd_token_fn on_token;    /* may be NULL */
    void *ctx;
} kvd_generate_options;
KVD_API void kvd_generate_options_defaults(kvd_generate_options *o);

typedef struct kvd_result {
    int32_t *tokens;          /* generated ids, owned by the result */
    int64_t n_tokens;
    char *text;               /* terminated; owned by the result */
    size_t n_text;
    kvd_stop_reason stop_reason;
    char receipt[33];         /* hex of XXH3-128, docs/numerics.md */
    double prefill_s, decode_s;
    int64_t prompt_tokens;
} kvd_result;
KVD_API void kvd_result_free(kvd_result *r);

/* Feed n prompt tokens and generate. Admission first: prompt + max_tokens must
 * fit T_max and the trained context, else KVD_E_BUDGET (need_bytes, max_tokens)
 * or KVD_E_RANGE before any work. An end token is fed to no pass and is not in
 * the text, but is in tokens. On KVD_E_NUMERIC and KVD_E_CANCELLED the result
 * holds what there is; free it in every case. */
KVD_API int kvd_generate(kvd_session *s, const int32_t *ids, int64_t n, const kvd_generate_options *o, kvd_result *r,
                         kvd_error *err);

#ifdef __cplusplus
}
#endif
#endif
