"""500 tokens by transformers' ``generate`` and by a decoder of our own, greedy and sampled, beside eager's tokens.

Timed in bfloat16, where two eager runs differ sooner or later, and compared in float32 with deterministic kernels.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.gpu import fleet, nets
from benchmarks.gpu.fleet import Job, Limits, Measure, Result
from benchmarks.gpu.setting import Outcome, Setting, ratio
from benchmarks.timing import Figure
from capture import capture, mark_step_begin, recordings, release

TOKENS, ROUNDS = 500, 2
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 50},
}
HEADER = ("who", "how", "numbers", "recordings", "replays", "eager calls", "eager again", "ours")
Run = Callable[[], list[int]]


@frozen
class Sizes:
    """Sizes of the models. ``exact``: small ones, in float32."""

    exact: bool = False

    def decoder(self, setting: Setting) -> tuple[int, int, int, int]:
        """Width, layers, heads, vocabulary of our own."""
        return setting.pick((1024, 8, 16, 32_000) if self.exact else (2048, 16, 16, 32_000), (64, 2, 4, 256))

    def dtype(self, setting: Setting) -> torch.dtype:
        """The dtype of our own decoder; on the CPU always float32."""
        return torch.float32 if self.exact else setting.pick(torch.bfloat16, torch.float32)

    def llama(self, setting: Setting) -> Any:
        """The Llama-shaped model of transformers."""
        if not self.exact:
            return nets.llama(setting)
        width, layers, heads, vocabulary = self.decoder(setting)
        config = nets.transformers().LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
            intermediate_size=2 * width, vocab_size=vocabulary, max_position_embeddings=4096,
        )  # fmt: skip
        return nets.made("AutoModelForCausalLM", config, torch.float32, setting, 0)


def measure(setting: Setting) -> Outcome:
    """Milliseconds a token, set-up included: every call of ``generate`` has a cache of its own. The float32 runs come
    first, then what there is time for."""
    count, seconds = setting.pick(TOKENS, 24), setting.seconds(150, 1200)
    until = time.monotonic() + seconds
    rows, wrong = _exact(setting, count, seconds)
    figures: list[Figure] = []
    longest = 0.0
    for who, how in JOBS:
        begin = time.monotonic()
        if begin + longest > until:
            rows.append((who, how, "bfloat16", "not measured: no time was left", *[""] * (len(HEADER) - 4)))
            continue
        times, alike, counts = _timed(WAYS[who](setting, Sizes(), count, HOW[how]), setting, count)
        longest = max(longest, time.monotonic() - begin)
        name = f"{who}, {how}"
        if alike[1] < alike[0] / 2:
            wrong.append(f"{name}: other tokens than eager after {alike[1]}, where eager equals itself for {alike[0]}")
        rows.append((who, how, "bfloat16", *map(str, counts), *map(str, alike)))
        figures += [
            Figure(name=f"{name}, eager", unit="ms a token", values=tuple(times[0])),
            Figure(name=f"{name}, ours", unit="ms a token", values=tuple(times[1])),
            ratio(f"{name}, ours", "/ eager", times[1], times[0], 1.0),
        ]
        print(f"{name}: {statistics.median(times[0]):.2f}, {statistics.median(times[1]):.2f} ms", flush=True)
    return Outcome(figures=tuple(figures), rows=(HEADER, *rows), wrong=tuple(wrong), details={"tokens": count})


def _timed(
    sides: tuple[Run, Run, Any], setting: Setting, count: int
) -> tuple[list[list[float]], list[int], tuple[int, ...]]:
    """Times of eager and captured runs, how many first tokens each shares with eager's first run, and our counts."""
    *runs, captured = sides
    times: list[list[float]] = [[], []]
    told: list[list[list[int]]] = [[], []]
    for _ in range(ROUNDS):
        for side, run in enumerate(runs):
            torch.manual_seed(11)
            setting.synchronize()
            begin = time.perf_counter()
            told[side].append(run())
            times[side].append((time.perf_counter() - begin) * 1e3 / count)
    alike = [min(_alike(told[0][0], tokens) for tokens in side) for side in told]
    counts = _counts(captured)
    release(captured)
    return times, alike, counts


def _counts(captured: Any) -> tuple[int, ...]:
    found = recordings(captured)
    return found.recordings, found.replays, found.eager_calls


