"""[[data.mixture]]: the stream of a run whose mixture changes, what may be gone or recorded by then, and its faults."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit import (
    Blend,
    Cursor,
    HostBatch,
    Loader,
    MixtureConfig,
    Recorded,
    RunStream,
    Segment,
    StreamRecord,
    TokenStore,
    write_store,
)
from datakit.reports.provenance import blame, where
from threefold.errors import UserError
from threefold.options import FlagText

L = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stores whose tokens are their own addresses, a, b and c."""
    found = tmp_path_factory.mktemp("stores")
    for name, size in (("a", 401), ("b", 160), ("c", 83)):
        write_store(found / name, np.array_split(np.arange(size), 9), vocab_size=500, shard_documents=2)
    return found


def read(folder: Path, mixture: str = "", stores: str = "'a', 'b'", **flags: str) -> RunStream:
    """A run's stream whose weights are 2 and 1, in steps of 4 samples; call it in the stores' folder."""
    text = f"[data]\nstores = [{stores}]\nweights = [2, 1]\n{mixture}\n"
    (folder / "run.toml").write_text(text + "[train]\nseq_length = 8\nglobal_batch_size = 4\nseed = 7\n")
    return RunStream.read(str(folder / "run.toml"), {name: FlagText(value, "--flag") for name, value in flags.items()})


@pytest.fixture
def run_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


CHANGED = """
[[data.mixture]]
from_step = 26
add = { c = 1.0 }
weights = { a = 1 }
[[data.mixture]]
from_sample = 160
remove = ["b"]
skip = [[170, 178], [200, 201]]
[[data.mixture]]
from_sample = 240
mask_documents = "bad.txt"
"""


@pytest.fixture
def changed(run_folder: Path) -> RunStream:
    (run_folder / "bad.txt").write_text("# documents that a filter missed\na:3\n./c:2  # 28 to 37\n\n")
    return read(run_folder, CHANGED)


def test_a_run_without_mixture_is_the_stream_of_before(tmp_path: Path) -> None:
    """What the version before mixtures read, and its cursors."""
    stores = [
        write_store(tmp_path / str(size), np.array_split(np.arange(size), 9), vocab_size=500 + size, shard_documents=2)
        for size in (401, 160, 83)
    ]
    far = np.r_[0:2000, 10**12 : 10**12 + 500, 2**61 : 2**61 + 500]
    later: list[tuple[int, list[float]]] = [(100, [1, 1, 1]), (260, [0, 2, 1])]
    for weights, changes, digest, cursor in [
        ([0.5, 0.3, 0.2], [], "61a35d8917702137", (1, "2088e5113ca69391")),
        ([1, 0, 2.5], later, "df69ed0a4ec3e1e2", (3, "82b663a4640f4760")),
    ]:
        blend = Blend(list(zip(stores, weights)), seq_length=L, seed=7, later=changes)
        whole = np.empty(HostBatch.num_bytes((len(far), L)), np.uint8)  # positions and loss mask too
        assert xxhash.xxh3_64_hexdigest(blend.batch(far, out=whole).buffer.tobytes()) == digest
        names = {"num_segments": cursor[0], "digest": cursor[1]}
        expected = {"version": 1, "num_samples": 10**9, "seed": 7, "seq_length": L, **names}
        assert Cursor.start(blend, 10**9).to_json() == expected


def test_the_tables_become_segments(changed: RunStream) -> None:
    blend = changed.open()
    assert [str(store.path) for store in blend.stores] == ["a", "b", "c"]
    assert blend.segments == (
        Segment(0, (2.0, 1.0, 0.0)),
        Segment(100, (1.0, 1.0, 1.0), from_step=26),
        Segment(160, (1.0, 0.0, 1.0), ((170, 178), (200, 201))),
        Segment(240, None, masked=((0, 3), (2, 2))),
    )
    plain = read(Path.cwd()).open()
    assert (plain.batch(np.arange(100)).tokens == blend.batch(np.arange(100)).tokens).all()
    without = read(Path.cwd(), CHANGED.replace("skip = [[170, 178], [200, 201]]", "")).open()
    kept = np.delete(np.arange(260), [*range(170, 178), 200])
    assert (blend.batch(np.arange(251)).tokens == without.batch(kept).tokens).all()
    json.dumps(blend.record.to_json())
    assert StreamRecord.from_json(json.loads(json.dumps(blend.record.to_json()))) == blend.record


def test_a_flag_says_the_same(run_folder: Path) -> None:
    run = read(run_folder, **{"data.mixture": "from_sample=100,remove=b,skip=120:128"})
    assert run.data.mixture == (MixtureConfig(100, remove=("b",), skip=((120, 128),)),)


