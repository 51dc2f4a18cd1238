"""The engine against the same training in plain torch, and its state as pieces that fit every layout."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from ckptkit import TensorInfo
from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import MODELS, make_engine
from threefold.errors import UserError
from trainer.checkpoint.mapping import restored_pieces, saved_pieces, tensor_table
from trainer.config import Config, OptimConfig, ParallelConfig, TrainConfig
from trainer.config.resolve import resolve
from trainer.engine import Engine, StepStats
from trainer.mesh.group import Network
from trainer.model.microbatch import Batch
from trainer.verify.plain_model import logits, train
from trainer.verify.threads import run_threads
from trainer.verify.whole import assembled, copied, fill

LONG = [pytest.mark.slow, pytest.mark.ci]

VOCAB, SEQ, GLOBAL_BATCH, MICRO_BATCH, NUM_STEPS = 61, 12, 8, 2, 6
LAYOUTS_OF_FOUR = [
    (ParallelLayout(tp=2, pp=2), 1, 0),
    (ParallelLayout(tp=2, dp=2), 0, 0),
    (ParallelLayout(dp=2, pp=2), 1, 0),
    (ParallelLayout(dp=4), 1, 0),
    (ParallelLayout(dp=4), 3, 0),
    (ParallelLayout(dp=2, pp=2), 3, 0),
    (ParallelLayout(dp=4), 2, 2),
    (ParallelLayout(dp=4), 3, 2),
]  # each with its ZeRO stage and shard groups


def small_config(
    model: str, layout: ParallelLayout, *, precision: str = "fp64", zero_stage: int = 1, dp_shard: int = 0
) -> Config:
    config = Config(
        model=replace(MODELS[model], vocab_size=VOCAB),
        parallel=ParallelConfig(
            tp=layout.tp, pp=layout.pp, cp=layout.cp, dp=layout.dp, zero_stage=zero_stage, zero_whole_kib=0,  # type: ignore[arg-type]
            dp_shard=dp_shard,
        ),
        optim=OptimConfig(lr=5e-3, min_lr=1e-3, clip=0.5),
        train=TrainConfig(
            train_steps=NUM_STEPS, seq_length=SEQ, micro_batch_size=MICRO_BATCH, global_batch_size=GLOBAL_BATCH,
            precision=precision, device="cpu", seed=3,  # type: ignore[arg-type]
        ),
    )  # fmt: skip
    return resolve(config, layout.world_size)


def table_of(engine: Engine) -> list[TensorInfo]:
    return tensor_table(engine.table, engine.dtype, engine.moments)


def batches(dp_rank: int = 0, dp_size: int = 1) -> Iterator[Batch]:
    """A data-parallel rank's share of each step: documents of random lengths, whose positions restart."""
    generator = torch.Generator().manual_seed(11)
    shape = (GLOBAL_BATCH // (MICRO_BATCH * dp_size), dp_size, MICRO_BATCH, SEQ)
    for step in range(NUM_STEPS):
        rows = torch.randint(VOCAB, (GLOBAL_BATCH, SEQ + 1), generator=generator)
        starts = torch.rand(GLOBAL_BATCH, SEQ, generator=generator) < 0.2
        order = torch.arange(SEQ).expand(GLOBAL_BATCH, SEQ)
        positions = order - torch.where(starts, order, 0).cummax(-1).values
        mask = (torch.rand(GLOBAL_BATCH, SEQ, generator=generator) < 0.7).float()
        parts = (rows[:, :-1], rows[:, 1:], positions, mask)
        yield Batch(*(part.reshape(shape)[:, dp_rank] for part in parts), first_sample=step * GLOBAL_BATCH)


def train_part(
    rank: int,
    config: Config,
    state: dict[str, torch.Tensor] | None,
    steps: range,
    *,
    network: Network | None = None,
) -> tuple[list[StepStats], list[Any], Any]:
    """Run `steps` on one rank, from `state` where given; its statistics, pieces and table afterwards."""
    engine = make_engine(rank, config, network=network)
    if state is not None:
        fill(restored_pieces(engine.store, {info.name: info for info in table_of(engine)}), state)
        engine.store.publish()
    own = list(batches(engine.mesh.dp.index, engine.mesh.dp.size))
    stats = [engine.train_step(step, own[step]) for step in steps]
    engine.store.join_masters()
    return stats, copied(saved_pieces(engine.store)), table_of(engine)


def state_of(results: list[tuple[list[StepStats], list[Any], Any]]) -> dict[str, torch.Tensor]:
    """The whole tensors that all ranks hold together."""
    return assembled(results[0][2], [piece for _, pieces, _ in results for piece in pieces])


@pytest.mark.parametrize("model", sorted(MODELS))
def test_one_process_trains_as_plain_torch_does(model: str) -> None:
    config = small_config(model, ParallelLayout())
    engine = make_engine(0, config)
    start = assembled(table_of(engine), copied(saved_pieces(engine.store)))
    plain = {name: value for name, value in start.items() if not name.startswith("optim.")}
    steps = list(batches())
    for step, (loss, norm) in enumerate(train(config, plain, steps)):
        stats = engine.train_step(step, steps[step])
        assert (stats.loss, stats.grad_norm) == pytest.approx((loss, norm), rel=1e-11), f"step {step}"
        assert stats.num_tokens == int(steps[step].loss_mask.sum())
        assert norm > config.optim.clip
    trained = assembled(table_of(engine), copied(saved_pieces(engine.store)))
    for name, value in plain.items():
        torch.testing.assert_close(trained[name], value.detach(), rtol=1e-9, atol=1e-12)
    tokens = steps[0].tokens[0]
    positions = torch.arange(SEQ).expand_as(tokens)
    last = logits(config.model, plain, tokens, positions, lambda x, **_: x)[:, -1].detach()
    torch.testing.assert_close(engine.logits(tokens), last, rtol=1e-9, atol=1e-12)


def test_evaluation_sums_token_losses_without_dropout() -> None:
    config = small_config("gpt2", ParallelLayout())
    batch = next(batches())
    still = replace(config, model=replace(config.model, dropout=0.0))
    loss_sum, num_tokens = make_engine(0, config).eval_batch(batch)
    stats = make_engine(0, still).train_step(0, batch)
    assert num_tokens == stats.num_tokens
    assert loss_sum / num_tokens == pytest.approx(stats.loss, rel=1e-12)


def pieces_of_layouts(rank: int, model: str, precision: str, *, network: Network) -> list[tuple[list[Any], Any]]:
    """Pieces and table of fresh engines of one rank, a layout each."""
    results = []
    for layout, zero_stage, dp_shard in LAYOUTS_OF_FOUR:
        config = small_config(model, layout, precision=precision, zero_stage=zero_stage, dp_shard=dp_shard)
        engine = make_engine(rank, config, network=network)
        results.append((copied(saved_pieces(engine.store)), table_of(engine)))
    return results


@pytest.mark.parametrize(("model", "precision"), [("llama", "bf16"), ("gpt2", "fp64")])
def test_every_layout_starts_from_the_same_bits_and_saves_each_element_once(model: str, precision: str) -> None:
    engine = make_engine(0, small_config(model, ParallelLayout(), precision=precision))
    expected = assembled(table_of(engine), copied(saved_pieces(engine.store)))
    by_rank = run_threads(4, pieces_of_layouts, model, precision)
    for number, (layout, *_) in enumerate(LAYOUTS_OF_FOUR):
        assert all(results[number][1] == table_of(engine) for results in by_rank), "one table on all ranks"
        state = assembled(table_of(engine), [piece for results in by_rank for piece in results[number][0]])
        assert all(torch.equal(state[name], expected[name]) for name in expected), layout


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("llama", (ParallelLayout(tp=2, pp=2), 1, 0), (ParallelLayout(dp=2, pp=2), 1, 0)),
        pytest.param("gpt2", (ParallelLayout(tp=2, pp=2), 1, 0), (ParallelLayout(dp=2, pp=2), 3, 0), marks=LONG),
        ("llama", (ParallelLayout(dp=4), 3, 0), (ParallelLayout(dp=2, pp=2), 2, 0)),
        ("llama", (ParallelLayout(dp=4), 3, 2), (ParallelLayout(tp=2, dp=2), 2, 1)),
        pytest.param("gpt2", (ParallelLayout(dp=4), 1, 0), (ParallelLayout(dp=4), 3, 2), marks=LONG),
        pytest.param("llama", (ParallelLayout(cp=2, dp=2), 3, 0), (ParallelLayout(tp=2, dp=2), 1, 0), marks=LONG),
        ("gpt2", (ParallelLayout(tp=2, dp=2), 1, 0), (ParallelLayout(cp=4), 3, 0)),
    ],
    ids=str,
)
def test_state_moves_between_layouts_and_training_goes_on(
    model: str, first: tuple[ParallelLayout, int, int], second: tuple[ParallelLayout, int, int]
) -> None:
    alone = small_config(model, ParallelLayout())
    whole, half = range(NUM_STEPS), NUM_STEPS // 2
    (uninterrupted, *_) = train_part(0, alone, None, whole)
    cut, other = (
        small_config(model, layout, zero_stage=zero_stage, dp_shard=dp_shard)
        for layout, zero_stage, dp_shard in (first, second)
    )
    begun = run_threads(4, train_part, cut, None, whole[:half])
    moved = run_threads(4, train_part, other, state_of(begun), whole[half:])
    kept = state_of(run_threads(4, train_part, other, state_of(begun), whole[:0]))
    assert all(torch.equal(values, kept[name]) for name, values in state_of(begun).items())
    (alone_again, *_) = train_part(0, alone, state_of(begun), whole[half:])
    for expected, there, back in zip(uninterrupted[half:], moved[0][0], alone_again, strict=True):
        assert (there.loss, there.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-10)
        assert (back.loss, back.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-10)


