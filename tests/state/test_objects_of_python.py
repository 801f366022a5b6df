"""What a body leaves in objects of Python's own: queues with a largest size, exceptions, modules that a cell or an
object holds, hashes and compressors. Eager and captured twins leave the same after each call."""

from __future__ import annotations

import collections
import hashlib
import queue
import types
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import frozen

from capture import capture
from tests.support.device import DEVICE

Write = Callable[[Any, torch.Tensor], object]


@frozen
class Kind:
    """``make`` gives the object, into which ``write`` puts a tensor of the body; ``read`` tells what it holds."""

    make: Callable[[], Any]
    write: Write
    read: Callable[[Any], Any]


def _values(kept: Any) -> Any:
    return [float(one) for one in kept]


def _last_two(kept: Any, made: torch.Tensor) -> None:
    if kept.full():
        kept.get()
    kept.put(made)


def _at_most_two(kept: Any, made: torch.Tensor) -> None:
    if kept.qsize() > 1:
        kept.get()
    kept.put(made)


def _in_turn(kept: Any, made: torch.Tensor) -> None:
    if len(kept) > 2:
        kept.pop(0)
    kept.append(made)


def _note(kept: Any, made: torch.Tensor) -> None:
    kept.args = (made, len(kept.args))
    kept.add_note("noted")


def _module(**names: Any) -> types.ModuleType:
    made = types.ModuleType("capture_tests_held")
    vars(made).update(names)
    return made


KINDS: dict[str, Kind] = {
    "queue that may be full": Kind(lambda: queue.Queue(2), _last_two, lambda kept: _values(kept.queue)),
    "queue that is asked for its size": Kind(queue.Queue, _at_most_two, lambda kept: _values(kept.queue)),
    "list of a user's": Kind(collections.UserList, _in_turn, _values),
    "exception": Kind(
        lambda: ValueError(0.0), _note, lambda kept: (_values(kept.args), getattr(kept, "__notes__", None)),
    ),
    "list in an exception": Kind(
        lambda: ValueError([]), lambda kept, made: kept.args[0].append(made), lambda kept: _values(kept.args[0]),
    ),
    "name in a module": Kind(
        _module, lambda kept, made: setattr(kept, "last", made), lambda kept: float(kept.last),
    ),
    "list in a module": Kind(
        lambda: _module(several=[]), lambda kept, made: kept.several.append(made), lambda kept: _values(kept.several),
    ),
    "list in a module of an object": Kind(
        lambda: types.SimpleNamespace(module=_module(several=[])),
        lambda kept, made: kept.module.several.append(made), lambda kept: _values(kept.module.several),
    ),
    "hash": Kind(hashlib.sha256, lambda kept, _: kept.update(b"one"), lambda kept: kept.hexdigest()),
    "hash of any length": Kind(hashlib.shake_128, lambda kept, _: kept.update(b"one"), lambda kept: kept.hexdigest(8)),
    "compressor": Kind(zlib.compressobj, lambda kept, _: kept.compress(b"one"), lambda kept: kept.copy().flush()),
}  # fmt: skip


def _run(kind: Kind, wrap: Any) -> list[Any]:
    kept = kind.make()

    def body(x: torch.Tensor) -> torch.Tensor:
        made = x.sum()
        kind.write(kept, made)
        return made

    call, left = wrap(body), list[Any]()
    for number in range(8):
        result = call(torch.full((3,), float(number), device=DEVICE))
        left.append((float(result), kind.read(kept)))
    return left


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:CG:capture.CaptureWarning")
@pytest.mark.parametrize("name", KINDS)
def test_both_leave_the_same(name: str) -> None:
    assert _run(KINDS[name], capture) == _run(KINDS[name], lambda body: body)


def test_a_hash_that_the_caller_feeds_is_read_anew() -> None:
    digest = hashlib.sha256(b"first")
    captured = capture(lambda x: x * int(digest.hexdigest()[:3], 16))
    for number in range(8):
        if number == 5:
            digest.update(b"second")
        x = torch.full((3,), float(number), device=DEVICE)
        assert torch.equal(captured(x), x * int(digest.hexdigest()[:3], 16)), number
