"""No rank holds the whole model, whatever it does at stage 3: tensors that are alive are bounded, and by the plan."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ckptkit import Run
from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require
from tests.trainer.support.live import LiveBytes
from tests.trainer.support.parity import config_for, local_batch, small
from tests.trainer.support.training import call, write_config, write_stores
from trainer.checkpoint.load import restore_step
from trainer.checkpoint.mapping import saved_pieces
from trainer.config import Config
from trainer.engine import Engine
from trainer.mesh.group import Network
from trainer.mesh.mesh import mesh_of
from trainer.model.table import parameter_table
from trainer.run.memory import rank_memory
from trainer.store.bucket import Bucket
from trainer.verify.threads import ThreadTransport, run_threads

CPU = torch.device("cpu")
SHAPE = {"num_layers": 10, "hidden_size": 64, "ffn_hidden_size": 192, "head_size": 16, "qk_norm": True}
pytestmark = [pytest.mark.slow, pytest.mark.ci]


def config_of(zero_stage: Any, dp_shard: int = 0) -> Config:
    config = small(config_for("llama", ParallelLayout(dp=4), precision="fp32", zero_stage=zero_stage))
    parallel = {"dp_shard": dp_shard, "zero_whole_kib": 0} if zero_stage > 1 else {}
    return replace(
        config,
        model=replace(config.model, **SHAPE),
        parallel=replace(config.parallel, **parallel),
        train=replace(config.train, global_batch_size=4, gradient_accumulation_steps=1),
    )


def parameter_bytes(config: Config) -> list[int]:
    return [4 * math.prod(row.shape) for row in parameter_table(config).values()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose step 1 is of the model that is tested."""
    folder = tmp_path_factory.mktemp("run")
    write_stores(folder)
    flags = [
        word for name, value in SHAPE.items() for word in (f"--model.{name.replace('_', '-')}", f"{value}".lower())
    ]
    flags += ["--train.seq-length", "8", "--global-batch-size", "2", "--micro-batch-size", "1"]
    flags += ["--model.round-vocab-to", "1", "--train-steps", "1", "--save", f"{folder / 'run'}"]
    assert call("train", write_config(folder), *flags) == 0
    return Run(str(folder / "run"))


@pytest.fixture
def uncounted_carriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is made to carry data between threads: one of the ranks does so for all."""
    real: Callable[..., Any] = ThreadTransport._join

    def join(*arguments: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return real(*arguments, **options)

    monkeypatch.setattr(ThreadTransport, "_join", join)


def training_peaks(rank: int, config: Config, run: Run, *, network: Network) -> dict[str, int]:
    """The most bytes of tensors that were alive at once on a rank that trains, by what it did."""
    torch.autograd.set_multithreading_enabled(False)
    peaks = dict[str, int]()
    with LiveBytes() as live:
        mesh = mesh_of(config, rank, CPU, network=network)
        engine = Engine(config, mesh)
        engine.initialise()
        peaks["initialise"] = live.peak()
        engine.train_step(0, local_batch(config, 0, mesh))
        peaks["step"] = live.peak()
        engine.store.join_masters()
        own = sum(piece.data.nbytes for piece in saved_pieces(engine.store))
        require(own <= sum(state.nbytes for bucket in engine.store.buckets for state in _states(bucket)), "pieces")
        peaks["save"] = live.peak()
        restore_step(engine, run, 1)
        engine.store.publish()
        peaks["load"] = live.peak()
    return peaks


def _states(bucket: Bucket) -> list[torch.Tensor]:
    return [bucket.master, *bucket.states.values()]


def inference_peaks(rank: int, config: Config, run: Run, *, network: Network) -> dict[str, int]:
    """The same of one that evaluates and generates."""
    peaks = dict[str, int]()
    with LiveBytes() as live:
        mesh = mesh_of(config, rank, CPU, network=network)
        engine = Engine(config, mesh, with_optimizer=False)
        restore_step(engine, run, 1)
        engine.store.publish()
        peaks["load"] = live.peak()
        engine.eval_batch(local_batch(config, 0, mesh))
        peaks["evaluate"] = live.peak()
        engine.logits(torch.zeros(1, 8, dtype=torch.long))
        peaks["generate"] = live.peak()
        for _ in engine.store.values():
            pass
        peaks["values"] = live.peak()
    return peaks


@pytest.mark.usefixtures("uncounted_carriers")
@pytest.mark.parametrize("dp_shard", [0, 2])
def test_a_rank_that_trains_holds_what_is_planned(dp_shard: int, run: Run) -> None:
    """And a few times the largest parameter: its values are drawn whole."""
    config = config_of(3, dp_shard)
    planned, largest = rank_memory(config, 0), max(parameter_bytes(config))
    state = planned.total - planned.activations
    for peaks in run_threads(4, training_peaks, config, run):
        assert state <= peaks["initialise"] <= state + 4 * largest
        assert peaks["step"] <= planned.total + 4 * largest
        assert max(peaks["save"], peaks["load"]) <= state + largest


@pytest.mark.usefixtures("uncounted_carriers")
@pytest.mark.parametrize(
    ("zero_stage", "dp_shard", "least", "most"), [(3, 0, 0.25, 0.6), (3, 2, 0.5, 0.85), (1, 0, 1, 2)]
)
def test_a_rank_that_reads_a_model_never_holds_all_of_it(
    zero_stage: int, dp_shard: int, least: float, most: float, run: Run
) -> None:
    """Unless it is not cut."""
    config = config_of(zero_stage, dp_shard)
    whole = sum(parameter_bytes(config))
    for peaks in run_threads(4, inference_peaks, config, run):
        assert all(least * whole <= peak <= most * whole for peak in peaks.values()), (whole, peaks)
