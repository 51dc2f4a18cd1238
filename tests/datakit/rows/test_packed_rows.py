"""Packed rows one by one: `inspect` shows what a batch reads, and documents are masked wherever they were packed."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit import Blend, Segment, blame
from datakit.reports.excerpt import sample_excerpt
from tests.datakit.conftest import Cli
from tests.datakit.rows.test_packed_stream import LENGTHS, PACKING, make_packed


@settings(max_examples=20)
@given(lengths=LENGTHS, seq_length=st.integers(1, 12), packing=PACKING, data=st.data())
def test_a_masked_document_loses_its_loss_and_no_other_does(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, packing: str, data: st.DataObject
) -> None:
    store = make_packed(tmp_path_factory.mktemp("stores") / "a", lengths, seq_length, packing)
    masked = data.draw(st.sets(st.integers(0, len(lengths) - 1), max_size=5))
    begin = data.draw(st.integers(1, 20))
    segment = Segment(begin, masked=tuple((0, number) for number in sorted(masked)))
    plain, other = (Blend([(store, 1.0)], seq_length=seq_length, later=later) for later in ([], [segment]))
    samples = range(2 * int(plain.rows[0]) + 20)
    expected, batch = plain.batch(samples), other.batch(samples)
    assert (batch.tokens == expected.tokens).all()
    starts = np.cumsum([0, *lengths])
    # a token is its own address: the label says of which document it is
    owners = np.searchsorted(starts, expected.labels, side="right") - 1
    lost = np.isin(owners, sorted(masked)) & (np.arange(len(samples)) >= begin)[:, None]
    assert (batch.loss_mask == np.where(lost, 0, expected.loss_mask)).all()


@settings(max_examples=20)
@given(lengths=LENGTHS, seq_length=st.integers(1, 12), packing=PACKING)
def test_the_excerpt_of_a_row_is_what_its_batch_reads(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, packing: str
) -> None:
    store = make_packed(tmp_path_factory.mktemp("stores") / "a", lengths, seq_length, packing)
    blend = Blend([(store, 1.0)], seq_length=seq_length)
    samples = np.arange(int(blend.rows[0]))
    for sample, row in zip(samples.tolist(), (blend.addresses(samples)[1] // seq_length).tolist()):
        excerpt = sample_excerpt(store, row, seq_length)
        read = [(document, start, stop - start) for _, _, document, start, stop in blame(blend, [sample]).rows()]
        assert [(part.document, part.start, part.num_tokens) for part in excerpt.parts] == read
        for part, ids in excerpt.part_tokens():
            assert ids.tolist() == store.document(part.document)[part.start :][: part.num_tokens].tolist()


@pytest.mark.more_faults
def test_inspect_shows_a_packed_row(tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    make_packed(tmp_path / "a", [5, 2, 3, 9], 8)
    row = ["inspect", tmp_path / "a", "--sample", "1", "--seq-length", "8", "--packing", "best_fit"]
    assert cli(*row, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert sum(part["num_tokens"] for part in shown["sources"]) == len(shown["ids"])
    assert cli(*row, "--index", tmp_path / "a" / "packing-best_fit-8") == 0
    assert cli("inspect", tmp_path / "a", "--sample", "9", "--seq-length", "8", "--packing", "best_fit") == 2
    assert "there is no sample 9" in capsys.readouterr().err
    assert cli("inspect", tmp_path / "a", "--sample", "0", "--seq-length", "9", "--packing", "best_fit") == 2
    assert "datakit pack" in capsys.readouterr().err
    assert cli("inspect", tmp_path / "a", "--document", "0", "--packing", "pad") == 2
    assert cli("inspect", tmp_path / "a", "--sample", "0", "--seq-length", "8", "--index", "there") == 2
