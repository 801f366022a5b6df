"""An island: a function that logs in every call, in the middle of a step that is recorded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from capture import capture, explain, island, recordings
from examples.gain import gain

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(*[module for _ in range(60) for module in (nn.Linear(16, 16), nn.Tanh())])
head = nn.Linear(16, 4)
largest: list[float] = []


@island
def note(hidden: Tensor) -> None:
    largest.append(hidden.abs().max().item())  # Python: it runs in every call


def forward(x: Tensor) -> Tensor:
    hidden = net(x)
    note(hidden)
    out: Tensor = head(hidden)
    return out


captured = capture(forward)
with torch.no_grad():
    inputs = [torch.randn(4, 16, generator=torch.Generator().manual_seed(number)) for number in range(20)]
    equal = all(torch.equal(captured(x), forward(x)) for x in inputs)
    print("equal to eager:", equal, "- noted alike:", largest[::2] == largest[1::2])
    print("replays:", recordings(captured).replays, "- eager calls:", recordings(captured).eager_calls)
    explanation = explain(forward)(inputs[0])
    print(explanation.segments())
    print(gain(lambda: forward(inputs[0]), lambda: captured(inputs[0])))
    print("why: two segments are replayed instead of 121 operators; between them Python runs one small function")
