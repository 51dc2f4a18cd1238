"""Layers of true width on a device: what is sound, what is found, and what is not run."""

import json
from collections.abc import Callable
from time import perf_counter
from typing import Any

import pytest
import torch

from tests.support.printed import printed
from tests.trainer.support.option_walk import run_of
from trainer.cli import main
from trainer.config import Config
from trainer.linear import fp8
from trainer.linear.fp8 import product as real_product
from trainer.model.norm import WeightHandles
from trainer.ops.attention.sdpa import CpuFlash
from trainer.verify.card import card, page, verdict_of
from trainer.verify.device_checks import DEVICE_CHECKS, device_results
from trainer.verify.result import Result
from trainer.verify.shrink import Shrunk
from trainer.verify.true_width import Wide, true_width

Capture = pytest.CaptureFixture[str]
SIZES = {
    "model__hidden_size": "64",
    "model__vocab_size": "96",
    "model__ffn_hidden_size": "128",
    "model__num_heads": "4",
}


def run(**flags: str) -> Config:
    return run_of("examples/tiny.toml", **(SIZES | {"train__precision": "bf16"} | flags))


def checked(config: Config, row: int = 32) -> tuple[Shrunk, dict[str, Result]]:
    wide, results = device_results(config, torch.device("cpu"), perf_counter() + 300, row=row)
    return wide, {result.name: result for result in results}


def test_layers_of_each_kind_are_sound_and_on_the_card() -> None:
    config = run(train__deterministic="true", model__num_layers="9", model__window="8", model__window_every="3")
    wide, results = checked(config)
    assert {name: result.state for name, result in results.items()} == dict.fromkeys(DEVICE_CHECKS, "ok")
    assert (wide.config.model.num_layers, wide.config.model.hidden_size) == (2, 64)
    assert "model.num_layers" in {change.key for change in wide.changes}
    known = card("tiny", config, wide, list(results.values()), wide)
    assert "of true width have otherwise" in page(known)
    assert known["changes_at_true_width"]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_eight_bits_are_held_to_what_is_multiplied(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"fp8__recipe": recipe, "fp8__wgrad": "fp8", "model__hidden_size": "128", "model__head_size": "32"}
    config = run(**flags)
    assert checked(config, row=128)[1]["linears at true width"].state == "ok"
    monkeypatch.setattr(fp8, "product", wrong_product)
    result = checked(config, row=128)[1]["linears at true width"]
    assert result.state == "FAILED"
    assert "x W^T of layers.0." in result.text


def wrong_product(a: Any, b: Any, dtype: torch.dtype, *, is_fast: bool = False, out: Any = None) -> torch.Tensor:
    """Return a product whose scale is off."""
    return real_product(a, b, dtype, is_fast=is_fast, out=out).mul_(1.05)


def wrong_norm(patch: pytest.MonkeyPatch) -> None:
    real = WeightHandles.take
    patch.setattr(WeightHandles, "take", lambda self, parts: real(self, tuple(1.1 * part for part in parts)))


def wrong_keys(patch: pytest.MonkeyPatch) -> None:
    real = CpuFlash.backward

    def backward(self: CpuFlash, *arguments: Any) -> Any:
        dq, dk, dv = real(self, *arguments)
        return dq, 1.1 * dk, dv

    patch.setattr(CpuFlash, "backward", backward)


@pytest.mark.parametrize(
    ("plant", "check", "text"),
    [
        (wrong_norm, "layers at true width", "the gradient of layers.0.norm1.weight differs by"),
        (wrong_keys, "attention at true width", "dk of attention  by"),
    ],
)
def test_an_op_with_a_wrong_gradient_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], check: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    result = checked(run())[1][check]
    assert result.state == "FAILED"
    assert text in result.text


def test_a_batch_is_drawn_on_the_host_whatever_the_default_device() -> None:
    cpu = torch.device("cpu")
    wide = true_width(run(), cpu, row=32).config
    expected = Wide(wide, cpu).batch.tokens
    with torch.device("meta"):  # as a reference on a GPU has its own
        assert torch.equal(Wide(wide, cpu).batch.tokens, expected)


def test_what_cannot_run_is_not_sound() -> None:
    _, results = checked(run(ops__attention="sdpa-cudnn"))
    assert verdict_of(list(results.values())) == "partial"
    assert {result.state for result in results.values()} == {"not run", "not needed"}
    assert all(result.text for result in results.values())
    config = run()
    late = device_results(config, torch.device("cpu"), perf_counter(), row=32)[1]
    assert {(result.state, result.text) for result in late} == {("not run", "the time was over")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line(capsys: Capture) -> None:
    code, out, err = printed(main, ["verify", "examples/tiny.toml", "--device", "cuda"], capsys)
    assert (code, out, err.count("\n")) == (2, "", 2)
    assert "no usable GPU" in err


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_is_held_to_float64(capsys: Capture) -> None:
    words = ["verify", "examples/tiny.toml", "--device", "cuda", "--seconds", "300", "--bf16", "--json", "-"]
    code, out, err = printed(main, words, capsys)
    assert code == 0, err
    known = json.loads(out)
    assert {check["name"]: check["state"] for check in known["checks"]}.items() >= {
        **dict.fromkeys(DEVICE_CHECKS, "ok"),
        "the same bits twice": "not needed",
    }.items()
    assert known["versions"]["gpu"]
