#!/usr/bin/env python3
"""kvd chat: through pipes, at a terminal, and what it must not do: compute twice,
drop silently, forget after a refusal.

The tiny models say random bytes, which is what a chat has to stand: their tokens
are not those that the tokeniser makes of the same text, and some bytes command a
terminal. Turns are one line, so what is asked on line k is answered by the k-th
statistics line on stderr.
"""
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios

import harness as h

STATS = re.compile(r"kvd: (\d+) tokens, \S+/s; prompt (\d+) new \+ (\d+) kept, \S+/s; (\d+) resident, (\d+) evicted(?: to disk)?, (\d+) recomputed")
MESSAGES = ["hello", "how are you?", "and what else is there to say", "ok", "tell me more"]


def lines(*messages):
    return "".join(m + "\n" for m in messages).encode()


class Turn:
    def __init__(self, match):
        self.answer, self.new, self.kept, self.resident, self.evicted, self.recomputed = map(int, match)


def chat(model, messages, *args, expect=h.DONE):
    """The turns' statistics, the receipts, the result."""
    r = h.kvd("chat", "-m", model, "--stats", "--receipt", *args, stdin=lines(*messages), expect=expect)
    return [Turn(m) for m in STATS.findall(r.err)], re.findall(r"^receipt ([0-9a-f]{32})$", r.err, re.M), r


# ---- pipes ---------------------------------------------------------------------


@h.test
def answers_go_to_stdout_and_nothing_else():
    r = h.kvd("chat", "-m", h.tiny(), "-n", "8", stdin=lines("hello"), expect=h.DONE)
    check_first = r.err.splitlines()[0]
    h.check(check_first.startswith("kvd: kv-direct") and "T_max" in check_first, f"first line\n{r}")
    h.check(len(r.out) > 1 and r.out.endswith(b"\n") and b"kvd:" not in r.out, f"stdout\n{r}")
    h.check(b"> " not in r.out[:2], f"a prompt on stdout\n{r}")


@h.test
def the_first_answer_is_that_of_run():
    model = h.tiny()
    for system in ([], ["--system", "be brief"]):
        run = h.run_json(model, "-p", "hello", "-n", "16", *system)
        turns, receipts, r = chat(model, ["hello"], "-n", "16", *system)
        h.equal(receipts[0], run["receipt"], "receipt")
        h.equal(turns[0].new, run["prompt_tokens"], "prompt")
        h.equal(turns[0].answer, run["generated_tokens"], "tokens")


@h.test
def an_empty_line_is_no_message():
    turns, _, _ = chat(h.tiny(), ["", "  ", "hello", ""], "-n", "4")
    h.equal(len(turns), 1)


@h.test
def the_last_line_needs_no_end():
    r = h.kvd("chat", "-m", h.tiny(), "-n", "4", "--stats", stdin=b"hello\r\nyou", expect=h.DONE)
    h.equal(len(STATS.findall(r.err)), 2)
    with_crlf = r.out
    h.equal(h.kvd("chat", "-m", h.tiny(), "-n", "4", stdin=b"hello\nyou\n", expect=h.DONE).out, with_crlf)


@h.test
def no_input_is_no_error():
    h.equal(h.kvd("chat", "-m", h.tiny(), stdin=subprocess.DEVNULL, expect=h.DONE).out, b"")


@h.test
def quiet_says_nothing():
    r = h.kvd("chat", "-m", h.tiny(), "-n", "4", "--quiet", stdin=lines("hello"), expect=h.DONE)
    h.equal(r.err, "")


@h.test
def a_long_line_is_one_message():
    turns, _, _ = chat(h.tiny("--context", "16000"), ["word " * 2000], "-n", "4")
    h.check(len(turns) == 1 and turns[0].new > 2000, "tokens of the message")


@h.test
def a_byte_0_is_refused():
    r = h.kvd("chat", "-m", h.tiny(), "-n", "4", "--stats", stdin=b"a\0b\nhello\n", expect=h.BAD_FILE)
    h.equal(len(STATS.findall(r.err)), 1, "answers")


@h.test
def a_full_disk_is_an_error():
    if not os.path.exists("/dev/full"):
        h.skip("no /dev/full")
    with open("/dev/full", "wb") as full:
        h.kvd("chat", "-m", h.tiny(), "-n", "4", stdin=lines("hello"), stdout=full, expect=h.BAD_FILE)


