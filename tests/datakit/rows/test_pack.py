"""Pack: the rows of an index against best-fit-decreasing in a few lines; the same bytes always; kills and bad input."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.datakit.packing import best_fit_decreasing
from datakit import PackedStore, TokenStore, pack, verify, write_store
from tests.datakit.conftest import Cli
from threefold.errors import CheckFailed, UserError

ROOT = Path(__file__).parents[3]


def make_store(folder: Path, lengths: Sequence[int], *, shard_documents: int = 1 << 20) -> TokenStore:
    """A store of documents of these lengths, every token another number."""
    ends = np.cumsum(lengths, dtype=np.int64)
    documents = [range(end - length, end) for end, length in zip(ends.tolist(), lengths)]
    vocab_size = int(sum(lengths)) + 70000
    return write_store(folder, documents, vocab_size=vocab_size, eod_id=vocab_size - 1, shard_documents=shard_documents)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any),
    seq_length=st.integers(1, 20),
    window=st.sampled_from([1, 7, 1000]),
    packing=st.sampled_from(["best_fit", "pad"]),
    num_workers=st.integers(1, 4),
)
def test_every_token_is_in_one_row_and_no_short_document_is_cut(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_length: int,
    window: int,
    packing: str,
    num_workers: int,
) -> None:
    folder = tmp_path_factory.mktemp("packing")
    store = make_store(folder / "s", lengths, shard_documents=9)
    how = {"seq_length": seq_length, "packing": packing, "window_documents": window}
    _, record = pack(store.path, **how, num_workers=num_workers)
    _, again = pack(store.path, **how, output=folder / "again")
    assert record == again
    packed = PackedStore.of(store.path, packing=packing, seq_length=seq_length)
    rows = [packed.rows.pieces(row, seq_length) for row in range(packed.num_rows(seq_length))]
    ends = set(np.cumsum(lengths).tolist())
    begins = {0, *ends}
    seen = []
    for pieces in rows:
        assert 0 < sum(piece.size for piece in pieces) <= seq_length
        assert pieces == sorted(pieces)
        for start, size, goes_on in pieces:
            seen += range(start, start + size)
            assert goes_on == (start + size not in ends)
            assert not goes_on or size == seq_length
            assert not begins & set(range(start + 1, start + size)), "all of one document"
    assert sorted(seen) == list(range(sum(lengths)))
    assert record.num_rows == len(rows)
    assert record.num_padding == len(rows) * seq_length - sum(lengths)
    if packing == "pad":
        assert len(rows) == record.num_pieces
    else:
        windows = [lengths[at : at + window] for at in range(0, len(lengths), window)]
        assert list(record.window_rows) == [best_fit_decreasing(part, seq_length) for part in windows]


def test_windows_fill_rows_as_one_does(tmp_path: Path) -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.9, 1.1, 4000), 20_000).astype(int).tolist()
    folder = tmp_path / "s"
    documents = (np.zeros(length, np.int64) for length in lengths)
    store = write_store(folder, documents, vocab_size=9, eod_id=0, shard_documents=1500)
    _, record = pack(folder, seq_length=2048, window_documents=1000)
    with pytest.raises(UserError, match="windows of 0 documents"):
        pack(folder, seq_length=2048, window_documents=0)
    assert record.num_rows <= 1.005 * best_fit_decreasing(lengths, 2048)
    assert record.num_padding < 0.01 * record.num_rows * 2048
    assert record.num_tokens == store.num_tokens


KILLED = """
import os, signal, sys
from datakit import pack
from datakit.rows.pack import Output
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(Output, sys.argv[1], die)
pack(sys.argv[2], seq_length=16)
"""


@pytest.mark.parametrize(
    "place", ["adopt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("commit", "remove_work"))]
)
def test_a_killed_run_is_made_again_and_leaves_nothing(tmp_path: Path, place: str) -> None:
    store = make_store(tmp_path / "s", [5, 40, 7, 3, 16])
    folder, _ = pack(store.path, seq_length=16, output=tmp_path / "whole")
    done = subprocess.run([sys.executable, "-c", KILLED, place, store.path], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    made, _ = pack(store.path, seq_length=16)
    assert files_of(made) == files_of(folder)
    assert sorted(os.listdir(made)) == ["ends.bin", "packing.json", "sizes.bin", "starts.bin"]
    assert verify(store.path) == []


def test_the_verb_reports_and_a_dry_run_writes_nothing(
    tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(tmp_path / "s", [6, 2, 0, 3])
    before = files_of(tmp_path)
    assert cli("pack", store.path, "--seq-length", 4, "--dry-run") == 0
    said = "would be 3 rows of 4 tokens, 8.333% padding, of 4 documents in 4 pieces; 72 bytes\n"
    assert capsys.readouterr().out == f"{store.path}/packing-best_fit-4: {said}"
    assert files_of(tmp_path) == before
    assert cli("pack", store.path, "--seq-length", 4, "--packing", "pad", "--output", tmp_path / "i", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_rows"], found["num_padding"], found["dry_run"]) == (4, 5, False)
    assert cli("verify", tmp_path / "i") == 0
    (tmp_path / "i" / "sizes.bin").write_bytes(bytes(16))
    assert cli("verify", tmp_path / "i") == 1
    assert "sizes.bin: is damaged: its checksum does not hold" in capsys.readouterr().err


def test_an_index_of_other_rows_is_refused(tmp_path: Path) -> None:
    store, other = make_store(tmp_path / "s", [6, 2, 9]), make_store(tmp_path / "o", [2, 6, 9])
    assert store.fingerprint == other.fingerprint  # the same tokens in other documents
    folder, _ = pack(store.path, seq_length=4)
    with pytest.raises(UserError, match="is the index of another store") as caught:
        PackedStore.of(other.path, packing="best_fit", seq_length=4, index=folder)
    assert f"datakit pack {other.path} --seq-length 4 --packing best_fit" in caught.value.hint
    with pytest.raises(UserError, match="is packed by best_fit into rows of 4 tokens, not by best_fit into rows of 5"):
        PackedStore.of(store.path, packing="best_fit", seq_length=5, index=folder)
    with pytest.raises(UserError, match="is not packed by pad into rows of 4 tokens"):
        PackedStore.of(store.path, packing="pad", seq_length=4)
    with pytest.raises(UserError, match="'best' is not a packing\nhint: best_fit or pad"):
        PackedStore.of(store.path, packing="best", seq_length=4)
    with pytest.raises(UserError, match="is not empty: it holds"):
        pack(store.path, seq_length=5, output=folder)
    with pytest.raises(UserError, match="has rows of 4 tokens, not 8"):
        PackedStore.of(store.path, packing="best_fit", seq_length=4).num_rows(8)
    with pytest.raises(UserError, match="holds no token"):
        pack(make_store(tmp_path / "e", [0, 0]).path, seq_length=4)
    with pytest.raises(UserError, match="from 1 to 16777216"):
        pack(store.path, seq_length=0)
    with pytest.raises(UserError, match="is not a local folder"):
        pack(store.path, seq_length=4, output="s3://bucket/index")
    assert not (tmp_path / "e" / "packing-best_fit-4").exists()


def test_damage_is_named(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [6, 2, 9])
    folder, _ = pack(store.path, seq_length=4)

    def reopened() -> TokenStore:
        return PackedStore.of(store.path, packing="best_fit", seq_length=4)

    sound = files_of(folder)
    for name, content in (("ends.bin", bytes(40)), ("sizes.bin", bytes(24)), ("ends.bin", b"\x7f" * 40)):
        (folder / name).write_bytes(content)
        with pytest.raises(CheckFailed, match="row 0 has") as caught:
            reopened().rows.pieces(0, 4)
        assert caught.value.hint == f"datakit verify {folder}"
        (folder / name).write_bytes(sound[name])
    (folder / "starts.bin").write_bytes(sound["starts.bin"][:-1])
    with pytest.raises(CheckFailed, match=r"starts\.bin has 47 bytes, its record says 48"):
        reopened()
    for text in (b"[]", b"{}", sound["packing.json"].replace(b'"num_rows": 5', b'"num_rows": 6')):
        (folder / "packing.json").write_bytes(text)
        with pytest.raises(CheckFailed, match=r"packing\.json"):
            reopened()
    index = next(tmp_path.glob("s/*.idx"))
    index.write_bytes(bytes(len(index.read_bytes())))
    with pytest.raises(CheckFailed, match=r"\.idx"):
        pack(store.path, seq_length=3)
    assert not (store.path / "packing-best_fit-3").exists()
