"""Make a synthetic, GPT-shaped checkpoint of a given size with ckptkit.save.

    python tools/make_checkpoint.py OUT --gib 1          # step 100 of run OUT, saved as tp8-dp2-pp4

Grouped-query attention, SwiGLU, a vocabulary of 50257 (padded differently by every tp), 30 layers, fp32 master weights
and both moments of Adam. Every value is a function of the tensor's name and the element's global index, so any other
program can say what a checkpoint must hold. Memory is a few ranks' parts.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit import Box, Cut, ParallelLayout, Partition, Piece, Placement, TensorInfo, save
from threefold.cli import Parser, print_json, run

VOCAB = 50257
STEP_ELEMENTS = 1 << 20  # elements whose values are computed at once
RANKS_AT_ONCE = 3  # how many save side by side


def element_values(name: str, positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Return the values of a tensor at global row-major positions: 24 mixed bits in [-0.5, 0.5), exact in float32."""
    mixed = positions + np.uint64(xxhash.xxh3_64_intdigest(name.encode()))
    for multiplier in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F):
        mixed *= np.uint64(multiplier)
        mixed ^= mixed >> np.uint64(29)
    return (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2**-24) - np.float32(0.5)


def chunk_values(info: TensorInfo, box: Box, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Return the values of the row-major positions [start, stop) of a box of a tensor."""
    values = np.empty(stop - start, np.float32)
    for at in range(start, stop, STEP_ELEMENTS):
        end = min(at + STEP_ELEMENTS, stop)
        positions, rest, stride = np.zeros(end - at, np.int64), np.arange(at, end), 1
        for offset, length, extent in reversed(list(zip(box.offset, box.shape, info.shape, strict=True))):
            rest, index = np.divmod(rest, length)
            positions += (index + offset) * stride
            stride *= extent
        values[at - start : end - start] = element_values(info.name, positions.astype(np.uint64))
    return values


def gpt_tensors(num_layers: int, hidden: int) -> list[TensorInfo]:
    """Return the tensor table; attention has four query heads to a key head."""
    kv, ffn = hidden // 4, hidden * 8 // 3 // 32 * 32
    shapes: dict[str, tuple[tuple[int, ...], Placement]] = {
        "embed.weight": ((VOCAB, hidden), Placement("first", (Cut(0),), round_to=1)),
        "norm.weight": ((hidden,), Placement("last")),
        "head.weight": ((VOCAB, hidden), Placement("last", (Cut(0),), round_to=1)),
    }
    for n in range(num_layers):
        layer = f"layers.{n}"
        for name, rows in {"attn.q": hidden, "attn.k": kv, "attn.v": kv, "mlp.gate": ffn, "mlp.up": ffn}.items():
            shapes[f"{layer}.{name}.weight"] = ((rows, hidden), Placement(n, (Cut(0),)))
        for name, columns in {"attn.out": hidden, "mlp.down": ffn}.items():
            shapes[f"{layer}.{name}.weight"] = ((hidden, columns), Placement(n, (Cut(1),)))
        for name in ("norm1", "norm2"):
            shapes[f"{layer}.{name}.weight"] = ((hidden,), Placement(n))
    return [
        TensorInfo(f"optim.{kind}/{name}", "F32", shape, placement)
        for kind in ("master", "exp_avg", "exp_avg_sq")
        for name, (shape, placement) in shapes.items()
    ]


def hidden_for(gib: float, num_layers: int) -> int:
    """Return the least hidden size, a multiple of 32, that makes a checkpoint of at least this size."""
    hidden = 32
    while sum(info.size_bytes for info in gpt_tensors(num_layers, hidden)) < gib * 2**30:
        hidden += 32
    return hidden


def make(url: str, tensors: Sequence[TensorInfo], num_layers: int, layout: ParallelLayout, step: int) -> int:
    """Save every rank's part, rank 0 last since it commits; the bytes written."""

    def save_rank(rank: int) -> int:
        chunks = Partition(tensors, num_layers, layout).chunks(layout.coords(rank))
        pieces = [Piece(info.name, box, a, b, chunk_values(info, box, a, b)) for info, box, a, b in chunks]
        save(
            url, step, pieces, tensors=tensors, layout=layout, num_layers=num_layers, metadata={"synthetic": True},
            rank=rank, world_size=layout.world_size, attempt="synthetic", awaits_commit=False,
        )  # fmt: skip
        return sum(piece.data.nbytes for piece in pieces)

    with ThreadPoolExecutor(RANKS_AT_ONCE) as pool:
        written = 0
        for num_done, size_bytes in enumerate(pool.map(save_rank, range(layout.world_size - 1, 0, -1)), start=1):
            written += size_bytes
            if sys.stderr.isatty():
                print(f"\r{num_done} of {layout.world_size} ranks", end="", file=sys.stderr)
    return written + save_rank(0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="make_checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("output", metavar="RUN", help="run URL to save under")
    parser.add_argument("--gib", type=float, default=1.0, metavar="X", help="size of the state in GiB, at least")
    parser.add_argument("--layers", type=int, default=30, metavar="N", help="number of layers")
    parser.add_argument("--layout", default="tp8-dp2-pp4", metavar="LAYOUT", help="the ranks that save")
    parser.add_argument("--step", type=int, default=100, metavar="N", help="step to save as")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(handler=make_verb)
    return run(parser, argv)


def make_verb(arguments: argparse.Namespace) -> int:
    layout = ParallelLayout.parse(arguments.layout)
    hidden = hidden_for(arguments.gib, arguments.layers)
    tensors = gpt_tensors(arguments.layers, hidden)
    written = make(arguments.output, tensors, arguments.layers, layout, arguments.step)
    if arguments.json:
        print_json({"url": arguments.output, "step": arguments.step, "bytes": written, "hidden": hidden})
    else:
        print(f"{arguments.output}: step {arguments.step}, {layout}, hidden {hidden}, {written:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