# ---- no prefix is computed twice --------------------------------------------------


@h.test
def only_what_is_new_is_fed():
    # Each answer ends with a token that was not fed; a prompt is that token, the
    # end of its turn and the message, whatever the answer's bytes are.
    turns, _, r = chat(h.tiny(), MESSAGES, "-n", "20")
    h.equal(len(turns), len(MESSAGES))
    before = 0
    for k, t in enumerate(turns):
        h.equal(t.evicted + t.recomputed, 0, f"turn {k}: evicted and recomputed")
        if k:
            h.check(t.kept + 8 >= before, f"turn {k}: kept {t.kept} of {before}\n{r}")
        h.check(t.new < 60, f"turn {k}: {t.new} tokens fed\n{r}")
        before = t.resident


@h.test
def a_byte_0_in_an_answer_costs_no_recomputation():
    # The template gets it as U+FFFD; that is what the conversation says from then on.
    turns, _, r = chat(h.tiny("--context", "4096"), ["hello", "go on"], "-n", "1000", "--ignore-eos")
    h.check(b"\0" in r.out, f"no byte 0 in an answer of {len(r.out)} bytes")
    h.check(turns[1].kept + 8 >= turns[0].resident, f"kept {turns[1].kept} of {turns[0].resident}")


@h.test
def a_template_that_changes_the_past_rewinds_to_it():
    # Mistral's moves the system message to the last question, Gemma's trims
    # answers: right is what a chat says that keeps nothing.
    for template in ("mistral", "gemma", "llama2", "llama3", "deepseek-r1", "qwen3"):
        args = ["--template", template, "--system", "be brief", "-n", "12", "--ignore-eos"]
        turns, receipts, r = chat(h.tiny(), MESSAGES, *args)
        h.equal(len(turns), len(MESSAGES), template)
        again = chat(h.tiny(), MESSAGES, *args, "--kv-tokens", "0", "--evict-to", "recompute")
        h.equal(again[1], receipts, f"{template}: receipts")
        h.equal(again[2].out, r.out, f"{template}: answers")


@h.test
def the_real_model_continues_as_from_the_whole_text():
    """Chat, turn by turn, and one prompt that holds the conversation: the same receipts.

    A chat keeps the tokens that the model chose; the whole text has the same ones
    as long as the tokeniser would have chosen them too."""
    model = h.default_model()
    messages = ["Hi! What is the capital of France?", "And of Italy?", "And of Spain?"]
    _, receipts, r = chat(model, messages, "-n", "24")
    text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    for k, message in enumerate(messages):
        text += f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
        whole = h.run_json(model, "--raw", "--special", "-p", text, "-n", "24", "--kv-tokens", "32")
        h.equal(whole["receipt"], receipts[k], f"turn {k}")
        answer = whole["text"].replace("<|im_end|>", "")
        h.check(answer.encode() in r.out, f"the answer {answer!r} is not among\n{r}")
        tokens = h.kvd("tokenize", "-m", model, "-p", answer, "--json", expect=h.DONE).json()["tokens"]
        if tokens != [t for t in whole["tokens"] if t != 2]:
            break
        text += answer + "<|im_end|>\n"
    h.check(k > 0, "no second turn was compared")


# ---- memory ----------------------------------------------------------------------


@h.test
def the_budget_changes_nothing_but_the_time():
    model = h.tiny()
    _, receipts, r = chat(model, MESSAGES, "-n", "20")
    for tier in ("recompute", "disk"):
        for args in (["--kv-tokens", "0"], ["--kv-tokens", "32"], ["--kv-budget", "96K"]):
            args += ["--evict-to", tier]
            turns, got, s = chat(model, MESSAGES, "-n", "20", *args)
            h.equal(got, receipts, f"receipts with {args}")
            h.equal(s.out, r.out, f"answers with {args}")
            h.check(turns[-1].evicted > 0, f"nothing evicted with {args}\n{s}")
            h.check(tier == "disk" or turns[-1].recomputed > 0, f"nothing recomputed with {args}\n{s}")


