"""Hardware: before a start each rank times products, memory and transfers, and one that is slow is named.

A rank is compared with the median of the others, which have the same card in most jobs, and with what the data sheet of
its card says. Transfers are timed with two neighbours in turn, and the faster counts: so a slow rank is named, and not
those that it was paired with. It takes some seconds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from threefold.errors import UserError
from trainer.config import Config
from trainer.job.ranks import Ranks
from trainer.mesh.clock import Moment
from trainer.observe.peaks import memory_bytes_per_s, peak_flops

WARM_UPS, REPEATS = 2, 5
LEAST_OF_CARD = {"products": 0.5, "memory": 0.6}  # of a data sheet's figure, which no program reaches
UNITS = {
    "products": (1e12, "TFLOP/s"),
    "memory": (1e9, "GB/s"),
    "to its GPU": (1e9, "GB/s"),
    "transfers": (1e9, "GB/s"),
}
Rates = Mapping[str, float]


def check_hardware(config: Config, ranks: Ranks) -> None:
    """Time this rank, and report those that are slow; all ranks call it, and with "refuse" all end if one is."""
    health = config.health
    if health.check_hardware == "off":
        return
    name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ""
    all_rates = ranks.gather(rates_of(ranks))
    names = ranks.gather(name)
    texts = [*slow_texts(all_rates, health.hardware_share), *below_card(all_rates, names)]
    ranks.say(f"hardware: {', '.join(middle_texts(all_rates))}, at the median of {ranks.world_size} ranks")
    for text in texts:
        ranks.say(f"warning: {text}")
    refused = UserError("; ".join(texts), hint="--health.check-hardware warn, or leave out those nodes")
    ranks.raise_on_all(refused if texts and health.check_hardware == "refuse" else None)


def rates_of(ranks: Ranks) -> dict[str, float]:
    """Return the rates of this rank by what was timed, a second; all ranks call it."""
    device, on_gpu = ranks.device, ranks.device.type == "cuda"
    side, num_bytes = (8192, 1 << 30) if on_gpu else (512, 1 << 25)
    matrix = torch.ones(side, side, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
    out = torch.empty_like(matrix)
    memory = torch.zeros(2, num_bytes, dtype=torch.uint8, device=device)
    rates = {
        "products": 2 * side**3 / best_s(lambda: torch.mm(matrix, matrix, out=out), device),
        "memory": 2 * num_bytes / best_s(lambda: memory[1].copy_(memory[0]), device),
    }
    if on_gpu:
        host = torch.zeros(num_bytes // 4, dtype=torch.uint8, pin_memory=True)
        part = memory[0][: len(host)]
        rates["to its GPU"] = len(host) / best_s(lambda: part.copy_(host, non_blocking=True), device)
    if ranks.world_size > 1:
        rates["transfers"] = transfer_rate(ranks, memory[0][: num_bytes // 4])
    return rates


def best_s(action: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of an action."""
    seconds = []
    for _ in range(WARM_UPS + REPEATS):
        begin = Moment(device)
        action()
        seconds.append(Moment(device).seconds_since(begin))
    return max(min(seconds[WARM_UPS:]), 1e-9)


def transfer_rate(ranks: Ranks, data: torch.Tensor) -> float:
    """Return the bytes a second of the faster of two transfers, with the neighbour after this rank and before it.

    Of ranks 0 to 4 the pairs are (0, 1), (2, 3), and then (1, 2), (3, 4).
    """
    best = 0.0
    for first in (0, 1):
        place, rank = (ranks.rank - first) % 2, ranks.rank
        peer = rank + 1 if place == 0 else rank - 1
        if rank < first or not 0 <= peer < ranks.world_size:
            continue
        for _ in range(WARM_UPS + REPEATS):
            began_s = time.perf_counter()
            for sends in (place == 0, place == 1):
                (ranks.send if sends else ranks.receive)(data, peer)
            if data.is_cuda:
                torch.cuda.synchronize(data.device)
            best = max(best, 2 * data.nbytes / (time.perf_counter() - began_s))
    return best


def slow_texts(rates: Sequence[Rates], share: float) -> list[str]:
    """Return a sentence for each rank and rate that is below the median of the others by more than a share."""
    texts = []
    for name in rates[0]:
        for rank, own in enumerate(rates):
            others = [other[name] for at, other in enumerate(rates) if at != rank and other[name]]
            if others and own[name] and own[name] < (1 - share) * (middle := median(others)):
                ours, theirs = shown(name, own[name]), shown(name, middle)
                texts.append(f"rank {rank} is slow in {name}: {ours}, the others have {theirs}")
    return texts


def below_card(rates: Sequence[Rates], names: Sequence[str]) -> list[str]:
    """Return a sentence for each rank and rate that is far below what the data sheet of its card says."""
    texts = []
    for rank, (own, name) in enumerate(zip(rates, names, strict=True)):
        sheets = {"products": peak_flops(name), "memory": memory_bytes_per_s(name)}
        for what, sheet in sheets.items():
            if sheet is not None and own[what] < LEAST_OF_CARD[what] * sheet:
                texts.append(
                    f"rank {rank} has {shown(what, own[what])} in {what}, {own[what] / sheet:.0%} of the "
                    f"{shown(what, sheet)} that the data sheet of {name} says"
                )
    return texts


def middle_texts(rates: Sequence[Rates]) -> list[str]:
    """Return the median of each rate."""
    return [f"{name} {shown(name, median(own[name] for own in rates))}" for name in rates[0]]


def shown(name: str, rate: float) -> str:
    """Return a rate in its unit."""
    unit, text = UNITS[name]
    return f"{rate / unit:,.4g} {text}"
