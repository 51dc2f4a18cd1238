"""Losses and gradient norms of each layout of the 1b model beside those of one GPU, on the same tokens, in bf16.

    python benchmarks/trainer/layouts.py --output DIR [--train-steps 50] [--layouts dp2 tp2]

All train with the command that a user types, from the same weights and samples: sums alone have another order. At the
end are the largest differences of a step's loss, and of its gradient norm in percent. DIR/LAYOUT.jsonl has the steps,
for `tools/plot_metrics.py`. Exit code 1 if a loss differs by more than 5e-3 or a norm by more than 1%.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from gpu import IN_PARTS, ROOT, TWO_STAGES, ZERO_BUBBLE, Row, make_store, train

from benchmarks.record import add_option
from threefold.cli import Parser, run
from threefold.scratch import fresh_folder

# At a rate of 3e-4 two runs that differ in nothing but rounding drift apart by 1e-2 (curves.py).
OPTIM = ["--optim.lr", 5e-5, "--optim.min-lr", 5e-6, "--optim.warmup-steps", 10]
LOSSES_WITHIN, NORMS_WITHIN = 5e-3, 0.01
ALONE = "one"
LAYOUTS = {
    ALONE: Row("1b", 8, 32),
    "dp2": Row("1b", 8, 32, dp=2),
    "tp2": Row("1b", 8, 32, tp=2),
    "tp2-parts": Row("1b", 8, 32, tp=2, more=IN_PARTS),
    "pp2": Row("1b", 2, 32, pp=2),
    "pp2-zb": Row("1b", 2, 32, pp=2, more=ZERO_BUBBLE),
    "pp2-vpp2": Row("1b", 2, 32, pp=2, more=TWO_STAGES),
    "dp2-bf16": Row("1b", 8, 32, dp=2, more=("--grad-reduce", "bf16")),
    "dp4": Row("1b", 8, 32, dp=4),
    "dp2-tp2": Row("1b", 8, 32, dp=2, tp=2),
    "dp2-pp2": Row("1b", 2, 32, dp=2, pp=2),
    "dp2-pp2-vpp2": Row("1b", 2, 32, dp=2, pp=2, more=TWO_STAGES),
    "tp2-pp2": Row("1b", 2, 32, tp=2, pp=2),
    "tp2-pp2-zb-parts": Row("1b", 2, 32, tp=2, pp=2, more=(*ZERO_BUBBLE, *IN_PARTS)),
}


def main() -> int:
    parser = Parser(prog="layouts.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for all that the benchmark makes")
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, help="by default all that this machine's GPUs can hold"
    )
    parser.add_argument("--train-steps", type=int, default=50, help="steps of each")
    add_option(parser)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Train with each layout and compare."""
    output = fresh_folder(arguments.output, "layouts.py")
    import torch  # what refuses flags and folders does not wait for it

    store, num_gpus = make_store(output), torch.cuda.device_count()
    names = arguments.layouts or [name for name, row in LAYOUTS.items() if row.num_gpus <= num_gpus]
    flags = ["--data.stores", store, "--train-steps", arguments.train_steps, *OPTIM]
    steps = {
        name: train(ROOT, output / f"{name}.jsonl", LAYOUTS[name], *flags)[0] for name in dict.fromkeys([ALONE, *names])
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.train_steps} steps beside one GPU")
    is_near = True
    for name in names:
        loss, norm = gaps(steps[name], steps[ALONE])
        print(f"{name:<20} loss {loss:.1e}   gradient norm {norm:.2%}")
        claim = f"largest difference of a loss, {name} from one GPU"
        arguments.record.add(claim, loss, f"in {arguments.train_steps} steps")
        is_near = is_near and loss <= LOSSES_WITHIN and norm <= NORMS_WITHIN
    return 0 if is_near else 1


def gaps(steps: list[dict[str, Any]], expected: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the largest difference of a step's loss, and the largest relative one of its gradient norm."""
    pairs = list(zip(steps, expected, strict=True))
    loss = max(abs(step["loss"] - other["loss"]) for step, other in pairs)
    return loss, max(abs(step["grad_norm"] / other["grad_norm"] - 1) for step, other in pairs)


if __name__ == "__main__":
    sys.exit(main())