@h.test
def a_full_budget_refuses_the_turn_in_numbers():
    args = ["-n", "20", "--kv-budget", "40K", "--evict-to", "recompute"]
    messages = MESSAGES * 4
    turns, _, r = chat(h.tiny(), messages, *args, expect=h.RESOURCES)
    refusals = [line for line in h.error_lines(r) if "not sent" in line]
    t_max = int(re.search(r"T_max (\d+) tokens", r.err).group(1))
    h.check(0 < len(turns) < len(messages) and len(turns) + len(refusals) == len(messages), f"answered or refused\n{r}")
    for word in (str(t_max), "40.0 KiB", "/reset"):
        h.check(word in refusals[0], f"the refusal does not name {word!r}: {refusals[0]}")
    h.check(max(t.resident + t.evicted for t in turns) <= t_max, f"longer than T_max\n{r}")


@h.test
def reset_makes_room():
    model, args = h.tiny(), ["-n", "20", "--kv-budget", "40K", "--evict-to", "recompute"]
    first, receipts, _ = chat(model, MESSAGES * 4, *args, expect=h.RESOURCES)
    turns, again, r = chat(model, MESSAGES * 4 + ["/reset"] + MESSAGES[:1], *args, expect=h.RESOURCES)
    h.equal(len(turns), len(first) + 1, "answers")
    h.equal(again[-1], receipts[0], "the first answer after /reset")


@h.test
def a_refused_message_leaves_the_conversation_as_it_was():
    model, args = h.tiny(), ["-n", "10", "--kv-budget", "64K", "--evict-to", "recompute"]
    _, plain, p = chat(model, MESSAGES[:3], *args)
    _, with_refused, r = chat(model, [MESSAGES[0], "x" * 5000, MESSAGES[1], "y " * 4000, MESSAGES[2]], *args, expect=h.RESOURCES)
    h.equal(r.err.count("not sent"), 2, "refusals")
    h.equal(with_refused, plain, "receipts")
    h.equal(r.out, p.out, "answers")


@h.test
def the_trained_context_is_a_limit_too():
    turns, _, r = chat(h.tiny("--context", "160"), MESSAGES * 3, "-n", "20", expect=h.RESOURCES)
    refusals = [line for line in h.error_lines(r) if "not sent" in line]
    h.check(turns and refusals and "160" in refusals[0] and "trained" in refusals[0], f"{r}")
    h.check(max(t.resident for t in turns) <= 160, f"longer than the context\n{r}")


@h.test
def an_answer_cut_by_the_context_says_so():
    turns, _, r = chat(h.tiny("--context", "96"), ["hello"], "-n", "-1", "--ignore-eos")
    h.check("context is full (96 tokens)" in r.err, f"{r}")
    h.equal(turns[0].new + turns[0].answer, 96, "tokens")


@h.test
def windows_hold_in_a_chat():
    model = h.tiny("--arch", "gemma3", "--window", "48")
    _, receipts, r = chat(model, MESSAGES, "-n", "20")
    _, got, s = chat(model, MESSAGES, "-n", "20", "--kv-tokens", "16", "--evict-to", "recompute")
    h.equal(got, receipts)
    h.equal(s.out, r.out)


# ---- commands --------------------------------------------------------------------


@h.test
def commands_answer_on_stderr():
    r = h.kvd("chat", "-m", h.tiny(), "-n", "4",
              stdin=lines("/help", "/memory", "/stats", "hello", "/memory", "/stats", "/system", "/reset", "/quit", "never"),
              expect=h.DONE)
    for word in ("/help", "/reset", "/system", "/memory", "/stats", "/quit", "T_max", "checkpoint", "resident"):
        h.check(word in r.err, f"no {word!r}\n{r}")
    h.equal(len(STATS.findall(r.err)), 1, "statistics while they were on")
    h.check(b"never" not in r.out, "went on after /quit")


@h.test
def an_unknown_command_is_refused_and_a_path_is_not():
    turns, _, r = chat(h.tiny(), ["/nonsense", "/etc/hosts is what?", "//help"], "-n", "4", expect=h.USAGE)
    h.equal(len(turns), 2)
    h.check("/nonsense" in r.err, f"{r}")


