"""Bytes as a text, in one way for all messages and reports."""

from __future__ import annotations


def bytes_text(nbytes: int) -> str:
    """In powers of 1024, as torch tells memory: ``"512 B"``, ``"4.2 MiB"``, ``"22 MiB"``."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1023.5:
            return f"{amount:.0f} {unit}" if unit == "B" or abs(amount) >= 9.95 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
