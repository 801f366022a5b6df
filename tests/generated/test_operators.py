"""Every operator of torch's own database, captured and eager: `tests.generated.operators` in processes of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARDS = 6

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("expecttest") is None, reason="torch's database of operators needs expecttest"
    ),
    pytest.mark.slow,
]


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("kind", ["forward", "gradients"])
def test_every_operator_equals_eager(kind: str, shard: int) -> None:
    command = [sys.executable, "-m", "tests.generated.operators", kind, str(shard), str(SHARDS)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CAPTURE_CACHE": "0"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *different, total = done.stdout.splitlines()
    assert not different, "\n".join(different)
    compared, replayed = (int(word.strip(",")) for word in (total.split()[1], total.split()[4]))
    assert compared > 100
    assert replayed > compared // 2
