"""A subclass of tensors whose ``__torch_function__`` notes what is asked of it: only the body asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from typing_extensions import override

from capture import capture


@pytest.mark.filterwarnings("ignore:CG107", "ignore:CG501")
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_subclass_sees_what_the_body_does_alone(needs_grad: bool) -> None:
    asked: list[str] = []

    class Noting(torch.Tensor):
        @classmethod
        @override
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def body(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    def runs(function: Any) -> list[list[str]]:
        told = []
        for number in range(6):
            x = torch.full((3,), float(number)).requires_grad_(needs_grad).as_subclass(Noting)
            asked.clear()
            function(x)
            told.append(list(asked))
        return told

    assert runs(capture(body)) == runs(body)


@pytest.mark.filterwarnings("ignore:CG107", "ignore:CG208")
def test_a_subclass_that_prints_what_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    class Printing(torch.Tensor):
        @classmethod
        @override
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            print(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    captured = capture(lambda x: x * 2 + 1)
    with torch.no_grad():
        for number in range(5):
            x = torch.full((3,), float(number)).as_subclass(Printing)
            capsys.readouterr()
            captured(x)
            assert capsys.readouterr().out == "mul\nadd\n"
