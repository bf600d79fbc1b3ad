/* kv: the spill file, the disk tier of evicted K and V.
 *
 * A position that left RAM can be recomputed, or its K and V can be written here
 * once and read back in every pass, layer by layer, while the layer before is
 * being computed. What comes back is what was written, to the bit (each block is
 * hashed), or it is an error and the caller recomputes: there is no third outcome.
 *
 *   file (unnamed, reserved whole)
 *   +----------------------------+----------------------------+-- ... --+-- ...
 *   | section 0, layer 0         | section 0, layer 1         |         | section 1
 *   | record 0 | 1 | 2 | ...     | record 0 | 1 | 2 | ...     |         |
 *   +----------------------------+----------------------------+-- ... --+-- ...
 *   record = one block (kv.h: 16 positions of one layer, K then V), padded to
 *   4096 bytes. The first section has room for the max_blocks of creation, each
 *   further one for what kvd__spill_grow adds; within a section a layer is in one
 *   piece, so reading it is sequential but for a jump a section.
 *
 * Context memory of a spill, allocated at creation (kvd__spill_bytes), and for more
 * blocks when it grows:
 *   LAYER       a ring of n_slots slots of segment_blocks records, which n_readers
 *               threads fill ahead of the consumer, and write_blocks records to
 *               write through; 820 KiB for SmolLM2 with the defaults
 *   CHECKPOINT  8 bytes per (layer, block): XXH3-64, and 2 bytes per block
 * The page cache is no hidden part of it: O_DIRECT where the file system takes it,
 * else pages are dropped after each transfer.
 *
 * Reading, as a pass does it:
 *
 *   kvd_spill_range r[] = {{0, 0, n}, {1, 0, n}, ...};   // in the order of use
 *   kvd__spill_read_begin(sp, r, n_layers, err);
 *   for each range, until its blocks are there:
 *       kvd__spill_next(sp, &seg, err);                  // one thread; waits
 *       ... all threads read seg.blocks ...
 *       kvd__spill_release(sp);                          // oldest segment
 *   kvd__spill_read_end(sp);                             // also midway, also after errors
 *
 * Errors. A failed write changes nothing but what was not yet written: the block is
 * just not there. A failed read (error, file too short, wrong hash) marks the spill
 * broken: kvd__spill_has is false from then on, everything fails, and what remains
 * is to recompute and to destroy it.
 *
 * Nothing stays on disk: the file never has a name (O_TMPFILE), or where the file
 * system can not do that, loses it (mode 0600) in the call after the one that made
 * it. The kernel frees the space when the process ends, however it ends.
 *
 * Thread safety: one caller at a time per kvd_spill; the bytes of a segment may be
 * read by all threads between next and release, kvd__spill_broken may be asked by
 * all. Writing is allowed while a read is under way (what is read and what is
 * written are never the same block). After fork() the child has no readers
 * (kvd__spill_is_ours is false): it may call kvd__spill_destroy, which takes nothing
 * from the parent, and the rest answers KVD_E_ARG. The file is O_CLOEXEC.
 *
 * Layer: above base and kern; does not see model. */
#ifndef KVD_KV_SPILL_H
#define KVD_KV_SPILL_H

#include <sys/types.h>

#include "kv/kv.h"

typedef struct kvd_spill kvd_spill;

/* The system calls that can fail, as the system has them (-1 and errno), for tests
 * to stand in between. ctx is kvd_spill_options.ops_ctx. pread and forget are called
 * on the readers' threads too, the rest on the caller's only. */
