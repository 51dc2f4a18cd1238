"""Needs of options: what has no effect is named with what it needs, or gets its default if a run recorded it."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from threefold.needs import GIVEN, effective, unmet
from threefold.options import option


@dataclass(frozen=True)
class Paint:
    colour: str = option("none", "colour")
    shade: int = option(0, "shade", needs={"colour": ("red", "blue")})
    brush: str = option("", "brush", needs={"house.rooms": 3})
    coats: int = option(1, "coats", needs={"brush": GIVEN})
    gloss: bool = option(False, "gloss", needs={"a shade above 1": lambda table: table.shade > 1})
    other: int = option(0, "another program's", needs={"garden.size": 4, "unknown": 5})


@dataclass(frozen=True)
class House:
    rooms: int = option(2, "rooms")


@dataclass(frozen=True)
class Plan:
    paint: Paint = field(default_factory=Paint)
    house: House = field(default_factory=House)


@pytest.mark.parametrize(
    ("values", "faults"),
    [
        ({}, []),
        ({"shade": 0, "coats": 1}, []),
        ({"shade": 1}, ['paint.shade needs paint.colour = "red" or "blue", which is "none": --paint.colour red']),
        ({"shade": 1, "colour": "blue"}, []),
        ({"brush": "wide"}, ["paint.brush needs house.rooms = 3, which is 2: --house.rooms 3"]),
        ({"coats": 2}, ["paint.coats needs paint.brush"]),
        ({"gloss": True}, ["paint.gloss needs a shade above 1"]),
        ({"gloss": True, "shade": 2, "colour": "red"}, []),
        ({"other": 1}, []),
    ],
)
def test_an_option_without_effect_is_named_with_what_it_needs(values: dict[str, Any], faults: list[str]) -> None:
    assert [text for _, text in unmet(Plan(Paint(**values)))] == faults
    assert all(any(name.startswith("paint.") for name in names) for names, _ in unmet(Plan(Paint(**values))))


def test_a_table_by_itself_passes_over_what_other_tables_would_say() -> None:
    table = Paint(brush="wide", shade=1)
    assert [text.split()[0] for _, text in unmet(table, "walls.")] == ["walls.shade"]


def test_what_was_recorded_without_effect_gets_its_default_unless_it_was_asked_for() -> None:
    recorded = Plan(Paint(shade=1, coats=3, brush="wide"), House(rooms=3))
    assert effective(recorded, but=()) == replace(recorded, paint=Paint(coats=3, brush="wide"))
    assert effective(recorded, but={"paint.shade"}) == recorded
    assert unmet(effective(recorded, but=())) == []
