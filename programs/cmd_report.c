/* kvd report: all experiments on some models, as one page. */
#include "cli.h"

int cmd_report(int argc, char **argv)
{
    (void)argc, (void)argv;
    return cli_fail(EXIT_USAGE, "report: not in this build");
}
