"""A plugin for mypy: ``capture.core.data`` makes the classes that attrs makes.

These sets are how attrs' documentation has wrappers of its decorators known ("Extending", "Wrapping the decorator").
"""

from __future__ import annotations

from mypy.plugin import Plugin
from mypy.plugins import attrs


def plugin(version: str) -> type[Plugin]:
    """Add the names; the rest is the plugin for attrs that comes with mypy."""
    attrs.attr_frozen_makers.add("capture.core.data.frozen")
    attrs.attr_define_makers.add("capture.core.data.define")
    return Plugin
