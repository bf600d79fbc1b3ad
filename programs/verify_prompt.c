/* The text that kvd verify feeds: fixed, so that the receipts it prints can be
 * compared between machines. */
#include <stdlib.h>
#include <string.h>

#include "verify.h"

static const char text[] =
    "A ferry crosses the sound four times a day, and in eleven years she has been late on thirty-one days and has not "
    "sailed on six. I know this because the man who sells the tickets writes it down. He keeps a ledger in which each "
    "crossing has a line: the date, the tide, the wind, how many passengers, how many sheep, and what the engine said. "
    "He maintains that an engine says something every day, and that those who hear nothing have not been listening.\n\n"
    "The ledger has no room for everything. It has thirty lines to a page and the page is as wide as a hand, so he has "
    "made rules for himself. What can be worked out from other lines is left out. The fare is never written, since it "
    "follows from the passengers; nor is the hour, since it follows from the tide; nor is the name of the skipper, who "
    "has been his brother-in-law all the time. Only what nobody could work out is worth the ink: that on the ninth of "
    "March a bride was aboard, that on the tenth she came back.\n\n"
    "Visitors ask whether he is not afraid to lose something. He then opens the ledger anywhere and begins to tell the "
    "day, and it is all there: who stood where, what was said about the price of wool, how the light lay on the water. "
    "\"You see,\" he says, \"I have not lost it. I have only not kept it. These are different things. What is lost "
    "cannot be had again at any price, and what is not kept costs me a minute of thinking.\" If the visitor is polite "
    "he will be asked to test it, and may choose a page, and will find that the old man tells the same day in the same "
    "words as he told it to the visitor before. He is proud of this. A story which changes in the telling, he says, is "
    "a different story, and then what was the ledger for?\n\n"
    "There are things he learned the hard way. In the second year he left out the wind on calm days, because calm is "
    "nothing, and later could not say whether an empty place meant calm or a forgotten line. Since then calm is "
    "written, too. In the fourth year he wrote the passengers as a sum of both directions and regretted it for a "
    "winter. In the sixth year a clerk of the company offered to make the ledger shorter by rounding: tens of "
    "passengers, halves of the tide, the wind in four steps. It would fit into a quarter of the pages and be nearly "
    "as good. He asked the clerk to work out the fares of a week from it, and they came to 1,204.50 in place of "
    "1,187.25. The clerk said that it was close. The old man said that close was a word for weather.\n\n"
    "He has an arrangement for busy days. At the top of the pile lie the last two weeks, written out in full, since "
    "people ask about them; the rest lies in the chest as short lines. When somebody asks about a day in the chest he "
    "does not go there alone: to understand a day he has to begin at the start of its year and come forward, line by "
    "line, because each leans on those before it. It takes as long as it takes. But he has noticed that he can answer "
    "many questions on one walk through the year, if they are put to him together, and so he lets them gather until "
    "the evening boat.\n\n"
    "His granddaughter, who studies such things in the city, once set it down as a table for him:\n\n"
    "    kept in full      14 days      25,200 words\n"
    "    kept as lines     4,003 days   4,003 lines\n"
    "    lost              0 days\n\n"
    "He hung it beside the timetable. Underneath somebody has written in pencil: \xc2\xab" "et les moutons ?\xc2\xbb "
    "\xe2\x80\x94 and below that, in his own careful hand: 17 on the first boat, 9 on the last; see the ledger.\n\n"
    "When the new ferry comes, in spring, she is to have a screen on the bridge that remembers everything by itself. "
    "He has been to see it. It is a good screen, he says, and it asked him on the first day whether older entries "
    "might be removed to make room for newer ones. There was a button for yes and a button for later. He looked for "
    "the third one for a while, and then he went home and sharpened two pencils.\n";

/* Numerical Recipes' 64-bit congruential generator; its upper half is good enough here. */
static int32_t next_random(uint64_t *state, int64_t n_vocab)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((*state >> 33) % (uint64_t)n_vocab);
}

int verify_prompt(const kvd_model *m, int64_t n, int32_t **ids)
{
    kvd_model_info info;
    kvd_error err;
    int32_t *own = malloc((size_t)n * sizeof *own), *encoded = NULL;
    int64_t have = 0;
    if (!own)
        return cli_fail(EXIT_RESOURCES, "out of memory: the prompt");
    if (kvd_tokenize(m, text, sizeof text - 1, KVD_TOKENIZE_BOS, &encoded, &have, &err)) {
        free(own);
        return cli_error("", &err);
    }
    have = have < n ? have : n;
    memcpy(own, encoded, (size_t)have * sizeof *own);
    kvd_ids_free(encoded);
    kvd_model_get_info(m, &info);
    for (uint64_t state = 1; have < n; have++)
        own[have] = next_random(&state, info.n_vocab);
    *ids = own;
    return 0;
}