def test_labels_of_masked_documents_carry_no_loss(changed: RunStream) -> None:
    blend = changed.open()
    batch, samples = blend.batch(np.arange(600)), np.arange(600)
    sources, _ = blend.locate(samples)
    bad = np.zeros_like(batch.labels, bool)
    for source, document in ((0, 3), (2, 2)):
        tokens = blend.stores[source].document(document).astype(np.int64)  # which are their own addresses
        bad |= (sources == source)[:, None] & np.isin(batch.labels, tokens)
    bad[:240] = False
    assert bad.sum() > 40
    assert (batch.loss_mask == ~bad).all()
    found = {(sample, source) for sample, source, document, *_ in blame(blend, samples).rows()
             if blend.is_masked(sample, source, document)}  # fmt: skip
    assert {(sample, int(sources[sample])) for sample in np.flatnonzero(bad.any(1)).tolist()} <= found


@pytest.mark.slow
@settings(max_examples=15)
@given(data=st.data(), at=st.integers(1, 300))
def test_blame_and_where_are_each_others_inverse_over_segments(folder: Path, data: st.DataObject, at: int) -> None:
    stores = [TokenStore.open(folder / name) for name in "abc"]
    weights = st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=3, max_size=3).filter(any)
    later = [
        Segment(start, tuple(data.draw(weights)) if data.draw(st.booleans()) else None, ((start + 3, start + at),))
        for start in sorted(data.draw(st.lists(st.integers(1, 200), max_size=3, unique=True)))
        if at > 3
    ]
    blend = Blend([(store, 1.0) for store in stores], seq_length=L, seed=at, later=later)
    read: dict[tuple[int, int], set[tuple[int, int, int]]] = {}
    for sample, source, document, start, stop in blame(blend, np.arange(300)).rows():
        read.setdefault((source, document), set()).add((sample, start, stop))
    for source in range(3):
        for document in range(9):
            found = {(sample, start, stop) for sample, _, _, start, stop in where(blend, source, document, 300).rows()}
            assert found == read.get((source, document), set())


@pytest.mark.slow
@settings(max_examples=60)
@given(read_samples=st.integers(0, 80), rows=st.integers(1, 3), dp_size=st.integers(1, 3))
def test_a_resume_from_any_cursor_is_the_uninterrupted_stream(
    folder: Path, read_samples: int, rows: int, dp_size: int
) -> None:
    stores = [TokenStore.open(folder / name) for name in "ab"]
    later = [Segment(40, (1.0, 3.0)), Segment(60, None, ((62, 70), (90, 95)), ((0, 3),))]
    blend = Blend([(store, 1.0) for store in stores], seq_length=L, later=later)
    known = [each for each in later if each.from_sample < read_samples]
    before = Blend([(store, 1.0) for store in stores], seq_length=L, later=known)
    cursor = Cursor.from_json(json.loads(json.dumps(Cursor.start(before, read_samples).to_json())))
    wanted = blend.batch(np.arange(read_samples, read_samples + 4 * rows * dp_size))
    parts = []
    for rank in range(dp_size):
        with Loader(blend, rows, 1, rank, dp_size, cursor) as loader:
            parts.append(np.stack([loader.next_step().tokens[0] for _ in range(4)]))
    assert (np.stack(parts, 1).reshape(-1, L) == wanted.tokens).all()


def test_a_past_that_was_edited_is_refused_and_shown(run_folder: Path, changed: RunStream) -> None:
    blend = changed.open()
    with Loader(blend, 4, 1, cursor=Cursor.start(blend, 300)) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(Cursor.start(blend, 300).to_json())) < 1024
    for text, faults in [
        ("", ["segment 1, from sample 100 on, is missing", "segment 3, from sample 240 on, is missing"]),
        (CHANGED.replace("{ a = 1 }", "{ a = 2 }"), ["segment 1: the share of a was 0.333333, is 0.5"]),
        (CHANGED.replace("step = 26", "step = 20"), ["segment 1 began at sample 100, now it does at 76"]),
        (CHANGED.replace("200, 201", "200, 202"), ["segment 2 skipped", "to 201, now it does", "samples 200 to 202"]),
        (CHANGED.replace('"bad.txt"', '""'), ["segment 3 masked other documents"]),
        (CHANGED.replace('["b"]', '["a"]'), ["segment 2: a (", "is missing", "b (", "is new"]),
        (CHANGED + "[[data.mixture]]\nfrom_sample = 299\nremove = ['a']", ["weights change from sample 299 on"]),
    ]:  # fmt: skip
        with Loader(read(run_folder, text).open(), 4, 1) as loader, pytest.raises(UserError) as caught:
            loader.load_state_dict(state)
        assert all(fault in caught.value.message for fault in faults), caught.value.message
        assert "from_sample = 300" in str(caught.value.hint)
    for text in (
        CHANGED + "[[data.mixture]]\nfrom_sample = 300\nremove = ['a']\nskip = [[300, 400]]",
        CHANGED + "[[data.mixture]]\nfrom_sample = 301\nmask_documents = ''\n",
    ):
        with Loader(read(run_folder, text).open(), 4, 1) as loader:
            loader.load_state_dict(state)


