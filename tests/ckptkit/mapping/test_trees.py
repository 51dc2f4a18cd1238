"""Steps of ckptkit.torch.Run after a mapping: Run.load takes them, or the mapping is refused and nothing written."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.cli import main
from ckptkit.torch import Run


class Model(nn.Module):
    """A model whose layers have names that a test chooses."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, rows in sizes.items():
            setattr(self, name, nn.Linear(4, rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.children()], 1)


def trained(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    optimizer = kind(model.parameters(), lr=0.1, **options)
    step({"model": model, "optimizer": optimizer})
    return {"model": model, "optimizer": optimizer}


def step(state: dict[str, Any]) -> list[torch.Tensor]:
    state["optimizer"].zero_grad()
    state["model"](torch.ones(2, 4)).square().sum().backward()
    state["optimizer"].step()
    return [each.detach().clone() for each in state["model"].parameters()]


def moments(state: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """Of each parameter a copy, and of what the optimizer has of it."""
    states = state["optimizer"].state
    return {
        name: [each.detach().clone() for each in (parameter, *states[parameter].values())]
        for name, parameter in state["model"].named_parameters()
    }


def fresh(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": kind(model.parameters(), lr=9.0, **options)}


def save(folder: Path, state: dict[str, Any]) -> None:
    with Run(folder / "run") as run:
        run.save(3, state, {"loss": 0.5})


def remap(folder: Path, rules: str) -> int:
    (folder / "map.toml").write_text(rules)
    return main(["reshard", str(folder / "run"), str(folder / "new"), "--map", str(folder / "map.toml"), "--dp", "2"])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_renamed_layers_are_loaded_with_their_optimizer(tmp_path: Path, kind: Any) -> None:
    torch.manual_seed(0)
    state = trained(Model(old=3, kept=2), kind)
    save(tmp_path, {**state, "epoch": 4, "rng": True})
    expected = step(state)
    assert remap(tmp_path, "[[rename]]\ntensors = '{kind*}old.{rest*}'\nto = '{kind*}new.{rest*}'\n") == 0
    target = {**fresh(Model(new=3, kept=2), kind), "epoch": 0, "rng": True}
    assert Run(tmp_path / "new").load(target).metrics == {"loss": 0.5}
    assert target["epoch"] == 4
    assert all(map(torch.equal, expected, step(target)))
    assert main(["verify", str(tmp_path / "new")]) == 0


def test_a_split_matrix_is_loaded_with_its_moments_and_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = trained(Model(qkv=6))
    save(tmp_path, state)
    saved = moments(state)
    expected = [each.reshape(3, 2, -1).squeeze(-1) for each in step(state)]
    to = ", ".join(f"'{{kind*}}{name}.{{rest*}}'" for name in "qkv")
    assert remap(tmp_path, f"[[split]]\ntensors = '{{kind*}}qkv.{{rest*}}'\nto = [{to}]\n") == 0
    target = fresh(Model(q=2, k=2, v=2))
    Run(tmp_path / "new").load(target)
    for name, loaded in moments(target).items():
        which, _, kind = name.partition(".")
        for ours, whole in zip(loaded, saved[f"qkv.{kind}"], strict=True):
            assert torch.equal(ours, whole.chunk(3)["qkv".index(which)] if whole.ndim else whole)
    found = dict(zip((name for name, _ in target["model"].named_parameters()), step(target), strict=True))
    for number, name in enumerate("qkv"):
        torch.testing.assert_close(found[f"{name}.weight"], expected[0][number])  # sums go by a matrix's shape
        torch.testing.assert_close(found[f"{name}.bias"], expected[1][number])


def test_dropped_parameters_leave_the_groups_too(tmp_path: Path) -> None:
    model = Model(head=2, kept=3)
    optimizer = torch.optim.AdamW([{"params": model.head.parameters()}, {"params": model.kept.parameters()}])
    state = {"model": model, "optimizer": optimizer}
    step(state)
    save(tmp_path, {**state, "note": [1, None]})
    assert remap(tmp_path, "[[drop]]\ntensors = '{kind*}head.{rest*}'\n") == 0
    target = fresh(Model(kept=3))
    report = Run(tmp_path / "new").load(target)
    assert not report.missing
    assert target["optimizer"].param_groups[0]["lr"] == optimizer.param_groups[1]["lr"]


def test_a_dropped_key_and_fresh_moments(tmp_path: Path) -> None:
    state = trained(Model(a=2))
    save(tmp_path, {**state, "ema": Model(a=2), "rng": True})
    rules = "".join(f"[[drop]]\ntensors = '{each}/{{rest*}}'\n" for each in ("ema", "rng", "optimizer/state"))
    assert remap(tmp_path, rules) == 0
    target = fresh(Model(a=2))
    Run(tmp_path / "new").load(target)
    assert torch.equal(target["model"].a.weight, state["model"].a.weight)
    assert not target["optimizer"].state
    with pytest.raises(Exception, match="missing in the checkpoint: ema"):
        Run(tmp_path / "new").load({"ema": Model(a=2)})


def test_the_numbers_of_a_dropped_state_go_with_its_tensors(tmp_path: Path) -> None:
    state = trained(Model(a=2))
    for each in state["optimizer"].state.values():
        each["step"] = int(each["step"])  # as other optimizers than torch's have it
    save(tmp_path, state)
    assert remap(tmp_path, "[[drop]]\ntensors = 'optimizer/state/a.bias/{rest*}'\n") == 0
    target = fresh(Model(a=2))
    Run(tmp_path / "new").load(target)
    assert [len(target["optimizer"].state[each]) for each in target["model"].parameters()] == [3, 0]


def test_layers_put_into_order_and_a_key_with_another_name(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    save(tmp_path, {"model": nn.ModuleDict({"layers": layers}), "odd": {0: [torch.ones(2)], "a/b": torch.zeros(1)}})
    rules = "[layers]\norder = [1, 0, 1]\n[[rename]]\ntensors = 'model/{rest*}'\nto = 'net/{rest*}'\n"
    rules += "[[rename]]\ntensors = 'odd/a%2Fb'\nto = 'odd/inner/c'\n"
    assert remap(tmp_path, rules) == 0
    new = nn.ModuleDict({"layers": nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))})
    odd: dict[Any, Any] = {0: [torch.zeros(2)], "inner": {"c": torch.ones(1)}}
    Run(tmp_path / "new").load({"net": new, "odd": odd})
    for number, source in enumerate((1, 0, 1)):
        assert torch.equal(new["layers"][number].weight, layers[source].weight)
    assert (odd[0][0].tolist(), odd["inner"]["c"].tolist()) == ([1, 1], [0])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("[[rename]]\ntensors = 'optimizer/state/old.weight/exp_avg'\nto = 'optimizer/state/x/exp_avg'",
         "optimizer/state/old.weight does not go as one: exp_avg_sq, step to old.weight; exp_avg to x"),
        ("[[drop]]\ntensors = 'optimizer/state/{name*}/exp_avg_sq'",
         "optimizer/state/old.bias does not go as one: exp_avg, step to old.bias; exp_avg_sq to no name"),
        ("[[rename]]\ntensors = 'list/#0'\nto = 'list/#4'", "list/#0 is an item of a list, which keeps its place"),
        ("[[drop]]\ntensors = 'list/#0'", "list/#0 is an item of a list, which is dropped whole"),
        ("[[rename]]\ntensors = 'model/old.bias'\nto = 'list/#5/x'", "list/#5/x: the recorded state has no place"),
        ("[[rename]]\ntensors = 'model/old.bias'\nto = 'model/#x'", "'#x' is not a part of a name"),
        ("[[rename]]\ntensors = 'rng/@0/torch'\nto = 'random/torch'", "each rank has its own rng"),
    ],
)  # fmt: skip
def test_what_no_tree_can_say_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rules: str, message: str
) -> None:
    save(tmp_path, {**trained(Model(old=2)), "list": [torch.ones(1), torch.zeros(1)], "rng": True})
    assert remap(tmp_path, rules) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("new/*"))


def test_rules_that_change_nothing_keep_every_byte(tmp_path: Path) -> None:
    save(tmp_path, {**trained(Model(old=2)), "rng": True})
    assert remap(tmp_path, "[[rename]]\ntensors = '{all*}'\nto = '{all*}'\n") == 0
    assert main(["reshard", str(tmp_path / "run"), str(tmp_path / "plain"), "--dp", "2"]) == 0
    parts = [sorted(tmp_path.glob(f"{name}/step-*/*/*.safetensors")) for name in ("new", "plain")]
    assert all(one.read_bytes() == two.read_bytes() for pair in pairwise(parts) for one, two in zip(*pair, strict=True))


def test_the_report_speaks_of_tensors_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, {"model": Model(old=2)})
    (tmp_path / "map.toml").write_text("[[rename]]\ntensors = 'model/old.bias'\nto = 'model/b'\n")
    capsys.readouterr()
    main(["reshard", str(tmp_path / "run"), str(tmp_path / "new"), "--map", str(tmp_path / "map.toml"), "--json"])
    report = json.loads(capsys.readouterr().out)["map"]
    assert (report["new"], report["changed"], report["dropped"]) == ({"model/b": "model/old.bias"}, [], [])
