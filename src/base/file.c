#define _GNU_SOURCE
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

int kvd__file_open(kvd_file *f, const char *path, kvd_error *err)
{
    f->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (f->fd < 0)
        return kvd__fail(err, KVD_E_IO, "%s: %s", path, strerror(errno));
    struct stat st;
    if (fstat(f->fd, &st)) {
        int e = errno;
        kvd__file_close(f);
        return kvd__fail(err, KVD_E_IO, "%s: %s", path, strerror(e));
    }
    if (!S_ISREG(st.st_mode)) {
        kvd__file_close(f);
        return kvd__fail(err, KVD_E_IO, "%s: not a regular file", path);
    }
    f->size_bytes = (int64_t)st.st_size;
    return 0;
}

void kvd__file_close(kvd_file *f)
{
    if (f->fd >= 0)
        close(f->fd);
    f->fd = -1;
}

int kvd__file_read(const kvd_file *f, int64_t offset, void *buf, size_t n, kvd_error *err)
{
    char *p = buf;
    while (n) {
        ssize_t got = pread(f->fd, p, n > ((size_t)1 << 30) ? (size_t)1 << 30 : n, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return kvd__fail_at(err, KVD_E_IO, offset, "read at byte %lld: %s", (long long)offset, strerror(errno));
        if (got == 0)
            return kvd__fail_at(err, KVD_E_GGUF_TRUNCATED, offset,
                                "file ends at byte %lld, %zu bytes more were expected", (long long)offset, n);
        p += got;
        offset += got;
        n -= (size_t)got;
    }
    return 0;
}
