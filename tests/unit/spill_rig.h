/* What the tests of the spill file share: a folder on a real disk, blocks whose every
 * byte tells layer, block and generation, and a ledger that must end empty. */
#ifndef KVD_TESTS_SPILL_RIG_H
#define KVD_TESTS_SPILL_RIG_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/rng.h"
#include "kv/spill.h"

/* ---- folder --------------------------------------------------------------------- */

static char rig_dir[512];

static inline int rig_in_memory(const char *dir)
{
    struct statfs st;
    return statfs(dir, &st) || st.f_type == 0x01021994 || (uint32_t)st.f_type == 0x858458f6u;
}

/* Make an empty folder where a spill is accepted; 0 if there is none (then skip,
 * loudly). */
static inline int rig_make_dir(void)
{
    const char *candidates[] = {getenv("KVD_TEST_DIR"), ".", "/var/tmp", "/tmp", getenv("HOME")};
    for (size_t i = 0; i < sizeof candidates / sizeof *candidates; i++) {
        if (!candidates[i] || rig_in_memory(candidates[i]))
            continue;
        snprintf(rig_dir, sizeof rig_dir, "%s/kvd-spill-test-XXXXXX", candidates[i]);
        if (mkdtemp(rig_dir))
            return 1;
    }
    return 0;
}

static inline int rig_dir_entries(void)
{
    int n = 0;
    DIR *d = opendir(rig_dir);
    for (struct dirent *e; d && (e = readdir(d));)
        n += strcmp(e->d_name, ".") && strcmp(e->d_name, "..");
    if (d)
        closedir(d);
    return d ? n : -1;
}

static inline int rig_remove_dir(int rc)
{
    rmdir(rig_dir);
    return rc;
}

static inline int rig_no_dir(void)
{
    printf("SKIPPED: no folder on a disk (all in memory); set KVD_TEST_DIR\n");
    return 77;
}

/* Run cmocka's tests in such a folder; gives what main returns. */
#define rig_run_tests(tests) (rig_make_dir() ? rig_remove_dir(cmocka_run_group_tests(tests, NULL, NULL)) : rig_no_dir())

/* ---- blocks --------------------------------------------------------------------- */

static inline kvd_kv_shape rig_shape(int n_layers, int n_kv, int d_head)
{
    return (kvd_kv_shape){.n_layers = n_layers, .n_kv_heads = n_kv, .d_head = d_head, .type = KVD_KV_F16};
}

/* A source of blocks: the context of rig_get. */
typedef struct rig_source {
    int64_t bytes;      /* of a block */
    uint64_t generation;
    int64_t n_calls;
    char *block;        /* one, reused: its bytes live until the next call */
} rig_source;

static inline rig_source rig_source_of(const kvd_kv_shape *s)
{
    int64_t n = kvd__kv_block_bytes(s);
    return (rig_source){.bytes = n, .block = malloc((size_t)n)};
}

static inline void rig_fill(char *out, int64_t bytes, int layer, int64_t block, uint64_t generation)
{
    uint64_t x = ((uint64_t)layer << 40) + (uint64_t)block + generation * UINT64_C(0x9e3779b97f4a7c15);
    for (int64_t i = 0; i < bytes; i += 8) {
        uint64_t v = kvd__splitmix64(&x);
        memcpy(out + i, &v, bytes - i < 8 ? (size_t)(bytes - i) : 8);
    }
}

static inline const char *rig_get(void *ctx, int layer, int64_t block)
{
    rig_source *s = ctx;
    s->n_calls++;
    rig_fill(s->block, s->bytes, layer, block, s->generation);
    return s->block;
}

/* Are the bytes those of (layer, block) as of this generation? */
static inline bool rig_is(const char *bytes, rig_source *s, int layer, int64_t block)
{
    rig_fill(s->block, s->bytes, layer, block, s->generation);
    return !memcmp(bytes, s->block, (size_t)s->bytes);
}

static inline bool rig_segment_is(const kvd_spill_segment *seg, rig_source *s)
{
    for (int64_t i = 0; i < seg->n_blocks; i++)
        if (!rig_is(seg->blocks + i * seg->stride_bytes, s, seg->layer, seg->from_block + i))
            return false;
    return true;
}

static inline bool rig_ledger_empty(const kvd_ledger *l)
{
    for (int a = 0; a < KVD_ACC_COUNT; a++)
        if (atomic_load(&l->now[a]))
            return false;
    return !atomic_load(&l->context_now);
}

#endif
