"""The five lossy policies as docs/baselines.md describes them, the plain way: numpy,
whole arrays, no storage to speak of. test_policies.py holds the engine to it.

It is written from that document and the papers it names and shares nothing with the
engine: a reader of GGUF files, a forward pass of three families in float64, and a
class Session whose feed() does what a session of the engine should. Only what the
document says is rounded is rounded here: K and V as they are stored, to f32 or f16.

Scores in float32 and float64 differ in the last bits, so where two of them are nearly
equal, the engine may choose the other. Session.feed() is told what the engine kept. It
makes its own choice first; where the two differ it accepts the engine's if the scores
say that it is as good (relative difference below NEAR), counts that, and goes on with
it. Scores that are exactly equal here, as pooling makes them, are no such case: for
them the document has a rule.

rules() holds the numbers and decisions that could have been others. The test turns them
one by one, to see that the comparison would notice.
"""
import struct
from types import SimpleNamespace

import numpy as np

NEAR = {"f32": 1e-5, "f16": 1e-2}


def rules(**changes):
    r = SimpleNamespace(
        count_new=True,      # the new token is one of the B and one of "the last ones"
        younger=True,        # among equals the older is dropped
        sinks=4,             # streaming-llm: positions below this stay
        recent=2,            # h2o: B over this are the last ones
        group_sum=True,      # h2o, snapkv: a group's query heads are summed; else the first one's
        prompt_scores=True,  # h2o: the queries of prompts count
        observe=32,          # snapkv: at most so many queries vote
        reach=3,             # snapkv: pooling looks so far to both sides
        pool=np.max,         # snapkv
        pool_last=False,     # snapkv: pooling looks at votes for the window's own positions
        vote_late=False,     # snapkv: generated tokens are dropped by score like the prompt's
        oldest=True,         # snapkv: goes when no scored one is left
        all_heads=True,      # tova: the mean over all query heads; else over a KV head's own
        window_edge=0,       # a sliding window sees so many positions more
        renumber=None,       # True or False, whatever was asked for
        behind=True,         # renumbered: queries stand behind what is kept
    )
    r.__dict__.update(changes)
    return r


class Differs(Exception):
    """The engine kept something else, and no near tie explains it."""


# --- the file ---

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, F32 = 8, 9, 0


