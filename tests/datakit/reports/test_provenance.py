"""Provenance: blame and where against a search through all documents, and as each other's inverse."""

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit import Blend, Recipe, TokenStore, blame, preprocess, where, write_store
from tests.datakit.conftest import write_jsonl
from threefold.errors import CheckFailed, UserError

Row = tuple[int, int, int, int, int]
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=25).filter(lambda lengths: sum(lengths) > 8)


def searched(blend: Blend, num_samples: int) -> list[Row]:
    """Return the rows of `blame`, by comparing every sample with every document."""
    pieces = []
    for sample in range(num_samples):
        (source,), (first,) = (column.tolist() for column in blend.addresses([sample]))
        store = blend.stores[source]
        lengths = [len(store.document(number)) for number in range(store.num_documents)]
        for document, (begin, end) in enumerate(pairwise(np.cumsum([0, *lengths]).tolist())):
            start, stop = max(begin, first), min(end, first + blend.seq_length + 1)
            if start < stop:
                pieces.append((sample, source, document, start - begin, stop - begin))
    return pieces


@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=3),
    seq_length=st.integers(1, 8),
    shard_documents=st.integers(1, 30),
    num_samples=st.integers(1, 250),
    data=st.data(),
)
def test_blame_and_where_are_each_others_inverse(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    seq_length: int,
    shard_documents: int,
    num_samples: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("stores")
    stores = [
        write_store(
            folder / str(number), [[1] * length for length in each], vocab_size=9, shard_documents=shard_documents
        )
        for number, each in enumerate(lengths)
    ]
    weights = st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=len(stores), max_size=len(stores)).filter(any)
    starts = data.draw(st.lists(st.integers(1, 200), max_size=3, unique=True))
    later = [(start, data.draw(weights)) for start in sorted(starts)]
    seed = data.draw(st.integers(0, 2**40))
    blend = Blend(list(zip(stores, data.draw(weights))), seq_length=seq_length, seed=seed, later=later)

    read = blame(blend, np.arange(num_samples)).rows()
    assert read == searched(blend, num_samples)
    pieces = [
        row
        for source, store in enumerate(stores)
        for document in range(store.num_documents)
        for row in where(blend, source, document, num_samples).rows()
    ]
    assert sorted(pieces) == read


def test_passages_are_the_tokens_of_the_batch(tmp_path: Path) -> None:
    sizes = [3, 0, 70, 1, 1, 29, 0, 200, 5]
    bounds = np.cumsum([0, *sizes])
    store = write_store(
        tmp_path / "a", [range(*bound) for bound in pairwise(bounds)], vocab_size=400, shard_documents=2
    )
    blend = Blend([(store, 1.0)], seq_length=16, seed=3)
    samples = [7, 0, 40, 7]
    passages, batch = blame(blend, samples), blend.batch(samples)
    assert list(dict.fromkeys(passages.samples.tolist())) == [7, 0, 40]
    tokens = [store.document(document)[start:stop] for _, _, document, start, stop in passages.rows()]
    assert (np.concatenate(tokens).reshape(4, 17)[:, :16] == batch.tokens).all()
    assert (np.concatenate(tokens).reshape(4, 17)[:, 1:] == batch.labels).all()


def test_origins_are_those_of_the_documents(tmp_path: Path, texts: list[str], tokenizer_path: str) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", texts)
    inputs = [str(tmp_path / f"{name}.jsonl") for name in ("a", "b")]
    preprocess(inputs, tmp_path / "s", Recipe(tokenizer_path, append_eod=True), item_bytes=9000)
    store = TokenStore.open(tmp_path / "s")
    assert len(store.manifest.shards) > 2
    blend = Blend([(store, 1.0)], seq_length=64)
    passages = blame(blend, np.arange(100))
    assert passages.origins(blend) == [store.origin(document) for document in passages.documents.tolist()]


def test_a_document_that_is_not_there(tmp_path: Path) -> None:
    store = write_store(tmp_path / "a", [[1] * 10, [], [2] * 6], vocab_size=9)
    blend = Blend([(store, 1.0)], seq_length=4)
    for number in (-1, 3):
        with pytest.raises(UserError, match=f"has 3 documents, .* none of number {number}") as caught:
            where(blend, 0, number, 10)
        assert caught.value.hint == f"--document {store.path}:2"
    assert len(where(blend, 0, 1, 10)) == 0  # empty
    assert len(where(blend, 0, 2, 0)) == 0
    assert where(blend, 0, 2, 3).stops.max() == 3  # the last 3 tokens make no row


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    store = write_store(tmp_path / "a", [[1] * 10] * 20, vocab_size=9)
    [path] = (tmp_path / "a").glob("*.idx")
    data = bytearray(path.read_bytes())
    data[34 + 4 * 5] = 3  # the length of document 5
    path.write_bytes(data)
    blend = Blend([(TokenStore.open(store.path), 1.0)], seq_length=8)
    with pytest.raises(CheckFailed, match=r"\.idx is damaged"):
        blame(blend, np.arange(24))


def test_a_step_of_512_rows_takes_milliseconds(tmp_path: Path) -> None:
    """The target is 50 ms on an idle machine; here a busy one may take five times that."""
    rng = np.random.default_rng(0)
    documents = [np.ones(length, np.int64) for length in rng.integers(1, 1300, 5000)]
    stores = [
        write_store(tmp_path / name, documents[part::2], vocab_size=9, shard_documents=250)
        for part, name in enumerate(("a", "b"))
    ]
    blend = Blend([(stores[0], 0.7), (stores[1], 0.3)], seq_length=4096)
    took_s = []
    for step in range(5):
        started_s = time.perf_counter()
        passages = blame(blend, np.arange(512 * step, 512 * step + 512))
        passages.origins(blend)
        took_s.append(time.perf_counter() - started_s)
        assert len(passages) > 3000
    print(f"{min(took_s) * 1e3:.1f} ms")
    assert min(took_s) < 0.25
