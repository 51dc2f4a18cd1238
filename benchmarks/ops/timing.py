"""How the op benchmarks measure: every form once in turn, many times over, and the median of each.

Shared and noisy machines drift, so only ratios within one run hold. On CUDA, events around a run of calls are read; the
device sleeps before them while the host enqueues the calls, so what is measured is the device's time and not Python's.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.record import add_option

SLEEP_CYCLES = 40_000_000  # about 20 ms: longer than ten calls of autograd take the host
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
Forms = dict[str, Callable[[], object]]


def arguments(purpose: str, cpu_shape: str, cuda_shape: str) -> argparse.Namespace:
    """Return the flags that all op benchmarks have; `device`, `shape` (a tuple) and `dtypes` come filled in."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", help=f"like 4096x1024; default {cpu_shape} on cpu, {cuda_shape} on cuda")
    parser.add_argument("--dtypes", default="fp32,bf16", help="of fp64, fp32, bf16 (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="on the cpu; 0 leaves torch's choice")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="measure the plain form under torch.compile too")
    add_option(parser)
    options = parser.parse_args()
    shape = options.shape or (cuda_shape if options.device == "cuda" else cpu_shape)
    options.shape = tuple(int(size) for size in shape.split("x"))
    options.dtypes = options.dtypes.split(",")
    if options.threads:
        torch.set_num_threads(options.threads)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    print(f"{where}; torch {torch.__version__}; {shape}; medians of {options.repeats} interleaved rounds")
    return options


def medians(forms: Forms, device: str, repeats: int) -> dict[str, float]:
    """Seconds of one call of each form."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for form in forms.values():  # compile, load, touch memory
        for _ in range(3):
            form()
    for _ in range(repeats):
        for name, form in forms.items():
            times[name].append(_seconds_on_cuda(form) if device == "cuda" else _seconds(form))
    return {name: statistics.median(found) for name, found in times.items()}


def print_rates(
    options: argparse.Namespace,
    title: str,
    seconds: dict[str, float],
    moved_bytes: dict[str, int],
    shape: Sequence[int] = (),
) -> None:
    """Print and record each form's rate as a share of `copy`'s; `moved_bytes` is what a form moves at least.

    A shape that is not that of the options is passed.
    """
    rates = {name: moved_bytes[name] / seconds[name] for name in seconds}
    shares = [f"{name} {rates[name] / rates['copy']:6.1%}" for name in seconds if name != "copy"]
    print(f"{title:24} copy {rates['copy'] / 1e9:7.1f} GB/s; of it: {', '.join(shares)}", flush=True)
    copy = rates.pop("copy")
    percent = {name: 100 * rate / copy for name, rate in rates.items()}
    claim = f"{title}, {' x '.join(map(str, shape or options.shape))}"
    limit = {"the copy [GB/s]": copy / 1e9}
    options.record.add(claim, percent.pop("csrc"), "% of the copy rate", peer=percent, limit=limit)


def _seconds(form: Callable[[], object]) -> float:
    start = time.perf_counter()
    form()
    return time.perf_counter() - start


def _seconds_on_cuda(form: Callable[[], object], calls: int = 10) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    for _ in range(calls):
        form()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / calls
