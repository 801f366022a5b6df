"""Tables: as text, as HTML for notebooks, and for ``rich``, which prints them in a terminal with colours.

What holds tables inherits from ``Tabular`` and says which; the ways to show them are here alone.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from capture.core.data import frozen


@frozen(kw_only=True)
class Table:
    """A title, the names of the columns, rows of as many cells, and lines of text below them."""

    title: str = ""
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def text(self, *, indent: int = 0) -> str:
        """Lines, without a newline at the end."""
        found = [self.title] if self.title else []
        if self.rows:
            found.append(format_table([self.head, *self.rows] if self.head else self.rows, indent=indent))
        return "\n".join([*found, *self.notes])

    def html(self) -> str:
        """As a fragment of a page, which a notebook shows."""
        parts = [f"<p><b>{html.escape(self.title)}</b></p>"] if self.title else []
        if self.rows:
            head = "".join(f'<th style="text-align:left">{html.escape(cell)}</th>' for cell in self.head)
            rows = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in self.rows)
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>")
        parts += [f'<pre style="white-space:pre-wrap">{html.escape(note)}</pre>' for note in self.notes]
        return "".join(parts)

    def renderables(self) -> list[Any]:
        """What ``rich`` prints. Raises ``ImportError`` where it is not installed."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        shown: list[Any] = [Text(self.title, style="bold")] if self.title else []
        if self.rows:
            table = RichTable(box=box.SIMPLE_HEAD, show_header=bool(self.head))
            for name in self.head or ("",) * len(self.rows[0]):
                table.add_column(Text(name), overflow="fold")
            for row in self.rows:
                table.add_row(*map(Text, row))
            shown.append(table)
        return [*shown, *map(Text, self.notes)]


def _html_cell(cell: str) -> str:
    return f'<td style="text-align:left">{html.escape(cell)}</td>'


class Tabular:
    """Shows its tables in notebooks and through ``rich.print``."""

    __slots__ = ()

    def tables(self) -> Sequence[Table]:
        """What there is to show."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self.tables())

    def __rich__(self) -> Any:
        return rich_group(self.tables())


def rich_group(tables: Sequence[Table]) -> Any:
    """All tables for ``rich``."""
    from rich.console import Group

    return Group(*(part for table in tables for part in table.renderables()))


def format_table(rows: Sequence[Sequence[str]], *, indent: int = 0) -> str:
    """Rows of equal length, in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join((" " * indent + "  ".join(map(str.ljust, row, widths))).rstrip() for row in rows)
