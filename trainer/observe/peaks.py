"""How much a device could do: the dense bf16 peaks that MFU is a share of, and what its memory moves."""

import re
from collections.abc import Callable, Mapping

import torch

# dense bf16 peaks in TFLOP/s, sums in fp32, of devices by their names; the longest whose words all occur counts
PEAK_TFLOPS = {
    "B100": 1750.0, "B200": 2250.0, "B300": 2250.0, "GB200": 2500.0, "GB300": 2500.0, "PRO 6000 BLACKWELL": 503.8,
    "H100": 989.0, "H100 PCIE": 756.0, "H100 NVL": 835.0, "H200": 989.0, "H200 NVL": 835.0, "GH200": 989.0,
    "H800": 989.0, "H20": 148.0,
    "L40S": 362.0, "L40": 181.0, "L4": 121.0, "RTX 6000 ADA": 364.2,
    "A100": 312.0, "A800": 312.0, "A30": 165.0, "A40": 149.7, "A6000": 154.8, "A10G": 70.0, "A10": 125.0,
    "5090": 209.5, "5080": 112.6, "5070": 61.7, "5070 TI": 87.9,
    "4090": 165.0, "4080": 97.5, "4080 SUPER": 104.4, "3090": 71.0, "3090 TI": 80.0,
    "MI210": 181.0, "MI250X": 191.5,  # the latter is of one of its two dies, each of which is a device
    "MI300A": 980.6, "MI300X": 1307.4, "MI325X": 1307.4, "MI350X": 2309.6, "MI355X": 2516.6,
}  # fmt: skip
# of its memory, GB/s, by data sheets
MEMORY_GBYTES = {
    "B200": 8000.0,
    "GB200": 8000.0,
    "B300": 8000.0,
    "GB300": 8000.0,
    "H100": 3350.0,
    "H100 PCIE": 2000.0,
    "H100 NVL": 3900.0,
    "H200": 4800.0,
    "H800": 3350.0,
    "H20": 4000.0,
    "L40S": 864.0,
    "L40": 864.0,
    "L4": 300.0,
    "RTX 6000 ADA": 960.0,
    "A100": 1555.0,
    "A100 80GB": 1935.0,
    "A30": 933.0,
    "A40": 696.0,
    "A6000": 768.0,
    "A10G": 600.0,
    "A10": 600.0,
    "5090": 1792.0,
    "4090": 1008.0,
    "3090": 936.0,
    "MI300X": 5300.0,
    "MI325X": 6000.0,
    "MI350X": 8000.0,
    "MI355X": 8000.0,
}
# how much of it there is, GB, and what links to others of the node move in one direction, GB/s, by data sheets
CAPACITY_GBYTES = {
    "B200": 180.0,
    "GB200": 186.0,
    "B300": 279.0,
    "GB300": 279.0,
    "H100": 80.0,
    "H100 PCIE": 80.0,
    "H100 NVL": 94.0,
    "H200": 141.0,
    "H800": 80.0,
    "H20": 96.0,
    "L40S": 48.0,
    "L4": 24.0,
    "A100": 40.0,
    "A100 80GB": 80.0,
    "A40": 48.0,
    "A6000": 48.0,
    "4090": 24.0,
    "MI300X": 192.0,
    "MI325X": 256.0,
    "MI350X": 288.0,
    "MI355X": 288.0,
}
LINK_GBYTES = {
    "B200": 900.0,
    "GB200": 900.0,
    "B300": 900.0,
    "GB300": 900.0,
    "H100": 450.0,
    "H100 PCIE": 64.0,
    "H100 NVL": 300.0,
    "H200": 450.0,
    "H800": 200.0,
    "H20": 450.0,
    "L40S": 32.0,
    "L4": 32.0,
    "A100": 300.0,
    "A100 80GB": 300.0,
    "A40": 32.0,
    "A6000": 32.0,
    "4090": 32.0,
    "MI300X": 448.0,
    "MI325X": 448.0,
    "MI350X": 537.6,
    "MI355X": 537.6,
}
SLOWER = {"LAPTOP", "MAX", "D", "MIG"}  # words of devices that are another, or a part of one


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 operations a second of a GPU by its name; None for an unknown one, and for a CPU."""
    return _figure(PEAK_TFLOPS, device_name, 1e12)


def memory_bytes_per_s(device_name: str) -> float | None:
    """Return the bytes a second of a GPU's memory by its data sheet, found as `peak_flops` is."""
    return _figure(MEMORY_GBYTES, device_name, 1e9)


def capacity_bytes(device_name: str) -> float | None:
    """Return the bytes of a GPU's memory by its data sheet, found as `peak_flops` is."""
    return _figure(CAPACITY_GBYTES, device_name, 1e9)


def link_bytes_per_s(device_name: str) -> float | None:
    """Return the bytes a second that a GPU's links move in one direction, by its data sheet."""
    return _figure(LINK_GBYTES, device_name, 1e9)


def known_devices() -> list[str]:
    """Return the names of devices of which all figures are known."""
    return [name.lower() for name in CAPACITY_GBYTES if name in PEAK_TFLOPS or name == "A100 80GB"]


def _figure(table: Mapping[str, float], device_name: str, unit: float) -> float | None:
    words = set(re.split(r"[\s\-/]+", device_name.upper()))
    fitting = [name for name in table if words.issuperset(name.split())]
    return None if words & SLOWER or not fitting else table[max(fitting, key=len)] * unit


def known_peak(device: torch.device, configured_tflops: float, say: Callable[[str], None]) -> float | None:
    """Return the operations a second of a device, as configured or by its name; None, and a line, if not known."""
    if configured_tflops or device.type != "cuda":
        return configured_tflops * 1e12 or None
    name = torch.cuda.get_device_name(device)
    peak = peak_flops(name)
    if peak is None:
        say(f"no mfu: the peak of {name} is not known here; --train.peak-tflops N says it")
    return peak
