"""500 tokens by transformers' ``generate`` and by a decoder of our own, greedy and sampled, beside eager's tokens."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.gpu import nets
from benchmarks.gpu.setting import Outcome, Setting, ratio
from benchmarks.timing import Figure
from capture import capture, mark_step_begin, recordings, release

TOKENS, ROUNDS = 500, 3
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 50}
Run = Callable[[], list[int]]


def measure(setting: Setting) -> Outcome:
    """Milliseconds a token, set-up included: every call of ``generate`` has a cache of its own."""
    count = setting.pick(TOKENS, 24)
    figures: list[Figure] = []
    rows: list[tuple[str, ...]] = [("who", "how", "recordings", "replays", "eager calls", "eager", "ours")]
    wrong: list[str] = []
    for who, make in WAYS:
        for how, options in (("greedy", GREEDY), ("sampled", SAMPLED)):
            eager, ours, captured = make(setting, count, options)
            times: list[list[float]] = [[], []]
            told: list[list[list[int]]] = [[], []]
            for _ in range(ROUNDS):
                for side, run in enumerate((eager, ours)):
                    torch.manual_seed(11)
                    setting.synchronize()
                    begin = time.perf_counter()
                    told[side].append(run())
                    times[side].append((time.perf_counter() - begin) * 1e3 / count)
            alike = [min(_alike(told[0][0], one) for one in side) for side in told]
            name, found = f"{who}, {how}", recordings(captured)
            if alike[1] < alike[0] / 2:
                wrong.append(
                    f"{name}: other tokens than eager after {alike[1]}, where eager equals itself for {alike[0]}"
                )
            counts = (found.recordings, found.replays, found.eager_calls)
            rows.append((who, how, *map(str, counts), *map(str, alike)))
            figures += [
                Figure(name=f"{name}, eager", unit="ms a token", values=tuple(times[0])),
                Figure(name=f"{name}, ours", unit="ms a token", values=tuple(times[1])),
                ratio(f"{name}, ours", "/ eager", times[1], times[0], 1.0),
            ]
            release(captured)
            print(f"{name}: {statistics.median(times[0]):.2f}, {statistics.median(times[1]):.2f} ms", flush=True)
    return Outcome(figures=tuple(figures), rows=tuple(rows), wrong=tuple(wrong), details={"tokens": count})


def _alike(one: list[int], other: list[int]) -> int:
    """How many tokens two runs have in common from the start. Kernels of an eager run may choose their way by address,
    and sum in another order: bfloat16 then comes to another token sooner or later."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _length(count: int) -> int:
    """Of a cache. Attention takes a mask whose rows are aligned as it is: with 192 positions five eager runs gave the
    same tokens on an H200, with 532 two did not."""
    return -(-(nets.PROMPT + count) // 64) * 64


def _generate(setting: Setting, count: int, options: dict[str, Any], *, keeps: bool = False) -> tuple[Run, Run, Any]:
    """The whole call. The prompt runs eagerly; a step is recorded once a cache, of which each call makes one, or
    all have the same (``keeps``)."""
    plain, captured = nets.llama(setting), nets.llama(setting)
    capture(captured, static=["past_key_values"])
    prompt = nets.prompt(plain, setting)
    caches = {id(one): nets.static_cache(one, _length(count), setting) for one in (plain, captured) if keeps}

    def run(model: Any) -> list[int]:
        cache: dict[str, Any] = {"cache_implementation": "static"}
        if keeps:
            cache = {"past_key_values": caches[id(model)]}
            caches[id(model)].reset()
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=count, max_new_tokens=count,
            disable_compile=True, pad_token_id=0, **options, **cache,
        )  # fmt: skip
        tokens: list[int] = found[0, prompt.shape[1] :].tolist()
        return tokens

    return lambda: run(plain), lambda: run(captured), captured


class Decoder(nn.Module):
    """A small GPT whose keys and values lie in buffers (layers x 2 x 1 x heads x length x width of a head)."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.kept: Tensor
        self.register_buffer("kept", torch.zeros(layers, 2, 1, heads, length, width // heads))

    @override
    def forward(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Logits of the last of ``tokens`` (1 x n), which are at the positions ``at`` (n)."""
        x = self.token(tokens) + self.place(at)
        seen = torch.arange(self.kept.shape[-2], device=x.device) <= at[:, None]
        for number, (qkv, out, up, down) in enumerate(zip(self.qkv, self.out, self.up, self.down, strict=True)):
            q, k, v = qkv(self.norms[2 * number](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            keys, values = self.kept[number].unbind(0)
            keys.index_copy_(2, at, k.to(keys.dtype))
            values.index_copy_(2, at, v.to(values.dtype))
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
            x = x + out(y.transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(self.norms[2 * number + 1](x))))
        logits: Tensor = self.head(x[:, -1])
        return logits


def _own(setting: Setting, count: int, options: dict[str, Any]) -> tuple[Run, Run, Any]:
    """Step and sampling in one captured function, in the manner of gpt-fast: no value is read on the host."""
    sizes = setting.pick((2048, 16, 16, 32_000), (64, 2, 4, 256))
    dtype = setting.pick(torch.bfloat16, torch.float32)
    length = _length(count)
    torch.manual_seed(3)
    with torch.device(setting.device):
        model = Decoder(*sizes, length).to(dtype).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(sizes[-1], (1, nets.PROMPT), generator=generator).to(setting.device)

    def choose(logits: Tensor) -> Tensor:
        if not options["do_sample"]:
            return logits.argmax(-1, keepdim=True)
        logits = logits.float() / options["temperature"]
        least = logits.topk(min(options["top_k"], logits.shape[-1])).values[:, -1:]
        chances = logits.masked_fill(logits < least, -torch.inf).softmax(-1)
        return (chances / torch.empty_like(chances).exponential_(1)).argmax(-1, keepdim=True)

    def step(token: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return choose(model(token, at)), at + 1

    captured = capture(step, name="own decoder")

    def run(one: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[int]:
        model.kept.zero_()
        token = choose(model(prompt, torch.arange(nets.PROMPT, device=setting.device)))
        at = torch.full((1,), nets.PROMPT, device=setting.device)
        found = [token]
        for _ in range(count - 1):
            mark_step_begin()
            token, at = one(token, at)
            found.append(token.clone())
        return [int(one) for one in torch.cat(found, 1)[0]]

    return lambda: run(step), lambda: run(captured), captured


WAYS: tuple[tuple[str, Callable[..., tuple[Run, Run, Any]]], ...] = (
    ("transformers generate", _generate),
    ("transformers, one cache", functools.partial(_generate, keeps=True)),
    ("own decoder", _own),
)
