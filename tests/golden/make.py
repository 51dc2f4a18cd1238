"""Make the files of this folder with the code that is installed: once for each version of a format, never by a test.

    python tests/golden/make.py tests/golden/NAME [store] [run]        # a folder that is not there yet; both, or one

Only public names are imported, so that the files can be made with the code of any commit. What the files must hold for
ever is in NAME/expected.json: digests of every file, of the documents, of a stream of batches and of each checkpoint.
v0.1 has all formats as they first were, v0.1-root2 has checkpoints of version 2 of the root, v0.1-index2 those with
sums in their indexes and a certificate.
"""

import hashlib
import json
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import ckptkit
import datakit
from ckptkit import Box, Cut, ParallelLayout, Piece, Placement, TensorInfo

NUM_LAYERS = 4
FIRST = "v0.1"  # whose roots have version 1
NUMPY = {"F32": np.float32, "BF16": np.uint16}
COMMANDS = (
    "datakit train-tokenizer corpus --vocab-size 320 --output tokenizer.json",
    "datakit preprocess corpus --tokenizer tokenizer.json --tokenizer-backend tokenizers --append-eod --item-size 4KiB "
    "--tag web=corpus/web.jsonl --tag books=corpus/books.jsonl --output store",
    "datakit archive store --output archive",
)
WORDS = ["the", "store", "holds", "größe", "列車", "and", "every", "shard", "🙂", "ends", "here\n", "Ελλάδα", "="]


def layouts(name: str) -> dict[int, str]:
    """Return the steps of a folder's run, and what saved them."""
    return {100: "tp2", 200: "dp2-pp2"} if name == FIRST else {100: "tp4-ep2-dp2", 200: "cp2-ep4-dp2-pp2-virtual2"}


def other_ranks(name: str) -> list[str]:
    """Return the flags that reshard step 100 of a folder to ranks that divide its tensors unevenly."""
    flags = "--tp 3 --dp 3 --pp 2" if name == FIRST else "--tp 4 --cp 2 --ep 2 --dp 3 --pp 2 --virtual 2"
    return flags.split()


def make(folder: Path, what: list[str]) -> None:
    """Write store and archive, run, or both, and expected.json into a new folder."""
    socket.gethostname = lambda: "host"  # what a root records of a machine
    folder.mkdir(parents=True)
    if "store" in what:
        corpus(folder / "corpus")
        for line in COMMANDS:
            done(folder, *line.split())
    if "run" in what:
        for step, layout in layouts(folder.name).items():
            save_all_ranks(folder.name, str(folder / "run"), step, ParallelLayout.parse(layout))
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    expected: dict[str, object] = {"files": {str(path.relative_to(folder)): sha256(path) for path in paths}}
    if "store" in what:
        expected["store"] = store_digests(folder / "store")
    if "run" in what:
        expected["checkpoints"] = {step: hashes(folder, step) for step in layouts(folder.name)}
        expected["resharded"] = resharded(folder)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def corpus(folder: Path) -> None:
    """Write 90 documents, some of them empty, as two files."""
    folder.mkdir()
    for name, first in (("books.jsonl", 0), ("web.jsonl", 45)):
        texts = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(i % 31)) for i in range(first, first + 45)]
        (folder / name).write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))


def table(name: str) -> list[TensorInfo]:
    """Return the tensors of a small model with tied embeddings: bf16 parameters, fp32 masters and moments.

    Since version 2 of the root with few key heads, experts of two cuts, two of them of one dim, and more padding.
    """
    round_to = 1 if name == FIRST else 8
    shapes: dict[str, tuple[tuple[int, ...], Placement]] = {
        "embed.weight": ((67, 12), Placement("first", (Cut(0),), round_to)),
        "norm.weight": ((12,), Placement("last")),
        "head.weight": ((67, 12), Placement("last", (Cut(0),), round_to, tied_to="embed.weight")),
    }
    for n in range(NUM_LAYERS):
        shapes[f"layers.{n}.attn.q.weight"] = ((12, 12), Placement(n, (Cut(0),)))
        shapes[f"layers.{n}.mlp.down.weight"] = ((12, 24), Placement(n, (Cut(1),)))
        shapes[f"layers.{n}.norm1.weight"] = ((12,), Placement(n))
        if name != FIRST:
            shapes[f"layers.{n}.attn.k.weight"] = ((4, 12), Placement(n, (Cut(0, max_parts=2),)))
        if name != FIRST and n % 2:
            shapes[f"layers.{n}.experts.up.weight"] = ((4, 8, 3), Placement(n, (Cut(0, "ep"), Cut(1, "tp"))))
            shapes[f"layers.{n}.experts.gate.weight"] = ((8, 3, 4), Placement(n, (Cut(0, "ep"), Cut(0, "tp"))))
    tensors = [TensorInfo(name, "BF16", shape, placement) for name, (shape, placement) in shapes.items()]
    for kind in ("master", "exp_avg", "exp_avg_sq") if name == FIRST else ("master", "exp_avg"):
        tensors += [
            TensorInfo(f"optim.{kind}/{name}", "F32", shape, placement)
            for name, (shape, placement) in shapes.items()
            if placement.tied_to is None
        ]
    return tensors


