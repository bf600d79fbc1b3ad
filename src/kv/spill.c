/* kv: the spill file (spill.h): sizes, life, writing.
 *
 * Why a region per layer and not a record per block column: a pass reads one layer
 * of all positions at a time. So a layer is one sequential read, and the price is on
 * the side that is paid once: a column is written in n_layers places.
 *
 * Why sections and not a larger file: records of a layer lie together, so room for
 * more of each would move all of them. A session that outgrows its file adds a
 * section half as large as all before, so there are few, and each is long.
 *
 * Why hashes in RAM and not in the file: a record that a disk wrote to the wrong
 * place, or never wrote, would bring a matching hash along. They cost 8 bytes per
 * 16 positions and layer, against 2*n_kv*d_head*16*b of the block itself.
 *
 * Why a bounce buffer for writes although blocks are in memory already: O_DIRECT
 * wants 4096-byte alignment of address and length, blocks have 64; and what is
 * gathered in it goes out in one call. */
#define _GNU_SOURCE
#include "base/minmax.h"
#include "kv/spill.h"

#include <assert.h>
#include <string.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "kv/spill_int.h"

void kvd__spill_defaults(kvd_spill_options *o)
{
    *o = (kvd_spill_options){.segment_blocks = 16, .n_slots = 4, .n_readers = 2, .write_blocks = 4, .direct = true};
}

uint64_t kvd__spill_hash(const char *block, int64_t bytes)
{
    uint64_t h = XXH3_64bits(block, (size_t)bytes);
    return h ? h : 1;
}

/* ---- sizes ---------------------------------------------------------------------- */

typedef struct sizes {
    int64_t block, record, segment_blocks, write_blocks, layer, checkpoint, file;
} sizes;

static bool mul(int64_t a, int64_t b, int64_t *out) { return !__builtin_mul_overflow(a, b, out); }
static bool add(int64_t a, int64_t b, int64_t *out) { return !__builtin_add_overflow(a, b, out); }
static int64_t per_block(int n_layers) { return n_layers * (int64_t)sizeof(uint64_t) + (int64_t)sizeof(uint16_t); }

int64_t kvd__spill_record_bytes(const kvd_kv_shape *s)
{
    int64_t block = kvd__min64(kvd__kv_block_bytes(s), INT64_MAX / 4);
    return (block + KVD__SPILL_ALIGN - 1) / KVD__SPILL_ALIGN * KVD__SPILL_ALIGN;
}

/* False: the options (or the shape) can not be. */
static bool measure(const kvd_kv_shape *s, const kvd_spill_options *o, sizes *z)
{
    if (s->n_layers < 1 || s->n_layers > KVD__MAX_LAYERS || s->n_kv_heads < 1 || s->d_head < 1 || o->max_blocks < 1 ||
        o->segment_blocks < 1 || o->write_blocks < 1 || o->n_slots < 2 || o->n_slots > KVD__SPILL_MAX_SLOTS || o->n_readers < 1 ||
        o->n_readers > KVD__SPILL_MAX_READERS)
        return false;
    z->block = kvd__kv_block_bytes(s);
    if (z->block <= 0)
        return false;
    z->record = kvd__spill_record_bytes(s);
    z->segment_blocks = kvd__min64(o->segment_blocks, o->max_blocks);
    z->write_blocks = kvd__min64(o->write_blocks, o->max_blocks);
    int64_t records, n;
    return mul(z->segment_blocks, o->n_slots, &n) && add(n, z->write_blocks, &n) && mul(n, z->record, &n) &&
           add(n, KVD__SPILL_ALIGN, &z->layer) && /* to align the first */
           mul(o->max_blocks, per_block(s->n_layers), &z->checkpoint) && mul(o->max_blocks, s->n_layers, &records) &&
           mul(records, z->record, &z->file) && add(z->layer, z->checkpoint, &n) && n < INT64_MAX / 4;
}

int64_t kvd__spill_bytes_per_block(const kvd_kv_shape *s) { return per_block(s->n_layers); }

int64_t kvd__spill_bytes(const kvd_kv_shape *s, const kvd_spill_options *o)
{
    sizes z;
    return measure(s, o, &z) ? z.layer + z.checkpoint : INT64_MAX;
}

int64_t kvd__spill_file_bytes(const kvd_kv_shape *s, const kvd_spill_options *o)
{
    sizes z;
    return measure(s, o, &z) ? z.file : INT64_MAX;
}

/* ---- life ----------------------------------------------------------------------- */

/* A section for blocks up to max_blocks behind those there are, without its space on
 * disk. Not yet counted: the caller does that when all is well. */
