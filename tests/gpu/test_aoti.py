"""Packages of AOTInductor on a GPU: in a chain with captured functions, bit for bit the package's own results."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from capture import CaptureWarning, capture, mark_step_begin, recordings, release
from capture.integrations.aoti import entry_point
from capture.torch_private import aoti as private
from tests.gpu.support import DEVICE, counts, healthy, needs_cuda, rand, same
from tests.support.packages import skip_where_torch_crashes

pytestmark = [needs_cuda, pytest.mark.skipif(private.runner_methods() is None, reason="this torch loads no packages")]
WIDTH, LONGEST = 64, 128


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Cached(nn.Module):
    """Writes an argument in place."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)

    @override
    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, self.project(x))
        return cache.sum(0)


def packed(module: nn.Module, path: Path, *example: Tensor, shapes: Any = None) -> Path:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the compiler
        program = torch.export.export(module.to(DEVICE).eval(), example, dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    skip_where_torch_crashes(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("aoti")


@pytest.fixture(scope="module")
def block(folder: Path) -> Path:
    torch.manual_seed(0)
    length = torch.export.Dim("length", min=2, max=LONGEST)
    return packed(Block(), folder / "block.pt2", rand(2, 16, WIDTH), shapes=({1: length},))


@pytest.fixture(scope="module")
def cached(folder: Path) -> Path:
    torch.manual_seed(0)
    example = (rand(2, WIDTH), torch.zeros(8, WIDTH, device=DEVICE), torch.tensor([0, 1], device=DEVICE))
    return packed(Cached(), folder / "cached.pt2", *example)


def load(path: Path, *, single: bool = True) -> Any:
    return torch._inductor.aoti_load_package(str(path), run_single_threaded=single)


def before(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2 + 1


def after(y: Tensor) -> Tensor:
    return (y * y.sigmoid()).softmax(-1)


def chain(first: Any, model: Any, second: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: second(model(first(x)))


def test_a_block_in_a_chain_at_three_lengths(block: Path) -> None:
    """All share one pool, each length has a recording, and kept outputs keep their values."""
    first, model, second = capture(before), capture(load(block)), capture(after)
    ours, theirs = chain(first, model, second), chain(before, load(block), after)
    for i in range(15):
        mark_step_begin()
        x = rand(2, (7, 16, 33)[i % 3], WIDTH, seed=i)
        same(ours(x), theirs(x))
    assert [counts(function) for function in (first, model, second)] == [(3, 3, 9, 0)] * 3
    kept = []
    for i in range(6):
        mark_step_begin()
        x = rand(2, (7, 16, 33)[i % 3], WIDTH, seed=i)
        kept.append((ours(x), theirs(x)))
    for result, expected in kept:
        same(result, expected)
    assert recordings(first).pool_bytes == recordings(model).pool_bytes == recordings(second).pool_bytes
    healthy()


def test_called_by_a_captured_function(block: Path) -> None:
    model, plain = load(block), load(block)
    captured = capture(lambda x: torch.relu(model(x + 1)) * 2)
    for i in range(6):
        mark_step_begin()
        x = rand(2, 16, WIDTH, seed=i)
        same(captured(x), torch.relu(plain(x + 1)) * 2)
    assert counts(captured) == (1, 1, 4, 0)


def both_write(captured: Any, plain: Any, inputs: Iterable[Tensor]) -> None:
    """A step for each input: results and what is written are equal."""
    ours, theirs = torch.zeros(8, WIDTH, device=DEVICE), torch.zeros(8, WIDTH, device=DEVICE)
    for i, x in enumerate(inputs):
        mark_step_begin()
        at = torch.tensor([i % 8, (i + 3) % 8], device=DEVICE)
        same(captured(x, ours, at), plain(x, theirs, at))
        same(ours, theirs)


def test_a_written_argument(cached: Path) -> None:
    captured, plain = capture(load(cached)), load(cached)
    both_write(captured, plain, (rand(2, WIDTH, seed=i) for i in range(8)))
    assert counts(captured)[1:] == (1, 6, 0)


def test_a_write_that_changes_nothing_at_first(cached: Path) -> None:
    captured, plain = capture(load(cached)), load(cached)
    zeros = (torch.zeros(2, WIDTH, device=DEVICE) for _ in range(3))
    both_write(captured, plain, itertools.chain(zeros, (rand(2, WIDTH, seed=i) for i in range(3, 6))))
    assert counts(captured)[1:] == (1, 4, 0)


def test_a_static_argument_is_written_where_it_is(cached: Path) -> None:
    captured, plain = capture(load(cached), static=["args.1"]), load(cached)
    both_write(captured, plain, (rand(2, WIDTH, seed=i) for i in range(6)))
    assert counts(captured)[3] == 0


def test_the_runner_for_many_threads_is_named_before_a_capture(block: Path) -> None:
    """The function runs eagerly with a finding that names the option; package and device go on working."""
    model, plain = load(block, single=False), load(block)
    assert entry_point(model) == "threaded"
    assert entry_point(plain) == "single-threaded"
    captured = capture(model)
    with pytest.warns(CaptureWarning, match="CG806(.|\n)*run_single_threaded=True"):
        result = captured(rand(2, 16, WIDTH, seed=9))
    same(result, plain(rand(2, 16, WIDTH, seed=9)))
    for i in range(5):
        mark_step_begin()
        x = rand(2, 16, WIDTH, seed=i)
        same(captured(x), plain(x))
    assert counts(captured)[1:3] == (0, 0)
    same(model(x), plain(x))
    healthy()


def test_other_constants(block: Path) -> None:
    """Other constants, copied into the package or kept by the caller at another address, lead to new recordings."""
    models = load(block), load(block)
    captured = capture(models[0])
    kept = []
    for i in range(16):
        mark_step_begin()
        if i in (5, 10):
            weights = {"out.weight": rand(WIDTH, WIDTH, seed=i)}
            kept.append(weights)
            for model in models:
                model.load_constants(weights, check_full_update=False, user_managed=i == 10)
        x = rand(2, 16, WIDTH, seed=i)
        same(captured(x), models[1](x))
    assert counts(captured) == (3, 3, 10, 0)
    healthy()


def test_release_and_record_again(block: Path) -> None:
    captured, plain = capture(load(block)), load(block)
    for i in range(8):
        mark_step_begin()
        if i == 4:
            release(captured)
        x = rand(2, 16, WIDTH, seed=i)
        same(captured(x), plain(x))
    assert counts(captured) == (1, 2, 5, 0)
