"""The parity tests see each of a list of faults: what they would not notice is itself a failed test."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import Different, require_equal
from tests.trainer.support.context_faults import CONTEXT_FAULTS, CP
from tests.trainer.support.experts import compare_experts
from tests.trainer.support.faults import DP, FAULTS, GROUPS, PP, TP, Fault
from tests.trainer.support.fp8_faults import FP8_FAULTS
from tests.trainer.support.holder_faults import HOLDER_FAULTS
from tests.trainer.support.lease_faults import LEASE_FAULTS
from tests.trainer.support.moe_faults import EP, EP_OF_TP, EXPERTS, MOE_FAULTS
from tests.trainer.support.nest_faults import DP4, NEST_FAULTS
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
from tests.trainer.support.pass_faults import PASS_FAULTS
from tests.trainer.support.recompute_faults import RECOMPUTE_FAULTS
from tests.trainer.support.scale_faults import SCALE_FAULTS
from tests.trainer.support.token_faults import TOKEN_FAULTS, compare_cut, turning_rows
from tests.trainer.support.void_faults import VOID_FAULTS
from threefold.errors import UserError
from trainer.checkpoint.mapping import saved_pieces, tensor_table
from trainer.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from trainer.config.resolve import resolve
from trainer.model.microbatch import Batch
from trainer.verify.plain_model import train
from trainer.verify.threads import Deadlock, run_threads
from trainer.verify.whole import assembled, copied

ALL_FAULTS = [
    *FAULTS,
    *TOKEN_FAULTS,
    *CONTEXT_FAULTS,
    *HOLDER_FAULTS,
    *PASS_FAULTS,
    *LEASE_FAULTS,
    *NEST_FAULTS,
    *RECOMPUTE_FAULTS,
    *VOID_FAULTS,
    *SCALE_FAULTS,
    *FP8_FAULTS,
    *MOE_FAULTS,
]
NUM_STEPS, TP4 = 2, ParallelLayout(tp=4)
MODEL = ModelConfig(  # with every option that a fault needs; two ranks hold 7 and 6 rows of the vocabulary
    num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_hidden_size=12, vocab_size=13, round_vocab_to=1,
    norm="layernorm", position="learned", activation="swiglu", bias=True, qk_norm=True, tie_embeddings=True,
    dropout=0.2, init_std=0.3,
)  # fmt: skip


def config_of(fault: Fault) -> Config:
    layout = fault.layout or ParallelLayout()
    config = Config(
        model=replace(MODEL, **fault.model),
        parallel=ParallelConfig(
            tp=layout.tp, cp=layout.cp, cp_method=fault.cp_method, pp=layout.pp, dp=layout.dp,  # type: ignore[arg-type]
            ep=layout.ep, etp="1" if layout.etp else "tp", moe_rows=2.0,
            moe_dispatch=fault.moe_dispatch, moe_overlap_parts=fault.moe_overlap_parts,  # type: ignore[arg-type]
            virtual_stages=layout.virtual, zero_stage=fault.zero_stage,  # type: ignore[arg-type]
            schedule=fault.schedule, tp_overlap_parts=fault.num_parts,  # type: ignore[arg-type]
            zero_whole_kib=0, dp_shard=fault.dp_shard, sequence_parallel="on" if fault.cuts_tokens else "off",
        ),
        data=DataConfig(document_mask=fault.documents),
        optim=OptimConfig(lr=5e-3, min_lr=1e-3, clip=0.05, groups=fault.groups),
        train=TrainConfig(
            train_steps=5, seq_length=8 if layout.cp > 1 else 6, micro_batch_size=fault.micro_batch_size,
            global_batch_size=max(4, 2 * layout.dp), precision="fp64", device="cpu",
        ),
    )  # fmt: skip
    return resolve(config, layout.world_size)


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
    if fault.shows is not None:
        fault.shows()
    elif fault.layout is None:
        compare_plain(config_of(fault))
    elif fault.layout.ep > 1 and not fault.model:
        compare_experts(fault.layout)
    else:
        compare_layout(config_of(fault), fault.layout)


@pytest.mark.usefixtures("leases_with_content")
@pytest.mark.parametrize("fault", ALL_FAULTS, ids=lambda fault: fault.name)
def test_parity_fails_if(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """By numbers that differ; by an assertion of the trainer only if the fault names it."""
    fault.plant(monkeypatch)
    asserted = fault.trips if __debug__ else ""
    with pytest.raises(AssertionError if asserted else (Different, UserError, Deadlock), match=asserted or None):
        compare(fault)


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
    compare(Fault("none", layout, lambda patch: None, zero_stage, {"position": position}, **options))


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_without_a_fault_replicas_pass(zero_stage: int) -> None:
    compare(Fault("none", DP4, lambda patch: None, zero_stage, dp_shard=2))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_keys_that_are_gathered_pass(micro_batch_size: int, documents: bool) -> None:
    options: dict[str, Any] = {"micro_batch_size": micro_batch_size, "documents": documents, "cp_method": "allgather"}
    compare(Fault("none", CP, lambda patch: None, model={"window": 3, "window_every": 2}, **options))


def test_documents_cut_from_their_micro_batch_pass() -> None:
    compare_cut()


@pytest.mark.parametrize("layout", [None, TP, DP, PP], ids=str)
def test_without_a_fault_groups_pass(layout: ParallelLayout | None) -> None:
    compare(Fault("none", layout, lambda patch: None, groups=GROUPS))


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
    compare(Fault("none", layout, lambda patch: None, model=model, schedule=schedule))


@pytest.mark.parametrize("num_parts", [0, 1, 2])
@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("layout", [TP, PP, DP, TP4], ids=str)
def test_places_in_several_runs_pass(
    layout: ParallelLayout, position: str, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a micro-batch in another order train as they do in the stream's."""
    options: dict[str, Any] = {"cuts_tokens": num_parts > 0, "num_parts": max(num_parts, 1)}
    fault = Fault("none", layout, lambda patch: None, model={"position": position}, micro_batch_size=2, **options)
    config = config_of(fault)
    expected = run_steps(0, alone(config), NUM_STEPS)
    turning_rows(monkeypatch)
    assert_parity(run_threads(layout.world_size, run_steps, config, NUM_STEPS), expected)


