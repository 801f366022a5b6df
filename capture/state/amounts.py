"""What a body adds to numbers in Python state that count as arguments of the call: ``self.step += 1``.

Their value is an argument, so the body may do anything with it; what it leaves there is known only if it is the number
that was there and a constant, which a replay adds to what is there then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from capture.key.attributes import names_of
from capture.key.input_places import InputPlace
from capture.state.snapshot import Change, place_key
from capture.state.source import Source

Amounts = Callable[[Change], int | None]


def number_of_place(places: Sequence[InputPlace], source: Source) -> int | None:
    """Which of the places this is; None if it is none of them."""
    keys = place_key(source), (id(names_of(source.holder)), source.name)
    path, is_in_argument = source.path, bool(places) and source.is_in_argument()
    return next(
        (
            number for number, place in enumerate(places)
            if place.key() in keys or place.leads_to(path, is_in_argument=is_in_argument)
        ),
        None,
    )  # fmt: skip


def position_of(places: Sequence[InputPlace], first: int, change: Change) -> int | None:
    """The position, among a call's values, of the number that changed; None where it is in none of ``places``.
    ``first``: the position of the number in the first of them."""
    number = None if change.container else number_of_place(places, change.source)
    return None if number is None else first + number


def amounts_of(added: Sequence[tuple[InputPlace, int]]) -> Amounts:
    """Changes by what a proof found to be added in each call."""
    places = [place for place, _ in added]

    def amount(change: Change) -> int | None:
        at = position_of(places, 0, change)
        if at is None or type(change.before) is not int or type(change.after) is not int:
            return None
        expected = added[at][1]
        return expected if change.after - change.before == expected else None

    return amount


def either(one: Amounts | None, other: Amounts | None) -> Amounts | None:
    """The first answer."""
    if one is None or other is None:
        return one or other

    def amount(change: Change) -> int | None:
        found = one(change)
        return other(change) if found is None else found

    return amount
