"""Packed rows in the stream: batches against numpy, epochs, resume, provenance, configuration and bad input."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit import (
    BatchOptions,
    Blend,
    Cursor,
    Loader,
    PackedStore,
    RunStream,
    TokenStore,
    blame,
    pack,
    where,
    write_store,
)
from datakit.torch import StreamDataset
from tests.datakit.conftest import Cli
from tests.datakit.rows.test_pack import make_store
from threefold.errors import CheckFailed, UserError

LENGTHS = st.lists(st.integers(0, 25), min_size=1, max_size=40).filter(any)
PACKING = st.sampled_from(["best_fit", "pad"])


def make_packed(folder: Path, lengths: list[int], seq_length: int, packing: str = "best_fit") -> TokenStore:
    make_store(folder, lengths, shard_documents=7)
    pack(folder, seq_length=seq_length, packing=packing)
    return PackedStore.of(folder, packing=packing, seq_length=seq_length)


@settings(max_examples=25)
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=2), seq_length=st.integers(1, 12), packing=PACKING)
def test_an_epoch_reads_every_token_once_and_predicts_it_from_its_own_document(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], seq_length: int, packing: str
) -> None:
    folder = tmp_path_factory.mktemp("stores")
    stores = [make_packed(folder / str(i), each, seq_length, packing) for i, each in enumerate(lengths)]
    blend = Blend([(store, 1.0) for store in stores], seq_length=seq_length, seed=3)
    num_samples = next(n for n in range(1, 10_000) if min(blend.epochs(n)) >= 1)
    samples = np.arange(num_samples)
    batch = blend.batch(samples)
    sources, numbers = blend.locate(samples)
    assert batch.cu_seqlens is not None
    assert np.array_equal(np.append(np.flatnonzero(batch.positions == 0), batch.tokens.size), batch.cu_seqlens)
    for source, store in enumerate(stores):
        first = (sources == source) & (numbers < blend.rows[source])
        filler, num_tokens = store.eod_id, store.num_tokens
        tokens, labels, mask = (x[first] for x in (batch.tokens, batch.labels, batch.loss_mask.astype(bool)))
        assert np.sort(tokens[tokens != filler]).tolist() == list(range(num_tokens))
        assert (tokens != filler).sum() == num_tokens, "padding is the end of document, which no document holds here"
        begins = {0, *np.cumsum(lengths[source]).tolist()}  # of documents: the tokens that nothing predicts
        assert np.sort(labels[mask]).tolist() == [token for token in range(num_tokens) if token not in begins]
        assert (labels[mask] == tokens[mask] + 1).all()
        assert (labels[~mask] == filler).all()
        follows = batch.positions[first][:, 1:] > 0
        assert (tokens[:, 1:] - tokens[:, :-1])[follows & (tokens[:, 1:] != filler)].tolist() == [1] * int(
            (follows & (tokens[:, 1:] != filler)).sum()
        )


@settings(max_examples=25)
@given(lengths=LENGTHS, seq_length=st.integers(1, 12), packing=PACKING, num_samples=st.integers(1, 60), data=st.data())
def test_blame_lists_what_the_batch_holds_and_where_inverts_it(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_length: int,
    packing: str,
    num_samples: int,
    data: st.DataObject,
) -> None:
    store = make_packed(tmp_path_factory.mktemp("s") / "s", lengths, seq_length, packing)
    blend = Blend([(store, 1.0)], seq_length=seq_length, seed=data.draw(st.integers(0, 99)))
    read = blame(blend, np.arange(num_samples)).rows()
    batch = blend.batch(np.arange(num_samples))
    for sample in range(num_samples):
        present = {*batch.tokens[sample].tolist(), *batch.labels[sample].tolist()} - {store.eod_id}
        said = [
            range(store.first_token(document) + start, store.first_token(document) + stop)
            for number, _, document, start, stop in read
            if number == sample
        ]
        assert sorted(present) == sorted(token for tokens in said for token in tokens)
    found = [row for number in range(len(lengths)) for row in where(blend, 0, number, num_samples).rows()]
    assert sorted(found) == read


def test_a_resume_on_other_ranks_goes_on_with_the_same_rows(tmp_path: Path) -> None:
    store = make_packed(tmp_path / "s", [5, 9, 2, 30, 1, 16, 7] * 9, 16)
    options = BatchOptions(mask_eod_loss=True)
    blend = Blend([(store, 1.0)], seq_length=16, seed=1)
    with Loader(blend, 2, 3, options=options) as loader:
        steps = [loader.next_step() for _ in range(4)]
        bounds, longest = steps[3].documents(1, 3)
        assert steps[3].positions[1].reshape(-1)[bounds[:-1]].tolist() == [0] * (len(bounds) - 1)
        assert (bounds[0], bounds[-1], longest) == (0, 32, int(np.diff(bounds).max()))
        cursor = pickle.loads(pickle.dumps(loader.cursor))
    with Loader(blend, 2, 3, options=options) as loader:
        for _ in range(2):
            loader.next_step()
        state = json.loads(json.dumps(loader.state_dict()))
        copied = pickle.loads(pickle.dumps(loader))
    assert (copied.next_step().buffer == steps[2].buffer).all()
    copied.close()
    for rank in range(3):
        with Loader(blend, 2, 1, rank, 3, Cursor.from_json(state), options) as loader:
            assert (loader.next_step().tokens[0] == steps[2].tokens[rank]).all()
    concat = Blend([(TokenStore.open(store.path), 1.0)], seq_length=16, seed=1)
    pack(store.path, seq_length=16, packing="pad")
    padded = Blend([(PackedStore.of(store.path, packing="pad", seq_length=16), 1.0)], seq_length=16, seed=1)
    for other in (concat, padded):
        with pytest.raises(UserError, match="are not those of the stream to resume"):
            other.check(cursor)


def test_bounds_of_documents_in_rows_that_are_cut(tmp_path: Path) -> None:
    documents = [[1, 2, 0], [3, 0], [4, 5, 6, 7, 0], [8, 9, 0, 3]]
    store = write_store(tmp_path / "s", documents, vocab_size=10, eod_id=0)
    blend = Blend([(store, 1.0)], seq_length=6)
    batch = blend.batch([0, 1], BatchOptions(document_bounds=True))
    first, second = (row.tolist() for row in np.split(batch.cu_seqlens[:-1], [int((batch.cu_seqlens < 6).sum())]))
    by_row = {(1, 2, 0, 3, 0, 4): [0, 3, 5], (5, 6, 7, 0, 8, 9): [0, 4]}
    for row, begins, offset in zip(batch.tokens.tolist(), (first, second), (0, 6)):
        assert [begin - offset for begin in begins] == by_row[tuple(row)]
    assert batch.cu_seqlens[-1] == 12
    assert blend.batch([0]).cu_seqlens is None
    bare = write_store(tmp_path / "bare", documents, vocab_size=10)
    with pytest.raises(UserError, match="have no end-of-document token") as caught:
        Blend([(bare, 1.0)], seq_length=6).batch([0], BatchOptions(document_bounds=True))
    assert "datakit pack" in caught.value.hint


def test_a_torch_dataset_carries_the_bounds(tmp_path: Path) -> None:
    store = make_packed(tmp_path / "s", [5, 9, 2, 30, 1, 16, 7], 16)
    blend = Blend([(store, 1.0)], seq_length=16)
    item = next(iter(StreamDataset(blend, 2)))
    begins = torch.nonzero(item["positions"].flatten() == 0).flatten().tolist()
    assert item["cu_seqlens"].tolist() == [*begins, 32]
    assert item["cu_seqlens"].dtype == torch.int32
    assert item["max_seqlen"] == int(item["cu_seqlens"].diff().max())


def test_a_run_s_file_says_how_rows_are_packed(tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_packed(tmp_path / "s", [6, 2, 0, 3, 9], 4)
    path = tmp_path / "run.toml"
    train = "[train]\ntrain_steps = 4\nseq_length = 4\nglobal_batch_size = 2\n"
    text = f"[data]\nstores = ['{store.path}']\npacking = 'best_fit'\n"
    path.write_text(text + train)
    blend = RunStream.read(str(path)).open()
    assert blend.digest() == Blend([(store, 1.0)], seq_length=4).digest()
    assert cli("blame", path, "--step", 2, "--json") == 0
    found = json.loads(capsys.readouterr().out)["samples"]
    assert [(read["sample"], read["row"]) for read in found] == [
        (sample, blend.addresses([sample])[1][0] // 4) for sample in (2, 3)
    ]
    assert cli("where", path, "--document", f"{store.path}:4", "--json") == 0
    assert {read["start"] for read in json.loads(capsys.readouterr().out)["reads"]} == {0, 4, 8}
    assert cli("blend", path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens_read"] == round(8 * 20 / blend.rows[0])

    folder, _ = pack(store.path, seq_length=4, packing="pad", output=tmp_path / "elsewhere")
    path.write_text(text.replace("best_fit", "pad") + f"indices = ['{folder}']\n" + train)
    assert RunStream.read(str(path)).open().rows.tolist() == [7]
    path.write_text(text.replace("best_fit", "concat") + f"indices = ['{folder}', 'b']\n" + train)
    with pytest.raises(UserError, match=r"data\.indices has 2 entries for 1 data\.stores") as caught:
        RunStream.read(str(path))
    assert 'data.indices needs data.packing = "best_fit" or "pad", which is "concat"' in caught.value.message
    path.write_text(text.replace("best_fit", "pad") + train)
    assert cli("blame", path, "--step", 1) == 2
    assert f"hint: datakit pack {store.path} --seq-length 4 --packing pad" in capsys.readouterr().err


def test_rows_of_two_kinds_and_damaged_rows_are_refused(tmp_path: Path) -> None:
    packed, concat = make_packed(tmp_path / "p", [6, 2, 9], 4), make_store(tmp_path / "c", [6, 2, 9, 1])
    with pytest.raises(UserError, match=r"p is packed by best_fit, .*c is not: they have other rows"):
        Blend([(packed, 1.0), (concat, 1.0)], seq_length=4)
    with pytest.raises(UserError, match="has rows of 4 tokens, not 8"):
        Blend([(packed, 1.0)], seq_length=8)
    folder = Path(packed.rows.place)
    for starts in (np.full(6, 17), np.full(6, -1), np.full(6, 15)):
        (folder / "starts.bin").write_bytes(starts.astype("<i8").tobytes())
        damaged = PackedStore.of(packed.path, packing="best_fit", seq_length=4)
        with pytest.raises(CheckFailed, match=r"is damaged: (row|one of its rows)"):
            Blend([(damaged, 1.0)], seq_length=4).batch(np.arange(len(damaged.rows.pieces(0, 4)) and 5))
