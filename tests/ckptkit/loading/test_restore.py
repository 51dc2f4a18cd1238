"""Restore: refusals before anything is touched, damage by name, no more read or held than wanted."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.io.blocks import GRANULE_BYTES
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import restore, restore_from
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Box, Piece, TensorInfo
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import ONE, ROOT, SMALL, assert_holds, assert_restored, pieces_of, save_whole
from threefold.errors import CheckFailed, UserError
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the small model as step 1."""
    folder = tmp_path_factory.mktemp("restore")
    assert save_whole(folder, 1, SMALL).ok
    return folder


def untouched(pieces: list[Piece]) -> bool:
    return all((piece.data == 0).all() for piece in pieces)


@given(tp=st.integers(1, 5), pp=st.integers(1, 3), dp=st.integers(1, 4), data=st.data())
def test_any_rank_of_any_layout_gets_its_part(run: Path, tp: int, pp: int, dp: int, data: st.DataObject) -> None:
    layout = ParallelLayout(tp=tp if tp not in (3, 5) else 2, pp=pp, dp=dp)
    rank = data.draw(st.integers(0, layout.world_size - 1))
    pieces = data.draw(st.permutations(pieces_of(SMALL, layout, rank)))
    restore(str(run), 1, pieces, tensors=SMALL)
    expected = {(p.name, p.box, p.start): p for p in pieces_of(SMALL, layout, rank, values(SMALL))}
    assert_restored(pieces, [expected[p.name, p.box, p.start] for p in pieces])


def test_another_model_is_refused_tensor_by_tensor(run: Path) -> None:
    other = gpt_tensors(num_layers=2, ffn=32, vocab=37)
    other.append(TensorInfo("layers.0.attn.q.bias", "F32", (16,), other[0].placement))
    other = [replace(info, dtype="F64") if info.name == "norm.weight" else info for info in other]
    pieces = pieces_of(other, ONE, 0)
    with pytest.raises(UserError) as caught:
        restore(str(run), 1, pieces, tensors=other)
    assert untouched(pieces)
    message = caught.value.message
    assert f"{run}/step-000000001 does not fit" in message
    for line in (
        "layers.0.attn.q.bias: missing in the checkpoint, wanted F32 [16]",
        "layers.0.mlp.gate.weight: F32 [24, 16], wanted F32 [32, 16]",
        "norm.weight: F32 [16], wanted F64 [16]",
        "layers.2.norm1.weight: F32 [16], not wanted",
    ):
        assert f"\n  {line}" in message
    assert caught.value.hint == f"ckptkit inspect {run}/step-000000001"
    assert caught.value.exit_code == 2


def test_pieces_that_do_not_fit_are_refused_together(run: Path) -> None:
    name, box = "norm.weight", Box((0,), (16,))
    zeros = np.zeros(16, np.float32)
    bad = [
        Piece.whole("nowhere.weight", box, zeros),
        Piece.whole("layers.0.norm1.weight", box, np.zeros(16, np.float64)),
        Piece.whole("layers.0.norm2.weight", Box((8,), (16,)), zeros),
        Piece.whole("layers.1.norm1.weight", Box((0, 0), (4, 4)), zeros),
        Piece.whole("layers.1.norm2.weight", box, zeros[:-1]),
        Piece.whole("layers.2.norm1.weight", box, np.zeros(32, np.float32)[::2]),
        Piece.whole("layers.2.norm2.weight", box, np.frombuffer(bytes(64), np.float32)),
        Piece.whole("layers.0.attn.q.weight", Box((0, 0), (16, 16)), [0.0]),
    ]
    good = Piece.whole(name, box, zeros)
    with pytest.raises(UserError) as caught:
        restore(str(run), 1, [good, *bad])
    assert untouched([good])
    for line in (
        "nowhere.weight: missing in the checkpoint",
        "layers.0.norm1.weight: F32, wanted float64",
        "layers.0.norm2.weight: [16], wanted its part [8] to [24]",
        "layers.1.norm1.weight: [16], wanted its part [0, 0] to [4, 4]",
        "layers.1.norm2.weight: a piece of 64 bytes has memory of 60 bytes",
        "layers.2.norm1.weight: a piece's memory is not contiguous",
        "layers.2.norm2.weight: a piece's memory is read-only",
        "layers.0.attn.q.weight: F32, wanted a list, which is neither an array nor a tensor",
    ):
        assert f"\n  {line}" in caught.value.message
    assert name not in caught.value.message


def test_a_missing_step_is_told(run: Path) -> None:
    with pytest.raises(UserError, match="holds no committed step 2"):
        restore(str(run), 2, [])
    with pytest.raises(UserError, match="step-000000001 is not step 2"):
        restore(f"{run}/step-000000001", 2, [])
    assert restore(f"{run}/step-000000001", 1, []).step == 1


def test_tied_tensors_come_from_the_tensor_that_holds_them(tmp_path: Path) -> None:
    tensors = gpt_tensors(tied=True)
    assert save_whole(tmp_path, 1, tensors).ok
    assert_holds(tmp_path, 1, tensors)
    head = Piece.whole("head.weight", Box((0, 0), (37, 16)), np.zeros(37 * 16, np.float32))
    embed = Piece.whole("embed.weight", Box((0, 0), (37, 16)), np.zeros(37 * 16, np.float32))
    restore(str(tmp_path), 1, [head, embed])
    expected = values(tensors)["embed.weight"].reshape(-1)
    assert (head.data == expected).all()
    assert (embed.data == expected).all()


