"""Host time of a call as the number of a module's parameters, or of a function's recordings, grows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.gpu.graphs import Hands, compiled
from benchmarks.gpu.setting import Outcome, Setting, host_us, ratio, sides_of
from benchmarks.timing import Figure, Side
from capture import capture, config, recordings

WIDTH, LAYERS = 64, 100  # two parameters a layer
COUNTS = (1, 10, 1000)


def measure(setting: Setting) -> Outcome:
    """Median of 7 rounds."""
    modules, wrong = _modules(setting)
    with config.patch(drop_slow=False):  # very many shapes, each asked for three times: nothing shows that it will pay
        counts, more = _recordings(setting)
    return Outcome(figures=(*modules, *counts), wrong=(*wrong, *more))


def _net(setting: Setting) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(setting.pick(LAYERS, 4))]
    return nn.Sequential(*layers).to(setting.device).requires_grad_(False)


def _modules(setting: Setting) -> tuple[list[Figure], list[str]]:
    plain, ours, reduced = (_net(setting) for _ in range(3))
    capture(ours)
    compiled_net = compiled(reduced, setting)
    x = torch.randn(1, WIDTH, device=setting.device)
    buffer = torch.empty_like(x)
    hand = Hands(setting).capture(lambda: plain(buffer))

    def by_hand() -> Tensor:
        buffer.copy_(x)
        hand.replay()
        return hand.output

    sides: dict[str, Callable[[], Tensor]] = {
        "by hand: copy_, replay": by_hand,
        "ours": lambda: ours(x),
        'compile(mode="reduce-overhead")': lambda: compiled_net(x),
    }
    expected = plain(x)
    wrong = [name for name, side in sides.items() for _ in range(4) if not torch.allclose(side(), expected, atol=1e-4)]
    wrong += [] if torch.equal(ours(x), expected) else [f"{ours} differs"]
    wrong += [] if recordings(ours).recordings == 1 else [f"not one recording: {recordings(ours)}"]
    times = sides_of(host_us(list(sides.values()), setting, calls=setting.pick(1000, 20), burst=setting.pick(20, 10)))
    name = f"module with {2 * LAYERS} parameters"
    figures = [
        Figure(name=f"{name}, {side}", unit="us a call, host", values=values)
        for side, values in zip(sides, times, strict=True)
    ]
    figures.append(ratio(f"{name}, ours", "/ by hand", times[1], times[0], 1.3))
    figures.append(ratio(f"{name}, ours", "/ reduce-overhead", times[1], times[2], None))
    return figures, wrong


def _recordings(setting: Setting) -> tuple[list[Figure], list[str]]:
    """Time calls with one shape while this many others are recorded."""
    sides: list[Side] = []
    wrong = []
    counts = COUNTS if setting.on_gpu else (1, 10)
    for count in counts:
        captured = capture(lambda x: x * 2.0 + 1.0, max_recordings=count + 1, name=f"with {count} recordings")
        for size in range(1, count + 1):
            x = torch.randn(size, device=setting.device)
            for _ in range(3):  # the third is a replay; a result that was held would have a recording of its own
                is_equal = torch.equal(captured(x), x * 2.0 + 1.0)
            if not is_equal:
                wrong.append(f"size {size} differs")
        if recordings(captured).recordings != count:
            wrong.append(f"{recordings(captured)} instead of {count} recordings")
        last = torch.randn(1, device=setting.device)
        sides.append(lambda captured=captured, last=last: captured(last))  # type: ignore[misc]
    times = sides_of(host_us(sides, setting, calls=setting.pick(2000, 20), burst=setting.pick(100, 10)))
    figures = [
        Figure(name=f"a function with {count} recordings", unit="us a call, host", values=values)
        for count, values in zip(counts, times, strict=True)
    ]
    figures += [
        ratio(f"a function with {count} recordings", "/ with 1", values, times[0], 1.05)
        for count, values in zip(counts[1:], times[1:], strict=True)
    ]
    return figures, wrong