static int add_section(kvd_spill *sp, int64_t max_blocks, int64_t bytes, kvd_error *err)
{
    kvd_spill_section *c = &sp->sections[sp->n_sections];
    *c = (kvd_spill_section){.first_block = sp->max_blocks, .end_block = max_blocks, .offset = sp->file_bytes};
    c->sums = kvd__alloc(sp->ledger, KVD_ACC_CHECKPOINT, (size_t)bytes, err);
    if (!c->sums)
        return err->code;
    c->n_there = (uint16_t *)(c->sums + sp->n_layers * (max_blocks - sp->max_blocks));
    return 0;
}

static void count_section(kvd_spill *sp)
{
    const kvd_spill_section *c = &sp->sections[sp->n_sections++];
    sp->file_bytes += sp->n_layers * (c->end_block - c->first_block) * sp->record_bytes;
    sp->max_blocks = c->end_block;
}

static int allocate(kvd_spill *sp, const sizes *z, int64_t max_blocks, kvd_error *err)
{
    sp->memory = kvd__alloc(sp->ledger, KVD_ACC_LAYER, (size_t)z->layer, err);
    if (!sp->memory)
        return err->code;
    uintptr_t first = ((uintptr_t)sp->memory + KVD__SPILL_ALIGN - 1) / KVD__SPILL_ALIGN * KVD__SPILL_ALIGN;
    sp->slots = sp->memory + (first - (uintptr_t)sp->memory);
    sp->bounce = sp->slots + sp->n_slots * sp->segment_blocks * sp->record_bytes;
    int rc = add_section(sp, max_blocks, z->checkpoint, err);
    if (!rc)
        count_section(sp);
    return rc;
}

int kvd__spill_create(kvd_spill **out, const kvd_kv_shape *s, const kvd_spill_options *o, kvd_ledger *l, kvd_error *err)
{
    kvd_error local, *e = err ? err : &local; /* the code is needed either way */
    sizes z;
    if (!o->dir || !measure(s, o, &z))
        return kvd__fail(e, KVD_E_RANGE, "spill: %s", o->dir ? "sizes out of range" : "no folder");
    kvd_spill *sp = kvd__alloc(l, KVD_ACC_HOST, sizeof *sp, e);
    if (!sp)
        return e->code;
    sp->n_layers = s->n_layers;
    sp->n_slots = o->n_slots;
    sp->n_readers = o->n_readers;
    sp->block_bytes = z.block;
    sp->record_bytes = z.record;
    sp->ledger = l;
    sp->segment_blocks = z.segment_blocks;
    sp->write_blocks = z.write_blocks;
    sp->ops = o->ops ? o->ops : &kvd__spill_system;
    sp->ops_ctx = o->ops_ctx;
    sp->fd = -1;
    sp->owner = getpid();
    int rc = allocate(sp, &z, o->max_blocks, e);
    if (!rc)
        rc = kvd__spill_file_open(sp, o, e);
    if (!rc)
        rc = kvd__spill_reader_start(sp, e);
    if (rc)
        kvd__spill_destroy(&sp);
    else
        *out = sp;
    return rc;
}

void kvd__spill_destroy(kvd_spill **psp)
{
    kvd_spill *sp = *psp;
    *psp = NULL;
    if (!sp)
        return;
    if (sp->n_threads && kvd__spill_is_ours(sp))
        kvd__spill_reader_stop(sp);
    if (sp->fd >= 0)
        close(sp->fd);
    for (int i = 0; i < sp->n_sections; i++)
        kvd__free(sp->sections[i].sums);
    kvd__free(sp->memory);
    kvd__free(sp);
}

int kvd__spill_grow(kvd_spill *sp, int64_t max_blocks, kvd_error *err)
{
    kvd_error local, *e = err ? err : &local;
    int64_t more = max_blocks - sp->max_blocks, records, file, bytes;
    if (!kvd__spill_is_ours(sp) || sp->reading)
        return kvd__fail(e, KVD_E_ARG, "spill file: %s", sp->reading ? "a read is under way" : "used after fork");
    if (kvd__spill_broken(sp))
        return kvd__fail(e, KVD_E_IO, "spill file: broken by an earlier error");
    if (more < 1 || sp->max_blocks % KVD__TILE_BLOCKS || sp->n_sections == KVD__SPILL_MAX_SECTIONS ||
        !mul(more, sp->n_layers, &records) || !mul(records, sp->record_bytes, &file) || !add(file, sp->file_bytes, &file) ||
        !mul(more, per_block(sp->n_layers), &bytes) || bytes > INT64_MAX / 4)
        return kvd__fail(e, KVD_E_RANGE, "spill file: it can not grow from %lld to %lld blocks", (long long)sp->max_blocks,
                         (long long)max_blocks);
    int rc = add_section(sp, max_blocks, bytes, e);
    if (!rc && (rc = kvd__spill_file_reserve(sp, file, "", e)))
        kvd__free(sp->sections[sp->n_sections].sums);
    if (!rc)
        count_section(sp);
    return rc;
}

