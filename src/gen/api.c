/* The rest of the public API: models, text, memory. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/sysmem.h"
#include "gen/disk.h"
#include "gen/receipt.h"
#include "gen/session.h"

void kvd_model_options_defaults(kvd_model_options *o)
{
    *o = (kvd_model_options){.isa = KVD_ISA_AUTO, .chunk_tokens = 256};
}

static int choose_cpu(kvd_isa isa, kvd_cpu *cpu, kvd_error *err)
{
    static const kvd_cpu map[] = {[KVD_ISA_SCALAR] = KVD_CPU_SCALAR, [KVD_ISA_AVX2] = KVD_CPU_AVX2,
                                  [KVD_ISA_AVX512] = KVD_CPU_AVX512, [KVD_ISA_NEON] = KVD_CPU_NEON};
    if ((unsigned)isa > KVD_ISA_NEON)
        return kvd__fail(err, KVD_E_RANGE, "unknown instruction set");
    *cpu = isa == KVD_ISA_AUTO ? kvd__cpu_best() : map[isa];
    if (!kvd__cpu_has(*cpu))
        return kvd__fail(err, KVD_E_RANGE, "this CPU has no %s", kvd__cpu_name(*cpu));
    return 0;
}

static int load_model(kvd_model **out, const char *path, const kvd_model_options *options, bool synthetic, kvd_error *err)
{
    kvd_model_options o;
    kvd_model_options_defaults(&o);
    if (options)
        o = *options;
    kvd_load_options lo = {.n_threads = o.n_threads, .chunk = o.chunk_tokens, .activations_f32 = o.activations_f32,
                           .budget_bytes = o.kv_budget_bytes, .synthetic = synthetic};
    if (o.n_threads < 0 || o.n_threads > KVD__MAX_THREADS)
        return kvd__fail(err, KVD_E_RANGE, "threads: %d is not in 1..%d", o.n_threads, KVD__MAX_THREADS);
    if (o.chunk_tokens < 1 || o.chunk_tokens > 4096)
        return kvd__fail(err, KVD_E_RANGE, "chunk: %d is not in 1..4096", o.chunk_tokens);
    if (o.kv_budget_bytes < 0)
        return kvd__fail(err, KVD_E_RANGE, "a negative budget");
    int rc = choose_cpu(o.isa, &lo.cpu, err);
    if (rc)
        return rc;
    if (!lo.n_threads)
        lo.n_threads = kvd__cpu_count() < KVD__MAX_THREADS ? kvd__cpu_count() : KVD__MAX_THREADS;
    return kvd__model_load(out, path, &lo, err);
}

int kvd_model_load(kvd_model **out, const char *path, const kvd_model_options *options, kvd_error *err)
{
    return load_model(out, path, options, false, err);
}

int kvd_model_load_synthetic(kvd_model **out, const char *path, const kvd_model_options *options, kvd_error *err)
{
    return load_model(out, path, options, true, err);
}

int kvd_model_load_vocab(kvd_model **out, const char *path, kvd_error *err)
{
    kvd_load_options lo = {.n_threads = 1, .vocab_only = true, .cpu = KVD_CPU_SCALAR};
    return kvd__model_load(out, path, &lo, err);
}

void kvd_model_free(kvd_model **m) { kvd__model_free(m); }

void kvd_model_get_info(const kvd_model *m, kvd_model_info *info)
{
    const kvd_config *c = &m->config;
    *info = (kvd_model_info){
        .name = m->name, .architecture = c->arch, .chat_template = m->chat == KVD_CHAT_NONE ? "" : kvd__chat_name(m->chat),
        .has_chat_template = m->chat_template != NULL, .tokenizer = m->tokenizer_model, .pretokenizer = m->tokenizer_pre,
        .n_threads = m->pool ? kvd__pool_threads(m->pool) : 0,
        .n_layers = c->n_layers, .d_model = c->d_model, .n_heads = c->n_heads, .n_kv_heads = c->n_kv_heads,
        .d_head = c->d_head, .d_ffn = c->d_ffn, .n_vocab = c->n_vocab, .trained_context_tokens = c->n_ctx,
        .window_tokens = c->window, .n_params = m->n_params, .weight_bytes = m->weight_bytes, .file_bytes = m->file_bytes, .tied_head = m->tied_head,
    };
    for (int l = 0; l < c->n_layers; l++)
        info->n_local_layers += c->local[l];
    if (m->has_weights)
        kvd__hex(m->fingerprint, 16, info->fingerprint);
    snprintf(info->isa, sizeof info->isa, "%s", kvd__cpu_name(m->cpu));
}

bool kvd_model_format_share(const kvd_model *m, int i, const char **type, int64_t *n_tensors, int64_t *bytes)
{
    for (int t = 0; t < KVD_DTYPE_COUNT; t++)
        if (m->share[t].n_tensors && i-- == 0) {
            *type = kvd__dtypes[t].name;
            *n_tensors = m->share[t].n_tensors;
            *bytes = m->share[t].bytes;
            return true;
        }
    return false;
}

bool kvd_model_layer_is_local(const kvd_model *m, int layer)
{
    return layer >= 0 && layer < m->config.n_layers && m->config.local[layer];
}

void kvd_model_set_profile(kvd_model *m, bool on)
{
    m->profile = on;
    if (on)
        memset(m->stage_ns, 0, sizeof m->stage_ns);
}

bool kvd_model_profile(const kvd_model *m, int i, const char **stage, double *seconds)
{
    static const char *const names[] = {
#define KVD_X(id, name) name,
        KVD_STAGES(KVD_X)
#undef KVD_X
    };
    if (i < 0 || i >= KVD_STAGE_COUNT)
        return false;
    *stage = names[i];
    *seconds = 1e-9 * (double)m->stage_ns[i];
    return true;
}

static void add_cost(const kvd_linear *w, int64_t *macs, int64_t *bytes)
{
    *macs += w->n * w->k;
    *bytes += w->n_panels * w->panel_bytes;
}

void kvd_model_get_cost(const kvd_model *m, kvd_model_cost *cost)
{
    *cost = (kvd_model_cost){0};
    for (int l = 0; m->has_weights && l < m->config.n_layers; l++) {
        const kvd_layer *y = &m->layers[l];
        const kvd_linear *all[] = {&y->q, &y->k, &y->v, &y->o, &y->gate, &y->up, &y->down};
        for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
            add_cost(all[i], &cost->layer_macs, &cost->layer_bytes);
    }
    if (m->has_weights)
        add_cost(&m->head, &cost->head_macs, &cost->head_bytes);
}

/* ---- text ------------------------------------------------------------------------ */

