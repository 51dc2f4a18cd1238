"""Record the samples that megatron-core's dataset builder makes of some stores, as JSON: golden vectors of its order.

It runs under an interpreter that has megatron-core, and needs nothing else of this project:

    python tools/megatron_golden.py tests/datakit/order/megatron_golden.json

Each case of the file is read again: its stores, in which the tokens count from 0 on, weights, split, row length, seed
and samples. Of each part it notes the number of samples, an md5 of them all, and where the first ones begin. With
--check it only compares.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

PARTS = "train", "valid", "test"
NUM_FIRST = 4


class Tokenizer:
    """What the builder asks of a tokenizer."""

    vocab_size, eod, unique_identifiers = None, -1, "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a case differs")
    arguments = parser.parse_args()
    cases = json.loads(arguments.file.read_text())
    found = [case | {"parts": recorded(case)} for case in cases]
    if not arguments.check:
        arguments.file.write_text("[\n" + ",\n".join(json.dumps(case) for case in found) + "\n]\n")
    return int(arguments.check and found != cases)


def recorded(case: dict[str, Any]) -> dict[str, Any]:
    """Return what the builder makes of a case."""
    with tempfile.TemporaryDirectory() as name:
        prefixes = [f"{name}/{number}" for number in range(len(case["documents"]))]
        for prefix, (lengths, repeats) in zip(prefixes, case["documents"]):
            write(prefix, lengths * repeats)
        config = GPTDatasetConfig(
            random_seed=case["seed"],
            sequence_length=case["seq_length"],
            blend=(prefixes, case["weights"]),
            split=",".join(map(str, case["split"])),
            path_to_cache=f"{name}/cache",
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            mid_level_dataset_surplus=case["surplus"],
        )
        made = BlendedMegatronDatasetBuilder(GPTDataset, case["num_samples"], lambda: True, config).build()
        return {part: rows(dataset) for part, dataset in zip(PARTS, made) if dataset is not None}


def write(prefix: str, lengths: list[int]) -> None:
    """Write a dataset of documents of these lengths; its tokens are 0, 1, 2, ..."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    tokens = torch.arange(sum(lengths), dtype=torch.int32)
    for document in tokens.split(lengths):
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")


def rows(dataset: Any) -> dict[str, Any]:
    """Return the number of samples of a dataset, an md5 over the source and tokens of each, and the first ones."""
    table = []
    for number in range(len(dataset)):
        item = dataset[number]
        table.append([int(item.get("dataset_id", 0)), *item["tokens"].tolist(), int(item["labels"][-1])])
    digest = hashlib.md5(np.array(table, np.int64).tobytes()).hexdigest()
    return {"size": len(table), "md5": digest, "first": [row[:2] for row in table[:NUM_FIRST]]}


if __name__ == "__main__":
    sys.exit(main())
