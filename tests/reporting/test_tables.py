"""Tables as text, for notebooks and through ``rich``."""

from __future__ import annotations

import pytest
from typing_extensions import override

from capture.reporting.tables import Table, Tabular, rich_group
from tests.support.shown import printed_by_rich

TABLE = Table(title="two", head=("name", "a<b"), rows=(("x", "1"), ("[bold]y[/]", "22")), notes=("read on",))


def test_as_text() -> None:
    assert TABLE.text(indent=1) == "two\n name        a<b\n x           1\n [bold]y[/]  22\nread on"
    assert Table(title="alone").text() == "alone"
    assert Table(notes=("a", "b")).text() == "a\nb"


def test_as_html() -> None:
    shown = TABLE.html()
    assert shown.count("<tr>") == 3
    assert "a&lt;b" in shown
    assert "a<b" not in shown
    assert Table(title="<i>").html() == "<p><b>&lt;i&gt;</b></p>"


def test_by_rich() -> None:
    class Shown(Tabular):
        @override
        def tables(self) -> list[Table]:
            return [TABLE, Table(title="alone"), Table(rows=(("no head", "1"),))]

    text = printed_by_rich(Shown())
    assert all(word in text for word in ("two", "a<b", "[bold]y[/]", "22", "read on", "alone", "no head"))
    assert "\u2500" in text  # the line below the names of the columns
    assert Shown()._repr_html_().startswith(TABLE.html())


def test_nothing_to_say() -> None:
    assert printed_by_rich(rich_group([])) == ""
    with pytest.raises(NotImplementedError):
        Tabular().tables()
