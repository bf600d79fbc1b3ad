/* gnuplot as a child: its script on standard input, its drawing on standard output.
 *
 * The script is a file without a name and not a pipe, so that there is one stream to
 * wait for and nothing to deadlock over; gnuplot reads both alike. */
#define _GNU_SOURCE
#include "lab/gnuplot.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lab/lab.h"

extern char **environ;

bool lab_can_draw(void)
{
    const char *path = getenv("PATH");
    char file[4096];
    while (path && *path) {
        size_t n = strcspn(path, ":");
        int len = snprintf(file, sizeof file, "%.*s/gnuplot", (int)n, path);
        if (n && len > 0 && (size_t)len < sizeof file && !access(file, X_OK))
            return true;
        path += n + (path[n] == ':');
    }
    return false;
}

static int start(int in, int out, int errors, pid_t *pid)
{
    posix_spawn_file_actions_t fa;
    char *argv[] = {(char[]){"gnuplot"}, NULL};
    int rc = posix_spawn_file_actions_init(&fa);
    if (rc)
        return rc;
    rc = posix_spawn_file_actions_adddup2(&fa, in, STDIN_FILENO);
    rc = rc ? rc : posix_spawn_file_actions_adddup2(&fa, out, STDOUT_FILENO);
    rc = rc ? rc : posix_spawn_file_actions_adddup2(&fa, errors, STDERR_FILENO);
    rc = rc ? rc : posix_spawnp(pid, "gnuplot", &fa, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&fa);
    return rc;
}

static int read_all(int fd, char **out, size_t *n, kvd_error *err)
{
    size_t cap = 1 << 16, len = 0;
    char *p = malloc(cap);
    while (p) {
        ssize_t got = read(fd, p + len, cap - len - 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            free(p);
            return lab_fail(err, KVD_E_IO, "gnuplot's drawing: %s", strerror(errno));
        }
        if (got == 0) {
            p[len] = 0;
            *out = p;
            *n = len;
            return 0;
        }
        len += (size_t)got;
        if (cap - len < 2) {
            char *q = realloc(p, cap *= 2);
            if (!q)
                free(p);
            p = q;
        }
    }
    return lab_fail(err, KVD_E_NOMEM, "out of memory: a drawing");
}

/* The first line of its complaints that says something: not the command that it
 * repeats, nor the mark under it. */
static int complain(FILE *errors, int status, kvd_error *err)
{
    char line[200] = "";
    rewind(errors);
    while (fgets(line, sizeof line, errors)) {
        line[strcspn(line, "\n")] = 0;
        if (line[strspn(line, " \t^")] && strncmp(line, "gnuplot>", 8))
            break;
        *line = 0;
    }
    return lab_fail(err, KVD_E_IO, "gnuplot ended with %s %d: %s", WIFSIGNALED(status) ? "signal" : "code",
                WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status), line + strspn(line, " \t^"));
}

int lab_gnuplot(FILE *script, char **out, size_t *n, kvd_error *err)
{
    int ends[2], status = 0;
    pid_t pid;
    char *drawn = NULL;
    size_t n_drawn = 0;
    FILE *errors = tmpfile();
    if (!errors || fflush(script) || lseek(fileno(script), 0, SEEK_SET) < 0 || pipe2(ends, O_CLOEXEC)) {
        int e = errno;
        if (errors)
            fclose(errors);
        return lab_fail(err, KVD_E_IO, "a pipe to gnuplot: %s", strerror(e));
    }
    int rc = start(fileno(script), ends[1], fileno(errors), &pid);
    close(ends[1]);
    if (rc == 0) {
        int read_rc = read_all(ends[0], &drawn, &n_drawn, err);
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
            ;
        rc = read_rc ? read_rc : status || n_drawn == 0 ? complain(errors, status, err) : 0;
    } else
        rc = rc == ENOENT ? lab_fail(err, KVD_E_UNSUPPORTED, "no gnuplot in PATH") : lab_fail(err, KVD_E_IO, "gnuplot: %s", strerror(rc));
    close(ends[0]);
    fclose(errors);
    if (rc) {
        free(drawn);
        return rc;
    }
    *out = drawn;
    *n = n_drawn;
    return 0;
}
