"""Sources: rows whose length changes along a stream; the past, epochs, resumes and provenance across it."""

import json
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit import (
    Blend,
    Cursor,
    Loader,
    PackedStore,
    Recorded,
    RunStream,
    Segment,
    StreamRecord,
    TokenStore,
    pack,
    write_store,
)
from datakit.order.sources import Sources
from datakit.reports.provenance import blame, where
from threefold.errors import UserError
from threefold.options import FlagText

L, END = 8, 240
LENGTHS = st.lists(st.sampled_from([3, 8, 16, 21]), min_size=1, max_size=3)
WEIGHTS = st.lists(st.sampled_from([0.0, 0.4, 1.0]), min_size=3, max_size=3).filter(any)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    """Three stores whose tokens are their own addresses, each with packed rows of 8 and 16 tokens."""
    folder = tmp_path_factory.mktemp("stores")
    tokens = []
    for size in (401, 160, 83):
        cuts = np.cumsum(np.random.default_rng(size).integers(1, 14, size))
        documents = np.split(np.arange(size), cuts[cuts < size])
        tokens.append(write_store(folder / str(size), documents, vocab_size=500, shard_documents=5))
        for length in (8, 16):
            pack(tokens[-1].path, packing="best_fit", seq_length=length)
    return tokens


@st.composite
def changes(draw: st.DrawFn, *, lengths: Sequence[int] = (3, 8, 16, 21)) -> list[Segment]:
    """Up to four changes, of lengths, weights or both, with skips; each length differs from the one before."""
    rows, last = [], L
    for start in sorted(draw(st.lists(st.integers(1, 180), min_size=1, max_size=4, unique=True))):
        new = draw(st.sampled_from([None, *[length for length in lengths if length != last]]))
        weights = tuple(draw(WEIGHTS)) if draw(st.booleans()) else None
        skip = ((start + 2, start + 5),) if draw(st.booleans()) else ()
        rows.append(Segment(start, weights, skip, seq_length=new))
        last = new or last
    return rows


def blend(stores: Sequence[TokenStore], later: Sequence[Segment], seed: int = 3) -> Blend:
    return Blend([(store, 1.0) for store in stores], seq_length=L, seed=seed, later=later)


def rows(stream: Blend, samples: Sequence[int]) -> list[list[int]]:
    """The tokens of each sample, by itself."""
    return [stream.batch([sample]).tokens[0].tolist() for sample in samples]


@settings(max_examples=15)
@given(later=changes(), keep=st.integers(0, 3), seed=st.integers(0, 99))
def test_what_is_appended_leaves_the_past_alone(
    stores: list[TokenStore], later: list[Segment], keep: int, seed: int
) -> None:
    whole, before = blend(stores, later, seed), blend(stores, later[:keep], seed)
    end = later[keep].from_sample if keep < len(later) else END
    assert rows(whole, range(end)) == rows(before, range(end))
    whole.check(Cursor.start(before, end), before.record)
    for begin, length in zip(whole.sources.begins, whole.sources.lengths):
        assert whole.batch([begin]).tokens.shape == (1, length)


@settings(max_examples=15)
@given(lengths=LENGTHS, at=st.integers(1, 90), seed=st.integers(0, 2**40))
def test_each_length_reads_every_row_of_a_store_once_an_epoch(
    stores: list[TokenStore], lengths: list[int], at: int, seed: int
) -> None:
    lengths = [length for length, before in zip(lengths, [L, *lengths]) if length != before]
    later = [Segment((number + 1) * 1000 + at, seq_length=length) for number, length in enumerate(lengths)]
    stream, orders = Blend([(stores[0], 1.0)], seq_length=L, seed=seed, later=later), []
    for source, (begin, length) in enumerate(zip(stream.sources.begins, stream.sources.lengths)):
        num_rows = 400 // length
        for epoch in range(2):
            samples = np.arange(begin + epoch * num_rows, begin + (epoch + 1) * num_rows)
            batch = stream.batch(samples)
            assert sorted(batch.tokens[:, 0].tolist()) == [length * row for row in range(num_rows)]
            assert (batch.labels == batch.tokens[:, :1] + np.arange(1, length + 1)).all()
            assert stream.epochs(int(samples[-1]) + 1)[source] == epoch + 1
            orders.append(tuple(batch.tokens[:, 0].tolist()))
    assert len(set(orders)) == len(orders)


