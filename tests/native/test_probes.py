"""What torch is asked once in a process: whatever goes wrong there is a no, and no call ends with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from capture import capture, recordings
from capture.torch_private import tensor_reads
from capture.torch_private.probe import probe
from tests.support.decorated import with_gradients as with_gradients


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, TypeError, AssertionError, NotImplementedError])
def test_what_raises_is_not_there(error: type[Exception]) -> None:
    asked = list[int]()

    @probe
    def found() -> bool:
        """Whether it is there."""
        asked.append(1)
        raise error("planted")

    assert [found() for _ in range(3)] == [False] * 3
    assert asked == [1]
    assert (found.__name__, found.__doc__) == ("found", "Whether it is there.")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_who_ends_the_program_ends_it(error: type[BaseException]) -> None:
    @probe
    def found() -> bool:
        raise error

    with pytest.raises(error):
        found()


def test_where_other_code_makes_torchs_tensors_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may have every tensor made on its accelerator. The probes make some, too."""
    zeros: Callable[..., torch.Tensor] = torch.zeros

    def elsewhere(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return zeros(*args, **kwargs)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    twin = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    twin.load_state_dict(model.state_dict())
    captured = capture(model)
    tensor_reads.counts_holders.cache_clear()  # type: ignore[attr-defined]
    try:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "zeros", elsewhere)
            for number in range(8):
                torch.manual_seed(number)
                x = torch.randn(5, 4)
                for one in (captured, twin):
                    one(x).pow(2).sum().backward()
                for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                    assert mine.grad is not None
                    assert theirs.grad is not None
                    assert torch.equal(mine.grad, theirs.grad), number
                for buffer, other in zip(model.buffers(), twin.buffers(), strict=True):
                    assert torch.equal(buffer, other), number
            assert recordings(captured).replays > 2
    finally:
        tensor_reads.counts_holders.cache_clear()  # type: ignore[attr-defined]