@pytest.mark.ci
@pytest.mark.parametrize("place", ["local", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_flipped_byte_is_found_with_file_offset_and_tensor(
    tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    tensors = gpt_tensors(hidden=128, ffn=512, vocab=2000)
    url = str(tmp_path / "run") if place == "local" else request.getfixturevalue("s3_url")
    assert save_whole(url, 1, tensors).ok
    storage = open_storage(url)
    key = "step-000000001/a-0001/part-00000.safetensors"
    content = bytearray(storage.read(key))
    with CheckpointReader(storage, 1) as reader:
        index = reader.files.read_index(reader.root.parts[0])
        row = index.chunks.names.index("layers.1.mlp.up.weight")
        at = int(index.offsets[np.flatnonzero(index.chunks.tensor == row)[0]]) + 5
    assert at > GRANULE_BYTES
    content[at] ^= 16
    storage.write(key, bytes(content))
    pieces = pieces_of(tensors, ONE, 0)
    start = at // GRANULE_BYTES * GRANULE_BYTES
    with pytest.raises(CheckFailed) as caught:
        restore(url, 1, pieces, tensors=tensors)
    assert f"{url}/{key} is damaged between bytes {start} and {start + GRANULE_BYTES}" in caught.value.message
    assert "layers.1.mlp.up.weight" in caught.value.message
    elsewhere = [piece for piece in pieces_of(tensors, ONE, 0) if piece.name == "embed.weight"]
    restore(url, 1, elsewhere)  # what does not touch the damage is read
    storage.write(key, bytes(content[:-1]))
    with pytest.raises(CheckFailed, match=f"has {len(content) - 1} bytes, not {len(content)}, where .* is stored"):
        restore(url, 1, [piece for piece in pieces if piece.name == "optim.exp_avg_sq/norm.weight"])


@pytest.mark.ci
@pytest.mark.slow
def test_a_byte_flipped_on_the_wire_is_found(s3_proxy: FaultProxy, s3_url: str) -> None:
    tensors = gpt_tensors(hidden=128, ffn=512, vocab=2000)
    assert save_whole(s3_url, 1, tensors).ok
    with CheckpointReader(open_storage(s3_url), 1) as reader:
        s3_proxy.fault = Fault("flip", method="GET", after_bytes=500_000)
        with pytest.raises(CheckFailed, match=r"part-00000\.safetensors is damaged between bytes 0 and 1048576"):
            restore_from(reader, pieces_of(tensors, ONE, 0))
        assert s3_proxy.num_faults
        s3_proxy.fault = Fault()
        pieces = pieces_of(tensors, ONE, 0)
        restore_from(reader, pieces)
        assert_restored(pieces, pieces_of(tensors, ONE, 0, values(tensors)))


LARGE = gpt_tensors(hidden=256, ffn=1024, vocab=16_000)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def large_run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a run with step 1 of the large model."""
    url = str(tmp_path / "run") if request.param == "local" else request.getfixturevalue("s3_url")
    assert save_whole(url, 1, LARGE).ok
    return url


@pytest.mark.ci
def test_a_rank_reads_little_more_than_its_part(large_run: str) -> None:
    layout = ParallelLayout(tp=1, pp=3, dp=2)
    for rank in (0, 3):
        pieces = pieces_of(LARGE, layout, rank)
        needed = sum(piece.data.nbytes for piece in pieces)
        with CheckpointReader(open_storage(large_run), 1) as reader:
            restore_from(reader, pieces)
            runs = 3 * 2  # parameters and two moments, each a few stretches of the file
            assert needed < reader.bytes_read < needed + 2 * runs * 4 * GRANULE_BYTES
        assert_restored(pieces, pieces_of(LARGE, layout, rank, values(LARGE)))


MEASURE = """
import resource, sys
from ckptkit.model.layout import ParallelLayout
from ckptkit.loading.restore import restore
from tests.ckptkit.support.model_tables import gpt_tensors
from tests.ckptkit.support.saves import SMALL, pieces_of, save_whole
save_whole(sys.argv[1] + "-small", 1, SMALL)
restore(sys.argv[1] + "-small", 1, pieces_of(SMALL, ParallelLayout(), 0))
tensors = gpt_tensors(hidden=256, ffn=1024, vocab=16_000)
pieces = pieces_of(tensors, ParallelLayout(pp=3, dp=4), 5)
needed = sum(piece.data.nbytes for piece in pieces)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
restore(sys.argv[1], 1, pieces)
print(needed, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.ci
def test_a_rank_holds_little_more_than_its_part(large_run: str) -> None:
    command = [sys.executable, "-c", MEASURE, large_run]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=120)
    needed, grown = map(int, done.stdout.split())
    assert sum(info.size_bytes for info in LARGE) > 10 * needed
    assert grown < needed + (64 << 20)


def test_a_missing_data_file_is_told(tmp_path: Path) -> None:
    assert save_whole(tmp_path, 1, SMALL).ok
    path = tmp_path / "step-000000001/a-0001/part-00000.safetensors"
    path.unlink()
    with pytest.raises(CheckFailed, match=r"part-00000\.safetensors is missing, where embed.weight, .* is stored"):
        restore(str(tmp_path), 1, pieces_of(SMALL, ONE, 0))
