"""A training step with one op at a time in another form than csrc: torch's reference, the same compiled, or Apex.

    python benchmarks/trainer/forms.py [--models 1b 350m] [--rounds 3]

Blocks of steps in turn in one process, medians over all rounds; random tokens, nothing is read or saved. A form that
cannot run here is named with the reason.
"""

import argparse
import dataclasses
import statistics
from typing import get_args, get_type_hints

import torch
from step import configured, engine_and_batch

from benchmarks.record import add_option
from threefold.cli import Parser, run
from threefold.errors import UserError
from threefold.options import FlagText
from trainer.config import OpsConfig
from trainer.run.stage_times import step_times

SAMPLES = {"1b": 8, "350m": 32}  # a step, in one micro-batch
WARMUP_STEPS, STEPS = 3, 6


def main() -> int:
    parser = Parser(prog="forms.py", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SAMPLES, default=list(SAMPLES), help="models of this folder")
    parser.add_argument("--rounds", type=int, default=3, help="how often each form has its turn")
    add_option(parser)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Time every form of every op."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for model in arguments.models:
        sizes = ("train.micro_batch_size", "train.global_batch_size")
        samples = {name: FlagText(str(SAMPLES[model]), name) for name in sizes}
        times: dict[tuple[str, str], list[float]] = {}
        engine, batch = engine_and_batch(configured(model, samples))
        for _ in range(arguments.rounds):
            for op, form in [("all", "csrc"), *forms(model)]:
                engine.choices.forms = OpsConfig() if op == "all" else dataclasses.replace(OpsConfig(), **{op: form})
                try:
                    found = step_times(engine, batch, WARMUP_STEPS + STEPS)[WARMUP_STEPS - 1 :]
                except (UserError, RuntimeError) as error:
                    found = []
                    print(f"{model}: {op} {form} does not run: {str(error).splitlines()[0]}")
                times.setdefault((op, form), []).extend(found)
        medians = {name: 1e3 * statistics.median(found) for name, found in times.items() if found}
        whole = medians["all", "csrc"]
        print(f"\n{model}: {whole:.1f} ms a step of {batch.tokens.numel()} tokens with all ops csrc")
        for (op, form), milliseconds in medians.items():
            print(
                f"{op:<14} {form:<8} {milliseconds:>8.1f} ms {milliseconds - whole:>+8.1f}  {milliseconds / whole:.3f}"
            )
            claim = f"a step of {model} on one GPU, {op} as {form}"
            arguments.record.add(claim, milliseconds, "ms", limit={"all ops csrc": whole})
        del engine, batch
        torch.cuda.empty_cache()
    return 0


def forms(model: str) -> list[tuple[str, str]]:
    """Return each op that the model has and each of its other forms."""
    hints = get_type_hints(OpsConfig)
    ops = [field.name for field in dataclasses.fields(OpsConfig) if field.name not in ("attention", "experts")]
    has_rope = model != "350m"
    return [(op, form) for op in ops if op != "rope" or has_rope for form in get_args(hints[op]) if form != "csrc"]


if __name__ == "__main__":
    raise SystemExit(main())
