/* Gemma 3: embeddings scaled by sqrt(d), norms before and after each half of a
 * layer, QK-norm, GELU, and five local layers (sliding window, RoPE base 10000) to
 * one global. Linear RoPE scaling, when the file has it, is for global layers. The
 * norm weights of the file hold the "+1" already.
 *
 * Attention is scaled by 1/sqrt(d_head), except in the 27B model, whose
 * query_pre_attn_scalar is d/heads (168) and not d_head (128). Files do not carry
 * it; the number of layers tells, as in llama.cpp. */
#include "base/error.h"
#include "model/config.h"

enum { PERIOD = 6, LAYERS_OF_27B = 62 };

int kvd__family_gemma3(kvd_config *c, const kvd_gguf *g, kvd_error *err)
{
    int rc, period = PERIOD;
    if ((rc = kvd__config_int(c, g, "attention.sliding_window", 1, 1 << 24, 1024, &c->window, err)) ||
        (rc = kvd__config_int(c, g, "attention.sliding_window_pattern", 1, 1 << 24, PERIOD, &period, err)) ||
        (rc = kvd__config_real(c, g, "rope.freq_base_swa", 1, 1e12, 10000, &c->rope_base_local, err)))
        return rc;
    if (period != PERIOD)
        return kvd__fail(err, KVD_E_UNSUPPORTED, "gemma3.attention.sliding_window_pattern = %d, only %d is supported", period, PERIOD);
    for (int l = 0; l < c->n_layers; l++)
        c->local[l] = (l + 1) % PERIOD != 0;
    c->embd_scale = (float)__builtin_sqrt((double)c->d_model);
    if (c->n_layers == LAYERS_OF_27B)
        c->attn_scale = kvd__inv_sqrt(c->d_model / c->n_heads);
    c->qk_norm = c->post_norms = c->gelu = true;
    return 0;
}