@pytest.mark.parametrize(("moments", "master"), [("wide", "wide"), ("bf16", "wide"), ("wide", "split")])
def test_the_same_layout_continues_bit_for_bit(
    moments: Literal["wide", "bf16"], master: Literal["wide", "split"]
) -> None:
    config = small_config("gpt2", ParallelLayout(), precision="bf16")
    config = replace(config, optim=replace(config.optim, moments=moments, master=master))
    whole, half = train_part(0, config, None, range(NUM_STEPS)), train_part(0, config, None, range(2))
    rest = train_part(0, config, state_of([half]), range(2, NUM_STEPS))
    assert [(s.loss, s.grad_norm) for s in rest[0]] == [(s.loss, s.grad_norm) for s in whole[0][2:]]
    expected, state = state_of([whole]), state_of([rest])
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("master", "layout", "dp_shard"),
    [("wide", "dp2", 0), ("split", "dp2", 0), ("split", "dp4", 2), ("split", "cp2-dp2", 0)],
)
def test_state_that_is_cut_continues_bit_for_bit(master: Literal["wide", "split"], layout: str, dp_shard: int) -> None:
    ranks = ParallelLayout.parse(layout)
    config = small_config("llama", ranks, precision="bf16", zero_stage=3, dp_shard=dp_shard)
    config = replace(config, optim=replace(config.optim, master=master))
    whole, half = (run_threads(ranks.world_size, train_part, config, None, range(steps)) for steps in (NUM_STEPS, 2))
    rest = run_threads(ranks.world_size, train_part, config, state_of(half), range(2, NUM_STEPS))
    assert [(s.loss, s.grad_norm) for s in rest[0][0]] == [(s.loss, s.grad_norm) for s in whole[0][0][2:]]
    expected, state = state_of(whole), state_of(rest)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_bf16_restores_from_the_parameters_of_an_fp32_run() -> None:
    wide = make_engine(0, small_config("llama", ParallelLayout(), precision="fp32"))
    narrow = make_engine(0, small_config("llama", ParallelLayout(), precision="bf16"))
    state = {
        name: value + 0.5
        for name, value in assembled(tensor_table(wide.table, wide.dtype), copied(saved_pieces(wide.store))).items()
    }
    fill(restored_pieces(narrow.store, {info.name: info for info in tensor_table(wide.table, wide.dtype)}), state)
    narrow.store.publish()
    for name, parameter in narrow.store.values():
        assert torch.equal(parameter[: state[name].shape[0]], state[name].bfloat16()), name


