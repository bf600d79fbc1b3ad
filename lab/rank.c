#include "lab/lab.h"

int lab_rank(const lab *l, json_t *result, kvd_error *err)
{
    (void)l, (void)result;
    *err = (kvd_error){.code = KVD_E_UNSUPPORTED};
    snprintf(err->message, sizeof err->message, "rank: not in this build");
    return KVD_E_UNSUPPORTED;
}
