/* kvd: the program. Commands are in cmd_*.c; this file picks one. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

static const struct {
    const char *name, *what;
    int (*run)(int, char **);
} commands[] = {
    {"run", "one completion", cmd_run},
    {"chat", "a conversation", cmd_chat},
    {"info", "what a model file is", cmd_info},
    {"tokenize", "text to token ids", cmd_tokenize},
    {"verify", "prove the guarantees on a model", cmd_verify},
    {"eval", "perplexity, HellaSwag", cmd_eval},
    {"patch", "a donor's residual, or K and V, in another prompt's pass", cmd_patch},
    {"lab", "the paper's other experiments", cmd_lab},
    {"report", "all experiments on some models, as one page", cmd_report},
    {"plan", "what fits a budget and how fast, before loading", cmd_plan},
    {"bench", "prefill and decode rates", cmd_bench},
};

static int usage(FILE *out, int code)
{
    fprintf(out, "usage: kvd COMMAND [options]\n");
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].what);
    fprintf(out, "kvd COMMAND --help says more. kvd --version\n");
    return code;
}

/* A standard stream that was closed would have its number given to the next file that
 * is opened, and messages be written into a spill or a result. What is put in its place
 * fails as a closed one does: it can not be written, or not be read. */
static bool hold_standard_files(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
            return false;
    return true;
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error return */
    signal(SIGXFSZ, SIG_IGN); /* so is a file at its limit (ulimit -f) */
    if (!hold_standard_files())
        return EXIT_RESOURCES; /* and nobody to tell */
    if (argc < 2)
        return usage(stderr, EXIT_USAGE);
    if (!strcmp(argv[1], "--version")) {
        puts("kvd " KVD_VERSION);
        return cli_close_stdout();
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        usage(stdout, EXIT_OK);
        return cli_close_stdout();
    }
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        if (!strcmp(argv[1], commands[i].name))
            return commands[i].run(argc - 1, argv + 1);
    return cli_fail(EXIT_USAGE, "unknown command \"%.40s\" (kvd --help)", argv[1]);
}
