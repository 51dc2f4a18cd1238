"""A second reader, written from docs/formats/checkpoint.md alone: the standard library, numpy and xxhash."""

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors import safe_open

from ckptkit.format.root import Root
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Box, Cut, Piece, Placement, TensorInfo
from ckptkit.plan.save_plan import plan_save
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from ckptkit.tiers.tier import Node
from tests.ckptkit.support.checkpoints import cut
from tests.golden import make

# bfloat16 and float8, which numpy does not know, as their bits
DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U8": "<u1", "BOOL": "|b1", "F8_E4M3": "<u1", "F8_E5M2": "<u1",
}  # fmt: skip
Chunk = tuple[str, list[int], list[int], int, int, np.ndarray]  # key, box offset, box shape, start, stop, elements


class Reader:
    """The tensors of one step's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = (folder / "root.json").read_bytes()
        body, comma, checksum = text.rpartition(b",\n")
        assert comma + checksum == f',\n"checksum": "{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'.encode()
        self.root = json.loads(text)
        assert self.root["format"] == "ckptkit"
        assert self.root["version"] in (1, 2)
        assert f"step-{self.root['step']:09d}" == folder.name
        self.rows = {row["name"]: row for row in self.root["tensors"]}
        self.chunks: dict[str, list[Chunk]] = {name: [] for name in self.rows}
        self.sums: dict[str, int] = {}
        for part in self.root["parts"]:
            for name, chunk in self.chunks_of(part):
                self.chunks[name].append(chunk)

    def tensor(self, name: str) -> np.ndarray:
        row = self.rows[name]
        if row["placement"]["tied_to"] is not None:
            return self.tensor(row["placement"]["tied_to"])
        whole, times = np.zeros(row["shape"], DTYPES[row["dtype"]]), np.zeros(row["shape"], np.int64)
        for _, offset, shape, start, stop, elements in self.chunks[name]:
            window = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
            box, count = whole[window].reshape(-1), times[window].reshape(-1)
            box[start:stop] = elements
            count[start:stop] += 1
            whole[window], times[window] = box.reshape(shape), count.reshape(shape)
        assert (times == 1).all()
        return whole

    def chunks_of(self, part: dict) -> Iterator[tuple[str, Chunk]]:
        """(tensor, chunk) of one data file, in file order."""
        index = (self.folder / part["index"]).read_bytes()
        assert len(index) == part["index_bytes"]
        assert xxhash.xxh3_64_hexdigest(index) == part["index_xxh3"]
        assert xxhash.xxh3_64_intdigest(index[:-8]) == int.from_bytes(index[-8:], "little")
        assert index[:8] == b"CKPTIDX\0"
        version = int.from_bytes(index[8:12], "little")
        assert version in (1, 2)
        dims, width = np.frombuffer(index, "<u2", 2, 12).tolist()
        assert width in (4, 8)
        tensors, chunks, data_offset, data_bytes, names_bytes, granules = np.frombuffer(index, "<u8", 6, 16).tolist()
        at = 64

        def column(dtype: str, *shape: int) -> list:
            nonlocal at
            found = np.frombuffer(index, dtype, int(np.prod(shape)), at).reshape(shape)
            at += -(-found.nbytes // 8) * 8
            return found.tolist()

        ends, codes, ndims = column("<u4", tensors), column("u1", tensors), column("u1", tensors)
        text = bytes(column("u1", names_bytes))
        names = [text[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)]
        number = f"<u{width}"
        shapes = column(number, tensors, dims) if version == 2 else []
        columns = [column("<u4", chunks), *(column(number, chunks, dims) for _ in range(2)),
                   *(column(number, chunks) for _ in range(2))]  # fmt: skip
        checksums = column("<u8", granules)
        sums = column("<u8", tensors) if version == 2 else []
        assert at == len(index) - 8

        data = (self.folder / part["data"]).read_bytes()
        assert len(data) == data_bytes == part["data_bytes"]
        assert [xxhash.xxh3_64_intdigest(data[g << 20 : (g + 1) << 20]) for g in range(granules)] == checksums
        assert granules == -(-data_bytes // 2**20)
        at = data_offset
        for name, shape, sum_ in zip(names, shapes, sums, strict=False):
            assert [1] * (dims - len(self.rows[name]["shape"])) + self.rows[name]["shape"] == shape
            self.sums[name] = self.sums.get(name, 0) ^ sum_
        counts = dict.fromkeys(names, 0)
        for tensor, offset, shape, start, stop in zip(*columns, strict=True):
            name, dtype = names[tensor], DTYPES[list(DTYPES)[codes[tensor]]]
            assert self.rows[name]["dtype"] == list(DTYPES)[codes[tensor]]
            padding = dims - ndims[tensor]
            assert (offset[:padding], shape[:padding]) == ([0] * padding, [1] * padding)
            elements = np.frombuffer(data, dtype, stop - start, at)
            yield name, (f"{name}@{counts[name]}", offset[padding:], shape[padding:], start, stop, elements)
            counts[name] += 1
            at += elements.nbytes
        assert at == data_bytes


def crc64(data: bytes) -> int:
    """The sum of some bytes."""
    register = 0
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x9A6C9329AC4BC9B5 if register & 1 else 0)
    return register


def placement_of(row: dict, version: int) -> tuple[list[tuple[int, str, int | None]], int | None]:
    """The cuts of a row, each of a dim, an axis and the most parts, and what parts are rounded up to."""
    place = row["placement"]
    if version == 2:
        return [(cut["dim"], cut["axis"], cut["max_parts"]) for cut in place["cuts"]], place["round_to"]
    return [] if place["dim"] is None else [(place["dim"], place["axis"], None)], 1 if place["padded"] else None


def held_by(root: dict, row: dict, rank: int) -> list[tuple[int, int]]:
    """The first index, and the one past the last, that a rank holds along each dim."""
    sizes = root["layout"]
    rest, tp = divmod(rank, sizes["tp"])
    rest, cp = divmod(rest, sizes["cp"])
    place = {"tp": tp, "cp": cp, "ep": (rest % sizes["dp"] * sizes["cp"] + cp) % sizes["ep"]}
    cuts, round_to = placement_of(row, root["version"])
    if "etp" in sizes and "ep" in [cut[1] for cut in cuts]:
        place |= {"tp": 0, "ep": rank % (sizes["tp"] * sizes["cp"] * sizes["dp"]) % sizes["ep"]}
        sizes = sizes | {"tp": 1}
    part, parts = [0] * len(row["shape"]), [1] * len(row["shape"])
    for dim, axis, most in cuts:
        q = sizes[axis] if most is None else min(sizes[axis], most)
        part[dim], parts[dim] = part[dim] * q + place[axis] * q // sizes[axis], parts[dim] * q
    spans = []
    for dim, length in enumerate(row["shape"]):
        r = round_to if round_to and dim in [cut[0] for cut in cuts] else 1
        size = -(-length // (parts[dim] * r)) * r
        spans.append((min(part[dim] * size, length), min((part[dim] + 1) * size, length)))
    return spans


def stage_of(root: dict, row: dict) -> int:
    """The stage that holds a tensor."""
    stage, num = row["placement"]["stage"], root["layout"]["pp"] * root["layout"]["virtual"]
    if isinstance(stage, str):
        return {"first": 0, "last": num - 1}[stage]
    sizes = [root["num_layers"] // num + (n < root["num_layers"] % num) for n in range(num)]
    return [n for n, size in enumerate(sizes) for _ in range(size)][stage]


def row(name: str, dtype: str, shape: tuple[int, ...], **placement: object) -> TensorInfo:
    return TensorInfo(name, dtype, shape, Placement(**({"stage": 0} | placement)))  # type: ignore[arg-type]


TENSORS = [
    row("embed.weight", "F32", (37, 6), stage="first", cuts=(Cut(0),), round_to=4),
    row("layers.0.mlp.down.weight", "BF16", (5, 8), cuts=(Cut(1, "tp", 2),)),
    row("layers.0.experts.weight", "F64", (4, 3, 700), cuts=(Cut(0, "ep"), Cut(2))),
    row("layers.0.norm.weight", "F16", (7,)),
    row("layers.0.nothing", "I64", (0, 3)),
    row("größe", "F32", (), stage="last"),
    row("optim.exp_avg/layers.0.mlp.down.weight", "F32", (5, 400_000), cuts=(Cut(1),)),
    row("optim.exp_avg/embed.weight", "F32", (37, 6), stage="first", cuts=(Cut(0),)),
    row("deep", "I16", (1, 2, 1, 2, 1, 2, 1, 2)),
    *(row(f"plain.{dtype}", dtype, (3, 5)) for dtype in ("I64", "I32", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2")),
    row("head.weight", "F32", (37, 6), stage="last", cuts=(Cut(0),), round_to=4, tied_to="embed.weight"),
]
# what two ranks hold of tensors that are not whole on rank 0: boxes by tensor and expert parallelism, ranges in them
PARTS = {
    "embed.weight": [[((0, 0), (19, 6), 0, 114)], [((19, 0), (18, 6), 0, 108)]],
    "layers.0.mlp.down.weight": [[((0, 0), (5, 4), 0, 20)], [((0, 4), (5, 4), 0, 20)]],
    "layers.0.experts.weight": [[((0, 0, 0), (2, 3, 700), 0, 4200)], [((2, 0, 0), (2, 3, 700), 0, 4200)]],
    "optim.exp_avg/layers.0.mlp.down.weight": [
        [((0, 0), (5, 200_000), 0, 700_001), ((0, 200_000), (5, 200_000), 999_000, 1_000_000)],
        [((0, 0), (5, 200_000), 700_001, 1_000_000), ((0, 200_000), (5, 200_000), 0, 999_000)],
    ],
    "optim.exp_avg/embed.weight": [[((0, 0), (37, 6), 0, 1), ((0, 0), (37, 6), 2, 222)], [((0, 0), (37, 6), 1, 2)]],
}


def arrays_of(tensors: list[TensorInfo]) -> dict[str, np.ndarray]:
    """Any bits at all, NaNs among them."""
    rng = np.random.default_rng(7)
    arrays = {}
    for info in tensors:
        limit = 2 if info.dtype == "BOOL" else 256
        bits = rng.integers(0, limit, info.size_bytes, np.uint8)
        arrays[info.name] = bits.view(DTYPES[info.dtype]).reshape(info.shape)
    return arrays


def save(folder: Path, arrays: dict[str, np.ndarray]) -> Reader:
    """Save the tensors as two ranks and open them by the page's reader."""
    attempt, options = "a", CheckpointerOptions(deadline_s=60.0)
    ranks = [Checkpointer(str(folder), rank=r, world_size=2, attempt=attempt, options=options) for r in range(2)]
    with ranks[0], ranks[1]:
        for rank, checkpointer in enumerate(ranks):
            pieces = []
            for info in TENSORS:
                whole = ((0,) * len(info.shape), info.shape, 0, info.numel)
                given = [whole] if rank == 0 and info.placement.tied_to is None else []
                for offset, shape, start, stop in PARTS[info.name][rank] if info.name in PARTS else given:
                    box = Box(offset, shape)
                    pieces.append(Piece(info.name, box, start, stop, cut(arrays[info.name], box, start, stop)))
            layout = ParallelLayout(tp=2)
            checkpointer.save(100, pieces, tensors=TENSORS, layout=layout, num_layers=1, metadata={"tokens": 5})
        reports = [checkpointer.wait()[0] for checkpointer in ranks]
    assert all(report.ok for report in reports), reports
    return Reader(folder / "step-000000100")


