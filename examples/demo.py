"""``make demo``: a small GPT learns this repository's text, then writes 200 characters eagerly and captured.

The training step is captured as a whole, beside an eager twin at first: the same losses and the same tokens must come
out; the speeds, the counters and the plan are printed. A second start finds the plans in the cache and skips the
watched runs. Exit status 1 if a loss or a token differs, or nothing was replayed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from capture import capture, explain, mark_step_begin, plans, recordings
from capture.engines.registry import backend_for
from examples import plot
from examples.gpt import GPT, Cache, Shape
from examples.training import curve, train

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("README.md", "docs/*.md", "capture/*.py", "capture/rules/*.py")
PICTURE = ROOT / "build" / "losses.png"
PROMPT = "A recording "
Step = Callable[[Tensor, Cache], Tensor]


class Options(NamedTuple):
    """How long to train, and how much to decode how often."""

    train_steps: int
    train_seconds: float
    compared_steps: int
    tokens: int
    rounds: int


FULL = Options(train_steps=1500, train_seconds=40.0, compared_steps=100, tokens=200, rounds=11)
QUICK = Options(train_steps=12, train_seconds=10.0, compared_steps=12, tokens=40, rounds=3)


class Text:
    """The repository's own text, and its characters as tokens."""

    def __init__(self) -> None:
        files = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
        text = "\n".join(path.read_text(encoding="utf-8") for path in files)
        self.characters = sorted({*text, *PROMPT})
        self._number_of = {character: number for number, character in enumerate(self.characters)}
        self.tokens = self.encode(text)

    def encode(self, text: str) -> Tensor:
        """Tokens of a text."""
        return torch.tensor([self._number_of[character] for character in text])

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens."""
        return "".join(self.characters[token] for token in tokens)


def choose_device() -> torch.device:
    """CUDA if there is a GPU and an engine for it, else the CPU."""
    cuda = torch.cuda.is_available() and backend_for(torch.device("cuda")) is not None
    return torch.device("cuda" if cuda else "cpu")


def decode(step: Step, prompt: list[Tensor], cache: Cache, num_tokens: int) -> tuple[list[int], float]:
    """Feed the prompt, then draw ``num_tokens`` more. Gives them and their number per second."""
    cache.clear()
    torch.manual_seed(1)  # the step draws from torch's generator; a replay draws exactly what eager would
    for token in prompt[:-1]:
        mark_step_begin()
        step(token, cache)
    token = prompt[-1]
    drawn: list[Tensor] = []
    begin = time.perf_counter()
    for _ in range(num_tokens):
        mark_step_begin()
        token = step(token, cache)
        drawn.append(token)  # kept past its step, like any tensor
    tokens: list[int] = torch.cat(drawn).flatten().tolist()  # the only read on the host
    return tokens, num_tokens / (time.perf_counter() - begin)


class Compared(NamedTuple):
    """What the rounds gave."""

    tokens: list[int]
    same: bool
    eager_rate: float
    captured_rate: float
    ratio: float


def compare(
    eager: Step, captured: Step, prompt: list[Tensor], cache: tuple[Cache, Cache], options: Options
) -> Compared:
    """Alternate the two, first round to warm up; medians of the others."""
    rates: list[tuple[float, float]] = []
    same = True
    tokens: list[int] = []
    for _ in range(options.rounds + 1):
        tokens, eager_rate = decode(eager, prompt, cache[0], options.tokens)
        captured_tokens, captured_rate = decode(captured, prompt, cache[1], options.tokens)
        same &= tokens == captured_tokens
        rates.append((eager_rate, captured_rate))
    warm = rates[1:]
    return Compared(
        tokens, same,
        statistics.median(one for one, _ in warm),
        statistics.median(other for _, other in warm),
        statistics.median(other / one for one, other in warm),
    )  # fmt: skip


@contextmanager
def section(title: str) -> Iterator[None]:
    """A heading and, at the end, an empty line."""
    print(f"== {title}")
    yield
    print(flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Train, decode both ways, explain."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a few training steps and 40 tokens")
    options = QUICK if parser.parse_args(arguments).quick else FULL
    torch.set_num_threads(1)  # operators this small gain nothing from more, and lose much where cores are busy
    torch.manual_seed(0)
    device, text = choose_device(), Text()
    shape = Shape(vocabulary=len(text.characters))
    model = GPT(shape).to(device)
    size = sum(parameter.numel() for parameter in model.parameters())
    with section(f"train {size:,} parameters on {len(text.tokens):,} characters of this repository, {device}"):
        trained = train(model, text.tokens, options.train_steps, options.train_seconds, options.compared_steps, device)
        print(f"losses {trained.losses[0]:.3f} to {trained.losses[-1]:.3f}  {curve(trained.losses)}")
        print(
            f"same losses as the eager twin over {len(trained.eager_losses)} steps: {'yes' if trained.same else 'NO'}"
        )
        print(f"eager:    {trained.eager_rate:8.1f} steps per second")
        print(f"captured: {trained.captured_rate:8.1f} steps per second")
        print(trained.counts)
        PICTURE.parent.mkdir(exist_ok=True)
        plot.save(PICTURE, {"eager": trained.eager_losses, "captured": trained.losses})
        print(f"both curves: {PICTURE.relative_to(ROOT)}")
    model.eval()

    # All there is to it: the cache keeps its address and is written in place; the rest is found by watching one run.
    captured = capture(model.step, static=["cache"])

    with torch.inference_mode():
        prompt = [token.view(1, 1).clone() for token in text.encode(PROMPT).to(device)]
        caches = (Cache.empty(shape, batch=1, device=device), Cache.empty(shape, batch=1, device=device))
        compared = compare(model.step, captured, prompt, caches, options)
        with section(f"{options.tokens} characters after {PROMPT!r}"):
            print(PROMPT + text.decode(compared.tokens))
        with section(f"eager and captured in turn, medians of {options.rounds} rounds"):
            print(f"same tokens: {'yes' if compared.same else 'NO'}")
            print(f"eager:    {compared.eager_rate:8.0f} tokens per second")
            print(f"captured: {compared.captured_rate:8.0f} tokens per second, {compared.ratio:.2f} times eager")
        with section("recordings"):
            done = recordings(captured)
            print(done)
            origin = "loaded: no watched run was needed" if done.plans_loaded else "made from one watched run"
            print(f"pool: {done.pool_bytes:,} bytes; plans: {len(plans(captured))}, {origin}")
        with section("the plan"):
            print(explain(captured)(prompt[0], caches[1]), end="")
    return 0 if trained.same and compared.same and done.replays else 1


if __name__ == "__main__":
    sys.exit(main())
