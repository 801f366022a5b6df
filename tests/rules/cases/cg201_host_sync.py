"""Cases in which CG201 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import HostSync
from capture.rules.case import Case
from tests.support.samples import case, where

FIRES: list[Case] = [
    case(host_syncs=(HostSync(op=op, where=where(12, code)),))
    for op, code in (
        ("aten._local_scalar_dense.default", "if x.sum() > 0:"),
        ("aten.is_nonzero.default", "while mask.any():"),
        ("aten.equal.default", "if torch.equal(a, b):"),
        ("tolist", "ids.tolist()"),
        ("Tensor.numpy", "x.numpy()"),
        ("__repr__", "print(x)"),
        ("mylib.peek.default", "peek(x)"),
        ("aten._local_scalar_dense.default", "return loss.item()"),
        ("aten._local_scalar_dense.default", "return x / x.max().item()"),
        ("aten._local_scalar_dense.default", "assert torch.isfinite(x).all()"),
        ("aten._local_scalar_dense.default", "rows = x[: int(count)]"),
        ("aten._local_scalar_dense.default", "weigh(x)"),
        ("aten.allclose.default", "torch.allclose(a, b)"),
    )
] + [
    case(
        host_syncs=(HostSync(op="aten._local_scalar_dense.default", where=where(12, code), through=through),),
        devices=devices,
    )
    for through, code, devices in (
        ("torch.optim.adam.Adam.step", "optimizer.step()", ("cpu",)),
        ("torch.optim.adam.Adam.step", "optimizer.step()", ("cuda:0",)),
        ("torch.optim.radam.RAdam.step", "optimizer.step()", ("cpu",)),
        ("torch.distributions.normal.Normal.__init__", "Normal(mean, std)", ("cpu",)),
        ("torch.amp.grad_scaler.GradScaler.step", "scaler.step(optimizer)", ("cuda:0",)),
        ("torch.nn.utils.clip_grad.clip_grad_norm_", "clip_grad_norm_(parameters, 1.0)", ("cpu",)),
        ("mylib.sampling.draw", "mylib.sampling.draw(x)", ("cpu",)),
    )
]
FIRES += [
    case(host_syncs=(HostSync(op="aten._local_scalar_dense.default", where=where(), is_compared=True),)),
    case(
        host_syncs=(HostSync(op="aten._local_scalar_dense.default", where=where(), is_compared=True),),
        unsteady_reads="what it reads is another value in call after call: 2 branches led to 0 replays",
    ),
]
NEAR_MISSES: list[Case] = [
    case(host_syncs=(HostSync(op="aten.nonzero.default", where=where(), data_dependent_shape=True),))
]
