"""Where the documentation is, for messages. No torch."""

from __future__ import annotations

DOCS = "https://torch-capture.readthedocs.io/en/latest/"
"""The start page; ``site_url`` of ``mkdocs.yml``."""


def rule_page(code: str) -> str:
    """The page of one rule."""
    return f"{DOCS}rules/{code}/"
