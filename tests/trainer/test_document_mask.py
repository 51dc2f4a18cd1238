"""Attention that does not cross documents: block-diagonal in plain torch, on any layout, through each backend."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptkit.model.layout import ParallelLayout
from datakit import BatchOptions, pack
from tests.trainer.support.parity import assert_parity, config_for, local_batch, make_engine, run_steps, with_documents
from tests.trainer.support.parity import small as with_small_vocabulary
from tests.trainer.support.training import call, curve
from tests.trainer.test_engine import batches, small_config
from trainer.checkpoint.mapping import saved_pieces, tensor_table
from trainer.config import Config, DataConfig
from trainer.config.walk import load_config
from trainer.data import open_blend, to_device, with_vocabulary
from trainer.ops.attention.choose import BACKENDS
from trainer.verify.plain_model import train
from trainer.verify.threads import run_threads
from trainer.verify.whole import assembled, copied

MASKED = DataConfig(document_mask=True)
CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def masked(config: Config, *, recompute: str = "none") -> Config:
    return replace(config, data=MASKED, train=replace(config.train, recompute=recompute))


@pytest.mark.parametrize(
    ("model", "backend"),
    [
        ("llama", "sdpa-cpu"),
        ("llama", "reference"),
        pytest.param("gpt2", "sdpa-cpu", marks=pytest.mark.slow),
        pytest.param("gpt2", "reference", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_a_block_diagonal_mask(model: str, backend: str) -> None:
    config = masked(small_config(model, ParallelLayout()))
    engine = make_engine(0, config)
    engine.choose_ops({"attention": backend}, by_timing=False)
    assert engine.choices.names == {"attention": backend}
    state = assembled(tensor_table(engine.table, engine.dtype), copied(saved_pieces(engine.store)))
    plain = {name: value for name, value in state.items() if not name.startswith("optim.")}
    steps = [with_documents(batch) for batch in batches()][:3]
    crossing = make_engine(0, config).train_step(0, next(batches())).loss
    for step, (loss, norm) in enumerate(train(config, plain, steps)):
        stats = engine.train_step(step, steps[step])
        assert (stats.loss, stats.grad_norm) == pytest.approx((loss, norm), rel=1e-10), f"step {step}"
        if step == 0:
            assert abs(stats.loss - crossing) > 1e-6, "the mask makes a difference"
    trained = assembled(tensor_table(engine.table, engine.dtype), copied(saved_pieces(engine.store)))
    for name, value in plain.items():
        torch.testing.assert_close(trained[name], value.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_layouts_and_recompute_repeat_one_process(model: str) -> None:
    reference = run_steps(0, masked(with_small_vocabulary(config_for(model, ParallelLayout()))), 2)
    layout = ParallelLayout(tp=2, pp=2)
    config = masked(with_small_vocabulary(config_for(model, layout)), recompute="full")
    assert_parity(run_threads(4, run_steps, config, 2), reference)


@pytest.mark.parametrize("packing", ["best_fit", pytest.param("pad", marks=pytest.mark.slow)])
def test_a_run_on_packed_stores_trains_on_their_rows(job_config: Path, tmp_path: Path, packing: str) -> None:
    text = job_config.read_text()
    for table, name in (("data", "train"), ("data.valid", "valid")):
        index, _ = pack(job_config.parent / name, seq_length=32, packing=packing, output=tmp_path / name)
        text = text.replace(f"[{table}]\n", f"[{table}]\npacking = '{packing}'\nindices = ['{index}']\n")
    path, metrics = tmp_path / "job.toml", tmp_path / "m.jsonl"
    path.write_text(text.replace("[data.valid]", "document_mask = true\n[data.valid]"))
    flags = ["--train-steps", 2, "--train.eval-interval", 2, "--train.precision", "fp64", "--metrics", metrics]
    assert call("train", path, *flags) == 0

    config = with_vocabulary(load_config(str(path), {"train.precision": "fp64", "train.train_steps": 2}))
    blend = open_blend(config)
    host = blend.batch(range(16), BatchOptions(mask_eod_loss=True)).reshaped(8, 2, 32, first_sample=0)
    assert host.cu_seqlens is not None
    assert len(host.cu_seqlens) > 17, "several documents a row, or padding"
    loss = make_engine(0, config).train_step(0, to_device(host, torch.device("cpu"))).loss
    assert curve(metrics)[1] == pytest.approx(loss, rel=1e-10)


@pytest.mark.parametrize("backend", [pytest.param(each.name, marks=CUDA) for each in BACKENDS])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_each_backend_of_a_gpu_keeps_documents_apart(backend: str, precision: str) -> None:
    def losses(config: Config) -> list[float]:
        engine = make_engine(0, config)
        engine.choose_ops({"attention": backend if config.train.device == "cuda" else "reference"}, by_timing=False)
        if config.train.device == "cuda" and engine.choices.names != {"attention": backend}:
            pytest.skip(f"{backend} does not take documents in {precision} here")
        return [engine.train_step(step, local_batch(config, step, engine.mesh)).loss for step in range(3)]

    found, reference = (
        losses(masked(with_small_vocabulary(config_for("llama", ParallelLayout(), precision=each, device=device))))
        for each, device in ((precision, "cuda"), ("fp64", "cpu"))
    )
    assert found == pytest.approx(reference, rel={"bf16": 2e-2, "fp32": 1e-5, "fp64": 1e-10}[precision])