def test_a_step_without_tokens_changes_nothing_but_by_decay() -> None:
    config = small_config("llama", ParallelLayout())
    engine, batch = make_engine(0, config), next(batches())
    before = {name: value.clone() for name, value in engine.store.values()}
    stats = engine.train_step(0, replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)))
    assert (stats.loss, stats.grad_norm, stats.num_tokens) == (0.0, 0.0, 0)
    for name, value in engine.store.values():
        kept = 1 - config.optim.lr * config.optim.weight_decay if value.dim() > 1 else 1.0
        torch.testing.assert_close(value, before[name] * kept, rtol=1e-12, atol=0)


def test_a_loss_that_is_not_finite_is_refused_before_the_update() -> None:
    engine = make_engine(0, small_config("llama", ParallelLayout()))
    weight = dict(engine.store.values())["layers.1.mlp.up.weight"]
    with torch.no_grad():
        weight[0, 0] = float("inf")
    before = engine.store.buckets[0].parameters.clone()
    with pytest.raises(UserError, match=r"step 5: the loss is nan") as caught:
        engine.train_step(4, next(batches()))
    assert "--lr" in str(caught.value.hint)
    assert torch.equal(engine.store.buckets[0].parameters, before)


@pytest.mark.parametrize("max_logits_gib", [1.0, 1e-6])
def test_the_z_loss_is_trained_on_but_not_evaluated(max_logits_gib: float) -> None:
    plain = small_config("llama", ParallelLayout())
    evaluations = []
    for z_loss in (0.0, 0.5):
        config = replace(plain, train=replace(plain.train, z_loss=z_loss, max_logits_gib=max_logits_gib))
        evaluations.append(make_engine(0, config).eval_batch(next(batches())))
    assert evaluations[0] == evaluations[1]
    engine = make_engine(0, config)
    start = assembled(tensor_table(engine.table, engine.dtype), copied(saved_pieces(engine.store)))
    steps = list(batches())[:2]
    for step, expected in enumerate(train(config, {n: v for n, v in start.items() if n[:6] != "optim."}, steps)):
        stats = engine.train_step(step, steps[step])
        assert (stats.loss, stats.grad_norm) == pytest.approx(expected, rel=1e-10)