typedef struct kvd_spill_ops {
    int (*open)(void *ctx, int dir_fd, const char *path, int flags); /* openat, mode 0600 */
    long (*fs_type)(void *ctx, int fd);                              /* f_type of fstatfs */
    int (*reserve)(void *ctx, int fd, off_t bytes);                  /* fallocate from 0; may be more than before */
    ssize_t (*pread)(void *ctx, int fd, void *buf, size_t n, off_t at);
    ssize_t (*pwrite)(void *ctx, int fd, const void *buf, size_t n, off_t at);
    int (*write_back)(void *ctx, int fd, off_t at, off_t n); /* sync_file_range, and wait for it */
    int (*forget)(void *ctx, int fd, off_t at, off_t n);     /* POSIX_FADV_DONTNEED; may fail */
} kvd_spill_ops;

extern const kvd_spill_ops kvd__spill_system;

typedef struct kvd_spill_options {
    const char *dir;           /* an existing folder, borrowed for the call. No default */
    int64_t max_blocks;        /* per layer; space for all of them is reserved. No default */
    int64_t segment_blocks;    /* read together, 1..: 16 (a multiple of KVD__TILE_BLOCKS keeps tiles whole) */
    int n_slots;               /* segments in the ring, 2..KVD__SPILL_MAX_SLOTS: 4 */
    int n_readers;             /* reads under way at once, 1..KVD__SPILL_MAX_READERS: 2 */
    int64_t write_blocks;      /* written together, 1..: 4 */
    bool direct;               /* ask for O_DIRECT: true */
    const kvd_spill_ops *ops;  /* NULL: &kvd__spill_system */
    void *ops_ctx;             /* NULL */
} kvd_spill_options;

enum { KVD__SPILL_MAX_SLOTS = 1024, KVD__SPILL_MAX_READERS = 16, KVD__SPILL_MAX_SECTIONS = 32, KVD__SPILL_ALIGN = 4096 };

/* The defaults named above; dir and max_blocks are left to be set. */
void kvd__spill_defaults(kvd_spill_options *o);

/* Bytes of a layer's block in the file and in the ring, INT64_MAX / 2 at most. Pure. */
int64_t kvd__spill_record_bytes(const kvd_kv_shape *s);

/* Context memory that kvd__spill_create takes (LAYER and CHECKPOINT together), and
 * bytes that it reserves on disk. Pure; INT64_MAX for options that can not be. */
int64_t kvd__spill_bytes(const kvd_kv_shape *s, const kvd_spill_options *o);
int64_t kvd__spill_file_bytes(const kvd_kv_shape *s, const kvd_spill_options *o);
/* Context memory that each of max_blocks takes of it, buffers aside. */
int64_t kvd__spill_bytes_per_block(const kvd_kv_shape *s);

/* Make the file and start the readers (threads with all signals blocked).
 * KVD_E_RANGE: options; KVD_E_IO: the folder or the file, with need_bytes if the
 * disk (or RLIMIT_FSIZE) has no room; KVD_E_UNSUPPORTED: the folder is in memory
 * (tmpfs, ramfs); KVD_E_BUDGET, KVD_E_NOMEM. On failure nothing remains.
 * The shape is copied, the ledger borrowed until destroy. */
int kvd__spill_create(kvd_spill **out, const kvd_kv_shape *s, const kvd_spill_options *o, kvd_ledger *l,
                      kvd_error *err);
/* Ends a read, joins the threads, closes the file. Sets *sp to NULL; NULL inside is
 * accepted. */
void kvd__spill_destroy(kvd_spill **sp);

/* Room for max_blocks per layer, more than there is now; what was written stays where
 * it is. Takes (max_blocks - those before) * kvd__spill_bytes_per_block. On failure
 * nothing is changed: KVD_E_ARG: while a read is under way, or after fork;
 * KVD_E_RANGE: no growth, too many sections, or what there was ends within a tile (a
 * segment lies in one section, a tile in one segment); KVD_E_IO: as at creation, also
 * when it is broken; KVD_E_BUDGET, KVD_E_NOMEM. */
int kvd__spill_grow(kvd_spill *sp, int64_t max_blocks, kvd_error *err);

/* Was it made by this process? */
bool kvd__spill_is_ours(const kvd_spill *sp);

/* ---- writing ---------------------------------------------------------------- */

