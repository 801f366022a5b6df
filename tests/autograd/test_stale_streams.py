"""Nodes that belong to other streams, while something is captured: torch's setting, put on and off."""

from __future__ import annotations

import pytest
import torch

from capture.torch_private import autograd


@pytest.mark.parametrize("before", [False, True])
def test_it_is_as_before_afterwards(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    state = [before]
    monkeypatch.setattr(autograd, "_override", lambda on: state.__setitem__(0, on))
    monkeypatch.setattr(autograd, "_is_overridden", lambda: state[0])
    with autograd.stale_streams_overridden():
        assert state == [True]
        with autograd.stale_streams_overridden():
            assert state == [True]
        assert state == [True]
    assert state == [before]
    with pytest.raises(KeyError), autograd.stale_streams_overridden():
        raise KeyError
    assert state == [before]


def test_without_the_setting_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "_override", None)
    with autograd.stale_streams_overridden():
        assert not autograd.TAKES_STALE_STREAMS or not torch._C._override_stale_capture_stream()


def test_torch_has_it_from_2_13_on() -> None:
    major, minor = map(int, torch.__version__.split(".")[:2])
    assert ((major, minor) >= (2, 13)) == autograd.TAKES_STALE_STREAMS
    if autograd.TAKES_STALE_STREAMS:
        with autograd.stale_streams_overridden():
            assert torch._C._override_stale_capture_stream()
        assert not torch._C._override_stale_capture_stream()
