"""Operations a token and device peaks behind MFU."""

import pytest

from trainer.config import Config
from trainer.config.walk import config_from
from trainer.observe.flops import count_parameters, peak_flops, token_flops


def resolved(seq_length: int, **model: object) -> Config:
    tables = {"model": model, "train": {"seq_length": seq_length}}
    return config_from(tables, source="")


def test_a_known_model() -> None:
    # 2048 wide, 16 layers, 8 of 16 heads are kv, vocabulary 32768: 1141 M parameters, 67 M of them looked up
    config = resolved(
        4096, num_layers=16, hidden_size=2048, num_heads=16, num_kv_heads=8, ffn_hidden_size=8192, vocab_size=32768
    )
    count = count_parameters(config)
    assert count.total == 1_140_918_272
    assert count.looked_up == 32768 * 2048
    flops = token_flops(config, config.train.seq_length)
    assert flops.standard == 6 * (count.total - count.looked_up) + 12 * 16 * 2048 * 4096
    assert flops.with_embeddings - flops.standard == 6 * count.looked_up
    assert flops.standard - flops.causal == 6 * 16 * 2048 * 4096


def test_gpt2_small() -> None:
    config = resolved(
        1024, num_layers=12, hidden_size=768, num_heads=12, vocab_size=50257, norm="layernorm", position="learned",
        activation="gelu", bias=True, tie_embeddings=True,
    )  # fmt: skip
    count = count_parameters(config)
    assert count.total == 124_439_808  # the published size
    assert count.looked_up == 1024 * 768  # the tied table is the head, too


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H20", 148), ("NVIDIA H200 NVL", 835), ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500), ("NVIDIA B300 SXM6 AC", 2250), ("NVIDIA GB300", 2500), ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181), ("NVIDIA GeForce RTX 5090", 209.5), ("NVIDIA GeForce RTX 5070 Ti", 87.9),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8), ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("AMD Instinct MI300X", 1307.4), ("AMD Instinct MI355X", 2516.6),
    ],
)  # fmt: skip
def test_peaks(name: str, tflops: float) -> None:
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "AMD EPYC 9654", "NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "NVIDIA X1000",
    ],
)  # fmt: skip
def test_no_peak_is_made_up(name: str) -> None:
    assert peak_flops(name) is None
