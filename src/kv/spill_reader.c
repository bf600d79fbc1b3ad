/* kv: the reading side of the spill (spill.h): a few threads, one ring.
 *
 *   reader    claim the next segment as soon as its slot is free; pread, hash,
 *             compare; mark the slot filled
 *   consumer  next: wait until the slot of the segment in turn is filled
 *             release: its slot is free
 *
 * Why more than one reader: a disk is idle between a read and the next, and busy
 * with two; that gives with small segments, so with little memory, the rate of large
 * ones. One lock and two conditions: a segment is some hundred kilobytes, so they
 * are taken a few thousand times a second at most. The threads allocate nothing,
 * take no signal and sleep between reads.
 *
 * An error is handed out in its place: what was read before it is good and comes
 * first, so what a caller sees does not depend on how far ahead the readers were. */
#define _GNU_SOURCE
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "kv/spill_int.h"

/* Small, for it counts against RLIMIT_AS; enough for a formatted message. */
#define STACK_BYTES ((size_t)256 * 1024)

/* The segment at the cursor and the cursor after it; false: no more. */
static bool advance(const kvd_spill *sp, kvd_spill_cursor *c, kvd_spill_segment *seg)
{
    for (; c->range < sp->n_ranges; c->range++, c->block = -1) {
        const kvd_spill_range *r = &sp->ranges[c->range];
        int64_t from = c->block < 0 ? r->from_block : c->block;
        if (from >= r->to_block)
            continue;
        int64_t to = (from / sp->segment_blocks + 1) * sp->segment_blocks;
        int64_t section = kvd__spill_section(sp, from)->end_block;
        to = to < r->to_block ? to : r->to_block;
        to = to < section ? to : section;
        *seg = (kvd_spill_segment){
            .layer = r->layer, .from_block = from, .n_blocks = to - from, .stride_bytes = sp->record_bytes};
        c->block = to;
        return true;
    }
    return false;
}

static char *slot_of(const kvd_spill *sp, int64_t i)
{
    return sp->slots + i % sp->n_slots * sp->segment_blocks * sp->record_bytes;
}

/* Read a segment into its slot and compare the hashes. */
static int load(kvd_spill *sp, const kvd_spill_segment *seg, char *slot, kvd_error *err)
{
    int64_t done;
    int error;
    if (!kvd__spill_file_read(sp, slot, seg->n_blocks * sp->record_bytes,
                              kvd__spill_offset(sp, seg->layer, seg->from_block), &done, &error))
        return kvd__fail(err, KVD_E_IO, "spill file, reading layer %d, block %lld: %s", seg->layer,
                         (long long)(seg->from_block + done / sp->record_bytes),
                         error ? strerror(error) : "the file ends too early");
    for (int64_t i = 0; i < seg->n_blocks; i++)
        if (kvd__spill_hash(slot + i * sp->record_bytes, sp->block_bytes) !=
            *kvd__spill_sum(sp, seg->layer, seg->from_block + i))
            return kvd__fail(err, KVD_E_CHECK, "spill file, reading layer %d, block %lld: not what was written", seg->layer,
                             (long long)(seg->from_block + i));
    return 0;
}

/* The next segment to read, if there is one and a slot for it. With the mutex held. */
static bool claim(kvd_spill *sp, kvd_spill_segment *seg, int64_t *i)
{
    if (!sp->active || sp->failed != INT64_MAX || sp->claimed - sp->released == sp->n_slots ||
        !advance(sp, &sp->ahead, seg))
        return false;
    *i = sp->claimed++;
    sp->filled[*i % sp->n_slots] = false;
    return true;
}

static void *reader(void *arg)
{
    kvd_spill *sp = arg;
    pthread_mutex_lock(&sp->mutex);
    while (!sp->quit) {
        kvd_spill_segment seg;
        kvd_error err;
        int64_t i;
        if (!claim(sp, &seg, &i)) {
            pthread_cond_wait(&sp->work, &sp->mutex);
            continue;
        }
        sp->n_busy++;
        pthread_mutex_unlock(&sp->mutex);
        int64_t before = kvd__now_ns();
        int rc = load(sp, &seg, slot_of(sp, i), &err);
        int64_t ns = kvd__now_ns() - before;
        pthread_mutex_lock(&sp->mutex);
        sp->n_busy--;
        sp->read_ns += ns;
        if (!rc) {
            sp->read_bytes += seg.n_blocks * sp->record_bytes;
            sp->filled[i % sp->n_slots] = true;
        } else if (i < sp->failed) {
            sp->failed = i;
            sp->failure = err;
            atomic_store(&sp->broken, true);
        }
        pthread_cond_signal(&sp->ready);
    }
    pthread_mutex_unlock(&sp->mutex);
    return NULL;
}

