"""Two processes under NCCL, a GPU each: programs that `tests/test_ranks.py` and `tests/test_ddp.py` run under gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.collectives import collectives
from tests.ranks import two_ranks
from tests.test_ddp import training

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_collectives(tmp_path: Path) -> None:
    two_ranks(collectives, tmp_path, device="cuda", seconds=120)


def test_training(tmp_path: Path) -> None:
    two_ranks(training, tmp_path, device="cuda", seconds=120)