bool kvd__spill_is_ours(const kvd_spill *sp) { return sp->owner == getpid(); }

/* ---- writing -------------------------------------------------------------------- */

/* Blocks from `block` on that go out together: up to write_blocks, the last of them
 * before `to`, the section's end or one that is there. */
static int64_t gather(kvd_spill *sp, int layer, int64_t block, int64_t to, kvd_spill_get_fn get, void *ctx)
{
    int64_t n = 0;
    to = kvd__min64(to, kvd__spill_section(sp, block)->end_block);
    while (n < sp->write_blocks && block + n < to && !*kvd__spill_sum(sp, layer, block + n)) {
        const char *bytes = get(ctx, layer, block + n);
        assert(bytes);
        memcpy(sp->bounce + n * sp->record_bytes, bytes, (size_t)sp->block_bytes);
        n++;
    }
    return n;
}

static int write_group(kvd_spill *sp, int layer, int64_t block, int64_t n, kvd_error *err)
{
    int64_t bytes = n * sp->record_bytes, done, before = kvd__now_ns();
    int error;
    bool ok = kvd__spill_file_write(sp, sp->bounce, bytes, kvd__spill_offset(sp, layer, block), &done, &error);
    sp->write_ns += kvd__now_ns() - before;
    if (!ok)
        return kvd__fail(err, KVD_E_IO, "spill file, writing layer %d, block %lld: %s", layer,
                         (long long)(block + done / sp->record_bytes), error ? strerror(error) : "nothing was written");
    sp->written_bytes += bytes;
    for (int64_t i = 0; i < n; i++) {
        *kvd__spill_sum(sp, layer, block + i) = kvd__spill_hash(sp->bounce + i * sp->record_bytes, sp->block_bytes);
        ++*kvd__spill_n_there(sp, block + i);
    }
    return 0;
}

int kvd__spill_write_layer(kvd_spill *sp, int layer, int64_t from_block, int64_t to_block, kvd_spill_get_fn get,
                           void *ctx, kvd_error *err)
{
    if (!kvd__spill_is_ours(sp))
        return kvd__fail(err, KVD_E_ARG, "spill file: used after fork");
    if (kvd__spill_broken(sp))
        return kvd__fail(err, KVD_E_IO, "spill file: broken by an earlier error");
    if (layer < 0 || layer >= sp->n_layers || from_block < 0 || to_block > sp->max_blocks)
        return kvd__fail(err, KVD_E_RANGE, "spill file: layer %d, blocks %lld to %lld of %lld", layer,
                         (long long)from_block, (long long)to_block, (long long)sp->max_blocks);
    for (int64_t b = from_block; b < to_block;) {
        int64_t n = gather(sp, layer, b, to_block, get, ctx);
        int rc = n ? write_group(sp, layer, b, n, err) : 0;
        if (rc)
            return rc;
        b += n ? n : 1;
    }
    return 0;
}

int kvd__spill_write(kvd_spill *sp, int64_t from_block, int64_t to_block, kvd_spill_get_fn get, void *ctx,
                     kvd_error *err)
{
    for (int layer = 0; layer < sp->n_layers; layer++) {
        int rc = kvd__spill_write_layer(sp, layer, from_block, to_block, get, ctx, err);
        if (rc)
            return rc;
    }
    return 0;
}

bool kvd__spill_has(const kvd_spill *sp, int64_t block)
{
    return block >= 0 && block < sp->max_blocks && *kvd__spill_n_there(sp, block) == sp->n_layers && !kvd__spill_broken(sp);
}

bool kvd__spill_has_layer(const kvd_spill *sp, int layer, int64_t block)
{
    return block >= 0 && block < sp->max_blocks && layer >= 0 && layer < sp->n_layers &&
           *kvd__spill_sum(sp, layer, block) && !kvd__spill_broken(sp);
}

void kvd__spill_drop(kvd_spill *sp, int64_t from_block)
{
    assert(!sp->reading);
    for (const kvd_spill_section *c = sp->sections; c < sp->sections + sp->n_sections; c++) {
        int64_t from = kvd__max64(from_block, c->first_block), n = c->end_block - from;
        for (int layer = 0; layer < sp->n_layers && n > 0; layer++)
            memset(&c->sums[kvd__spill_index(c, layer, from)], 0, (size_t)n * sizeof *c->sums);
        if (n > 0)
            memset(&c->n_there[from - c->first_block], 0, (size_t)n * sizeof *c->n_there);
    }
}

bool kvd__spill_broken(const kvd_spill *sp) { return atomic_load(&sp->broken); }
