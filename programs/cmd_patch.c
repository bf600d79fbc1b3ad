/* kvd patch: one prompt's residual, or its K and V, put into the pass of another
 * (arXiv 2603.19664, section 5.3). Options for lab/patch.c. */
#include "cli.h"

int cmd_patch(int argc, char **argv)
{
    cli c;
    int code = cli_parse(&c, argc, argv, "patch",
                         OPT_MODEL | OPT_MACHINE | OPT_NUMBERS | OPT_PATCH | OPT_LAB | OPT_LAB_NEW | OPT_JSON | OPT_OUTPUT, 0);
    return code ? code : cli_run_experiment(&c, "patch");
}
