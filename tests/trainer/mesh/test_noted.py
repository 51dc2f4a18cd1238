"""What a rank's page costs: few events a pass and a transfer, no operation, and no bit of a step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, local_batch, small
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.engine import Engine
from trainer.job.page import RankPage
from trainer.mesh.group import Network
from trainer.mesh.mesh import mesh_of
from trainer.verify.recording import Recording, recording_of
from trainer.verify.threads import run_threads

SLOW = [pytest.mark.slow, pytest.mark.ci]


def steps(rank: int, config: Config, *, network: Network, with_page: bool) -> tuple[list[float], int, int, str]:
    """Losses of two steps, the events and the transfers of the second, and what the page says then."""
    page = RankPage(rank, 2) if with_page else None
    mesh = mesh_of(config, rank, torch.device("cpu"), network=Recording(network), page=page)
    engine = Engine(config, mesh)
    engine.initialise()
    losses, number, transfers = [], 0, 0
    for step in range(2):
        transfers, number = sum(recording_of(mesh).counts().values()), page.number if page else 0
        losses.append(engine.train_step(step, local_batch(config, step, mesh)).loss)
    calls = sum(recording_of(mesh).counts().values()) - transfers
    if page is None:
        return losses, 0, calls, ""
    page.close()
    return losses, page.number - number, calls, page.sight().now.action


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_a_page_takes_few_events_and_changes_no_bit(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_PAGES", str(tmp_path))
    config = small(config_for("llama", ParallelLayout.parse(layout), precision="fp32"))
    config = replace(config, model=replace(config.model, dropout=0.0))
    size = layout_of(config).world_size
    noted = run_threads(size, lambda rank, network: steps(rank, config, network=network, with_page=True))
    plain = run_threads(size, lambda rank, network: steps(rank, config, network=network, with_page=False))
    num_actions = 4 * config.train.gradient_accumulation_steps + 2
    for (losses, events, calls, action), (usual, none, _, _) in zip(noted, plain, strict=True):
        assert losses == usual
        assert none == 0
        assert 0 < events <= 3 * calls + num_actions
        assert action == "sums and updates"
