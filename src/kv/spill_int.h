/* kv: what the files of the spill share (spill.h). Not for others. */
#ifndef KVD_KV_SPILL_INT_H
#define KVD_KV_SPILL_INT_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "kv/spill.h"

/* Where the next segment begins. Reader and consumer walk the same ranges, each with
 * a cursor of its own, so nothing about a segment but its bytes needs to be passed. */
typedef struct kvd_spill_cursor {
    int64_t range, block; /* block: -1 at the beginning of a range */
} kvd_spill_cursor;

/* Blocks [first_block, end_block) of all layers, in the file from `offset` on.
 * sums: [n_layers][blocks], 0: not there; an entry is set by a write before any read
 * may ask for it and then stays until a drop. n_there: [blocks] layers of it that are
 * there; behind the sums in the same allocation. */
typedef struct kvd_spill_section {
    int64_t first_block, end_block, offset;
    uint64_t *sums;
    uint16_t *n_there;
} kvd_spill_section;

struct kvd_spill {
    /* Fixed at creation. */
    int n_layers, n_slots, n_readers;
    int64_t block_bytes, record_bytes, segment_blocks, write_blocks;
    kvd_ledger *ledger;
    const kvd_spill_ops *ops;
    void *ops_ctx;
    int fd;
    bool direct, named;
    pid_t owner; /* after fork the child is another */
    char *memory, *slots, *bounce;
    int n_threads; /* of the readers that were started */
    pthread_t threads[KVD__SPILL_MAX_READERS];

    /* The caller's; the readers look at sections while a read is under way. */
    kvd_spill_section sections[KVD__SPILL_MAX_SECTIONS];
    int n_sections;
    int64_t max_blocks, file_bytes; /* of all sections */
    int64_t written_bytes, write_ns, wait_ns, taken;
    bool reading;
    kvd_spill_cursor next;

    _Atomic bool broken;

    /* Shared with the readers, under the mutex. Segment number i of a read lives in slot
     * i mod n_slots. Readers have claimed [0, claimed); the consumer was given
     * [0, taken) and gave back [0, released). */
    pthread_mutex_t mutex;
    pthread_cond_t work;  /* readers wait: a read, a free slot, an end */
    pthread_cond_t ready; /* the caller waits: a segment was read, or failed */
    const kvd_spill_range *ranges;
    int64_t n_ranges, claimed, released, read_bytes, read_ns;
    kvd_spill_cursor ahead; /* of the next to claim */
    int n_busy;             /* readers in a system call */
    bool active, quit;
    bool filled[KVD__SPILL_MAX_SLOTS];
    int64_t failed;    /* the first segment that failed, INT64_MAX: none */
    kvd_error failure; /* of that one */
};

/* The section of a block below max_blocks. */
static inline const kvd_spill_section *kvd__spill_section(const kvd_spill *sp, int64_t block)
{
    const kvd_spill_section *c = &sp->sections[sp->n_sections - 1];
    while (block < c->first_block)
        c--;
    return c;
}

/* Where (layer, block) is among the records of its section. */
static inline int64_t kvd__spill_index(const kvd_spill_section *c, int layer, int64_t block)
{
    return layer * (c->end_block - c->first_block) + block - c->first_block;
}

static inline off_t kvd__spill_offset(const kvd_spill *sp, int layer, int64_t block)
{
    const kvd_spill_section *c = kvd__spill_section(sp, block);
    return (off_t)(c->offset + kvd__spill_index(c, layer, block) * sp->record_bytes);
}

static inline uint64_t *kvd__spill_sum(const kvd_spill *sp, int layer, int64_t block)
{
    const kvd_spill_section *c = kvd__spill_section(sp, block);
    return &c->sums[kvd__spill_index(c, layer, block)];
}

static inline uint16_t *kvd__spill_n_there(const kvd_spill *sp, int64_t block)
{
    const kvd_spill_section *c = kvd__spill_section(sp, block);
    return &c->n_there[block - c->first_block];
}

/* XXH3-64 of a block's bytes, never 0. */
uint64_t kvd__spill_hash(const char *block, int64_t bytes);

/* spill_file.c: open and reserve the file of sp->file_bytes; sets fd, direct, named. */
int kvd__spill_file_open(kvd_spill *sp, const kvd_spill_options *o, kvd_error *err);
/* Space for `bytes` from the beginning on. place: for the message, " in FOLDER" or "". */
int kvd__spill_file_reserve(kvd_spill *sp, int64_t bytes, const char *place, kvd_error *err);
/* All n bytes, a multiple of KVD__SPILL_ALIGN, or the errno (0 for a file that ends too
 * early) and the bytes that did get through. */
bool kvd__spill_file_read(kvd_spill *sp, char *buf, int64_t n, off_t at, int64_t *done, int *error);
bool kvd__spill_file_write(kvd_spill *sp, const char *buf, int64_t n, off_t at, int64_t *done, int *error);

/* spill_reader.c */
int kvd__spill_reader_start(kvd_spill *sp, kvd_error *err);
void kvd__spill_reader_stop(kvd_spill *sp);

#endif
