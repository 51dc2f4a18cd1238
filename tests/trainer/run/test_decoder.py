"""A Decoder computes a token alone, and continues rows as the whole model does, on any layout."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.checks import Different
from tests.trainer.support.decode_faults import DECODE_FAULTS
from tests.trainer.support.decoding import PROMPTS, SHAPES, compare_decoding, decode, decoding
from tests.trainer.support.parity import make_engine
from tests.trainer.support.training import ROOT
from trainer.job.ranks import Ranks
from trainer.run.decoder import Decoder
from trainer.run.inference import TrainedModel, open_checkpoint

GOLDEN = ROOT / "tests" / "golden" / "hugging-face"


@pytest.mark.parametrize("name", [*SHAPES, "experts"])
def test_logits_are_those_of_the_whole_row(name: str) -> None:
    compare_decoding(name)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", "tp2"), ("gpt2", "pp2"), ("windows", "tp2-pp2"), ("experts", "dp2-ep2")],
)
def test_any_layout_continues_with_the_same_tokens(name: str, layout: str) -> None:
    compare_decoding(name, layout)


def test_other_passes_of_the_model_are_as_before() -> None:
    engine = make_engine(0, decoding("windows", "tp1", "fp64"))
    tokens = torch.tensor([PROMPTS[2], PROMPTS[2][::-1]])
    before = engine.logits(tokens)
    Decoder(engine).begin(PROMPTS, lambda logits_BV: logits_BV.argmax(-1), most_tokens=9)
    assert torch.equal(engine.logits(tokens), before)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp4", "pp2-virtual2", "tp2-pp2", "pp4"])
@pytest.mark.parametrize("name", SHAPES)
def test_all_layouts_continue_with_the_same_tokens(name: str, layout: str, precision: str) -> None:
    compare_decoding(name, layout, precision)


@pytest.mark.parametrize("fault", DECODE_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_what_is_kept_is_seen(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    with pytest.raises(Different):
        compare_decoding(fault.model, fault.layout)


@pytest.mark.parametrize("model", sorted(path.name for path in GOLDEN.iterdir()))
def test_models_of_hugging_face_continue_as_without_what_is_kept(model: str) -> None:
    """In fp32, rows of several lengths together."""
    checkpoint = open_checkpoint(f"hf:{GOLDEN / model}", None, {}, world_size=1)
    rows = [[1, 5, 7], [9], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]
    with Ranks("cpu", timeout_s=60) as ranks:
        engine = TrainedModel(checkpoint, ranks).engine
        decoder = Decoder(engine)
        tokens = decoder.begin(rows, lambda logits_BV: logits_BV.argmax(-1), most_tokens=16)
        for _ in range(6):
            expected = [int(engine.logits(torch.tensor([row])).argmax()) for row in rows]
            assert tokens == expected
            rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
            tokens = decoder.next(tokens, lambda logits_BV: logits_BV.argmax(-1))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["llama", "windows"])
def test_tokens_on_a_gpu_are_those_of_a_cpu_and_no_plan_is_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, allowed = F.scaled_dot_product_attention, set()

    def noted(*arguments: Any, **options: Any) -> Tensor:
        allowed.add(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    config = decoding(name, "tp1", "fp32")
    on_gpu = replace(config, train=replace(config.train, device="cuda"))
    tokens = [[[row[:2] for row in step] for step in decode(0, each)] for each in (config, on_gpu)]
    assert tokens[0] == tokens[1]
    assert allowed == {False, True}  # the CPU asks for none
