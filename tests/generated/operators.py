"""torch's own database of operators, each called captured and eagerly with the database's samples, bit for bit.

``python -m tests.generated.operators forward|gradients SHARD SHARDS`` prints a line for each sample that differs, and
how much was compared. It is a process of its own, as importing the database freezes torch's global flags.
"""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

from capture import capture, config, recordings
from capture.torch_private import operator_watch
from tests.support.device import DEVICE, rng_state, use_device

SAMPLES, CALLS = 2, 4  # samples of each dtype; calls: watched, recorded, then replays (with gradients two are watched)
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
NO_VALUES = ("empty", "new_empty")
OTHER_WAY = set() if operator_watch.has_key else {
    "cumprod", "linalg_cond", "linalg_eigvalsh", "linalg_matrix_norm", "linalg_norm", "linalg_svdvals", "linalg_vander",
    "masked_cumprod", "masked_prod", "matmul", "__rmatmul__", "norm_nuc", "prod",
}  # fmt: skip
"""torch computes these, or their gradients, in another way, to the last bits, where a watch is a dispatch mode
(``docs/limits.md``)."""
OTHER_STRIDES = set() if operator_watch.has_key else {"ormqr"}
"""Operators whose gradients have other strides under a dispatch mode."""
UNSTEADY = {"linalg_lstsq", "linalg_lstsq_grad_oriented"}
"""Operators of which eager's last bits depend on memory addresses, too (LAPACK's ``gelsy``)."""
Body = Callable[..., Any]


def main(kind: str, shard: int, shards: int) -> None:
    """Compare every ``shards``-th operator."""
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    use_device()
    compared = replayed = 0
    check = forward if kind == "forward" else gradients
    for op in sorted(op_db, key=lambda op: str(op.formatted_name))[shard::shards]:
        if op.name.startswith(NO_VALUES):
            continue
        for sample in samples(op, needs_grad=kind == "gradients"):
            for name, replays, difference in check(op, sample):
                compared, replayed = compared + 1, replayed + bool(replays)
                if difference is not None:
                    print(f"differs: {name} {op.formatted_name}: {difference}")
    print(f"compared {compared}, of which {replayed} were replayed")


def samples(op: Any, *, needs_grad: bool) -> Iterator[Any]:
    """A few samples of each dtype."""
    for dtype in DTYPES[:2] if needs_grad else DTYPES:
        if not op.supports_dtype(dtype, DEVICE.type) or (needs_grad and not op.supports_autograd):
            continue
        torch.manual_seed(0)
        random.seed(0)
        yield from itertools.islice(op.sample_inputs(DEVICE, dtype, requires_grad=needs_grad), SAMPLES)


def forward(op: Any, sample: Any) -> Iterator[tuple[str, int, str | None]]:
    """Compare calls without gradients."""

    def body(*args: Any) -> Any:
        return op.op(*args, **sample.kwargs)

    with torch.no_grad():
        yield from compared("a call of", op, body, capture(body), sample)


def gradients(op: Any, sample: Any) -> Iterator[tuple[str, int, str | None]]:
    """Compare a captured function with a backward pass outside, and one with the backward pass inside."""

    def body(*args: Any) -> Any:
        return op.op(*args, **sample.kwargs)

    def step(function: Body) -> Body:
        def run(*args: Any) -> Any:
            made = function(*args)
            wanted = [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
            results = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, made)
            return results, torch.autograd.grad(loss_of(made), wanted, allow_unused=True)

        return run

    inner = capture(body)
    yield from compared("autograd through", op, step(body), step(inner), sample, inner)
    yield from compared("a step of", op, step(body), capture(step(body)), sample)


def loss_of(made: Any) -> Tensor:
    """A sum of all results with different weights, so that an exchange of two shows."""
    leaves = [leaf for leaf in tree_flatten(made)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    plain = [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in leaves]
    return torch.stack([(leaf * (number + 1.5)).sum() for number, leaf in enumerate(plain)]).sum()


def compared(
    name: str, op: Any, theirs: Body, ours: Body, sample: Any, counted: Body | None = None
) -> Iterator[tuple[str, int, str | None]]:
    """What was compared, how many calls were replays, and the first difference; nothing where eager itself raises or
    gives other results a second time."""
    given = (sample.input, *sample.args)
    try:
        torch.manual_seed(5)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            once = theirs(*fresh(given))
        torch.manual_seed(5)
        if difference(once, theirs(*fresh(given)), op) is not None:
            return
    except Exception:  # noqa: BLE001 - any error: the sample does not run on this device
        return
    adds_in_any_order = any("does not have a deterministic implementation" in str(warning.message) for warning in said)
    first_difference = None
    for number in range(CALLS):
        mine, twin_arguments = fresh(given), fresh(given)
        torch.manual_seed(5 + number)
        expected, state = theirs(*twin_arguments), rng_state()
        torch.manual_seed(5 + number)
        close = difference(ours(*mine), expected, op, closely=adds_in_any_order)
        first_difference = first_difference or close or difference(mine, twin_arguments, op, closely=adds_in_any_order)
        if not torch.equal(rng_state(), state):
            first_difference = first_difference or "another state of the generator"
    yield name, recordings(counted or ours).replays, first_difference


def fresh(given: Any) -> Any:
    """Copies of the arguments, in memory of their own."""
    return tree_map(
        lambda leaf: leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf,
        given,
    )


def difference(mine: Any, theirs: Any, op: Any, *, closely: bool = False) -> str | None:
    """How two results differ first; ``closely``: by more than their last bits."""
    (my_leaves, my_structure), (their_leaves, their_structure) = tree_flatten(mine), tree_flatten(theirs)
    if my_structure != their_structure:
        return f"{my_structure} instead of {their_structure}"
    for a, b in zip(my_leaves, their_leaves, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            difference_here = _difference(a, b, op, closely=closely or op.formatted_name in OTHER_WAY | UNSTEADY)
        else:
            difference_here = (
                None if type(a) is type(b) and (a == b or (a != a and b != b)) else f"{a!r} instead of {b!r}"
            )
        if difference_here is not None:
            return difference_here
    return None


def _difference(a: Tensor, b: Tensor, op: Any, *, closely: bool) -> str | None:
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return f"{a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
    if a.layout is not torch.strided or a.is_nested or a.is_quantized:
        return None  # calls with these run eagerly
    if not a.numel():
        return None
    if a.stride() != b.stride() and a.numel() > 1 and op.formatted_name not in OTHER_STRIDES:
        return f"strides {a.stride()} instead of {b.stride()}"
    if a.is_conj() != b.is_conj():
        return "conjugated lazily in one of them"
    ours, theirs = (leaf.detach().resolve_conj().resolve_neg().contiguous() for leaf in (a, b))
    if torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)):
        return None
    if closely and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True):
        return None
    return f"values {ours} instead of {theirs}"


if __name__ == "__main__":
    with config.patch(cache=False):
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