@h.test
def the_system_message_can_be_set():
    model = h.tiny()
    _, by_option, _ = chat(model, ["hello"], "-n", "8", "--system", "be brief")
    _, by_command, _ = chat(model, ["/system be brief", "hello"], "-n", "8")
    _, removed, _ = chat(model, ['/system ""', "hello"], "-n", "8", "--system", "be brief")
    _, without, _ = chat(model, ["hello"], "-n", "8")
    h.equal(by_command, by_option, "set")
    h.equal(removed, without, "removed")
    h.check(by_option != without, "a system message changes nothing")


@h.test
def reset_keeps_the_system_message():
    model = h.tiny()
    _, receipts, _ = chat(model, ["hello", "/reset", "hello"], "-n", "8", "--system", "be brief")
    h.equal(receipts[1], receipts[0])


# ---- templates -------------------------------------------------------------------


@h.test
def a_base_model_is_refused_with_the_list():
    base = h.tiny("--drop", "tokenizer.chat_template")
    h.refused(h.BAD_FILE, "chat", "-m", base, names=("chatml", "llama3", "gemma", "--template"), stdin=lines("hello"))
    turns, _, _ = chat(base, ["hello"], "-n", "4", "--template", "chatml")
    h.equal(len(turns), 1)
    h.refused(h.USAGE, "chat", "-m", base, "--template", "nonsense", names=("nonsense", "chatml"), stdin=lines("hello"))


@h.test
def an_unknown_template_is_not_guessed():
    odd = h.tiny("--set", "tokenizer.chat_template=str:{{ messages[0].content }}")
    h.refused(h.BAD_FILE, "chat", "-m", odd, names=("chatml", "mistral"), stdin=lines("hello"))


@h.test
def no_think_is_for_those_who_think():
    model = h.tiny("--arch", "qwen3")
    _, thinking, _ = chat(model, ["hello"], "-n", "8", "--template", "qwen3")
    _, plain, _ = chat(model, ["hello"], "-n", "8", "--template", "qwen3", "--no-think")
    h.check(thinking != plain, "the same prompt")
    h.equal(h.run_json(model, "-p", "hello", "-n", "8", "--template", "qwen3", "--no-think")["receipt"], plain[0])


@h.test
def options_of_other_commands_are_refused():
    for option in (["--raw"], ["-p", "x"], ["--json"], ["--context", "10"], ["--quick"]):
        h.refused(h.USAGE, "chat", "-m", h.tiny(), *option, names=(option[0],))


# ---- signals ---------------------------------------------------------------------


def start(*args, context="20000"):
    """A chat whose output nobody reads: its answer can not end by itself."""
    return h.start_unread("chat", "-m", h.tiny("--context", context), "--stats", *args, stdin=subprocess.PIPE)


@h.test
def an_interrupt_ends_the_answer_and_not_the_program():
    command, p, fd = start("-n", "-1", "--ignore-eos")
    p.stdin.write(lines("hello"))
    p.stdin.flush()
    first = os.read(fd, 1)  # the answer has begun
    p.send_signal(signal.SIGINT)
    # Its end shows that the signal was heard; only then the pipe is read.
    p.stdin.write(lines("/memory", "/reset", "/quit"))
    p.stdin.close()
    out = first + h.read_all(fd)
    r = h.watch(h.Result(command, p.wait(h.TIMEOUT_S), out, p.stderr.read().decode(errors="replace")))
    h.equal(r.code, h.DONE, f"exit\n{r}")
    h.equal(len(STATS.findall(r.err)), 1, f"answers\n{r}")
    h.check("conversation" in r.err, f"no command after the interrupt\n{r}")


@h.test
def a_stopped_answer_is_part_of_the_conversation():
    command, p, fd = start("-n", "-1", "--ignore-eos")
    out, err = b"", b""
    os.set_blocking(fd, False)
    for message in ("hello", "go on"):
        p.stdin.write(lines(message))
        p.stdin.flush()
        select.select([fd], [], [], h.TIMEOUT_S)
        p.send_signal(signal.SIGINT)  # its answer has begun: all before was read
        seen = len(err)
        while b"; prompt" not in err[seen:]:
            ready = select.select([fd, p.stderr], [], [], h.TIMEOUT_S)[0]
            h.check(ready, "hangs")
            out += os.read(fd, 65536) if fd in ready else b""
            err += p.stderr.readline() if p.stderr in ready else b""
        while select.select([fd], [], [], 0)[0]:
            out += os.read(fd, 65536)
    p.stdin.close()
    os.set_blocking(fd, True)
    out += h.read_all(fd)
    r = h.watch(h.Result(command, p.wait(h.TIMEOUT_S), out, (err + p.stderr.read()).decode(errors="replace")))
    turns = [Turn(m) for m in STATS.findall(r.err)]
    h.equal(r.code, h.DONE, f"exit\n{r}")
    h.equal(len(turns), 2, f"answers\n{r}")
    h.check(turns[1].kept + 8 >= turns[0].resident, f"kept {turns[1].kept} of {turns[0].resident}")


