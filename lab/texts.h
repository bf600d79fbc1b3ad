/* texts: the laboratory's own words, for experiments that are given none. Plain
 * English prose of several kinds, written for this purpose.
 *
 * Layer: lab. */
#ifndef LAB_TEXTS_H
#define LAB_TEXTS_H

enum { LAB_PASSAGES = 5, LAB_TURNS = 20 };

/* About 450 words each: a story, an explanation, instructions, a conversation, a
 * history. */
extern const char *const lab_passages[LAB_PASSAGES];
extern const char *const lab_passage_names[LAB_PASSAGES];

/* Section 5.5 in the manner of the paper's appendix: its system prompt, and questions
 * about France, each of which needs the ones before it no more than a talk does. */
extern const char *const lab_talk_system;
extern const char *const lab_talk[LAB_TURNS];

/* Section 5.3, in its words. */
extern const char lab_patch_donor[], lab_patch_recipient[];

/* Section 5.2, word by word from the appendix. */
extern const char *const lab_generation_prompt;

#endif
