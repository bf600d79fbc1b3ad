/* The texts themselves. No two passages share names or subject, so that a policy that
 * has lost one has nothing to go by in another; each brings things back that it said
 * at its beginning, because that is what forgetting shows on. */
#include "lab/texts.h"

const char lab_patch_donor[] = "What is the capital of Australia?";
const char lab_patch_recipient[] = "What language is spoken in France?";

const char *const lab_generation_prompt = "Explain why the sky is blue in simple terms.";

const char *const lab_passage_names[LAB_PASSAGES] = {"a story", "an explanation", "instructions", "a conversation", "a history"};

const char *const lab_passages[LAB_PASSAGES] = {
    /* a story */
    "When the ferry stopped running in the second week of November, Marta Lindqvist was the only person left on the "
    "island of Skarven who was not related to somebody else on it. She had come in June to count seabirds for the "
    "university, with a tent, two notebooks and a telescope that had belonged to her grandfather, and she had meant to "
    "leave before the storms. But the eider ducks had stayed late that year, and so had she, and now the harbour master, "
    "an old man called Henrik Vold, told her that there would be no boat until the ice had come and gone again.\n\n"
    "\"You can have the room above the net store,\" he said. \"It has a stove. The roof was mended by my brother, so it "
    "will leak on the left side only.\"\n\n"
    "The room smelled of tar and apples. From its one window she could see the lighthouse at the northern point, which "
    "had been dark for eleven years, and below it the long grey reef where the seals lay. Every morning at seven she "
    "walked out to the point with the telescope under her arm, counted what there was to count, and wrote the number in "
    "the first notebook. In the second notebook she wrote what she did not understand. By the end of the month the second "
    "was fuller than the first.\n\n"
    "What she understood least was the light. On three nights, always when the wind stood in the west, there had been a "
    "yellow glow behind the glass of the lighthouse, low down, as if somebody had set a lamp on the floor. She asked the "
    "baker's wife about it, who laughed, and the schoolteacher, who changed the subject, and finally she asked Henrik Vold "
    "himself. He did not laugh. He took his pipe out of his mouth and looked at it for a while.\n\n"
    "\"My brother had the key,\" he said. \"Nobody has seen it since we buried him.\"\n\n"
    "\"The one who mended the roof?\"\n\n"
    "\"I only had one brother.\"\n\n"
    "That night the wind went round to the west again. Marta put on her coat, took the lantern from its hook beside the "
    "stove, and left both notebooks on the table where they would be found. The path to the northern point was white with "
    "salt. Halfway along it she stopped, because the glow was there, low behind the glass, and because somebody was "
    "singing, not well, the tune that the harbour master whistled when he was splicing rope. The door of the lighthouse "
    "had been painted green long ago. She had tried it in the summer and found it locked. Now there was a key in it, with "
    "a label tied to the ring, and when she lifted the lantern she could read what was written there in a careful hand: "
    "left side only. She stood for as long as it takes to count a small flock of birds. Then she turned the key, and it "
    "moved as easily as if it had been oiled that same evening, and",
    /* an explanation */
    "Bread rises because a very small living thing is hungry. A spoonful of baker's yeast holds billions of cells, each a "
    "tiny egg-shaped fungus, and every one of them is looking for sugar. Flour is mostly starch, which yeast can not eat, "
    "but flour also carries enzymes that the grain made for its own use, to feed the seedling that it hoped to become. As "
    "soon as water touches them, these enzymes wake up and begin to cut the long chains of starch into short sugars. The "
    "yeast takes in the sugars and gives off two things: carbon dioxide and alcohol. The alcohol evaporates in the oven. "
    "The gas is what the baker wants.\n\n"
    "Gas alone does not make a loaf, any more than wind alone makes a sail. Something has to catch it. Wheat contains two "
    "proteins, called gliadin and glutenin, which are folded up and keep to themselves as long as they are dry. In wet "
    "dough they unfold, find each other and link into a net, the gluten. Gliadin lets the net stretch; glutenin makes it "
    "spring back. Kneading pulls the strands into line and gives them more chances to link, so that a ball of dough which "
    "tears at first will, ten minutes later, stretch into a sheet so thin that light shines through. Bubbles of gas are "
    "caught in this sheet as in a balloon. If there is too little gluten the bubbles break and the loaf is flat. If there "
    "is too much, the bubbles can not grow, and the loaf is tough.\n\n"
    "Temperature sets the pace. At five degrees yeast hardly moves, which is why dough can be left in a refrigerator over "
    "night; the enzymes go on working there, and the slow dough tastes better because more has happened in it besides the "
    "making of gas. At thirty-five degrees yeast is as busy as it can be. Above fifty-five it dies. So when the loaf goes "
    "into the oven there is a short and crowded time: the yeast makes its last gas faster than ever, the gas that is there "
    "expands with the heat, water turns to steam, and the loaf swells by a third within ten minutes. Bakers call this oven "
    "spring. It ends when the starch has drunk up the water and set, and the gluten has stiffened around the bubbles like "
    "plaster around a lath.\n\n"
    "Last of all comes the crust. As long as the surface is wet it can not get hotter than boiling water. When it has dried, "
    "it climbs past one hundred and forty degrees, and then sugars and pieces of protein begin to react with each other and "
    "turn brown, making hundreds of substances that were not in the flour at all. Most of what we call the smell of bread is "
    "made there, in the outer few millimetres. So, to put the four steps in their order: first the enzymes cut the starch, "
    "then the yeast",
    /* instructions */
    "How to bring an old mechanical wall clock back to life. Read all of it before you begin, and lay out what you need: a "
    "soft brush, a bottle of clock oil with a thin spout, two small screwdrivers, a pair of cotton gloves, wooden pegs, a "
    "notebook, and a table in good light that nobody else will want this week.\n\n"
    "1. Stop the clock. Take the pendulum off by lifting it straight up from its hook, and put it away before anything else "
    "happens, because a bent suspension spring is the most common damage and the hardest to repair.\n\n"
    "2. Let down the power. A wound mainspring holds enough energy to break a finger. If your clock has weights, unhook them "
    "one at a time and mark each with a number, counting from the left, since they may look alike and yet differ by several "
    "hundred grams. If it has springs, fit the key, take the strain with it, ease the click away from the ratchet wheel and "
    "let the key turn back slowly in your hand, half a turn at a time.\n\n"
    "3. Remove the hands. Note in the book where they stood. The minute hand is held by a small nut or by a tapered pin; the "
    "hour hand is only pushed on and comes off with a gentle twist. Put nut, pin and hands into the first jar and write the "
    "number 1 on it. From here on every group of parts gets a jar with a number, and every number gets a line in the book.\n\n"
    "4. Take the movement out of the case. Four screws hold it from behind. Loosen all of them by one turn before you draw "
    "any of them out, or the last one will carry the whole weight. These screws go into jar 2.\n\n"
    "5. Clean it. Brush off the dust, never towards the bearings. Sharpen a peg to a point, turn it in each pivot hole until "
    "it comes out clean, and sharpen it again. Old oil looks like brown varnish. Do not use water. Do not use more force "
    "than you would use to write with a pencil.\n\n"
    "6. Oil it. One small drop in each pivot hole, so that it fills the cup around the hole to the half and no further. Two "
    "drops are worse than none: the second drop runs down the plate and takes the first one with it. The teeth of the wheels "
    "stay dry. The pallets, which catch the escape wheel, get a trace on their faces.\n\n"
    "7. Put it together again in the opposite order. Open jar 2 and fasten the movement with its four screws. Open jar 1 and "
    "push the hour hand on, then the minute hand with its nut. Hang the weights by their numbers from the left, or wind the "
    "springs by a few turns. Last of all hang the pendulum on its hook, and listen. A clock in beat says tick and tock at "
    "equal distances. If it limps, then",
    /* a conversation */
    "INTERVIEWER: Dr. Okafor, you have drilled into the ice at seven places in four decades. What is it like to hold a piece "
    "of the last ice age in your hand?\n\n"
    "OKAFOR: It fizzes. People never expect that. The air in it was trapped under a kilometre of ice, and when the core comes "
    "up and warms, the bubbles burst. You hold it against your ear and hear air that nobody has breathed for twenty thousand "
    "years. Then somebody shouts at you, because you are warming the sample.\n\n"
    "INTERVIEWER: How do you know how old it is?\n\n"
    "OKAFOR: Near the top you count. Summer snow and winter snow look different, so there are layers, like the rings of a tree. "
    "I counted eleven hundred of them in one night in 1987, at the camp that we called Hotel Freezer, with a thermos of bad "
    "coffee and a colleague named Lucia Ferrante who disagreed with me about every tenth one. Further down the ice has been "
    "pressed so thin that you can not count, and then you look for events. A great eruption leaves acid and ash. If you find the "
    "same ash in a lake in Germany and in your core, you have tied the two together.\n\n"
    "INTERVIEWER: Were you right, about every tenth layer?\n\n"
    "OKAFOR: Lucia was right. We found the eruption six layers from where I had put it and none from where she had put it. She "
    "has never mentioned it since, and that is how I know that she remembers.\n\n"
    "INTERVIEWER: What went wrong, in all those years? There must have been failures.\n\n"
    "OKAFOR: The drill of 1994. We were at two thousand and three metres, a week from the bottom, and the cable parted. The "
    "drill is still down there. It cost four hundred thousand dollars and two marriages, one of them mine. We came back the next "
    "summer and began again thirty metres to the side, and I had the first piece of that new core made into nothing at all. I "
    "drank it. With a little whisky.\n\n"
    "INTERVIEWER: You drank a sample?\n\n"
    "OKAFOR: From the top two metres, young lady. Snow of the same winter. I am sentimental, not a criminal.\n\n"
    "INTERVIEWER: What would you say to a student who wants to begin now, when so much of the ice is going?\n\n"
    "OKAFOR: Bring a thermos. And hurry, but count slowly. The ice is an archive in a house that is on fire; you can not carry "
    "everything out, so you have to know which shelf matters. For me that is the shelf where the climate changed within a single "
    "lifetime. We used to think that it needs a thousand years. Then we found a place in the core where it took perhaps thirty.\n\n"
    "INTERVIEWER: At the camp that you called Hotel Freezer?\n\n"
    "OKAFOR: No, at the other one, where the cable had parted. If the drill of 1994 had not been lost, we would have passed "
    "that place by thirty metres, and so you could say that",
    /* a history */
    "The canal between Ostrava Ferry and the salt town of Brenn took nineteen years to dig and was in use for twenty-two. Its "
    "story is usually told as a folly. The papers of the company, which were found in a cellar in 1961 and have only lately been "
    "put in order, tell another one.\n\n"
    "In 1802 a hundredweight of salt cost nine pence at the pans in Brenn and thirty-one pence at the river, forty miles away. "
    "Everything between the two prices was mud. Carters charged by the wheel, and in a wet spring a wagon with four horses might "
    "need eight days. Josiah Tarrant, who owned a third of the pans, had seen the new canals in the north, and he reckoned that "
    "one horse could draw by water what thirty could draw by road. In this he was right. He reckoned further that forty miles "
    "would need twelve locks, four years and sixty thousand pounds, and in this he was wrong by a great deal.\n\n"
    "The ground was the first thing to deceive him. His surveyor, a careful young woman named Adelaide Pruitt who signed her "
    "letters with her father's name, had marked a ridge of gravel at the nineteenth mile and advised going round it to the south, "
    "at the cost of five miles more. Tarrant chose the straight line. Water runs through gravel as through a sieve. For six summers "
    "the company lined the cutting with clay, and for six winters the clay slid to the bottom; the diggers called the place the "
    "Stomach, because it swallowed whatever was put into it. When Tarrant died, in the thirteenth year, the canal was thirty-three "
    "miles long and lay in two pieces.\n\n"
    "It was Pruitt who finished it. The new directors had never met her. They wrote to her father, who had been dead for a decade, "
    "and asked him to take charge, and she answered, under his name, that he would. She went round the ridge to the south, as she "
    "had advised at the beginning, built five locks where the old line would have needed nine, and brought the first boat through "
    "to the river on the second of May 1821. The salt on board was sold at fourteen pence. At the dinner which followed, a toast was "
    "drunk to Mr. Pruitt, whose health, it was explained, did not allow him to attend.\n\n"
    "For two decades the company paid well. The shares that had been used to paper a room in the fifteenth year stood at twice "
    "their value in the thirtieth. Then the railway came to Brenn, along the straight line, over the gravel ridge, which does not "
    "trouble a train in the least. The last boat went down in 1843. What is left is the southern loop, which is a good place for "
    "fishing, and at its fifth lock a stone with an inscription that puzzled the county for a century. It says only:",
};

const char *const lab_talk_system = "You are a helpful, concise AI assistant.";

const char *const lab_talk[LAB_TURNS] = {
    "What is the capital of France?",
    "Tell me about the Eiffel Tower.",
    "Who designed it, and for what occasion?",
    "How tall is it?",
    "Was it liked by the people of Paris when it was new?",
    "Which river flows through the city?",
    "Name three famous museums there.",
    "What can I see in the largest of them?",
    "Which French dish should a visitor try first?",
    "And which cheese would go well after it?",
    "Where in France does Champagne come from?",
    "What happened in 1789?",
    "Who was Napoleon Bonaparte?",
    "How did his rule come to an end?",
    "What is the highest mountain of the country?",
    "Which French city is the best one for a holiday by the sea?",
    "How long does the train from Paris to that city take?",
    "Teach me how to order a coffee in French.",
    "What is the population of France?",
    "Please sum up what we have talked about.",
};
