"""Every kind of ChunkSource is read by the same functions, has its own members, and inherits none of another."""

import ast
import warnings
from pathlib import Path

import numpy as np
import pytest

from ckptkit.check.diff import diff_checkpoints
from ckptkit.check.hash import hash_checkpoint
from ckptkit.check.verify import check_files
from ckptkit.foreign.dcp.export import export_dcp
from ckptkit.foreign.folder import FolderSource
from ckptkit.foreign.kinds import folder_of
from ckptkit.foreign.zarr.export import export_tensorstore
from ckptkit.loading.chunk_source import ChunkSource, RewriteSource
from ckptkit.loading.reader import MOVED, MOVED_TO_PLACES, CheckpointReader
from ckptkit.loading.restore import restore_from
from ckptkit.mapping.mapper import Mapper
from ckptkit.mapping.source import MappedSource
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Box, Piece
from ckptkit.rewrite.reshard import reshard
from ckptkit.saving.save import save
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import NUM_LAYERS, pieces_of
from threefold.errors import CheckFailed
from threefold.storage import open_storage

ROOT, TENSORS = Path(__file__).parents[3], gpt_tensors(NUM_LAYERS)
KINDS = ("reader", "mapped", "dcp", "tensorstore")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    layout = ParallelLayout(tp=2, pp=2)
    for rank in reversed(range(layout.world_size)):
        save(
            str(tmp_path / "run"), 3, pieces_of(TENSORS, layout, rank, values(TENSORS)), tensors=TENSORS, layout=layout,
            num_layers=NUM_LAYERS, metadata={}, rank=rank, world_size=layout.world_size, attempt="a",
            awaits_commit=False,
        )  # fmt: skip
    return tmp_path / "run"


def source_of(kind: str, run: Path) -> RewriteSource:
    """The step of a run, read as some kind of source."""
    reader = CheckpointReader(open_storage(run), 3)
    if kind == "reader":
        return reader
    if kind == "mapped":
        rules = run.parent / "rules.toml"
        rules.write_text("")
        return MappedSource(reader, Mapper(str(rules), reader))
    if kind == "tensorstore":
        pytest.importorskip("tensorstore")
    export = export_dcp if kind == "dcp" else export_tensorstore
    export(reader, open_storage(run.parent / kind))
    source = folder_of(kind, f"{kind}:{run.parent / kind}").open(0)
    assert isinstance(source, FolderSource)
    return source


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_hashed_compared_restored_and_resharded_alike(kind: str, run: Path, tmp_path: Path) -> None:
    with CheckpointReader(open_storage(run), 3) as reader, source_of(kind, run) as source:
        check_files(source)
        assert hash_checkpoint(source) == hash_checkpoint(reader)
        found = diff_checkpoints(reader, source)
        assert found.is_equal
        assert len(found.tensors) > NUM_LAYERS
        info = reader.root.tensors["embed.weight"]
        piece = Piece("embed.weight", Box((0, 0), info.shape), 0, info.numel, np.empty(info.numel, np.float32))
        restore_from(source, [piece])
        assert piece.data.tobytes() == values([info])["embed.weight"].tobytes()
        assert source.bytes_read
        done = reshard(source, open_storage(tmp_path / "made"), ParallelLayout(tp=2), step=3)
        assert done.num_files == 2
    with CheckpointReader(open_storage(tmp_path / "made"), 3) as made, CheckpointReader(open_storage(run), 3) as reader:
        assert hash_checkpoint(made) == hash_checkpoint(reader)


def test_no_source_inherits_another() -> None:
    sources = {"CheckpointReader", "FolderSource", "MappedSource", "FolderReader", "MappedReader", "NodeReader"}
    inherits = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for kit in ("ckptkit", "trainer", "benchmarks", "tools", "tests")
        for path in (ROOT / kit).rglob("*.py")
        if any(source in path.read_text() for source in sources)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and sources & {base.id for base in node.bases if isinstance(base, ast.Name)}
    ]
    assert inherits == []
    members = {name for name in vars(ChunkSource) if not name.startswith("_")}
    assert members == {"root", "url", "files", "stored", "bytes_read", "plan", "fetch", "close"}


def test_a_folder_with_a_certificate_is_compared_with_it_as_it_is_restored(run: Path) -> None:
    with source_of("tensorstore", run) as source:
        info = source.root.tensors["embed.weight"]
        data = np.empty(info.numel, np.float32)
        assert restore_from(source, [Piece(info.name, Box((0, 0), info.shape), 0, info.numel, data)]) == 1
    [chunk] = (run.parent / "tensorstore" / info.name / "c").rglob("0/0")
    changed = bytearray(chunk.read_bytes())
    changed[0] ^= 1
    chunk.write_bytes(changed)
    with (
        folder_of("tensorstore", f"tensorstore:{run.parent}/tensorstore").open(0) as source,
        pytest.raises(CheckFailed, match="not equal to what was saved") as failure,
    ):
        restore_from(source, [Piece(info.name, Box((0, 0), info.shape), 0, info.numel, data)])
    assert info.name in str(failure.value)


def test_members_that_moved_to_the_files_answer_for_one_release(run: Path) -> None:
    with CheckpointReader(open_storage(run), 3) as reader:
        for name in MOVED:
            with pytest.warns(DeprecationWarning, match=f"files.{name}"):
                assert getattr(reader, name) == getattr(reader.files, name)
        for name in MOVED_TO_PLACES:
            with pytest.warns(DeprecationWarning, match=f"files.places.{name}"):
                assert getattr(reader, name) == getattr(reader.files.places, name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not hasattr(reader, "sizes")
