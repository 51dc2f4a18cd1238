"""Data files are ordinary safetensors files, aligned, without gaps."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ckptkit.format.data_file import DATA_ALIGNMENT
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Piece, Placement, TensorInfo
from ckptkit.plan.save_plan import plan_save
from tests.ckptkit.support.checkpoints import cut
from tests.ckptkit.support.model_tables import NUMPY, gpt_tensors, rank_chunks, values


@settings(max_examples=15)
@given(rank=st.integers(0, 7), dtype=st.sampled_from(["F32", "F64"]))
def test_the_safetensors_package_reads_every_chunk(rank: int, dtype: str, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    tensors = [
        *gpt_tensors(dtype=dtype),
        TensorInfo("rng", "U8", (13,), Placement("first")),
        TensorInfo("scalar", "I64", (), Placement("first")),
    ]
    arrays = values(tensors)
    layout = ParallelLayout(tp=2, dp=2, pp=2)
    chunks = rank_chunks(tensors, 3, layout, layout.coords(rank))
    pieces = [Piece(info.name, box, a, b, cut(arrays[info.name], box, a, b)) for info, box, a, b in chunks]
    plan = plan_save(pieces, tensors)
    file, rows = plan.files[0], plan.rows[0]
    path = tmp_path_factory.getbasetemp() / "part.safetensors"
    path.write_bytes(file.header + b"".join(pieces[row].data.tobytes() for row in rows))
    assert path.stat().st_size == file.size_bytes
    assert len(file.header) % DATA_ALIGNMENT == 0
    seen: dict[str, int] = {}
    with safe_open(path, framework="numpy") as reader:
        assert len(list(reader.keys())) == len(pieces)
        for row in rows:
            piece = pieces[row]
            key = f"{piece.name}@{seen.setdefault(piece.name, 0)}"
            seen[piece.name] += 1
            stored = reader.get_tensor(key)
            assert stored.tobytes() == piece.data.tobytes()
            whole = (piece.start, piece.stop) == (0, piece.box.numel)
            assert stored.shape == (piece.box.shape if whole else piece.data.shape)
            assert stored.dtype == np.dtype(NUMPY[next(t.dtype for t in tensors if t.name == piece.name)])


def test_names_that_json_must_escape() -> None:
    info = TensorInfo('a"b\\ü', "F32", (2,), Placement(0))
    layout = ParallelLayout()
    plan = plan_save(
        [Piece(i.name, box, a, b, None) for i, box, a, b in rank_chunks([info], 1, layout, layout.coords(0))], [info]
    )
    assert rb'"a\"b\\\u00fc@0"' in plan.files[0].header
