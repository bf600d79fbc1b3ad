/* LLaMA family: Llama 2/3, SmolLM2, Mistral-like. The plain case: RoPE turns
 * interleaved pairs (the file's q and k rows are permuted for it), and a Mistral
 * file may ask for a sliding window on every layer. */
#include <string.h>

#include "model/config.h"

int kvd__family_llama(kvd_config *c, const kvd_gguf *g, kvd_error *err)
{
    c->rope_interleaved = true;
    int rc = kvd__config_int(c, g, "attention.sliding_window", 0, 1 << 24, 0, &c->window, err);
    if (rc)
        return rc;
    if (c->window)
        memset(c->local, 1, (size_t)c->n_layers);
    return 0;
}
