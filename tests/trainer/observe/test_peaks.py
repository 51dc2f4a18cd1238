"""Device peaks behind MFU."""

import pytest

from trainer.observe.peaks import peak_flops


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
