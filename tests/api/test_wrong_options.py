"""What cannot be captured and options that are wrong are named; ``CAPTURE_ENABLED=0`` runs the body."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from capture import AnnotationError, capture, config, recordings
from tests.support.decorated import CapturedNet, Net, bits, module_level, scaled
from tests.support.decorated import fresh as fresh


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"statik": ["x"]}, "unknown option 'statik' for capture .did you mean 'static'"),
        ({"wurst": 1}, "unknown option 'wurst'.*known: static, rng"),
        ({"rng": "graphsave"}, "rng='graphsave' is not a choice .did you mean 'graphsafe'.*'eager', 'forbid'"),
        ({"outputs": "keep"}, "outputs='keep' is not a choice.*'preserve', 'borrow', 'clone'"),
        ({"outputs": 3}, "outputs=3 is not a choice"),
        ({"outputs": ["preserve"]}, "is not a choice"),
        ({"fallback": None}, "fallback=None is not a choice"),
        ({"verify": True}, "verify=True is not a choice; known: 'off', 'first', 'always'"),
        ({"max_recordings": 0}, "max_recordings=0 is below 1"),
        ({"max_recordings": -3}, "max_recordings=-3 is below 1"),
        ({"max_recordings": 2.0}, "max_recordings= takes a whole number, got 2.0 .float"),
        ({"max_recordings": True}, "max_recordings= takes a whole number"),
        ({"max_recordings": "5"}, "max_recordings= takes a whole number, got '5'"),
        ({"warmup": 0}, "warmup=0 is below 1"),
        ({"warmup": None}, "warmup= takes a whole number"),
        ({"static": "x"}, r"write static=\['x'\]"),
        ({"static": 3}, "static= takes a list of names, got int"),
        ({"static": [3]}, "static= takes names, got 3"),
        ({"static": [""]}, "static= takes names"),
        ({"static": {"x": 1}}, "static= takes a list of names, got dict"),
        ({"static": ["scal"]}, "static='scal' names no parameter .did you mean 'scale'.*known: x, scale"),
        ({"static": ["scal.0.k"]}, "did you mean 'scale'"),
        ({"static": ["self.w"]}, "static='self.w' names no parameter"),
        ({"guards": 3}, "guards= takes a list of callables"),
        ({"guards": [3]}, "guards= takes a list of callables"),
        ({"guards": lambda: 1}, "guards= takes a list of callables"),
        ({"silence": "CG201"}, r"write silence=\['CG201'\]"),
        ({"silence": ["host-sync"]}, "silence=: 'host-sync' is no code of a finding, as CG201 is"),
        ({"silence": 201}, "silence= takes a list of codes, got 201"),
        ({"name": ""}, "name= takes a non-empty string"),
        ({"name": 3}, "name= takes a non-empty string, got 3"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        capture(scaled, **options)
    with pytest.raises(AnnotationError, match=message):
        capture(**options)(scaled)


def test_annotation_errors_are_type_errors() -> None:
    assert issubclass(AnnotationError, TypeError)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Net, "not the class Net; decorate its forward"),
        (dict, "not the class dict"),
        (3, "takes a callable, got int"),
        ("forward", "takes a callable, got str"),
        (property(scaled), "takes a callable, got property"),
        (module_level, "module_level is captured already"),
        (CapturedNet(), "captured already"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_captured_is_refused(target: Any, message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        capture(target)
    if not isinstance(target, nn.Module):
        with pytest.raises(AnnotationError, match=message):
            capture(max_recordings=2)(target)


def test_double_decoration_is_refused() -> None:
    with pytest.raises(AnnotationError, match="captured already"):
        capture(capture(scaled))
    with pytest.raises(AnnotationError, match="captured already"):
        capture(capture(Net()))
    with pytest.raises(AnnotationError, match="captured already"):
        capture(CapturedNet().step)


def test_static_names_may_lie_below_parameters() -> None:
    capture(scaled, static=["x", "scale.0.k", "x[0]"])
    capture(lambda *args, **kwargs: args[0] + 1, static=["anything"])


def test_disabled_runs_the_body() -> None:
    captured = capture(scaled)
    x = torch.randn(3)
    with config.patch(enabled=False):
        for _ in range(4):
            assert bits(captured(x)) == bits(scaled(x))
    assert recordings(captured).recordings == 0
