"""What saves cost a run: `trainer train` of the 1b model on one GPU with none, and with one every 50 steps.

    python benchmarks/trainer/saves.py --output DIR [--rounds 2] [--train-steps 160]

The kinds have their turns; `off` copies while the run waits, `split` does the same with split masters. Figures
are means over all steps after the warm-up, as a step that waits for a save is slower than the others by far; `stall` is
what the run says that it waited, `GiB` its peak of GPU memory. Each run keeps its last checkpoint alone.
"""

import argparse
import shutil
import statistics
import sys
from pathlib import Path

from gpu import ROOT, ROWS, make_store, train

from benchmarks.record import add_option
from threefold.cli import Parser, run
from threefold.scratch import fresh_folder

WARMUP_STEPS, INTERVAL = 10, 50


def main() -> int:
    parser = Parser(prog="saves.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for all that the benchmark makes")
    parser.add_argument("--rounds", type=int, default=2, help="how often each kind has its turn")
    parser.add_argument("--train-steps", type=int, default=160, help="steps of each run")
    add_option(parser)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Train with each kind of save and print the table."""
    output = fresh_folder(arguments.output, "saves.py")
    data = ["--data.stores", make_store(output), "--train-steps", arguments.train_steps]
    saves = ["--save", output / "run", "--save-interval", INTERVAL, "--checkpoint.keep-last", 1]
    kinds = {
        "none": [],
        "overlap": saves,
        "off": [*saves, "--checkpoint.overlap", "off"],
        "split, none": ["--optim.master", "split"],
        "split": [*saves, "--optim.master", "split"],
    }
    runs: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for number in range(arguments.rounds):
        for kind, flags in kinds.items():
            steps, _ = train(ROOT, output / f"{number}-{kind}.jsonl", ROWS["1b"], *data, *flags)
            shutil.rmtree(output / "run", ignore_errors=True)
            used = steps[WARMUP_STEPS:]
            stall_s = sum(step["checkpoint_stall_s"] for step in used)
            mean_s = statistics.mean(step["step_s"] for step in used)
            runs[kind].append([1e3 * mean_s, 1e3 * stall_s / len(used), max(step["memory_gib"] for step in used)])
    print("saves         step ms  of none  stall ms a step    GiB")
    for kind, figures in runs.items():
        mean_ms, stall_ms, gib = (statistics.mean(each) for each in zip(*figures, strict=True))
        ratio = mean_ms / statistics.mean(each[0] for each in runs["split, none" if kind == "split" else "none"])
        print(f"{kind:<12} {mean_ms:>8.1f} {ratio:>8.4f} {stall_ms:>16.2f} {gib:>6.1f}")
        claim = f"a step of 1b with a save every {INTERVAL}, {kind}"
        arguments.record.add(claim, mean_ms, "ms", limit={"without saves": mean_ms / ratio})
    return 0


if __name__ == "__main__":
    sys.exit(main())
