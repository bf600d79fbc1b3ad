#!/usr/bin/env python3
"""kvd info and kvd tokenize on tiny models. Real vocabularies have tests of their own."""
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
