"""The 1b model in bf16 on one GPU and as TP2 x PP2 on four, by the same command, with a save during training.

Prints tokens/s, MFU, the stall of the save, and the largest difference between the losses of the two layouts; then the
four-GPU run's checkpoint is resumed on one GPU. Medians are over the steps after the fifth, saves left out.

    python benchmarks/trainer/gpu.py --output DIR [--gpus 4] [--train-steps 20]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from threefold.cli import Parser, run
from threefold.scratch import fresh_folder

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = Path(__file__).with_name("1b.toml")
WARMUP_STEPS, SAVE_INTERVAL = 5, 8


def main() -> int:
    parser = Parser(prog="gpu.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for all that the benchmark makes")
    parser.add_argument("--gpus", type=int, choices=[1, 4], default=4, help="GPUs of the larger layout")
    parser.add_argument("--train-steps", type=int, default=20, help="steps of each run")
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Train in both layouts and print the table."""
    output = fresh_folder(arguments.output, "gpu.py")
    store = make_store(output)

    flags = [CONFIG, "--data.stores", store, "--train-steps", arguments.train_steps, "--save-interval", SAVE_INTERVAL]
    runs = {"one": train(output, "one", 1, *flags, "--save", output / "ckpt-one")}
    if arguments.gpus == 4:
        runs["four"] = train(output, "four", 4, *flags, "--tp", 2, "--pp", 2, "--save", output / "ckpt-four")
        longer = arguments.train_steps + 4
        flags = [CONFIG, "--data.stores", store, "--train-steps", longer, "--optim.decay-steps", arguments.train_steps]
        runs["four, resumed on one"] = train(
            output, "resumed", 1, *flags, "--load", output / "ckpt-four", "--save", output / "ckpt-resumed"
        )
    print("\nrun                   gpus  tok/s/gpu  mfu    causal  step s  comm s  bubble s  GiB    loss first -> last")
    for name, lines in runs.items():
        print(row(name, lines, 4 if name == "four" else 1))
    for name, lines in runs.items():
        for save in (line for line in lines if line.get("event") == "save"):
            print(f"save in {name}: {json.dumps(save)}")
    if "four" in runs:
        one, four = losses(runs["one"]), losses(runs["four"])
        print(f"largest relative loss difference, one against four: {max(abs(four[s] / one[s] - 1) for s in one):.1e}")
    return 0


def make_store(output: Path) -> Path:
    """Return a token store of the standard library's sources."""
    library, corpus = Path(sysconfig.get_paths()["stdlib"]), output / "corpus.jsonl"
    with corpus.open("w", encoding="utf-8") as out:
        for source in sorted(library.glob("**/*.py")):
            text = source.read_text(encoding="utf-8", errors="replace")
            if text.strip() and "site-packages" not in source.parts and "dist-packages" not in source.parts:
                out.write(json.dumps({"text": text}) + "\n")
    tokenizer, store = output / "tokenizer.json", output / "store"
    python("datakit", "train-tokenizer", corpus, "--vocab-size", 8192, "--output", tokenizer)
    python("datakit", "preprocess", corpus, "--output", store, "--tokenizer", tokenizer, "--append-eod", "--workers", 8)
    return store


def train(output: Path, name: str, num_gpus: int, *flags: object) -> list[dict[str, Any]]:
    """Train; return the metrics file's lines."""
    metrics = output / f"{name}.jsonl"
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", num_gpus, "-m"] if num_gpus > 1 else []
    python(*launcher, "trainer", "train", *flags, "--metrics", metrics)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def python(module: str, *arguments: object) -> None:
    words = [sys.executable, "-m", module, *map(str, arguments)]
    print("+", " ".join(Path(word).name for word in words[1:]), flush=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(words, check=True, env=environment)


def steps(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "event" not in line]


def losses(lines: list[dict[str, Any]]) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in steps(lines)}


def row(name: str, lines: list[dict[str, Any]], num_gpus: int) -> str:
    usual = [line for line in steps(lines)[WARMUP_STEPS:] if not line["checkpoint_stall_s"]] or steps(lines)[1:]

    def median(key: str) -> float:
        return statistics.median(line[key] for line in usual)

    first, last = steps(lines)[0]["loss"], steps(lines)[-1]["loss"]
    return (
        f"{name:<21} {num_gpus:>4}  {median('tokens_per_s') / num_gpus:>9,.0f}  {median('mfu'):.1%}  "
        f"{median('mfu_causal'):.1%}   {median('step_s'):.3f}   {median('comm_s'):.3f}   {median('bubble_s'):.3f}     "
        f"{median('memory_gib'):.1f}   {first:.4f} -> {last:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