@h.test
def two_interrupts_at_the_prompt_end_it():
    command, p, fd = start("-n", "4")
    p.stdin.write(lines("hello"))
    p.stdin.flush()
    err = b""
    while b"; prompt" not in err:
        err += p.stderr.readline()
    p.send_signal(signal.SIGINT)
    err += p.stderr.readline()  # "again, or Ctrl-D"
    p.send_signal(signal.SIGINT)
    code = p.wait(h.TIMEOUT_S)
    r = h.watch(h.Result(command, code, h.read_all(fd), (err + p.stderr.read()).decode(errors="replace")))
    h.equal(r.code, h.DONE, f"exit\n{r}")
    p.stdin.close()


def sleeping(p):
    with open(f"/proc/{p.pid}/stat", encoding="ascii", errors="replace") as f:
        return f.read().rpartition(")")[2].split()[0] == "S"


@h.test
def a_second_interrupt_in_an_answer_leaves_at_once():
    # One thread sleeps only where it writes into the full pipe: inside the answer.
    command, p, fd = start("-n", "-1", "--ignore-eos", "--threads", "1")
    p.stdin.write(lines("hello"))
    p.stdin.flush()
    waiting = bytearray(4)

    def full():
        fcntl.ioctl(fd, termios.FIONREAD, waiting)
        return int.from_bytes(waiting, sys.byteorder) > 4000 and sleeping(p)

    h.wait_until(p, full)
    p.send_signal(signal.SIGINT)
    h.wait_until(p, lambda: not h.pending(p, signal.SIGINT))
    p.send_signal(signal.SIGINT)
    # Not read any further: if it waited for the pipe to drain, this would hang.
    h.equal(p.wait(h.TIMEOUT_S), h.INTERRUPTED, "exit code")
    os.close(fd)
    p.stdin.close()
    p.stderr.close()


@h.test
def terminate_ends_it():
    command, p, fd = start("-n", "-1", "--ignore-eos")
    p.stdin.write(lines("hello", "more"))
    p.stdin.flush()
    first = os.read(fd, 1)
    p.send_signal(signal.SIGTERM)
    out = first + h.read_all(fd)
    r = h.watch(h.Result(command, p.wait(h.TIMEOUT_S), out, p.stderr.read().decode(errors="replace")))
    h.equal(r.code, h.INTERRUPTED, f"exit\n{r}")
    p.stdin.close()


# ---- a terminal ------------------------------------------------------------------


class Terminal:
    """The program with a terminal at both ends."""

    def __init__(self, *args, term="dumb", model=None):
        self.command = [h.KVD, "chat", "-m", model or h.tiny(), *args]
        self.out = b""
        self.at = 0
        pid, self.fd = pty.fork()
        if pid == 0:
            os.execve(self.command[0], self.command, h.environment({"TERM": term, "HOME": h.folder()}))
        self.pid = pid

    def more(self, wanted):
        """What there is, at least a byte."""
        if not select.select([self.fd], [], [], h.TIMEOUT_S)[0]:
            raise h.Failure(f"no {wanted} in {self.out[-500:]!r}")
        try:
            part = os.read(self.fd, 65536)
        except OSError:
            part = b""
        if not part:
            raise h.Failure(f"ended before {wanted}: {self.out[-500:]!r}")
        self.out += part

    def read(self, until):
        """Output up to the next occurrence of a text."""
        begin = self.at
        while until not in self.out[begin:]:
            self.more(repr(until))
        self.at = self.out.index(until, begin) + len(until)
        return self.out[begin:self.at]

    def send(self, data):
        os.write(self.fd, data)

    def leave(self, data):
        """Type what ends it, and see that it does."""
        self.send(data)
        r = self.end()
        h.equal(r.code, h.DONE, f"exit\n{r}")
        return r

    def end(self):
        try:
            while part := os.read(self.fd, 65536):
                self.out += part
        except OSError:
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return h.watch(h.Result(self.command, os.waitstatus_to_exitcode(status), self.out, ""))


