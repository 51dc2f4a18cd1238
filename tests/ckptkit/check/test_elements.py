"""Elements of every dtype are widened to what they mean, bit for bit; torch says the same where it is installed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.check.elements import json_number, l2_norm, narrowed, widened
from tests.ckptkit.support.numbers import NUMPY, exact, random_array


@pytest.mark.parametrize("dtype", sorted(NUMPY))
def test_elements_mean_what_the_reference_says(dtype: str) -> None:
    array = random_array(dtype, (1000,), seed=7)
    with np.errstate(invalid="ignore"):
        found = widened(array.view(np.uint8), dtype)
    assert found.dtype == (np.float64 if dtype.startswith(("F", "B")) and dtype != "BOOL" else np.int64)
    expected = np.array(exact(array, dtype), found.dtype)
    assert np.array_equal(found, expected, equal_nan=found.dtype == np.float64)
    assert np.array_equal(np.signbit(found[found == 0]), np.signbit(expected[expected == 0]))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("BF16", "bfloat16"), ("F16", "float16"), ("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")],
)
def test_all_bits_of_a_narrow_dtype_mean_what_torch_says(dtype: str, name: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[train]'")
    bits = np.arange(256, dtype=np.uint8) if dtype.startswith("F8") else np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        found = widened(bits.view(np.uint8), dtype)
    expected = torch.from_numpy(bits).view(getattr(torch, name)).to(torch.float64).numpy()
    assert np.array_equal(found, expected, equal_nan=True)


def test_norms() -> None:
    assert l2_norm(np.array([3.0, 4.0])) == 5
    assert l2_norm(np.array([3e-300, 4e-300])) == pytest.approx(5e-300)
    assert l2_norm(np.array([3e300, 4e300])) == pytest.approx(5e300)
    assert l2_norm(np.empty(0)) == 0
    assert l2_norm(np.array([1.0, -np.inf])) == math.inf
    assert math.isnan(l2_norm(np.array([np.nan, np.inf])))


def test_numbers_that_json_lacks_become_texts() -> None:
    assert [json_number(each) for each in (1.5, None, math.nan, -math.inf)] == [1.5, None, "nan", "-inf"]


@given(st.lists(st.floats(width=32), min_size=1), st.sampled_from(["F64", "F32", "F16", "BF16"]))
def test_values_are_rounded_to_the_nearest(numbers: list[float], dtype: str) -> None:
    values = np.array(numbers)
    finite = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        fits = {"F16": np.isfinite(finite.astype(np.float16)), "BF16": np.abs(finite) < 2.0**128 - 2.0**119}
    if not fits.get(dtype, np.array(True)).all():
        with pytest.raises(OverflowError, match=f"beyond {dtype}"):
            narrowed(values, dtype)
        return
    made = widened(narrowed(values, dtype), dtype)
    again = widened(narrowed(made, dtype), dtype)
    np.testing.assert_array_equal(again, made)
    small = np.abs(numbers) < 1e4
    relative = {"F64": 0, "F32": 0, "F16": 2.0**-11, "BF16": 2.0**-8}[dtype]
    np.testing.assert_allclose(made[small], np.array(numbers)[small], rtol=relative, atol=2.0**-25)
