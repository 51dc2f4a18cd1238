"""Values of dataclasses come back out of the JSON that `asdict` made of them."""

import json
from dataclasses import asdict, dataclass

import pytest

from threefold.plain import from_plain


@dataclass(frozen=True)
class Inner:
    number: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    first: Inner
    rest: tuple[Inner, ...]
    perhaps: Inner | None
    pair: tuple[float, float] | None
    table: dict[str, int]


@pytest.mark.parametrize(
    "value",
    [
        Outer(Inner(1, ("a", "b")), (Inner(2), Inner(3, ("c",))), Inner(4), (0.5, 0.25), {"x": 1}),
        Outer(Inner(1), (), None, None, {}),
    ],
)
def test_what_was_made_plain_comes_back(value: Outer) -> None:
    assert from_plain(Outer, json.loads(json.dumps(asdict(value)))) == value


def test_a_field_that_is_left_out_has_its_default_and_one_too_many_is_refused() -> None:
    assert from_plain(Inner, {"number": 1}) == Inner(1)
    with pytest.raises(KeyError, match="other"):
        from_plain(Inner, {"number": 1, "other": 2})
