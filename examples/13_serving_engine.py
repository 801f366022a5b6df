"""A small serving engine: continuous batching over a paged cache, with batches of 1 to 32 padded to six sizes."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import Dim, capture, recordings, sizes_seen, warmup
from examples.gain import gain

torch.set_num_threads(1)
VOCABULARY, WIDTH, HEADS, LAYERS = 97, 48, 4, 2
BLOCK, BLOCKS, MOST_BLOCKS, MOST = 8, 128, 4, 32  # slots of a block; blocks; blocks and requests that run at once
BATCH = Dim((1, 2, 4, 8, 16, 32), name="batch")
NAMES = ("ids", "positions", "slot_mapping", "block_tables", "lengths")


class Attention(nn.Module):
    """Attention over the slots of a sequence's blocks. No sequence has block 0; a row without a slot (-1) writes
    nothing."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(BLOCKS * BLOCK, HEADS, WIDTH // HEADS))

    def write(self, cache: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
        """Write one row for each sequence, at its slot."""
        at = slot_mapping.clamp(min=0)
        cache.index_put_((at,), torch.where((slot_mapping >= 0)[:, None, None], rows, cache[at]))

    @override
    def forward(self, x: Tensor, slot_mapping: Tensor, slots: Tensor, seen: Tensor) -> Tensor:
        """``slots``: the slots of each sequence's blocks. ``seen``: which of them are filled."""
        q, k, v = self.project(x).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
        self.write(self.keys, k, slot_mapping)
        self.write(self.values, v, slot_mapping)
        scores = torch.einsum("bhd,bthd->bht", q, self.keys[slots]) * (WIDTH // HEADS) ** -0.5
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        result: Tensor = self.out(torch.einsum("bht,bthd->bhd", weights, self.values[slots]).flatten(1))
        return result


class Model(nn.Module):
    """A decoder for one token of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MOST_BLOCKS * BLOCK, WIDTH)
        self.attend = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.narrow = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))

    def decode(
        self, ids: Tensor, positions: Tensor, slot_mapping: Tensor, block_tables: Tensor, lengths: Tensor
    ) -> Tensor:  # fmt: skip
        """The next token of each sequence."""
        offsets = torch.arange(BLOCK, device=ids.device)
        slots = (block_tables[:, :, None] * BLOCK + offsets).flatten(1)
        seen = torch.arange(MOST_BLOCKS * BLOCK, device=ids.device) < lengths[:, None]
        x = self.embed(ids) + self.places(positions)
        for layer in range(LAYERS):
            x = x + self.attend[layer](self.norm[2 * layer](x), slot_mapping, slots, seen)
            x = x + self.narrow[layer](F.gelu(self.wide[layer](self.norm[2 * layer + 1](x))))
        return F.linear(x, self.embed.weight).argmax(-1)


@dataclass
class Request:
    """A prompt, and how many tokens are asked for."""

    tokens: list[int]
    asked: int
    blocks: list[int] = field(default_factory=list)
    done: int = 0
    """Tokens in the cache."""

    @property
    def is_finished(self) -> bool:
        return self.done >= len(self.tokens) - 1 and self.asked == 0


class Engine:
    """Takes a token of each running request in each step; requests come and go between steps."""

    def __init__(self, model: Model, *, captured: bool) -> None:
        self.model, self.waiting, self.running = model, deque[Request](), list[Request]()
        self.free = list(range(BLOCKS - 1, 0, -1))
        self.decode = model.decode
        if captured:
            padded = {name: {0: BATCH} for name in NAMES}
            fill = {"slot_mapping": -1, "lengths": 1}
            self.decode = capture(model.decode, buckets=padded, fill=fill, tolerance=(1e-4, 1e-5))

    def step(self) -> None:
        """Admit requests, decode one token of each, and release those that are finished."""
        while self.waiting and len(self.running) < MOST and len(self.free) >= MOST_BLOCKS:
            request = self.waiting.popleft()
            request.blocks = [self.free.pop() for _ in range(MOST_BLOCKS)]
            self.running.append(request)
        if not self.running:
            return
        at = [request.done for request in self.running]
        slots = [
            request_now.blocks[done // BLOCK] * BLOCK + done % BLOCK
            for request_now, done in zip(self.running, at, strict=True)
        ]
        inputs = [
            [request.tokens[done] for request, done in zip(self.running, at, strict=True)], at, slots,
            [request.blocks for request in self.running], [done + 1 for done in at],
        ]  # fmt: skip
        tokens = self.decode(*[torch.tensor(column) for column in inputs]).tolist()
        for request, token in zip(self.running, tokens, strict=True):
            request.done += 1
            if request.done == len(request.tokens):  # the whole prompt is read
                request.tokens.append(token)
                request.asked -= 1
        for request in [served for served in self.running if served.is_finished]:
            self.running.remove(request)
            self.free += request.blocks


def serve(engine: Engine, seed: int) -> list[list[int]]:
    """The tokens of 80 requests that come at random times."""
    rng = random.Random(seed)
    requests = [
        Request([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 8))], rng.randint(1, 20)) for _ in range(80)
    ]
    left = deque(requests)
    while left or engine.waiting or engine.running:
        for _ in range(min(rng.choice((0, 0, 1, 2, 6)), len(left))):
            engine.waiting.append(left.popleft())
        engine.step()
    return [request.tokens for request in requests]


def main() -> None:
    """Serve the same requests eagerly and captured."""
    torch.manual_seed(0)
    model = Model().eval()
    eager, engine = Engine(model, captured=False), Engine(model, captured=True)
    batch_of_one = torch.ones(1, dtype=torch.long)
    report = warmup(engine.decode).cases(
        [(batch_of_one, batch_of_one, batch_of_one, batch_of_one.expand(1, MOST_BLOCKS), batch_of_one)], progress=False
    )
    print("recorded before the first request:", report.recorded)
    print("the same tokens as eager:", all(serve(engine, seed) == serve(eager, seed) for seed in range(3)))
    print(
        "batch sizes:", len(sizes_seen(engine.decode)["batch"]), "- recordings:", recordings(engine.decode).recordings
    )
    before = recordings(engine.decode)
    serve(engine, 3)
    after = recordings(engine.decode)
    replayed, ran = after.replays - before.replays, after.body_runs - before.body_runs
    print("later on, most steps replay:", replayed > 4 * ran)
    three = [
        torch.tensor(column) for column in ([1, 2, 3], [0, 0, 0], [8, 40, 72], [[1] * 4, [5] * 4, [9] * 4], [1, 1, 1])
    ]
    print(gain(lambda: model.decode(*three), lambda: engine.decode(*three)))
    print("why: the operators of a step are launched from C; the batch of 3 is padded to 4")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
