"""What is not a blend, a cursor or a whole number is refused where it is passed, with what to write."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from datakit import Blend, Cursor, TokenStore, write_store
from threefold.errors import UserError

pytest.importorskip("torch", reason='needs torch: pip install -e ".[train]"')
datasets = import_module("datakit.torch")
MapDataset, StreamDataset = datasets.MapDataset, datasets.StreamDataset


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> Blend:
    store = write_store(tmp_path_factory.mktemp("stores") / "a", [range(99)], vocab_size=99)
    return Blend([(store, 1)], seq_length=8, seed=5)


REFUSED: dict[str, tuple[Callable[[Blend], Any], str]] = {
    "a store": (lambda blend: StreamDataset(blend.stores[0], 2), "Blend([("),
    "a path": (lambda blend: MapDataset("store", 2, 3), "Blend([("),
    "a dict as the cursor": (
        lambda blend: StreamDataset(blend, 2, cursor=Cursor.start(blend).to_json()),
        "Cursor.from",
    ),
    "a dict as options": (lambda blend: StreamDataset(blend, 2, options={}), "BatchOptions("),
    "no rows": (lambda blend: StreamDataset(blend, 0), "micro_batch_size=1"),
    "a part of a row": (lambda blend: StreamDataset(blend, 2.5), "micro_batch_size=1"),
    "a rank before the first": (lambda blend: StreamDataset(blend, 2, -1), "dp_rank=0"),
    "no ranks": (lambda blend: StreamDataset(blend, 2, 0, 0), "dp_size=1"),
    "fewer batches than none": (lambda blend: MapDataset(blend, 2, -1), "num_batches=0"),
    "a length that is none": (lambda blend: MapDataset(blend, 2, None), "num_batches=0"),
    "a cursor before the start": (lambda blend: Cursor.start(blend, -1), "num_samples=0"),
    "a cursor within a sample": (lambda blend: Cursor.start(blend, 1.5), "num_samples=0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_with_what_to_write(blend: Blend, what: str) -> None:
    make, hint = REFUSED[what]
    with pytest.raises(UserError) as caught:
        make(blend)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(hint)


def test_any_whole_number_is_one(blend: Blend) -> None:
    dataset = MapDataset(blend, np.int64(2), np.uint8(3), np.int32(0), np.int16(1), Cursor.start(blend, np.int64(4)))
    assert (len(dataset), dataset[np.int64(1)]["cursor"]["num_samples"]) == (3, 8)
    for number in (1.5, slice(2), [1]):
        with pytest.raises(TypeError):
            dataset[number]


def test_a_state_before_the_start_is_not_a_cursor(blend: Blend) -> None:
    with pytest.raises(UserError, match="is not a cursor: num_samples is a whole number of 0 or more, not -1"):
        Cursor.from_json(Cursor.start(blend).to_json() | {"num_samples": -1})


def test_a_file_in_the_place_of_a_store_is_named(blend: Blend) -> None:
    file = blend.stores[0].path / "manifest.json"
    with pytest.raises(UserError, match=r"manifest.json is not a token store"):
        TokenStore.open(file)
