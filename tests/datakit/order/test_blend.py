"""Blend: the contract of samples and epochs, weights at every prefix, segments, and what a resume refuses."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit import Blend, Cursor, Loader, TokenStore, write_store
from datakit.shards.folder_shards import FolderShards
from threefold.errors import UserError

L = 8


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    """Three stores whose tokens are their own addresses: 401, 160 and 83 tokens, in shards."""
    folder = tmp_path_factory.mktemp("stores")
    return [
        write_store(folder / str(size), np.array_split(np.arange(size), 9), vocab_size=500 + size, shard_documents=2)
        for size in (401, 160, 83)
    ]


def blend(stores: list[TokenStore], weights: list[float], **options: object) -> Blend:
    return Blend(list(zip(stores, weights)), seq_length=L, **options)  # type: ignore[arg-type]


def test_an_epoch_of_one_store_reads_every_row_once_in_a_new_order(stores: list[TokenStore]) -> None:
    stream = blend(stores[:1], [1.0], seed=7)
    num_rows = 400 // L
    assert stream.rows.tolist() == [num_rows]
    orders = []
    for epoch in range(3):
        batch = stream.batch(np.arange(epoch * num_rows, (epoch + 1) * num_rows))
        assert sorted(batch.tokens[:, 0].tolist()) == [L * k for k in range(num_rows)]
        assert (batch.tokens == batch.tokens[:, :1] + np.arange(L)).all()
        assert (batch.labels == batch.tokens + 1).all()
        orders.append(tuple(batch.tokens[:, 0].tolist()))
    assert len(set(orders)) == 3


@pytest.mark.parametrize(("num_tokens", "rows"), [(9, 1), (16, 1), (17, 2), (401, 50)])
def test_rows_overlap_by_the_label_alone(tmp_path: Path, num_tokens: int, rows: int) -> None:
    store = write_store(tmp_path / "a", [range(num_tokens)], vocab_size=500)
    assert blend([store], [1]).rows.tolist() == [rows]


def test_the_order_depends_on_seed_and_content_alone(stores: list[TokenStore], tmp_path: Path) -> None:
    samples = np.arange(200)
    copied = write_store(tmp_path / "copy", np.array_split(np.arange(401), 9), vocab_size=901, shard_documents=2)
    first = blend(stores, [0.5, 0.3, 0.2], seed=1).batch(samples).tokens
    assert (blend([copied, *stores[1:]], [5, 3, 2], seed=1).batch(samples).tokens == first).all()
    assert (blend(stores, [0.5, 0.3, 0.2], seed=2).batch(samples).tokens != first).any()


@settings(max_examples=20)
@given(weights=st.lists(st.floats(0.01, 1), min_size=3, max_size=3), seed=st.integers(0, 2**40))
def test_every_store_is_read_in_its_own_order_without_gap_or_repeat(
    stores: list[TokenStore], weights: list[float], seed: int
) -> None:
    stream = blend(stores, weights, seed=seed)
    sources, numbers = stream.locate(np.arange(20_000))
    for source in range(3):
        assert numbers[sources == source].tolist() == list(range((sources == source).sum()))
    shares = np.array(weights) / sum(weights)
    for n in (10, 1000, 8192, 20_000):
        counts = np.bincount(sources[:n], minlength=3)
        assert np.abs(counts - n * shares).max() <= 4
        assert stream.counts(n).tolist() == counts.tolist()
        assert stream.epochs(n) == tuple(counts // stream.rows)


@given(samples=st.lists(st.integers(0, 2**45), min_size=1, max_size=8))
def test_access_is_random(stores: list[TokenStore], samples: list[int]) -> None:
    stream = blend(stores, [3, 2, 1])
    together = stream.batch(samples).tokens
    assert all((stream.batch([n]).tokens[0] == row).all() for n, row in zip(samples, together))


@settings(max_examples=25)
@given(
    starts=st.lists(st.integers(1, 9000), min_size=1, max_size=4, unique=True),
    data=st.data(),
)
def test_segments_change_the_weights_and_each_store_goes_on(
    stores: list[TokenStore], starts: list[int], data: st.DataObject
) -> None:
    weights = st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=3, max_size=3).filter(any)
    later = [(start, data.draw(weights)) for start in sorted(starts)]
    plain, stream = blend(stores, [1, 1, 1]), blend(stores, [1, 1, 1], later=later)
    sources, numbers = stream.locate(np.arange(10_000))
    first = later[0][0]
    assert all((a == b).all() for a, b in zip(plain.locate(np.arange(first)), (sources[:first], numbers[:first])))
    for source in range(3):
        assert numbers[sources == source].tolist() == list(range((sources == source).sum()))
    for (start, shares), stop in zip(later, [*[start for start, _ in later[1:]], 10_000]):
        counts = np.bincount(sources[start:stop], minlength=3)
        assert np.abs(counts - (stop - start) * np.array(shares) / sum(shares)).max() <= 4


@settings(max_examples=25)
@given(
    starts=st.lists(st.integers(1, 900), max_size=3, unique=True),
    rows=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
    num_samples=st.integers(0, 1200),
    data=st.data(),
)
def test_samples_of_a_row_are_those_that_read_it(
    stores: list[TokenStore], starts: list[int], rows: list[int], num_samples: int, data: st.DataObject
) -> None:
    weights = st.lists(st.sampled_from([0.0, 0.01, 1.0, 2.5]), min_size=3, max_size=3).filter(any)
    later = [(start, data.draw(weights)) for start in sorted(starts)]
    stream = blend(stores, data.draw(weights), later=later, seed=data.draw(st.integers(0, 99)))
    sources, tokens = stream.addresses(np.arange(1200))
    for source in range(3):
        read = np.flatnonzero((sources == source) & np.isin(tokens // L, rows))
        assert stream.samples_of(source, rows, num_samples).tolist() == read[read < num_samples].tolist()


def test_a_resume_takes_appended_segments_and_refuses_every_other_change(stores: list[TokenStore]) -> None:
    begun = blend(stores[:2], [2, 1], seed=3)
    cursor = Cursor.start(begun, 100)
    blend(stores[:2], [2, 1], seed=3).check(cursor)
    blend(stores[:2], [4, 2], seed=3).check(cursor)  # the same weights
    blend(stores[:2], [2, 1], seed=3, later=[(100, [1, 1])]).check(cursor)
    blend(stores, [2, 1, 0], seed=3, later=[(100, [1, 1, 5])]).check(cursor)  # a store joins
    for other, fault in [
        (blend(stores[:2], [2, 1], seed=4), "seed 3, this one 4"),
        (blend(stores[:2], [1, 2], seed=3), "stores or weights"),
        (blend(stores[1:], [2, 1], seed=3), "stores or weights"),
        (blend(stores[:2], [2, 1], seed=3, later=[(99, [1, 1])]), "from sample 99 on, but 100 samples"),
        (Blend([(stores[0], 2), (stores[1], 1)], seq_length=4, seed=3), "seq_length 8, this one 4"),
    ]:
        with pytest.raises(UserError, match=fault):
            other.check(cursor)
    longer = blend(stores[:2], [2, 1], seed=3, later=[(100, [1, 1])])
    with pytest.raises(UserError, match="stores or weights"):
        begun.check(Cursor.start(longer, 200))


@pytest.mark.parametrize(
    ("weights", "options", "fault"),
    [
        ([1.0, -1.0, 1.0], {}, "none may be negative"),
        ([0.0, 0.0, 0.0], {}, "one must be positive"),
        ([1.0, float("nan"), 1.0], {}, "none may be negative"),
        ([float("nan"), 1.0, 1.0], {}, "none may be negative"),
        ([1.0, float("inf"), 1.0], {}, "sum finite"),
        ([1e308, 1e308, 1e308], {}, "sum finite"),
        ([1, 10**400, 1], {}, "weight 1000.*000 is not a number that a float holds"),
        ([1, "0.5", 1], {}, "weight '0.5' is not"),
        ([1, None, 1], {}, "weight None is not"),
        ([1.0, 1.0, 1.0], {"later": [(5.5, [1.0, 1.0, 1.0])]}, "sample 5.5 on"),
        ([1.0, 1.0, 1.0], {"later": [(2**62, [1.0, 1.0, 1.0])]}, "come after 0"),
        ([1.0, 1.0, 1.0], {"later": [(5, [1.0])]}, "1 weights for 3 stores"),
        ([1.0, 1.0, 1.0], {"later": [(0, [1.0, 1.0, 1.0])]}, "from sample 0 on come after 0"),
    ],
)
def test_faulty_weights(stores: list[TokenStore], weights: list[float], options: dict[str, object], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        blend(stores, weights, **options)


@pytest.mark.parametrize("samples", [[-1], [3, -1], [2**62], [2**64 - 1], [2**70], [1.0], ["1"], [[1, 2]]])
def test_faulty_samples(stores: list[TokenStore], samples: Any) -> None:
    with pytest.raises(UserError, match="whole numbers from 0"):
        blend(stores, [1, 1, 1]).batch(samples)


def test_no_samples(stores: list[TokenStore]) -> None:
    stream = blend(stores, [1, 1, 1], later=[(9, [1, 1, 2])])
    with pytest.raises(UserError, match="no samples"):
        stream.batch([])
    with pytest.raises(UserError, match="no first -1 samples"):
        stream.epochs(-1)
    assert stream.batch(2**62 - 1).tokens.shape == (1, L)


def test_stores_of_different_tokenizers_are_refused(stores: list[TokenStore]) -> None:
    def made_with(fingerprint: str, store: TokenStore) -> TokenStore:
        tokenizer = replace(store.manifest.tokenizer, fingerprint=fingerprint)
        return TokenStore(FolderShards(store.path, replace(store.manifest, tokenizer=tokenizer)))

    blend([stores[0], made_with("a", stores[1]), made_with("a", stores[2])], [1, 1, 1])  # what is not known may fit
    with pytest.raises(UserError, match=r"/401 was made with .* a, .*/83 with that of b"):
        blend([made_with("a", stores[0]), stores[1], made_with("b", stores[2])], [1, 1, 1])


def test_a_random_row_takes_no_counting_of_all_stores(
    stores: list[TokenStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = blend(stores, [1, 1, 1])
    monkeypatch.setattr(stream, "counts", None)
    monkeypatch.setattr(stream.mixture.runs[0].sequence, "counts", None)
    assert stream.batch([10**12]).tokens.shape == (1, L)


def test_a_store_too_small_for_one_row(stores: list[TokenStore], tmp_path: Path) -> None:
    small = write_store(tmp_path / "a", [range(L)], vocab_size=500)
    with pytest.raises(UserError, match="holds 8 tokens, too few for one row of 8"):
        blend([*stores[:2], small], [1, 1, 1])
    blend([*stores[:2], small], [1, 1, 0])


@pytest.mark.parametrize("sources", [[], "store", [1], [("store", 1.0)], None])
def test_what_is_no_store_with_a_weight_is_refused(sources: Any) -> None:
    with pytest.raises(UserError, match="a blend") as refused:
        Blend(sources, seq_length=8)
    assert "Blend([(TokenStore.open(FOLDER), 1.0)]" in str(refused.value)


@pytest.mark.parametrize("wrong", [{"seq_length": "64"}, {"seq_length": 2.0}, {"seed": None}, {"seed": 2**63}])
def test_numbers_of_a_blend_are_whole_and_not_too_large(stores: list[TokenStore], wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(wrong))} is a whole number"):
        Blend([(stores[0], 1.0)], **({"seq_length": 8} | wrong))


def test_an_empty_store_is_not_told_of_shorter_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds 0 tokens.*\n.*leave it out"):
        Blend([(write_store(tmp_path / "empty", [], vocab_size=9), 1.0)], seq_length=8)


@settings(max_examples=20)
@given(block_tokens=st.integers(1, 200), seed=st.integers(0, 2**40), at=st.integers(0, 400), dp_size=st.integers(1, 5))
def test_blocks_are_an_order_like_others(
    stores: list[TokenStore], block_tokens: int, seed: int, at: int, dp_size: int
) -> None:
    stream = blend(stores, [3, 2, 1], seed=seed, block_tokens=block_tokens)
    for source, num_rows in enumerate(stream.rows.tolist()):
        numbers = [stream.mixture.sample_of(source, number) for number in range(num_rows)]
        rows = stream.addresses(numbers)[1] // L
        assert sorted(rows.tolist()) == list(range(num_rows))
        assert stream.samples_of(source, rows, 2 * max(map(int, numbers)) + 2)[0] == min(numbers)
    with Loader(stream, 2, 1, cursor=Cursor.start(stream, at)) as whole:
        expected = [whole.next_step().tokens[0] for _ in range(dp_size)]
    again = pickle.loads(pickle.dumps(stream))
    for rank in range(dp_size):
        with Loader(again, 2, 1, rank, dp_size, Cursor.start(stream, at)) as share:
            assert (share.next_step().tokens[0] == expected[rank]).all()


def test_a_resume_refuses_another_shuffle(stores: list[TokenStore]) -> None:
    streams = [blend(stores[:1], [1], block_tokens=tokens) for tokens in (0, 16, 17, 32)]
    rows, blocks, same, larger = [Cursor.start(stream, 9) for stream in streams]
    assert blocks == same
    assert len({rows.digest, blocks.digest, larger.digest}) == 3
    with pytest.raises(UserError, match="shuffle of the order was blocks of 2 rows, is none"):
        streams[0].check(blocks, streams[1].record)
