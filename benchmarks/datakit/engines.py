"""Encoders by tokenizer family: ours, gigatoken alone, and the reference, in MB of UTF-8 a second of processor time.

Families are built on the spot (see families.py). The text is this Python's standard library, as files and cut into
documents of 120 characters; the reference gets a part of it. All run on one thread, interleaved; medians, and ratios
within the run. `encode` is the raw engine text by text, `encode_batch` in batches of 1,024; ours is held against the
faster of the two for files, and against encode_batch for short documents.

    PYTHONPATH=. python benchmarks/datakit/engines.py [--families llama2 gemma] [--mb 8] [--repeats 5]
"""

import argparse
import os
import resource
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # before the libraries are imported

from benchmarks.datakit.families import FAMILIES, train_pieces
from benchmarks.record import add_option
from datakit import Encoder, Recipe, choose_backend, open_encoder, open_tokenizer, preprocess

SHORT_CHARACTERS, BATCH_DOCUMENTS, BATCH_CHARACTERS = 120, 1024, 1 << 18
TARGETS = {"files": 0.8, "short": 0.7}
Texts = Sequence[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=[*FAMILIES, "llama2.model"])
    parser.add_argument("--mb", type=float, default=6.0, help="of text for the engine")
    parser.add_argument("--reference-mb", type=float, default=0.4, help="of text for the reference")
    parser.add_argument("--vocab-size", type=int, default=16000)
    parser.add_argument("--repeats", type=int, default=5)
    add_option(parser)
    arguments = parser.parse_args()
    files = standard_library(int(arguments.mb * 1e6))
    whole = "".join(files)
    short = [whole[at : at + SHORT_CHARACTERS] for at in range(0, len(whole), SHORT_CHARACTERS)]
    print("family        documents       ours  engine: encode  encode_batch  reference   of engine  of the reference")
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        for family in arguments.families:
            path = build(Path(folder), family, [line for text in files[::4] for line in text.splitlines()], arguments)
            for name, documents in (("files", files), ("short", short)):
                compare(family, path, name, documents, arguments)
            end_to_end(Path(folder), family, path, short)
    return 0


def standard_library(size: int) -> list[str]:
    """Return the sources of the standard library, up to a size."""
    texts, found = list[str](), 0
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in source.parts and found < size:
            texts.append(source.read_text(errors="ignore").replace("\0", ""))
            found += len(texts[-1])
    return texts


def build(folder: Path, family: str, lines: list[str], arguments: argparse.Namespace) -> Path:
    if family.endswith(".model"):
        path = folder / family
        path.write_bytes(train_pieces(lines, arguments.vocab_size).serialized_model_proto())
    else:
        path = folder / f"{family}.json"
        FAMILIES[family](lines, arguments.vocab_size).save(str(path))
    return path


def compare(family: str, path: Path, name: str, documents: Texts, arguments: argparse.Namespace) -> None:
    """Print one line: medians of interleaved runs."""
    from gigatoken import Tokenizer as Engine

    reference = open_tokenizer(path)
    choice = choose_backend("auto", str(path), reference, documents[:20])
    encoder = open_encoder(path, choice.backend, choice.terms)
    engine = Engine(path)
    part, size = list[str](), 0
    for text in documents[len(documents) // 3 :]:
        if size < arguments.reference_mb * 1e6:
            part.append(text)
            size += len(text)
    contenders: dict[str, tuple[Callable[[Texts], object], Texts]] = {
        "ours": (encoder.encode_batch, documents),
        "encode": (lambda batch: [engine.encode(text) for text in batch], documents),
        "encode_batch": (lambda batch: engine.encode_batch(list(batch), parallel=False), documents),
        "reference": (reference.encode_batch, part),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(arguments.repeats + 1):
        for contender, (encode, texts) in contenders.items():
            if repeat or contender != "reference":  # the first run fills the engines' caches
                rates[contender].append(rate_of(encode, texts))
    median = {contender: statistics.median(found[-arguments.repeats :]) for contender, found in rates.items()}
    raw = max(median["encode"], median["encode_batch"]) if name == "files" else median["encode_batch"]
    counted = count_by_reference(encoder, documents)
    print(
        f"{family:<13} {name:<9} {median['ours']:>10.1f}  {median['encode']:>14.1f}  {median['encode_batch']:>12.1f}  "
        f"{median['reference']:>9.2f}  {median['ours'] / raw:>5.2f} (>= {TARGETS[name]})  "
        f"{median['ours'] / median['reference']:>16.1f}   {choice.backend}, {counted} documents by the reference"
    )
    claim, peer = f"tokenizing {name}, {family}, a thread", {"the reference": median["reference"]}
    arguments.record.add(claim, median["ours"], "MB/s", peer=peer, limit={"the engine alone": raw})


def rate_of(encode: Callable[[Texts], object], documents: Texts) -> float:
    batches = batched(documents)
    started = time.process_time()
    for batch in batches:
        encode(batch)
    seconds = time.process_time() - started
    return sum(len(text.encode()) for text in documents) / 1e6 / seconds


def batched(documents: Texts) -> list[list[str]]:
    """Batches as preprocess makes them."""
    batches, size = list[list[str]](), 0
    for text in documents:
        if not batches or len(batches[-1]) == BATCH_DOCUMENTS or size + len(text) > BATCH_CHARACTERS:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text)
    return batches


def count_by_reference(encoder: Encoder, documents: Texts) -> int:
    return sum(encoder.encode_batch(batch).num_by_reference for batch in batched(documents))


def end_to_end(folder: Path, family: str, tokenizer: Path, documents: Texts) -> None:
    """Print the rate of preprocess with one worker on short documents, reading, writing and checks included."""
    seconds, sizes = list[float](), list[int]()
    for number, texts in enumerate((documents[:1], documents)):
        source = folder / f"{family}-{number}.jsonl"
        source.write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
        sizes.append(sum(len(text.encode()) for text in texts))
        before = processor_seconds()
        preprocess([str(source)], folder / f"{family}-{number}", Recipe(str(tokenizer)))
        seconds.append(processor_seconds() - before)
    rate = (sizes[1] - sizes[0]) / 1e6 / (seconds[1] - seconds[0])
    print(f"{family:<13} short documents through preprocess, one worker: {rate:.1f}")


def processor_seconds() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    sys.exit(main())
