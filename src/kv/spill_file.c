/* kv: the file below a spill: opened without a name, reserved, moved in whole
 * records.
 *
 * The page cache. With O_DIRECT the kernel copies nothing. Some file systems take the
 * flag and read through the cache all the same, others refuse it, so what was moved is
 * also written back and dropped with advice, in both modes: where there is nothing to
 * drop that costs a microsecond. Read-ahead is switched off: the readers ask
 * for large pieces ahead of time themselves.
 *
 * Reservation. fallocate, after a look at the free space: a file system may hand out
 * all it has before it says no, and a neighbour would meet a full disk for a moment.
 * Where fallocate is not to be had (ext2, old NFS) the file is only given its length;
 * a disk that then runs full is a failed write, which harms nothing.
 *
 * What can not be seen: an overlayfs whose upper folder is in memory. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/error.h"
#include "kv/spill_int.h"

_Static_assert(sizeof(off_t) == 8, "files above 2 GiB");

/* linux/magic.h */
enum { TMPFS = 0x01021994, OVERLAYFS = 0x794c7630 };
#define RAMFS 0x858458f6L

/* ---- the system ---------------------------------------------------------------- */

static int system_open(void *ctx, int dir_fd, const char *path, int flags)
{
    return openat(dir_fd, path, flags, 0600);
}

static long system_fs_type(void *ctx, int fd)
{
    struct statfs st;
    return fstatfs(fd, &st) ? -1 : (long)st.f_type;
}

static int system_reserve(void *ctx, int fd, off_t bytes)
{
    struct rlimit limit;
    if (!getrlimit(RLIMIT_FSIZE, &limit) && limit.rlim_cur != RLIM_INFINITY && (rlim_t)bytes > limit.rlim_cur) {
        errno = EFBIG; /* fallocate would say so with a SIGXFSZ */
        return -1;
    }
    struct statvfs st;
    struct stat had;
    int64_t more = fstat(fd, &had) ? bytes : bytes - (int64_t)had.st_blocks * 512;
    if (more > 0 && !fstatvfs(fd, &st) && st.f_blocks && (uint64_t)more / st.f_frsize >= st.f_bavail) {
        errno = ENOSPC;
        return -1;
    }
    if (!fallocate(fd, 0, 0, bytes))
        return 0;
    return errno == EOPNOTSUPP || errno == ENOSYS ? ftruncate(fd, bytes) : -1;
}

static ssize_t system_pread(void *ctx, int fd, void *buf, size_t n, off_t at) { return pread(fd, buf, n, at); }
static ssize_t system_pwrite(void *ctx, int fd, const void *buf, size_t n, off_t at) { return pwrite(fd, buf, n, at); }

static int system_write_back(void *ctx, int fd, off_t at, off_t n)
{
    /* On overlayfs sync_file_range looks at the upper of two files, which has no pages
     * (Linux 6.18); of the calls that reach the lower one this is the least. */
    if (system_fs_type(NULL, fd) == OVERLAYFS)
        return fcntl(fd, F_GETFL) & O_DIRECT ? 0 : fdatasync(fd);
    return sync_file_range(fd, at, n,
                           SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
}

static int system_forget(void *ctx, int fd, off_t at, off_t n)
{
    /* Whole pages only, and they may be larger than a record: neighbours go along. */
    off_t page = 65536, from = at / page * page, to = (at + n + page - 1) / page * page;
    return posix_fadvise(fd, from, to - from, POSIX_FADV_DONTNEED);
}

const kvd_spill_ops kvd__spill_system = {
    .open = system_open,
    .fs_type = system_fs_type,
    .reserve = system_reserve,
    .pread = system_pread,
    .pwrite = system_pwrite,
    .write_back = system_write_back,
    .forget = system_forget,
};

/* ---- opening -------------------------------------------------------------------- */

static int open_file(kvd_spill *sp, int dir_fd, const char *name, int flags)
{
    int fd;
    do
        fd = sp->ops->open(sp->ops_ctx, dir_fd, name, flags);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* A name that nobody has, and gone in the next call. */
static int open_named(kvd_spill *sp, int dir_fd, int flags)
{
    for (int i = 0; i < 16; i++) {
        uint64_t r = 0;
        char name[40];
        if (getrandom(&r, sizeof r, GRND_NONBLOCK) != sizeof r)
            r = (uint64_t)kvd__now_ns() * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t)getpid();
        snprintf(name, sizeof name, ".kvd-spill-%016llx", (unsigned long long)r);
        int fd = open_file(sp, dir_fd, name, flags | O_CREAT | O_EXCL | O_NOFOLLOW);
        if (fd < 0 && errno == EEXIST)
            continue;
        int e = errno;
        /* Some file systems make the name before they refuse O_DIRECT. */
        if (unlinkat(dir_fd, name, 0) && fd >= 0) {
            e = errno;
            close(fd);
            fd = -1;
        }
        errno = e;
        sp->named = fd >= 0;
        return fd;
    }
    return -1;
}

static int open_unnamed(kvd_spill *sp, int dir_fd, int flags)
{
    flags |= O_RDWR | O_CLOEXEC;
    int fd = open_file(sp, dir_fd, ".", flags | O_TMPFILE | O_EXCL);
    /* No O_TMPFILE: of this file system, this kernel. */
    if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT))
        fd = open_named(sp, dir_fd, flags);
    return fd;
}

/* Write and read the first record. A file system that opens with O_DIRECT may still
 * refuse our alignment, and a disk that does not return what it is given is better
 * known now. *refused: O_DIRECT is why. */
