"""How a router spreads tokens, and whether ranks of ep change what is learnt: 500 steps of a small mixture on a CPU.

    python benchmarks/trainer/spread.py --output DIR [--train-steps 500]

The same model trains with `moe_balance = "bias"` in one process and over four ranks of ep, and with "none" in one, in
bf16, side by side. Printed are means of the last 100 steps of the largest load of an expert over the mean, of the layer
where that is largest, and of the losses of the last 50. The metrics are in DIR/{bias,bias-ep4,none}.jsonl, for
`tools/plot_metrics.py`. OMP_NUM_THREADS is for each of the six processes.
"""

import argparse
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu import ROOT, Row, make_store, train

from benchmarks.record import add_option
from threefold.cli import Parser, run
from threefold.scratch import fresh_folder

OF_LOADS, OF_LOSSES = 100, 50  # steps at the end of whose values the mean is printed
NUM_ROWS = 16  # of a step, of 128 tokens each
RUNS = {  # ranks, each with an equal part of the rows, and flags
    "bias": (1, ["--model.moe-balance", "bias"]),
    "bias-ep4": (4, ["--model.moe-balance", "bias", "--ep", 4]),
    "none": (1, ["--model.moe-balance", "none"]),
}


def main() -> int:
    parser = Parser(prog="spread.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for all that the benchmark makes")
    parser.add_argument("--train-steps", type=int, default=500, help="steps of each run")
    add_option(parser)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Train all runs at once, and print what they end with."""
    output = fresh_folder(arguments.output, "spread.py")
    store = make_store(output)

    def trained(name: str) -> tuple[float, float]:
        dp, flags = RUNS[name]
        row = Row("moe-50m", NUM_ROWS // dp, NUM_ROWS, dp=dp, more=("--log.interval", 1, *flags))
        steps, _ = train(
            ROOT, output / f"{name}.jsonl", row, "--data.stores", store, "--train-steps", arguments.train_steps
        )
        return tuple(
            statistics.mean(step[key] for step in steps[-count:])
            for key, count in (("expert_load", OF_LOADS), ("loss", OF_LOSSES))
        )

    with ThreadPoolExecutor(len(RUNS)) as pool:
        ends = dict(zip(RUNS, pool.map(trained, RUNS), strict=True))
    print("run        largest load / mean      loss")
    for name, (load, loss) in ends.items():
        print(f"{name:<10}{load:>20.3f}{loss:>10.4f}")
        arguments.record.add(f"largest load of an expert over the mean, {name}", load, f"in {OF_LOADS} steps")
    gap = ends["bias-ep4"][1] - ends["bias"][1]
    print(f"loss over four ranks of ep less that of one process: {gap:+.1e}")
    arguments.record.add("loss over four ranks of ep less that of one process", gap, f"in {OF_LOSSES} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
