"""Run where a wheel of the library is installed: imports it under both names, and checks that a function is replayed.

    python tests/packaging/smoke.py

Nothing of the checkout is imported: run so, Python looks for modules in this folder and in the environment.
"""

from __future__ import annotations

import importlib
import sys

import torch

import capture
import capture.testing
import torch_capture


def main() -> int:
    """0 if all is as it should be."""
    assert torch_capture is capture
    assert importlib.import_module("torch_capture.testing") is capture.testing
    weight = torch.randn(8, 8)
    function = torch_capture.capture(lambda x: torch.relu(x @ weight) + 1)
    x = torch.randn(2, 8)
    for _ in range(5):
        assert torch.equal(function(x), torch.relu(x @ weight) + 1)
    replays = capture.recordings(function).replays
    assert replays == 3, replays
    print(
        f"capture {capture.__version__} of {capture.__file__}: {replays} of 5 calls replayed, torch {torch.__version__}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
