#include "lab/lab.h"

int lab_multiturn(const lab *l, json_t *result, kvd_error *err)
{
    (void)l, (void)result;
    *err = (kvd_error){.code = KVD_E_UNSUPPORTED};
    snprintf(err->message, sizeof err->message, "multiturn: not in this build");
    return KVD_E_UNSUPPORTED;
}