static int probe(kvd_spill *sp, const char *dir, bool *refused, kvd_error *err)
{
    int64_t n = sp->record_bytes, done;
    int e;
    for (int64_t i = 0; i < n; i++)
        sp->bounce[i] = (char)(i * 7 + i / 256);
    bool ok = kvd__spill_file_write(sp, sp->bounce, n, 0, &done, &e) &&
              kvd__spill_file_read(sp, sp->slots, n, 0, &done, &e);
    bool same = ok && !memcmp(sp->bounce, sp->slots, (size_t)n);
    memset(sp->bounce, 0, (size_t)n);
    *refused = !ok && e == EINVAL && sp->direct;
    if (!ok)
        return kvd__fail(err, KVD_E_IO, "spill file in %.120s: %s", dir, e ? strerror(e) : "it ends too early");
    if (!same)
        return kvd__fail(err, KVD_E_IO, "spill file in %.120s: what was written does not come back", dir);
    return 0;
}

int kvd__spill_file_reserve(kvd_spill *sp, int64_t bytes, const char *place, kvd_error *err)
{
    int rc;
    do
        rc = sp->ops->reserve(sp->ops_ctx, sp->fd, (off_t)bytes);
    while (rc && errno == EINTR);
    if (!rc)
        return 0;
    bool room = errno == ENOSPC || errno == EDQUOT || errno == EFBIG;
    kvd__fail(err, KVD_E_IO, "spill file%s: %lld bytes: %s", place, (long long)bytes, strerror(errno));
    if (err && room)
        err->need_bytes = bytes;
    return KVD_E_IO;
}

static int open_in(kvd_spill *sp, int dir_fd, const kvd_spill_options *o, kvd_error *err)
{
    long type;
    do
        type = sp->ops->fs_type(sp->ops_ctx, dir_fd);
    while (type == -1 && errno == EINTR);
    if (type == TMPFS || type == RAMFS || type == (int)RAMFS) /* f_type is signed on some machines */
        return kvd__fail(err, KVD_E_UNSUPPORTED, "spill folder %.120s is in memory (%s): it would be a hidden budget", o->dir,
                         type == TMPFS ? "tmpfs" : "ramfs");
    sp->direct = o->direct;
    sp->fd = open_unnamed(sp, dir_fd, o->direct ? O_DIRECT : 0);
    if (sp->fd < 0 && o->direct && errno == EINVAL) {
        sp->direct = false;
        sp->fd = open_unnamed(sp, dir_fd, 0);
    }
    if (sp->fd < 0)
        return kvd__fail(err, KVD_E_IO, "spill file in %.120s: %s", o->dir, strerror(errno));
    posix_fadvise(sp->fd, 0, 0, POSIX_FADV_RANDOM);
    char place[200];
    snprintf(place, sizeof place, " in %.120s", o->dir);
    int rc = kvd__spill_file_reserve(sp, sp->file_bytes, place, err);
    if (rc)
        return rc;
    bool refused;
    rc = probe(sp, o->dir, &refused, err);
    if (rc && refused) {
        int flags = fcntl(sp->fd, F_GETFL);
        sp->direct = false;
        if (flags >= 0 && !fcntl(sp->fd, F_SETFL, flags & ~O_DIRECT))
            rc = probe(sp, o->dir, &refused, err);
    }
    return rc;
}

int kvd__spill_file_open(kvd_spill *sp, const kvd_spill_options *o, kvd_error *err)
{
    int dir_fd;
    do
        dir_fd = open(o->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    while (dir_fd < 0 && errno == EINTR);
    if (dir_fd < 0)
        return kvd__fail(err, KVD_E_IO, "spill folder %.120s: %s", o->dir, strerror(errno));
    int rc = open_in(sp, dir_fd, o, err);
    close(dir_fd);
    return rc;
}

/* ---- moving --------------------------------------------------------------------- */

/* What a call moved counts in whole units of alignment, for O_DIRECT can not go on
 * from elsewhere. False: no progress. */
static bool progress(ssize_t moved, int64_t *done, int *error)
{
    *error = moved < 0 ? errno : 0;
    int64_t whole = moved > 0 ? moved / KVD__SPILL_ALIGN * KVD__SPILL_ALIGN : 0;
    *done += whole;
    return whole > 0 || *error == EINTR;
}

bool kvd__spill_file_read(kvd_spill *sp, char *buf, int64_t n, off_t at, int64_t *done, int *error)
{
    *done = 0;
    while (*done < n)
        if (!progress(sp->ops->pread(sp->ops_ctx, sp->fd, buf + *done, (size_t)(n - *done), at + *done), done, error))
            return false;
    sp->ops->forget(sp->ops_ctx, sp->fd, at, (off_t)n); /* advice: may fail */
    return true;
}

bool kvd__spill_file_write(kvd_spill *sp, const char *buf, int64_t n, off_t at, int64_t *done, int *error)
{
    *done = 0;
    while (*done < n)
        if (!progress(sp->ops->pwrite(sp->ops_ctx, sp->fd, buf + *done, (size_t)(n - *done), at + *done), done, error))
            return false;
    int rc;
    do
        rc = sp->ops->write_back(sp->ops_ctx, sp->fd, at, (off_t)n);
    while (rc && errno == EINTR);
    /* Where there is no such call the kernel writes in its own time; a failure then
     * shows in the hash. */
    if (rc && errno != ENOSYS && errno != EINVAL && errno != ESPIPE) {
        *done = 0;
        *error = errno;
        return false;
    }
    sp->ops->forget(sp->ops_ctx, sp->fd, at, (off_t)n);
    return true;
}
