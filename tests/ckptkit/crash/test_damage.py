"""Damage of a committed step, as bad disks, power losses and people do it: always found, the older step restored."""

import itertools
import random
import re
import shutil
import struct
from pathlib import Path

import pytest

from ckptkit.cli import main
from ckptkit.format.keys import ROOT_KEY, step_folder
from ckptkit.io.blocks import GRANULE_BYTES
from ckptkit.loading.reader import CheckpointReader
from tests.ckptkit.support.model_tables import gpt_tensors
from tests.ckptkit.support.saves import newest_good, save_whole
from threefold.storage import open_storage

TENSORS = gpt_tensors(hidden=64, ffn=128, vocab=2001)
OLDER, NEWER = 1, 2
INDEX_COLUMNS = (
    "name ends", "dtypes", "dims", "names", "shapes", "tensor", "offset", "shape", "start", "stop", "checksums", "sums"
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, mended after each damage."""
    run = tmp_path_factory.mktemp("saved")
    for step in (OLDER, NEWER):
        assert save_whole(run, step, TENSORS, scale=step).ok
    return run


def blocks(run: Path) -> dict[str, tuple[Path, int, int]]:
    """The file and the byte range of each kind of block of the newer step, by its name."""
    with CheckpointReader(open_storage(run), NEWER) as reader:
        part = reader.root.parts[0]
    root, data, table = (run / step_folder(NEWER) / name for name in (ROOT_KEY, part.data, part.index))
    damages = {}
    text = root.read_bytes()
    for name, pattern in {
        "root: its first fields": rb'\{\n"format".*?(?="metadata")',
        "root: version": rb'"version": 2',
        "root: metadata": rb'"metadata".*?(?="tensors")',
        "root: a row of a tensor": rb'\{"name": "layers\.1\.attn\.q\.weight".*',
        "root: a row of a part": rb'\{"data".*',
        "root: checksum": rb',\n"checksum".*\n\}\n',
    }.items():
        match = re.search(pattern, text, re.DOTALL if "first" in name or name.endswith("data") else 0)
        assert match, name
        damages[name] = (root, match.start(), match.end())
    header_end = 8 + struct.unpack_from("<Q", data.read_bytes()[:8])[0]
    padding = len(data.read_bytes()[:header_end].rstrip(b" "))
    granules = -(-part.data_bytes // GRANULE_BYTES)
    assert granules >= 4
    assert part.data_bytes % GRANULE_BYTES
    damages |= {
        "data: header length": (data, 0, 8),
        "data: header": (data, 8, padding),
        "data: padding": (data, padding, header_end),
        "data: first granule": (data, header_end, GRANULE_BYTES),
        "data: a middle granule": (data, 2 * GRANULE_BYTES, 3 * GRANULE_BYTES),
        "data: last granule": (data, (granules - 1) * GRANULE_BYTES, part.data_bytes),
    }
    num_dims, width, num_tensors, num_chunks, num_bytes = struct.unpack_from("<4xHHQQ16xQ", table.read_bytes(), 8)
    counts = [4 * num_tensors, num_tensors, num_tensors, num_bytes, width * num_tensors * num_dims, 4 * num_chunks]
    counts += [width * num_chunks * num_dims] * 2 + [width * num_chunks] * 2 + [8 * granules, 8 * num_tensors]
    damages["index: header"], at = (table, 0, 64), 64
    for name, size in zip(INDEX_COLUMNS, counts, strict=True):
        damages[f"index: {name}"] = (table, at, at + -(-size // 8) * 8)  # with the zeros that pad it
        at += -(-size // 8) * 8
    damages["index: checksum"] = (table, at, at + 8)
    assert at + 8 == part.index_bytes
    return damages


BLOCKS = [
    "root: its first fields", "root: version", "root: metadata", "root: a row of a tensor", "root: a row of a part",
    "root: checksum", "data: header length", "data: header", "data: padding", "data: first granule",
    "data: a middle granule", "data: last granule", "index: header", *(f"index: {name}" for name in INDEX_COLUMNS),
    "index: checksum",
]  # fmt: skip


def assert_found(run: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ckptkit verify` names the file and ends with 1, a restart gets the older step bit for bit."""
    assert main(["verify", str(run / step_folder(NEWER))]) == 1
    said = capsys.readouterr()
    assert path.name in said.out + said.err
    assert newest_good(run, TENSORS) == OLDER


@pytest.mark.parametrize("num_flips", [3, pytest.param(25, marks=pytest.mark.slow)])
@pytest.mark.parametrize("block", BLOCKS)
def test_any_flipped_bit_is_found(saved: Path, block: str, num_flips: int, capsys: pytest.CaptureFixture[str]) -> None:
    path, start, stop = blocks(saved)[block]
    chosen = random.Random(f"{block} {num_flips}")
    places = [start, stop - 1, *(chosen.randrange(start, stop) for _ in range(num_flips - 2))]
    for at in places:
        bits = 1 << chosen.randrange(8)
        _flip(path, at, bits)
        try:
            assert_found(saved, path, capsys)
        finally:
            _flip(path, at, bits)
    assert newest_good(saved, TENSORS) == NEWER


def test_every_kind_of_block_is_flipped(saved: Path) -> None:
    found = blocks(saved)
    assert list(found) == BLOCKS
    spans = [span[1:] for name, span in found.items() if name.startswith("index")]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans)), "no byte of an index is left out"


@pytest.mark.parametrize("name", [ROOT_KEY, "part-00000.index", "part-00000.safetensors"])
def test_a_file_that_is_torn_or_gone_is_found(
    saved: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a disk that lied about its fsync may leave after a power loss; and the next save works."""
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    path = next((run / step_folder(NEWER)).rglob(name))
    content = path.read_bytes()
    half, quarter = len(content) // 2, len(content) // 4
    for damaged in (
        content[:half],
        b"",
        content[:-1],
        content[:half] + bytes(len(content) - half),
        content[:quarter] + bytes(half - quarter) + content[half:],
        bytes(quarter) + content[quarter:],
    ):
        path.write_bytes(damaged)
        assert_found(run, path, capsys)
    path.unlink()
    if name == ROOT_KEY:  # without it the step never was
        assert newest_good(run, TENSORS) == OLDER
    else:
        assert_found(run, path, capsys)
    assert save_whole(run, 3, TENSORS, scale=3, attempt="b").ok
    assert newest_good(run, TENSORS) == 3


def _flip(path: Path, at: int, bits: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bits]))
