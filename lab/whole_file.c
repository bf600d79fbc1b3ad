/* A new file beside the old one, renamed when it is complete: a full disk, a limit or a
 * kill leaves what was there before, never half a table. Links are followed first, or
 * the rename would put a file in their place; what is no regular file (/dev/full, a
 * pipe) has no "before" and is written as it is. */
#define _GNU_SOURCE
#include "lab/whole_file.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "lab/lab.h"

#define PART ".part" /* and the process */

int lab_file_check(const char *path, kvd_error *err)
{
    struct stat st;
    bool there = !stat(path, &st);
    if (there && !S_ISREG(st.st_mode)) { /* written as it is */
        int e = S_ISDIR(st.st_mode) ? EISDIR : access(path, W_OK) ? errno : 0;
        return e ? lab_fail(err, KVD_E_IO, "%s", strerror(e)) : 0;
    }
    char *folder = strdup(path);
    if (!folder)
        return lab_fail(err, KVD_E_NOMEM, "out of memory");
    char *slash = strrchr(folder, '/');
    if (slash)
        slash[slash == folder] = 0;
    int bad = !*path ? ENOENT : access(slash ? folder : ".", W_OK | X_OK) ? errno : 0;
    free(folder);
    return bad ? lab_fail(err, KVD_E_IO, "%s", strerror(bad)) : 0;
}

int lab_file_begin(lab_file *w, const char *path, kvd_error *err)
{
    struct stat st;
    bool there = !stat(path, &st);
    *w = (lab_file){.path = there ? realpath(path, NULL) : strdup(path)};
    bool ok = w->path && (there && !S_ISREG(st.st_mode) ? true : asprintf(&w->part, "%s" PART "%ld", w->path, (long)getpid()) >= 0);
    if (!ok)
        w->part = NULL; /* asprintf leaves anything there */
    w->f = ok ? fopen(w->part ? w->part : w->path, "wbe") : NULL;
    if (w->f) {
        errno = 0;
        return 0;
    }
    int e = errno ? errno : ENOMEM;
    free(w->path);
    free(w->part);
    *w = (lab_file){0};
    return lab_fail(err, KVD_E_IO, "%s", strerror(e));
}

int lab_file_end(lab_file *w, bool keep, kvd_error *err)
{
    int e = ferror(w->f) ? errno ? errno : EIO : 0;
    if (fclose(w->f) && !e)
        e = errno;
    if (keep && !e && w->part && rename(w->part, w->path))
        e = errno;
    if ((e || !keep) && w->part)
        unlink(w->part);
    free(w->path);
    free(w->part);
    *w = (lab_file){0};
    return e ? lab_fail(err, KVD_E_IO, "%s", strerror(e)) : 0;
}

int lab_file_json(const char *path, const json_t *value, size_t flags, kvd_error *err)
{
    lab_file w;
    int rc = lab_file_begin(&w, path, err);
    if (rc)
        return rc;
    bool ok = !json_dumpf(value, w.f, flags);
    rc = lab_file_end(&w, ok, err);
    return rc || ok ? rc : lab_fail(err, KVD_E_IO, "can not be told as JSON");
}

int lab_file_tsv(const char *path, const json_t *table, kvd_error *err)
{
    lab_file w;
    int rc = lab_file_begin(&w, path, err);
    if (rc)
        return rc;
    lab_write_tsv(table, w.f);
    return lab_file_end(&w, true, err);
}

/* The process that NAME.partPID or NAME.partPID.svg is of; 0: another name. */
static pid_t writer_of(const char *name)
{
    const char *part = NULL, *next = name;
    while ((next = strstr(next, PART)))
        part = next += strlen(PART); /* the last one: a drawing of a part has two */
    char *end = NULL;
    long pid = part && isdigit((unsigned char)*part) ? strtol(part, &end, 10) : 0;
    return pid > 0 && pid <= INT_MAX && (!*end || !strcmp(end, ".svg")) ? (pid_t)pid : 0;
}

void lab_file_clear(const char *folder)
{
    DIR *d = opendir(folder);
    for (const struct dirent *e = d ? readdir(d) : NULL; e; e = readdir(d))
        if (writer_of(e->d_name) && kill(writer_of(e->d_name), 0) && errno == ESRCH)
            unlinkat(dirfd(d), e->d_name, 0);
    if (d)
        closedir(d);
}

bool lab_file_in_memory(const char *folder)
{
    struct statfs fs;
    return !statfs(folder, &fs) && ((uint32_t)fs.f_type == 0x01021994 || (uint32_t)fs.f_type == 0x858458f6); /* linux/magic.h: tmpfs, ramfs */
}
