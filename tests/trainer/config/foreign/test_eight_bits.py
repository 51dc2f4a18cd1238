"""Flags of Megatron-LM for products in eight bits."""

import pytest

from tests.trainer.config.foreign.test_translate import parsed
from threefold.errors import UserError


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--fp8-recipe tensorwise", "wgrad", "fp8"),
        ("--fp8-recipe blockwise --no-fp8-wgrad", "wgrad", "bf16"),
        ("--disable-fp8-wgrad --fp8-recipe tensorwise", "wgrad", "bf16"),
        ("--fp8-format hybrid --fp8-recipe tensorwise", "grad_format", "e5m2"),
        ("--fp8-recipe tensorwise --fp8-format e4m3", "grad_format", "e4m3"),
    ],
)
def test_a_recipe_is_what_it_is_there(words: str, name: str, value: str) -> None:
    assert getattr(parsed("run.toml", *words.split())[1].fp8, name) == value


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--fp8-format e4m3", "--fp8-format: scales are of the values at hand here, not of steps before: --fp8-recipe"),
        ("--fp8-format e5m2 --fp8-recipe tensorwise", "--fp8-format: must be e4m3 or hybrid, got 'e5m2'"),
    ],
)
def test_what_is_not_here_is_refused(words: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        parsed("run.toml", *words.split())
    assert text in str(caught.value)
