"""Options for findings of one code: ``silence`` shows no warning, ``refuse`` raises."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from capture import CaptureWarning, UncapturableError, capture, config, recordings
from tests.support.processes import python_path


def reads(x: Tensor) -> Tensor:
    return x + len(np.from_dlpack(x.cpu()))


def test_a_code_is_silenced_and_still_reported() -> None:
    captured = capture(reads)
    with warnings.catch_warnings(), config.patch(silence=frozenset({"CG201"})):
        warnings.simplefilter("error")
        for _ in range(3):
            captured(torch.ones(2))
    assert "CG201" in {finding.code for finding in recordings(captured).findings}
    unsilenced = capture(reads)
    with config.patch(silence=frozenset({"CG202"})), pytest.warns(CaptureWarning, match="CG201"):
        unsilenced(torch.ones(2))


def test_a_code_is_silenced_for_one_function() -> None:
    captured = capture(silence=["CG201"])(reads)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(torch.ones(2))
    assert "CG201" in {finding.code for finding in recordings(captured).findings}
    with pytest.warns(CaptureWarning, match="CG201"):
        capture(silence=["CG202"])(reads)(torch.ones(2))


def test_a_code_is_refused() -> None:
    with config.patch(refuse=frozenset({"CG201"})), pytest.raises(UncapturableError, match="CG201"):
        capture(reads)(torch.ones(2))
    with config.patch(refuse=frozenset({"CG202"})), pytest.warns(CaptureWarning, match="CG201"):
        capture(reads)(torch.ones(2))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("text", "said"), [("cg201, CG906", ""), ("201", "'201' is no code of a finding")])
def test_codes_of_the_environment(text: str, said: str) -> None:
    code = "from capture.core import config; print(sorted(config.current().silence))"
    environment = {**os.environ, "CAPTURE_SILENCE": text, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert said in done.stderr
    assert said or done.stdout == "['CG201', 'CG906']\n"
