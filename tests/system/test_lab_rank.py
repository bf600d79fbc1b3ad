#!/usr/bin/env python3
"""kvd lab rank, truncate and latency on tiny models: ranks against numpy's singular
values, what truncation must and must not change, and times that can be checked
without a clock."""
import os
import struct

import harness as h

try:
    import numpy as np
except ImportError:
    np = None

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of GGUF's values
STRING, ARRAY = 8, 9


class Gguf:
    """Where the F32 tensors of a file lie. Enough for what make_tiny_gguf.py writes."""

    def __init__(self, path):
        with open(path, "rb") as f:
            self.data = bytearray(f.read())
        self.at = 8
        n_tensors, n_keys = self.take("<QQ")
        for _ in range(n_keys):
            self.string()
            self.skip(self.take("<I")[0])
        self.tensors = {}
        for _ in range(n_tensors):
            name = self.string()
            n_dims = self.take("<I")[0]
            dims = self.take(f"<{n_dims}Q")
            self.tensors[name] = (dims, *self.take("<IQ"))
        self.base = (self.at + 31) // 32 * 32

    def take(self, pattern):
        value = struct.unpack_from(pattern, self.data, self.at)
        self.at += struct.calcsize(pattern)
        return value

    def string(self):
        n = self.take("<Q")[0]
        self.at += n
        return bytes(self.data[self.at - n:self.at]).decode("utf-8", "replace")

    def skip(self, kind):
        if kind == STRING:
            self.string()
        elif kind == ARRAY:
            element, n = self.take("<IQ")
            for _ in range(n):
                self.skip(element)
        else:
            self.at += SIZES[kind]

    def matrix(self, name):
        """[rows][columns], a view of the file's bytes."""
        dims, kind, offset = self.tensors[name]
        h.equal(kind, 0, f"type of {name}")
        n = int(np.prod(dims))
        return np.frombuffer(self.data, dtype="<f4", count=n, offset=self.base + offset).reshape(dims[::-1])


def lab(name, model, *args):
    r = h.kvd("lab", name, "-m", model, "--json", *args)
    if r.code != h.DONE and "LAPACK" in r.err:
        h.check("liblapacke" in r.err and len(h.error_lines(r)) == 1, f"the error does not say what is missing\n{r}")
        h.skip("no LAPACK here")
    h.equal(r.code, h.DONE, str(r))
    return r.json()


def rows(result, table):
    """Rows of a table as dictionaries."""
    for t in result["tables"]:
        if t["name"] == table:
            keys = [c["key"] for c in t["columns"]]
            return [dict(zip(keys, row)) for row in t["rows"]]
    raise h.Failure(f"no table {table}")


def rank_at_90(m):
    s = np.linalg.svd(m.astype(np.float64), compute_uv=False) ** 2
    return int(np.searchsorted(np.cumsum(s), 0.9 * s.sum()) + 1)


RANK_MODELS = {
    "grouped": (("--type", "F32", "--layers", "2"), 4, 2),
    "window": (("--arch", "gemma3", "--type", "F32", "--layers", "7", "--heads", "4", "--kv-heads", "1"), 4, 1),
    "wide heads": (("--arch", "qwen3", "--type", "F32", "--layers", "1", "--d", "64", "--head-dim", "128", "--heads", "2",
                    "--kv-heads", "2"), 2, 2),
}


