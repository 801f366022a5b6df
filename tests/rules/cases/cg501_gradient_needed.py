"""Cases in which CG501 fires, and near misses in which it does not."""

from __future__ import annotations

from attrs import evolve

from capture.core.facts import GradientObstacle, GradientUse
from capture.rules.case import Case
from tests.support.samples import argument, case, tensor, where

FIRES: list[Case] = [
    case(
        gradients=tuple(
            GradientUse(path=path, op="aten.addmm.default", where=where(line))
            for line, path in enumerate(("self.a.weight", "self.b.weight", "self.b.weight", "x"), 88)
        )
    ),
    case(gradients=(GradientUse(path=None, op="aten.mul.Tensor"),)),
    case(gradients=(GradientUse(path=None, op=""),)),
    case(
        gradients=(GradientUse(path="x", op="aten.mul.Tensor", where=where()),),
        gradient_obstacles=(
            GradientObstacle(path="output.1", reason="output.1 is no new tensor (input-view)"),
            GradientObstacle(path=None, reason="the body uses register_hook", where=where(90)),
        ),
    ),
]
NEAR_MISSES: list[Case] = [case(placeholders=(argument("x", tensor=evolve(tensor(4), requires_grad=True)),))]
