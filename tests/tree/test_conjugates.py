"""Complex numbers that are conjugated lazily: memory in Python state read as them, and views of them given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from capture import capture, recordings

CALLS = 7
complex_of, real_of = torch.view_as_complex, torch.view_as_real


def looks(results: Any) -> Any:
    """Values, torch's lazy bits, and whose memory it is."""
    if isinstance(results, (tuple, list)):
        return [looks(result) for result in results]
    return results.resolve_conj().resolve_neg().tolist(), results.is_conj(), results.is_neg(), results.shape


def same_in_each_call(body: Callable[[Tensor], Any], inputs: Sequence[Tensor]) -> int:
    """The replays of a body that gives what eager gives."""
    captured = capture(body)
    for one in inputs:
        assert looks(captured(one)) == looks(body(one))
    return recordings(captured).replays


READS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "real memory": lambda x, w: complex_of(x) * complex_of(w).conj(),
    "a part": lambda x, w: complex_of(x[2:]) * complex_of(w[2:]).conj(),
    "other view": lambda x, w: w.view(torch.complex64).conj() * x[:, :1],
    "product": lambda x, w: complex_of(w).reshape(2, 3).mH @ complex_of(x).reshape(2, 3),
    "given back": lambda x, w: (complex_of(w).conj(), x + 1),
    "given back alone": lambda x, w: (complex_of(w)[1:].conj(), complex_of(w), x * 2),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_real_numbers_in_python_state_are_read_as_conjugates(read: Callable[[Tensor, Tensor], Any]) -> None:
    """A view of another dtype keeps the bit that says that its numbers are conjugated."""
    weight = torch.randn(6, 2)
    assert same_in_each_call(lambda x: read(x, weight), [torch.randn(6, 2) for _ in range(CALLS)]) == CALLS - 2


def test_gradients_through_complex_views_of_real_parameters() -> None:
    """The backward pass of a product multiplies by the conjugate of what was a view of a parameter."""
    first, second = (torch.randn(6, 2, requires_grad=True) for _ in range(2))

    def body(x: Tensor) -> tuple[Tensor, ...]:
        product = complex_of(first) * complex_of(second).exp() / complex_of(x)
        return torch.autograd.grad(real_of(product).square().sum(), (first, second))

    assert same_in_each_call(body, [torch.randn(6, 2) for _ in range(CALLS)]) >= CALLS - 3  # two runs may be watched


class StateSpace(torch.nn.Module):
    """As layers of state space models keep their numbers: real parameters, read as complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = torch.nn.Parameter(torch.randn(4, 3, 2))
        self.poles = torch.nn.Parameter(torch.randn(4, 3, 2))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Numbers that ring at the poles, times the input."""
        taps, poles = complex_of(self.taps), complex_of(self.poles)
        powers = torch.exp(poles[..., None] * torch.arange(5, device=x.device) * 0.1)
        ringing = torch.einsum("hn,hnl->hl", taps * (poles.exp() - 1.0) / poles, powers)
        return x * ringing.real + ringing.imag


@pytest.mark.parametrize("whole", [False, True], ids=["module", "step"])
def test_state_space_layers_are_trained_as_eagerly(whole: bool) -> None:
    """Two passes apart, and a whole step."""

    def losses(wrap: Callable[[Any], Any]) -> list[list[float]]:
        torch.manual_seed(3)
        layer = StateSpace()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        forward = layer if whole else wrap(layer)

        def train(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = forward(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(train) if whole else train
        seen = [step(torch.randn(4, 5)).item() for _ in range(2 * CALLS)]
        return [seen, layer.taps.flatten().tolist(), layer.poles.flatten().tolist()]

    assert losses(capture) == losses(lambda body: body)


RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "whole": lambda x: x.conj(),
    "part": lambda x: (x[2:].conj(), x.imag * 2),
    "several": lambda x: (x.conj(), x.conj() * 2, x.real, x[1:]),
    "imaginary": lambda x: (x.imag, x + 1),
}


@pytest.mark.filterwarnings("ignore:CG107")  # a conjugated argument is no plain tensor, and the call is eager
@pytest.mark.parametrize("body", RETURNS.values(), ids=RETURNS)
def test_views_of_conjugated_arguments_are_given_back(body: Callable[[Tensor], Any]) -> None:
    """A view of an argument is conjugated as eager's, whether the argument is or not."""
    plain = [torch.randn(6, dtype=torch.complex64) for _ in range(CALLS)]
    same_in_each_call(body, [*[one.conj() for one in plain], *plain, plain[0].conj()])


def test_views_given_back_lie_in_the_callers_memory() -> None:
    """What is written to a conjugated view of an argument is in the argument."""
    captured = capture(lambda x: (x.conj(), x * 2))
    for _ in range(CALLS):
        given = torch.randn(6, dtype=torch.complex64)
        view, _ = captured(given)
        assert view.data_ptr() == given.data_ptr()
        view.fill_(1 + 2j)
        assert torch.equal(given, torch.full_like(given, 1 - 2j))
    assert recordings(captured).replays
