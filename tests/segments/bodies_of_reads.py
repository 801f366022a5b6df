"""More kinds of reads: arrays, texts, lists, comparisons, members, loops, sizes. See ``bodies``.

Values are rounded, or compared first, where a program is to come to the same ones again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.segments.bodies import Arguments, Function, Program, draw, one, two

PROGRAMS: dict[str, Callable[[], Program]] = {}
UNSTEADY: set[str] = set()
"""Names of those that read another value in every call."""
EAGER: set[str] = set()
"""Names of those that no recording is made of."""


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__] = make
    return make


def _add(function: Function, arguments: Arguments) -> None:
    PROGRAMS[function.__name__] = lambda: (function, arguments, None)


def plain(function: Function) -> Function:
    """A function of one tensor without state."""
    _add(function, one)
    return function


def unsteady(function: Function) -> Function:
    UNSTEADY.add(function.__name__)
    return plain(function)


def eager(function: Function) -> Function:
    EAGER.add(function.__name__)
    return plain(function)


def signs(x: Tensor) -> Tensor:
    """Signs of the first two numbers: few values, which come again in later calls."""
    return x[0, :2].sign()


# ---- arrays


@plain
def array(x: Tensor) -> Tensor:
    y = x * 2
    n = int(signs(y).numpy(force=True).sum())
    return y + n


@plain
def as_array(x: Tensor) -> Tensor:
    y = x * 2
    a = np.asarray(signs(y).cpu())
    return y + float(a[0])


@plain
def argmax_of_array(x: Tensor) -> Tensor:
    best = int(np.argmax(x[0, :3].argsort().cpu().numpy()))
    return x[best] * 2


@plain
def array_of_flags(x: Tensor) -> Tensor:
    mask = (x[:1, :3] > 0).cpu().numpy()
    return x + 1 if mask.any() else x - int(mask.size)


@plain
def array_detached(x: Tensor) -> Tensor:
    a = (x[0, 0] > 0).detach().cpu().numpy()
    return x.exp() if a else x.sin()


@plain
def array_of_all_values(x: Tensor) -> Tensor:
    a = torch.arange(12, device=x.device).cpu().numpy()
    return x * int(a.sum())


@plain
def array_read_late(x: Tensor) -> Tensor:
    s = signs(x)
    a = s.cpu().numpy()
    y = x * 2 + s.sum()
    return y + float(a[1])


@eager
def array_written(x: Tensor) -> Tensor:
    s = signs(x) * 1
    a = s.cpu().numpy()
    a[:] = 3
    return x + s.sum() + float(a[0])


@eager
def array_of_what_is_written_later(x: Tensor) -> Tensor:
    s = signs(x) * 1
    a = s.cpu().numpy()
    s.add_(x[0, :2])
    return x * (2 if a[0] > 0.5 else 3)


@plain
def array_of_what_was_written_before(x: Tensor) -> Tensor:
    s = signs(x) * 1
    s.add_(1)
    a = s.cpu().numpy()
    return x * (2 if a[0] > 0.5 else 3)


@unsteady
def array_of_other_values(x: Tensor) -> Tensor:
    return x * float(np.median(x.cpu().numpy()))


@plain
def array_to_tensor(x: Tensor) -> Tensor:
    a = signs(x).cpu().numpy() * 3
    return x[:, :2] + torch.tensor(a.tolist(), device=x.device)


@eager
def array_viewed_and_written_later(x: Tensor) -> Tensor:
    s = signs(x) * 1
    a = s.cpu().numpy()[1:]
    s.mul_(x[0, :2])
    return x * (2 if a[0] > 0.5 else 3)


@plain
def array_gone_before_a_write(x: Tensor) -> Tensor:
    s = signs(x) * 1
    n = int(s.cpu().numpy().sum())
    s.mul_(x[0, :2])
    return x * n + s.sum()


@eager
def array_written_and_gone(x: Tensor) -> Tensor:
    s = signs(x) * 1
    s.cpu().numpy()[0] = 7
    return x + s.sum()


@plain
def array_returned(x: Tensor) -> Any:
    return x * 2, signs(x).cpu().numpy()


# ---- lists


@plain
def long_list(x: Tensor) -> Tensor:
    steps = (x[:1, :2] > 0).repeat(3, 2).long().tolist()
    return x * sum(steps[0]) + steps[2][1]  # type: ignore[no-any-return]


@plain
def long_flat_list(x: Tensor) -> Tensor:
    flags = torch.cat([signs(x)] * 6).tolist()
    return x + 1 if flags[0] == 1.0 and len(flags) == 12 else x - 1


@unsteady
def long_list_of_other_values(x: Tensor) -> Tensor:
    return x * max(max(one) for one in x.tolist())  # type: ignore[no-any-return]


@plain
def listed_after_a_write(x: Tensor) -> Tensor:
    s = torch.zeros(3, 4, device=x.device)
    s[:, :2] += signs(x)
    return x * sum(s.tolist()[0])  # type: ignore[no-any-return]


@plain
def unpacked(x: Tensor) -> Tensor:
    first, second = signs(x)
    return x * float(first) + float(second)


@plain
def iterated(x: Tensor) -> Tensor:
    total = x * 0
    for sign in signs(x):
        total = total + x if sign > 0 else total - x
    return total


@plain
def rows_iterated(x: Tensor) -> Tensor:
    result = x[0] * 0
    for row in x[:2]:
        if row[0] > 0:
            result = result + row
    return result


# ---- texts


@plain
def text(x: Tensor) -> Tensor:
    return x + len(repr(signs(x)))


@plain
def text_decides(x: Tensor) -> Tensor:
    return x + 1 if "-" in str(signs(x)) else x - 1


@plain
def formatted(x: Tensor) -> Tensor:
    return x + 1 if f"{signs(x)[0]:.0f}" == "1" else x - 1


@plain
def text_as_a_key(x: Tensor) -> Tensor:
    known = {"True": 1, "False": 2}
    return x * known[str((x[0, 0] > 0).item())]


@unsteady
def text_of_other_values(x: Tensor) -> tuple[Tensor, str]:
    return x * 2, f"mean {x.mean():.5f}"


# ---- comparisons


@plain
def equal(x: Tensor) -> Tensor:
    return x + 1 if torch.equal(signs(x), signs(-x)) else x * (2 if torch.equal(x > 9, x < -9) else 3)


@plain
def all_close(x: Tensor) -> Tensor:
    return x + 1 if torch.allclose(signs(x), torch.ones(2, device=x.device)) else x - 1


@plain
def is_in_list(x: Tensor) -> Tensor:
    s = x[0, 0].sign()
    return x + 1 if s in [torch.ones((), device=x.device), torch.zeros((), device=x.device)] else x - 1


@plain
def number_in_tensor(x: Tensor) -> Tensor:
    return x + 1 if 1 in signs(x) else x - 1


@plain
def index_in_list(x: Tensor) -> Tensor:
    found = [-1, 0, 1].index(signs(x)[1])  # type: ignore[arg-type]
    return x * (found + 1)


@plain
def sorted_by_value(x: Tensor) -> Tensor:
    first, second = sorted([x[0, 0].sign(), x[0, 1].sign()])
    return x * first + second


@plain
def maximum_of_numbers(x: Tensor) -> Tensor:
    best: Tensor = max(x[0, 0], x[1, 1])
    return x * best


@plain
def asserted(x: Tensor) -> Tensor:
    assert (x < 100).all(), "too large"
    return x + 1


# ---- numbers that Python counts by


@plain
def counted(x: Tensor) -> Tensor:
    for _ in range((x[0, :2] > 0).sum().item()):  # type: ignore[arg-type]
        x = x * 2
    return x + 1


@plain
def sliced_by(x: Tensor) -> Tensor:
    n = (x[:, 0] > 0).sum()
    return x[: max(int(n), 1)] * 2


@plain
def index_of_a_list(x: Tensor) -> Tensor:
    functions = [torch.sin, torch.cos, torch.tanh]
    return functions[(x[0] > 0).sum() % 3](x)


@plain
def repeated(x: Tensor) -> Tensor:
    return x.repeat(int((x[0, :2] > 0).sum()) + 1, 1) * 2


@plain
def padded(x: Tensor) -> Tensor:
    lengths = (x[:2] > 0).sum(1).cpu()
    return torch.nn.functional.pad(x, (0, int(lengths.max()))) + 1


@plain
def loop_until(x: Tensor) -> Tensor:
    for step in range(4):
        x = x * 0.5
        if x.abs().max() < 0.5:
            return x + step
    return x


# ---- sizes


@plain
def unique_count(x: Tensor) -> Tensor:
    return x * torch.unique(signs(x)).numel()  # type: ignore[no-any-return]


@plain
def unique_of_rows(x: Tensor) -> Tensor:
    values, inverse = torch.unique(x[:, :1].sign(), dim=0, return_inverse=True)
    return values.sum() + inverse * 2.0  # type: ignore[no-any-return]


@plain
def consecutive(x: Tensor) -> Tensor:
    return torch.unique_consecutive(x[0].sign()) * 2  # type: ignore[no-any-return]


@plain
def nonzero_as_tuple(x: Tensor) -> Tensor:
    rows, columns = (x[:2, :2] > 0).nonzero(as_tuple=True)
    return x[rows, columns] * 2


@plain
def counted_size(x: Tensor) -> Tensor:
    at = (x[0] > 0).nonzero()
    return x * at.shape[0] + (at.sum() if len(at) else 1)


@plain
def mask_of_rows(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0].sum(0) + 1


@plain
def filled_by_mask(x: Tensor) -> Tensor:
    y = x * 2
    y[y[:, 0] > 0] = x[x[:, 0] > 0]
    return y


@plain
def repeated_by_counts(x: Tensor) -> Tensor:
    return torch.repeat_interleave(x, (x[:, 0] > 0).long() + 1, dim=0) * 2


@plain
def split_by_counts(x: Tensor) -> Tensor:
    n = int((x[0, :3] > 0).sum())
    first, second = x.split([n, 4 - n])
    return torch.cat([second, first * 2])


@plain
def bin_counts(x: Tensor) -> Tensor:
    return torch.bincount((x[0] > 0).long(), minlength=2) * 2 + x[0, 0]


# ---- together with state


@program
def array_and_state() -> Program:
    kept = torch.zeros(4, 4)

    def body(x: Tensor, y: Tensor) -> Tensor:
        kept.add_(x)
        if (kept[0, :2] > 0).cpu().numpy().all():
            y.mul_(2)
        return kept * y

    return body, two, [kept]


@program
def text_and_draws() -> Program:
    def body(x: Tensor) -> Tensor:
        y = x + torch.rand_like(x)
        if "-" in str(signs(y)):
            y = y + torch.rand_like(y)
        return y

    return body, one, None


@program
def list_and_exception() -> Program:
    kept = torch.zeros(4, 4)

    def body(x: Tensor) -> Tensor:
        kept.add_(1)
        flags = (x[0, :2] > 0.5).repeat(6).tolist()
        if flags[0]:
            raise ValueError(f"too large: {flags}")
        return kept + x if flags[1] else kept - x

    return body, lambda n: (draw(n),), [kept]


def names() -> list[str]:
    """Names of the programs that are expected to replay."""
    return [name for name in PROGRAMS if name not in UNSTEADY | EAGER]


def settled() -> dict[str, Any]:
    """The programs that are expected to replay, by name."""
    return {name: PROGRAMS[name] for name in names()}