int kvd__spill_reader_start(kvd_spill *sp, kvd_error *err)
{
    pthread_attr_t attr;
    sigset_t all, old;
    if (pthread_mutex_init(&sp->mutex, NULL) || pthread_cond_init(&sp->work, NULL) || pthread_cond_init(&sp->ready, NULL) ||
        pthread_attr_init(&attr))
        return kvd__fail(err, KVD_E_NOMEM, "cannot start a reader of the spill file");
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = 0;
    while (!rc && sp->n_threads < sp->n_readers) {
        rc = pthread_create(&sp->threads[sp->n_threads], &attr, reader, sp);
        sp->n_threads += !rc;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    if (rc)
        return kvd__fail(err, KVD_E_NOMEM, "cannot start a reader of the spill file: %s", strerror(rc));
    return 0;
}

void kvd__spill_reader_stop(kvd_spill *sp)
{
    kvd__spill_read_end(sp);
    pthread_mutex_lock(&sp->mutex);
    sp->quit = true;
    pthread_cond_broadcast(&sp->work);
    pthread_mutex_unlock(&sp->mutex);
    while (sp->n_threads)
        pthread_join(sp->threads[--sp->n_threads], NULL);
    pthread_cond_destroy(&sp->ready);
    pthread_cond_destroy(&sp->work);
    pthread_mutex_destroy(&sp->mutex);
}

/* ---- the caller's side ------------------------------------------------------------ */

int kvd__spill_read_begin(kvd_spill *sp, const kvd_spill_range *ranges, int64_t n_ranges, kvd_error *err)
{
    if (!kvd__spill_is_ours(sp))
        return kvd__fail(err, KVD_E_ARG, "spill file: used after fork");
    if (sp->reading)
        return kvd__fail(err, KVD_E_ARG, "spill file: a read is under way");
    if (kvd__spill_broken(sp))
        return kvd__fail(err, KVD_E_IO, "spill file: broken by an earlier error");
    for (int64_t i = 0; i < n_ranges; i++)
        for (int64_t b = ranges[i].from_block; b < ranges[i].to_block; b++)
            if (!kvd__spill_has_layer(sp, ranges[i].layer, b))
                return kvd__fail(err, KVD_E_ARG, "spill file: layer %d, block %lld was not written", ranges[i].layer,
                                 (long long)b);
    sp->reading = true;
    sp->taken = 0;
    sp->next = (kvd_spill_cursor){0, -1};
    pthread_mutex_lock(&sp->mutex);
    sp->ranges = ranges;
    sp->n_ranges = n_ranges;
    sp->ahead = sp->next;
    sp->claimed = sp->released = 0;
    memset(sp->filled, 0, sizeof sp->filled);
    sp->failed = INT64_MAX;
    sp->active = true;
    pthread_cond_broadcast(&sp->work);
    pthread_mutex_unlock(&sp->mutex);
    return 0;
}

/* Is the segment in turn decided? With the mutex held. */
static bool decided(const kvd_spill *sp)
{
    return sp->failed <= sp->taken || (sp->taken < sp->claimed && sp->filled[sp->taken % sp->n_slots]);
}

/* Wait for segment number sp->taken; its code if it failed. */
static int await(kvd_spill *sp, kvd_error *err)
{
    int rc = 0;
    pthread_mutex_lock(&sp->mutex);
    if (!decided(sp)) {
        int64_t before = kvd__now_ns();
        while (!decided(sp))
            pthread_cond_wait(&sp->ready, &sp->mutex);
        sp->wait_ns += kvd__now_ns() - before;
    }
    if (sp->failed <= sp->taken) {
        rc = sp->failure.code;
        if (err)
            *err = sp->failure;
    }
    pthread_mutex_unlock(&sp->mutex);
    return rc;
}

int kvd__spill_next(kvd_spill *sp, kvd_spill_segment *seg, kvd_error *err)
{
    if (!sp->reading || !kvd__spill_is_ours(sp))
        return kvd__fail(err, KVD_E_ARG, "spill file: no read is under way");
    kvd_spill_cursor c = sp->next;
    kvd_spill_segment s;
    if (!advance(sp, &c, &s)) {
        *seg = (kvd_spill_segment){.stride_bytes = sp->record_bytes};
        return 0;
    }
    if (sp->taken - sp->released == sp->n_slots) /* released: only the caller writes it */
        return kvd__fail(err, KVD_E_ARG, "spill file: all %d slots are held", sp->n_slots);
    int rc = await(sp, err);
    if (rc)
        return rc;
    s.blocks = slot_of(sp, sp->taken++);
    sp->next = c;
    *seg = s;
    return 0;
}

void kvd__spill_release(kvd_spill *sp)
{
    if (!sp->reading || sp->released == sp->taken)
        return;
    pthread_mutex_lock(&sp->mutex);
    sp->released++;
    pthread_cond_signal(&sp->work);
    pthread_mutex_unlock(&sp->mutex);
}

void kvd__spill_read_end(kvd_spill *sp)
{
    if (!sp->reading || !kvd__spill_is_ours(sp))
        return;
    pthread_mutex_lock(&sp->mutex);
    sp->active = false; /* nothing more is claimed */
    while (sp->n_busy)
        pthread_cond_wait(&sp->ready, &sp->mutex);
    pthread_mutex_unlock(&sp->mutex);
    sp->reading = false;
}

void kvd__spill_stats(kvd_spill *sp, kvd_spill_stats *out)
{
    *out = (kvd_spill_stats){.written_bytes = sp->written_bytes,
                             .write_ns = sp->write_ns,
                             .wait_ns = sp->wait_ns,
                             .direct = sp->direct,
                             .named = sp->named};
    if (!kvd__spill_is_ours(sp))
        return;
    pthread_mutex_lock(&sp->mutex);
    out->read_bytes = sp->read_bytes;
    out->read_ns = sp->read_ns;
    pthread_mutex_unlock(&sp->mutex);
}
