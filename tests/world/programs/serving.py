"""Decoding in one file each, as gpt-fast, nano-vllm and minGPT write it."""

from __future__ import annotations

import contextvars
import dataclasses
import math
import threading
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, DIM, HEADS = 64, 32, 4


class KVCache(nn.Module):
    def __init__(self, batch: int, length: int) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(batch, HEADS, length, DIM // HEADS))
        self.register_buffer("v_cache", torch.zeros(batch, HEADS, length, DIM // HEADS))

    def update(self, input_pos: Any, k_val: Any, v_val: Any) -> Any:
        k_out, v_out = self.k_cache, self.v_cache
        k_out[:, :, input_pos] = k_val
        v_out[:, :, input_pos] = v_val
        return k_out, v_out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wqkv, self.wo = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.kv_cache: Any = None

    def forward(self, x: Any, mask: Any, input_pos: Any) -> Any:
        b, s, _ = x.shape
        q, k, v = (one.view(b, s, HEADS, -1).transpose(1, 2) for one in self.wqkv(x).split(DIM, dim=-1))
        if self.kv_cache is not None:
            k, v = self.kv_cache.update(input_pos, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(b, s, DIM))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(), nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.w1, self.w2, self.w3 = nn.Linear(DIM, 64), nn.Linear(64, DIM), nn.Linear(DIM, 64)

    def forward(self, x: Any, mask: Any, input_pos: Any) -> Any:
        h = x + self.attention(self.norm1(x), mask, input_pos)
        y = self.norm2(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.causal_mask: Any = None

    def setup_caches(self, length: int) -> None:
        for layer in self.layers:
            layer.attention.kv_cache = KVCache(1, length)
        self.causal_mask = torch.tril(torch.ones(length, length, dtype=torch.bool))

    def forward(self, idx: Any, input_pos: Any) -> Any:
        mask, x = self.causal_mask[None, None, input_pos], self.tok_embeddings(idx)
        for layer in self.layers:
            x = layer(x, mask, input_pos)
        return self.output(self.norm(x))


def _sample(logits: Any, temperature: float = 0.8, top_k: int = 8) -> Any:
    logits = logits[0, -1] / max(temperature, 1e-5)
    v, _ = torch.topk(logits, top_k)
    logits = torch.where(logits < v.select(-1, -1).unsqueeze(-1), -float("Inf"), logits)
    probs = torch.softmax(logits, dim=-1)
    q = torch.empty_like(probs).exponential_(1)
    return torch.argmax(probs / q, dim=-1, keepdim=True).to(dtype=torch.int)


def gpt_fast(wrap: Any) -> Any:
    model = Transformer().eval()
    model.setup_caches(32)

    @wrap
    def decode_one_token(model: Any, x: Any, input_pos: Any) -> Any:
        return _sample(model(x, input_pos))

    def step(_: int) -> Any:
        with torch.no_grad():
            token, tokens = _sample(model(torch.randint(0, VOCAB, (1, 4)), torch.arange(4))), []
            input_pos = torch.tensor([4])
            for _ in range(8):
                token = decode_one_token(model, token.view(1, -1), input_pos).clone()
                input_pos += 1
                tokens.append(token)
        return tokens

    return step


def gpt_fast_speculative(wrap: Any) -> Any:
    """Draft tokens one by one, check several with the large model."""
    draft, target = Transformer().eval(), Transformer().eval()
    draft.setup_caches(32)
    target.setup_caches(32)
    decode = wrap(lambda model, x, pos: model(x, pos).softmax(-1))

    def step(_: int) -> Any:
        token, at, tokens = torch.randint(0, VOCAB, (1, 1)), 0, []
        with torch.no_grad():
            while at < 12:
                drafted = [token]
                for k in range(3):
                    drafted.append(decode(draft, drafted[-1], torch.tensor([at + k]))[0, -1:].argmax(-1, keepdim=True))
                given = torch.cat(drafted[:3], dim=1)
                probs = decode(target, given, torch.arange(at, at + 3))
                good = (probs[0].argmax(-1)[:2] == given[0, 1:]).long().cumprod(0).sum().item()
                token, at = probs[:, good].argmax(-1, keepdim=True), at + int(good) + 1
                tokens.append(token)
        return tokens

    return step


@dataclasses.dataclass
class Context:
    is_prefill: bool = False
    slot_mapping: Any = None
    context_lens: Any = None
    block_tables: Any = None


_CONTEXT = Context()


def get_context() -> Context:
    return _CONTEXT


def set_context(*values: Any) -> None:
    global _CONTEXT
    _CONTEXT = Context(*values)


class PagedAttention(nn.Module):
    def __init__(self, blocks: int, size: int) -> None:
        super().__init__()
        self.qkv, self.out, self.size = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), size
        self.k_cache = torch.zeros(blocks * size, HEADS, DIM // HEADS)
        self.v_cache = torch.zeros(blocks * size, HEADS, DIM // HEADS)

    def forward(self, x: Any) -> Any:
        context = get_context()
        q, k, v = (projected.view(-1, HEADS, DIM // HEADS) for projected in self.qkv(x).chunk(3, -1))
        self.k_cache.index_copy_(0, context.slot_mapping, k)
        self.v_cache.index_copy_(0, context.slot_mapping, v)
        slots = (context.block_tables[:, :, None] * self.size + torch.arange(self.size)).flatten(1)
        keys, values = self.k_cache[slots], self.v_cache[slots]
        scores = torch.einsum("bhd,bthd->bht", q, keys) / math.sqrt(DIM // HEADS)
        beyond = torch.arange(slots.shape[1])[None] >= context.context_lens[:, None]
        weights = scores.masked_fill(beyond[:, None], -math.inf).softmax(-1)
        return self.out(torch.einsum("bht,bthd->bhd", weights, values).flatten(1))


class PagedModel(nn.Module):
    def __init__(self, blocks: int = 32, size: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(PagedAttention(blocks, size) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


class Engine:
    """Continuous batching: sequences come and go, each with blocks of the paged cache."""

    def __init__(self, run: Any, size: int = 4, most: int = 3) -> None:
        self.run, self.size, self.most = run, size, most
        self.free, self.sequences = list(range(32)), list[dict[str, Any]]()

    def step(self, n: int) -> Any:
        if n % 4 == 0 and len(self.sequences) < self.most:
            self.sequences.append({"ids": [n % VOCAB], "blocks": [], "until": 5 + n % 9})
        if not self.sequences:
            return None
        for sequence in self.sequences:
            if len(sequence["ids"]) > len(sequence["blocks"]) * self.size:
                sequence["blocks"].append(self.free.pop(0))
        last = [len(sequence["ids"]) - 1 for sequence in self.sequences]
        slots = [sequence["blocks"][at // self.size] * self.size + at % self.size
                 for sequence, at in zip(self.sequences, last, strict=True)]  # fmt: skip
        tables = [[*sequence["blocks"], 0, 0, 0, 0][:4] for sequence in self.sequences]
        set_context(False, torch.tensor(slots), torch.tensor(last) + 1, torch.tensor(tables))
        with torch.inference_mode():
            tokens = self.run(torch.tensor([sequence["ids"][-1] for sequence in self.sequences])).argmax(-1).tolist()
        set_context()
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence["ids"].append(token)
        for sequence in [sequence for sequence in self.sequences if len(sequence["ids"]) >= sequence["until"]]:
            self.free += sequence["blocks"]
            self.sequences.remove(sequence)
        return tokens


def nano_vllm(wrap: Any) -> Any:
    return Engine(wrap(PagedModel().eval())).step


_LOCAL = threading.local()


def _from_local(x: Any) -> Any:
    return x * _LOCAL.context["scale"] + _LOCAL.context["bias"]


def thread_local_context(wrap: Any) -> Any:
    layer, run = nn.Linear(4, 4), None

    def body(x: Any) -> Any:
        return _from_local(layer(x))

    run = wrap(body)

    def step(n: int) -> Any:
        _LOCAL.context = {"scale": torch.randn(4), "bias": torch.randn(4), "batch": 2}
        with torch.no_grad():
            return run(torch.randn(2, 4))

    return step


_BATCH: contextvars.ContextVar[Any] = contextvars.ContextVar("batch")


def context_variable(wrap: Any) -> Any:
    layer = nn.Linear(4, 4)

    @wrap
    def body(x: Any) -> Any:
        batch = _BATCH.get()
        return layer(x) + batch.offset if batch.has_offset else layer(x)

    @dataclasses.dataclass
    class Batch:
        offset: Any
        has_offset: bool

    def step(n: int) -> Any:
        token = _BATCH.set(Batch(torch.randn(4), n % 2 == 0))
        with torch.no_grad():
            found = body(torch.randn(2, 4))
        _BATCH.reset(token)
        return found

    return step


class Rope(nn.Module):
    """A table that grows when a longer sequence comes."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.max_seen = dim, 0
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)

    def forward(self, x: Any) -> Any:
        length = x.shape[-2]
        if length > self.max_seen:
            self.max_seen = length
            freqs = torch.outer(torch.arange(length), 10000 ** (-torch.arange(0, self.dim, 2) / self.dim))
            emb = torch.cat((freqs, freqs), dim=-1)
            self.cos, self.sin = emb.cos(), emb.sin()
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * self.cos[:length] + turned * self.sin[:length]


def growing_rope(wrap: Any) -> Any:
    rope, layer = Rope(8), nn.Linear(8, 8)

    @wrap
    def forward(x: Any) -> Any:
        return rope(layer(x))

    def step(n: int) -> Any:
        with torch.no_grad():
            return forward(torch.randn(1, 4 + min(n // 5, 3), 8))

    return step


def cache_as_list(wrap: Any) -> Any:
    """A cache of lists of tensors that are concatenated: as minGPT's users write it. Lengths come again."""
    qkv, out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    @wrap
    def attend(x: Any, cache: Any) -> Any:
        q, k, v = qkv(x).chunk(3, -1)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        return out(F.scaled_dot_product_attention(q, k, v)), [k, v]

    def step(_: int) -> Any:
        x, cache, found = torch.randn(1, 1, DIM), None, []
        with torch.no_grad():
            for _ in range(4):
                x, cache = attend(x, cache)
                found.append(x.clone())
        return found

    return step


def temperature_sweep(wrap: Any) -> Any:
    head = nn.Linear(DIM, VOCAB)

    @wrap
    def sample(hidden: Any, temperature: float, top_p: float) -> Any:
        probs = torch.softmax(head(hidden) / temperature, -1)
        ordered, index = probs.sort(-1, descending=True)
        kept = ordered.masked_fill(ordered.cumsum(-1) - ordered > top_p, 0.0)
        return index.gather(-1, torch.multinomial(kept, 1))

    def step(n: int) -> Any:
        with torch.no_grad():
            return sample(torch.randn(2, DIM), 0.5 + (n % 7) / 10, 0.9)

    return step


PROGRAMS = {
    "gpt_fast": gpt_fast,
    "gpt_fast_speculative": gpt_fast_speculative,
    "nano_vllm": nano_vllm,
    "thread_local_context": thread_local_context,
    "context_variable": context_variable,
    "growing_rope": growing_rope,
    "cache_as_list": cache_as_list,
    "temperature_sweep": temperature_sweep,
}