@h.test
def ranks_are_those_of_numpy():
    if np is None:
        h.skip("no numpy here")
    for what, (options, n_heads, n_kv) in RANK_MODELS.items():
        model = h.tiny(*options)
        result = lab("rank", model)
        file = Gguf(model)
        got = rows(result, "heads")
        layers = 1 + max(r["layer"] for r in got)
        h.equal(len(got), layers * n_heads, f"{what}: rows")
        for r in got:
            wq, wk = (file.matrix(f"blk.{r['layer']}.attn_{x}.weight") for x in "qk")
            h.equal(r["kv_head"], r["head"] * n_kv // n_heads, f"{what}: KV head of {r}")
            q = np.split(wq, n_heads)[r["head"]].astype(np.float64)
            k = np.split(wk, n_kv)[r["kv_head"]].astype(np.float64)
            h.equal(r["rank_bilinear"], rank_at_90(q.T @ k), f"{what}: W_q^T W_k of {r}")
            h.equal(r["rank_product"], rank_at_90(q @ k.T), f"{what}: W_q W_k^T of {r}")
        for s in (s for s in rows(result, "summary") if s["which"] == "all"):
            key = "rank_bilinear" if "T W_k" in s["form"] else "rank_product"
            ranks = [r[key] for r in got]
            h.check(abs(s["mean"] - np.mean(ranks)) < 1e-9 and s["median"] == np.median(ranks), f"{what}: {s}")
            h.equal((s["least"], s["greatest"]), (min(ranks), max(ranks)), what)
        for form in {r["form"] for r in rows(result, "histogram")}:
            h.equal(sum(r["heads"] for r in rows(result, "histogram") if r["form"] == form), len(got), f"{what}: histogram")
    h.check(any(r["local"] for r in rows(lab("rank", h.tiny(*RANK_MODELS["window"][0])), "heads")), "no local layer")


@h.test
def ranks_of_the_default_model():
    # Computed with numpy from the same file.
    means = {r["form"]: r["mean"] for r in rows(lab("rank", h.default_model()), "summary") if r["which"] == "all"}
    bilinear = next(v for k, v in means.items() if "T W_k" in k)
    product = next(v for k, v in means.items() if "W_k^T" in k)
    h.check(abs(bilinear - 34.5) < 0.01 * 34.5 and 21.0 < product < 21.6, f"{means}")


def low_rank(options, rank, name):
    """A tiny model whose W_k and W_v have this rank in each KV head."""
    file = Gguf(h.tiny(*options))
    d_head = 32
    for tensor in file.tensors:
        if "attn_k.weight" in tensor or "attn_v.weight" in tensor:
            w = file.matrix(tensor)
            for at in range(0, w.shape[0], d_head):
                u, s, vt = np.linalg.svd(w[at:at + d_head].astype(np.float64), full_matrices=False)
                w[at:at + d_head] = (u[:, :rank] * s[:rank]) @ vt[:rank]
    return h.write(name, file.data)


@h.test
def truncation_to_the_rank_there_is_changes_nothing():
    if np is None:
        h.skip("no numpy here")
    # Biases (qwen2) and QK-norm (gemma3) are where a truncation of the wrong thing would show.
    for arch in ("qwen2", "gemma3"):
        options = ("--arch", arch, "--type", "F32", "--layers", "2", "--d", "128", "--heads", "4", "--head-dim", "32")
        model = low_rank(options, 4, f"low_{arch}.gguf")
        table = rows(lab("truncate", model, "--quick", "-n", "6", "--activations", "f32", "--kv-type", "f32"), "truncate")
        h.equal({r["what"] for r in table}, {"K", "V", "K and V"})
        for r in table:
            if r["rank"] >= 4:
                h.check(r["kl_forced"] < 1e-6 and r["match"] == 100, f"{arch}: {r}")
                h.check(abs(r["energy_k"] - 100) < 1e-6 and abs(r["energy_v"] - 100) < 1e-6, f"{arch}: {r}")
            else:
                h.check(r["kl_forced"] > 1e-4, f"{arch}: {r}")
                h.check((r["energy_k"] < 99) == ("K" in r["what"]) and (r["energy_v"] < 99) == ("V" in r["what"]), f"{arch}: {r}")


@h.test
def full_rank_is_the_exact_run():
    table = rows(lab("truncate", h.tiny("--arch", "qwen2"), "--quick", "-n", "8"), "truncate")
    full = max(r["rank"] for r in table)
    for r in table:
        exact = r["rank"] == full
        h.equal(r["exact"], exact, f"{r}")
        if exact:
            h.equal((r["match"], r["kl_forced"], r["kl_free"]), (100, 0, 0), f"{r}")
    for what in ("K", "V", "K and V"):
        energies = [r["energy_k"] + r["energy_v"] for r in table if r["what"] == what]
        h.equal(energies, sorted(energies), f"energy of {what}")


@h.test
def latency_has_all_figures_and_streams_keep_their_rate():
    args = ("--quick", "--spill-dir", os.path.dirname(h.KVD))  # the build's folder: on a disk, unlike /tmp maybe
    result = lab("latency", h.tiny(), *args)
    h.check(result["settings"]["same_bits"] is True, "rebuilt K and V are not the bits that attention reads")
    times = rows(result, "times") + rows(result, "passes")
    sizes = sorted({r["tokens"] for r in times})
    h.check(sizes[0] == 1 and len(sizes) > 5, f"sizes {sizes}")
    for kind in {r["what"] for r in times}:
        h.equal(sorted(r["tokens"] for r in times if r["what"] == kind), sizes, kind)
    for r in times:  # a difference of two times may be anything
        h.check(r["low"] <= r["ms"] <= r["high"] and (r["low"] > 0 or r["what"] == "in the pass"), f"{r}")
    rates = {"100 MB/s": 100e6, "500 MB/s": 500e6, "1 GB/s": 1e9}
    per_token = result["settings"]["kv_bytes_per_token"]
    for r in times:
        if r["what"] in rates:
            rates_ms = 1e3 * r["tokens"] * per_token / rates[r["what"]]
            h.check(r["low"] >= 0.999 * rates_ms, f"faster than its rate: {r}")
    named = {r["what"] for r in times}
    h.check({"RAM, cold", "RAM, warm", "residuals at hand", "in the pass", *rates} <= named, f"{named}")
    h.check("disk" in named or any("disk was not measured" in n for n in result["notes"]), "the disk is not spoken of")


@h.test
def latency_without_a_disk_says_so():
    result = lab("latency", h.tiny(), "--quick", "--spill-dir", "/dev/shm") if os.path.isdir("/dev/shm") else h.skip("no tmpfs")
    h.check(all(r["what"] != "disk" for r in rows(result, "times")), "a disk in memory")
    h.check(any("disk was not measured" in n for n in result["notes"]), f"{result['notes']}")


h.main()
