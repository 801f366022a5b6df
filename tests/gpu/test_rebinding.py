"""Tensors of a recording move: the graph is patched to the new addresses, or recorded again with a reason; values are
eager's bit for bit."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from capture import capture, mark_step_begin, plans, recordings
from capture.engines.cuda import kernel_params
from capture.engines.cuda.address_table import AddressTable
from tests.gpu.moving import KERNELS, Holder, Kernel, check_bound, check_moves, spoil, triton
from tests.gpu.support import DEVICE, KEPT, ON_CUDA, counts, eager, needs_cuda, needs_gpu, rand, same

pytestmark = [
    needs_gpu,
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    # torch.fft warns so where there is no home folder
    pytest.mark.filterwarnings("ignore:Specified kernel cache directory"),
]


def finding(function: Any, code: str) -> list[Any]:
    return [one for one in recordings(function).findings if one.code == code]


def kernel_named(name: str) -> Kernel:
    """The kernel of this name. Skips the test where the machine cannot run it."""
    kernel = KERNELS[name]
    if kernel.cuda and not ON_CUDA:
        pytest.skip("a kernel of CUDA's own")
    if name == "triton" and triton is None:
        pytest.skip("triton is not installed")
    return kernel


@pytest.mark.parametrize("name", list(KERNELS))
def test_every_kind_of_kernel(name: str) -> None:
    now = check_moves(kernel_named(name))
    refused = [one for one in now.findings if one.code == "CG109"]
    print(f"\nKERNEL {name}: rebinds {now.rebinds}, recordings {now.recordings}, eager {now.eager_calls} "
          + "; ".join(f"{one.why}" for one in refused[:2]))  # fmt: skip
    assert refused or (now.recordings == 1 and now.rebinds == 9 and not now.eager_calls)


@pytest.mark.parametrize("name", list(KERNELS))
def test_every_kind_of_kernel_on_bound_arguments(name: str) -> None:
    captured = check_bound(kernel_named(name))
    now, policy = (
        recordings(captured),
        next(str(placeholder.policy) for placeholder in plans(captured)[0].placeholders if placeholder.path == "x"),
    )
    refused = [finding for finding in now.findings if finding.code == "CG109"]
    print(f"\nBOUND {name}: {policy}, recordings {now.recordings}, eager {now.eager_calls} "
          + "; ".join(f"{finding.why}" for finding in refused[:2]))  # fmt: skip
    assert refused or (policy == "bind" and now.recordings == 1 + KEPT and not now.eager_calls)


class Block(nn.Module):
    """Linear, LayerNorm, GELU."""

    def __init__(self, seed: int, size: int = 64) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(size, size, device=DEVICE), nn.LayerNorm(size, device=DEVICE)
        for number, parameter in enumerate(self.parameters()):
            parameter.data = rand(*parameter.shape, seed=10 * seed + number)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.norm(self.linear(x)))


def swap(block: nn.Module, weights: dict[str, nn.Parameter]) -> None:
    """Put new parameter objects in the same places."""
    for name, parameter in weights.items():
        owner, _, last = name.rpartition(".")
        setattr(block.get_submodule(owner), last, parameter)


def test_a_thousand_alternating_swaps_are_one_recording() -> None:
    twins = [Block(seed) for seed in range(2)]
    weights = [{name: nn.Parameter(p.detach().clone()) for name, p in block.named_parameters()} for block in twins]
    block = Block(0)
    captured = capture(block)
    for i in range(1000):
        swap(block, weights[i % 2])
        x = rand(8, 64, seed=i % 13)
        same(captured(x), twins[i % 2](x))
        if i < 10:
            kinds = [event.kind for event in recordings(captured).events]
    now = recordings(captured)
    assert (now.recordings, now.eager_calls, now.rebinds) == (1, 0, 998)
    assert kinds.count("calibrate") == (1 if ON_CUDA else 0)
    later = {event.kind for event in now.events}  # the log keeps the latest events
    assert "rebind" in later
    assert "calibrate" not in later


class Layer(nn.Module):
    """Attention and a gated network, as in Llama."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        make: Any = {"bias": False, "device": DEVICE, "dtype": torch.bfloat16}
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, **make) for _ in range(4))
        self.gate, self.up = nn.Linear(size, 3 * size, **make), nn.Linear(size, 3 * size, **make)
        self.down = nn.Linear(3 * size, size, **make)
        self.before, self.after = (nn.RMSNorm(size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.after(x)
        mixed: Tensor = self.down(functional.silu(self.gate(h)) * self.up(h))
        return x + mixed


class Stack(nn.Module):
    def __init__(self, seed: int, layers: int = 3, size: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, size, device=DEVICE, dtype=torch.bfloat16)
        self.layers = nn.ModuleList([Layer(size, 4) for _ in range(layers)])
        for number, parameter in enumerate(self.parameters()):
            parameter.data = rand(*parameter.shape, seed=1000 * seed + number, dtype=torch.bfloat16)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.t()


def test_all_weights_of_a_small_llama() -> None:
    twins = [Stack(seed) for seed in range(3)]
    weights = [{name: nn.Parameter(p.detach().clone()) for name, p in stack.named_parameters()} for stack in twins]
    model = Stack(0)
    captured = capture(model)
    for i in range(24):
        swap(model, weights[i % 3])
        ids = torch.arange(16, device=DEVICE).view(1, 16) * (i + 1) % 97
        same(captured(ids), twins[i % 3](ids))
    assert (recordings(captured).recordings, recordings(captured).eager_calls) == (1, 0)
    assert recordings(captured).rebinds == 22


def test_data_is_replaced() -> None:
    """``.data`` is set: the same tensor object has other memory."""
    block, twin = Block(1), Block(1)
    captured = capture(block)
    for i in range(10):
        if i > 2:
            old = block.linear.weight.data
            block.linear.weight.data = rand(64, 64, seed=i)
            twin.linear.weight.data = rand(64, 64, seed=i)
            spoil(old)
        x = rand(4, 64, seed=i)
        same(captured(x), twin(x))
    assert counts(captured)[1] == 1
    assert recordings(captured).rebinds == 7


def test_one_tensor_after_another_is_learned() -> None:
    block, twin = Block(1), Block(1)
    captured = capture(block)
    for i in range(12):
        if i > 2:
            name = ["linear.weight", "norm.weight", "linear.bias"][i % 3]
            for module in (block, twin):
                owner, _, last = name.rpartition(".")
                fresh = rand(*module.get_parameter(name).shape, seed=i)
                setattr(module.get_submodule(owner), last, nn.Parameter(fresh))
        x = rand(4, 64, seed=i)
        same(captured(x), twin(x))
    assert counts(captured)[1] == 1
    assert sum(event.kind == "calibrate" for event in recordings(captured).events) == (3 if ON_CUDA else 0)


def test_views_inside_larger_storages() -> None:
    """A weight is a piece of one big tensor, at another offset or in another one each time."""
    bigs = [rand(64 * 64 * 8, seed=i) for i in range(2)]
    holder: Any = Holder(lambda self, x: x @ self.w, {"w": bigs[0][: 64 * 64].view(64, 64)})
    captured = capture(holder)
    for i in range(16):
        begin = 64 * 64 * (i % 7) + (64 if i % 4 == 3 else 0)
        holder.w = bigs[i % 2][begin : begin + 64 * 64].view(64, 64)
        x = rand(8, 64, seed=i)
        same(captured(x), x @ holder.w)
    assert counts(captured)[1] == 1


@pytest.mark.parametrize("shift", [1, 4, 16, 32])
def test_an_address_with_another_alignment(shift: int) -> None:
    """An address of another alignment is not bound, as vectorised kernels were chosen for the alignment at
    recording."""
    big = rand(64 * 64 * 3, seed=1)
    holder: Any = Holder(lambda self, x: x @ self.w + self.w.sum(), {"w": big[: 64 * 64].view(64, 64)})
    captured = capture(holder)
    for i in range(14):
        begin = 64 * 64 + shift if i % 3 == 2 else 64 * 64 * (i % 2)
        holder.w = big[begin : begin + 64 * 64].view(64, 64)
        x = rand(8, 64, seed=i)
        same(captured(x), x @ holder.w + holder.w.sum())


def test_a_moved_tensor_that_another_one_is_a_view_of() -> None:
    base = rand(8, 64, seed=0)
    holder: Any = Holder(lambda self, x: x * self.base.sum(0) + self.part[0], {"base": base, "part": base[2:4]})
    captured = capture(holder)
    kept = []
    for i in range(12):
        if i > 2:
            kept.append(holder.base)
            base = rand(8, 64, seed=i)
            if i % 3:
                holder.base, holder.part = base, base[2:4]
            else:
                holder.base = base  # the view still has the old memory
        x = rand(4, 64, seed=i)
        same(captured(x), x * holder.base.sum(0) + holder.part[0])


def test_two_views_of_one_tensor_move_together() -> None:
    flat = rand(2, 64, 64, seed=0)
    holder: Any = Holder(lambda self, x: x @ self.a @ self.b, {"a": flat[0], "b": flat[1]})
    captured = capture(holder)
    for i in range(12):
        if i > 2:
            flat = rand(2, 64, 64, seed=i)
            holder.a, holder.b = flat[i % 2], flat[1 - i % 2]
        x = rand(4, 64, seed=i)
        same(captured(x), x @ holder.a @ holder.b)


def test_static_arguments_that_move() -> None:
    """Four caches, written by the body, in turn and at fresh addresses."""

    @capture(static=["cache"])
    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache.mul_(0.5).add_(x)
        return cache.cumsum(0)

    ours, theirs = [rand(8, 8, seed=i) for i in range(4)], [rand(8, 8, seed=i) for i in range(4)]
    for i in range(40):
        if i in (20, 30):
            ours[i % 4], theirs[i % 4] = rand(8, 8, seed=i), rand(8, 8, seed=i)
        x = rand(8, 8, seed=100 + i)
        actual = f(x, ours[i % 4])
        same(actual, eager(f, x, theirs[i % 4]))
        same(ours, theirs)
    assert counts(f)[1] == 1 + KEPT
    assert counts(f)[3] == 0
    assert recordings(f).rebinds == 38 - KEPT


@pytest.mark.parametrize("shift", [0, 16])
def test_a_bound_argument_that_is_state_too(shift: int) -> None:
    """The argument's alignment differs from the recorded one, so it is copied; the copy must not hide that state on the
    same memory is written."""
    holder, twin = (types.SimpleNamespace(a=rand(32, seed=1)[16:]) for _ in range(2))

    @capture(inputs="bind")
    def f(y: Tensor) -> Tensor:
        y.mul_(0.5).add_(holder.a)
        return y.sum()

    def plain(y: Tensor) -> Tensor:
        y.mul_(0.5).add_(twin.a)
        return y.sum()

    kept = []
    for i in range(12):
        ours, theirs = rand(48, seed=i), rand(48, seed=i)
        own, twin_argument = (ours[:16], theirs[:16]) if i < 8 else (ours[shift:][:16], theirs[shift:][:16])
        if i > 3:  # after the first moves, which are compared with eager
            holder.a, twin.a = (tensor[16:32] if i >= 8 else rand(32, seed=i)[16:] for tensor in (ours, theirs))
        kept.append((ours, holder.a))  # kept, so that each call has other addresses
        same(f(own), plain(twin_argument))
        same(ours, theirs)
    assert counts(f)[1] == 1
    assert bool(counts(f)[3]) == bool(shift), "eager only where the argument is the state"


class Linear(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(rand(32, 32, seed=seed))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def test_a_node_in_the_middle_of_a_chain() -> None:
    nets = [Linear(i) for i in range(4)]
    captured = [capture(net) for net in nets]
    for i in range(14):
        if i > 2 and i % 2:
            nets[1].weight = nn.Parameter(rand(32, 32, seed=10 + i))
        if i > 6:
            nets[3].weight = nn.Parameter(rand(32, 32, seed=30 + i))
        x = rand(4, 32, seed=i)
        ours, theirs = x, x
        kept = []
        for layer, net in zip(captured, nets, strict=True):
            ours, theirs = layer(ours), torch.tanh(theirs @ net.weight)
            kept.append((ours, theirs))
        for actual, expected in kept:
            same(actual, expected)
        del ours, kept, actual
    assert [counts(layer)[1] for layer in captured] == [1, 1, 1, 1]
    assert [recordings(layer).rebinds for layer in captured] == [0, 6, 0, 7]


def test_one_function_at_several_nodes_of_a_path() -> None:
    net = Linear(0)
    captured = capture(net)
    for i in range(12):
        mark_step_begin()
        if i > 3:
            net.weight = nn.Parameter(rand(32, 32, seed=10 + i))
        x = rand(4, 32, seed=i)
        actual = captured(captured(captured(x)))
        expected = x
        for _ in range(3):
            expected = torch.tanh(expected @ net.weight)
        same(actual, expected)
        del actual
    assert counts(captured)[1] == 3


def test_many_recordings_have_grown_the_pool_since() -> None:
    """The pool has grown since: a second capture may place its memory differently from the first."""
    net = Linear(0)
    captured, growing = capture(net), [capture(lambda x, n=n: (x.repeat(n, 1) * 2).relu() + 1) for n in (1, 30, 5000)]
    for i in range(12):
        if i > 5:
            net.weight = nn.Parameter(rand(32, 32, seed=10 + i))
        x = rand(4, 32, seed=i)
        same(captured(x), torch.tanh(x @ net.weight))
        for n, grow in zip((1, 30, 5000), growing, strict=True):
            same(grow(x), (x.repeat(n, 1) * 2).relu() + 1)
    assert counts(captured)[1] == 1


def test_a_static_that_the_body_writes_and_gives_back() -> None:
    def body(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        self.total.add_(x)
        return self.total, self.total[1:] * 2

    ours: Any = Holder(body, {"total": rand(4, 4)})
    theirs: Any = Holder(body, {"total": rand(4, 4)})
    captured = capture(ours)
    for i in range(10):
        if i > 2 and i % 2:
            ours.total, theirs.total = rand(4, 4, seed=i), rand(4, 4, seed=i)
        before = ours.total._version
        actual = captured(rand(4, 4, seed=40 + i))
        same(actual, theirs(rand(4, 4, seed=40 + i)))
        assert actual[0] is ours.total
        assert ours.total._version > before
    assert counts(captured)[1] == 1 + KEPT


@needs_cuda
def test_replays_on_another_stream() -> None:
    block, twin = Block(0), Block(0)
    captured = capture(block)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(20):
        stream = streams[i % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if i > 2:
                weight = rand(64, 64, seed=i)
                block.linear.weight, twin.linear.weight = nn.Parameter(weight), nn.Parameter(weight.clone())
            x = rand(4, 64, seed=i)
            same(captured(x), twin(x))
        torch.cuda.current_stream().wait_stream(stream)
    assert counts(captured)[1] == 1


@needs_cuda
def test_a_table_that_lacks_a_word_is_found_and_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address in a parameter block is missing from the table: the call gives eager's result, a finding names the
    kernel, and it is recorded anew."""
    learn = AddressTable.learn
    monkeypatch.setattr(AddressTable, "learn", lambda self, words: learn(self, words[:1]))
    holder: Any = Holder(lambda self, x: torch.tanh(x @ self.w) + self.w.sum(0), {"w": rand(64, 64)})
    captured = capture(holder)
    for i in range(12):
        if i > 2:
            old, holder.w = holder.w, rand(64, 64, seed=i)
            spoil(old)
        x = rand(4, 64, seed=i)
        same(captured(x), torch.tanh(x @ holder.w) + holder.w.sum(0))
    (refused,) = finding(captured, "CG109")
    assert "differs from eager" in refused.why
    assert "(" in refused.why
    assert sum(event.kind == "calibrate" for event in recordings(captured).events) == 1
    assert counts(captured)[1] > 1


@needs_cuda
def test_without_the_driver_it_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_params, "missing", lambda: "the package cuda-bindings is not installed")
    block, twin = Block(0), Block(0)
    captured = capture(block)
    for i in range(10):
        if i > 2:
            block.linear.weight, twin.linear.weight = (nn.Parameter(rand(64, 64, seed=i)) for _ in range(2))
        x = rand(4, 64, seed=i)
        same(captured(x), twin(x))
    assert recordings(captured).rebinds < 7
    assert len(finding(captured, "CG804")) == 1
    assert not finding(captured, "CG109")


@needs_cuda
# recordings with breaks are not bound to moved tensors
@pytest.mark.filterwarnings("ignore:CG901:capture.CaptureWarning")
@pytest.mark.parametrize("why", ["no driver", "breaks"])
def test_what_is_refused_without_a_second_capture_costs_no_other_recording(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of an output in use, which was taken for the refused capture, is given back."""
    if why == "no driver":
        monkeypatch.setattr(kernel_params, "missing", lambda: "the package cuda-bindings is not installed")
    first, block, twin = capture(lambda x: x * 2), Block(0), Block(0)

    def body(x: Tensor, block: Block) -> Tensor:
        y: Tensor = block(x)
        return y + 1 if why == "breaks" and bool(y.sum() > -1e9) else y

    captured = capture(body)
    for i in range(10):
        if i > 3:
            block.linear.weight, twin.linear.weight = (nn.Parameter(rand(64, 64, seed=i)) for _ in range(2))
        x = rand(4, 64, seed=i)
        same(captured(first(x), block), body(x * 2, twin))
    assert not [event for event in recordings(captured).events if event.kind == "drop" and "is kept" in event.detail]


@needs_cuda
def test_a_driver_that_refuses_costs_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(self: kernel_params._KernelEditor, executable: Any, values: Any) -> bool:
        del executable, values
        calls.append(self)
        return len(calls) % 2 == 1

    monkeypatch.setattr(kernel_params._KernelEditor, "set", refuse)
    block, twin = Block(0), Block(0)
    captured = capture(block)
    for i in range(10):
        if i > 2:
            fresh = Block(i)
            swap(block, {name: nn.Parameter(p.detach().clone()) for name, p in fresh.named_parameters()})
            swap(twin, {name: nn.Parameter(p.detach().clone()) for name, p in fresh.named_parameters()})
        x = rand(4, 64, seed=i)
        same(captured(x), twin(x))
    assert counts(captured)[1] > 1


def test_a_body_that_raises_in_the_second_capture() -> None:
    """The call raises what eager raises, and later calls go on."""
    trouble: list[str] = []

    class Net(Linear):
        @override
        def forward(self, x: Tensor) -> Tensor:
            if trouble:
                raise ValueError(trouble[0])
            return super().forward(x)

    net = Net(0)
    captured = capture(net)
    for i in range(4):
        x = rand(4, 32, seed=i)
        same(captured(x), torch.tanh(x @ net.weight))
    net.weight = nn.Parameter(rand(32, 32, seed=9))
    if ON_CUDA:
        trouble.append("no")
        with pytest.raises(ValueError, match="no"):
            captured(rand(4, 32, seed=5))
        trouble.clear()
    for i in range(6):
        x = rand(4, 32, seed=i)
        same(captured(x), torch.tanh(x @ net.weight))