def test_a_length_that_comes_again_is_in_a_fresh_order(stores: list[TokenStore]) -> None:
    stream = blend(stores[:1], [Segment(50, seq_length=4), Segment(150, seq_length=L)])
    first, again = (stream.batch(np.arange(begin, begin + 50)).tokens for begin in (0, 150))
    assert (np.sort(first, 0) == np.sort(again, 0)).all()
    assert (first != again).any()


@settings(max_examples=10)
@given(later=changes(), num_samples=st.integers(0, END))
def test_blame_and_where_are_each_others_inverse(
    stores: list[TokenStore], later: list[Segment], num_samples: int
) -> None:
    stream = blend(stores, later)
    read = blame(stream, np.arange(num_samples)).rows() if num_samples else []
    for sample, source, document, start, stop in read[:: max(len(read) // 40, 1)]:
        row = stream.batch([sample])
        tokens = {*row.tokens[0].tolist(), *row.labels[0].tolist()}
        assert set(stream.stores[source].document(document)[start:stop].tolist()) <= tokens
    for source, store in enumerate(stream.stores):
        for document in range(0, store.num_documents, 4):
            wanted = [row for row in read if row[1:3] == (source, document)]
            assert where(stream, source, document, num_samples).rows() == wanted


STARTS = st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True)


@settings(max_examples=10)
@given(starts=STARTS, num_steps=st.integers(0, 9), dp_size=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_a_resume_from_any_cursor_under_any_ranks_is_the_uninterrupted_stream(
    stores: list[TokenStore], starts: list[int], num_steps: int, dp_size: int
) -> None:
    later = [Segment(12 * start, seq_length=16 - 8 * (number % 2)) for number, start in enumerate(sorted(starts))]
    stream = blend(stores, later)
    cursor = Cursor.from_json(json.loads(json.dumps(Cursor.start(stream, 12 * num_steps).to_json())))
    parts = []
    for rank in range(dp_size):
        again = pickle.loads(pickle.dumps(stream))
        with Loader(again, 12 // dp_size, 1, rank, dp_size, cursor) as loader:
            parts.append([loader.next_step() for _ in range(4)])
            shapes = [batch.shape for batch in parts[-1]]
            assert shapes == [
                loader.shape_at(first) for first in range(cursor.num_samples, loader.cursor.num_samples, 12)
            ]
    for number, batches in enumerate(zip(*parts)):
        first = 12 * (num_steps + number)
        assert (
            np.concatenate([batch.tokens[0] for batch in batches]) == stream.batch(range(first, first + 12)).tokens
        ).all()


def test_a_past_that_was_edited_is_refused_and_shown(stores: list[TokenStore]) -> None:
    later = [Segment(40, seq_length=16), Segment(80, (0.0, 1.0, 1.0))]
    stream = blend(stores, later)
    cursor = Cursor.start(stream, 60)
    assert len(json.dumps(cursor.to_json())) < 1024
    blend(stores, later[:1]).check(cursor, stream.record)  # what is to come may change
    for other, fault in [
        ([Segment(40, seq_length=4)], "segment 1 had a new seq_length of 16, now it has 4"),
        ([Segment(40, (1.0, 1.0, 1.0))], "segment 1 had a new seq_length of 16, now it has none"),
        ([Segment(48, seq_length=16)], "segment 1 began at sample 40, now it does at 48"),
        ([], "segment 1, from sample 40 on, is missing"),
        ([*later[:1], Segment(59, seq_length=4)], "rows have 4 tokens from sample 59 on, but 60 samples are read"),
    ]:
        with pytest.raises(UserError, match=fault):
            blend(stores, other).check(cursor, stream.record)


def test_masked_documents_are_masked_in_rows_of_each_length(stores: list[TokenStore]) -> None:
    later = [Segment(10, masked=((0, 3), (1, 2))), Segment(40, seq_length=16)]
    for kind in (stores, packed(stores)):
        stream = blend(kind, later)
        for span in (range(10, 40), range(40, 120)):
            batch, sources = stream.batch(span), stream.locate(span)[0]
            bad = np.zeros_like(batch.labels, bool)
            for owner, document in ((0, 3), (1, 2)):
                of_store = np.array(stream.sources.owners)[sources] == owner
                bad |= of_store[:, None] & np.isin(batch.labels, kind[owner].document(document))
            counted = blend(kind, later[1:]).batch(span).loss_mask
            assert (bad & (counted == 1)).any()
            assert (batch.loss_mask == np.where(bad, 0, counted)).all()
        assert blame(stream, [60]).rows()
        assert stream.is_masked(60, len(kind), 3)


def packed(stores: list[TokenStore]) -> list[TokenStore]:
    return [PackedStore.of(store.path, packing="best_fit", seq_length=L) for store in stores]


@settings(max_examples=8)
@given(later=changes(lengths=(8, 16)))
def test_packed_rows_change_their_length_with_their_index(stores: list[TokenStore], later: list[Segment]) -> None:
    stream = blend(packed(stores), later)
    for sample in range(0, END, 7):
        length = stream.sources.seq_length_at(sample)
        (source,), (address,) = (column.tolist() for column in stream.addresses([sample]))
        plain = TokenStore.open(stores[stream.sources.owners[source]].path)
        store = PackedStore.of(plain.path, packing="best_fit", seq_length=length)
        wanted = [token for start, stop in store.row_spans(address // length, length) for token in range(start, stop)]
        batch = stream.batch([sample])
        found = {*batch.tokens[0][batch.loss_mask[0] > 0], *batch.labels[0][batch.loss_mask[0] > 0]}
        assert found <= set(wanted)
    read = blame(stream, np.arange(END)).rows()
    for source in range(len(stream.stores)):
        assert where(stream, source, 3, END).rows() == [row for row in read if row[1:3] == (source, 3)]


def test_a_packed_store_needs_an_index_of_the_lengths_that_read_it(stores: list[TokenStore]) -> None:
    kind = packed(stores)
    with pytest.raises(
        UserError, match=r"401 is not packed by best_fit into rows of 24 tokens: .*-24 is not"
    ) as caught:
        blend(kind, [Segment(40, seq_length=24)])
    assert caught.value.hint == f"datakit pack {stores[0].path} --seq-length 24 --packing best_fit"
    longer = PackedStore.of(stores[2].path, packing="best_fit", seq_length=16)
    joins = Blend([(kind[0], 1), (longer, 0)], seq_length=L, later=[Segment(40, (0, 1), seq_length=16)])
    assert joins.stores == (kind[0], longer)
    assert joins.batch([40]).tokens.shape == (1, 16)


@pytest.mark.parametrize("begin", [1, 7, 9])
def test_a_step_has_rows_of_one_length(stores: list[TokenStore], begin: int) -> None:
    stream = blend(stores, [Segment(16 + begin, seq_length=16)])
    for rows_a_rank, dp_size in ((8, 1), (4, 2), (1, 8)):
        with pytest.raises(
            UserError, match=f"rows have 16 tokens from sample {16 + begin} on, in the middle"
        ) as caught:
            Loader(stream, rows_a_rank, 1, 0, dp_size)
        assert str(caught.value.hint).startswith(f"from_sample = {24 if begin < 8 else 32};")
    with Loader(stream, 8, 1, cursor=Cursor.start(stream, 8 + begin)) as loader:  # steps begin where the run resumes
        assert [loader.next_step().shape[-1] for _ in range(2)] == [L, 16]
    with pytest.raises(UserError, match="different lengths"):
        stream.batch([15 + begin, 16 + begin])


@pytest.mark.parametrize(
    ("length", "fault"), [(0, "seq_length 0"), (-3, "seq_length -3"), (L, "after rows of 8 tokens")]
)
def test_faulty_lengths(stores: list[TokenStore], length: int, fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        blend(stores, [Segment(40, seq_length=length)])
    with pytest.raises(UserError, match="holds 83 tokens, too few for one row of 90"):
        blend(stores, [Segment(40, seq_length=90)])


def test_a_stream_without_new_lengths_keeps_its_sources(stores: list[TokenStore]) -> None:
    segments = [Segment(0, (1.0, 0.0, 2.0)), Segment(9, (0.0, 0.0, 1.0))]
    made = Sources.of(stores, segments, L)
    assert (made.stores, made.owners, made.segments) == (tuple(stores), (0, 1, 2), tuple(segments))
    changed = Sources.of(stores, [*segments, Segment(20, seq_length=4), Segment(30, (1.0, 0.0, 0.0))], L)
    assert list(zip(changed.owners, changed.seq_lengths)) == [(0, 8), (1, 8), (2, 8), (0, 4), (2, 4)]
    assert [each.weights for each in changed.segments[2:]] == [(0, 0, 0, 0, 1), (0, 0, 0, 1, 0)]
    assert replace(changed.segments[2], weights=None) == Segment(20, seq_length=4)


LONGER = """
[[data.mixture]]
from_step = 11
seq_length = 16
[[data.mixture]]
from_sample = 100
add = { c = 1.0 }
remove = ["b"]
"""


def read(folder: Path, mixture: str = LONGER, **flags: str) -> RunStream:
    """A run's stream in steps of 4 samples; call it in the stores' folder."""
    text = f"[data]\nstores = ['a', 'b']\nweights = [2, 1]\n{mixture}\n"
    (folder / "run.toml").write_text(text + "[train]\nseq_length = 8\nglobal_batch_size = 4\nseed = 7\n")
    return RunStream.read(str(folder / "run.toml"), {name: FlagText(value, "--flag") for name, value in flags.items()})


@pytest.fixture
def run_folder(stores: list[TokenStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with copies of the stores, a, b and c."""
    for name, store in zip("abc", stores):
        shutil.copytree(store.path, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_length_of_rows_begins_at_a_step(run_folder: Path) -> None:
    run, plain = read(run_folder), read(run_folder, "").open()
    blend = run.open()
    assert blend.segments[1:] == (
        Segment(40, (0.0, 0.0, 2.0, 1.0, 0.0), from_step=11, seq_length=16),
        Segment(100, (0.0, 0.0, 2.0, 0.0, 1.0)),
    )
    assert (plain.batch(np.arange(40)).tokens == blend.batch(np.arange(40)).tokens).all()
    assert blend.batch(run.steps().samples(11)).tokens.shape == (4, 16)
    assert StreamRecord.from_json(json.loads(json.dumps(blend.record.to_json()))) == blend.record
    doubled = read(run_folder, **{"train.global_batch_size": "8"})
    later = doubled.open(Recorded(blend.record, 20, 80))  # step 11 stays sample 40, which is no step's border now
    later.check(Cursor.start(blend, 80), blend.record)
    with pytest.raises(
        UserError, match="rows have 16 tokens from sample 42 on, in the middle of the step of samples 40"
    ):
        read(run_folder, LONGER.replace("from_step = 11", "from_sample = 42")).open()
    with pytest.raises(UserError, match="seq_length 8 from sample 40 on, after rows of 8 tokens"):
        read(run_folder, LONGER.replace("seq_length = 16", "seq_length = 8")).open()


def test_a_store_that_is_gone_had_rows_of_each_length(run_folder: Path) -> None:
    run = read(run_folder)
    whole = run.open()
    future = whole.batch(np.arange(100, 200)).buffer.copy()
    shutil.rmtree(run_folder / "b")
    blend = run.open(Recorded(whole.record, 30, 120))
    assert blend.record == whole.record
    assert blend.epochs(200) == whole.epochs(200)
    assert (blend.batch(np.arange(100, 200)).buffer == future).all()
    blend.check(Cursor.start(whole, 200), whole.record)
    with pytest.raises(UserError, match="the token store b is gone, and read from sample 60 on"):
        run.open(Recorded(whole.record, 15, 60))
    assert run.data.open(run.train, table="data", is_draft=True).sources.lengths == (8, 16)
