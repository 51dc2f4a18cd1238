"""What the backward makes again has the bits of what was kept, and nothing is made that it does not read."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.trainer.support.parity import local_batch, make_engine
from tests.trainer.support.recompute import compare_again, dropping
from tests.trainer.support.training import call
from trainer.config import Config
from trainer.linear.weight import Gemm
from trainer.model.recompute import Recompute
from trainer.ops.attention.sdpa import CpuFlash
from trainer.run.activations import CHOICES

AGAIN = {name: options for name, options in CHOICES.items() if name != "none"} | {
    "full of a layer": {"recompute": "full", "recompute_num_layers": 1},
    "selective of a layer": {"recompute": "selective", "recompute_modules": ("mlp",), "recompute_num_layers": 1},
}


def with_train(config: Config, **train: Any) -> Config:
    return replace(config, train=replace(config.train, **train))


QUICK = [("llama", "tp1", {}, name) for name in ("selective", "full of a layer")] + [
    ("gpt2", "tp1", {}, "selective of mlp,attention"),
    ("llama", "tp2", {"overlap_grad_reduce": False}, "full that keeps attention"),
    ("gpt2", "pp2", {"schedule": "zb-h1"}, "selective of mlp"),
]
CI = {"tp2-pp2-dp2"}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("tp1", {}),
    ("tp2", {}),
    ("tp2", {"sequence_parallel": "off"}),
    ("pp2", {}),
    ("pp2", {"schedule": "zb-h1"}),
    ("tp2-pp2-dp2", {"schedule": "zb-h1", "tp_overlap_parts": 2}),
    ("dp2", {"overlap_grad_reduce": False, "overlap_param_gather": False}),
]


@pytest.mark.parametrize(
    ("model", "layout", "parallel", "choice"),
    [
        *QUICK,
        *(
            pytest.param(model, layout, parallel, choice, marks=[pytest.mark.slow, *[pytest.mark.ci] * (layout in CI)])
            for model in ("llama", "gpt2")
            for layout, parallel in LAYOUTS
            for choice in AGAIN
            if (model, layout, parallel, choice) not in QUICK
        ),
    ],
)
def test_what_is_made_again_has_the_bits_of_what_is_kept(
    model: Any, layout: str, parallel: dict[str, Any], choice: str
) -> None:
    compare_again(dropping(model, layout, **parallel), **AGAIN[choice])


@pytest.mark.parametrize(
    ("choice", "products", "kernels"),  # of a layer, both passes together
    [
        ("none", 4, 1),
        ("selective", 4, 1),
        ("selective of mlp", 5, 1),
        ("selective of attention", 5, 2),
        ("selective of mlp,attention", 6, 2),
        ("full that keeps attention", 7, 1),
        ("full", 7, 2),
    ],
)
def test_no_product_is_made_that_the_backward_does_not_read(
    choice: str, products: int, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four products in a layer the last is made once."""
    config = dropping("llama", "tp1")
    engine = make_engine(0, with_train(config, **CHOICES[choice]))
    counts: Counter[str] = Counter()
    for owner in (Gemm, CpuFlash):

        def counted(
            self: Any, *arguments: Any, real: Any = owner.forward, name: str = owner.__name__, **out: Any
        ) -> Any:
            counts[name] += 1
            return real(self, *arguments, **out)

        monkeypatch.setattr(owner, "forward", counted)
    engine.train_step(0, local_batch(config, 0, engine.mesh))
    passes = config.train.gradient_accumulation_steps
    num_layers = config.model.num_layers
    assert counts["Gemm"] == passes * (num_layers * products + 1), "and the logits"
    assert counts["CpuFlash"] == passes * num_layers * kernels


def test_the_first_layers_of_a_stage_are_made_again() -> None:
    train = with_train(dropping("llama", "tp1"), recompute="full", recompute_num_layers=2).train
    assert [Recompute.of_layer(train, place).is_full for place in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (
            "--recompute none --recompute-num-layers 5",
            'recompute_num_layers needs train.recompute = "selective" or "full"',
        ),
        ("--recompute-modules mlp", 'train.recompute_modules needs train.recompute = "selective", which is "none"'),
        ("--recompute full --train.recompute-modules norms", "train.recompute_modules needs train.recompute"),
        ("--recompute selective --recompute-keep attention", 'train.recompute_keep needs train.recompute = "full"'),
        ("--recompute selective --recompute-modules mlp,scores", "'scores' is not made again here"),
        ("--recompute selective --train.recompute-modules scores", "must be one of norms, mlp, attention"),
        ("--recompute full --recompute-num-layers -1", "must be at least 0"),
        ("--recompute full --recompute-num-layers 4", "is more than model.num_layers 3: --recompute-num-layers 3"),
        ("--recompute full --recompute-num-layers 3 --pp 2", "the 2 layers that a stage has at most"),
        ("--recompute full --recompute-num-layers 3 --pp 2 --pipeline-layout 1,2", "the 2 layers that a stage has"),
        ("--recompute half", "must be one of none, selective, full, got 'half'"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", "not 2 as one"),
    ],
)
def test_what_cannot_be_made_again_is_one_error_before_anything_starts(
    flags: str, fault: str, job_config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", job_config, "--dry-run", *flags.split()) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert fault in first
    assert [line.split(":")[0] for line in rest] == ["hint"]
