/* kvd chat: a conversation over a session. It knows no terminal; cmd_chat.c joins
 * it with one. */
#ifndef KVD_CHAT_TALK_H
#define KVD_CHAT_TALK_H

#include "cli.h"

typedef struct talk talk;

/* c is borrowed and must outlive the talk: template, sampling, limits. 0 or an
 * exit code after one line on stderr; a template that can not be used is found
 * here and not at the first message. */
int talk_create(talk **t, kvd_model *m, const cli *c);
void talk_free(talk **t);

/* What an answer did, and cost. */
typedef struct talk_cost {
    int64_t kept_tokens, new_tokens, answer_tokens; /* the prompt: kept from before, fed now */
    int64_t recomputed_tokens;
    double prefill_s, decode_s;
    kvd_stop_reason stop;
    bool cancelled;      /* before the first token: nothing was said */
    bool context_full;   /* stopped where T_max is */
    char receipt[33];
} talk_cost;

/* One turn: the user's message and the answer to it, streamed to on_token; either
 * callback may end it. 0, or an exit code after one line on stderr. A message
 * that got no token of an answer is not part of the conversation. */
int talk_say(talk *t, const char *message, kvd_token_fn on_token, kvd_progress_fn progress, void *ctx, talk_cost *cost);

/* Forget all turns; the system message stays. */
void talk_reset(talk *t);
/* Copied; NULL: none of our own. Shows from the next message on. Exit code. */
int talk_set_system(talk *t, const char *text);
const char *talk_system(const talk *t);
const kvd_session *talk_session(const talk *t);
int64_t talk_turns(const talk *t);

#endif
