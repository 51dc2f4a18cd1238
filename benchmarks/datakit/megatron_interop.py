"""Do Megatron and datakit read each other's datasets? Prints one line a check; ends with exit code 1 if any fails.

megatron-core is installed without its dependencies into a folder of its own (--megatron names an existing one, or
--python an interpreter that has it), so nothing else sees it. Its IndexedDataset opens every shard of stores that
datakit writes, of uint16 and int32 tokens, and gives every document and token; datakit opens what its
IndexedDatasetBuilder writes, with several sequences a document too.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.record import add_option
from datakit import Recipe, TokenShard, TokenStore, preprocess, train_tokenizer

Run = Callable[..., str]
READ = """
import hashlib, json, sys
import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
found = []
for stem in sys.argv[1:]:
    dataset = IndexedDataset(stem)
    boundaries = dataset.document_indices
    spans = zip(boundaries[:-1], boundaries[1:])
    documents = [np.concatenate([dataset[number] for number in range(*span)]) for span in spans]
    digest = hashlib.md5(b"".join(np.asarray(d, np.int64).tobytes() for d in documents)).hexdigest()
    found.append([str(np.dtype(dataset.index.dtype)), [len(d) for d in documents], digest])
print(json.dumps(found))
"""
WRITE = """
import sys
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
for seed, dtype in enumerate(sys.argv[2:]):
    stem, rng = f"{sys.argv[1]}-{dtype}", np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(stem + ".bin", dtype=np.dtype(dtype).type)
    for number in range(200):
        lengths = [int(n) for n in rng.integers(1, 30, rng.integers(1, 4))]
        builder.add_document(torch.from_numpy(rng.integers(0, 60000, sum(lengths))), lengths)
    builder.finalize(stem + ".idx")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs megatron-core; it needs torch")
    parser.add_argument("--megatron", help="folder with megatron-core; default: installed into a temporary one")
    add_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        megatron = arguments.megatron or (install(folder / "megatron") if arguments.python == sys.executable else "")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [megatron, *sys.path[1:]]))}
        if arguments.python != sys.executable:
            environment.pop("PYTHONPATH")

        def run(program: str, *words: object) -> str:
            command = [arguments.python, "-W", "ignore", "-c", program, *map(str, words)]
            return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout

        version = run("import importlib.metadata as m; print(m.version('megatron-core'), m.version('torch'))").split()
        print(f"megatron-core {version[0]}, torch {version[1]}, numpy {np.__version__}")
        checks = [*megatron_reads(folder, run), *datakit_reads(folder, run)]
    for what, good in checks:
        print(f"{'ok' if good else 'FAILED':<7}{what}")
    num_good = sum(good for _, good in checks)
    arguments.record.add("datasets that Megatron and datakit read of each other", num_good, f"of {len(checks)}")
    return 0 if num_good == len(checks) else 1


def install(folder: Path) -> str:
    """megatron-core, and nothing else, in a folder of its own."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, "megatron-core"]
    subprocess.run(command, check=True)
    return str(folder)


def megatron_reads(folder: Path, run: Run) -> list[tuple[str, bool]]:
    """Megatron's IndexedDataset over every shard that datakit writes."""
    corpus = folder / "corpus.jsonl"
    lines = [json.dumps({"text": f"document {i}: " + "some text, größer 列車 " * (i % 50)}) for i in range(3000)]
    corpus.write_text("\n".join([json.dumps({"text": ""}), *lines]))
    train_tokenizer([str(corpus)], str(folder / "small.json"), vocab_size=600)
    tokenizer = json.loads((folder / "small.json").read_text())
    size = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"] |= {f"<unused {i}>": i for i in range(size, 70_000)}
    (folder / "large.json").write_text(json.dumps(tokenizer))
    stores = []
    for name in ("small", "large"):  # the small one ends documents, so the large one holds an empty document
        recipe = Recipe(str(folder / f"{name}.json"), append_eod=name == "small")
        preprocess([str(corpus)], folder / name, recipe, item_bytes=1 << 18)
        stores.append(TokenStore.open(folder / name))
    documents = json.loads(run(READ, *(store.path / shard.name for store in stores for shard in store.manifest.shards)))
    checks = []
    for store, dtype in zip(stores, ("uint16", "int32"), strict=True):
        shards = [store.shard(i) for i in range(len(store.manifest.shards))]
        ours = [
            [dtype, [len(shard.document(i)) for i in range(shard.num_documents)], digest(shard)] for shard in shards
        ]
        theirs, documents = documents[: len(shards)], documents[len(shards) :]
        counts = f"{len(shards)} shards, {store.num_documents} documents, {store.num_tokens} tokens"
        checks.append((f"Megatron reads what datakit wrote: {dtype}, {counts}", ours == theirs))
    return checks


def datakit_reads(folder: Path, run: Run) -> list[tuple[str, bool]]:
    """Read with datakit what Megatron's IndexedDatasetBuilder writes."""
    dtypes = ("uint16", "int32")
    run(WRITE, folder / "megatron", *dtypes)
    checks = []
    for seed, dtype in enumerate(dtypes):
        shard, rng = TokenShard(folder / f"megatron-{dtype}"), np.random.default_rng(seed)
        same = shard.dtype == np.dtype(dtype) and shard.num_documents == 200
        for number in range(200):
            num_tokens = int(rng.integers(1, 30, rng.integers(1, 4)).sum())
            same = same and shard.document(number).tolist() == rng.integers(0, 60000, num_tokens).tolist()
        what = f"datakit reads what Megatron wrote: {dtype}, 200 documents, {shard.num_tokens} tokens"
        checks.append((what, same))
    return checks


def digest(shard: TokenShard) -> str:
    documents = (shard.document(i).astype(np.int64).tobytes() for i in range(shard.num_documents))
    return hashlib.md5(b"".join(documents)).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
