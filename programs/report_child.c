/* This program as a child: one command, its JSON on standard output.
 *
 * A process of its own for each experiment, so that one that runs out of memory or
 * crashes takes nothing with it, and each starts with the same empty memory. The child
 * ends when its parent does (PR_SET_PDEATHSIG), also after kill -9. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "report.h"

enum { WAIT_MS = 200 };

/* In the child, between fork and exec: only what is safe there. */
__attribute__((noreturn)) static void become(const char *self, char *const *argv, int out, int errors, pid_t parent)
{
    int null = open("/dev/null", O_RDONLY);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() == parent && null >= 0 && dup2(null, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0 && dup2(errors, STDERR_FILENO) >= 0)
        execv(self, argv);
    _exit(127);
}

/* Append what is there to read. 1: more may come, 0: the end, -1: an error. */
static int read_some(int fd, report_child *c, size_t *cap)
{
    if (*cap - c->n_out < 4096) {
        char *p = realloc(c->out, *cap += 1 << 16);
        if (!p)
            return -1;
        c->out = p;
    }
    ssize_t got = read(fd, c->out + c->n_out, *cap - c->n_out - 1);
    if (got < 0)
        return errno == EINTR || errno == EAGAIN ? 1 : -1;
    c->n_out += (size_t)got;
    c->out[c->n_out] = 0;
    return got > 0;
}

/* Its last line of complaint, without the program's own name. */
static void last_line(FILE *errors, report_child *c)
{
    char line[512];
    rewind(errors);
    while (fgets(line, sizeof line, errors)) {
        line[strcspn(line, "\n")] = 0;
        const char *text = strncmp(line, "kvd: ", 5) ? line : line + 5;
        if (*text)
            memmove(c->message, text, strlen(text) + 1);
    }
}

static void finish(pid_t pid, FILE *errors, report_child *c)
{
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    c->exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    last_line(errors, c);
    if (WIFSIGNALED(status))
        snprintf(c->message, sizeof c->message, "killed by signal %d", WTERMSIG(status));
    else if (c->exit_code && !*c->message)
        snprintf(c->message, sizeof c->message, "exit code %d", c->exit_code);
}

int report_spawn(const char *self, char *const *argv, void (*on_wait)(void *ctx), void *ctx, report_child *c)
{
    int ends[2];
    size_t cap = 0;
    bool told = false;
    double begun = cli_seconds();
    *c = (report_child){0};
    FILE *errors = tmpfile();
    if (!errors || pipe2(ends, O_CLOEXEC)) {
        snprintf(c->message, sizeof c->message, "a child process: %s", strerror(errno));
        if (errors)
            fclose(errors);
        return -1;
    }
    fflush(NULL); /* or what is buffered would be there twice */
    pid_t parent = getpid(), pid = fork();
    if (pid == 0)
        become(self, argv, ends[1], fileno(errors), parent);
    close(ends[1]);
    int more = pid > 0 ? 1 : 0;
    if (pid < 0)
        snprintf(c->message, sizeof c->message, "a child process: %s", strerror(errno));
    while (more > 0) {
        struct pollfd p = {.fd = ends[0], .events = POLLIN};
        if (poll(&p, 1, WAIT_MS) > 0)
            more = read_some(ends[0], c, &cap);
        if (cli_interrupted() && !told) {
            kill(pid, SIGINT); /* the terminal tells it too; others tell only us */
            told = true;
        }
        on_wait(ctx);
    }
    close(ends[0]);
    if (more < 0)
        kill(pid, SIGTERM);
    if (pid > 0)
        finish(pid, errors, c);
    fclose(errors);
    c->seconds = cli_seconds() - begun;
    return pid > 0 ? 0 : -1;
}
