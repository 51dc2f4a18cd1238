"""Planning at scale: what one rank of many pays before its first byte of data is read, and what an index entry takes.

    python benchmarks/ckptkit/plan.py [--ranks 4096] [--tensors 2000] [--sample 64]

Writes the part indexes of a save in which every rank holds a piece of every tensor, once cut by ZeRO over most ranks
and once by tensor parallelism over most; then, in fresh processes on one core, plans one rank's load in the same layout
and in another one, plans its save, and does what the commit does with the indexes. The peer is the same table as JSON,
of `--sample` ranks, parsed with json and orjson and scaled to all ranks. Prints seconds, bytes an entry and how much
the peak RSS grew.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.record import add_option
from ckptkit import (
    ChunkTable,
    Coords,
    Cover,
    Cut,
    ParallelLayout,
    Part,
    PartIndex,
    Partition,
    Piece,
    Placement,
    Root,
    Run,
    TensorInfo,
    plan_save,
)

STEP, HIDDEN, GRANULE_BYTES = 1, 8192, 1 << 20
STEP_FOLDER = f"step-{STEP:09d}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096, help="a multiple of 64")
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--sample", type=int, default=64, help="ranks whose table is parsed as JSON")
    add_option(parser)
    arguments = parser.parse_args()
    many = arguments.ranks // 8
    tensors = Partition(gpt_table(arguments.tensors), arguments.tensors // 8 + 1, ParallelLayout()).tensors
    folder = Path(tempfile.mkdtemp(prefix="plan-"))
    try:
        for layout, other in (
            (ParallelLayout(tp=8, dp=many), ParallelLayout(tp=4, dp=many // 2)),
            (ParallelLayout(tp=many, dp=8), ParallelLayout(tp=8, dp=many // 8)),
        ):
            num_bytes, sample = write_indexes(folder, tensors, layout, arguments.sample)
            entries = arguments.ranks * len(tensors)
            print(f"saved as {layout}: {entries:,} entries, {num_bytes / entries:.1f} B each")
            for title, work, inputs in (
                ("load, same layout", plan_rank, (folder, tensors, layout)),
                (f"load as {other}", plan_rank, (folder, tensors, other)),
                ("save of one rank", plan_own_save, (tensors, layout)),
                ("commit's checks", check_all, (folder, tensors)),
            ):
                seconds, rss, said = alone(work, *inputs)
                print(f"  {title:<24} {seconds:7.2f} s  peak RSS {rss >> 20:6,} MiB  {said}")
                arguments.record.add(f"plan: {title}, of {arguments.ranks:,} ranks as {layout}", seconds, "s")
            scale = arguments.ranks / arguments.sample
            for title, parse in (("json", json.loads), ("orjson", orjson_loads)):
                seconds, rss, said = alone(parse_json, sample, parse)
                rss = int(rss * scale)
                print(
                    f"  the table as JSON, {title:<6} {seconds * scale:6.1f} s  peak RSS {rss >> 20:6,} MiB"
                    f"  {len(sample) * scale / entries:.0f} B an entry; scaled from {arguments.sample} ranks"
                )
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def gpt_table(num_tensors: int) -> list[TensorInfo]:
    """Master weights and both moments of the layers of a large model."""
    rows = ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up")
    names = [f"layers.{n // 8}.{[*rows, 'attn.out', 'mlp.down', 'norm1'][n % 8]}.weight" for n in range(num_tensors)]
    return [
        TensorInfo(
            f"optim.{('master', 'exp_avg', 'exp_avg_sq')[n % 3]}/{name}", "F32",
            (HIDDEN,) if "norm" in name else (HIDDEN, HIDDEN),
            Placement(n // 8, () if "norm" in name else (Cut(int("out" in name or "down" in name)),)),
        )
        for n, name in enumerate(names)
    ]  # fmt: skip


def rank_table(tensors: list[TensorInfo], layout: ParallelLayout, coords: Coords) -> ChunkTable:
    """Return a rank's chunks where each tensor is a ZeRO bucket of its own, the finest cut there is."""
    chunks = []
    for info in tensors:
        box = info.placement.local_box(info.name, info.shape, layout, coords)
        share = -(-box.numel // layout.dp)
        start, stop = min(coords.dp * share, box.numel), min((coords.dp + 1) * share, box.numel)
        if start < stop and info.placement.is_first_replica(layout, coords):
            chunks.append((info, box, start, stop))
    return ChunkTable.of(chunks)


def write_indexes(folder: Path, tensors: list[TensorInfo], layout: ParallelLayout, sample: int) -> tuple[int, bytes]:
    """Write the root and all part indexes of a step; return their bytes, and the first ranks' table as JSON."""
    parts, rows = [], []
    (folder / STEP_FOLDER / "a").mkdir(parents=True)
    for rank in range(layout.world_size):
        chunks = rank_table(tensors, layout, layout.coords(rank))
        size = 4096 + int(chunks.size_bytes.sum())  # of the header nothing else matters here
        index = PartIndex(chunks, 4096, size, np.arange(-(-size // GRANULE_BYTES), dtype=np.uint64)).to_bytes()
        data, key = f"a/part-{rank:05d}.safetensors", f"a/part-{rank:05d}.index"
        (folder / STEP_FOLDER / key).write_bytes(index)
        parts.append(Part(data, size, key, len(index), xxhash.xxh3_64_intdigest(index)))
        if rank < sample:
            rows += json_rows(chunks, data)
    root = Root(STEP, "a", layout, 1, {info.name: info for info in tensors}, tuple(parts), {})
    (folder / STEP_FOLDER / "root.json").write_bytes(root.to_bytes())
    return sum(part.index_bytes for part in parts), json.dumps(rows).encode()


def json_rows(chunks: ChunkTable, file: str) -> list[dict[str, Any]]:
    at, rows = 4096, []
    for row, size in enumerate(chunks.size_bytes.tolist()):
        box, name = chunks.box(row), chunks.names[chunks.tensor[row]]
        rows.append({
            "name": name, "offset": box.offset, "shape": box.shape, "start": int(chunks.start[row]),
            "stop": int(chunks.stop[row]), "file": file, "at": at,
        })  # fmt: skip
        at += size
    return rows


def alone(work: Callable[..., str], *inputs: Any) -> tuple[float, int, str]:
    """Seconds, growth of peak RSS in bytes, and CPU seconds and result of work in a process of its own, on one core."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (work, inputs))


def measured(work: Callable[..., str], inputs: Any) -> tuple[float, int, str]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    before, started, cpu_started = peak_rss(), time.perf_counter(), time.process_time()
    said = work(*inputs)
    cpu_s = time.process_time() - cpu_started
    return time.perf_counter() - started, peak_rss() - before, f"{cpu_s:.2f} CPU s  {said}"


def peak_rss() -> int:
    """Of this process alone: getrusage counts what the parent had before it, too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def plan_rank(folder: Path, tensors: list[TensorInfo], layout: ParallelLayout) -> str:
    with Run(folder).open(STEP) as reader:
        plan = reader.plan(rank_table(tensors, layout, layout.coords(layout.world_size // 2)))
    return f"{len(plan):,} copies from {len(np.unique(plan.part)):,} files"


def plan_own_save(tensors: list[TensorInfo], layout: ParallelLayout) -> str:
    chunks = rank_table(tensors, layout, layout.coords(0))
    pieces = [
        Piece(chunks.names[chunks.tensor[row]], chunks.box(row), int(chunks.start[row]), int(chunks.stop[row]), None)
        for row in range(len(chunks))
    ]
    started = time.perf_counter()
    num_files = len(plan_save(pieces, tensors).files)
    return f"{num_files} file, {time.perf_counter() - started:.3f} s without the pieces"


def check_all(folder: Path, tensors: list[TensorInfo]) -> str:
    with Run(folder).open(STEP) as reader:
        cover = Cover(tensors)
        for part in reader.root.parts:
            cover.add(reader.files.read_index(part), part.index)
        cover.check("the step", list)
    return ""


def parse_json(text: bytes, parse: Callable[[bytes], Any]) -> str:
    return f"{len(parse(text)):,} entries"


def orjson_loads(text: bytes) -> Any:
    import orjson

    return orjson.loads(text)


if __name__ == "__main__":
    main()
