/* kv: the reading side of the spill (spill.h): one thread, one ring.
 *
 *   reader    walk the ranges; wait for a free slot; pread, hash, compare; filled++
 *   consumer  next: wait until filled > taken; taken++     release: released++
 *
 * One lock and two conditions: a slot is some hundred kilobytes, so they are taken a
 * few thousand times a second at most. The thread allocates nothing, takes no signal
 * and sleeps between reads.
 *
 * An error is handed out in its place: what was read before it is good and comes
 * first, so what a caller sees does not depend on how far ahead the reader was. */
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
        if (to > r->to_block)
            to = r->to_block;
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

/* One read, from begin to its end or cancellation. With the mutex held. */
static void read_ranges(kvd_spill *sp)
{
    kvd_spill_cursor c = {0, -1};
    kvd_spill_segment seg;
    while (!sp->cancel && advance(sp, &c, &seg)) {
        while (!sp->cancel && sp->filled - sp->released == sp->n_slots)
            pthread_cond_wait(&sp->work, &sp->mutex);
        if (sp->cancel)
            return;
        char *slot = slot_of(sp, sp->filled);
        kvd_error err;
        pthread_mutex_unlock(&sp->mutex);
        int64_t before = kvd__spill_now_ns();
        int rc = load(sp, &seg, slot, &err);
        int64_t ns = kvd__spill_now_ns() - before;
        pthread_mutex_lock(&sp->mutex);
        sp->read_ns += ns;
        if (rc) {
            sp->failure = err;
            atomic_store(&sp->broken, true);
            return;
        }
        sp->read_bytes += seg.n_blocks * sp->record_bytes;
        sp->filled++;
        pthread_cond_signal(&sp->ready);
    }
}

static void *reader(void *arg)
{
    kvd_spill *sp = arg;
    pthread_mutex_lock(&sp->mutex);
    while (!sp->quit) {
        if (sp->active) {
            read_ranges(sp);
            sp->active = false;
            pthread_cond_signal(&sp->ready);
        } else {
            pthread_cond_wait(&sp->work, &sp->mutex);
        }
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
        return kvd__fail(err, KVD_E_NOMEM, "cannot start the reader of the spill file");
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&sp->thread, &attr, reader, sp);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    if (rc)
        return kvd__fail(err, KVD_E_NOMEM, "cannot start the reader of the spill file: %s", strerror(rc));
    sp->started = true;
    return 0;
}

void kvd__spill_reader_stop(kvd_spill *sp)
{
    kvd__spill_read_end(sp);
    pthread_mutex_lock(&sp->mutex);
    sp->quit = true;
    pthread_cond_signal(&sp->work);
    pthread_mutex_unlock(&sp->mutex);
    pthread_join(sp->thread, NULL);
    pthread_cond_destroy(&sp->ready);
    pthread_cond_destroy(&sp->work);
    pthread_mutex_destroy(&sp->mutex);
}

/* ---- the caller's side ------------------------------------------------------------ */

int kvd__spill_read_begin(kvd_spill *sp, const kvd_spill_range *ranges, int64_t n_ranges, kvd_error *err)
{
    if (sp->owner != getpid())
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
    sp->filled = sp->released = 0;
    sp->failure.code = 0;
    sp->cancel = false;
    sp->active = true;
    pthread_cond_signal(&sp->work);
    pthread_mutex_unlock(&sp->mutex);
    return 0;
}

/* Wait for segment number sp->taken; the code of the read's failure if it will not come. */
static int await(kvd_spill *sp, kvd_error *err)
{
    int rc = 0;
    pthread_mutex_lock(&sp->mutex);
    if (sp->filled == sp->taken && !sp->failure.code) {
        int64_t before = kvd__spill_now_ns();
        while (sp->filled == sp->taken && !sp->failure.code)
            pthread_cond_wait(&sp->ready, &sp->mutex);
        sp->wait_ns += kvd__spill_now_ns() - before;
    }
    if (sp->filled == sp->taken) {
        rc = sp->failure.code;
        if (err)
            *err = sp->failure;
    }
    pthread_mutex_unlock(&sp->mutex);
    return rc;
}

int kvd__spill_next(kvd_spill *sp, kvd_spill_segment *seg, kvd_error *err)
{
    if (!sp->reading || sp->owner != getpid())
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
    if (!sp->reading || sp->owner != getpid())
        return;
    pthread_mutex_lock(&sp->mutex);
    sp->cancel = true;
    pthread_cond_signal(&sp->work);
    while (sp->active)
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
    if (sp->owner != getpid())
        return;
    pthread_mutex_lock(&sp->mutex);
    out->read_bytes = sp->read_bytes;
    out->read_ns = sp->read_ns;
    pthread_mutex_unlock(&sp->mutex);
}
