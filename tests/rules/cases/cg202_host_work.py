"""Cases in which CG202 fires, and near misses in which it does not."""

from __future__ import annotations

from capture.core.facts import HostWork
from capture.rules.case import Case
from tests.support.samples import case, where

SEEDING = "seeding a generator, or setting its state,"  # as ``observe.run_notes`` has it
FIRES: list[Case] = [
    case(
        devices=("cpu", "cuda:0"),
        host_work=(
            HostWork(op="aten.add.Tensor", kind="compute", where=where()),
            HostWork(op="aten._to_copy.default", kind="copy", where=where(90, "x.cpu()")),
        ),
    ),
    case(devices=("cpu",), host_work=(HostWork(op="mylib.wait.default", kind="unsafe", where=where()),)),
    case(host_work=(HostWork(op="drawing from numpy.random", kind="unsafe", where=where(9, "np.random.rand()")),)),
    case(host_work=(HostWork(op="using the file log", kind="unsafe", where=where(9, "log.write(text)")),)),
    case(host_work=(HostWork(op=SEEDING, kind="unsafe", where=where(9, "torch.manual_seed(0)")),)),
    case(host_work=(HostWork(op="taking from batches", kind="unsafe", where=where(9, "next(batches)")),)),
    case(host_work=(HostWork(op="aten.lift_fresh.default", kind="array", where=where(9, "torch.tensor(array)")),)),
    case(host_work=(HostWork(op="mylib.peek.default", kind="address", where=where()),)),
]
NEAR_MISSES: list[Case] = [
    case(devices=("cpu",), host_work=(HostWork(op="aten.add.Tensor", kind="compute", where=where()),))
]
