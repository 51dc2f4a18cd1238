"""The content hash is the one of the contract, computed here a second time from whole arrays."""

from pathlib import Path

import numpy as np
import pytest
import xxhash

from ckptkit.check.hash import hash_checkpoint
from ckptkit.loading.reader import CheckpointReader
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Placement, TensorInfo
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, values
from threefold.storage import open_storage


def tensor_hash(array: np.ndarray) -> str:
    data = array.tobytes()
    blocks = [xxhash.xxh3_128_digest(data[i : i + (1 << 20)]) for i in range(0, len(data), 1 << 20)]
    return xxhash.xxh3_128_hexdigest(b"".join(blocks))


def total(tensors: list[TensorInfo], hashes: dict[str, str], prefixes: tuple[bool, ...]) -> str:
    lines = [
        f"{t.name}\0{t.dtype}\0{','.join(map(str, t.shape))}\0{hashes[t.name]}\n"
        for t in sorted(tensors, key=lambda t: t.name)
        if t.name in hashes and t.name.startswith("optim.") in prefixes
    ]
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


@pytest.mark.parametrize("layout", ["tp1", "tp2-dp3-pp2", "tp4"])
@pytest.mark.parametrize("slab_bytes", [1 << 20, 64 << 20])
def test_hash_follows_the_contract_for_any_layout(tmp_path: Path, layout: str, slab_bytes: int) -> None:
    tensors = [
        *gpt_tensors(num_layers=2, hidden=64, vocab=9001, tied=True),
        TensorInfo("scalar", "F64", (), Placement("first")),
        TensorInfo("empty", "F32", (0, 3), Placement("first")),
    ]
    arrays = values(tensors)
    assert arrays["embed.weight"].nbytes > 2 << 20, "several blocks"
    write_checkpoint(open_storage(tmp_path), 1, ParallelLayout.parse(layout), 2, tensors, arrays)
    with CheckpointReader(open_storage(tmp_path), 1) as reader:
        hashes = hash_checkpoint(reader, slab_bytes=slab_bytes)
        assert reader.bytes_read <= sum(part.data_bytes for part in reader.root.parts)
    expected = {name: tensor_hash(array) for name, array in arrays.items()}
    assert hashes.tensors == expected
    assert hashes.params == total(tensors, expected, (False,))
    assert hashes.optim == total(tensors, expected, (True,))
    assert hashes.all == total(tensors, expected, (False, True))
