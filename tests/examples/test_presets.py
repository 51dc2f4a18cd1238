"""The presets: shapes and rotary frequencies of published models, and a dry run of each of their layouts here."""

import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ckptkit.foreign.hf.families import FAMILIES, family_for
from datakit import write_store
from trainer.cli import main
from trainer.config.walk import load_config
from trainer.model.table import parameter_table

EXAMPLES = Path(__file__).parents[2] / "examples"
# config.json of the repositories meta-llama/Meta-Llama-3-8B and -70B, Qwen/Qwen3-8B and -30B-A3B on the Hugging Face
# hub, what shapes the model in them; parameters as their model cards and the index of the weights (2 bytes each) say.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
        "attention_bias": False, "pretraining_tp": 1, "max_position_embeddings": 8192,
    },
    "llama-3-70b": {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 28672,
        "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
        "attention_bias": False, "pretraining_tp": 1, "max_position_embeddings": 8192,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False, "vocab_size": 151936,
        "attention_bias": False, "use_sliding_window": False, "sliding_window": None, "max_position_embeddings": 40960,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
        "head_dim": 128, "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        "vocab_size": 151936, "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
        "max_position_embeddings": 40960,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 48,
    },
}  # fmt: skip
PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
}
GPUS = {"llama-3-8b": [4, 8, 64], "llama-3-70b": [64, 256], "qwen3-8b": [4, 8, 64], "qwen3-30b-a3b": [16, 64]}
MOST_GIB = 74.0  # of the 79 of a GPU


def layouts(name: str) -> dict[int, list[str]]:
    """The flags that a preset's head names, by the number of GPUs."""
    text = (EXAMPLES / f"{name}.toml").read_text()
    return {int(number): flags.split() for number, flags in re.findall(r"^# +(\d+) GPUs: (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_shape(name: str) -> None:
    published = PUBLISHED[name]
    family = FAMILIES[published["model_type"]]
    expected, config = family.model(published), load_config(str(EXAMPLES / f"{name}.toml"))
    wanted = expected.to_json()
    assert {key: value for key, value in asdict(config.model).items() if key in wanted} == wanted
    assert family_for(expected.simplest()) is family
    assert sum(math.prod(row.shape) for row in parameter_table(config).values()) == PARAMETERS[name]
    assert config.train.seq_length <= published["max_position_embeddings"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_dry_run_of_each_layout_fits(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_store(tmp_path / "store", [[1, 2, 0]] * 4000, vocab_size=PUBLISHED[name]["vocab_size"], eod_id=0)
    command = ["train", str(EXAMPLES / f"{name}.toml"), "--data.stores", str(tmp_path / "store")]
    assert list(layouts(name)) == GPUS[name]
    for num_gpus, flags in layouts(name).items():
        assert main([*command, *flags, "--dry-run", "--device-memory", "79GiB"]) == 0
        shown = capsys.readouterr().err
        assert f"{PARAMETERS[name]:,}" in shown
        assert f" = {num_gpus} ranks" in shown
        peaks = [float(size) for size in re.findall(r"^memory .*?: ([\d.]+) GiB = ", shown, re.MULTILINE)]
        assert peaks, shown
        assert max(peaks) <= MOST_GIB
        assert "nothing was started or written" in shown


@pytest.mark.ci
@pytest.mark.slow
def test_70_billion_parameters_on_8_gpus_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_store(tmp_path / "store", [[1, 2, 0]] * 4000, vocab_size=128256, eod_id=0)
    command = ["train", str(EXAMPLES / "llama-3-70b.toml"), "--data.stores", str(tmp_path / "store"), "--dry-run"]
    command += ["--device-memory", "79GiB"]
    for layout in (
        ["--tp", "8"],
        ["--dp", "8", "--zero-stage", "3", "--recompute", "full"],
        ["--tp", "4", "--pp", "2"],
    ):
        assert main([*command, *layout]) == 2
        shown = capsys.readouterr().err
        missing = re.search(r"takes ([\d.]+) GiB .* has 79.0 GiB: ([\d.]+) GiB are missing; the largest: ", shown)
        assert missing is not None, shown
        assert float(missing[1]) - 79 == pytest.approx(float(missing[2]), abs=0.06)
        assert float(missing[2]) > 10
        hint = re.search(r"^hint: (--.+); on (\d+) devices$", shown, re.MULTILINE)
        assert hint is not None, shown
        assert int(hint[2]) >= 16
        assert main([*command, *layout, *hint[1].split()]) == 0
        assert f" = {hint[2]} ranks" in capsys.readouterr().err