def _exact(setting: Setting, count: int, seconds: float) -> tuple[list[tuple[str, ...]], list[str]]:
    """Rows and mistakes of the float32 runs, each way in its own process: cuBLAS reads its settings once a process."""
    limits = Limits(workers=setting.pick(len(JOBS), 1), begun_s=seconds / 2, ready_s=seconds / 4, measured_s=5)
    results, failed = fleet.run(prepare, JOBS, setting, limits, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    rows: list[tuple[str, ...]] = []
    wrong = [f"{', '.join(job)}, float32: {why}" for job, why in failed.items()]
    for job in JOBS:
        if job not in results:
            continue
        counts, again, ours = (results[job][part] for part in ("counts", "again", "ours"))
        rows.append((*job, "float32, deterministic", *map(str, counts), str(again), str(ours)))
        if ours < (count if again == count else again / 2):
            wrong.append(f"{', '.join(job)}, float32: ours equals eager for {ours} tokens, eager itself for {again}")
        if not counts[1]:
            wrong.append(f"{', '.join(job)}, float32: never replayed")
    return rows, wrong


def prepare(job: Job, setting: Setting) -> Measure:
    """Eager twice and ours twice, of which the second replays from its first token on, or from its cache's."""
    who, how = job
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    for name in ("flash", "mem_efficient", "cudnn"):  # so that attention uses matrix products and a softmax
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
    count = setting.pick(TOKENS, 24)
    *runs, captured = WAYS[who](setting, Sizes(exact=True), count, HOW[how])
    told = []
    for run in (runs[0], runs[0], runs[1], runs[1]):
        torch.manual_seed(11)
        told.append(run())
    again, *ours = (_alike(told[0], tokens) for tokens in told[1:])
    result: Result = {"again": again, "ours": min(ours), "counts": _counts(captured)}
    return lambda: result


def _alike(one: list[int], other: list[int]) -> int:
    """The number of first tokens that two runs share. Eager kernels may choose their algorithm by address, and so sum
    in another order: in bfloat16 that gives another token sooner or later."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _length(count: int) -> int:
    """The positions of a cache. Attention uses a mask with aligned rows without a copy: with 192 positions five eager
    runs gave the same tokens on an H200, with 532 two runs differed."""
    return -(-(nets.PROMPT + count) // 64) * 64


def _generate(
    setting: Setting, sizes: Sizes, count: int, options: dict[str, Any], *, keeps: bool = False
) -> tuple[Run, Run, Any]:
    """Whole calls of ``generate``. The prompt runs eagerly; a step is recorded once for each cache. Each call makes a
    cache, or all use the same one (``keeps``)."""
    plain, captured = sizes.llama(setting), sizes.llama(setting)
    capture(captured, static=["past_key_values"])
    prompt = nets.prompt(plain, setting)
    caches = {id(net): nets.static_cache(net, _length(count), setting) for net in (plain, captured) if keeps}

    def run(model: Any) -> list[int]:
        cache: dict[str, Any] = {"cache_implementation": "static"}
        if keeps:
            cache = {"past_key_values": caches[id(model)]}
            caches[id(model)].reset()
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=count, max_new_tokens=count,
            disable_compile=True, pad_token_id=0, **options, **cache,
        )  # fmt: skip
        tokens: list[int] = output[0, prompt.shape[1] :].tolist()
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


def _own(setting: Setting, sizes: Sizes, count: int, options: dict[str, Any]) -> tuple[Run, Run, Any]:
    """Step and sampling in one captured function, in the manner of gpt-fast: no value is read on the host."""
    width, layers, heads, vocabulary = sizes.decoder(setting)
    torch.manual_seed(3)
    with torch.device(setting.device):
        model = (
            Decoder(width, layers, heads, vocabulary, _length(count))
            .to(sizes.dtype(setting))
            .eval()
            .requires_grad_(False)
        )
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(vocabulary, (1, nets.PROMPT), generator=generator).to(setting.device)

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

    def run(decode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[int]:
        model.kept.zero_()
        token = choose(model(prompt, torch.arange(nets.PROMPT, device=setting.device)))
        at = torch.full((1,), nets.PROMPT, device=setting.device)
        tokens = [token]
        for _ in range(count - 1):
            mark_step_begin()
            token, at = decode(token, at)
            tokens.append(token.clone())
        return [int(number) for number in torch.cat(tokens, 1)[0]]

    return lambda: run(step), lambda: run(captured), captured


WAYS: dict[str, Callable[..., tuple[Run, Run, Any]]] = {
    "own decoder": _own,
    "transformers generate": _generate,
    "transformers, one cache": functools.partial(_generate, keeps=True),
}
JOBS: list[Job] = [(who, how) for who in WAYS for how in HOW]
