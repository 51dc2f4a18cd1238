"""What it costs a step that a run is watched: all sinks, the page that stalls are read from, and its reader.

    python benchmarks/trainer/observing.py [--model 1b] [--turns 2] [--train-steps 40] [--record FILE]

Runs of `trainer train` take turns, with steps of one micro-batch. "nothing" is a run whose page is never written, that
no thread watches and that writes its metrics file alone. "all" has the page and the thread, tensorboard, wandb
(offline), mlflow, a command for events and a file of each rank, as far as their packages are here. Times are medians of
all steps but the first ten. Two turns of "nothing" differ by what the machine's own noise is.
"""

import argparse
import importlib.util
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu import HERE, ROOT, environment, make_store, steps_of

from benchmarks.record import add_option
from threefold.cli import Parser, run

LEFT_OUT, MOST_SHARE = 10, 0.005
TRAIN = "from threefold.packages import start; raise SystemExit(start('trainer'))"
NO_PAGE = f"from trainer.job.page import RankPage; RankPage._put = lambda self: None; {TRAIN}"


def main() -> int:
    parser = Parser(prog="observing.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="1b", help="a model of this folder")
    parser.add_argument("--samples", type=int, default=8, help="samples a step, in one micro-batch")
    parser.add_argument("--turns", type=int, default=2, help="runs of each")
    parser.add_argument("--train-steps", type=int, default=40, help="steps of each run")
    add_option(parser)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Train in turns and compare."""
    sinks = [name for name in ("tensorboard", "wandb", "mlflow") if importlib.util.find_spec(name)]
    watched = ["--log.to", ",".join(["jsonl", *sinks]), "--log.on-event", "true", "--log.ranks", "all"]
    ways = {"nothing": (NO_PAGE, ["--health.stall-s", 0]), "all": (TRAIN, watched)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = make_store(folder)
        size = ["--micro-batch-size", arguments.samples, "--global-batch-size", arguments.samples]
        flags = [
            HERE / f"{arguments.model}.toml",
            "--data.stores",
            store,
            *size,
            "--train-steps",
            arguments.train_steps,
        ]
        for turn in range(arguments.turns):
            for way, (program, more) in ways.items():
                metrics = folder / f"{way}-{turn}.jsonl"
                trained(program, folder, [*flags, *more, "--metrics", metrics])
                steps = [line["step_s"] for line in steps_of(metrics)[LEFT_OUT:]]
                seconds[way] += steps
                print(f"{way}: {1e3 * statistics.median(steps):.2f} ms a step", file=sys.stderr, flush=True)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    print(f"{arguments.model}, sinks: jsonl, {', '.join([*sinks, 'a command for events'])}")
    for way, step_s in medians.items():
        more = step_s / medians["nothing"] - 1
        print(f"{way}: {1e3 * step_s:.2f} ms a step, {more:+.2%} (at most {MOST_SHARE:.1%} is wanted)")
    claim = f"a step of {arguments.model} that is watched, beside one that is not"
    arguments.record.add(claim, 1e3 * medians["all"], "ms", peer={"not": 1e3 * medians["nothing"]})
    return 0


def trained(program: str, folder: Path, flags: list[object]) -> None:
    """Run a training command to its end, in a folder."""
    command = [sys.executable, "-c", program, "train", *map(str, flags)]
    variables = environment(ROOT) | {"WANDB_MODE": "offline"}
    subprocess.run(command, cwd=folder, env=variables, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
