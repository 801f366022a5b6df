"""What type checkers must refuse. ``# E: code`` names the error that mypy must give on that line, and on no other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureOptions, Dim, capture, config, explain, ladder, recordings, warmup


def plain(x: Tensor, scale: float) -> Tensor:
    return x * scale


@capture
def decorated(x: Tensor, scale: float = 1.0, *, deep: bool = False) -> Tensor:
    return x * scale


@capture(max_recordings=2)
def with_options(x: Tensor) -> Tensor:
    return x


class Net(nn.Module):
    @capture
    def forward(self, x: Tensor) -> Tensor:
        return x

    @capture(rng="eager")
    def step(self, x: Tensor, flag: bool) -> Tensor:
        return x


x = torch.zeros(3)
net = Net()

# Options
capture(statik=["x"])  # E: call-overload
capture(plain, max_recording=2)  # E: call-overload
capture(net, outputz="clone")  # E: call-overload
capture(rng="graphsave")  # E: call-overload
capture(outputs="keep")  # E: call-overload
capture(plain, fallback="raise")  # E: call-overload
capture(verify=True)  # E: call-overload
capture(gradients="never")  # E: call-overload
capture(max_recordings="5")  # E: call-overload
capture(plain, warmup=1.5)  # E: call-overload
capture(static=3)  # E: call-overload
capture(static=[3])  # E: list-item
capture(guards=[1])  # E: list-item
capture(buckets={"x": (1, 2)})  # E: dict-item
capture(buckets={"x": {0: "pow3"}})  # E: dict-item
capture(buckets={"x": {"0": (1, 2)}})  # E: dict-item
capture(buckets=[1, 2])  # E: call-overload
capture(buckets={"x": {0: (1, 2)}}, fill={"x": None})  # E: dict-item
capture(buckets={"x": {0: (1, 2)}}, tolerance="small")  # E: call-overload
Dim((1, 2), "batch")  # E: call-arg
ladder([1, 2], rungs=3)  # E: arg-type
capture(name=3)  # E: call-overload
capture(net, max_recordings=None)  # E: call-overload
capture(3)  # E: call-overload
options: CaptureOptions = {"max_recordings": "3"}  # E: typeddict-item
misspelt: CaptureOptions = {"max_recording": 3}  # E: typeddict-unknown-key
with config.patch(enable=False):  # E: call-arg
    pass
with config.patch(verify="sometimes"):  # E: arg-type
    pass

# Calls of decorated functions
decorated("x")  # E: arg-type
decorated(x, "2")  # E: arg-type
decorated(x, 1.0, True)  # E: call-arg
decorated(x, scale=[1.0])  # E: arg-type
decorated(x, deeper=True)  # E: call-arg
decorated()  # E: call-arg
with_options(1)  # E: arg-type
with_options(y=x)  # E: call-arg
net.forward("x")  # E: arg-type
net.step(x)  # E: call-arg
net.step(x, flag="yes")  # E: arg-type
wrong: int = decorated(x)  # E: assignment
also_wrong: nn.Linear = capture(net)  # E: assignment
capture(plain)(x)  # E: call-arg
capture(plain, rng="eager")(x, "1")  # E: arg-type

# Free functions
explain(net.step)(x)  # E: call-arg
explain(net.step)(x, "yes")  # E: arg-type
explain(decorated)(x).outcom  # E: attr-defined
warmup(decorated)(1)  # E: arg-type
warmup(decorated)(x, deeper=True)  # E: call-arg
warmup(decorated).cases([x])  # E: list-item
warmup(decorated).cases([[x]])  # E: list-item
warmup(decorated).cases([{3: x}])  # E: dict-item
warmup(decorated).cases([(x,)], True)  # E: call-arg
warmup(decorated).cases([(x,)], progress="yes")  # E: arg-type
warmup(decorated).cases([(x,)]).recorded = 3  # E: misc
warmup(decorated).cases([(x,)]).cases[0].status = "known"  # E: misc
warmup(decorated).case([(x,)])  # E: attr-defined
recordings(decorated).recording  # E: attr-defined
recordings(decorated).events[0].ms = 3.0  # E: misc


class Derived(Net):
    @override
    @capture
    def forward(self, x: int) -> Tensor:  # E: override
        return torch.zeros(x)


class CaptureDifference(Net):
    @override
    def forward(self, x: int) -> Tensor:  # E: override
        return torch.zeros(x)
