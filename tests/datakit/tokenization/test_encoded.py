"""Encoded: whatever documents go in, joined, framed or chosen from, come out as they were."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datakit.tokenization.encoded import Encoded

DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=8)
FRAME = st.lists(st.integers(90, 99), max_size=3)


def encoded_of(documents: list[list[int]]) -> Encoded:
    return Encoded.of([np.array(ids, np.uint32) for ids in documents], 3)


@given(DOCUMENTS, FRAME, FRAME, st.data())
def test_documents_come_out_as_they_went_in(
    documents: list[list[int]], before: list[int], after: list[int], data: st.DataObject
) -> None:
    encoded = encoded_of(documents)
    assert [ids.tolist() for ids in encoded] == documents
    assert [encoded[number].tolist() for number in range(len(encoded))] == documents
    for texts in (documents, [ids * 300 for ids in documents]):  # long ones are framed piece by piece
        framed = encoded_of(texts).framed(before, after)
        assert [ids.tolist() for ids in framed] == [[*before, *ids, *after] for ids in texts]
        assert framed.num_by_reference == 3
    chosen = data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)))
    kept = encoded.where(np.array(chosen, np.bool_))
    assert [ids.tolist() for ids in kept] == [ids for ids, is_kept in zip(documents, chosen) if is_kept]


@given(DOCUMENTS, st.sets(st.integers(0, 12)))
def test_documents_that_hold_an_id_are_found(documents: list[list[int]], ids_sought: set[int]) -> None:
    table = np.zeros(max(ids_sought, default=0) + 2, np.bool_)  # the last is for all ids beyond
    table[list(ids_sought)] = True
    found = encoded_of(documents).holding(table)
    assert found.tolist() == [number for number, ids in enumerate(documents) if ids_sought.intersection(ids)]
