/* kvd chat: reading lines, with editing and history where there is a terminal, and
 * the signals that interrupt it. One liner at a time. */
#ifndef KVD_CHAT_LINE_H
#define KVD_CHAT_LINE_H

#include <stdbool.h>
#include <stddef.h>

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
