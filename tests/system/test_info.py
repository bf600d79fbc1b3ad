#!/usr/bin/env python3
"""kvd info and kvd tokenize on tiny models. Real vocabularies have tests of their own."""
import os
import pty

import harness as h


@h.test
def info_names_the_model():
    value = h.kvd("info", "-m", h.tiny(), "--json", expect=h.DONE).json()
    h.equal(value["architecture"], "llama")
    text = h.kvd("info", "-m", h.tiny(), expect=h.DONE).out.decode()
    h.check("llama" in text, f"no architecture in\n{text}")


@h.test
def info_works_without_weights():
    h.kvd("info", "-m", h.tiny("--vocab-only"), expect=h.DONE)


@h.test
def info_counts_what_context_costs():
    # d 64, 4 layers, 2 KV heads of 16: by hand, in 2-byte types.
    value = h.kvd("info", "-m", h.tiny(), "--json", expect=h.DONE).json()
    h.equal(value["kv_bytes_per_token"], 2 * 4 * 2 * 16 * 2)
    h.equal(value["residual_bytes_per_token"], 64 * 2)
    h.equal(value["all_residuals_bytes_per_token"], 4 * 64 * 2)
    h.equal(value["id_bytes_per_token"], 4)
    h.equal(value["kv_ratio"], 4.0)
    h.equal((value["local_layers"], value["window_tokens"], value["windowed"]), (0, 0, []), "windows")
    text = h.kvd("info", "-m", h.tiny(), expect=h.DONE).out.decode()
    for words in ("0.5 KB", "4.0x", "Table 1", "chatml", "smollm", "Q4_1", "<|im_end|> (2)"):
        h.check(words in text, f"no {words!r} in\n{text}")
    h.check("Local layers" not in text, f"windows in\n{text}")


@h.test
def info_tells_what_windows_hold():
    model = h.tiny("--arch", "gemma3", "--window", "48")
    value = h.kvd("info", "-m", model, "--json", expect=h.DONE).json()
    layer = value["kv_bytes_per_token"] // value["layers"]
    h.equal((value["local_layers"], value["window_tokens"]), (5, 48), "local layers")
    h.equal([w["context_tokens"] for w in value["windowed"]], [48, 192, 768, 2048])
    for w in value["windowed"]:
        n = w["context_tokens"]
        h.equal(w["kv_bytes"], layer * (n + 5 * min(n, 48)), f"held at {n}")
        h.check(abs(w["kv_ratio"] - w["kv_bytes"] / n / value["residual_bytes_per_token"]) < 1e-9, f"ratio at {n}")
    text = h.kvd("info", "-m", model, expect=h.DONE).out.decode()
    for words in ("see the last 48 tokens", "2,048", "SentencePiece", "put before every text", "gemma"):
        h.check(words in text, f"no {words!r} in\n{text}")


@h.test
def info_shares_add_up():
    value = h.kvd("info", "-m", h.tiny("--mix"), "--json", expect=h.DONE).json()
    h.check(len(value["formats"]) > 5, f"{value['formats']}")
    h.check(abs(sum(f["share"] for f in value["formats"]) - 1) < 1e-9, f"{value['formats']}")


@h.test
def info_knows_the_tokeniser_and_the_template():
    value = h.kvd("info", "-m", h.tiny(), "--json", expect=h.DONE).json()
    t = value["tokenizer"]
    h.equal((t["model"], t["pre"], t["adds_bos"], t["adds_eos"]), ("gpt2", "smollm", False, False))
    h.equal(t["eos"], {"id": 2, "text": "<|im_end|>"})
    h.check(t["eos"] in t["end_tokens"], f"{t}")
    h.equal((value["chat_template"], value["has_chat_template"]), ("chatml", True))
    base = h.kvd("info", "-m", h.tiny("--drop", "tokenizer.chat_template"), "--json", expect=h.DONE).json()
    h.equal((base["chat_template"], base["has_chat_template"]), ("", False))
    odd = h.tiny("--set", "tokenizer.chat_template=str:{{ messages[0].content }}")
    text = h.kvd("info", "-m", odd, expect=h.DONE).out.decode()
    h.check("not one of those known" in text, f"{text}")


@h.test
def info_of_the_real_model_is_the_papers_table():
    text = h.kvd("info", "-m", h.default_model(), expect=h.DONE).out.decode()
    for words in ("22.5 KB", "1.1 KB", "20.0x"):
        h.check(words in text, f"no {words!r} in\n{text}")


@h.test
def names_can_not_command_the_terminal():
    model = h.tiny("--set", "general.name=str:a\x1b[31mb\x07")
    out = b""

    def read(fd):
        nonlocal out
        part = os.read(fd, 65536)
        out += part
        return part

    sink = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        pty.spawn([h.KVD, "info", "-m", model], read, lambda fd: b"")
    finally:
        os.dup2(sink, 1)
        os.close(sink)
        os.close(null)
    h.check(b"a\\x1b[31mb\\x07" in out and b"\x1b" not in out, f"{out[:200]!r}")


@h.test
def tokenize_takes_argument_file_and_stdin():
    text = "Hello, world!\nA second line, with ünïcödé and 1234 numbers."
    model = h.tiny()
    by_argument = h.kvd("tokenize", "-m", model, "-p", text, "--json", expect=h.DONE).json()["tokens"]
    by_file = h.kvd("tokenize", "-m", model, "-f", h.write("t.txt", text), "--json", expect=h.DONE).json()["tokens"]
    h.equal(by_file, by_argument, "tokens of the file")
    h.check(all(isinstance(i, int) for i in by_argument) and len(by_argument) > 10, f"{by_argument}")


@h.test
def tokenize_takes_any_bytes():
    model = h.tiny()
    for data in (b"", b"\x00", b"\xff\xfe", bytes(range(256)), b"\xe2\x82", b"a" * 100000):
        h.kvd("tokenize", "-m", model, "-f", h.write("bytes", data), "--json", expect=h.DONE).json()


@h.test
def no_bos_takes_away_at_most_the_first():
    model = h.tiny("--set", "tokenizer.ggml.add_bos_token=bool:true")
    with_bos = h.kvd("tokenize", "-m", model, "-p", "hello", "--json", expect=h.DONE).json()["tokens"]
    without = h.kvd("tokenize", "-m", model, "-p", "hello", "--no-bos", "--json", expect=h.DONE).json()["tokens"]
    h.equal(with_bos[1:], without, "tokens after BOS")


@h.test
def tokenize_works_without_weights():
    a = h.kvd("tokenize", "-m", h.tiny("--vocab-only"), "-p", "hello you", "--json", expect=h.DONE).json()
    b = h.kvd("tokenize", "-m", h.tiny(), "-p", "hello you", "--json", expect=h.DONE).json()
    h.equal(a["tokens"], b["tokens"])


h.main()
