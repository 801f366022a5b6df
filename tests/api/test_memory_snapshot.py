"""The memory of recordings, as torch's viewer of memory opens it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.cuda import _memory_viz as viewer

from capture import capture, memory_snapshot
from capture.api.decorator import captured_state
from capture.runtime import record


def test_blocks_of_recordings_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_OWNED", 0)  # small outputs lie in the pool, too

    def named_body(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = torch.relu(x) * 2
        return y, {"sum": y.sum(0)}

    captured = capture(named_body, name="named.body")
    with torch.no_grad():
        for _ in range(4):
            captured(torch.ones(64, 32))
        kept = captured(torch.ones(64, 32))  # one that is held over a call would have memory of its own
    assert memory_snapshot(tmp_path / "snapshot.pickle") > 0
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())  # noqa: S301 - written above
    number = captured_state(captured).entries()[0].nodes[0].number
    frames = {
        frame["name"]: block
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        for frame in block["frames"]
    }
    outputs = [name for name in frames if name.startswith("capture: ") and f"named.body, recording {number}" in name]
    assert len(outputs) == 2
    assert any("sum" in name for name in outputs)
    assert sorted(frames[name]["size"] for name in outputs) == [32 * 4, 64 * 32 * 4]
    assert any(frame["filename"] == __file__ for name in outputs for frame in frames[name]["frames"])
    assert "capture: pool of recordings" in frames
    assert all(segment["total_size"] == sum(b["size"] for b in segment["blocks"]) for segment in snapshot["segments"])
    assert "active_allocated" in {block["state"] for block in frames.values()}
    assert viewer.segsum(snapshot)  # torch's own code reads it
    assert kept is not None
