/* How fast the ring of a spill reads: a measurement, not a test, for some segment sizes,
 * against a plain sequential read of as many bytes.
 *
 *   bench_spill [layers kv_heads d_head blocks] */
#include "spill_case.h"

#include <fcntl.h>
#include <time.h>

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Best of some: MB/s of reading the file from end to end with calls of `piece` bytes. */
static double plain_rate(int fd, int64_t bytes, size_t piece)
{
    char *buf = aligned_alloc(4096, piece);
    double best = 0;
    for (int k = 0; k < 5; k++) {
        double t = seconds();
        for (int64_t at = 0; at < bytes; at += (int64_t)piece)
            if (pread(fd, buf, piece, at) < 0)
                return 0;
        t = seconds() - t;
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        best = (double)bytes / t / 1e6 > best ? (double)bytes / t / 1e6 : best;
    }
    free(buf);
    return best;
}

static void bench_one(int layers, int heads, int d, kvd_spill_options o)
{
    kvd_spill_range ranges[KVD__MAX_LAYERS];
    for (int l = 0; l < layers; l++)
        ranges[l] = (kvd_spill_range){l, 0, o.max_blocks};
    rig r;
    rig_open(&r, rig_shape(layers, heads, d), o);
    rig_write(&r, 0, o.max_blocks);
    kvd_spill_stats st;
    kvd__spill_stats(r.sp, &st);
    double best = 0, wrote = (double)st.written_bytes / (double)st.write_ns * 1e3;
    int64_t bytes = kvd__spill_file_bytes(&r.shape, &o), piece = kvd__spill_bytes(&r.shape, &o);
    for (int k = 0; k < 5; k++) {
        double t = seconds();
        kvd_spill_segment seg;
        kvd__spill_read_begin(r.sp, ranges, layers, NULL);
        while (!kvd__spill_next(r.sp, &seg, NULL) && seg.n_blocks)
            kvd__spill_release(r.sp);
        kvd__spill_read_end(r.sp);
        double rate = (double)bytes / (seconds() - t) / 1e6;
        best = rate > best ? rate : best;
    }
    printf("%6d %7d %5d %7lld %6lld %6.0f %6.0f %6.0f\n", st.direct, o.n_readers, o.n_slots, (long long)o.segment_blocks,
           (long long)piece / 1024, wrote, best, plain_rate(r.fd, bytes, 1 << 20));
    rig_close(&r);
}

int main(int argc, char **argv)
{
    int layers = argc > 1 ? atoi(argv[1]) : 30, heads = argc > 2 ? atoi(argv[2]) : 3, d = argc > 3 ? atoi(argv[3]) : 64;
    if (!rig_make_dir())
        return rig_no_dir();
    kvd_spill_options o = options_of(argc > 4 ? atoi(argv[4]) : 125);
    printf("%d layers, %lld blocks; reads: MB/s, best of 5; plain: one after the other, 1 MiB each\n", layers,
           (long long)o.max_blocks);
    printf("direct readers slots segment mem_KB  write  spill  plain\n");
    for (int mode = 0; mode < 2; mode++)
        for (int memory = 16; memory <= 128; memory *= 2) /* blocks of the ring */
            for (o.segment_blocks = 4; o.segment_blocks <= memory / 2; o.segment_blocks *= 2)
                for (o.n_readers = 1; o.n_readers <= 8 && o.n_readers < memory / o.segment_blocks; o.n_readers += 1 + (o.n_readers > 3)) {
                    o.direct = !mode;
                    o.n_slots = memory / (int)o.segment_blocks;
                    if (!mode || o.n_readers == 2)
                        bench_one(layers, heads, d, o);
                }
    rmdir(rig_dir);
    return 0;
}
