#!/usr/bin/env python3
"""kvd patch: what must be exactly 0 is, on every family, whatever computes it; and what
has no reason to be is not."""
import harness as h

MODELS = [(), ("--arch", "qwen2", "--type", "Q8_0", "--layers", "2"), ("--arch", "qwen3", "--kv-heads", "4"),
          ("--arch", "gemma3", "--window", "16", "--layers", "7", "--type", "Q4_0")]
DONOR = "What is the capital of Australia, and how far from it is the sea?"
RECIPIENT = "What language is spoken in the south of France"


def patch(*args, model=None, donor=DONOR, recipient=RECIPIENT):
    return h.kvd("patch", "-m", model or h.tiny(), "--donor", donor, "--recipient", recipient, "--json", *args, expect=h.DONE).json()


def table(result, name):
    for t in result["tables"]:
        if t["name"] == name:
            keys = [c["key"] for c in t["columns"]]
            return [dict(zip(keys, row)) for row in t["rows"]]
    return None


def layers_of(result):
    rows = table(result, "layers")
    h.equal([r["layer"] for r in rows], list(range(len(rows))), "layers")
    h.check("check_failed" not in result, f"{result['notes']}")
    return rows


@h.test
def all_positions_give_the_donor_exactly():
    for options in MODELS:
        for donor, recipient in ((DONOR, RECIPIENT), (RECIPIENT, DONOR)):  # the recipient grows, or is cut
            r = patch("--at", "all", model=h.tiny(*options), donor=donor, recipient=recipient)
            prompts = table(r, "prompts")
            h.equal(prompts[0]["tokens"], prompts[1]["tokens"], "tokens of the recipient")
            h.check(prompts[1]["kl_donor"] > 0, "the prompts do not differ")
            for row in layers_of(r):
                h.equal((row["kl_donor"], row["same_bits"], row["next"]), (0, True, prompts[0]["next"]), f"{options}, layer {row['layer']}")
            h.equal(len(layers_of(r)), r["model"]["n_layers"] + 1, "rows")
            h.equal(layers_of(r)[0]["continuation"], prompts[0]["continuation"], "with all of layer 0 the donor's, so is the rest")


@h.test
def the_last_position_is_the_donors_behind_the_last_layer_only():
    for options in MODELS:
        r = patch("--at", "last", model=h.tiny(*options))
        rows = layers_of(r)
        h.equal(len(rows), r["model"]["n_layers"] + 1, "rows")
        h.equal((rows[-1]["kl_donor"], rows[-1]["same_bits"]), (0, True), f"{options}: behind the last layer")
        for row in rows[:-1]:
            h.check(row["kl_donor"] > 0 and not row["same_bits"], f"{options}: {row}")
            h.check(row["kl_recipient"] > 0, f"{options}: nothing was replaced: {row}")
        h.check(len({row["kl_donor"] for row in rows}) == len(rows), f"layers make no difference: {rows}")


@h.test
def patching_a_prompt_with_itself_changes_nothing():
    for options in MODELS:
        for args in ((), ("--at", "all"), ("--what", "kv"), ("--what", "kv", "--at", "all"), ("--what", "kv", "--head", "0"),
                     ("--what", "kv", "--kv-type", "f32"), ("--stream", "bf16",), ("--threads", "3")):
            for row in layers_of(patch(*args, model=h.tiny(*options), donor=DONOR, recipient=DONOR)):
                h.equal((row["kl_donor"], row["kl_recipient"], row["same_bits"]), (0, 0, True), f"{options} {args}, layer {row['layer']}")


@h.test
def k_and_v_go_by_kv_head():
    for options in MODELS:
        model = h.tiny(*options)
        r = patch("--what", "kv", model=model)
        rows, heads, n = layers_of(r), table(r, "heads"), r["model"]["n_kv_heads"]
        h.equal(len(rows), r["model"]["n_layers"], "rows")
        h.equal([(t["layer"], t["head"]) for t in heads], [(i, k) for i in range(len(rows)) for k in range(n)], "heads")
        for row in rows:
            h.check(row["kl_recipient"] > 0 and not row["same_bits"], f"{options}: nothing was replaced: {row}")
        for k in range(n):  # one alone is the row of the table of heads
            alone = layers_of(patch("--what", "kv", "--head", k, model=model))
            h.equal([t["kl_recipient"] for t in alone], [t["kl_recipient"] for t in heads if t["head"] == k], f"head {k}")
        if n == 1:
            h.equal([t["kl_recipient"] for t in rows], [t["kl_recipient"] for t in heads], "the only head")
        else:
            h.check(len({t["kl_recipient"] for t in heads}) > len(heads) // 2, f"heads make no difference: {heads}")


@h.test
def one_layer_is_a_row_of_all():
    rows = layers_of(patch())
    for layer in (0, 2):
        one = table(patch("--layer", layer), "layers")
        h.equal(one, [rows[layer]], f"layer {layer}")


@h.test
def threads_chunks_and_instruction_sets_do_not_show():
    for args in (("--at", "last"), ("--what", "kv")):
        base = layers_of(patch(*args))
        for more in (("--threads", 1), ("--threads", 3), ("--chunk", 3), *(("--cpu", c) for c in h.cpus())):
            h.equal(layers_of(patch(*args, *more)), base, f"{args} {more}")


@h.test
def what_does_not_exist_is_refused():
    base = ("patch", "-m", h.tiny())
    h.refused(h.USAGE, *base, "--layer", 99, names=("99",))
    h.refused(h.USAGE, *base, "--what", "kv", "--head", 99, names=("99",))
    h.refused(h.USAGE, *base, "--what", "kv", "--layer", 99)
    h.refused(h.USAGE, *base, "--at", "middle")
    h.refused(h.USAGE, *base, "--what", "q")
    h.refused(h.USAGE, *base, "-n", 1000000000, names=("2048",))


@h.test
def the_papers_prompts_on_the_real_model():
    model = h.default_model()
    run = lambda *args: h.kvd("patch", "-m", model, "--json", "-n", 2, *args, expect=h.DONE).json()
    every = layers_of(run("--at", "all"))
    h.equal([row["kl_donor"] for row in every], [0] * 31, "all positions")
    last = layers_of(run())
    h.check(0 < last[29]["kl_donor"] < 0.01, f"the entry of the last layer: {last[29]}")
    h.check(last[0]["kl_donor"] > 0.1, f"layer 0: {last[0]}")
    h.equal(last[30]["kl_donor"], 0, "behind the last layer")


h.main()