def test_what_is_not_begun_may_be_edited(run_folder: Path, changed: RunStream) -> None:
    cursor = Cursor.start(changed.open(), 190)  # the second skip is still to come
    assert cursor.num_segments == 4
    for text in (CHANGED.replace(", [200, 201]", ""), CHANGED[: CHANGED.rindex("[[data")]):
        read(run_folder, text).open().check(cursor)
    read(run_folder).open().check(Cursor.start(changed.open(), 100))


def test_a_step_stays_the_sample_that_it_was(changed: RunStream) -> None:
    blend = changed.open()
    recorded = Recorded(blend.record, 30, 120)
    doubled = read(
        Path.cwd(),
        CHANGED + "[[data.mixture]]\nfrom_step = 71\nweights = { c = 2 }",
        **{"train.global_batch_size": "8"},
    )
    assert [each.from_sample for each in doubled.open(recorded).segments] == [0, 100, 160, 240, 120 + 40 * 8]
    with pytest.raises(UserError, match="changes from sample 160 on come after 200"):
        doubled.open()
    assert len(doubled.data.open(doubled.train, table="data", is_draft=True).segments) == 5


@pytest.fixture
def without_b(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Blend, RunStream]:
    """The blend of a run that reads no more of b, and that run after b is gone."""
    for name in "ab":
        shutil.copytree(folder / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    run = read(tmp_path, "[[data.mixture]]\nfrom_sample = 100\nremove = ['b']\n")
    blend = run.open()
    blend = Blend(list(zip(blend.stores, (2, 1))), seq_length=L, seed=7, later=blend.segments[1:])
    blend.batch(np.arange(300))
    shutil.rmtree(tmp_path / "b")
    return blend, run


def test_a_source_that_is_read_no_more_may_be_gone(without_b: tuple[Blend, RunStream], tmp_path: Path) -> None:
    whole, run = without_b
    blend = run.open(Recorded(whole.record, 25, 100))
    blend.check(Cursor.start(whole, 200), whole.record)
    assert blend.record == whole.record
    future = np.arange(100, 300)
    assert (blend.batch(future).buffer == whole.batch(future).buffer).all()
    assert (blend.counts(300) == whole.counts(300)).all()
    _, sources = future, whole.locate(np.arange(100))[0]
    with pytest.raises(UserError, match="the token store b is gone, and what is asked for"):
        blend.batch(np.flatnonzero(sources == 1))
    with pytest.raises(UserError, match="the token store b is gone"):
        where(blend, 1, 0, 100)
    with pytest.raises(UserError, match="b is gone, and nothing here says how much of it was read"):
        run.open()
    with pytest.raises(UserError, match="the token store b is gone, and read from sample 60 on") as caught:
        run.open(Recorded(whole.record, 15, 60))
    assert 'from_sample = 60, remove = ["b"]' in str(caught.value.hint)
    path = tmp_path / "root.json"
    path.write_text(
        json.dumps({"step": 25, "metadata": {"cursor": {"num_samples": 100}, "stream": whole.record.to_json()}})
    )
    assert Recorded.read(str(path)) == Recorded(whole.record, 25, 100)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"num_samples": 1}', '{"num_samples": "x", "stream": {}}', None])
def test_a_file_without_record(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=r"x.json") as caught:
        Recorded.read(str(tmp_path / "x.json"))
    assert caught.value.hint


@pytest.mark.parametrize("value", [None, {}, {"version": 2}, {"version": 1, "sources": [1], "segments": []}])
def test_a_schedule_that_is_none(value: Any) -> None:
    with pytest.raises(UserError, match="is not a stream record"):
        StreamRecord.from_json(value)


