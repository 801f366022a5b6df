"""Functions of torch that read lengths on the host without an operator: packed sequences, ``tensor_split``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from capture import capture, recordings
from tests.support.device import without_default_device
from tests.support.regions import bits

Body = Callable[[Any, Tensor, Tensor], Any]
LENGTHS = [[4, 1, 1], [2, 2, 2], [3, 2, 1]]  # of one sum
ROUNDS = 6


def packed(x: Tensor, lengths: Tensor) -> PackedSequence:
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


def unpacked(p: Any) -> Any:
    return pad_packed_sequence(p, batch_first=True)


BODIES: dict[str, Body] = {
    "packs": lambda net, x, n: packed(x, n).data.sin(),
    "packs and runs": lambda net, x, n: net(packed(x, n))[1],
    "runs": lambda net, p, n: net(p)[0].data,
    "unpacks": lambda net, p, n: unpacked(p),
    "all of it": lambda net, x, n: pad_packed_sequence(net(packed(x, n))[0], batch_first=True, total_length=4),
    "splits": lambda net, x, n: [one.sum() for one in x.flatten().tensor_split(n.cumsum(0))],
    "splits by a function": lambda net, x, n: torch.tensor_split(x.flatten(), n[0])[0] * 2,
}
GIVEN_PACKED = ("runs", "unpacks")
CASES = [(name, nn.GRU) for name in BODIES] + [
    (name, cell) for name in ("runs", "all of it") for cell in (nn.LSTM, nn.RNN)
]


@pytest.mark.one_in(18)
@pytest.mark.parametrize(("name", "cell"), CASES)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.filterwarnings("ignore:CG201:capture.CaptureWarning", "ignore:CG901:capture.CaptureWarning")
@without_default_device()
def test_other_lengths(name: str, cell: Any, *, grad: bool) -> None:
    body = BODIES[name]
    torch.manual_seed(0)
    net = cell(2, 3, batch_first=True, device="cpu")
    step = capture(lambda x, n: body(net, x, n))
    with torch.set_grad_enabled(grad):
        for number in range(ROUNDS * len(LENGTHS)):
            torch.manual_seed(number)
            lengths = torch.tensor(LENGTHS[number % len(LENGTHS)], device="cpu")
            x: Any = torch.randn(3, 4, 2, device="cpu")
            x = packed(x, lengths) if name in GIVEN_PACKED else x
            result, expected = [
                torch.utils._pytree.tree_leaves(function(x, lengths)) for function in (step, lambda *a: body(net, *a))
            ]
            assert [(leaf.shape, bits(leaf)) for leaf in result] == [(leaf.shape, bits(leaf)) for leaf in expected]
            _ = torch.rand(number + 1, device="cpu") * 2  # other memory in between
    assert grad or recordings(step).replays >= ROUNDS