@pytest.mark.parametrize("max_chunks", [200_000, 4], ids=["one file a writer", "several files a writer"])
def test_a_reader_written_from_the_page_rebuilds_every_tensor(
    tmp_path: Path, max_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.saving.staging.plan_save", partial(plan_save, max_chunks=max_chunks))
    arrays = arrays_of(TENSORS)
    reader = save(tmp_path, arrays)
    assert (len(reader.root["parts"]) > 2) == (max_chunks == 4)
    assert reader.root["metadata"] == {"tokens": 5}
    for info in TENSORS:
        expected = arrays[info.placement.tied_to or info.name]
        found = reader.tensor(info.name)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes(), info.name
        if info.placement.tied_to is None:
            total = reader.sums.get(info.name, 0)
            assert info.size_bytes > 4096 or total == crc64(found.tobytes()), info.name
            shape = ",".join(map(str, info.shape))
            line = f"{info.name}|{info.dtype}|{shape}|{total:016x}".replace("|", "\0").encode()
            assert reader.root["certificate"]["tensors"][info.name] == xxhash.xxh3_64_hexdigest(line)
    assert reader.root["certificate"]["sums"] == "crc64-nvme"


@pytest.mark.parametrize(("folder", "step"), [(f, n) for f in ("v0.1", "v0.1-root2") for n in (100, 200)])
def test_a_reader_written_from_the_page_reads_both_versions(folder: str, step: int) -> None:
    reader = Reader(Path(make.__file__).parent / folder / "run" / f"step-{step:09d}")
    assert reader.root["version"] == (1 if folder == "v0.1" else 2)
    tensors = make.table(folder)
    assert set(reader.rows) == {info.name for info in tensors}
    for info in tensors:
        values = make.values(next(t for t in tensors if t.name == (info.placement.tied_to or info.name)), step)
        assert np.array_equal(reader.tensor(info.name), values), info.name
    world = math.prod(reader.root["layout"][axis] for axis in ("tp", "cp", "dp", "pp"))
    for part in reader.root["parts"]:
        rank = int(part["data"].rpartition("-")[2].partition(".")[0])
        for name, (_, offset, shape, *_) in reader.chunks_of(part):
            spans = held_by(reader.root, reader.rows[name], rank)
            assert spans == [(a, a + n) for a, n in zip(offset, shape, strict=True)], (name, rank)
            assert (
                stage_of(reader.root, reader.rows[name]) % reader.root["layout"]["pp"]
                == rank * (reader.root["layout"]["pp"]) // world
            )


@pytest.mark.parametrize("text", ["tp2-ep2-dp2", "tp2-ep2-dp2-etp1", "tp2-cp2-ep4-pp2-etp1"])
def test_ranks_hold_of_experts_what_the_page_says(text: str) -> None:
    layout = ParallelLayout.parse(text)
    placements = [Placement(0, (Cut(0, "ep"), Cut(1, "tp"))), Placement(0, (Cut(0, "ep"),)), Placement(0, (Cut(1),))]
    tensors = {f"w{n}": TensorInfo(f"w{n}", "F32", (8, 4, 3), each) for n, each in enumerate(placements)}
    root = json.loads(Root(1, "a", layout, 2, tensors, (), {}).to_bytes())
    assert ("etp" in root["layout"]) == ("etp" in text)
    for row, info in zip(root["tensors"], tensors.values(), strict=True):
        for rank in range(layout.world_size):
            box = info.placement.local_box(info.name, info.shape, layout, layout.coords(rank))
            spans = [(a, a + n) for a, n in zip(box.offset, box.shape, strict=True)]
            assert held_by(root, row, rank) == spans, (info.name, rank)


def test_data_files_are_safetensors_with_the_header_of_the_page(tmp_path: Path) -> None:
    reader = save(tmp_path, arrays_of(TENSORS))
    for part in reader.root["parts"]:
        path, chunks = reader.folder / part["data"], list(reader.chunks_of(part))
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        assert (8 + size) % 4096 == 0
        at, entries = 0, {"__metadata__": {"ckptkit": "1"}}
        for name, (key, _, shape, start, stop, elements) in chunks:
            kept = shape if stop - start == np.prod(shape, dtype=int) else [stop - start]
            end = at + elements.nbytes
            entries[key] = {"dtype": reader.rows[name]["dtype"], "shape": kept, "data_offsets": [at, end]}
            at = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        assert data[8 : 8 + size] == text + b" " * (size - len(text))
        with safe_open(path, framework="numpy") as file:
            assert sorted(file.keys()) == sorted(key for _, (key, *_) in chunks)
            for name, (key, *_, elements) in chunks:
                if not reader.rows[name]["dtype"].startswith(("BF16", "F8")):  # which numpy does not know
                    assert file.get_tensor(key).tobytes() == elements.tobytes()


def test_numbers_past_four_bytes_have_eight(tmp_path: Path) -> None:
    """In the share of one node, which holds of a tensor of 16 GiB its last bytes alone."""
    huge, offset = row("huge", "U8", (1 << 33, 2)), ((1 << 33) - 3, 0)
    values = np.arange(4, dtype=np.uint8)
    options = CheckpointerOptions(deadline_s=60.0, node=Node("n1", "n0", first_writer=1, num_local=1, num_writers=2))
    with Checkpointer(str(tmp_path), rank=1, world_size=2, attempt="a", options=options) as checkpointer:
        piece = Piece("huge", Box(offset, (3, 2)), 1, 5, values)
        checkpointer.save(1, [piece], tensors=[huge], layout=ParallelLayout(dp=2), num_layers=1, metadata={})
        [report] = checkpointer.wait()
    assert report.ok, report
    reader = Reader(tmp_path / "step-000000001")
    assert reader.root["share"] == {"first": 1, "count": 1, "of": 2}
    [part] = reader.root["parts"]
    assert int.from_bytes((reader.folder / part["index"]).read_bytes()[14:16], "little") == 8
    [(key, *box, start, stop, elements)] = reader.chunks["huge"]
    assert (key, box, start, stop) == ("huge@0", [[(1 << 33) - 3, 0], [3, 2]], 1, 5)
    assert elements.tolist() == values.tolist()
