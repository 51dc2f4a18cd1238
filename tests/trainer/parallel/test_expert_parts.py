"""In how many parts tokens travel to experts: as configured, as recorded, and what is timed runs in any number."""

import pytest
import torch

from tests.trainer.support.moe import mixture
from tests.trainer.support.parity import make_engine
from trainer.config import Config
from trainer.mesh.group import Network
from trainer.parallel.expert_parts import TIMED, _Layer, choose_expert_parts
from trainer.verify.threads import run_threads


@pytest.mark.parametrize(
    ("number", "recorded", "expected"),
    [
        (0, {}, 1),
        (3, {}, 3),
        (0, {"expert-parts": "4"}, 4),
        (2, {"expert-parts": "4"}, 2),
        (0, {"expert-parts": "x"}, 1),
    ],
)
def test_a_run_takes_what_is_named_or_recorded(number: int, recorded: dict[str, str], expected: int) -> None:
    def chosen(rank: int, config: Config, *, network: Network) -> int | None:
        engine = make_engine(rank, config, network=network)
        engine.choose_ops(recorded, by_timing=True)
        assert engine.choices.names["expert-parts"] == str(engine.choices.expert_parts)
        return engine.choices.expert_parts

    assert run_threads(2, chosen, mixture("shared", "ep2-dp2", moe_overlap_parts=number)) == [expected] * 2


def test_without_ranks_of_ep_there_are_none() -> None:
    engine = make_engine(0, mixture("shared"))
    ours = engine.config, engine.mesh, engine.dtype
    assert choose_expert_parts(*ours, {"expert-parts": "4"}, "csrc", None, by_timing=True) is None
    assert "expert-parts" not in engine.choices.names


def test_what_is_timed_is_a_layer_of_the_run() -> None:
    def passed(rank: int, config: Config, *, network: Network) -> list[torch.Size]:
        engine = make_engine(rank, config, network=network)
        layer = _Layer(engine.config, engine.mesh, engine.dtype, "csrc", None)
        return [layer.passes(number).shape for number in TIMED]

    config = mixture("shared", "ep2-dp2")
    shape = torch.Size((config.train.micro_batch_size * config.train.seq_length, config.model.hidden_size))
    assert run_threads(2, passed, config) == [[shape] * len(TIMED)] * 2
