"""A Decoder computes a token alone, and continues rows as the whole model does, on any layout."""

import pytest

from tests.support.checks import Different
from tests.trainer.support.decode_faults import DECODE_FAULTS
from tests.trainer.support.decoding import SHAPES, compare_decoding


@pytest.mark.parametrize("name", [*SHAPES, "experts"])
def test_logits_are_those_of_the_whole_row(name: str) -> None:
    compare_decoding(name)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", "tp2"), ("gpt2", "pp2"), ("windows", "tp2-pp2"), ("experts", "dp2-ep2")],
)
def test_any_layout_continues_with_the_same_tokens(name: str, layout: str) -> None:
    compare_decoding(name, layout)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp4", "pp2-virtual2", "tp2-pp2", "pp4"])
@pytest.mark.parametrize("name", SHAPES)
def test_all_layouts_continue_with_the_same_tokens(name: str, layout: str, precision: str) -> None:
    compare_decoding(name, layout, precision)


@pytest.mark.parametrize("fault", DECODE_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_what_is_kept_is_seen(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    with pytest.raises(Different):
        compare_decoding(fault.model, fault.layout)