@h.test
def output_can_not_command_the_terminal():
    t = Terminal("-n", "400", "--ignore-eos")
    t.read(b"> ")
    t.send(b"hello\n")
    answer = t.read(b"\n> ")
    t.send(b"\x04")
    t.end()
    piped = h.kvd("chat", "-m", h.tiny(), "-n", "400", "--ignore-eos", stdin=lines("hello"), expect=h.DONE).out
    h.check(any(b < 32 and b not in b"\n\t" for b in piped), "the model says no control bytes: nothing tested")
    h.check(not [b for b in answer if b < 32 and b not in b"\r\n\t" or b == 127], f"control bytes in {answer!r}")
    text = answer.decode(errors="strict")
    h.check(not [c for c in text if 0x80 <= ord(c) < 0xa0], "C1 characters")
    h.check("\\x1b" in text or b"\x1b" not in piped, "ESC is not shown")


@h.test
def the_line_editor_edits():
    for term in ("dumb", "xterm"):
        t = Terminal("-n", "4", "--stats", term=term)
        t.read(b"> ")
        t.send(b"/hexlp\x7f\x7f\x7flp\n")
        t.read(b"//text")
        t.read(b"> ")
        t.leave(b"\x04")


@h.test
def history_brings_a_line_back():
    t = Terminal(term="xterm")
    t.read(b"> ")
    t.send(b"/stats\n")
    t.read(b": on")
    t.read(b"> ")
    t.send(b"\x1b[A")  # up
    t.send(b"\n/quit\n")
    r = t.end()
    if b"no command" in r.out or b": off" not in r.out:
        h.skip("built without libedit")
    h.equal(r.code, h.DONE)


@h.test
def ctrl_c_clears_the_line_then_ends():
    for term in ("dumb", "xterm"):
        t = Terminal(term=term)
        t.read(b"> ")
        t.send(b"never sent")
        t.read(b"sent")
        t.send(b"\x03")
        t.read(b"again")
        t.read(b"> ")
        t.send(b"/memory\n")
        t.read(b"conversation  0 tokens")
        t.read(b"> ")
        t.send(b"\x03")
        t.read(b"again")
        t.leave(b"\x03")


@h.test
def ctrl_d_counts_whenever_it_is_typed():
    # During the answer, or between prompt and editor: the line discipline takes it then.
    for term in ("dumb", "xterm"):
        t = Terminal("-n", "400", "--ignore-eos", term=term)
        t.read(b"> ")
        t.send(b"hello\n")
        t.read(b"hello\r\n")
        t.leave(b"\x04")
        t = Terminal(term=term)
        r = t.leave(b"/stats\n\x04")  # before it listens at all
        h.check(b": on" in r.out, f"the line before it\n{r}")


@h.test
def ctrl_c_stops_an_answer_at_a_terminal():
    t = Terminal("-n", "-1", "--ignore-eos", model=h.tiny("--context", "20000"))
    t.read(b"> ")
    t.send(b"hello\n")
    t.read(b"hello\r\n")
    while len(t.out) < 4000:  # the answer has begun: no progress bar is so long
        t.more("answer")
    t.send(b"\x03")
    t.read(b"kvd: stopped")
    t.read(b"> ")
    t.leave(b"/quit\n")


@h.test
def a_backslash_goes_on_in_the_next_line():
    t = Terminal("-n", "4", "--receipt")
    t.read(b"> ")
    t.send(b"hel\\\n")
    t.read(b". ")
    t.send(b"lo\n")
    receipt = re.search(rb"receipt ([0-9a-f]{32})", t.read(b"\n> ")).group(1).decode()
    t.send(b"\x04")
    t.end()
    h.equal(h.run_json(h.tiny(), "-p", "hel\nlo", "-n", "4")["receipt"], receipt)


h.main()
