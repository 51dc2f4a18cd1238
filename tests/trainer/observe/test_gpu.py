"""What NVML says is read by a thread; without it, or on a CPU, nothing is known."""

import threading
import time
from collections.abc import Callable, Mapping

import torch

from trainer.observe.gpu import UNKNOWN, Gpu

CPU = torch.device("cpu")
NUMBERS = {"gpu_idle": 0.25, "gpu_power_w": 500.0, "gpu_temperature_c": 60.0}


def test_a_thread_reads_it() -> None:
    readers: list[threading.Thread] = []

    def opened(_device: torch.device) -> Callable[[], Mapping[str, float]]:
        readers.append(threading.current_thread())
        return lambda: NUMBERS

    gpu = Gpu(CPU, open_nvml=opened)
    while gpu.numbers is UNKNOWN:
        time.sleep(0.01)
    assert gpu.numbers == NUMBERS
    assert readers[0] is not threading.main_thread()


def test_without_it_nothing_is_known() -> None:
    def missing(_device: torch.device) -> Callable[[], Mapping[str, float]]:
        raise ModuleNotFoundError("pynvml")

    before = threading.active_count()
    assert Gpu(CPU).numbers == UNKNOWN
    assert threading.active_count() == before
    assert Gpu(CPU, open_nvml=missing).numbers == UNKNOWN
