"""Asserts that a function replays and equals eager, for the tests of programs that use ``capture``.

``assert_replayed`` and ``assert_only_replays`` fail where a call was no replay and give the finding that says why;
``assert_no_eager`` fails where something became eager; ``assert_equal_to_eager`` runs the same calls eagerly and
captured and compares all they leave, bit for bit. ``capture.testing.plugin`` has ``assert_no_eager`` as a fixture;
it alone imports pytest. The page is ``docs/testing.md``.
"""

from __future__ import annotations

from capture.testing.equality import assert_equal_to_eager as assert_equal_to_eager
from capture.testing.replays import assert_no_eager as assert_no_eager
from capture.testing.replays import assert_only_replays as assert_only_replays
from capture.testing.replays import assert_replayed as assert_replayed

__all__ = ["assert_equal_to_eager", "assert_no_eager", "assert_only_replays", "assert_replayed"]
