"""What the host does for a layer and a micro-batch: operations, nodes of the graph, allocations, transfers.

On a GPU each is some microseconds of a step, whatever the sizes: of small micro-batches it is what a step takes. Counts
are differences between two and one more layers, and micro-batches. They may only fall; a change that raises one says
why.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from trainer.config import Config
from trainer.config.resolve import resolve
from trainer.mesh.group import Network
from trainer.ops import native
from trainer.verify.recording import recording_of
from trainer.verify.threads import run_threads

here = threading.local()  # `counts` in a thread that counts
KINDS = "operations", "native operations", "nodes", "allocations", "transfers"
MOST = {  # of a layer and a micro-batch, in the order of KINDS; native ones are counted where ranks are processes
    ("llama", "tp1"): (101, 8, 8, 25, 0),
    ("llama", "tp2"): (165, 0, 8, 41, 10),
    ("gpt2", "tp1"): (101, 6, 7, 26, 0),
}
SLOW = [pytest.mark.slow, pytest.mark.ci]


class Operations(TorchDispatchMode):
    """Counts operations, and those that take memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {each.untyped_storage()._cdata for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)}
        made = {each.untyped_storage()._cdata for each in tree_iter(out) if isinstance(each, Tensor)}
        here.counts["operations"] += 1
        here.counts["allocations"] += bool(made - known)
        return out


@contextmanager
def counting_nodes() -> Iterator[None]:
    """Count what is put into the graph by this thread."""
    real = torch.autograd.Function.apply.__func__

    def apply(cls: Any, *args: Any, **options: Any) -> Any:
        if hasattr(here, "counts"):
            here.counts["nodes"] += 1
        return real(cls, *args, **options)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = classmethod(real)


def counts_of(rank: int, config: Config, *, network: Network | None = None) -> Counter[str]:
    """What a rank does in its third step."""
    engine = make_engine(rank, config, network=network)
    torch.autograd.set_multithreading_enabled(False)
    for step in range(3):
        batch = local_batch(config, step, engine.mesh)
        calls, transfers = sum(native.csrc_calls().values()), sum(recording_of(engine.mesh).counts().values())
        here.counts = Counter[str]()
        with Operations():
            engine.train_step(step, batch)
    counts = here.counts
    del here.counts
    if network is None:  # threads share the count of calls
        counts["native operations"] = sum(native.csrc_calls().values()) - calls
    counts["transfers"] = sum(recording_of(engine.mesh).counts().values()) - transfers
    return counts


def of_sizes(model: str, layout: ParallelLayout, num_layers: int, num_micro_batches: int) -> Counter[str]:
    """What the first rank of a layout does in a step of a small model."""
    config = small(config_for(model, layout, precision="fp32"))
    train = replace(config.train, global_batch_size=num_micro_batches, gradient_accumulation_steps=0)
    shape = replace(config.model, num_layers=num_layers, dropout=0.0)
    config = resolve(replace(config, model=shape, train=train), layout.world_size)
    if layout.world_size == 1:
        return counts_of(0, config)
    first: Counter[str] = run_threads(layout.world_size, counts_of, config)[0]
    return first


@pytest.mark.parametrize(
    ("model", "layout"), [pytest.param(*each, marks=SLOW if place else []) for place, each in enumerate(MOST)]
)
def test_a_layer_takes_no_more_of_the_host(model: str, layout: str) -> None:
    with counting_nodes():
        of = {
            (layers, batches): of_sizes(model, ParallelLayout.parse(layout), layers, batches)
            for layers in (1, 2)
            for batches in (2, 3)
        }
    for kind, most in zip(KINDS, MOST[model, layout], strict=True):
        own = (of[2, 3][kind] - of[1, 3][kind]) - (of[2, 2][kind] - of[1, 2][kind])
        assert own <= most, f"{kind} of a layer and a micro-batch"
        assert own > most - 10, f"{own} {kind} are fewer than {most}: lower the bound"
