"""Sums of gradients beside the backward, updates and gathers beside what follows: no bit changes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import Run, hash_checkpoint
from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require_equal
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from tests.trainer.support.training import call, write_config, write_stores
from tests.trainer.test_equalities import assert_equal
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.linear.weight import Weight
from trainer.mesh.group import Network
from trainer.ops.adamw import IntervalTable
from trainer.store.bucket import Bucket
from trainer.verify.recording import recording_of
from trainer.verify.threads import run_threads, wrapped


def config(model: str, layout: str, **parallel: Any) -> Config:
    made = small(config_for(model, ParallelLayout.parse(layout)))
    return replace(made, parallel=replace(made.parallel, **parallel))


@pytest.mark.parametrize(
    ("model", "layout", "zero_stage"),
    [
        ("gpt2", "dp2", 1),
        ("llama", "tp2-dp2", 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("llama", "dp4", 1), ("gpt2", "dp2-pp2", 1), ("llama", "tp2-dp2", 1), ("gpt2", "dp2-pp2", 0))
        ),
    ],
)
def test_overlap_changes_no_bit(model: str, layout: str, zero_stage: int) -> None:
    on = config(model, layout, zero_stage=zero_stage)
    assert_equal(on, replace(on, parallel=replace(on.parallel, overlap_grad_reduce=False, overlap_param_gather=False)))


def calls_of_the_first_step(rank: int, config: Config, *, network: Network) -> list[tuple[str, str]]:
    """The kind and the group of each."""
    engine = make_engine(rank, config, network=network)
    recording_of(engine.mesh).calls.clear()
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    return [(each.kind, each.group) for each in recording_of(engine.mesh).calls]


@pytest.mark.parametrize("overlaps", [True, False])
def test_sums_begin_before_the_backward_ends(overlaps: bool) -> None:
    made = config("llama", "tp2-dp2", overlap_grad_reduce=overlaps, sequence_parallel="off")

    for kinds in run_threads(4, calls_of_the_first_step, made):
        last_of_the_backward = max(place for place, kind in enumerate(kinds) if kind == ("all_reduce", "tp"))
        assert (kinds.index(("reduce_scatter", "dp")) < last_of_the_backward) == overlaps


def test_the_sum_over_two_stages_waits_for_the_last_send() -> None:
    made = config("gpt2", "pp2")

    kinds = run_threads(2, calls_of_the_first_step, made)[1]
    last_send = max(place for place, kind in enumerate(kinds) if kind == ("send", "gradients"))
    assert kinds.index(("reduce_scatter", "cp.dp.ends")) > last_send


def losses_of_rows(
    rank: int, config: Config, rows: Sequence[tuple[int, int]], *, network: Network
) -> list[tuple[float, float]]:
    """Loss and gradient norm of a step for each length of rows and number of micro-batches."""
    engine, results = make_engine(rank, config, network=network), []
    for step, (length, num_microbatches) in enumerate(rows):
        size = num_microbatches * config.train.micro_batch_size * config.parallel.dp
        other = replace(config, train=replace(config.train, seq_length=length, global_batch_size=size))
        stats = engine.train_step(step, local_batch(other, step, engine.mesh))
        results.append((stats.loss, stats.grad_norm))
    return results


@pytest.mark.parametrize(
    ("model", "layout", "schedule"),
    [
        ("llama", "dp2", "1f1b"),
        ("gpt2", "dp2", "1f1b"),
        ("llama", "tp2-dp2", "1f1b"),
        ("gpt2", "pp2", "gpipe"),
        ("gpt2", "dp2-pp2", "zb-h1"),
    ],
)
def test_rows_of_another_length_or_number_in_mid_run_change_no_bit(model: str, layout: str, schedule: str) -> None:
    """With documents, and logits made in parts, of which longer rows have more, and the shortest none."""
    built = config(model, layout, schedule=schedule)
    built = replace(
        built, train=replace(built.train, max_logits_gib=8 * 61 * 8 / 2**30)
    )  # 8 tokens of 61 logits at once
    built = replace(built, model=replace(built.model, num_positions=64 if built.model.position == "learned" else 0))
    built = replace(built, data=replace(built.data, document_mask=True))
    apart = replace(built, parallel=replace(built.parallel, overlap_grad_reduce=False))
    rows = ((16, 3), (16, 3), (48, 1), (8, 5), (48, 3))

    found, expected = (
        run_threads(layout_of(made_of).world_size, losses_of_rows, made_of, rows) for made_of in (built, apart)
    )
    assert found == expected


def gradients_and_sums(rank: int, config: Config, *, network: Network) -> list[tuple[str, tuple[str, ...]]]:
    """What is added to gradients in the first step, and between it the begins of sums, with their weights."""
    engine, events = make_engine(rank, config, network=network), []
    buckets = engine.store.buckets

    def adding(real: Callable[..., None]) -> Callable[..., None]:
        def add(weight: Weight, *args: Any, **options: Any) -> None:
            if any(weight in bucket.weights for bucket in buckets):
                events.append(("add", (weight.name,)))
            real(weight, *args, **options)

        return add

    def reducing(real: Callable[..., None]) -> Callable[..., None]:
        def reduce(bucket: Bucket, **options: Any) -> None:
            if bucket in buckets:
                events.append(("sum", tuple(weight.name for weight in bucket.weights)))
            real(bucket, **options)

        return reduce

    with wrapped(Weight, "_add", adding), wrapped(Bucket, "start_reduce", reducing):
        engine.train_step(0, local_batch(config, 0, engine.mesh))
    require_equal(len([kind for kind, _ in events if kind == "sum"]) == len(buckets), "a sum of each bucket")
    return events


@pytest.mark.parametrize(
    ("model", "layout", "schedule", "max_logits_gib"),
    [("gpt2", "tp1", "1f1b", 0.0), ("llama", "tp2", "1f1b", 1e-6), ("llama", "pp2", "zb-h1", 1e-6),
     ("llama", "pp2-virtual2", "gpipe", 0.0)],
)  # fmt: skip
def test_a_sum_begins_with_the_last_gradient_of_its_bucket_in_the_first_step_too(
    model: str, layout: str, schedule: str, max_logits_gib: float
) -> None:
    made = config(model, layout, schedule=schedule)
    made = replace(made, train=replace(made.train, max_logits_gib=max_logits_gib))
    for events in run_threads(layout_of(made).world_size, gradients_and_sums, made):
        for place, (kind, names) in enumerate(events):
            if kind == "sum":
                (last,) = events[place - 1][1]
                assert events[place - 1][0] == "add"
                assert last in names
                assert not {name for later, added in events[place:] if later == "add" for name in added} & {*names}


def test_the_sum_of_a_matrix_begins_before_what_is_left_of_its_layer() -> None:
    """Where it has a bucket of its own."""
    for events in run_threads(1, gradients_and_sums, config("llama", "tp1", bucket_mib=0)):
        for layer in range(3):
            down, up, q = (
                events.index(("sum", names))
                for names in (
                    (f"layers.{layer}.mlp.down.weight",),
                    (f"layers.{layer}.mlp.gate.weight + layers.{layer}.mlp.up.weight",),
                    (" + ".join(f"layers.{layer}.attn.{name}.weight" for name in "qkv"),),
                )
            )
            assert down < up < q
            assert ("add", (f"layers.{layer}.norm2.weight",)) in events[up:]
            assert ("add", (f"layers.{layer}.norm1.weight",)) in events[q:]


def test_a_gradient_made_in_the_forward_is_in_at_its_end() -> None:
    """All forward passes come first here: with them the matrix's sum may begin."""
    made = config("llama", "pp2", schedule="gpipe")
    made = replace(made, train=replace(made.train, max_logits_gib=1e-6))
    events = run_threads(2, gradients_and_sums, made)[1]
    begin = events.index(("sum", ("head.weight",)))
    assert {*events[:begin]} == {("add", ("head.weight",))}


