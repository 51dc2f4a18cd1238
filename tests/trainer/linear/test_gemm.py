"""Gemm: the products of a weight go through the one object that it has, whatever is around them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from tests.trainer.support.parity import config_for, run_steps, small
from tests.trainer.support.weights import handle
from trainer.config.resolve import layout_of, resolve
from trainer.linear.weight import Gemm
from trainer.verify.threads import run_threads


def test_the_products_are_those_of_plain_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    values, x, dy, bias = (torch.randn(*shape, generator=generator) for shape in ((3, 5), (8, 5), (8, 3), (3,)))
    weight, gradient = handle(values)
    torch.testing.assert_close(weight.gemm.forward(x, bias), x @ values.T + bias)
    torch.testing.assert_close(weight.gemm.forward(x, bias, out=torch.empty(8, 3)), x @ values.T + bias)
    torch.testing.assert_close(weight.gemm.forward(x, out=torch.empty(8, 3)), x @ values.T)
    torch.testing.assert_close(weight.gemm.dgrad(dy, out=torch.empty(8, 5)), dy @ values)
    weight.gemm.wgrad(dy, x)
    weight.gemm.wgrad(dy, x)
    torch.testing.assert_close(gradient, 2 * dy.T @ x)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("tp1", {}), ("tp2", {"tp_overlap_parts": 1}), ("tp2", {"tp_overlap_parts": 2}), ("pp2", {"schedule": "zb-h1"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("max_logits_gib", [0.0, pytest.param(1e-7, marks=(pytest.mark.slow, pytest.mark.ci))])
def test_every_product_of_a_step_is_one_of_its_weight(
    layout: str, options: dict[str, Any], max_logits_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(config_for("llama", ParallelLayout.parse(layout)))
    parallel = replace(config.parallel, **options)
    config = replace(config, parallel=parallel, train=replace(config.train, max_logits_gib=max_logits_gib))
    world_size = layout_of(config).world_size
    config = resolve(config, world_size)
    called: dict[str, set[str]] = {"forward": set(), "dgrad": set(), "wgrad": set()}

    def counted(name: str) -> Any:
        real = getattr(Gemm, name)

        def call(self: Gemm, *args: Any, **named: Any) -> Any:
            called[name].add(self.weight.name)  # type: ignore[attr-defined]
            return real(self, *args, **named)

        return call

    for name in called:
        monkeypatch.setattr(Gemm, name, counted(name))
    run_threads(world_size, run_steps, config, 1)
    assert called["forward"] == called["dgrad"] == called["wgrad"]
    assert len(called["forward"]) >= 4 * config.model.num_layers + 1
