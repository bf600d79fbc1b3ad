"""Chat templates against what Jinja2 makes of the authors' own.

usage: test_chat_jinja.py RENDER_CHAT

The templates come from real files, where there are any:
- *.jinja in $KVD_DATA/templates,
- the GGUF files in $KVD_MODELS (else ~/.cache/kvd/models), with Python's gguf.
Each is recognised by render_chat, and some hundred conversations rendered by
both must agree, or both refuse. Skips (exit 77), saying so, without Jinja2 or
without a template.
"""
import glob
import os
import random
import subprocess
import sys
import tempfile

# What a template must be recognised as, by a word of its name.
EXPECTED = {
    "smollm2": "smollm2", "Qwen2.5": "qwen2.5", "qwen2.5": "qwen2.5", "Qwen3": "qwen3", "DeepSeek-R1": "deepseek-r1",
    "Llama-3.1": "llama3.1", "Llama-3.2": "llama3.1", "gemma-2": "gemma", "Mistral-Nemo": "mistral",
}
CONTENTS = [
    "Hi", "", " two \n\nlines\n", "\u3000wide\u00a0", "caf\u00e9 \U0001f600", "{{ bos_token }}{% if x %}",
    "<think>\nhm\n</think>\n\nSo.", "<think>a</think>b<think>c</think>\nd", "no end <think>", "</think>\n\n", "\n\nx\n",
    "<tool_response>\n1\n</tool_response>", "<|im_end|>", "'quoted' \"twice\"", "\t", "a</think>",
]


def skip(why):
    print(f"SKIP test_chat_jinja.py: {why}")
    print("0 passed, 0 failed, 1 skipped")
    sys.exit(77)


def templates():
    """[(name, text)]"""
    found = []
    data = os.environ.get("KVD_DATA", "")
    for path in sorted(glob.glob(os.path.join(data, "templates", "*.jinja"))) if data else []:
        with open(path, encoding="utf-8") as f:
            found.append((os.path.basename(path), f.read()))
    if not found:
        print("SKIP *.jinja: KVD_DATA names no folder with templates/")
    models = os.environ.get("KVD_MODELS") or os.path.join(os.path.expanduser("~"), ".cache", "kvd", "models")
    try:
        import gguf
    except ImportError:
        print("SKIP GGUF files: no Python package gguf")
        return found
    for path in sorted(glob.glob(os.path.join(models, "*.gguf"))):
        field = gguf.GGUFReader(path).fields.get("tokenizer.chat_template")
        if field is None:
            print(f"SKIP {os.path.basename(path)}: has no chat template")
        else:
            found.append((os.path.basename(path), field.contents()))
    return found


def conversations():
    """Proper ones, then orders of roles that some templates refuse."""
    pick = random.Random(1).choice
    for n in range(1, 7):
        for first in (False, True):
            for _ in range(4):
                talk = [{"role": "system", "content": pick(CONTENTS)}] if first else []
                for i in range(n):
                    talk.append({"role": "assistant" if i % 2 else "user", "content": pick(CONTENTS)})
                yield talk
    for _ in range(40):
        yield [{"role": pick(["system", "user", "assistant"]), "content": pick(CONTENTS)}
               for _ in range(pick([1, 2, 3, 4]))]


def compile_template(jinja2, text):
    """As Hugging Face's transformers sets Jinja up."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(text)


def compare(jinja2, program, name, text, path):
    expected_kind = next((kind for word, kind in EXPECTED.items() if word in name), None)
    template = compile_template(jinja2, text)
    with open(path, "w", encoding="utf-8", newline="") as f:
        f.write(text)
    compared = 0
    for talk in conversations():
        if "<start_of_turn>" in text and any(m["role"] == "system" for m in
                                             talk["System role not supported" not in text:]):
            continue  # the first is taken by Gemma 3 and refused by Gemma 2; later ones slip through the check of both
        for generate, thinking in ((True, True), (True, False), (False, True)):
            if not thinking and "<think>" in text and "enable_thinking" not in text:
                continue  # the template has no such choice, we do
            done = subprocess.run([program, path, str(int(generate)), str(int(thinking)),
                                   *(word for m in talk for word in (m["role"], m["content"]))],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
            kind, _, got = done.stdout.decode().partition("\n")
            if expected_kind and kind != expected_kind:
                return f"recognised as {kind}, expected {expected_kind}"
            if done.returncode == 1:
                return "not recognised, and not expected to be" if expected_kind is None else "not recognised"
            try:
                want = template.render(messages=talk, add_generation_prompt=generate, enable_thinking=thinking,
                                       bos_token="<s>", eos_token="</s>").removeprefix("<s>")
            except jinja2.exceptions.TemplateError:
                want = None
            if want != (got if done.returncode == 0 else None):
                return f"{talk} generate={generate} thinking={thinking}\n  got    {got!r} {done.stderr.decode()}\n  wanted {want!r}"
            compared += 1
    return compared


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        import jinja2
    except ImportError:
        skip("no Python package jinja2")
    found = templates()
    if not found:
        skip("no template is here")
    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="kvd-test-") as folder:
        for name, text in found:
            result = compare(jinja2, sys.argv[1], name, text, os.path.join(folder, "template"))
            if isinstance(result, int):
                passed += 1
                print(f"ok {name}: {result} conversations")
            elif result.endswith("not expected to be"):
                print(f"SKIP {name}: {result}")
            else:
                failed += 1
                print(f"FAILED {name}: {result}")
    print(f"{passed} passed, {failed} failed, 0 skipped")
    sys.exit(1 if failed else 0)


main()
