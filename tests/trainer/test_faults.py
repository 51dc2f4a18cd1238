"""The parity tests see each of a list of faults: what they would not notice is itself a failed test."""

from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import Different, require_equal
from tests.trainer.support.context_faults import GROUP_FAULTS
from tests.trainer.support.experts import compare_experts
from tests.trainer.support.faults import ShownFault
from tests.trainer.support.fp8_faults import FP8_FAULTS
from tests.trainer.support.holder_faults import HOLDER_FAULTS
from tests.trainer.support.moe_faults import MOE_FAULTS
from tests.trainer.support.parity import (
    LOSSES_WITHIN,
    WEIGHTS_WITHIN,
    alone,
    assert_parity,
    global_batch,
    make_engine,
    run_steps,
    with_documents,
)
from tests.trainer.support.scale_faults import SCALE_FAULTS
from tests.trainer.support.token_faults import TOKEN_FAULTS, compare_cut
from tests.trainer.support.void_faults import VOID_FAULTS
from threefold.errors import UserError
from trainer.checkpoint.mapping import saved_pieces, tensor_table
from trainer.config import Config
from trainer.model.microbatch import Batch
from trainer.verify.faults.fault import CP, DP, EXPERTS, LOSSES, PLAIN, PP, TP, WEIGHTS, Fault, config_of
from trainer.verify.faults.named import FAULTS
from trainer.verify.faults.tokens import turning_rows
from trainer.verify.faults.updates import GROUPS
from trainer.verify.plain_model import train
from trainer.verify.threads import Deadlock, run_threads
from trainer.verify.whole import assembled, copied

NUM_STEPS, TP4 = 2, ParallelLayout(tp=4)
DP4, EP, EP_OF_TP = ParallelLayout(dp=4), ParallelLayout(ep=2, dp=2), ParallelLayout(tp=2, ep=4, dp=2, etp=1)
LATER = [pytest.mark.slow, pytest.mark.ci]
OTHERWISE = {"evaluation-trains", "evaluation-counts-nowhere"}  # only checks of `trainer verify` look at evaluations
COMPARED = [
    *(fault for fault in FAULTS.values() if fault.seen_by in (PLAIN, LOSSES, WEIGHTS) and fault.name not in OTHERWISE),
    *GROUP_FAULTS,
]
SHOWN = [*TOKEN_FAULTS, *HOLDER_FAULTS, *VOID_FAULTS, *SCALE_FAULTS, *FP8_FAULTS, *MOE_FAULTS]


def compare_layout(config: Config, layout: ParallelLayout) -> None:
    """One process and a layout."""
    assert_parity(run_threads(layout.world_size, run_steps, config, NUM_STEPS), run_steps(0, alone(config), NUM_STEPS))


def compare_plain(config: Config) -> None:
    """One process and plain torch."""
    engine = make_engine(0, config)
    start = assembled(tensor_table(engine.table, engine.dtype), copied(saved_pieces(engine.store)))
    plain = {name: value for name, value in start.items() if not name.startswith("optim.")}
    size = config.train.global_batch_size
    batches = []
    for step in range(NUM_STEPS):
        parts = {name: part.unsqueeze(1) for name, part in global_batch(config, step).items()}
        batch = Batch(**parts, first_sample=step * size)
        batches.append(with_documents(batch) if config.data.document_mask else batch)
    for step, expected in enumerate(train(config, plain, batches)):
        stats = engine.train_step(step, batches[step])
        equal = (stats.loss, stats.grad_norm) == pytest.approx(expected, rel=LOSSES_WITHIN)
        require_equal(equal, f"step {step}: {stats.loss}, {stats.grad_norm} in place of {expected}")
    found = assembled(tensor_table(engine.table, engine.dtype), copied(saved_pieces(engine.store)))
    for name, value in plain.items():
        require_equal(torch.allclose(found[name], value.detach(), rtol=0, atol=WEIGHTS_WITHIN), name)


def compare(fault: Fault) -> None:
    if fault.layout is None:
        compare_plain(config_of(fault))
    else:
        compare_layout(config_of(fault), fault.layout)


