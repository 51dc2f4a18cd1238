"""How OpenMP's threads should wait on a CPU that others use too: products and norms with one thread, two, and two that
wait without spinning, in turns, beside `--busy` processes that compute. Prints each time of a pass and the ratios of
medians.

    python benchmarks/trainer/waiting.py --busy 4
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

from benchmarks.record import add_option

FORMS = {"1 thread": (1, {}), "2 threads": (2, {}), "2 that wait passively": (2, {"OMP_WAIT_POLICY": "PASSIVE"})}


def measure(num_threads: int, seconds: float) -> float:
    """Return the milliseconds of a pass of eight products, norms and activations, in this process."""
    import torch

    torch.set_num_threads(num_threads)
    x, w = torch.randn(512, 256), torch.randn(256, 256)
    num_passes, began_s = 0, 0.0
    while (now_s := time.perf_counter()) - (began_s or now_s) < seconds:
        y = x
        for _ in range(8):
            y = torch.nn.functional.layer_norm(torch.mm(y, w), (256,)).tanh()
        num_passes, began_s = (num_passes + 1, began_s) if began_s else (0, time.perf_counter())  # the first warms up
    return (now_s - began_s) / max(num_passes, 1) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=2 * len(os.sched_getaffinity(0)), help="processes that compute")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    add_option(parser)
    options = parser.parse_args()
    if options.threads:
        print(measure(options.threads, options.seconds))
        return
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    passes: dict[str, list[float]] = {form: [] for form in FORMS}
    try:
        for _ in range(options.repeats):
            for form, (num_threads, variables) in FORMS.items():
                environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"} | variables
                command = [sys.executable, __file__, "--threads", str(num_threads), "--seconds", str(options.seconds)]
                passes[form].append(float(subprocess.check_output(command, env=environment)))
    finally:
        for process in busy:
            process.kill()
    medians = {form: statistics.median(times) for form, times in passes.items()}
    for form, times in passes.items():
        shown = ", ".join(f"{each:.1f}" for each in times)
        print(f"{form:<22} {shown} ms; {medians[form] / medians['1 thread']:.2f} of 1 thread")
    alone, spinning, passive = (medians[form] / medians["1 thread"] for form in FORMS)
    claim, peer = "two threads on a CPU that others use", {"two that spin": spinning}
    options.record.add(claim, passive, "of the time of one", peer=peer, limit={"one thread": alone})


if __name__ == "__main__":
    main()
