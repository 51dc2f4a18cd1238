"""MicroBatch: a run of its tokens is dropped as the whole is."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.model.microbatch import DropoutKey, MicroBatch, boxes

NOTHING = torch.empty(0)


@given(first=st.integers(0, 40), num_tokens=st.integers(1, 40), length=st.integers(1, 9))
def test_boxes_are_the_tokens_in_order_and_few(first: int, num_tokens: int, length: int) -> None:
    found = list(boxes(first, num_tokens, length))
    places = [row * length + position + at for row, position, size in found for at in range(size)]
    assert places == list(range(first, first + num_tokens))
    assert len(found) <= 3
    assert all(size % length == 0 or position + size <= length for _, position, size in found)


@given(num_rows=st.integers(1, 4), length=st.integers(1, 6), data=st.data())
def test_any_run_of_tokens_is_dropped_as_in_the_whole(num_rows: int, length: int, data: st.DataObject) -> None:
    whole = MicroBatch(NOTHING, NOTHING, NOTHING, NOTHING, length, 7, DropoutKey(0.4, 3, 5))
    first = data.draw(st.integers(0, num_rows * length - 1))
    stop = data.draw(st.integers(first + 1, num_rows * length))
    x = torch.ones(num_rows * length, 5, dtype=torch.float64)
    some = MicroBatch(NOTHING, NOTHING, NOTHING, NOTHING, length, 7, DropoutKey(0.4, 3, 5), first_token=first)
    assert torch.equal(some.drop(x[first:stop], layer=2, site=1), whole.drop(x, layer=2, site=1)[first:stop])
