"""The version, where neither torch nor the public names are needed to tell it."""

from __future__ import annotations

VERSION = "0.1.0"
