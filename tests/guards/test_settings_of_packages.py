"""Settings that packages keep in C, per thread or per context, and the functions that read them."""

from __future__ import annotations

import calendar
import decimal
import faulthandler
import functools
import gc
import importlib
import json
import locale
import logging
import os
import random
import reprlib
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.compiler.config

from capture import capture, recordings
from tests.support.device import DEVICE, EXECUTES

Setting = tuple[Callable[[], float], Callable[[Any], Any], Any, Any]


def _third() -> float:
    return float(decimal.Decimal(1) / decimal.Decimal(3))


def _text() -> float:
    return float(len(str(np.array([1.23456789]))))


def _trapped() -> float:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(np.float64(1) / np.float64(0) > 0)
    except FloatingPointError:
        return 2.0


_ARRAY = np.array([1.23456789])


def _precision_by_a_name_of_its_own() -> Callable[[], float]:
    import numpy as own

    return lambda: float(own.get_printoptions()["precision"])


def _no_trace(*_: object) -> None:
    """Traces nothing."""


SETTINGS: dict[str, Setting] = {
    "level of the first logger": (
        lambda: 2.0 if logging.getLogger().isEnabledFor(logging.INFO) else 3.0, logging.root.setLevel, 30, 10,
    ),
    "object of a library that only its code reads": (
        lambda: float(calendar.firstweekday()), calendar.setfirstweekday, 0, 3,
    ),
    "attribute of such an object": (
        lambda: float(len(reprlib.repr([*range(9)]))), lambda most: setattr(reprlib.aRepr, "maxlist", most), 6, 2,
    ),
    "encoder": (
        lambda: float(len(json.dumps([1, 2]))),
        lambda text: setattr(json._default_encoder, "item_separator", text), ", ", ",   ",  # type: ignore[attr-defined]
    ),
    "variable of the environment": (
        lambda: float(os.environ.get("CAPTURE_TEST_SCALE", "2")),
        lambda text: os.environ.update(CAPTURE_TEST_SCALE=text), "2", "3",
    ),
    "name of the first thread": (
        lambda: float(len(threading.main_thread().name)),
        lambda name: setattr(threading.main_thread(), "name", name), "MainThread", "First",
    ),
    "what its own code sets where it is missing": (
        lambda: float(len(tempfile.gettempdir())), lambda folder: setattr(tempfile, "tempdir", folder), "/tmp", "/usr",
    ),
    "getter of a closed package": (
        lambda: socket.getdefaulttimeout() or 1.0, socket.setdefaulttimeout, None, 2.0,
    ),
    "getter that gives an object": (
        lambda: 2.0 if sys.gettrace() is None else 3.0, sys.settrace, None, _no_trace,
    ),
    "package in a closure cell": (
        _precision_by_a_name_of_its_own(), lambda digits: np.set_printoptions(precision=digits), 8, 2,
    ),
    "decimal flags": (
        lambda: 2.0 if decimal.getcontext().flags[decimal.Inexact] else 3.0,
        lambda value: decimal.getcontext().flags.__setitem__(decimal.Inexact, value), False, True,
    ),
    "printoptions, of an array that is there": (
        lambda: float(len(str(_ARRAY))), lambda digits: np.set_printoptions(precision=digits), 8, 2,
    ),
    "object of a library": (
        lambda: float(torch._tensor_str.PRINT_OPTS.precision),
        lambda digits: torch.set_printoptions(precision=digits), 4, 2,
    ),
    "module whose class keeps its values in a table": (
        lambda: float(len(torch.compiler.config.dynamic_sources)),
        lambda names: setattr(torch.compiler.config, "dynamic_sources", names), "", "several",
    ),
    "recursion limit, of an imported module": (
        lambda: float(importlib.import_module("sys").getrecursionlimit()), sys.setrecursionlimit, 3000, 3001,
    ),
    "decimal": (_third, lambda prec: setattr(decimal.getcontext(), "prec", prec), 28, 4),
    "np.errstate": (_trapped, lambda mode: np.seterr(divide=mode), "warn", "raise"),
    "np.geterr": (
        lambda: 2.0 if np.geterr()["over"] == "warn" else 3.0, lambda mode: np.seterr(over=mode), "warn", "ignore",
    ),
    "np.printoptions": (_text, lambda digits: np.set_printoptions(precision=digits), 8, 2),
    "recursion limit": (lambda: float(sys.getrecursionlimit()), sys.setrecursionlimit, 3000, 3001),
    "switch interval": (sys.getswitchinterval, sys.setswitchinterval, 0.005, 0.01),
    "gc.isenabled": (
        lambda: float(gc.isenabled()), lambda value: gc.enable() if value else gc.disable(), True, False,
    ),
    "gc.get_threshold": (
        lambda: float(gc.get_threshold()[0]), lambda most: gc.set_threshold(most, *gc.get_threshold()[1:]), 700, 701,
    ),
    "faulthandler": (
        lambda: float(faulthandler.is_enabled()),
        lambda value: faulthandler.enable(2) if value else faulthandler.disable(), True, False,
    ),
    "locale": (
        lambda: float(len(locale.setlocale(locale.LC_NUMERIC))),
        lambda name: locale.setlocale(locale.LC_NUMERIC, name), "C", "C.UTF-8",
    ),
    "random.getstate": (lambda: float(random.getstate()[1][0] % 1000), random.seed, 1, 2),
    "np get_state": (lambda: float(np.random.get_state()[1][0] % 1000), np.random.seed, 1, 2),  # type: ignore[index]
    "torch.initial_seed": (lambda: float(torch.initial_seed()), torch.manual_seed, 1, 2),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_a_package(name: str, request: pytest.FixtureRequest) -> None:
    read, put, first, second = SETTINGS[name]
    before = random.getstate(), np.random.get_state(), sys.getrecursionlimit(), faulthandler.is_enabled()

    def restore() -> None:
        put(first)
        random.setstate(before[0])
        np.random.set_state(before[1])
        sys.setrecursionlimit(before[2])
        SETTINGS["faulthandler"][1](before[3])

    request.addfinalizer(restore)

    @capture
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * read()

    x = torch.ones(3, device=DEVICE)
    with torch.no_grad():
        for value in (first, second, first):
            put(value)
            replays = recordings(body).replays
            for _ in range(5):
                assert torch.equal(body(x), x * read())
            assert recordings(body).replays > replays


@pytest.mark.filterwarnings("ignore:CG204")
def test_a_function_of_a_module_logs_once_the_level_says_so(
    caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(functools.partial(logging.root.setLevel, logging.root.level))
    logging.root.setLevel(logging.WARNING)

    @capture
    def body(x: torch.Tensor) -> torch.Tensor:
        logging.debug("said by the body")
        return x * 2

    x = torch.ones(3, device=DEVICE)
    with torch.no_grad():
        for _ in range(6):
            body(x)
        assert 4 - (not EXECUTES) <= recordings(body).replays <= 4  # by keys alone are levels looked up
        assert not caplog.records
        logging.getLogger().setLevel(logging.DEBUG)
        for _ in range(3):
            body(x)
        assert len(caplog.records) == 3


@pytest.mark.filterwarnings("ignore:CG204")
def test_a_warning_that_is_shown_each_time() -> None:
    @capture
    def body(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("said by the body", UserWarning, stacklevel=1)
        return x * 2

    x = torch.ones(3, device=DEVICE)
    with torch.no_grad():
        for is_always in (True, False, True):
            with warnings.catch_warnings(record=True) as said:
                warnings.filterwarnings("always" if is_always else "once", "said by")
                for _ in range(6):
                    body(x)
            assert sum("said by" in str(warning.message) for warning in said) == (6 if is_always else 1)


def test_a_warning_that_is_shown_once_costs_one_more_watched_run() -> None:
    @capture
    def body(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("said once by the body", UserWarning, stacklevel=1)
        return x * 2

    x = torch.ones(3, device=DEVICE)
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(6):
            body(x)
    assert len(said) == 1
    assert recordings(body).replays == 3


def test_filters_that_turn_warnings_into_errors_later() -> None:
    @capture
    def body(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("said and raised by the body", UserWarning, stacklevel=1)
        return x * 2

    x = torch.ones(3, device=DEVICE)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            body(x)
        assert recordings(body).replays == 2
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match="said and raised"):
            body(x)


def test_a_default_value_of_a_name_that_is_changed_in_place() -> None:
    def body(x: torch.Tensor, *, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    captured, x = capture(body), torch.ones(3, device=DEVICE)
    assert body.__kwdefaults__ is not None
    with torch.no_grad():
        for value in (2.0, 3.0, 2.0):
            body.__kwdefaults__["factor"] = value
            replays = recordings(captured).replays
            for _ in range(5):
                assert torch.equal(captured(x), x * value)
            assert recordings(captured).replays > replays
