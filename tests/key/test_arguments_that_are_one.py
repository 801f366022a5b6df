"""Two arguments, or parts of them, that are the very same list or dict: what the body changes in the one shows in the
other, and it may ask by ``is``."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from tests.support.device import DEVICE


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False):
        yield


def grow(x: Tensor, one: Any, other: Any) -> Any:
    """Changes one and reads the other."""
    if isinstance(one, list):
        one.append(x * 2)
    else:
        one["new"] = x * 2
    values = list(other) if isinstance(other, list) else list(other.values())
    return torch.stack(values).sum(0), one is other


def nested(x: Tensor, whole: Any) -> Any:
    return grow(x, whole["a"], whole["b"][0])


MAKE: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.ones(2, device=DEVICE)],
    "dict": lambda: {"a": torch.ones(2, device=DEVICE)},
    "ordered dict": lambda: OrderedDict(a=torch.ones(2, device=DEVICE)),
    "defaultdict": lambda: defaultdict(int, a=torch.ones(2, device=DEVICE)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("body", [grow, nested])
def test_the_same_one_twice(kind: str, body: Callable[..., Any]) -> None:
    captured: Any = capture(body)
    for number in range(12):
        told = []
        for run in (body, captured):
            one = MAKE[kind]()
            other = one if number % 2 else MAKE[kind]()
            arguments = (one, other) if body is grow else ({"a": one, "b": (other,)},)
            total, is_one = run(torch.full((2,), float(number), device=DEVICE), *arguments)
            values = one if isinstance(one, list) else one.values()
            told.append((total, is_one, [value.clone() for value in values], len(other)))
        (total, is_one, values, length), (our_total, was_one, our_values, our_length) = told
        assert torch.equal(total, our_total)
        assert (is_one, length) == (was_one, our_length)
        assert all(map(torch.equal, values, our_values))
    assert recordings(captured).replays >= 4


def test_many_containers_go_the_general_way() -> None:
    captured = capture(lambda rows: torch.stack([row[0] for row in rows]).sum())
    for number in range(5):
        rows = [[torch.full((1,), float(number + at), device=DEVICE)] for at in range(100)]
        assert captured(rows) == sum(number + at for at in range(100))
    assert recordings(captured).replays >= 2


class Cache:
    def __init__(self) -> None:
        self.total = torch.zeros(2, device=DEVICE)


def _add(kept: Any, x: Tensor) -> None:
    if isinstance(kept, Cache):
        kept.total = kept.total + x
    else:
        kept["total" if isinstance(kept, dict) else 0] = _total(kept) + x


def _total(kept: Any) -> Tensor:
    total: Tensor = kept.total if isinstance(kept, Cache) else kept["total" if isinstance(kept, dict) else 0]
    return total


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "make",
    [Cache, lambda: {"total": torch.zeros(2, device=DEVICE)}, lambda: [torch.zeros(2, device=DEVICE)]],
    ids=["object", "dict", "list"],
)
@pytest.mark.parametrize("when", [(1,), (4, 5), (7,), tuple(range(12))], ids=str)
@pytest.mark.filterwarnings("ignore:CG106")
def test_one_that_the_body_changes_in_python_state(make: Callable[[], Any], when: tuple[int, ...]) -> None:
    told = []
    for is_captured in (False, True):
        kept = make()
        body = _changing(kept)
        run: Any = capture(body) if is_captured else body
        results = []
        for number in range(12):
            given = kept if number in when else make()
            results.append(run(torch.full((2,), float(number), device=DEVICE), given).clone())
            results.append(_total(kept).clone())
        told.append(results)
    assert all(map(torch.equal, *told))
    assert recordings(run).replays >= (0 if len(when) > 4 else 3)


def _changing(kept: Any) -> Callable[[Tensor, Any], Tensor]:
    def body(x: Tensor, given: Any) -> Tensor:
        _add(kept, x)
        return _total(given) * 2

    return body