def read_gguf(path):
    """(keys, {name: float64 array}) of a little-endian file whose tensors are all F32."""
    with open(path, "rb") as f:
        data = f.read()
    at = 4

    def number(kind):
        nonlocal at
        v, = struct.unpack_from("<" + NUMBERS[kind], data, at)
        at += struct.calcsize(NUMBERS[kind])
        return v

    def string():
        nonlocal at
        n = number(10)
        at += n
        return data[at - n:at].decode()

    def value(kind):
        if kind == ARRAY:
            kind = number(4)
            return [value(kind) for _ in range(number(10))]
        return string() if kind == STRING else number(kind)

    assert data[:4] == b"GGUF" and number(4) == 3
    n_tensors, n_keys = number(10), number(10)
    keys = {string(): value(number(4)) for _ in range(n_keys)}
    table = []
    for _ in range(n_tensors):
        name, dimensions = string(), number(4)
        shape = [number(10) for _ in range(dimensions)][::-1]
        kind, offset = number(4), number(10)
        assert kind == F32, f"{name} is not F32"
        table.append((name, shape, offset))
    alignment = keys.get("general.alignment", 32)
    begin = -(-at // alignment) * alignment
    return keys, {name: np.frombuffer(data, "<f4", int(np.prod(shape)), begin + offset).reshape(shape).astype(np.float64)
                  for name, shape, offset in table}


# --- the model ---


class Model:
    """The equations of a layer but for attention; x is [n][d], heads are [n][heads][d_head]."""

    def __init__(self, path):
        keys, self.w = read_gguf(path)
        self.arch = keys["general.architecture"]

        def key(name, default=None):
            return keys.get(f"{self.arch}.{name}", default)
        self.layers, self.d, self.heads = key("block_count"), key("embedding_length"), key("attention.head_count")
        self.kv_heads = key("attention.head_count_kv", self.heads)
        self.group = self.heads // self.kv_heads
        self.d_head = key("attention.key_length", self.d // self.heads)
        self.eps = key("attention.layer_norm_rms_epsilon")
        self.gemma = self.arch == "gemma3"
        self.window = key("attention.sliding_window", 0) if self.gemma else 0
        self.n_vocab = len(self.w["token_embd.weight"])
        frequency = np.arange(0, self.d_head, 2) / -self.d_head
        scale = key("rope.scaling.factor", 1.0) if key("rope.scaling.type") == "linear" else 1.0
        everywhere = key("rope.freq_base", 1e4) ** frequency / self.w.get("rope_freqs.weight", 1.0) / scale
        positions = np.arange(1024)[:, None]
        self.turns = [np.exp(1j * positions * (1e4 ** frequency if self.local(layer) else everywhere))
                      for layer in range(self.layers)]

    def local(self, layer):
        """Does the layer see a sliding window only? Of six, five do."""
        return self.gemma and (layer + 1) % 6 != 0

    def sees(self, layer, query, pos, edge=0):
        """Does a query at one position see what stands at others?"""
        seen = pos <= query
        return seen & (query - pos < self.window + edge) if self.local(layer) else seen

    def rotate(self, layer, x, pos):
        """x: [n][..][d_head], pos: [n]. A pair is a complex number: neighbours in llama, else half a head apart."""
        turn = self.turns[layer][pos].reshape(len(pos), *[1] * (x.ndim - 2), -1)
        half = self.d_head // 2
        first, second = (np.s_[..., 0::2], np.s_[..., 1::2]) if self.arch == "llama" else (np.s_[..., :half], np.s_[..., half:])
        z = (x[first] + 1j * x[second]) * turn
        out = np.empty_like(x)
        out[first], out[second] = z.real, z.imag
        return out

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w[name]

    def embed(self, ids):
        x = self.w["token_embd.weight"][ids]
        return x * np.sqrt(self.d) if self.gemma else x

    def project(self, layer, x):
        """q, K and V before rotation."""
        p, out = f"blk.{layer}.attn_", []
        x = self.norm(x, p + "norm.weight")
        for name in "qkv":
            y = x @ self.w[f"{p}{name}.weight"].T + self.w.get(f"{p}{name}.bias", 0.0)
            y = y.reshape(len(x), -1, self.d_head)
            out.append(self.norm(y, f"{p}{name}_norm.weight") if f"{p}{name}_norm.weight" in self.w else y)
        return out

    def finish(self, layer, x, attended):
        p = f"blk.{layer}."
        y = attended.reshape(len(x), -1) @ self.w[p + "attn_output.weight"].T
        x = x + (self.norm(y, p + "post_attention_norm.weight") if self.gemma else y)
        y = self.norm(x, p + "ffn_norm.weight")
        gate, up = y @ self.w[p + "ffn_gate.weight"].T, y @ self.w[p + "ffn_up.weight"].T
        if self.gemma:
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate ** 3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        y = (gate * up) @ self.w[p + "ffn_down.weight"].T
        return x + (self.norm(y, p + "post_ffw_norm.weight") if self.gemma else y)

    def logits(self, x):
        return self.norm(x, "output_norm.weight") @ self.w.get("output.weight", self.w["token_embd.weight"]).T


# --- the policies ---


class Held:
    """What one KV head of one layer keeps, in ascending order."""

    def __init__(self, d_head):
        self.pos = np.zeros(0, np.int64)
        self.k = self.v = np.zeros((0, d_head))  # as stored; K unrotated if positions are renumbered
        self.score = np.zeros(0)
        self.voted = np.zeros(0, bool)  # snapkv: had a vote at the last prompt's end

    def append(self, pos, k, v):
        self.pos = np.concatenate([self.pos, pos])
        self.k, self.v = np.concatenate([self.k, k]), np.concatenate([self.v, v])
        self.score = np.concatenate([self.score, np.zeros(len(pos))])
        self.voted = np.concatenate([self.voted, np.zeros(len(pos), bool)])

    def keep(self, stay):
        if not stay.all():
            self.pos, self.k, self.v = self.pos[stay], self.k[stay], self.v[stay]
            self.score, self.voted = self.score[stay], self.voted[stay]


class Session:
    def __init__(self, model, policy, budget, renumber=False, kv_type="f32", r=None):
        self.m, self.policy, self.budget, self.r = model, policy, budget, r or rules()
        self.renumber = renumber if self.r.renumber is None else self.r.renumber
        self.kv_type = kv_type
        self.choices = self.near = 0  # selections that dropped something; those that a near tie decided
        self.rewind()

    def rewind(self):
        self.n = 0
        self.held = [[Held(self.m.d_head) for _ in range(self.m.kv_heads)] for _ in range(self.m.layers)]

    def stored(self, x):
        x = x.astype(np.float32)
        return (x.astype(np.float16) if self.kv_type == "f16" else x).astype(np.float64)

    def feed(self, ids, kept):
        """Logits of each token. kept: [layer][head][...] what the engine keeps after this feed."""
        m, n = self.m, len(ids)
        pos = np.arange(self.n, self.n + n)
        x = m.embed(ids)
        for layer in range(m.layers):
            theirs = [np.array(p, np.int64) for p in kept[layer]]
            if n == 1:
                incoming = int(self.r.count_new)
                self.select(layer, self.n, self.budget - incoming, incoming, theirs)
            x = m.finish(layer, x, self.attend(layer, pos, *m.project(layer, x)))
            if n > 1:
                self.select(layer, self.n + n, self.budget, 0, theirs)
            for head, (t, p) in enumerate(zip(self.held[layer], theirs)):
                if not np.array_equal(t.pos, p):
                    raise Differs(f"layer {layer}, KV head {head}: the engine keeps {p.tolist()}, expected {t.pos.tolist()}")
        self.n += n
        return m.logits(x)

    def attend(self, layer, pos, q, k, v):
        """The heads' outputs, [n][heads][d_head]. Stores the new K and V, and scores."""
        m, n = self.m, len(pos)
        out, seen = np.empty((n, m.heads, m.d_head)), []
        if not self.renumber:
            k = m.rotate(layer, k, pos)
        for g, t in enumerate(self.held[layer]):
            t.append(pos, self.stored(k[:, g]), self.stored(v[:, g]))
            keys, rank = t.k, pos
            if self.renumber:
                rank = np.arange(len(t.pos))
                fresh = np.concatenate([t.k[:-n], k[:, g]])  # the feed's own are rounded once, the others twice
                keys, rank = self.stored(m.rotate(layer, fresh, rank)), rank[-n:] if self.r.behind else rank[:n]
            mine = slice(g * m.group, (g + 1) * m.group)
            s = np.einsum("ngd,kd->gnk", m.rotate(layer, q[:, mine], rank), keys) / np.sqrt(m.d_head)
            s[:, ~m.sees(layer, pos[:, None], t.pos[None], self.r.window_edge)] = -np.inf
            p = np.exp(s - s.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            out[:, mine] = np.einsum("gnk,kd->ngd", p, t.v)
            seen.append(p)
        self.observe(layer, n, seen)
        return out

    def observe(self, layer, n, seen):
        """Scores from what the feed's n queries attended to; seen: per KV head [group][n][held]."""
        if self.policy == "tova":
            everyone = np.concatenate([p[:, -1] for p in seen]).mean(0)
        for t, p in zip(self.held[layer], seen):
            if self.policy == "tova":
                t.score = everyone if self.r.all_heads else p[:, -1].mean(0)
            p = p.sum(0) if self.r.group_sum else p[0]
            if self.policy == "h2o" and (n == 1 or self.r.prompt_scores):
                t.score = t.score + p.sum(0)
            if self.policy == "snapkv" and n > 1:
                w = min(self.r.observe, self.budget // 2, n)
                self.vote(t, p[-w:].sum(0), w)

    def vote(self, t, votes, w):
        """snapkv: votes, pooled, are the scores of all but the window's own positions, the last w."""
        n, reach = len(votes) - w, self.r.reach
        sources = votes if self.r.pool_last else votes[:n]
        t.voted = np.arange(len(votes)) < n
        t.score = np.array([self.r.pool(sources[max(0, i - reach):i + reach + 1]) for i in range(n)] + [0.0] * w)

    def select(self, layer, query, room, incoming, theirs):
        """Drop what a query from position query on cannot see; then let each head keep room
        positions at most; incoming more are to come."""
        for head, (t, p) in enumerate(zip(self.held[layer], theirs)):
            t.keep(self.m.sees(layer, query, t.pos, self.r.window_edge))
            if len(t.pos) > room:
                sure, ballot, count = self.candidates(t, room, incoming)
                order = ballot[np.lexsort((-ballot if self.r.younger else ballot, -t.score[ballot]))]
                stay = sure.copy()
                stay[order[:count]] = True
                stay = self.settle(f"layer {layer}, KV head {head}", t, ~sure, stay, np.isin(t.pos, p, assume_unique=True))
                self.choices += 1
                t.keep(stay)

    def candidates(self, t, room, incoming):
        """(mask of what stays anyway, indices to choose from, how many of them)"""
        n = len(t.pos)
        age = np.arange(n)[::-1]  # 0: the last
        if self.policy == "window":
            sure = age < room
        elif self.policy == "streaming-llm":
            sinks = t.pos < self.r.sinks
            sure = sinks | (age < room - sinks.sum())
        elif self.policy == "h2o":
            sure = age < self.budget // self.r.recent - incoming
        elif self.policy == "snapkv":
            sure = ~(t.voted | (self.r.vote_late and incoming > 0))
            if sure.sum() > room:
                sure = age < room if self.r.oldest else age >= n - room
        else:
            sure = np.zeros(n, bool)
        return sure, np.flatnonzero(~sure), room - int(sure.sum())

    def settle(self, where, t, ballot, stay, theirs):
        """What stays, after a look at what the engine kept of it (masks)."""
        dropped, kept = stay & ~theirs, theirs & ~stay
        differ = dropped | kept
        if not differ.any():
            return stay
        what = f"{where}: the engine dropped {t.pos[dropped].tolist()} and kept {t.pos[kept].tolist()}"
        if (differ & ~ballot).any() or dropped.sum() != kept.sum():
            raise Differs(what)
        best, worst = t.score[dropped].max(), t.score[kept].min()
        if np.ptp(t.score[differ]) == 0 or best - worst > NEAR[self.kv_type] * best:
            raise Differs(f"{what}; scores " + ", ".join(f"{t.pos[i]}: {t.score[i]:.9g}" for i in np.flatnonzero(differ)))
        self.near += 1
        return theirs
