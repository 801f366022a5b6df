"""Torch's shared libraries, whose exported functions are found by name."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch


def library(name: str) -> ctypes.CDLL:
    """One of torch's libraries that this process has loaded. Raises ``OSError`` where it has not."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"{name}.so"), os.RTLD_NOLOAD | os.RTLD_NOW)