@pytest.mark.usefixtures("leases_with_content")
@pytest.mark.parametrize("fault", COMPARED, ids=lambda fault: fault.name)
def test_parity_fails_if(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """By numbers that differ; by an assertion of the trainer only if the fault names it."""
    fault.plant(monkeypatch)
    asserted = fault.trips if __debug__ else ""
    with pytest.raises(AssertionError if asserted else (Different, UserError, Deadlock), match=asserted or None):
        compare(fault)


@pytest.mark.usefixtures("leases_with_content")
@pytest.mark.parametrize("fault", SHOWN, ids=lambda fault: fault.name)
def test_a_comparison_fails_if(fault: ShownFault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    with pytest.raises((Different, UserError, Deadlock)):
        fault.shows()


@pytest.mark.parametrize(
    ("layout", "zero_stage", "num_parts"),
    [
        (TP, 1, 0),
        (TP, 1, 1),
        (TP, 1, 3),
        (TP4, 1, 0),
        (PP, 1, 0),
        (DP, 0, 0),
        (DP, 1, 0),
        (DP, 2, 0),
        (DP, 3, 0),
        (ParallelLayout(pp=2, dp=2), 3, 0),
        (CP, 1, 0),
        (ParallelLayout(tp=2, cp=2), 3, 1),
        (None, 1, 0),
    ],
)
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_without_a_fault_they_pass(
    layout: ParallelLayout | None, zero_stage: int, num_parts: int, position: str
) -> None:
    """With 0 parts tokens are not cut."""
    options = {"cuts_tokens": num_parts > 0, "num_parts": max(num_parts, 1)}
    compare(
        Fault("none", "nothing is wrong", layout, lambda patch: None, zero_stage, {"position": position}, **options)
    )


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_without_a_fault_replicas_pass(zero_stage: int) -> None:
    compare(Fault("none", "nothing is wrong", DP4, lambda patch: None, zero_stage, dp_shard=2))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_keys_that_are_gathered_pass(micro_batch_size: int, documents: bool) -> None:
    options: dict[str, Any] = {"micro_batch_size": micro_batch_size, "documents": documents, "cp_method": "allgather"}
    compare(
        Fault("none", "nothing is wrong", CP, lambda patch: None, model={"window": 3, "window_every": 2}, **options)
    )


def test_documents_cut_from_their_micro_batch_pass() -> None:
    compare_cut()


@pytest.mark.parametrize("layout", [None, TP, DP, PP], ids=str)
def test_without_a_fault_groups_pass(layout: ParallelLayout | None) -> None:
    compare(Fault("none", "nothing is wrong", layout, lambda patch: None, groups=GROUPS))


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (ParallelLayout(pp=3), "zb-h1"),
        (ParallelLayout(pp=2, virtual=2), "1f1b"),
        (ParallelLayout(pp=2, virtual=3), "zb-h1"),
    ],
    ids=str,
)
def test_without_a_fault_other_schedules_pass(layout: ParallelLayout, schedule: str) -> None:
    model = {"num_layers": layout.num_stages}
    compare(Fault("none", "nothing is wrong", layout, lambda patch: None, model=model, schedule=schedule))


@pytest.mark.parametrize("num_parts", [0, 1, 2])
@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("layout", [TP, PP, DP, TP4], ids=str)
def test_places_in_several_runs_pass(
    layout: ParallelLayout, position: str, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a micro-batch in another order train as they do in the stream's."""
    options: dict[str, Any] = {"cuts_tokens": num_parts > 0, "num_parts": max(num_parts, 1)}
    fault = Fault(
        "none",
        "nothing is wrong",
        layout,
        lambda patch: None,
        model={"position": position},
        micro_batch_size=2,
        **options,
    )
    config = config_of(fault)
    expected = run_steps(0, alone(config), NUM_STEPS)
    turning_rows(monkeypatch)
    assert_parity(run_threads(layout.world_size, run_steps, config, NUM_STEPS), expected)


@pytest.mark.parametrize(
    ("layout", "num_parts"), [(None, 0), (TP, 2), (PP, 0), (DP, 0), (ParallelLayout(tp=2, pp=2), 1)], ids=str
)
@pytest.mark.parametrize(
    "own", [(2, 2), (3, 0), *(pytest.param(own, marks=LATER) for own in [(1, 2), (9, 0)])], ids=str
)
@pytest.mark.parametrize("documents", [False, True])
def test_a_mask_a_layer_passes(
    own: tuple[int, int], layout: ParallelLayout | None, num_parts: int, documents: bool
) -> None:
    """The last window is longer than a row."""
    options: dict[str, Any] = {"cuts_tokens": num_parts > 0, "num_parts": max(num_parts, 1), "documents": documents}
    model = {"window": own[0], "window_every": own[1]}
    compare(Fault("none", "nothing is wrong", layout, lambda patch: None, model=model, **options))


@pytest.mark.parametrize(
    "layout", ["dp2", "tp2-dp2", "ep2-dp4", "tp2-ep2-dp4", "cp2-ep4-dp2", "tp2-ep4-dp2-etp1", "tp4-ep2-dp2-etp1"]
)
def test_without_a_fault_experts_pass(layout: str) -> None:
    compare_experts(ParallelLayout.parse(layout))


@pytest.mark.parametrize("way", ["bias", "aux", "seq_aux"])
def test_balanced_mixtures_are_those_of_plain_torch(way: str) -> None:
    more = {"moe_balance": way, "moe_z_loss": 0.1} | ({"moe_bias_rate": 0.1} if way == "bias" else {})
    compare(Fault("none", "nothing is wrong", None, lambda patch: None, model=EXPERTS | more, micro_batch_size=1))


@pytest.mark.parametrize("layout", [None, TP], ids=str)
@pytest.mark.parametrize("more", [{}, {"router_score": "sigmoid", "router_norm_topk": False, "moe_every": 2}])
@pytest.mark.parametrize("cuts_tokens", [False, True])
def test_without_a_fault_mixtures_pass(layout: ParallelLayout | None, more: dict[str, Any], cuts_tokens: bool) -> None:
    compare(
        Fault("none", "nothing is wrong", layout, lambda patch: None, model=EXPERTS | more, cuts_tokens=cuts_tokens)
    )


@pytest.mark.parametrize("layout", [EP, EP_OF_TP], ids=str)
def test_mixtures_cut_by_experts_pass(layout: ParallelLayout) -> None:
    compare(Fault("none", "nothing is wrong", layout, lambda patch: None, model=EXPERTS, cuts_tokens=layout.tp > 1))
