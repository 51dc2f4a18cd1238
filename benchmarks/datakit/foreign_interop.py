"""Does `datakit convert` give the documents that datatrove, MosaicML streaming and litdata wrote? One line a check.

--python names an interpreter that has those packages (and torch); this one needs none. Each writes real datasets of the
same documents in every layout that is read; the stores made of them are compared token by token with the documents, and
verified. Ends with exit code 1 if any check fails.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.record import add_option
from datakit import TokenStore, train_tokenizer, verify

ROW_TOKENS = 64
EOD = 0
Documents = list[list[int]]
Cases = Iterator[tuple[str, dict[str, Any], Documents | str]]  # dataset, choices, documents or words of the error

VERSIONS = """
import importlib.metadata, sys
print(*(f"{name} {importlib.metadata.version(name)}" for name in sys.argv[1:]), sep=", ")
"""

DATATROVE = """
import json, sys
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger
folder, texts = sys.argv[1], json.load(open(f"{sys.argv[1]}/texts.json"))
def write(name, **options):
    tokenizer = options.pop("tokenizer", f"{folder}/tok.json")
    step = DocumentTokenizer(f"{folder}/{name}", tokenizer, eos_token="<|endoftext|>", seed=5, **options)
    step.run((Document(text, str(i)) for i, text in enumerate(texts)))
write("plain", shuffle_documents=False)
write("wide", shuffle_documents=False, tokenizer=f"{folder}/wide.json")
write("shuffled", shuffle_documents=True, max_tokens_per_file=4000)
write("stream", shuffle_documents=False, save_index=False)
write("bare", shuffle_documents=False, save_final_metadata=False)
write("masks", shuffle_documents=False, save_loss_metadata=True)
DocumentTokenizerMerger(f"{folder}/shuffled", f"{folder}/merged", "all", shuffle=False, progress=False).run()
"""

MDS = """
import json, sys, types
import numpy as np, transformers
for name in ("torchvision", "torchvision.datasets", "torchvision.transforms.functional"):  # of its vision part alone
    sys.modules[name] = types.ModuleType(name)
sys.modules["torchvision.datasets"].VisionDataset = object
sys.modules["torchvision.transforms.functional"].to_tensor = None
from streaming import MDSWriter
folder = sys.argv[1]
documents, rows = json.load(open(f"{folder}/documents.json")), json.load(open(f"{folder}/rows.json"))
def write(name, columns, samples, **options):
    with MDSWriter(out=f"{folder}/{name}", columns=columns, size_limit=1 << 14, **options) as writer:
        for sample in samples:
            writer.write(sample)
def arrays(dtype, of=documents):
    return [np.array(tokens, dtype) for tokens in of]
write("dynamic", {"tokens": "ndarray"}, [{"tokens": tokens} for tokens in arrays("uint16")], hashes=["sha1", "xxh64"])
write("int32", {"tokens": "ndarray:int32"}, [{"tokens": tokens} for tokens in arrays("int32")])
write("zstd", {"tokens": "ndarray:int64"}, [{"tokens": tokens} for tokens in arrays("int64")], compression="zstd:7",
      hashes=["sha1"])
write("gz", {"tokens": "ndarray:uint32"}, [{"tokens": tokens} for tokens in arrays("uint32")], compression="gz")
write("columns", {"url": "str", "n": "int", "tokens": "ndarray", "other": "ndarray:int8:3", "object": "pkl"},
      [{"url": "u" * (i % 5), "n": i, "tokens": tokens, "other": np.zeros(3, "int8"), "object": {"i": i}}
       for i, tokens in enumerate(arrays("int32"))])
