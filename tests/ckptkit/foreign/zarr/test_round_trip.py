"""Export to and import from Zarr arrays: any reader of Zarr sees the values, and a run comes back as it was."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.cli import main
from ckptkit.foreign.zarr import export as tensorstore_export
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import read_root
from ckptkit.model.chunk_table import ChunkTable
from ckptkit.model.tensor import Box, Cut, Placement, TensorInfo
from tests.ckptkit.support.forged import forge
from tests.ckptkit.support.model_tables import values
from tests.ckptkit.support.saves import save_whole
from threefold.storage import open_storage

STEP = 20
NEEDED = "needs tensorstore: pip install -e '.[tensorstore]'"


def call(*arguments: object) -> int:
    """Run a verb of ckptkit; its exit code."""
    return main([str(each) for each in arguments])


def save(run: Path) -> dict[str, np.ndarray]:
    """Save a step of a few tensors, one of them tied; return the values of the others."""
    embed = Placement("first", (Cut(0),), round_to=8)
    tensors = [
        TensorInfo("embed.weight", "F32", (61, 8), embed),
        TensorInfo("optim.exp_avg/embed.weight", "F32", (61, 8), embed),
        TensorInfo("layers.0.norm.weight", "F32", (8,), Placement(0)),
        TensorInfo("head.weight", "F32", (61, 8), replace(embed, stage="last", tied_to="embed.weight")),
    ]
    assert save_whole(run, STEP, tensors).ok
    return values(tensors)


def read_zarr(folder: Path) -> np.ndarray:
    """An array of chunks of rows, put together by the format's own rules."""
    described = json.loads((folder / "zarr.json").read_text())
    shape, grid = described["shape"], described["chunk_grid"]["configuration"]["chunk_shape"]
    assert (described["zarr_format"], described["node_type"], described["data_type"]) == (3, "array", "float32")
    assert described["codecs"] == [{"name": "bytes", "configuration": {"endian": "little"}}]
    rows = [
        np.fromfile("/".join([str(folder), "c", str(number), *("0" for _ in shape[1:])]), "<f4").reshape(grid)
        for number in range(-(-shape[0] // grid[0]))
    ]
    whole: np.ndarray = np.concatenate(rows)
    assert not whole[shape[0] :].any()
    return whole[: shape[0]]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a test have several chunks too."""
    monkeypatch.setattr(tensorstore_export, "CHUNK_BYTES", 800)


@pytest.mark.usefixtures("small_chunks")
def test_any_reader_of_zarr_sees_the_values_and_the_same_call_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = save(tmp_path / "run")
    words = ("export", tmp_path / "run", tmp_path / "out", "--to", "tensorstore")
    assert call(*words, "--dry-run") == 0
    assert not (tmp_path / "out").exists()
    assert call(*words) == 0
    assert f", {len(expected)} tensors equal to what was saved" in capsys.readouterr().out
    for name, each in expected.items():
        assert (read_zarr(tmp_path / "out" / name) == each).all(), name
    name = max(expected, key=lambda name: expected[name].nbytes)
    assert (tmp_path / "out" / name / "c" / "1").exists()
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert call(*words) == 0
    assert "is there already" in capsys.readouterr().out
    (tmp_path / "out" / ".export.json").write_bytes(b"")  # of another try
    assert call(*words) == 2
    assert "was begun from another checkpoint" in capsys.readouterr().err
    assert before.items() <= {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}.items()


def test_a_damaged_step_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "run")
    forge(open_storage(tmp_path / "run"), STEP, with_sums=False)
    assert call("export", tmp_path / "run", tmp_path / "out", "--to", "tensorstore") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("small_chunks")
def test_a_run_comes_back_with_placements_and_metadata(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore", reason=NEEDED)
    save(tmp_path / "run")
    assert call("export", tmp_path / "run", tmp_path / "out", "--to", "tensorstore") == 0
    assert call("diff", f"tensorstore:{tmp_path / 'out'}", tmp_path / "run") == 0
    assert call("import", tmp_path / "out", tmp_path / f"back/step-{STEP:09d}", "--from", "tensorstore") == 0
    assert call("diff", tmp_path / "back", tmp_path / "run") == 0
    before, after = (read_root(open_storage(tmp_path / name), STEP) for name in ("run", "back"))
    assert after.tensors == before.tensors
    assert (after.metadata, after.num_layers) == (before.metadata, before.num_layers)
    assert call("reshard", tmp_path / "back", tmp_path / "cut", "--tp", 2) == 0


ARRAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("zarr", "file://{}/", {"chunks": [3, 2], "compressor": {"id": "zstd", "level": 1}}),
    ("zarr", "file://{}/|ocdbt:", {"chunks": [4, 5]}),
    ("zarr3", "file://{}/", {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 5]}},
                             "codecs": [{"name": "bytes"}, {"name": "zstd"}]}),
]  # fmt: skip


@pytest.mark.parametrize(("driver", "base", "metadata"), ARRAYS, ids=["zstd", "ocdbt", "zarr3"])
def test_arrays_of_any_codec_are_tensors(tmp_path: Path, driver: str, base: str, metadata: dict[str, Any]) -> None:
    tensorstore = pytest.importorskip("tensorstore", reason=NEEDED)
    expected = {"params.w": np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32), "opt/step": np.int32(7)}
    for name, value in expected.items():
        spec: dict[str, Any] = {"driver": driver, "kvstore": base.format(tmp_path / "arrays") + name, "create": True}
        if value.shape:
            spec["metadata"] = metadata
        array = tensorstore.open(spec, shape=value.shape, dtype=value.dtype.name).result()
        array[...] = value
    assert call("import", tmp_path / "arrays", tmp_path / "run", "--from", "tensorstore") == 0
    with CheckpointReader(open_storage(tmp_path / "run"), 0) as reader:
        for name, value in expected.items():
            info, data = reader.root.tensors[name], np.empty(value.shape, value.dtype)
            assert info.shape == value.shape
            box = Box((0,) * value.ndim, value.shape)
            reader.read(ChunkTable.of([(info, box, 0, box.numel)]), [data.ctypes.data])
            assert (data == value).all()


def spoil_description(folder: Path) -> None:
    (folder / "w" / "zarr.json").write_text("{")


def other_dtype(folder: Path) -> None:
    path = folder / "w" / "zarr.json"
    path.write_text(path.read_text().replace("float32", "complex64").replace("0.0", "[0.0, 0.0]"))


def nothing(folder: Path) -> None:
    (folder / "w" / "zarr.json").unlink()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (spoil_description, "is not a folder of sound Zarr arrays"),
        (other_dtype, "w: complex64"),
        (nothing, "holds no Zarr array"),
    ],
)
def test_what_is_not_sound_is_one_error_and_nothing_is_written(
    tmp_path: Path, change: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensorstore = pytest.importorskip("tensorstore", reason=NEEDED)
    spec = {"driver": "zarr3", "kvstore": f"file://{tmp_path}/arrays/w", "create": True}
    tensorstore.open(spec, shape=[2], dtype="float32").result()
    change(tmp_path / "arrays")
    assert call("import", tmp_path / "arrays", tmp_path / "run", "--from", "tensorstore") in (1, 2)
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def lose_a_chunk(folder: Path) -> None:
    (folder / "embed.weight" / "c" / "1" / "0").unlink()


def lose_an_array(folder: Path) -> None:
    shutil.rmtree(folder / "layers.0.norm.weight")


def lose_a_description(folder: Path) -> None:
    (folder / "layers.0.norm.weight" / "zarr.json").unlink()


def lose_the_group(folder: Path) -> None:
    (folder / "zarr.json").unlink()


def change_a_value(folder: Path) -> None:
    path = folder / "embed.weight" / "c" / "0" / "0"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


def break_off(folder: Path) -> None:
    (folder / ".export.json").write_text("{}")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lose_a_chunk, "lacks 1 chunk of an export, which has them all:\n  embed.weight: 1 of 3"),
        (lose_an_array, "does not hold the arrays of its export:\n  layers.0.norm.weight: lost"),
        (lose_a_description, "lacks the descriptions of arrays:\n  layers.0.norm.weight"),
        (lose_the_group, "lacks the zarr.json of the folder"),
        (change_a_value, "is not equal to what was saved, by the certificate of the save:\n  embed.weight"),
        (break_off, "holds an export that is not finished"),
    ],
)
def test_an_export_that_lost_something_is_refused(
    tmp_path: Path, change: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though to Zarr what is not there is a value; no option takes it."""
    pytest.importorskip("tensorstore", reason=NEEDED)
    save(tmp_path / "run")
    assert call("export", tmp_path / "run", tmp_path / "out", "--to", "tensorstore") == 0
    change(tmp_path / "out")
    capsys.readouterr()
    assert call("import", tmp_path / "out", tmp_path / "back", "--from", "tensorstore", "--allow-missing-chunks") == 1
    assert text in capsys.readouterr().err
    assert not list((tmp_path / "back").rglob("root.json"))


def test_an_export_of_an_older_program_comes_back(tmp_path: Path) -> None:
    """It had neither a certificate nor marks of arrays, and a chunk that is lost there is found all the same."""
    pytest.importorskip("tensorstore", reason=NEEDED)
    save(tmp_path / "run")
    assert call("export", tmp_path / "run", tmp_path / "out", "--to", "tensorstore") == 0
    for path in (tmp_path / "out").rglob("zarr.json"):
        described = json.loads(path.read_text())
        if path.parent == tmp_path / "out":
            described["attributes"]["threefold"]["version"] = 1
            del described["attributes"]["threefold"]["certificate"]
        else:
            del described["attributes"]
        path.write_text(json.dumps(described))
    assert call("import", tmp_path / "out", tmp_path / f"back/step-{STEP:09d}", "--from", "tensorstore") == 0
    assert call("diff", tmp_path / "back", tmp_path / "run") == 0
    (tmp_path / "out" / "embed.weight" / "c" / "0" / "0").unlink()
    assert call("import", tmp_path / "out", tmp_path / "other", "--from", "tensorstore") == 1


ROWS = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 5]}}}
SHARDED = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}}, "codecs": [
    {"name": "sharding_indexed", "configuration": {"chunk_shape": [2, 2], "codecs": [{"name": "bytes"}]}}
]}  # fmt: skip