def test_a_gradient_that_comes_outside_of_a_pass_is_an_error() -> None:
    engine = make_engine(0, config("gpt2", "tp1"))
    batch = local_batch(engine.config, 0, engine.mesh)
    engine.train_step(0, batch)
    bucket = next(each for each in engine.store.buckets if each.weights[0].name == "pos.weight")
    with pytest.raises(AssertionError, match=r"a gradient of pos\.weight came outside of the passes of its unit"):
        bucket.weights[0].add_gradient(lambda out, first: None)
    with pytest.raises(AssertionError, match=r"pos\.weight was read outside of the passes of its unit"):
        bucket.weights[0].values.sum()
    bucket.access.adds = True
    with pytest.raises(AssertionError, match=r"a gradient of pos\.weight came after the last one of the step"):
        bucket.weights[0].add_gradient(lambda out, first: None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_save_beside_an_update_holds_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stores(tmp_path)
    write_config(tmp_path)
    flags = [tmp_path / "job.toml", "--train.device", "cuda", "--bf16", "--deterministic", "--train-steps", 4]
    flags += ["--save-interval", 1, "--optim.decay-steps", 4]
    assert call("train", *flags, "--save", tmp_path / "one", "--overlap-param-gather", "false") == 0
    real = IntervalTable.adamw

    def slowly(self: IntervalTable, *arguments: Any, **options: Any) -> None:
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms each
        real(self, *arguments, **options)

    monkeypatch.setattr(IntervalTable, "adamw", slowly)
    assert call("train", *flags, "--save", tmp_path / "other") == 0
    for step in range(1, 5):
        hashes = []
        for run in ("one", "other"):
            with Run(str(tmp_path / run)).open(step) as reader:
                hashes.append(hash_checkpoint(reader))
        assert hashes[0] == hashes[1], step
