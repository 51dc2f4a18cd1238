"""In how many parts cut tokens travel: as configured, as recorded, or what a planted clock finds fastest."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, local_batch, make_engine, small
from trainer.config import Config, Fp8Config
from trainer.linear import linear
from trainer.mesh.group import Network
from trainer.parallel.token_parts import TIMED, _CutLinears, fastest_parts, fewest_that_win
from trainer.verify.threads import run_threads

TP2 = ParallelLayout(tp=2)


def with_parts(number: int, **options: Any) -> Config:
    config = small(config_for("llama", TP2))
    return replace(config, parallel=replace(config.parallel, tp_overlap_parts=number, **options))


def chosen(rank: int, config: Config, recorded: dict[str, str], *, network: Network) -> tuple[int | None, str | None]:
    engine = make_engine(rank, config, network=network)
    engine.choose_ops(recorded, by_timing=True)
    return engine.choices.token_parts, engine.choices.names.get("token-parts")


@pytest.mark.parametrize(
    ("number", "recorded", "expected"),
    [
        (0, {}, 1),
        (3, {}, 3),
        (0, {"token-parts": "4"}, 4),
        (2, {"token-parts": "4"}, 2),
        (0, {"token-parts": "x"}, 1),
    ],
)
def test_a_run_takes_what_is_named_or_recorded(number: int, recorded: dict[str, str], expected: int) -> None:
    assert run_threads(2, chosen, with_parts(number), recorded) == [(expected, str(expected))] * 2


def test_products_in_eight_bits_are_of_all_rows() -> None:
    config = replace(with_parts(0), fp8=Fp8Config(recipe="rowwise"))
    assert run_threads(2, chosen, config, {"token-parts": "4"}) == [(1, "1")] * 2


def test_tokens_that_are_not_cut_have_no_parts() -> None:
    recorded = {"token-parts": "4"}
    assert run_threads(2, chosen, with_parts(0, sequence_parallel="off"), recorded) == [(None, None)] * 2
    engine = make_engine(0, small(config_for("llama", ParallelLayout())))
    engine.choose_ops(recorded, by_timing=True)
    assert engine.choices.token_parts is None


def test_layers_take_the_number_that_was_chosen_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[int]()

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            seen.update(cut.num_parts for name in ("gather", "scatter") if (cut := options.get(name)))
            return real(*args, **options)

        return noted

    monkeypatch.setattr("trainer.parallel.tensor.linear", noting(linear.linear))

    def passed(rank: int, config: Config, *, network: Network) -> None:
        engine = make_engine(rank, config, network=network)
        engine.choose_ops({"token-parts": "2"}, by_timing=True)
        engine.train_step(0, local_batch(config, 0, engine.mesh))

    run_threads(2, passed, with_parts(0))
    assert seen == {2}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((100, 99, 97), 4),
        ((100, 99, 98.5), 1),
        ((100, 97, 96), 2),
        ((100, 90, 120), 2),
        ((100, 130, 200), 1),
    ],
)
def test_more_parts_are_taken_for_a_gain_above_noise(seconds: tuple[float, ...], expected: int) -> None:
    assert fewest_that_win(seconds) == expected


def test_all_ranks_take_what_is_fastest_on_the_slowest() -> None:
    planted = [{1: 10.0, 2: 5.0, 4: 9.0}, {1: 10.0, 2: 12.0, 4: 9.0}]  # seconds by rank and number

    def timed(rank: int, config: Config, *, network: Network) -> int:
        engine = make_engine(rank, config, network=network)
        numbers = iter(TIMED)

        def seconds_of(call: Callable[[], object]) -> float:
            call()
            return planted[rank][next(numbers)]

        return fastest_parts(engine.config, engine.mesh, engine.dtype, seconds_of)

    assert run_threads(2, timed, with_parts(0)) == [4, 4]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_what_is_timed_are_the_linears_of_the_run(model: str) -> None:
    config = small(config_for(model, TP2))

    def passed(rank: int, config: Config, *, network: Network) -> list[list[torch.Size]]:
        engine = make_engine(rank, config, network=network)
        linears = _CutLinears(engine.config, engine.mesh, engine.dtype)
        block = engine.chunks[0].blocks[-1]
        [(qkv, _)] = block.attention.qkv
        own = [qkv.shape, block.attention.out.shape, block.mlp.up.shape, block.mlp.down.shape]
        assert sorted(weight.shape for _, weight in (*linears.columns, *linears.rows)) == sorted(own)
        return [linears.passes(number) for number in TIMED]

    num_tokens, hidden = config.train.micro_batch_size * config.train.seq_length, config.model.hidden_size
    for shapes in run_threads(2, passed, config):
        assert shapes[0] == shapes[1] == shapes[2]
        assert [shape[0] for shape in shapes[0]] == [num_tokens, num_tokens, num_tokens // 2, num_tokens // 2]
        assert [shape[1] for shape in shapes[0][2:]] == [hidden, hidden]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_ranks_on_a_gpu_agree_on_a_timed_number() -> None:
    def fastest(rank: int, config: Config, *, network: Network) -> int:
        engine = make_engine(rank, config, network=network)
        return fastest_parts(engine.config, engine.mesh, engine.dtype)

    first, second = run_threads(2, fastest, small(config_for("llama", TP2, device="cuda")))
    assert first == second
    assert first in TIMED
