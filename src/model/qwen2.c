/* Qwen2 and Qwen2.5 (and DeepSeek-R1-Distill, which is one): biases on q, k and
 * v, bound by name when the file has them; RoPE turns half-split pairs. */
#include "model/config.h"

int kvd__family_qwen2(kvd_config *c, const kvd_gguf *g, kvd_error *err)
{
    (void)c, (void)g, (void)err;
    return 0;
}
