"""What a newcomer reads after each of some eighty mistakes, as on file; and that what the message tells to do works.

Where a later version takes a mistake without a word, its file says so: ``make golden``, and read the diff.
"""

from __future__ import annotations

import gc
import re
import warnings

import pytest
import torch

import capture
import tests.messages.further_mistakes
import tests.messages.misuse  # noqa: F401 - notes its mistakes
from capture import config, recordings
from tests.messages.mistakes import MISTAKES, Mistake, Program, replays_of
from tests.support.device import DEVICE
from tests.support.samples import check_golden

BY_NAME = {each.name: each for each in MISTAKES}


def said_by(program: Program) -> list[str]:
    """Warnings and the error of one run, or that there was none."""
    torch.manual_seed(0)
    captured = None
    with config.patch(cache=False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            captured = program()
        except (capture.CaptureError, TypeError, ValueError) as error:
            return [f"{type(error).__name__}: {error}"]
        finally:
            gc.collect()
        said = [str(warning.message) for warning in caught if issubclass(warning.category, capture.CaptureWarning)]
    if said or captured is None:
        return said
    counted = recordings(captured)
    return [f"(nothing is said: {counted.recordings} recordings, {'' if counted.replays else 'no '}replays)"]


def comparable(text: str) -> str:
    """The text without lines and times, which change."""
    text = re.sub(r"\(\S*?([\w.-]+):\d+\)", r"(\1)", text)
    text = re.sub(r"was [\d.]+ in one run and [\d.]+ in the next", "was # in one run and # in the next", text)
    return re.sub(r"\((\d+|less than 1) ms\)", "(# ms)", text)


def test_none_is_lost() -> None:
    assert len(BY_NAME) == len(MISTAKES) >= 75


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_what_is_said(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = comparable("\n\n".join(said_by(BY_NAME[name].wrong)))
    assert "aten" not in text, text
    places = re.findall(r"where: .*?\(([\w.-]+)\)", text)
    assert set(places) <= {"further_mistakes.py", "mistakes.py", "misuse.py"}, text
    assert text.count("  more:") <= 3, text
    if DEVICE.type == "cpu":  # a GPU has other devices and options in its messages
        check_golden(f"mistakes/{name}.txt", text + "\n")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("each", MISTAKES, ids=lambda each: each.name)
def test_what_the_message_tells_to_do_works(each: Mistake, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    with config.patch(cache=False), warnings.catch_warnings():
        warnings.simplefilter("error", capture.CaptureWarning)
        assert replays_of(each.right()) > 0
