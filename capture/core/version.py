"""The version number, in a module that loads neither torch nor the public names."""

from __future__ import annotations

VERSION = "0.1.0"