@pytest.mark.parametrize(
    ("tables", "fault"),
    [
        ("from_sample = 0", "data.mixture[0].from_sample: must be at least 1, got 0"),
        ("from_step = 1", "data.mixture[0].from_step: must be at least 2, got 1"),
        ("remove = ['b']", "data.mixture[0] needs from_sample or from_step"),
        ("from_sample = 9\nfrom_step = 4", "one of them alone"),
        ("from_sample = 9\n[[data.mixture]]\nfrom_sample = 9", "data.mixture[1].from_sample 9 comes after 9"),
        ("from_step = 9\n[[data.mixture]]\nfrom_step = 8", "data.mixture[1].from_step 8 comes after 9"),
        ("from_sample = 9\nweights = { x = 1.0 }", "weights: unknown source x, known are a, b"),
        ("from_sample = 9\nremove = ['x']", "remove: unknown source x"),
        ("from_sample = 9\nadd = { b = 3 }", "add: b is read already"),
        ("from_sample = 9\nadd = { c = 0 }", "add: must be above 0"),
        ("from_sample = 9\nadd = ['c']", "add: must be a table of names, each with a number"),
        ("from_sample = 9\nweights = { a = -1.0 }", "weights: must be at least 0"),
        ("from_sample = 9\nremove = ['a', 'b']", "the weights of all sources are 0"),
        ("from_sample = 9\nskip = [[12, 12]]", "[12, 12] is not a range [first, stop]"),
        ("from_sample = 9\nskip = [12, 13]", "skip: must be a list of a whole number"),
        ("from_sample = 9\nseq_length = 0", "data.mixture[0].seq_length: must be at least 1, got 0"),
        ("from_sample = 9\nskip = 12", "skip: must be a list of lists"),
        ("from_sample = 9\nwieghts = { a = 1 }", "data.mixture[0].wieghts: unknown key, did you mean"),
    ],
)
def test_faulty_tables(run_folder: Path, tables: str, fault: str) -> None:
    with pytest.raises(UserError) as caught:
        read(run_folder, "[[data.mixture]]\n" + tables)
    assert fault in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("tables", "fault"),
    [
        ("skip = [[8, 12]]", "the segment from sample 9 on cannot skip samples 8 to 12"),
        ("add = { tiny = 1 }", "tiny holds 5 tokens, too few for one row of 8"),
        ("add = { nowhere = 1 }", "nowhere"),
        ("mask_documents = 'none.txt'", "data.mixture[0].mask_documents: cannot read none.txt"),
        ("mask_documents = 'one.txt'", "one.txt line 2: a is not a document STORE:K of a, b"),
        ("mask_documents = 'two.txt'", "two.txt line 1: c:1 is not a document STORE:K of a, b"),
        ("mask_documents = 'three.txt'", "document 9 of b cannot be masked: it has 9, counted from 0"),
        ("[[data.mixture]]\nfrom_step = 2\nremove = ['a']", "changes from sample 4 on come after 9"),
    ],
)
def test_faults_that_stores_and_files_show(run_folder: Path, tables: str, fault: str) -> None:
    for name, text in (("one", "a:1\na\n"), ("two", "c:1"), ("three", "b:9")):
        (run_folder / f"{name}.txt").write_text(text)
    if not (run_folder / "tiny").exists():
        write_store(run_folder / "tiny", [range(5)], vocab_size=500)
    with pytest.raises(UserError) as caught:
        read(run_folder, "[[data.mixture]]\nfrom_sample = 9\n" + tables).open()
    assert fault in caught.value.message
    assert caught.value.hint


def test_a_change_of_a_store_that_is_named_twice_is_refused(run_folder: Path) -> None:
    more_than_once = "a is named more than once in data.stores; name one of them by a link to it"
    for table in ("remove = ['./a']", "weights = { a = 3 }"):
        with pytest.raises(UserError, match=more_than_once):
            read(run_folder, f"[[data.mixture]]\nfrom_sample = 9\n{table}", stores="'a', 'a'")
    (run_folder / "twice.txt").write_text("a:1\n")
    table = "[[data.mixture]]\nfrom_sample = 9\nmask_documents = 'twice.txt'"
    with pytest.raises(UserError, match=r"twice\.txt line 1: a is named more than once") as caught:
        read(run_folder, table, stores="'a', 'a'").open()
    assert caught.value.hint == f"ln -s {run_folder / 'a'} COPY, and name one of them so"
    if not (run_folder / "linked").exists():
        (run_folder / "linked").symlink_to("a")
    assert read(run_folder, table, stores="'a', 'linked'").open().is_masked(9, 0, 1)
    assert read(run_folder, "[[data.mixture]]\nfrom_sample = 9\nremove = ['linked']", stores="'a', 'linked'").open()