write("raw", {"tokens": "bytes"}, [{"tokens": row.tobytes()} for row in arrays("int64", rows)], compression="zstd")
write("fixed", {"tokens": f"ndarray:int32:{len(rows[0])}"}, [{"tokens": row} for row in arrays("int32", rows)])
"""

LITDATA = """
import json, sys
import numpy as np, torch
from litdata import optimize
from litdata.streaming.item_loader import TokensLoader
folder = sys.argv[1]
documents, rows = json.load(open(f"{folder}/documents.json")), json.load(open(f"{folder}/rows.json"))
def write(name, fn, inputs, chunk_bytes=1 << 14, **options):
    optimize(fn, inputs, f"{folder}/{name}", chunk_bytes=chunk_bytes, num_workers=1, verbose=False, **options)
def tensor(tokens): return torch.tensor(tokens, dtype=torch.int64)
def narrow(tokens): return torch.tensor(tokens, dtype=torch.uint16)
def array(tokens): return np.array(tokens, dtype="uint16")
def table(tokens): return {"text": "t" * len(tokens), "tokens": tensor(tokens), "mask": torch.ones(3).int()}
def square(tokens): return {"ids": torch.tensor([tokens], dtype=torch.int32)}
def numpy_square(tokens): return np.array([tokens], dtype="int32")
def raw(tokens): return np.array(tokens, dtype="int32").tobytes()
def pickled(tokens): return {"tokens": set(tokens)}
if __name__ == "__main__":
    write("tokens", tensor, documents, item_loader=TokensLoader())
    write("narrow", narrow, documents, item_loader=TokensLoader(), compression="zstd", compression_level="chunk")
    write("packed", tensor, rows, item_loader=TokensLoader())
    write("tree", tensor, documents)
    write("array", array, documents)
    write("table", table, documents)
    write("square", square, documents)
    write("numpy", numpy_square, documents)
    write("raw", raw, documents)
    for level in ("chunk", "batch", "sample"):
        write(f"zstd-{level}", tensor, documents, compression="zstd", compression_level=level)
    write("small-batches", tensor, documents, compression="zstd:9", compression_batch_size=8)
    write("pickled", pickled, documents)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python", required=True, help="interpreter with datatrove, mosaicml-streaming, litdata, torch"
    )
    add_option(parser)
    arguments = parser.parse_args()
    python = arguments.python
    command = [python, "-c", VERSIONS, "datatrove", "mosaicml-streaming", "litdata", "torch"]
    print(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    outcomes = list[bool]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents, rows = prepare(folder / "input")
        for kind, program, cases in (
            ("datatrove", DATATROVE, datatrove_cases(documents)),
            ("mds", MDS, mds_cases(documents, rows)),
            ("litdata", LITDATA, litdata_cases(documents, rows)),
        ):
            place = shutil.copytree(folder / "input", folder / kind)
            (place / "write.py").write_text(program)
            command = [python, "-W", "ignore", place / "write.py", place]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stdout[-2000:], done.stderr[-4000:])
            for dataset, options, expected in cases:
                good, what = check(place, kind, dataset, options, expected)
                outcomes.append(good)
                print(f"{'ok' if good else 'FAILED':<7}{kind} {dataset}: {what}", flush=True)
    claim = "datasets of datatrove, MDS and litdata read as they were written"
    arguments.record.add(claim, sum(outcomes), f"of {len(outcomes)}")
    return int(not all(outcomes))


