"""Every form of an op against the native one: results and gradients, in a run too."""

import dataclasses
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.trainer.support.training import call, curve, write_config, write_stores
from trainer.config import OpsConfig, OptimConfig
from trainer.config.train import AttentionName
from trainer.ops import forms, native
from trainer.ops.activation import ACTIVATIONS
from trainer.ops.adamw import Interval, IntervalTable
from trainer.ops.attention.choose import BACKENDS
from trainer.ops.cross_entropy import VocabularyPart, row_sums, write_gradient
from trainer.ops.norm import add_norm
from trainer.ops.rope import QkNorm, rope, rope_turns

DTYPES = {"fp64": (torch.float64, 1e-12), "bf16": (torch.bfloat16, 1e-2)}
FORMS = ["torch", pytest.param("compile", marks=pytest.mark.slow)]
EACH = pytest.mark.parametrize("form", FORMS)
OF_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def has_apex() -> bool:
    try:
        return bool(forms.package("amp_C") and forms.package("fused_layer_norm_cuda"))
    except Exception:
        return False


APEX = pytest.mark.skipif(not has_apex(), reason="needs NVIDIA Apex with its CUDA extensions")


def agree(run: Callable[[str], list[Tensor]], form: str, dtype: str) -> None:
    """Compare a form's tensors with those of csrc, which it may not call."""
    wanted = run("csrc")
    before = native.csrc_calls()
    found = run(form)
    assert native.csrc_calls() == before
    for one, other in zip(found, wanted, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-30)
        assert error <= DTYPES[dtype][1], (form, error)


