"""Weights that a program shares and the checkpoint has twice: loaded if equal, else refused by both names."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ckptkit.torch import Run
from threefold.errors import UserError


def model(*, tied: bool) -> nn.Module:
    made = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    if tied:
        made["head"].weight = made["embed"].weight
    return made


def test_untied_weights_that_differ_are_refused_by_both_names(tmp_path: Path) -> None:
    one, tied = model(tied=False), model(tied=True)
    before = tied["embed"].weight.detach().clone()
    with Run(tmp_path) as run:
        run.save(1, {"model": one})
        with pytest.raises(
            UserError, match=r"(?s)model/head.weight and model/embed.weight are one tensor.*\n.*own in the"
        ):
            run.load({"model": tied})
        assert torch.equal(tied["embed"].weight, before)
        report = run.load({"model": tied}, strict=False)
    assert report.untied == (
        "model/head.weight and model/embed.weight are one tensor here and differ in the checkpoint",
    )
    assert torch.equal(tied["embed"].weight, one["embed"].weight)


@pytest.mark.parametrize("is_tied_in_the_step", [True, False])
def test_equal_weights_are_loaded_into_one(tmp_path: Path, is_tied_in_the_step: bool) -> None:
    one, tied = model(tied=is_tied_in_the_step), model(tied=True)
    with torch.no_grad():
        one["head"].weight.copy_(one["embed"].weight)
    with Run(tmp_path) as run:
        run.save(1, {"model": one})
        assert run.load({"model": tied}).untied == ()
    assert torch.equal(tied["head"].weight, one["embed"].weight)
