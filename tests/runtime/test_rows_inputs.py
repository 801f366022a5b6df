"""Rows of ``docs/rows.md``: how inputs reach a recording, and what a change of them costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import AnnotationError, capture, mark_step_begin, plans, recordings
from capture.core.findings import Policy
from tests.support.device import AGAIN, REBINDS
from tests.support.rows import (
    any_live,
    copies_in,
    counts,
    descendants,
    eager,
    followed,
    kids,
    ran,
    rand,
    roots,
    same,
    times,
    total,
    warned,
)
from tests.support.rows import fresh as fresh


class Linear(nn.Module):
    """One weight, no bias."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(rand(4, 4, seed=seed))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@capture
def three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x + 1, x + 2, x + 3


def test_row_067_input_may_be_overwritten_after_the_call() -> None:
    """A copied input belongs to the caller again after the call: overwriting it changes no output."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 2

    for i in range(4):
        x = rand(3, 3, seed=i)
        y = f(x)
        expected = x * 2
        x.fill_(7.0)
        same(y, expected)


def test_row_069_static_and_implicit_inputs_are_not_copied() -> None:
    """A static argument and a parameter are read where they are; only the plain argument is copied."""

    @capture(static=["table"])
    def f(x: Tensor, table: Tensor) -> Tensor:
        return x @ table

    net = capture(Linear())
    table = rand(4, 4, seed=1)
    with torch.no_grad():
        for i in range(3):
            x = rand(2, 4, seed=i)
            same(f(x, table), x @ table)
            same(net(x), x @ net.weight)
    assert [copies_in(node) for node in roots()] == [1, 1]
    for function, path in ((f, "table"), (net, "self.weight")):
        policies = {placeholder.path: placeholder.policy for placeholder in plans(function)[0].placeholders}
        assert policies[path] is Policy.STATIC
        assert policies["x"] is not Policy.STATIC


def test_row_070_moved_static_is_rebound() -> None:
    """A static argument at another address: the same recording is bound to it, and back again."""

    @capture(static=["p"])
    def f(x: Tensor, p: Tensor) -> Tensor:
        return x * p

    p1, p2 = rand(4, seed=1), rand(4, seed=2)
    for i, p in enumerate((p1, p1, p1, p2, p2, p1, p2)):
        x = rand(4, seed=i + 10)
        same(f(x, p), x * p)
    followed(f, 3)


@torch.no_grad()
def test_row_071_replaced_parameter_is_rebound() -> None:
    """A parameter replaced by ``setattr`` is what the next call reads; returning to the old one works as well."""
    net = capture(Linear())
    old, new = net.weight, nn.Parameter(rand(4, 4, seed=5))
    for i, weight in enumerate((old, old, old, new, new, old)):
        net.weight = weight
        x = rand(2, 4, seed=i)
        same(net(x), x @ weight)
    followed(net, 2)


@torch.no_grad()
def test_row_071_parameter_replaced_in_other_ways() -> None:
    """``.data =``, ``load_state_dict(assign=True)`` and ``.to()`` between calls: never the old weight."""
    net, twin = capture(Linear()), Linear()

    def check(seed: int) -> None:
        for i in range(2):
            x = rand(2, 4, seed=seed + i).to(net.weight.dtype)
            same(net(x), twin(x))

    check(0)
    check(2)
    for module in (net, twin):
        module.weight.data = rand(4, 4, seed=6)
    check(4)
    for module in (net, twin):
        module.load_state_dict({"weight": rand(4, 4, seed=7)}, assign=True)
    check(6)
    for module in (net, twin):
        module.to(torch.float64)
    check(8)
    check(10)


@torch.no_grad()
def test_row_072_replaced_buffer_is_rebound() -> None:
    """A buffer replaced by another tensor of its kind (running statistics, a registered buffer)."""
    norm, twin = capture(nn.BatchNorm1d(4).eval()), nn.BatchNorm1d(4).eval()
    for i in range(6):
        if i == 3:
            for module in (norm, twin):
                module.running_mean = rand(4, seed=20)
                module.register_buffer("running_var", rand(4, seed=21) + 1)
        x = rand(3, 4, seed=i)
        same(norm(x), twin(x))
    followed(norm, 1)


@torch.no_grad()
def test_row_073_replaced_submodule_is_followed() -> None:
    """A whole submodule replaced between calls: the next call runs the new one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner: nn.Module = Linear(1)

        @capture
        @override
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y + 1

    net = Net()
    for i in range(9):
        if i == 3:
            net.inner = Linear(2)
        if i == 6:
            net.inner = nn.Tanh()
        x = rand(2, 4, seed=i)
        same(net(x), net.inner(x) + 1)