def numbers(*shape: int, dtype: str, device: str, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(DTYPES[dtype][0]).to(device)


@pytest.mark.parametrize("form", [*FORMS, pytest.param("apex", marks=APEX)])
@OF_DTYPE
@pytest.mark.parametrize("with_residual", [False, True])
def test_norms(form: str, dtype: str, norm: str, with_residual: bool, device: str) -> None:
    if form == "apex" and (device == "cpu" or dtype == "fp64"):
        pytest.skip("apex has no such kernel")

    def run(form: str) -> list[Tensor]:
        x, residual, dy, dsum = (numbers(6, 64, dtype=dtype, device=device, seed=seed) for seed in range(4))
        weight, bias = (numbers(64, dtype=dtype, device=device, seed=seed) for seed in (5, 6))
        tensors: list[Tensor] = []
        inputs = [x.requires_grad_(), *([residual.requires_grad_()] if with_residual else [])]
        parameters = (weight, bias if norm == "layer" else None)
        handles = types.SimpleNamespace(read=lambda: parameters, take=tensors.extend)
        y, total = add_norm(x, residual if with_residual else None, *parameters, 1e-5, handles, form)
        gradients = torch.autograd.grad([y, total], inputs, [dy, dsum])
        assert all(each.dtype == (torch.float64 if dtype == "fp64" else torch.float32) for each in tensors)
        return [y, total, *gradients, *tensors]

    agree(run, form, dtype)


@EACH
@OF_DTYPE
@pytest.mark.parametrize("with_norm", [False, True])
def test_rope(form: str, dtype: str, with_norm: bool, device: str) -> None:
    def run(form: str) -> list[Tensor]:
        qkv = numbers(5, 8 * 16, dtype=dtype, device=device).requires_grad_()
        weights = [numbers(16, dtype=dtype, device=device, seed=seed).requires_grad_() for seed in (1, 2)]
        turns = rope_turns(torch.arange(5, device=device), 16, 1e4, qkv.dtype)
        heads = rope(qkv, turns, 4, 2, norm=QkNorm(weights[0], weights[1], 1e-5) if with_norm else None, form=form)
        gradients = [numbers(*each.shape, dtype=dtype, device=device, seed=3) for each in heads]
        return [*heads, *torch.autograd.grad(heads, [qkv, *(weights if with_norm else [])], gradients)]

    agree(run, form, dtype)


@EACH
@OF_DTYPE
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(form: str, dtype: str, name: str, device: str) -> None:
    def run(form: str) -> list[Tensor]:
        activation = ACTIVATIONS[name].in_form(form)
        x = numbers(7, 24, dtype=dtype, device=device)
        y = activation.forward(x)
        return [y.clone(), *activation.backward(numbers(*y.shape, dtype=dtype, device=device, seed=1), x.clone())]

    agree(run, form, dtype)


@EACH
@OF_DTYPE
@pytest.mark.parametrize(("first_row", "num_true_rows"), [(0, 32), (0, 20), (32, 7), (32, 0)])
def test_cross_entropy(form: str, dtype: str, first_row: int, num_true_rows: int, device: str) -> None:
    """Labels of this part and of others, padding, an empty part, and a token of no weight with a NaN."""

    def run(form: str) -> list[Tensor]:
        logits, part = numbers(9, 32, dtype=dtype, device=device), VocabularyPart(first_row, num_true_rows, form)
        labels = torch.tensor([0, 1, 33, 5, 38, 19, 32, 36, 4], device=device)
        sums = row_sums(logits, labels, part)
        factors = torch.stack([sums[0], torch.rand_like(sums[0]) * 0 + 0.3, torch.linspace(0, 1, 9, device=device)])
        logits[0] = torch.nan
        write_gradient(logits, labels, part, factors.to(sums.dtype))
        return [sums[1:], sums[0].exp(), logits]

    agree(run, form, dtype)


@pytest.mark.parametrize("form", ["torch", pytest.param("apex", marks=APEX)])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("is_bad", [False, True])
def test_adamw(form: str, precision: str, is_bad: bool, device: str) -> None:
    if form == "apex" and (device == "cpu" or precision == "fp64"):
        pytest.skip("apex has no such kernel")
    wide = torch.float64 if precision == "fp64" else torch.float32

    def run(form: str) -> list[Tensor]:
        intervals = []
        for row, size in enumerate((1, 1000, 37)):
            states = [numbers(size, dtype="fp64", device=device, seed=row + seed).to(wide) for seed in (0, 7, 14, 21)]
            published = states[3].bfloat16() if precision == "bf16" else None
            intervals.append(Interval(states[0], states[1], states[2].square(), states[3], published, row != 2, row))
        table, flag = IntervalTable(intervals), torch.tensor(float(is_bad), device=device)
        factor = torch.tensor(0.25, dtype=torch.float64, device=device)
        table.adamw(OptimConfig(weight_decay=0.5), 0.01, 3, factor=factor, is_bad=flag, form=form)
        kept = [[each.exp_avg, each.exp_avg_sq, each.master, each.published] for each in intervals]
        return [
            torch.cat([one for one in some if one is not None])
            for some in zip(*kept, strict=True)
            if some[0] is not None
        ]

    wanted, found = run("csrc"), run(form)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12 if precision == "fp64" else 1e-5, atol=1e-7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_stores(tmp_path)
    write_config(tmp_path)
    return tmp_path


FIELDS = [field.name.replace("_", "-") for field in dataclasses.fields(OpsConfig) if field.name != "attention"]
TORCH = [word for name in FIELDS if name != "experts" for word in (f"--ops.{name}", "torch")]  # a model without


def test_a_run_of_plain_torch_has_the_losses_of_the_kernels(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [folder / "job.toml", "--train-steps", 3, "--optim.decay-steps", 6, "--train.precision", "fp64"]
    assert call("train", *common, "--metrics", folder / "csrc.jsonl", "--save", folder / "run") == 0
    native._calls.clear()
    flags = [*TORCH, "--ops.attention", "reference"]
    assert call("train", *common, *flags, "--metrics", folder / "torch.jsonl", "--save", folder / "other") == 0
    assert set(native.csrc_calls()) == {"squared_norms", "dropout", "normal"}  # which have no other form
    csrc, plain = curve(folder / "csrc.jsonl"), curve(folder / "torch.jsonl")
    assert csrc.keys() == plain.keys()
    assert max(abs(csrc[step] - plain[step]) for step in csrc) < 1e-10
    capsys.readouterr()
    assert call("train", folder / "job.toml", "--train-steps", 4, "--save", folder / "other", *common[3:]) == 0
    said = capsys.readouterr().err
    assert "not bit for bit as it was: norm torch -> csrc" in said
    assert "not bit for bit as it was: attention" not in said  # the recorded one is taken


def test_where_no_kernel_runs_plain_torch_takes_its_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = [folder / "job.toml", "--train-steps", 2, "--train.precision", "fp64", "--model.dropout", 0.1]
    assert call("train", *common, "--metrics", folder / "csrc.jsonl") == 0
    monkeypatch.setattr(native, "lacks_kernels", lambda device: "they are not built")
    native._calls.clear()
    with pytest.warns(UserWarning, match="plain torch takes the place of the native ops on cpu") as found:
        assert call("train", *common, "--metrics", folder / "torch.jsonl") == 0
    assert len([each for each in found if "native ops" in str(each.message)]) == 1
    assert set(native.csrc_calls()) == {"normal"}  # initial weights, which are made on the CPU
    csrc, plain = curve(folder / "csrc.jsonl"), curve(folder / "torch.jsonl")
    assert max(abs(csrc[step] - plain[step]) for step in csrc) < 1e-10


def test_what_cannot_run_is_one_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, text in (
        (["--ops.norm", "apex"], "ops.norm apex runs on CUDA, not on cpu"),
        (["--ops.adamw", "torch", "--optim.moments", "bf16", "--optim.beta2", 0.9], "ops.adamw torch has no moments"),
        (["--ops.attention", "flash-4"], "ops.attention flash-4:"),
        (["--ops.rope", "apex"], "ops.rope: must be one of csrc, compile, torch"),
    ):
        assert call("train", folder / "job.toml", "--train-steps", 1, *flags) == 2, flags
        assert text in capsys.readouterr().err


def test_a_missing_package_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amp_C", None)
    with pytest.raises(Exception, match="the form apex needs amp_C"):
        forms.package("amp_C")


def test_apex_is_called_with_what_its_functions_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins of the signatures of Apex's functions; its kernels run where it is installed."""
    module = types.ModuleType("apex.normalization.fused_layer_norm")

    def fused_rms_norm_affine(input: Tensor, weight: Tensor, normalized_shape: torch.Size, eps: float) -> Tensor:
        return torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)

    def fused_layer_norm_affine(
        input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: torch.Size, eps: float
    ) -> Tensor:
        return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)

    module.fused_rms_norm_affine, module.fused_layer_norm_affine = fused_rms_norm_affine, fused_layer_norm_affine  # type: ignore[attr-defined]
    monkeypatch.setattr(forms, "package", lambda name: module)
    for bias in (None, torch.randn(8)):
        x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8)
        results = []
        for form in ("csrc", "apex"):
            y, total = add_norm(x, x.detach() * 2, weight, bias, 1e-5, form=form)
            results.append([y, total, torch.autograd.grad(y.square().sum(), x)[0]])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


def test_the_configuration_names_the_backends_that_there_are() -> None:
    assert set(get_args(AttentionName)) == {"auto", *(backend.name for backend in BACKENDS)}
