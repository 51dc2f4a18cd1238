"""Tensor tables of small GPT-shaped models, and their values: every element a function of name and global index."""

from collections.abc import Sequence

import numpy as np

from ckptkit.model.layout import Coords, ParallelLayout
from ckptkit.model.ranks import Partition, RankChunk
from ckptkit.model.tensor import Cut, Placement, TensorInfo

NUMPY = {"F64": np.float64, "F32": np.float32, "BF16": np.uint16, "I64": np.int64, "U8": np.uint8}


def rank_chunks(
    tensors: Sequence[TensorInfo], num_layers: int, layout: ParallelLayout, coords: Coords
) -> list[RankChunk]:
    """What the rank at `coords` stores of a table; for many ranks of one layout, a Partition sorts it once."""
    return Partition(tensors, num_layers, layout).chunks(coords)


def gpt_tensors(
    num_layers: int = 3, hidden: int = 16, kv: int = 8, ffn: int = 24, vocab: int = 37, tied: bool = False,
    dtype: str = "F32",
) -> list[TensorInfo]:  # fmt: skip
    """Parameters and both moments; the vocabulary does not divide, so it is padded in the live tensors."""
    parameters: list[tuple[str, tuple[int, ...], Placement]] = [
        ("embed.weight", (vocab, hidden), Placement("first", (Cut(0),), round_to=1)),
        ("norm.weight", (hidden,), Placement("last")),
        (
            "head.weight",
            (vocab, hidden),
            Placement("last", (Cut(0),), round_to=1, tied_to="embed.weight" if tied else None),
        ),
    ]
    for n in range(num_layers):
        rows = {"attn.q": hidden, "attn.k": kv, "attn.v": kv, "mlp.gate": ffn, "mlp.up": ffn}
        parameters += [
            (f"layers.{n}.{name}.weight", (size, hidden), Placement(n, (Cut(0),))) for name, size in rows.items()
        ]
        columns = {"attn.out": hidden, "mlp.down": ffn}
        parameters += [
            (f"layers.{n}.{name}.weight", (hidden, size), Placement(n, (Cut(1),))) for name, size in columns.items()
        ]
        parameters += [(f"layers.{n}.{name}.weight", (hidden,), Placement(n)) for name in ("norm1", "norm2")]
    tensors = []
    for prefix in ("", "optim.exp_avg/", "optim.exp_avg_sq/"):
        for name, shape, placement in parameters:
            if not (prefix and placement.tied_to):
                tensors.append(TensorInfo(prefix + name, dtype, shape, placement))
    return tensors


def values(tensors: list[TensorInfo]) -> dict[str, np.ndarray]:
    """The global arrays; no two elements of a table are equal while it has fewer than 2**24 of them."""
    arrays, at = {}, 1
    for info in tensors:
        if info.placement.tied_to is None:
            arrays[info.name] = np.arange(at, at + info.numel).astype(NUMPY[info.dtype]).reshape(info.shape)
            at += info.numel
    return arrays
