"""What each kind of linear loses in eight bits: the loss and the gradients of a model that was trained in bf16.

    python benchmarks/trainer/eight_bit_errors.py --data.stores STORE --model 350m --train-steps 2000 --until 1000
        [--recipe rowwise]

Trains in the run's own precision until a step. Then four further batches are evaluated, and one is trained without an
update, with all linears in eight bits, with those of one kind alone, and with all but one kind, or but a part of the
layers. Printed are differences of losses, and the norm of the difference of gradients over that of the gradients.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator

from step import configured
from torch import Tensor

from benchmarks.record import add_option
from threefold.cli import Parser, run
from threefold.flags import add_settings, settings_of
from trainer.config import Config
from trainer.data import StepReader, open_blend, open_loader
from trainer.engine import Engine
from trainer.linear.weight import Products, Weight
from trainer.mesh.mesh import mesh_of
from trainer.model.fp8 import multiply_in_eight_bits
from trainer.model.microbatch import Batch
from trainer.run.environment import ranks_of

NUM_BATCHES, NUM_PARTS = 4, 4


class Choice:
    """The linears of blocks, of which some are multiplied in eight bits."""

    def __init__(self, engine: Engine, recipe: str) -> None:
        self.engine = engine
        self.weights = [
            each for each in engine.store.weights if each.name.startswith("layers.") and len(each.shape) == 2
        ]
        self.wide = {each.name: each.gemm for each in self.weights}
        config = dataclasses.replace(engine.config, fp8=dataclasses.replace(engine.config.fp8, recipe=recipe))
        layers = range(config.model.num_layers)
        multiply_in_eight_bits(config, engine.mesh, engine.store, engine.casts, layers)
        self.narrow = {each.name: each.gemm for each in self.weights}
        self.take(())

    def take(self, names: Iterable[str]) -> None:
        """Let these weights be in eight bits, the others as wide as they are."""
        chosen = set(names)
        for weight in self.weights:
            gemms: dict[str, Products] = self.narrow if weight.name in chosen else self.wide
            weight.gemm = gemms[weight.name]

    def loss(self, batches: list[Batch]) -> float:
        """Return the mean loss of batches."""
        sums = [self.engine.eval_batch(batch)[:2] for batch in batches]
        return sum(loss for loss, _ in sums) / sum(count for _, count in sums)

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Return the gradients of a batch."""
        gradients: dict[str, Tensor] = {}

        def keep() -> None:
            gradients.update({each.name: gradient_of(each).clone() for each in self.weights})

        self.engine.start_step(0, batch, before_update=keep).read()
        return gradients


def main() -> int:
    parser = Parser(prog="eight_bit_errors.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="350m", help="a model of this folder, or a configuration file")
    parser.add_argument("--until", type=int, default=1000, help="steps that are trained first")
    parser.add_argument("--recipe", default="rowwise", choices=("tensorwise", "rowwise", "blockwise"))
    add_option(parser)
    add_settings(parser, Config, is_shown=False)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Train, then compare."""
    config = configured(arguments.model, settings_of(arguments))
    with ranks_of(config) as ranks:
        engine = Engine(config, mesh_of(config, 0, ranks.device))
        engine.initialise()
        engine.choose_ops({}, by_timing=ranks.device.type == "cuda")
        reader = StepReader(open_loader(open_blend(config), config, 0, None), ranks.device)
        losses = [engine.train_step(step, next_batch(reader)).loss for step in range(arguments.until)]
        last = statistics.mean(losses[-100:])
        print(f"{arguments.model}, {arguments.until} steps, mean loss of the last 100: {last:.4f}")
        batches = [own_memory(next_batch(reader)) for _ in range(NUM_BATCHES)]
        engine.store.update = nothing  # type: ignore[method-assign]
        choice = Choice(engine, arguments.recipe)
        every = {weight.name for weight in choice.weights}
        loss, gradients = choice.loss(batches), choice.gradients(batches[0])
        print(f"{arguments.recipe:<34} {'loss':>9} {'gradients':>9}")
        for title, names in choices_of(every, config.model.num_layers):
            choice.take(names)
            change = 100 * (choice.loss(batches) / loss - 1)
            error = distance(choice.gradients(batches[0]), gradients)
            print(f"{title:<34} {change:>+8.4f}% {100 * error:>8.2f}%", flush=True)
            claim = f"gradients of {arguments.model} in eight bits, {arguments.recipe}: {title}"
            arguments.record.add(claim, 100 * error, "% of their norm")
    return 0


def choices_of(every: set[str], num_layers: int) -> Iterator[tuple[str, set[str]]]:
    """Yield titles, and which linears are in eight bits."""
    yield "all", every
    kinds = sorted({kind_of(name) for name in every})
    for kind in kinds:
        yield f"{kind} alone", {name for name in every if kind_of(name) == kind}
    for kind in kinds:
        yield f"all but {kind}", {name for name in every if kind_of(name) != kind}
    size = math.ceil(num_layers / NUM_PARTS)
    for first in range(0, num_layers, size):
        left = range(first, min(first + size, num_layers))
        yield f"all but layers {left.start} to {left.stop - 1}", {name for name in every if layer_of(name) not in left}


def kind_of(name: str) -> str:
    """Return what a weight is in its layer; of q, k and v, which are one matrix, q."""
    return name.split(" + ")[0].split(".", 2)[2].removesuffix(".weight")


def layer_of(name: str) -> int:
    """Return the layer of a weight."""
    return int(name.split(".")[1])


def next_batch(reader: StepReader) -> Batch:
    """Return the next batch on the device."""
    return reader.to_device(reader.next_step())


def own_memory(batch: Batch) -> Batch:
    """Return a batch that is not a view of the reader's buffer."""
    tensors = {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
    own = {name: value.clone() for name, value in tensors.items() if isinstance(value, Tensor)}
    return dataclasses.replace(batch, **own)


def gradient_of(weight: Weight) -> Tensor:
    """Return the gradient that was summed."""
    assert weight._gradient is not None, "the model is trained"
    return weight._gradient


def nothing(*_arguments: object, **_options: object) -> None:
    """Leave the weights as they are."""


def distance(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the norm of the differences over that of the exact gradients."""
    off = sum(float((gradients[name] - exact[name]).double().square().sum()) for name in exact)
    return math.sqrt(off / sum(float(each.double().square().sum()) for each in exact.values()))


if __name__ == "__main__":
    raise SystemExit(main())
