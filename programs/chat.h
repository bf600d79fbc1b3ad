/* kvd chat in three rooms: talk (a conversation over a session, no terminal),
 * line (reading lines, with editing where there is a terminal; signals), and
 * cmd_chat.c, which joins them and knows the slash commands. */
#ifndef KVD_CHAT_H
#define KVD_CHAT_H

#include "cli.h"

/* ---- talk ------------------------------------------------------------------- */

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

/* ---- line ------------------------------------------------------------------- */

typedef struct liner liner;

typedef enum line_status {
    LINE_TEXT,
    LINE_END,       /* end of input */
    LINE_INTERRUPT, /* Ctrl-C while a line was being typed; it is gone */
    LINE_TERMINATE, /* SIGTERM */
    LINE_ERROR      /* reading failed, or no memory; said on stderr */
} line_status;

/* Takes over SIGINT and SIGTERM. NULL: out of memory. */
liner *line_open(void);
void line_close(liner **l);
bool line_is_terminal(const liner *l);
/* The next line, without its end: *text borrowed until the next call, [*n],
 * terminated. On a terminal a backslash at the end goes on in the next line. */
line_status line_read(liner *l, const char **text, size_t *n);

/* Between begin and end a first SIGINT (or SIGTERM) asks to stop the answer; a
 * second one before that has happened ends the process at once. */
void line_answer_begin(void);
void line_answer_end(void);
bool line_stop_asked(void);

#endif