@torch.no_grad()
def test_row_074_static_change_in_a_child_rebinds_the_child() -> None:
    """A weight of the second function replaced: nothing is recorded, only the child is rebound."""
    first, second = capture(Linear(1)), capture(Linear(2))
    for i in range(6):
        if i in (3, 5):
            second.weight = nn.Parameter(rand(4, 4, seed=i))
        x = rand(2, 4, seed=i)
        y = first(x)
        z = second(y)
        same((y, z), (x @ first.weight, x @ first.weight @ second.weight))
        del y, z
    followed(second, 2)
    assert (recordings(first).recordings, recordings(first).rebinds) == (1, 0)
    if REBINDS:
        assert descendants() == [1]


@torch.no_grad()
def test_row_075_static_change_in_the_parent_rebinds_the_parent() -> None:
    """A weight of the first function replaced: its memory state is the same, so the child stays too."""
    first, second = capture(Linear(1)), capture(Linear(2))
    for i in range(6):
        if i in (3, 5):
            first.weight = nn.Parameter(rand(4, 4, seed=i))
        x = rand(2, 4, seed=i)
        y = first(x)
        z = second(y)
        same((y, z), (x @ first.weight, x @ first.weight @ second.weight))
        del y, z
    followed(first, 2)
    if REBINDS:
        assert descendants() == [1]
        assert (recordings(second).recordings, recordings(second).rebinds) == (1, 0)


@pytest.mark.filterwarnings("ignore:CG901")  # an engine that cannot bind anew; where it can there is no eager call
def test_row_076_static_churn_never_counts_toward_the_limit() -> None:
    """A static tensor that is another one at every call: no limit, no warning, no eager call."""

    @capture(static=["p"], max_recordings=1)
    def f(x: Tensor, p: Tensor) -> Tensor:
        return x + p

    weights = [rand(4, seed=i) for i in range(5)]
    for i in range(20):
        x = rand(4, seed=i + 50)
        same(f(x, weights[i % 5]), x + weights[i % 5])
    followed(f, 18)
    if REBINDS:
        assert counts(f) == (1, 1, 18, 0)


def test_row_077_static_activation_beside_changing_inputs() -> None:
    """A tensor marked static stays; the other input is new at every call: nothing recorded, nothing rebound."""

    @capture(static=["y"])
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    y = rand(4, 4)
    kept = []
    for i in range(6):
        x = rand(4, 4, seed=i)
        kept.append(x)
        same(f(x, y), x @ y)
    assert counts(f) == (1, 1, 4, 0)
    assert recordings(f).rebinds == 0


def test_row_078_values_of_statics_are_read_at_every_replay() -> None:
    """An in-place change of a static tensor, parameter or closure tensor shows in the next replay."""
    inside = rand(4, seed=3)

    @capture(static=["p"])
    def f(x: Tensor, p: Tensor) -> Tensor:
        return x * p + inside

    p = rand(4, seed=1)
    for i in range(6):
        x = rand(4, seed=i)
        same(f(x, p), x * p + inside)
        p.add_(1)
        inside.mul_(-1.5)
    assert counts(f) == (1, 1, 4, 0)
    assert recordings(f).rebinds == 0


def test_row_079_reasons_name_the_input_and_both_addresses() -> None:
    """A rebind, and a miss for another output of the step, say which input moved, from where to where."""

    @capture(static=["p"])
    def f(x: Tensor, p: Tensor) -> Tensor:
        return x * p

    p1, p2 = rand(4, seed=1), rand(4, seed=2)
    for p in (p1, p1, p2):
        same(f(rand(4), p), rand(4) * p)
    if not REBINDS:
        assert recordings(f).rebinds == 0
        return
    (event,) = [event for event in recordings(f).events if event.kind == "rebind"]
    for part in ("p", hex(p1.data_ptr()), hex(p2.data_ptr())):
        assert part in event.detail
    (moved,) = [finding for finding in recordings(f).findings if finding.code == "CG101"]
    assert moved.path == "p"


def test_row_079_limit_names_the_input_and_both_addresses() -> None:
    """The warning at the limit names the managed input that changed and both addresses."""

    @capture(max_recordings=1)
    def g(x: Tensor) -> Tensor:
        return x * 2

    addresses = []
    with warned("CG901") as messages:
        for i in (0, 0, 0, 1):
            mark_step_begin()
            outputs = three(rand(4))
            addresses.append(hex(outputs[i].data_ptr()))
            same(g(outputs[i]), (rand(4) + 1 + i) * 2)
            del outputs
    (message,) = messages
    for part in ("'x'", addresses[2], addresses[3]):
        assert part in message


def test_row_081_expanded_inputs() -> None:
    """Inputs with stride 0 reach the body with their strides and give eager's results, whatever their address."""

    @capture
    def f(x: Tensor) -> Tensor:
        ran("f")
        return (x * 2).sum(0) + float(x.stride(0))

    for i in range(5):
        x = rand(16, seed=i).expand(4, 16)
        same(f(x), eager(f, x))
    assert times("f") == 2


