#define _GNU_SOURCE
#include "base/sysmem.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* Small files of /proc and /sys, whole; "" if unreadable. */
static const char *slurp(const char *path, char *buf, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, buf, size - 1);
    if (fd >= 0)
        close(fd);
    buf[n > 0 ? n : 0] = 0;
    return buf;
}

static int64_t number_after(const char *text, const char *key)
{
    const char *p = strstr(text, key);
    return p ? strtoll(p + strlen(key), NULL, 10) : -1;
}

static int64_t least(int64_t a, int64_t b) { return b >= 0 && b < a ? b : a; }

/* limit - use of one cgroup directory, or -1 if it sets none. Pages of files that
 * could be dropped are not use. */
static int64_t cgroup_room(const char *dir, const char *limit_name, const char *use_name, const char *file_key)
{
    char path[4352], buf[8192];
    snprintf(path, sizeof path, "%s/%s", dir, limit_name);
    const char *text = slurp(path, buf, sizeof buf);
    if (*text < '0' || *text > '9') /* "max", or no such file */
        return -1;
    int64_t limit = strtoll(text, NULL, 10);
    if (limit >= INT64_MAX / 2)
        return -1;
    snprintf(path, sizeof path, "%s/%s", dir, use_name);
    int64_t use = strtoll(slurp(path, buf, sizeof buf), NULL, 10);
    snprintf(path, sizeof path, "%s/memory.stat", dir);
    int64_t files = number_after(slurp(path, buf, sizeof buf), file_key);
    use -= files > 0 ? files : 0;
    return limit > use ? limit - use : 0;
}

/* From this process's cgroup up to the root. */
static int64_t cgroups_room(void)
{
    char text[4096], dir[4224];
    int64_t room = INT64_MAX;
    char *save = NULL;
    slurp("/proc/self/cgroup", text, sizeof text);
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        int v2 = !strncmp(line, "0::", 3);
        char *v1 = strstr(line, ":memory:");
        if (!v2 && !v1)
            continue;
        const char *root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        snprintf(dir, sizeof dir, "%s%s", root, v2 ? line + 3 : v1 + 8);
        for (;;) {
            room = least(room, v2 ? cgroup_room(dir, "memory.max", "memory.current", "inactive_file ")
                                  : cgroup_room(dir, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "));
            if (v2) /* nothing is killed above it, but all is slowed to a crawl */
                room = least(room, cgroup_room(dir, "memory.high", "memory.current", "inactive_file "));
            char *slash = strrchr(dir, '/');
            if (!slash || strlen(dir) <= strlen(root))
                break;
            *slash = 0;
        }
    }
    return room;
}

int64_t kvd__memory_available(void)
{
    char buf[8192];
    int64_t kib = number_after(slurp("/proc/meminfo", buf, sizeof buf), "MemAvailable:");
    int64_t room = kib >= 0 ? kib * 1024 : INT64_MAX;
    room = least(room, cgroups_room());
    struct rlimit rl;
    if (!getrlimit(RLIMIT_AS, &rl) && rl.rlim_cur != RLIM_INFINITY) {
        int64_t pages = strtoll(slurp("/proc/self/statm", buf, sizeof buf), NULL, 10);
        int64_t used = pages * sysconf(_SC_PAGESIZE), limit = rl.rlim_cur > INT64_MAX ? INT64_MAX : (int64_t)rl.rlim_cur;
        room = least(room, limit > used ? limit - used : 0);
    }
    return room;
}
