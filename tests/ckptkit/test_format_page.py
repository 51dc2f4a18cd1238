"""A second reader, written from docs/formats/checkpoint.md alone: json, numpy, xxhash and the safetensors package."""

import json
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors import safe_open

from tests.ckptkit.checkpoints import write_checkpoint
from tests.ckptkit.model_tables import gpt_tensors, values

NUMPY = {"F64": np.float64, "F32": np.float32}


class Reader:
    """The tensors of one step's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = (folder / "root.json").read_bytes()
        self.root = json.loads(text)
        assert (self.root["format"], self.root["version"]) == ("ckptkit", 1)
        tail = f',\n"checksum": "{self.root["checksum"]}"\n}}\n'.encode()
        assert text.endswith(tail)
        assert xxhash.xxh3_64_hexdigest(text[: -len(tail)]) == self.root["checksum"]

    def tensor(self, name: str) -> np.ndarray:
        row = next(row for row in self.root["tensors"] if row["name"] == name)
        if row["placement"]["tied_to"]:
            return self.tensor(row["placement"]["tied_to"])
        whole = np.zeros(row["shape"], NUMPY[row["dtype"]])
        times = np.zeros(row["shape"], np.int64)
        for part in self.root["parts"]:
            for key, offset, shape, start, stop in self.chunks(part, name):
                with safe_open(self.folder / part["data"], framework="numpy") as file:
                    stored = file.get_tensor(key)
                window = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
                box, count = whole[window].reshape(-1), times[window].reshape(-1)
                box[start:stop] = stored.reshape(-1)
                count[start:stop] += 1
                whole[window], times[window] = box.reshape(shape), count.reshape(shape)
        assert (times == 1).all()
        return whole

    def chunks(self, part: dict, name: str) -> list[tuple[str, list[int], list[int], int, int]]:
        """(safetensors key, box offset, box shape, start, stop) of a tensor's chunks in one data file."""
        index = (self.folder / part["index"]).read_bytes()
        assert len(index) == part["index_bytes"]
        assert xxhash.xxh3_64_hexdigest(index) == part["index_xxh3"]
        assert index[:8] == b"CKPTIDX\0"
        assert np.frombuffer(index, "<u4", 1, 8) == 1
        dims, width = np.frombuffer(index, "<u2", 2, 12).tolist()
        tensors, chunks, data_offset, data_bytes, names_bytes, granules = np.frombuffer(index, "<u8", 6, 16).tolist()
        at = 64

        def column(dtype: str, *shape: int) -> np.ndarray:
            nonlocal at
            found = np.frombuffer(index, dtype, int(np.prod(shape)), at).reshape(shape)
            at += (found.nbytes + 7) // 8 * 8
            return found

        ends, _, ndims = column("<u4", tensors), column("u1", tensors), column("u1", tensors)
        names = column("u1", names_bytes).tobytes()
        number = f"<u{width}"
        tensor, offset, shape = column("<u4", chunks), column(number, chunks, dims), column(number, chunks, dims)
        start, stop, checksums = column(number, chunks), column(number, chunks), column("<u8", granules)
        assert xxhash.xxh3_64_intdigest(index[:at]) == int.from_bytes(index[at:], "little")

        data = (self.folder / part["data"]).read_bytes()
        assert len(data) == data_bytes == part["data_bytes"]
        assert data_offset % 4096 == 0
        for granule in range(granules):
            assert xxhash.xxh3_64_intdigest(data[granule << 20 : (granule + 1) << 20]) == checksums[granule]

        found = []
        for chunk in range(chunks):
            number = int(tensor[chunk])
            if names[ends[number - 1] if number else 0 : ends[number]].decode() == name:
                skip = dims - int(ndims[number])
                box = offset[chunk, skip:].tolist(), shape[chunk, skip:].tolist()
                found.append((f"{name}@{len(found)}", *box, int(start[chunk]), int(stop[chunk])))
        return found


@pytest.mark.parametrize(
    "name", ["embed.weight", "layers.1.mlp.down.weight", "optim.exp_avg/layers.0.norm1.weight", "head.weight"]
)
def test_a_reader_written_from_the_page_rebuilds_tensors(tmp_path: Path, name: str) -> None:
    from ckptkit.layout import ParallelLayout
    from threefold.storage import open_storage

    tensors = gpt_tensors(dtype="F64", tied=True, hidden=64, vocab=501)
    arrays = values(tensors)
    layout = ParallelLayout(tp=2, dp=2, pp=2)
    write_checkpoint(open_storage(tmp_path), 100, layout, 3, tensors, arrays, max_chunks=40)
    found = Reader(tmp_path / "step-000000100").tensor(name)
    expected = arrays["embed.weight" if name == "head.weight" else name]
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)