/* The bytes of a block (kvd__kv_block_bytes), which need to be valid only until the
 * next call of it. */
typedef const char *(*kvd_spill_get_fn)(void *ctx, int layer, int64_t block);

/* Write blocks [from_block, to_block) of one layer, of all layers. They must be final
 * (16 positions each): a (layer, block) is written once, and skipped without a look
 * at its bytes when it is there already. The write order is free; a pass may write
 * each layer as it is made.
 * KVD_E_RANGE: past max_blocks; KVD_E_IO: a block that failed is named; what is there
 * is there (kvd__spill_has), and a later try goes on with the rest. */
int kvd__spill_write_layer(kvd_spill *sp, int layer, int64_t from_block, int64_t to_block, kvd_spill_get_fn get,
                           void *ctx, kvd_error *err);
int kvd__spill_write(kvd_spill *sp, int64_t from_block, int64_t to_block, kvd_spill_get_fn get, void *ctx,
                     kvd_error *err);

/* Are all layers of the block there, and is the spill sound? */
bool kvd__spill_has(const kvd_spill *sp, int64_t block);
/* The same of one layer. */
bool kvd__spill_has_layer(const kvd_spill *sp, int layer, int64_t block);

/* Forget blocks from from_block on (rewind; a block that becomes partial belongs to
 * them). Not while a read is under way. Their space stays reserved. */
void kvd__spill_drop(kvd_spill *sp, int64_t from_block);

/* ---- reading ---------------------------------------------------------------- */

typedef struct kvd_spill_range {
    int layer;
    int64_t from_block, to_block; /* empty is allowed */
} kvd_spill_range;

/* Blocks in memory: block from_block + i at blocks + i*stride_bytes. */
typedef struct kvd_spill_segment {
    const char *blocks; /* borrowed until its release */
    int layer;
    int64_t from_block, n_blocks; /* 0 blocks: all ranges are done */
    int64_t stride_bytes;         /* block bytes rounded up to KVD__SPILL_ALIGN */
} kvd_spill_segment;

/* Begin to read ranges in this order. A segment lies within one range and section, and
 * is cut at multiples of segment_blocks (absolute, so that tiles stay whole).
 * ranges: [n_ranges], borrowed until kvd__spill_read_end.
 * KVD_E_ARG: a read is under way, or a block is not there; KVD_E_IO: broken. */
int kvd__spill_read_begin(kvd_spill *sp, const kvd_spill_range *ranges, int64_t n_ranges, kvd_error *err);

/* Wait for the next segment; its hashes have been verified. Several may be held, but
 * each held slot is one less to read ahead into, and with all n_slots held it is
 * KVD_E_ARG (it would wait forever). After the last range: 0 with n_blocks == 0.
 * KVD_E_IO, KVD_E_CHECK (wrong hash) name layer and block; all segments before that
 * one have been handed out, and the spill is broken. *seg is untouched on failure. */
int kvd__spill_next(kvd_spill *sp, kvd_spill_segment *seg, kvd_error *err);
/* Give the oldest held slot back. */
void kvd__spill_release(kvd_spill *sp);
/* End the read wherever it is; all slots are released. Waits for a system call that
 * is under way. Nothing is done when there is no read. */
void kvd__spill_read_end(kvd_spill *sp);

bool kvd__spill_broken(const kvd_spill *sp);

/* ---- what it did ------------------------------------------------------------- */

typedef struct kvd_spill_stats {
    int64_t read_bytes, written_bytes; /* of records, as the file moved them */
    int64_t wait_ns;                   /* spent by kvd__spill_next waiting for the disk */
    int64_t read_ns, write_ns;         /* spent in reading and hashing, in writing */
    bool direct;                       /* O_DIRECT is in effect */
    bool named;                        /* the file had a name for a moment */
} kvd_spill_stats;

void kvd__spill_stats(kvd_spill *sp, kvd_spill_stats *out);

#endif