int kvd_tokenize(const kvd_model *m, const char *text, size_t n, unsigned flags, int32_t **ids, int64_t *n_ids, kvd_error *err)
{
    unsigned f = (flags & KVD_TOKENIZE_BOS ? KVD_ENCODE_BOS : 0u) | (flags & KVD_TOKENIZE_SPECIAL ? KVD_ENCODE_SPECIAL : 0u);
    return kvd__tokenizer_encode(m->tokenizer, text, n, f, ids, n_ids, err);
}

void kvd_ids_free(int32_t *ids) { kvd__free(ids); }
void kvd_text_free(char *text) { kvd__free(text); }

const char *kvd_token_text(const kvd_model *m, int32_t id, bool special, size_t *n)
{
    kvd_bytes b = kvd__token_bytes(m->tokenizer, id, special);
    *n = b.n;
    return b.data ? b.data : "";
}

bool kvd_token_is_end(const kvd_model *m, int32_t id) { return kvd__token_is_end(m->tokenizer, id); }
int32_t kvd_token_bos(const kvd_model *m) { return (int32_t)kvd__tokenizer_bos(m->tokenizer); }
int32_t kvd_token_eos(const kvd_model *m) { return (int32_t)kvd__tokenizer_eos(m->tokenizer); }
bool kvd_tokenize_adds_bos(const kvd_model *m) { return kvd__tokenizer_adds_bos(m->tokenizer); }
bool kvd_tokenize_adds_eos(const kvd_model *m) { return kvd__tokenizer_adds_eos(m->tokenizer); }

static void list_chats(char *out, size_t size)
{
    size_t n = 0;
    *out = 0;
    for (int i = 0; i < KVD_CHAT_COUNT && n < size; i++)
        n += (size_t)snprintf(out + n, size - n, "%s%s", i ? ", " : "", kvd__chat_name((kvd_chat)i));
}

