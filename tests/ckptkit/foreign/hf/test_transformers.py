"""Models that transformers makes, family by family: import and export leave its logits bit for bit as they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.cli import main
from datakit import write_store
from trainer.cli import main as trainer
from trainer.job.ranks import Ranks
from trainer.run.inference import TrainedModel, open_checkpoint

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
THIRD = ["sliding_attention", "sliding_attention", "full_attention"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", SHAPE | {"head_dim": 8}),
    "gemma2": ("gemma2", SHAPE | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 12}),
    "gemma3": ("gemma3_text", SHAPE | {"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2}),
    "phi3": ("phi3", SHAPE | {"sliding_window": 16}),
    "olmo2": ("olmo2", SHAPE),
    "mistral": ("mistral", SHAPE | {"sliding_window": 16}),
    "mistral-all": ("mistral", SHAPE | {"sliding_window": 5}),
    "ministral": ("ministral", SHAPE | {"head_dim": 4, "sliding_window": 4, "layer_types": THIRD}),
    "qwen3-second": (
        "qwen3",
        SHAPE
        | {
            "use_sliding_window": True,
            "sliding_window": 1,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2-slides": ("qwen2", SHAPE | {"use_sliding_window": True, "sliding_window": 15, "max_window_layers": 0}),
    "qwen2-window": ("qwen2", SHAPE | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "mixtral": ("mixtral", SHAPE | EXPERTS),
    "mixtral-slides": ("mixtral", SHAPE | EXPERTS | {"sliding_window": 5, "tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", SHAPE | EXPERTS | {"head_dim": 8, "moe_intermediate_size": 12, "norm_topk_prob": True}),
    "qwen3-moe-some": (
        "qwen3_moe",
        SHAPE | EXPERTS | {"num_hidden_layers": 4, "moe_intermediate_size": 12, "decoder_sparse_step": 2},
    ),
    "qwen3-moe-first": ("qwen3_moe", SHAPE | EXPERTS | {"moe_intermediate_size": 24, "mlp_only_layers": [0]}),
    "llama-yarn": ("llama", SHAPE | {"rope_parameters": YARN}),
    "llama-attention-bias": ("llama", SHAPE | {"attention_bias": True}),
}
TRAINED = (
    "phi3",
    "mistral",
    "mistral-all",
    "ministral",
    "qwen3-second",
    "qwen2-slides",
    "qwen2-window",
    "mixtral",
    "mixtral-slides",
    "qwen3-moe",
    "qwen3-moe-some",
    "qwen3-moe-first",
)
TOKENS = torch.randint(3, 31, (2, 24), generator=torch.Generator().manual_seed(1))


def make(folder: Path, model_type: str, settings: dict[str, Any], **options: Any) -> None:
    """Write a model with random weights, as save_pretrained does."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **settings))
    with torch.no_grad():
        for values in model.parameters():
            values.normal_(0, 0.3)
    model.save_pretrained(folder, max_shard_size="8KB", **options)


def opened(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--family", "generic")], ids=["family", "generic"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_equal_after_import_and_export(tmp_path: Path, kind: str, words: tuple[str, ...]) -> None:
    folder, run, back = tmp_path / "model", tmp_path / "run", tmp_path / "back"
    make(folder, *KINDS[kind])
    assert main(["import", str(folder), str(run), *words]) == 0
    assert main(["reshard", str(run), str(tmp_path / "cut"), "--tp", "2", "--pp", "2"]) == 0
    assert main(["export", str(tmp_path / "cut"), str(back), "--max-shard-bytes", "9000"]) == 0
    with torch.no_grad():
        assert torch.equal(opened(folder)(TOKENS).logits, opened(back)(TOKENS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_experts_that_are_stacked_in_the_folder_have_equal_logits(tmp_path: Path, kind: str) -> None:
    folder, run, back = tmp_path / "model", tmp_path / "run", tmp_path / "back"
    make(folder, *KINDS[kind], save_original_format=False)
    assert main(["import", str(folder), str(run)]) == 0
    assert main(["export", str(run), str(back)]) == 0
    with torch.no_grad():
        assert torch.equal(opened(folder)(TOKENS).logits, opened(back)(TOKENS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_the_trainers_loss_is_that_of_transformers(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In rows of 16: those of a window that other layers than every N-th go without are no longer than it."""
    make(tmp_path / "model", *KINDS[kind])
    rows = np.random.default_rng(0).integers(3, 31, (8, 17))
    write_store(tmp_path / "store", [row.tolist() for row in rows[:, :-1]], vocab_size=31, eod_id=2)
    (tmp_path / "job.toml").write_text(
        f"[data]\nstores = ['{tmp_path}/store']\n"
        f"[data.valid]\nstores = ['{tmp_path}/store']\nnum_samples = 7\n"
        "[train]\nseq_length = 16\nmicro_batch_size = 1\nglobal_batch_size = 1\ndevice = 'cpu'\n"
    )
    capsys.readouterr()
    assert trainer(["eval", f"hf:{tmp_path}/model", str(tmp_path / "job.toml"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    stream = torch.tensor(rows[:, :-1].reshape(-1))
    batch = torch.stack([stream[at : at + 17] for at in range(0, 7 * 16, 16)])
    with torch.no_grad():
        logits = opened(tmp_path / "model")(batch[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    assert report["loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral-all", "ministral", "qwen3-second", "qwen2-slides"])
def test_a_window_passes_both_ways_with_the_logits_of_transformers(tmp_path: Path, kind: str) -> None:
    """Also where config.json is made of what the run recorded."""
    make(tmp_path / "model", *KINDS[kind])
    with torch.no_grad():
        expected = opened(tmp_path / "model")(TOKENS).logits
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    size = config["sliding_window"]
    for near in (size - 1, size + 1):  # what is off by one is seen
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"sliding_window": max(near, 2)}))
        with torch.no_grad():
            assert (opened(tmp_path / "model")(TOKENS).logits - expected).abs().max() > 1e-3
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(f"hf:{tmp_path}/model", None, {}, world_size=1)
    with Ranks("cpu", timeout_s=60) as ranks:
        logits = TrainedModel(checkpoint, ranks).engine.logits(TOKENS)
    torch.testing.assert_close(logits, expected[:, -1], rtol=1e-4, atol=1e-4)
    store = [list(range(3, 31)) * 3]
    write_store(tmp_path / "store", store, vocab_size=31, eod_id=2)
    job = f"[data]\nstores = ['{tmp_path}/store']\n[train]\ntrain_steps = 1\nseq_length = 24\n"
    job += "micro_batch_size = 1\nglobal_batch_size = 1\ndevice = 'cpu'\n[optim]\nlr = 1e-30\nmin_lr = 0\n"
    (tmp_path / "job.toml").write_text(job)
    words = ["--load", f"hf:{tmp_path}/model", "--save", str(tmp_path / "run")]
    assert trainer(["train", str(tmp_path / "job.toml"), *words]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "made"), "--to", "hf"]) == 0
    with torch.no_grad():
        torch.testing.assert_close(opened(tmp_path / "made")(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
