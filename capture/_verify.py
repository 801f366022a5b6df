"""Verify: run a replay and the body beside each other on the same inputs, state and draws, and compare bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from capture import _config, _containers, _observe
from capture._call import Call
from capture._errors import CaptureWarning
from capture._tree import Node, Tree

if TYPE_CHECKING:
    from capture._runtime import Captured, Entry


def verified(captured: Captured, entry: Entry, node: Node, tree: Tree, call: Call) -> Any:
    raise NotImplementedError
