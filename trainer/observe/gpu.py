"""Gpu: what NVML reports of a GPU. A thread of its own reads it every so often, so no step waits for it."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

EVERY_S = 10.0
UNKNOWN: Mapping[str, float] = {"gpu_idle": 0.0, "gpu_power_w": 0.0, "gpu_temperature_c": 0.0}


class Gpu:
    """The newest numbers of a rank's GPU; zeros on a CPU, and without the package nvidia-ml-py."""

    def __init__(
        self,
        device: torch.device,
        *,
        open_nvml: Callable[[torch.device], Callable[[], Mapping[str, float]]] | None = None,
    ) -> None:
        """Begin to read, if there is something to be read."""
        self.numbers = UNKNOWN
        if device.type != "cuda" and open_nvml is None:
            return
        threading.Thread(target=self._run, args=(open_nvml or opened, device), name="nvml", daemon=True).start()

    def _run(
        self, open_nvml: Callable[[torch.device], Callable[[], Mapping[str, float]]], device: torch.device
    ) -> None:
        try:
            read = open_nvml(device)
            while True:
                self.numbers = read()
                time.sleep(EVERY_S)
        except Exception:  # the package or the driver is not there, or has gone: nothing is known
            self.numbers = UNKNOWN


def opened(device: torch.device) -> Callable[[], Mapping[str, float]]:
    """Return what reads the numbers of a GPU: the share of time without a kernel, watts, degrees Celsius."""
    import pynvml

    pynvml.nvmlInit()
    handle: Any = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    def read() -> Mapping[str, float]:
        return {
            "gpu_idle": 1 - pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu_power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "gpu_temperature_c": float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        }

    return read
