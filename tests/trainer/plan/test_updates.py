"""Updates: what Muon sends is what a run sends, and state on the host takes the time of its way."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ckptkit import Coords
from tests.trainer.support.calibrated import calibration_of
from tests.trainer.support.option_walk import run_of
from trainer.config import Config
from trainer.config.resolve import layout_of, resolve
from trainer.model.table import local_runs, parameter_table
from trainer.plan import updates
from trainer.plan.calibration import PartRate
from trainer.plan.rates import Rates
from trainer.plan.step_time import group_places, step_time
from trainer.plan.trace import traced
from trainer.plan.volumes import VolumeTable
from trainer.run.memory import optimizer_bytes

NODE: dict[str, Any] = {"network": 50e9, "node": 8}
H100 = Rates.of_card("h100", **NODE)


def run_with(**flags: str) -> Config:
    sizes = {"model__num_layers": "3", "model__vocab_size": "512", "train__precision": "bf16"}
    layout = {"parallel__tp": "2", "parallel__dp": "2"}
    return resolve(run_of("examples/gpt-small.toml", **(sizes | layout | flags)), 4)


def test_muon_multiplies_each_matrix_once_and_sends_as_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    config, sent, multiplied = run_with(optim__name="muon"), [], Counter[str]()
    places, real = group_places(config), updates.orthogonal_s
    runs = local_runs(config, parameter_table(config), layout_of(config), Coords())

    def collective_s(self: Rates, kind: str, num_bytes: float, num_ranks: int, span: int) -> float:
        sent.append((kind, num_ranks, num_bytes))
        return 0.0

    def orthogonal_s(config: Config, rates: Rates, matrix: Any) -> float:
        multiplied[matrix.name] += 1
        return real(config, rates, matrix)

    monkeypatch.setattr(Rates, "collective_s", collective_s)
    monkeypatch.setattr(updates, "orthogonal_s", orthogonal_s)
    seconds = updates.muon_s(config, H100, places, [run for run in runs if run.optimizer == "muon"])
    matrices = {name: row.shape for name, row in parameter_table(config).items() if row.optimizer == "muon"}
    assert multiplied == dict.fromkeys(matrices, 1)
    operations = sum(5 * (4 * min(s) * min(s) * max(s) + 2 * min(s) ** 3) for s in matrices.values())
    assert operations / 4 / H100.flops <= seconds <= operations / H100.flops

    moves = [
        (move, count)
        for rank in range(4)
        for move, count in traced(config, rank).moves.items()
        if move.reason == "whole matrices of Muon"
    ]
    assert {move.kind for move, _ in moves} == {kind for kind, *_ in sent} == {"all_to_all"}
    of_all = sum(num_ranks * num_bytes for _, num_ranks, num_bytes in sent)
    assert (
        2 * of_all == sum(move.num_bytes * count for move, count in moves) == 4 * sum(map(math.prod, matrices.values()))
    )


def test_state_on_the_host_takes_its_way_beside_the_next_forward() -> None:
    known = calibration_of(H100)
    rate = 1e7  # bytes a second
    slow = PartRate("stream", "forward", "any", (1.0,), rate, 1.0)
    rates = Rates.of_calibration(replace(known, figures=(*known.figures, slow)), **NODE)
    config = run_with(model__hidden_size="3072", model__num_layers="32")
    offloaded = replace(config, optim=replace(config.optim, offload=True))
    volumes = VolumeTable().of(config)
    resident, streaming = (step_time(run, rates, volumes) for run in (config, offloaded))
    state = optimizer_bytes(config, local_runs(config, parameter_table(config), layout_of(config), Coords()))
    streamed = (state - (offloaded.optim.offload_window_mib << 20)) / rate
    assert streamed > 1
    assert resident.update < 0.1
    number = config.train.gradient_accumulation_steps
    forward = (resident.total - resident.update - resident.exposed_transfers) / number
    assert streamed - forward < streaming.update < streamed
    late = replace(offloaded, parallel=replace(config.parallel, overlap_param_gather=False))
    assert step_time(late, rates, volumes).update == pytest.approx(streamed)
