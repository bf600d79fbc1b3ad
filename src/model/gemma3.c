/* Gemma 3: embeddings scaled by sqrt(d), norms before and after each half of a
 * layer, QK-norm, GELU, and five local layers (sliding window, RoPE base 10000) to
 * one global. Linear RoPE scaling, when the file has it, is for global layers. The
 * norm weights of the file hold the "+1" already. */
#include "model/config.h"

int kvd__family_gemma3(kvd_config *c, const kvd_gguf *g, kvd_error *err)
{
    int rc = kvd__config_int(c, g, "attention.sliding_window", 1, 1 << 24, 1024, &c->window, err);
    if (rc)
        return rc;
    for (int l = 0; l < c->n_layers; l++)
        c->local[l] = (l + 1) % 6 != 0;
    c->embd_scale = (float)__builtin_sqrt((double)c->d_model);
    c->rope_base_local = 10000;
    c->qk_norm = c->post_norms = c->gelu = true;
    return 0;
}