@pytest.mark.parametrize(
    ("layout", "num_parts"), [(None, 0), (TP, 2), (PP, 0), (DP, 0), (ParallelLayout(tp=2, pp=2), 1)], ids=str
)
@pytest.mark.parametrize("own", [(2, 2), (3, 0), (1, 2), (9, 0)], ids=str)
@pytest.mark.parametrize("documents", [False, True])
def test_a_mask_a_layer_passes(
    own: tuple[int, int], layout: ParallelLayout | None, num_parts: int, documents: bool
) -> None:
    """The last window is longer than a row."""
    options: dict[str, Any] = {"cuts_tokens": num_parts > 0, "num_parts": max(num_parts, 1), "documents": documents}
    model = {"window": own[0], "window_every": own[1]}
    compare(Fault("none", layout, lambda patch: None, model=model, **options))


@pytest.mark.parametrize(
    "layout", ["dp2", "tp2-dp2", "ep2-dp4", "tp2-ep2-dp4", "cp2-ep4-dp2", "tp2-ep4-dp2-etp1", "tp4-ep2-dp2-etp1"]
)
def test_without_a_fault_experts_pass(layout: str) -> None:
    compare_experts(ParallelLayout.parse(layout))


@pytest.mark.parametrize("way", ["bias", "aux", "seq_aux"])
def test_balanced_mixtures_are_those_of_plain_torch(way: str) -> None:
    more = {"moe_balance": way, "moe_z_loss": 0.1} | ({"moe_bias_rate": 0.1} if way == "bias" else {})
    compare(Fault("none", None, lambda patch: None, model=EXPERTS | more, micro_batch_size=1))


@pytest.mark.parametrize("layout", [None, TP], ids=str)
@pytest.mark.parametrize("more", [{}, {"router_score": "sigmoid", "router_norm_topk": False, "moe_every": 2}])
@pytest.mark.parametrize("cuts_tokens", [False, True])
def test_without_a_fault_mixtures_pass(layout: ParallelLayout | None, more: dict[str, Any], cuts_tokens: bool) -> None:
    compare(Fault("none", layout, lambda patch: None, model=EXPERTS | more, cuts_tokens=cuts_tokens))


@pytest.mark.parametrize("layout", [EP, EP_OF_TP], ids=str)
def test_mixtures_cut_by_experts_pass(layout: ParallelLayout) -> None:
    compare(Fault("none", layout, lambda patch: None, model=EXPERTS, cuts_tokens=layout.tp > 1))


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in ALL_FAULTS}) == len(ALL_FAULTS) >= 20
