#!/usr/bin/env python3
"""What the program refuses: one line of error, the right exit code, nothing on stdout."""
import os

import harness as h


def run(*args):
    return ("run", "-m", h.tiny(), "--raw", "-p", "hello", "-n", "2", *args)


@h.test
def no_command_or_an_unknown_one():
    for args in ((), ("frobnicate",), ("--frobnicate",)):
        r = h.kvd(*args, expect=h.USAGE)
        h.check(r.err.strip(), f"silent\n{r}")
        h.equal(r.out, b"", "stdout")


@h.test
def help_is_not_an_error():
    for args in (("--help",), ("run", "--help"), ("tokenize", "--help"), ("eval", "--help"), ("verify", "--help")):
        r = h.kvd(*args, expect=h.DONE)
        h.check(b"kvd" in r.out, f"no help on stdout\n{r}")


@h.test
def version():
    r = h.kvd("--version", expect=h.DONE)
    h.check(r.out.startswith(b"kvd "), f"\n{r}")


@h.test
def unknown_and_incomplete_options():
    for args in (run("--frobnicate"), run("--threads"), ("run", "-p", "x"), run("extra")):
        r = h.kvd(*args, expect=h.USAGE)
        h.equal(r.out, b"", "stdout")


@h.test
def absurd_numbers():
    for option, values in {
        "--threads": ("0", "-1", "257", "999999999999", "two", "1.5", ""),
        "--chunk": ("0", "-1", "5000", "99999999999999999999", "x"),
        "--kv-budget": ("-1", "x", "1Q", "99999999999999999999", "9999999999G", "1.5.5M", ""),
        "--kv-tokens": ("-2", "x", "99999999999999999999", "1e3"),
        "-n": ("-2", "x", "99999999999999999999", ""),
        "--temp": ("-1", "nan", "inf", "x", ""),
        "--top-k": ("-1", "x"),
        "--top-p": ("-0.1", "1.5", "nan"),
        "--min-p": ("-0.1", "1.5", "nan"),
        "--repeat-penalty": ("0", "-1", "nan"),
        "--seed": ("-1", "x", "99999999999999999999999"),
        "--cpu": ("mmx", ""),
        "--kv-type": ("f8", ""),
        "--stream": ("f64",),
        "--activations": ("q4",),
        "--policy": ("lru", ""),
        "--logit-bias": ("x", "1", "1:nan", "99999999:1"),
    }.items():
        for value in values:
            h.refused(h.USAGE, *run(option, value))


@h.test
def an_instruction_set_that_is_not_here():
    for cpu in {"scalar", "avx2", "avx512", "neon"} - set(h.cpus()):
        h.refused(h.USAGE, *run("--cpu", cpu), names=(cpu,))


@h.test
def missing_files():
    h.refused(h.BAD_FILE, "run", "-m", "/nonexistent/m.gguf", "-p", "x", names=("/nonexistent/m.gguf",))
    h.refused(h.BAD_FILE, "run", "-m", h.folder(), "-p", "x")
    h.refused(h.BAD_FILE, "run", "-m", h.tiny(), "-f", "/nonexistent/prompt.txt", names=("/nonexistent/prompt.txt",))
    h.refused(h.BAD_FILE, "eval", "perplexity", "-m", h.tiny(), "-f", "/nonexistent/text")
    h.refused(h.BAD_FILE, "tokenize", "-m", h.tiny(), "-f", "/nonexistent/text")


@h.test
def unreadable_model():
    if os.geteuid() == 0:
        h.skip("root reads everything")
    path = h.write("secret.gguf", b"GGUF")
    os.chmod(path, 0)
    h.refused(h.BAD_FILE, "info", "-m", path)


@h.test
def both_prompt_and_file():
    h.refused(h.USAGE, *run("-f", h.write("p.txt", "x")))


@h.test
def an_empty_prompt_without_bos():
    r = h.kvd("run", "-m", h.tiny(), "--raw", "-p", "", "--no-bos", "-n", "2")
    h.check(r.code in (h.USAGE, h.DONE), f"exit {r.code}\n{r}")


@h.test
def inject_only_with_a_place_that_exists():
    for place in ("", "x", "0", "0:", ":0", "999:0", "0:999999999999999999999", "-1:0"):
        h.refused(h.USAGE, "verify", "-m", h.tiny(), "--quick", "--inject", place)


@h.test
def a_vocabulary_without_weights():
    path = h.tiny("--vocab-only")
    h.kvd("tokenize", "-m", path, "-p", "hello", expect=h.DONE)
    h.refused(h.BAD_FILE, "run", "-m", path, "-p", "hello")


@h.test
def an_architecture_it_does_not_know_is_named():
    path = h.tiny("--set", "general.architecture=str:mamba")
    for command in (("run", "-p", "x"), ("info",)):
        h.refused(h.BAD_FILE, command[0], "-m", path, *command[1:], names=("mamba",))


@h.test
def a_pre_tokeniser_it_does_not_know_is_named():
    path = h.tiny("--pre", "frobnicate")
    h.refused(h.BAD_FILE, "tokenize", "-m", path, "-p", "x", names=("frobnicate",))


@h.test
def numbers_no_model_can_have():
    for setting in ("llama.block_count=u32:4000000000", "llama.embedding_length=u32:0",
                    "llama.attention.head_count=u32:0", "llama.attention.head_count_kv=u32:3",
                    "llama.context_length=u32:0", "llama.feed_forward_length=u32:4294967295",
                    "llama.rope.freq_base=f32:nan", "llama.attention.layer_norm_rms_epsilon=f32:-1"):
        h.refused(h.BAD_FILE, "run", "-m", h.tiny("--set", setting), "-p", "x")


@h.test
def missing_tensors_and_keys_are_named():
    for name in ("blk.1.attn_q.weight", "token_embd.weight", "output_norm.weight", "llama.block_count"):
        h.refused(h.BAD_FILE, "run", "-m", h.tiny("--drop", name), "-p", "x", names=(name,))


h.main()