@pytest.mark.parametrize(
    ("driver", "base", "metadata", "number"),
    [
        ("zarr", "file://{}/", {"chunks": [3, 5]}, "2 of 3"),
        ("zarr", "file://{}/|ocdbt:", {"chunks": [3, 5]}, "2 of 3"),
        ("zarr3", "file://{}/", ROWS, "1 of 2"),
        ("zarr3", "file://{}/", SHARDED, "9 of 12"),
    ],
    ids=["zarr", "ocdbt", "zarr3", "sharded"],
)
def test_missing_chunks_of_others_are_counted_and_refused_unless_allowed(
    tmp_path: Path, driver: str, base: str, metadata: Any, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensorstore = pytest.importorskip("tensorstore", reason=NEEDED)
    spec = {"driver": driver, "kvstore": base.format(tmp_path / "arrays") + "m/w", "create": True, "metadata": metadata}
    array = tensorstore.open(spec, shape=[7, 5], dtype="float32").result()
    array[:2].write(np.ones((2, 5), np.float32)).result()
    words = ("import", tmp_path / "arrays", tmp_path / "run", "--from", "tensorstore")
    assert call(*words) == 2
    error = capsys.readouterr().err
    assert f"which were lost or hold fill values alone:\n  m/w: {number}" in error
    assert "--allow-missing-chunks" in error
    assert not (tmp_path / "run").exists()
    assert call(*words, "--allow-missing-chunks") == 0
    assert "not there read as fill values" in capsys.readouterr().err
    assert read_root(open_storage(tmp_path / "run"), 0).tensors["m/w"].shape == (7, 5)


def test_all_chunks_of_a_large_array_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensorstore = pytest.importorskip("tensorstore", reason=NEEDED)
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/arrays/|ocdbt:w", "create": True}
    array = tensorstore.open(spec | {"metadata": {"chunks": [1, 2]}}, shape=[6000, 4], dtype="uint8").result()
    for begin, end in ((0, 5), (6, 5500), (5501, 6000)):
        array[begin:end].write(np.ones((end - begin, 4), np.uint8)).result()
    assert call("import", tmp_path / "arrays", tmp_path / "run", "--from", "tensorstore") == 2
    assert ":\n  w: 4 of 12,000\n" in capsys.readouterr().err


def test_chunks_that_may_be_missing_are_of_zarr_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("import", tmp_path / "a", tmp_path / "run", "--from", "dcp", "--allow-missing-chunks") == 2
    assert "is of Zarr arrays, not of --from dcp" in capsys.readouterr().err


def test_an_array_that_the_folder_names_is_not_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensorstore = pytest.importorskip("tensorstore", reason=NEEDED)
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/arrays/w", "create": True}
    tensorstore.open(spec, shape=[2], dtype="float32").result()[...] = 1
    (tmp_path / "arrays" / ".zmetadata").write_text(json.dumps({"metadata": {"w/.zarray": {}, "v/.zarray": {}}}))
    assert call("import", tmp_path / "arrays", tmp_path / "run", "--from", "tensorstore") == 1
    assert "lacks the descriptions of arrays:\n  v\n" in capsys.readouterr().err