int kvd_chat_render(const kvd_model *m, const char *template_name, const kvd_chat_turn *turns, int64_t n, unsigned flags,
                    char **text, size_t *n_text, kvd_error *err)
{
    kvd_chat c = template_name ? kvd__chat_find(template_name) : m->chat;
    if (c == KVD_CHAT_NONE) {
        char known[160];
        list_chats(known, sizeof known);
        return template_name ? kvd__fail(err, KVD_E_ARG, "chat template \"%.40s\" is not one of: %s", template_name, known)
               : m->chat_template
                   ? kvd__fail(err, KVD_E_UNSUPPORTED, "the file's chat template is not one of those known: %s", known)
                   : kvd__fail(err, KVD_E_UNSUPPORTED, "the file has no chat template; name one of: %s", known);
    }
    _Static_assert(sizeof(kvd_chat_turn) == sizeof(kvd_chat_message), "the public and the internal record are the same");
    return kvd__chat_render(c, (const kvd_chat_message *)(const void *)turns, n, !(flags & KVD_CHAT_CLOSED),
                            !(flags & KVD_CHAT_NO_THINK), m->ledger, text, n_text, err);
}

/* ---- memory ------------------------------------------------------------------------ */

bool kvd_memory_account(const kvd_model *m, int i, const char **name, bool *context, int64_t *now_bytes, int64_t *peak_bytes)
{
    if (i < 0 || i >= KVD_ACC_COUNT)
        return false;
    *name = kvd__account_name((kvd_account)i);
    *context = kvd__account_is_context((kvd_account)i);
    *now_bytes = atomic_load(&m->ledger->now[i]);
    *peak_bytes = atomic_load(&m->ledger->peak[i]);
    return true;
}

void kvd_memory_context(const kvd_model *m, int64_t *now_bytes, int64_t *peak_bytes, int64_t *budget_bytes)
{
    *now_bytes = atomic_load(&m->ledger->context_now);
    *peak_bytes = atomic_load(&m->ledger->context_peak);
    *budget_bytes = m->ledger->budget_bytes == INT64_MAX ? 0 : m->ledger->budget_bytes;
}

int kvd_memory_set_budget(kvd_model *m, int64_t budget_bytes, kvd_error *err)
{
    kvd_ledger *l = m->ledger;
    if (budget_bytes < 0)
        return kvd__fail(err, KVD_E_RANGE, "a negative budget");
    /* Set, then look: what is reserved in between obeys the new one already. */
    int64_t old = atomic_exchange(&l->budget_bytes, budget_bytes ? budget_bytes : INT64_MAX), now = atomic_load(&l->context_now);
    if (!budget_bytes || now <= budget_bytes)
        return 0;
    atomic_store(&l->budget_bytes, old);
    return kvd__fail(err, KVD_E_BUDGET, "%lld bytes are in use, more than a budget of %lld", (long long)now, (long long)budget_bytes);
}

void kvd_plan_session(const kvd_model *m, const kvd_session_options *options, int64_t n_prompt, int64_t n_tokens,
                      int64_t budget_bytes, kvd_plan *plan)
{
    kvd_session_options o;
    kvd_session_options_defaults(&o);
    if (options)
        o = *options;
    (void)n_prompt;
    n_tokens = n_tokens < 0 ? 0 : n_tokens < m->config.n_ctx ? n_tokens : m->config.n_ctx;
    kvd_kv_shape s;
    kvd__model_kv_shape(m, kvd__kvtype_of(o.kv_type), kvd__kvtype_of(o.stream), &s);
    kvd_limits lim = {.full = o.policy == KVD_POLICY_FULL, .kv_tokens = o.kv_tokens,
                      .budget_bytes = budget_bytes > 0 ? budget_bytes : INT64_MAX, .piece_tokens = KVD__PIECE_TOKENS};
    int64_t block = kvd__kv_block_bytes(&s);
    *plan = (kvd_plan){
        .kv_bytes_per_token = block / KVD__BLOCK * s.n_layers,
        .residual_bytes_per_token = s.stream_row_bytes,
        .evicted_bytes_per_token = s.stream_row_bytes + block / KVD__BLOCK + (int64_t)sizeof(int32_t),
        .full_bytes = kvd__full_bytes(&s, n_tokens),
        .least_bytes = kvd__least_bytes(&s, &lim, n_tokens),
        .max_tokens = kvd__max_tokens(&s, &lim, m->config.n_ctx),
    };
    bool may = o.evict_to == KVD_EVICT_AUTO && o.spill_dir && o.rates && o.rates->disk_read_bytes_s > 0;
    if (lim.full || (o.evict_to != KVD_EVICT_DISK && !may))
        return;
    int64_t least = kvd__disk_least(m, &s, &lim, n_tokens), most = kvd__disk_max_tokens(m, &s, &lim);
    plan->least_bytes = may && plan->least_bytes < least ? plan->least_bytes : least;
    plan->max_tokens = may && plan->max_tokens > most ? plan->max_tokens : most;
}

int64_t kvd_memory_available(void) { return kvd__memory_available(); }