def values(info: TensorInfo, step: int) -> np.ndarray:
    """Return a tensor's global values: digits of a hash of its name and the step."""
    size = info.size_bytes
    data = hashlib.shake_128(f"{info.name} {step}".encode()).digest(size)
    numbers = np.frombuffer(data, np.uint16 if info.dtype == "BF16" else np.uint32)
    if info.dtype == "F32":
        numbers = (numbers >> 8).astype(np.float32) * np.float32(2**-24)
    return numbers.reshape(info.shape)


def save_all_ranks(name: str, url: str, step: int, layout: ParallelLayout) -> None:
    """Save every rank's part of a step, rank 0 last since it commits."""
    tensors = table(name)
    for rank in reversed(range(layout.world_size)):
        ckptkit.save(
            url, step, pieces_of(tensors, step, layout, rank), tensors=tensors, layout=layout, num_layers=NUM_LAYERS,
            metadata={"step": step, "val_loss": 1000 / step, "seed": "0x5eed"}, rank=rank,
            world_size=layout.world_size, attempt="golden", awaits_commit=False,
        )  # fmt: skip


def pieces_of(tensors: list[TensorInfo], step: int, layout: ParallelLayout, rank: int) -> list[Piece]:
    """Return what a rank saves: of its boxes, if it is the first to hold them, its interval in the data group."""
    coords, pieces = layout.coords(rank), []
    for info in tensors:
        is_owner = info.placement.on_stage(NUM_LAYERS, layout, coords.pp)
        if info.placement.tied_to or not is_owner or not info.placement.is_first_replica(layout, coords):
            continue
        box = info.placement.local_box(info.name, info.shape, layout, coords)
        data = values(info, step)[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))]
        index, size = info.placement.data_group(layout, coords)
        start, stop = (data.size * (index + more) // size for more in (0, 1))
        pieces.append(Piece(info.name, Box(box.offset, box.shape), start, stop, data.reshape(-1)[start:stop].copy()))
    return pieces


def store_digests(path: Path) -> dict[str, object]:
    """Return counts of a store, and digests of its documents, their origins and tags, and a stream of batches."""
    store = datakit.TokenStore.open(path)
    tokens, places, stream = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    for number in range(store.num_documents):
        tokens.update(store.document(number).astype("<i8").tobytes() + b"\n")
        origin = store.origin(number)
        places.update(f"{origin.path}:{origin.offset_bytes}:{origin.line}:{store.tag(number)}\n".encode())
    with datakit.Loader(datakit.Blend([(store, 1.0)], seq_length=16, seed=7), 4, 2) as loader:
        for _ in range(12):
            batch = loader.next_step()
            stream.update(batch.tokens.astype("<i8").tobytes() + batch.labels.astype("<i8").tobytes())
    return {
        "documents": store.num_documents,
        "tokens": store.num_tokens,
        "tokens_sha256": tokens.hexdigest(),
        "places_sha256": places.hexdigest(),
        "stream_sha256": stream.hexdigest(),
    }


def resharded(folder: Path) -> dict[str, str]:
    """Return digests of the data files that a checkpoint becomes on ranks that divide its tensors unevenly."""
    with TemporaryDirectory() as scratch:
        done(folder, "ckptkit", "reshard", "run/step-000000100", scratch, *other_ranks(folder.name))
        return {path.name: sha256(path) for path in sorted(Path(scratch).rglob("*.safetensors"))}


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hashes(folder: Path, step: int) -> dict[str, object]:
    """Return the hashes of a checkpoint: one a tensor, and the totals."""
    found = json.loads(done(folder, "ckptkit", "hash", f"run/step-{step:09}", "--json"))
    return {name: found[name] for name in ("params", "optim", "all", "tensors")}


def done(folder: Path, *command: str) -> str:
    """Return what a command line prints; files are named relative to the folder, so that no path of a machine stays."""
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    if Path(sys.argv[1]).exists():
        sys.exit(f"error: {sys.argv[1]} is there, and what it holds is for ever")
    make(Path(sys.argv[1]), sys.argv[2:] or ["store", "run"])