def prepare(folder: Path) -> tuple[Documents, Documents]:
    """The tokenizer, texts, their tokens with the end-of-document token, and rows packed of those, as files too."""
    folder.mkdir()
    texts = [f"document {i}: " + "some text, größer 列車 " * (i * 7 % 50) for i in range(400)]
    (folder / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    train_tokenizer([str(folder / "corpus.jsonl")], str(folder / "tok.json"), vocab_size=400)
    small = json.loads((folder / "tok.json").read_text())
    size = len(small["model"]["vocab"])
    small["model"]["vocab"] |= {f"<unused {i}>": i for i in range(size, 70_000)}
    (folder / "wide.json").write_text(json.dumps(small))
    tokenizer = Tokenizer.from_file(str(folder / "tok.json"))
    assert tokenizer.token_to_id("<|endoftext|>") == EOD
    documents = [[*encoding.ids, EOD] for encoding in tokenizer.encode_batch(texts)]
    stream = [token for document in documents for token in document]
    rows = [stream[at : at + ROW_TOKENS] for at in range(0, len(stream) - ROW_TOKENS + 1, ROW_TOKENS)]
    for name, value in (("texts", texts), ("documents", documents), ("rows", rows)):
        (folder / f"{name}.json").write_text(json.dumps(value))
    return documents, rows


def cut(rows: Documents) -> Documents:
    """Return the documents of packed rows, cut after the end-of-document token."""
    documents: Documents = [[]]
    for row in rows:
        for token in row:
            documents[-1].append(token)
            if token == EOD:
                documents.append([])
    return [document for document in documents if document]


def datatrove_cases(documents: Documents) -> Cases:
    yield "plain", {}, documents
    yield "wide", {"tokenizer": "wide.json"}, documents
    yield "shuffled", {"sorted": True}, documents
    yield "merged", {"sorted": True}, documents
    yield "stream", {}, documents
    yield "bare", {}, documents
    yield "masks", {}, documents


def mds_cases(documents: Documents, rows: Documents) -> Cases:
    yield from ((name, {}, documents) for name in ("dynamic", "int32", "zstd", "gz"))
    yield "columns", {"column": "tokens"}, documents
    yield "columns", {}, "more than one column"
    yield "columns", {"column": "object"}, "pickle is never loaded"
    yield "raw", {"dtype": "int64"}, cut(rows)
    yield "raw", {"dtype": "int64", "documents": "items"}, rows
    yield "raw", {}, "raw bytes"
    yield "raw", {"dtype": "int32"}, "every second token is 0"
    yield "fixed", {}, cut(rows)


def litdata_cases(documents: Documents, rows: Documents) -> Cases:
    yield from ((name, {}, documents) for name in ("tokens", "narrow", "tree", "array", "square", "numpy"))
    yield from ((f"zstd-{level}", {}, documents) for level in ("chunk", "batch", "sample"))
    yield "small-batches", {}, documents
    yield "packed", {}, cut(rows)
    yield "table", {"column": "tokens"}, documents
    yield "table", {}, "more than one leaf"
    yield "raw", {"dtype": "int32"}, documents
    yield "pickled", {}, "pickle is never loaded"


def check(
    folder: Path, kind: str, dataset: str, options: dict[str, Any], expected: Documents | str
) -> tuple[bool, str]:
    """Convert one dataset: whether it gave these documents, or an error of these words."""
    options = dict(options)
    in_any_order = options.pop("sorted", False)
    flags = ["--tokenizer", folder / options.pop("tokenizer", "tok.json")]
    flags += [word for name, value in options.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "datakit", "convert", folder / dataset, "--output", f"{name}/store", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return isinstance(expected, str) and expected in done.stderr, f"refused: {done.stderr.splitlines()[0]}"
        store = TokenStore.open(f"{name}/store")
        found = [store.document(number).tolist() for number in range(store.num_documents)]
        same = sorted(found) == sorted(expected) if in_any_order else found == expected
        good = same and not verify(store.path) and store.manifest.settings["converted_from"] == kind
        good = good and all(
            traced(store.origin(number), found[number]) for number in (0, len(found) // 2, len(found) - 1)
        )
        what = f"{store.dtype}, {store.num_documents} documents, {store.num_tokens} tokens"
        return good, f"{what}{f', {options}' if options else ''}"


def traced(origin: Any, tokens: Sequence[int]) -> bool:
    """Whether a document's first token stands, in some width, where its origin says (in files that are not packed)."""
    if any(word in origin.path for word in ("zstd", "batches", ".gz")):
        return True
    with open(origin.path, "rb") as file:
        file.seek(origin.offset_bytes)
        data = file.read(8)
    return any(int.from_bytes(data[:width], "little") == tokens[0] for width in (2, 4, 8))


if __name__ == "__main__":
    sys.exit(main())
