"""Attributes of torch that are replaced while a body is watched: what is there meanwhile, and afterwards."""

from __future__ import annotations

import types
from typing import Any

import torch
from typing_extensions import override

from capture.observe.probes.host_reads import host_reads
from capture.torch_private.monkeypatch import made_once, num_replaced, replaced
from tests.support.device import DEVICE


class Base:
    def inherited(self) -> str:
        return "base"


class Kind(Base):
    own: Any = "own"

    @override
    def __repr__(self) -> str:
        return "plain"


class Below(Kind):
    pass


def test_attributes_of_a_class_are_there_for_a_block() -> None:
    others: dict[str, Any] = {"own": "other", "inherited": lambda _: "other", "__repr__": lambda _: "shown", "new": 1}
    made: Any = Below()
    for _ in range(3):  # what Python has cached of the class is dropped each time
        assert (made.own, made.inherited(), repr(made), hasattr(made, "new")) == ("own", "base", "plain", False)
        with replaced(Kind, others):
            assert (made.own, made.inherited(), repr(made), made.new) == ("other", "other", "shown", 1)
            with replaced(Kind, {"own": "third"}), replaced(Base, {"inherited": None}):
                assert (made.own, made.inherited()) == ("third", "other")
            assert made.own == "other"
    assert (made.own, made.inherited(), repr(made), hasattr(made, "new")) == ("own", "base", "plain", False)
    assert "inherited" not in vars(Kind)
    assert num_replaced() == 0


def test_names_of_a_module_are_there_for_a_block() -> None:
    module: Any = types.ModuleType("a_module")
    module.number = 1
    with replaced(module, {"number": 2, "more": 3}):
        assert (module.number, module.more) == (2, 3)
    assert module.number == 1
    assert not hasattr(module, "more")


def test_a_stand_in_is_made_again_for_another_original() -> None:
    module: Any = types.ModuleType("a_module")
    module.number = 1
    stand_ins = made_once(lambda name, original: (name, original))
    first = stand_ins(module, ("number",))
    assert stand_ins(module, ("number",))["number"] is first["number"]
    module.number = 2
    assert stand_ins(module, ("number",)) == {"number": ("number", 2)}


def test_a_stand_in_that_outlives_its_run_is_the_original() -> None:
    told = list[str]()

    def noted(name: str, tensor: torch.Tensor, reads: Any, args: Any, kwargs: Any) -> Any:
        told.append(name)
        return reads(tensor, *args, **kwargs)

    x = torch.ones(12, device=DEVICE)
    with host_reads(told.append, noted, lambda _: None, lambda *_: None):
        kept, numbers = torch.Tensor.tolist, x.tolist()
    assert {*told} == {"tolist"}  # on a device the copy to the host is told, too
    in_the_run = [*told]
    assert kept(x) == numbers == [1.0] * 12
    assert told == in_the_run
