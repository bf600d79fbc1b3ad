/* What the paper says, chapter by chapter, in our words: what was done and which
 * numbers came out. The numbers beside ours are in the results themselves. */
#include <stddef.h>

#include "report.h"

const report_chapter report_chapters[] = {
    {"memory", "Bytes per token", "section 4, Table 1; Fig. 2",
     "In 2-byte numbers a token of KV cache takes 12 to 136 KB on six models, one vector of the residual stream 1.1 to 5 KB: 6.9 to 56 "
     "times less. The memory of a bounded cache is given as B tokens of K and V and one residual for each of the others.",
     {"memory", NULL}},
    {"verify", "K and V from the residual stream", "5.1, Table 2",
     "K and V of every position and layer, computed again from the residual that enters the layer, differ from the cached ones by exactly "
     "0 on all full-attention layers of six models, in bfloat16, float16, float32 and a cast to bfloat16, and by less than 1e-17 at "
     "lengths of 16 to 256. On Gemma's sliding-window layers V is exact and K is not, because its cache rotates keys by their place in "
     "the window (Eq. 16).",
     {"verify", NULL}},
    {"generation", "Tokens with and without a cache", "5.2, Table 3",
     "30 greedy tokens are the same with a cache and with the whole sequence computed from scratch for each token: 30 of 30 on six models. "
     "From scratch takes 1.7 to 3.8 times as long.",
     {"generation", NULL}},
    {"patch", "Another prompt's residual", "5.3",
     "The residual of a donor prompt (the capital of Australia) is put in place of the recipient's (the language spoken in France) at each "
     "layer of SmolLM2-135M and of Qwen2.5-0.5B. The output distribution is then the donor's, KL exactly 0 at every layer, and the "
     "answer is Canberra. The text does not say whether the residual of the last position or of all positions is replaced.",
     {"patch", "patch-all", "patch-kv", NULL}},
    {"tasks", "Perplexity and HellaSwag", "5.4, Table 4",
     "With K and V recomputed, perplexity on WikiText-2 and 0-shot HellaSwag accuracy (500 tasks) equal those of the full cache in every "
     "digit on five models: 26.46 and 39.4 % on SmolLM2-135M. With only a window of 128, 64 or 32 tokens its perplexity is 38.2, 65.3 or "
     "135.4. On Gemma 3 4B the recomputing path fails (HellaSwag 49.2 % to 25.0 %).",
     {"perplexity", "hellaswag", NULL}},
    {"multiturn", "Twenty turns", "5.5, Fig. 3",
     "Over 20 turns of 30 tokens the cache grows to 103 MB while the bounded one stays at 42 MB (Gemma 3 4B; a budget of 150 MB is named), at an "
     "equal time per turn, 0.07 to 0.26 s on the smaller models. For 12B parameters it quotes 978 MB and 13 s a turn against 150 MB and 4 s.",
     {"multiturn", NULL}},
    {"baselines", "Caches that forget", "5.6, Fig. 4",
     "H2O, StreamingLLM, SnapKV, TOVA and a plain window hold 32 to 384 of 512 tokens and then generate 50. All of them reproduce only 5 to 28 % "
     "of the full cache's tokens, with KL of 7 to 14, even at 384; KV-Direct reproduces all at every budget, with KL below 1e-5. With "
     "a plain window over 250 tokens, Qwen2.5-0.5B matches 88 % at a window of 256 and SmolLM2-135M 34 %; at 8 both match 0 to 2 %.",
     {"baselines", "sweep", NULL}},
    {"rank", "Ranks of attention heads", "5.7, Fig. 5 and 6",
     "90 % of the energy of W_q W_k^T lies in 27 to 33 % of the head dimension: mean ranks of 21.2 of 64 (SmolLM2), 20.0 of 64 (Qwen2.5-0.5B) "
     "and 70.2 of 256 (Gemma 3 4B). Yet K and V projections cut to half their rank leave 5 to 15 % of the tokens, with KL above 10.",
     {"rank", "truncate", NULL}},
    {"latency", "Recomputing against reading", "5.8, Fig. 7",
     "Making K and V of N tokens from their residuals takes 1.1 times as long as copying them from memory for N = 1, less time from N = 50 on "
     "for all five models, 0.46 to 0.68 times as long at 100 and 0.17 to 0.3 at 500.",
     {"latency", NULL}},
    {NULL, NULL, NULL, NULL, {NULL}},
};
