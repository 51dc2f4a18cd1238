"""The same texts as jsonl, jsonl.zst and parquet to a store: the steady rate of each format beside plain jsonl's.

The texts are those of fast_preprocess.py, in files of one size: two for the small corpus, `--files` for the large one,
so that two workers always have as much to do each. The steady rate comes from the difference between the two, in MB of
jsonl for every format. Interleaved repeats, medians, ratios within the run.

    PYTHONPATH=. python benchmarks/datakit/formats.py
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from benchmarks.datakit.fast_preprocess import Program, measure, preprocess_words, texts_of
from benchmarks.datakit.preprocess import datakit
from benchmarks.record import Record, add_option

FORMATS = ("jsonl", "jsonl.zst", "parquet")
SMALL_FILES = 2
ROWS_A_GROUP = 1000
TARGET = 0.8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, nargs="+", default=[Path(sys.prefix), Path("/usr/include")])
    parser.add_argument("--file-mb", type=int, default=40)
    parser.add_argument("--files", type=int, default=10, help="of the large corpus, in each format")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes_mb = make_corpora(folder, arguments.corpus, arguments.file_mb * 10**6, arguments.files)
        tokenizer = folder / "tokenizer.json"
        datakit("train-tokenizer", folder / "small" / "jsonl", "--vocab-size", 32768, "--output", tokenizer)
        programs = [
            Program(kind, lambda corpus, out, kind=kind: preprocess_words(
                corpus / kind, out, tokenizer, arguments.workers
            )) for kind in FORMATS
        ]  # fmt: skip
        for _ in range(arguments.repeats):
            for corpus in ("small", "large"):
                for program in programs:
                    measure(program, corpus, folder / corpus, folder / "out")
    print(f"{sizes_mb['small']:.0f} and {sizes_mb['large']:.0f} MB of jsonl, {arguments.workers} workers")
    report(programs, sizes_mb["large"] - sizes_mb["small"], arguments.record)
    return 0


def make_corpora(folder: Path, roots: Sequence[Path], file_bytes: int, num_files: int) -> dict[str, float]:
    """Files `small/FORMAT/*` and `large/FORMAT/*` of the same texts; the MB of jsonl of both."""
    for corpus in ("small", "large"):
        for kind in FORMATS:
            (folder / corpus / kind).mkdir(parents=True)
    sizes_mb = {"small": 0.0, "large": 0.0}
    for number, texts in enumerate(groups(texts_of(roots), file_bytes, num_files)):
        lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
        large = {kind: folder / "large" / kind / f"{number:03}.{kind}" for kind in FORMATS}
        large["jsonl"].write_bytes(lines)
        large["jsonl.zst"].write_bytes(zstandard.compress(lines))
        pq.write_table(pa.table({"text": texts}), large["parquet"], row_group_size=ROWS_A_GROUP)
        sizes_mb["large"] += len(lines) / 1e6
        if number < SMALL_FILES:
            sizes_mb["small"] += len(lines) / 1e6
            for kind, path in large.items():
                (folder / "small" / kind / path.name).hardlink_to(path)
    return sizes_mb


def groups(texts: Iterator[str], size_bytes: int, count: int) -> Iterator[list[str]]:
    """Yield lists of texts of about this size together; SystemExit where the texts do not suffice."""
    for number in range(count):
        group: list[str] = []
        written = 0
        for text in texts:
            group.append(text)
            written += len(text)
            if written >= size_bytes:
                break
        else:
            raise SystemExit(f"the folders hold text for {number} files only: name more with --corpus")
        yield group


def report(programs: Sequence[Program], extra_mb: float, record: Record) -> None:
    """Print a table; ratios to plain jsonl."""
    print("format      steady MB/s  of jsonl  peak MiB")
    base = 0.0
    for program in programs:
        small, large = (statistics.median(program.seconds[name]) for name in ("small", "large"))
        rate = extra_mb / (large - small)
        base = base or rate
        record.add(f"{program.name} to a token store", rate, "MB/s", limit={"plain jsonl": base})
        target = f"  (target >= {TARGET})" if program is not programs[0] else ""
        print(f"{program.name:<11} {rate:>11.1f}  {rate / base:>8.2f}  {program.peak_bytes / 2**20:>8.0f}{target}")
        print(f"    {json.dumps({name: [round(s, 2) for s in found] for name, found in program.seconds.items()})}")


if __name__ == "__main__":
    sys.exit(main())
