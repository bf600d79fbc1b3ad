/* token: chat templates, recognised from the file's own text (never executed)
 * and rendered by code. Layer: above base only. Pure functions. */
#ifndef KVD_TOKEN_CHAT_H
#define KVD_TOKEN_CHAT_H

#include "token/token.h"

/* X(id, name) */
#define KVD_CHATS(X)                                                           \
    X(CHATML, "chatml")                                                        \
    X(SMOLLM2, "smollm2")                                                      \
    X(QWEN25, "qwen2.5")                                                       \
    X(QWEN3, "qwen3")                                                          \
    X(DEEPSEEK_R1, "deepseek-r1")                                              \
    X(LLAMA2, "llama2")                                                        \
    X(LLAMA3, "llama3")                                                        \
    X(LLAMA31, "llama3.1")                                                     \
    X(GEMMA, "gemma")                                                          \
    X(MISTRAL, "mistral")                                                      \
    X(MISTRAL_V1, "mistral-v1")                                                \
    X(MISTRAL_V2, "mistral-v2")                                                \
    X(MISTRAL_V3, "mistral-v3")

typedef enum kvd_chat {
    KVD_CHAT_NONE = -1,
#define KVD_X(id, name) KVD_CHAT_##id,
    KVD_CHATS(KVD_X)
#undef KVD_X
    KVD_CHAT_COUNT
} kvd_chat;

const char *kvd__chat_name(kvd_chat c);
/* By name; KVD_CHAT_NONE if unknown. */
kvd_chat kvd__chat_find(const char *name);
/* From a file's tokenizer.chat_template; KVD_CHAT_NONE if not recognised. */
kvd_chat kvd__chat_detect(const char *template_text, size_t n);

typedef struct kvd_chat_message {
    const char *role; /* "system", "user", "assistant" */
    const char *content;
} kvd_chat_message;

/* Render messages and, if add_generation, the opening of the assistant's turn.
 * The text is to be encoded with KVD_ENCODE_SPECIAL; it holds no BOS token that
 * the encoder adds itself. thinking: Qwen3 only (false adds the empty think
 * block). *out: returned owned, terminated, *n its length.
 * KVD_E_ARG: an order of roles that the template refuses. */
int kvd__chat_render(kvd_chat c, const kvd_chat_message *messages, int64_t n_messages, bool add_generation,
                     bool thinking, kvd_ledger *l, char **out, size_t *n, kvd_error *err);

#endif
