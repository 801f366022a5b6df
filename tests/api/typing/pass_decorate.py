"""What type checkers must accept, and the types they must find. Checked by mypy, never run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, assert_type

import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import (
    CaptureOptions,
    CapturePlan,
    Dim,
    Event,
    Explanation,
    Finding,
    LoadReport,
    Recordings,
    Report,
    WarmedCase,
    WarmupReport,
    capture,
    config,
    explain,
    ladder,
    load_plans,
    mark_step_begin,
    plans,
    recordings,
    release,
    report,
    reset,
    save_plans,
    sizes_seen,
    step,
    warmup,
)


@capture
def bare(x: Tensor, scale: float = 2.0, *rest: Tensor, deep: bool = False, **more: int) -> Tensor:
    return x * scale


@capture(static=["x"], rng="graphsafe", max_recordings=3, outputs="borrow", fallback="error", warmup=2)
def with_options(x: Tensor, /, names: list[str]) -> tuple[Tensor, int]:
    return x, len(names)


@capture(verify="first", guards=[lambda: 1, lambda: "x"], name="named")
def also_with_options(x: Tensor) -> dict[str, Tensor]:
    return {"x": x}


x = torch.zeros(3)


assert_type(bare(x), Tensor)
assert_type(bare(x, 1.0, x, x, deep=True, p=1, q=2), Tensor)
assert_type(bare(x=x, scale=3.0), Tensor)
assert_type(with_options(x, ["a"]), tuple[Tensor, int])
assert_type(with_options(x, names=["a"]), tuple[Tensor, int])
assert_type(also_with_options(x), dict[str, Tensor])


def plain(x: Tensor, scale: float) -> Tensor:
    return x * scale


def rows(x: Tensor, dim: int, count: int) -> Tensor:
    return x.narrow(dim, 0, 1).expand(count)


batch = Dim((1, 2, 4), name="batch")
bucketed = capture(
    plain,
    buckets={"x": {0: batch, 1: "pow2"}, "y": {0: [1, 2]}},
    fill={"x": rows, "y": "repeat"},
    tolerance={"output": (1e-5, 0.0), "cache": 1e-3},
)
assert_type(bucketed(x, scale=1.0), Tensor)
capture(plain, buckets={"x": {0: "pow2"}}, fill=-1, tolerance=1e-5)
assert_type(ladder({1: 3, 4: 1}, rungs=2), tuple[int, ...])
assert_type(sizes_seen(bucketed), dict[str, dict[int, int]])
assert_type(capture(plain), Callable[[Tensor, float], Tensor])  # type: ignore[assert-type] # names are kept, too
assert_type(capture(plain)(x, scale=1.0), Tensor)
assert_type(capture(plain, max_recordings=2)(x=x, scale=1.0), Tensor)
callback: Callable[[Tensor, float], Tensor] = capture(plain)


class Net(nn.Module):
    @override
    @capture
    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        return x

    @capture(outputs="clone")
    def step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    @staticmethod
    @capture
    def fixed(x: Tensor) -> Tensor:
        return x

    @classmethod
    def make(cls) -> Net:
        return cls()


class Derived(Net):
    """An override of a captured method needs no other type than one of a plain method."""

    @override
    @capture
    def forward(self, x: Tensor, flag: bool = True) -> Tensor:
        return x


class Undecorated(Net):
    @override
    def forward(self, x: Tensor, flag: bool = True) -> Tensor:
        return x


net = Net()
assert_type(net.forward(x), Tensor)
assert_type(net.forward(x, flag=True), Tensor)
assert_type(net.step(x), tuple[Tensor, Tensor])
assert_type(Net.forward(net, x, True), Tensor)
assert_type(Net.fixed(x), Tensor)
assert_type(net.fixed(x=x), Tensor)

assert_type(capture(net), Net)
assert_type(capture(net, max_recordings=2), Net)
assert_type(capture(nn.Linear(3, 3)), nn.Linear)
assert_type(capture(nn.Sequential(nn.Linear(3, 3)), rng="eager"), nn.Sequential)
assert_type(capture(net).step(x), tuple[Tensor, Tensor])


class CallableObject:
    def __call__(self, x: Tensor) -> Tensor:
        return x


assert_type(capture(CallableObject(), name="object")(x), Tensor)
assert_type(capture(CallableObject().__call__)(x), Tensor)

explanation = explain(net.step)(x)
assert_type(explanation, Explanation)
assert_type(explain(bare)(x, 1.0, deep=True), Explanation)
assert_type(explanation.outcome, Literal["record", "eager"])
assert_type(explanation.plan, CapturePlan)
assert_type(explanation.findings, tuple[Finding, ...])
assert_type(explanation.findings_at_least("eager"), tuple[Finding, ...])

warmup(net.step)(x)
warmup(bare)(x, scale=1.0)
warm_one: Callable[[Tensor], None] = warmup(also_with_options)
warmed = warmup(net.step).cases([(x,), {"x": x}, ((x,), {}), ((), {"x": x})])
assert_type(warmed, WarmupReport)
assert_type(warmup(net).cases(((torch.zeros(size),) for size in (1, 2)), progress=True), WarmupReport)
by_name: list[dict[str, Tensor]] = [{"x": x}]
positional: list[tuple[Tensor, float]] = [(x, 1.0)]
warmup(bare).cases(by_name, progress=None)
warmup(bare).cases(positional)
assert_type(warmed.recorded, int)
assert_type(warmed.skipped, tuple[WarmedCase, ...])
assert_type(warmed.cases[0].status, Literal["recorded", "known", "skipped"])
assert_type(warmed.cases[0].code, str | None)

assert_type(plans(net.step), tuple[CapturePlan, ...])
assert_type(recordings(net.step), Recordings)
assert_type(recordings(bare).replays, int)
assert_type(recordings(bare).events, tuple[Event, ...])
assert_type(recordings(bare).events[0].nbytes, int)
assert_type(report(), Report)
reset()
reset(net.step)
release(bare)
assert_type(save_plans("folder"), int)
assert_type(load_plans("folder"), LoadReport)

mark_step_begin()
with step():
    bare(x)
with config.patch(enabled=False, verify="always") as settings:
    assert_type(settings.enabled, bool)
    assert_type(settings.verify, Literal["off", "first", "always"])

options: CaptureOptions = {"max_recordings": 3, "rng": "forbid"}
assert_type(capture(plain, **options)(x, 1.0), Tensor)
