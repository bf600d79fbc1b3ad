/* Qwen3: RMSNorm of each q and k head before RoPE, no biases. */
#include "model/config.h"

int kvd__family_qwen3(kvd_config *c, const kvd_gguf *g, kvd_error *err)
{
    (void)g, (void)err;
    c->qk_norm = true;
    return 0;
}
