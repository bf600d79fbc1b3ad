/* The buffers of a pass that do not grow with context. */
#include <string.h>

#include "model/steps.h"

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

typedef struct {
    struct kvd_model *m;
    kvd_error *err;
    bool failed;
} maker;

/* n values of `size` bytes, or note the failure. Touched now: what the process
 * grows by after loading is then context memory alone. */
static void *make(maker *k, int64_t n, size_t size)
{
    void *p = kvd__alloc_array(k->m->ledger, KVD_ACC_COMPUTE, (size_t)n, size, k->err);
    k->failed |= !p;
    if (p)
        memset(p, 0, (size_t)n * size);
    return p;
}

static void make_acts(maker *k, kvd_act_buffer *b, int64_t rows, int64_t max_k)
{
    b->ld_x = round_up(max_k, 16);
    b->ld_q = round_up(max_k, 64);
    b->ld_d = round_up(max_k / 32 + 1, 16);
    b->ld_b = round_up(max_k / 16 + 1, 16);
    b->x = make(k, rows * b->ld_x, sizeof(float));
    b->q32 = make(k, rows * b->ld_q, 1);
    b->q256 = make(k, rows * b->ld_q, 1);
    b->d32 = make(k, rows * b->ld_d, sizeof(float));
    b->s32 = make(k, rows * b->ld_d, sizeof(float));
    b->d256 = make(k, rows * b->ld_d, sizeof(float));
    b->b32 = make(k, rows * b->ld_b, sizeof(int32_t));
    b->b256 = make(k, rows * b->ld_b, sizeof(int32_t));
}

static void free_acts(kvd_act_buffer *b)
{
    void *all[] = {b->x, b->q32, b->q256, b->d32, b->s32, b->d256, b->b32, b->b256};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        kvd__free(all[i]);
}

static void make_lane(maker *k, kvd_lane *l)
{
    const kvd_config *c = &k->m->config;
    int64_t group = c->n_heads / c->n_kv_heads, queries = group * KVD__UNIT_ROWS;
    l->attn = make(k, (int64_t)kvd__attn_scratch_bytes(c->d_head), 1);
    l->M = make(k, queries, sizeof(float));
    l->L = make(k, queries, sizeof(float));
    l->O = make(k, queries * c->d_head, sizeof(float));
    l->panel = make(k, k->m->activations_f32 ? k->m->scratch.max_k * 16 : 0, sizeof(float));
    l->row = make(k, round_up(c->d_model, 16), sizeof(float));
    l->cs = make(k, round_up(c->n_rot, 16), sizeof(float));
    l->lo = make(k, KVD__UNIT_ROWS, sizeof(int32_t));
    l->hi = make(k, KVD__UNIT_ROWS, sizeof(int32_t));
}

static void free_lane(kvd_lane *l)
{
    void *all[] = {l->attn, l->M, l->L, l->O, l->panel, l->row, l->cs, l->lo, l->hi};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        kvd__free(all[i]);
}

int kvd__scratch_create(struct kvd_model *m, int chunk, kvd_error *err)
{
    const kvd_config *c = &m->config;
    kvd_scratch *s = &m->scratch;
    maker k = {m, err, false};
    int64_t n_threads = kvd__pool_threads(m->pool), q = (int64_t)c->n_heads * c->d_head, kv = (int64_t)c->n_kv_heads * c->d_head;
    int64_t rows = chunk > KVD__HEAD_ROWS ? chunk : KVD__HEAD_ROWS; /* the head uses acts and h too */
    s->chunk = chunk;
    s->max_k = c->d_model > q ? c->d_model : q;
    s->max_k = s->max_k > c->d_ffn ? s->max_k : c->d_ffn;
    s->k_column = round_up(q, 16);
    s->v_column = s->k_column + round_up(kv, 16);
    s->ld_qkv = s->v_column + round_up(kv, 16);
    s->ld_ffn = round_up(c->d_ffn > kv ? c->d_ffn : kv, 16);
    s->ld_ffn = s->ld_ffn > q ? s->ld_ffn : q; /* attention keeps its O there */
    s->ld_vocab = round_up(c->n_vocab, 16);
    s->qkv = make(&k, chunk * s->ld_qkv, sizeof(float));
    s->attn = make(&k, chunk * q, sizeof(float));
    s->gate = make(&k, chunk * s->ld_ffn, sizeof(float));
    s->up = make(&k, chunk * s->ld_ffn, sizeof(float));
    s->y = make(&k, chunk * (int64_t)c->d_model, sizeof(float));
    s->h = make(&k, rows * c->d_model, sizeof(float));
    s->logits = make(&k, KVD__HEAD_ROWS * s->ld_vocab, sizeof(float));
    s->part_m = make(&k, (KVD__WAVE_TILES + 1) * (int64_t)c->n_heads, sizeof(float));
    s->part_l = make(&k, (KVD__WAVE_TILES + 1) * (int64_t)c->n_heads, sizeof(float));
    s->part_o = make(&k, (KVD__WAVE_TILES + 1) * q, sizeof(float));
    s->state_m = make(&k, chunk * (int64_t)c->n_heads, sizeof(float));
    s->state_l = make(&k, chunk * (int64_t)c->n_heads, sizeof(float));
    s->acts = make(&k, 1 + n_threads, sizeof *s->acts);
    s->lanes = make(&k, n_threads, sizeof *s->lanes);
    for (int64_t i = 0; i <= n_threads && s->acts; i++)
        make_acts(&k, &s->acts[i], i ? 1 : rows, s->max_k);
    for (int64_t i = 0; i < n_threads && s->lanes; i++)
        make_lane(&k, &s->lanes[i]);
    return k.failed ? KVD_E_NOMEM : 0;
}

void kvd__scratch_destroy(struct kvd_model *m)
{
    kvd_scratch *s = &m->scratch;
    int64_t n_threads = m->pool ? kvd__pool_threads(m->pool) : 0;
    for (int64_t i = 0; i <= n_threads && s->acts; i++)
        free_acts(&s->acts[i]);
    for (int64_t i = 0; i < n_threads && s->lanes; i++)
        free_lane(&s->lanes[i]);
    void *all[] = {s->qkv, s->attn, s->gate, s->up, s->y, s->h, s->logits, s->part_m, s->part_l, s->part_o, s->state_m, s->state_l, s->acts, s->lanes};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        kvd__free(all[i]);
    memset(s, 0, sizeof *s);
}
