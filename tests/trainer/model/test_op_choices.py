"""Attention is chosen for the tensors that a run has, once for each kind of mask."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from datakit import MixtureConfig
from tests.trainer.support.parity import config_for, make_engine, small
from threefold.errors import UserError
from trainer.config.train import NO_WINDOW, NOT_REPEATING
from trainer.mesh.mesh import mesh_of
from trainer.model import op_choices
from trainer.ops.attention.choose import BACKENDS, REPEATING
from trainer.ops.attention.sdpa import Cudnn
from trainer.ops.attention.seam import Mask
from trainer.run.stage_times import Nobody


@pytest.mark.parametrize("document_mask", [False, True])
def test_attention_is_chosen_with_the_longest_rows(monkeypatch: pytest.MonkeyPatch, document_mask: bool) -> None:
    config = config_for("llama", ParallelLayout())
    length, num_rows = config.train.seq_length, config.train.micro_batch_size
    changes = MixtureConfig(from_step=5, seq_length=4 * length), MixtureConfig(from_step=9, seq_length=2 * length)
    config = replace(config, data=replace(config.data, mixture=changes, document_mask=document_mask))
    asked: list[tuple[int, Mask]] = []

    def choose(q_TNH: torch.Tensor, k_UKH: torch.Tensor, mask: Mask, *, deterministic: bool) -> str:
        assert len(q_TNH) == len(k_UKH)
        asked.append((len(q_TNH), mask))
        return "reference"

    monkeypatch.setattr(op_choices, "choose", choose)
    mesh = mesh_of(config, 0, torch.device("cpu"), network=Nobody(1))
    found = op_choices.choose_attention(config, mesh, torch.float32, {}, by_timing=True)
    [(num_tokens, mask)] = asked
    assert {kind: backend.name for kind, backend in found.items()} == {"": "reference"}
    assert num_tokens == num_rows * 4 * length
    assert mask.max_q == (length if document_mask else 4 * length)


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ({}, {"attention": "sdpa-cpu", "attention-window-4": "reference"}),
        ({"attention": "reference"}, {"attention": "reference", "attention-window-4": "reference"}),
        ({"attention-window-4": "sdpa-cpu"}, {"attention": "sdpa-cpu", "attention-window-4": "reference"}),
        ({"attention": "lost", "norm": "torch"}, {"attention": "sdpa-cpu", "attention-window-4": "reference"}),
    ],
    ids=["new", "an older record", "a backend that cannot", "a backend that is gone"],
)
def test_a_backend_is_chosen_and_recorded_for_each_kind_of_mask(
    monkeypatch: pytest.MonkeyPatch, recorded: dict[str, str], expected: dict[str, str]
) -> None:
    monkeypatch.setattr(op_choices, "layer_windows", lambda config: (None, 4, 4))
    engine = make_engine(0, small(config_for("llama", ParallelLayout())))
    engine.choose_ops(recorded, by_timing=False)
    assert engine.choices.names == expected
    engine.choose_ops(expected, by_timing=True)
    assert engine.choices.names == expected, "a resume takes what was recorded"


def test_each_kind_of_mask_is_chosen_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def choose(q_TNH: torch.Tensor, k_UKH: torch.Tensor, mask: Mask, *, deterministic: bool) -> str:
        asked.append(mask.window)
        return "reference" if mask.window is None else "sdpa-cpu"

    monkeypatch.setattr(op_choices, "layer_windows", lambda config: (8, None, 8))
    monkeypatch.setattr(op_choices, "choose", choose)
    engine = make_engine(0, small(config_for("llama", ParallelLayout())))
    assert asked == [8, None], "once a kind, not a layer"
    assert engine.choices.names == {"attention": "reference", "attention-window-8": "sdpa-cpu"}


def test_a_named_backend_that_one_kind_of_mask_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(config_for("llama", ParallelLayout()))
    config = replace(config, ops=replace(config.ops, attention="sdpa-cpu"))
    assert make_engine(0, config).choices.names == {"attention": "sdpa-cpu"}
    monkeypatch.setattr(op_choices, "layer_windows", lambda config: (None, None, 8))
    with pytest.raises(UserError, match=r"ops.attention sdpa-cpu: .*window"):
        make_engine(0, config)


def test_the_kind_of_a_mask_is_what_layers_differ_in() -> None:
    mask = Mask.of_rows(16)
    assert [mask.kind, replace(mask, window=4).kind] == ["", "window-4"]
    assert replace(Mask.of_documents(torch.tensor([0, 16]), 16), alibi=torch.ones(2)).kind == "alibi"
    assert replace(mask, window=4, alibi=torch.ones(2)).kind == "window-4-alibi"


def test_a_window_no_row_is_longer_than_is_none() -> None:
    config = small(config_for("llama", ParallelLayout()))
    length, windows = config.train.seq_length, {}
    for window in (length - 1, length, length + 1):
        other = replace(config, model=replace(config.model, window=window, window_every=3))
        windows[window] = make_engine(0, other).choices.windows
    assert windows == {length - 1: (length - 1, length - 1, None), length: (None,) * 3, length + 1: (None,) * 3}
    longer = MixtureConfig(from_step=5, seq_length=2 * length)
    other = replace(config, model=replace(config.model, window=length), data=replace(config.data, mixture=(longer,)))
    assert make_engine(0, other).choices.windows == (length,) * 3, "rows that come later count"


def test_which_backends_have_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of a configuration, which has no tensors, knows them by name."""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    mask, without = Mask(None, None, 4, 4, 2), set()
    for backend in BACKENDS:
        device = SimpleNamespace(type="cpu" if backend.name == "sdpa-cpu" else "cuda")
        q: Any = SimpleNamespace(device=device, dtype=torch.bfloat16, shape=(4, 1, 32))
        if "window" in str(backend.refusal(q, q, mask)):
            without.add(backend.name)
    assert without == set(NO_WINDOW)


def test_which_backends_repeat_their_bits() -> None:
    assert {*NOT_REPEATING, *REPEATING} == {backend.name for backend in BACKENDS}
    assert not {*NOT_REPEATING} & {*REPEATING}


def test_a_deterministic_resume_leaves_a_recorded_backend_that_does_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(config_for("llama", ParallelLayout()))
    monkeypatch.setattr(Cudnn, "refusal", lambda *_: None)
    engine = make_engine(0, config)
    engine.choose_ops({"attention": "sdpa-cudnn"}, by_timing=False)
    assert engine.choices.names == {"attention": "sdpa-cudnn"}
    engine = make_engine(0, replace(config, train=replace(config.train, deterministic=True)))
    engine.choose_ops({"attention": "sdpa-cudnn"}, by_timing=False)
    assert engine.choices.names == {"attention": "sdpa-cpu"}
