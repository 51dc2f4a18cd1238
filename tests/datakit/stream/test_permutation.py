"""The keyed permutation: a bijection for every size and key, the same by ones and by arrays, well mixed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit.stream.permutation import Epochs, Permutation


@given(size=st.integers(1, 3000), key=st.binary(max_size=20))
def test_it_is_a_bijection(size: int, key: bytes) -> None:
    assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == list(range(size))


@given(size=st.integers(1, 2**62), data=st.data())
def test_large_sizes_stay_inside_and_answer_single_positions_alike(size: int, data: st.DataObject) -> None:
    permutation = Permutation(size, b"key")
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    found = permutation(np.array(positions))
    assert len(set(found.tolist())) == len(positions)
    assert found.min() >= 0
    assert found.max() < size
    assert [int(permutation(position)[0]) for position in positions] == found.tolist()


@given(
    names=st.lists(st.tuples(st.binary(max_size=100), st.binary(max_size=100)), min_size=1, max_size=3),
    size=st.integers(1, 2**40),
    data=st.data(),
)
def test_epochs_are_permutations_with_keys_of_any_length(
    names: list[tuple[bytes, bytes]], size: int, data: st.DataObject
) -> None:
    asked = data.draw(
        st.lists(st.tuples(st.integers(0, len(names) - 1), st.integers(0, 2**62)), min_size=1, max_size=9)
    )
    found = Epochs(names, [size] * len(names)).elements(*np.array(asked).T.copy())
    for (source, number), element in zip(asked, found.tolist(), strict=True):
        (before, after), (epoch, position) = names[source], divmod(number, size)
        assert [element] == Permutation(size, before + str(epoch).encode() + after)(position).tolist()


@given(size=st.integers(1, 2**62), key=st.binary(max_size=20), data=st.data())
def test_positions_undo_it(size: int, key: bytes, data: st.DataObject) -> None:
    permutation = Permutation(size, key)
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    assert permutation.positions(permutation(positions)).tolist() == positions
    few = Permutation(min(size, 500), key)
    assert few.positions(few(np.arange(few.size))).tolist() == list(range(few.size))


def test_it_is_pinned() -> None:
    """The order of samples is a promise: a change of it would silently change every resumed run."""
    assert Permutation(10, b"seed/fingerprint/0")(np.arange(10)).tolist() == [6, 1, 5, 4, 3, 7, 8, 2, 9, 0]


def test_keys_give_unrelated_orders() -> None:
    first, second = (Permutation(10_000, key)(np.arange(10_000)) for key in (b"a", b"b"))
    assert (first == second).sum() < 10  # 1 expected
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert abs(np.corrcoef(first, np.arange(10_000))[0, 1]) < 0.05


@pytest.mark.parametrize("size", [5, 64, 1000])
def test_every_element_comes_to_every_place(size: int) -> None:
    """Chi-square over keys of where element 0 goes; 5 sigma."""
    num_keys = 20 * size
    places = [int(Permutation(size, b"%d" % key)(0)[0]) for key in range(num_keys)]
    expected = num_keys / size
    chi_square = ((np.bincount(places, minlength=size) - expected) ** 2 / expected).sum()
    assert abs(chi_square - (size - 1)) < 5 * np.sqrt(2 * (size - 1))