def test_row_082_self_overlapping_inputs() -> None:
    """Overlapping ``as_strided`` inputs are copied as they lie in memory."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x @ x.t()

    for i in range(5):
        x = rand(16, seed=i).as_strided((4, 6), (3, 1))
        same(f(x), x @ x.t())
    assert counts(f) == (1, 1, 3, 0)


def test_row_083_empty_inputs() -> None:
    """Tensors without elements pass in, beside others, as plain and as static arguments."""

    @capture(static=["s"])
    def f(x: Tensor, e: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([x, e, s]), e * 2

    for i in range(5):
        x, e, s = rand(3, seed=i), torch.rand(0), torch.rand(0)
        same(f(x, e, s), (torch.cat([x, e, s]), e * 2))
    assert counts(f) == (1, 1, 3, 0)


def test_row_084_ints_select_recordings() -> None:
    """A Python int is part of the key and baked: one recording for each value, right results."""

    @capture
    def f(n: int, x: Tensor) -> Tensor:
        ran("f")
        return (x * n).repeat(n)

    for i in range(4):
        x = rand(4, seed=i)
        same(f(2, x), (x * 2).repeat(2))
    assert total() == 1
    for i in range(4):
        x = rand(4, seed=i)
        same((f(3, x), f(2, x)), ((x * 3).repeat(3), (x * 2).repeat(2)))
    assert total() == 2
    assert 4 <= times("f") <= 5 + 2 * AGAIN, "one undone run asks what becomes of the number; a result is held"


def test_row_087_scalar_tensors_are_read_at_every_call() -> None:
    """A 0-dim tensor, as an argument or from outside, is read at every call, never baked."""
    outside = torch.tensor(1.0)

    @capture
    def f(x: Tensor, s: Tensor) -> Tensor:
        return x * s + outside

    for i in range(6):
        x, s = rand(4, seed=i), torch.tensor(i * 0.75)
        same(f(x, s), x * s + outside)
        outside.add_(0.5)
    assert counts(f) == (1, 1, 4, 0)


def test_row_089_managed_input_is_neither_copied_nor_kept_alive() -> None:
    """An output of the step that goes into the next function is read where it lies, and dies with the caller's name."""

    @capture
    def g(x: Tensor) -> Tensor:
        return x.sum(0)

    @capture
    def f(x: Tensor) -> Tensor:
        return x * 2

    for i in range(4):
        x = rand(4, 4, seed=i)
        y = f(x)
        z = g(y)
        same((y, z), (x * 2, (x * 2).sum(0)))
        del y
        assert not any(any_live(node) for node in roots())
        del z
    (parent,) = roots()
    (child,) = kids(parent)
    assert (copies_in(parent), copies_in(child)) == (1, 0)


def test_row_095_options_belong_to_the_function() -> None:
    """Each function has its own limit; an unknown option or value is an error where it is written."""

    @capture(max_recordings=1)
    def narrow(x: Tensor) -> Tensor:
        return x + 1

    @capture(max_recordings=3)
    def wide(x: Tensor) -> Tensor:
        return x + 1

    with warned("CG901"):
        for n in (1, 2, 3):
            for _ in range(3):
                x = rand(n)
                same((narrow(x), wide(x)), (x + 1, x + 1))
    assert recordings(narrow).recordings == 1
    assert recordings(wide).recordings == 3
    with pytest.raises(AnnotationError, match="max_recordings"):
        capture(max_recording=3)(eager)  # type: ignore[call-overload]
    with pytest.raises(AnnotationError, match="below 1"):
        capture(max_recordings=0)(eager)


def test_row_096_limit_falls_back_to_eager() -> None:
    """At the limit, per function and node: eager, said once with the reason; what is recorded still replays."""

    @capture(max_recordings=1)
    def g(x: Tensor) -> Tensor:
        ran("g")
        return x * 2

    @capture
    def lowered(x: Tensor) -> Tensor:
        return x - 1

    with warned("CG901"):
        for i in (0, 0, 0, 1, 2, 1, 2, 0):
            mark_step_begin()
            x = rand(4, seed=i)
            outputs = three(x)
            same(g(outputs[i]), (x + 1 + i) * 2)
            del outputs
    assert times("g") == 6
    assert recordings(g).eager_calls == 4
    for i in range(3):
        mark_step_begin()
        x = rand(4, seed=i)
        y = lowered(x)
        same(g(y), (x - 1) * 2)
        del y
    assert recordings(g).recordings == 2


def test_row_097_below_the_limit_nothing_falls_back() -> None:
    """As many recordings as allowed: no warning, no eager call."""

    @capture(max_recordings=2)
    def g(x: Tensor) -> Tensor:
        return x * 2

    for i in (0, 0, 1, 0, 1, 0, 1):
        mark_step_begin()
        x = rand(4, seed=i)
        outputs = three(x)
        same(g(outputs[i]), (x + 1 + i) * 2)
        del outputs
    assert counts(g)[1] == 2
    assert counts(g)[3] == 0
