"""Rates: what a GPU computes and moves in a second, by the data sheet of its card."""

from dataclasses import dataclass

from threefold.errors import UserError
from trainer.observe.peaks import capacity_bytes, known_devices, link_bytes_per_s, memory_bytes_per_s, peak_flops
from trainer.run.bench_comm import bus_factor

LAUNCH_S, CALL_S = 5e-6, 15e-6  # what the host takes to start a kernel, and what a collective takes without bytes


@dataclass(frozen=True, slots=True)
class Rates:
    """A GPU's operations and bytes a second; `link` is inside a node of so many GPUs, `network` between nodes."""

    name: str
    flops: float
    memory: float
    capacity: float
    link: float
    network: float
    node: int

    @classmethod
    def of_card(cls, name: str, *, network: float, node: int) -> "Rates":
        """Return those of a data sheet; UserError lists the cards that are known."""
        figures = [of(name) for of in (peak_flops, memory_bytes_per_s, capacity_bytes, link_bytes_per_s)]
        flops, memory, capacity, link = (figure or 0.0 for figure in figures)
        if not all(figures):
            text = f"no GPU named {name} is known here; known are {', '.join(known_devices())}"
            raise UserError(text, hint="--gpu h100")
        return cls(name, flops, memory, capacity, link, network, node)

    def collective_s(self, kind: str, num_bytes: float, num_ranks: int, span: int) -> float:
        """Return the seconds of a call on ranks of which the first and the last are `span` ranks apart at most."""
        if num_ranks == 1:
            return 0.0
        rate = self.link if span <= self.node else self.network
        operation = "send" if kind in ("send", "receive") else kind
        return num_bytes * bus_factor(operation, num_ranks) / rate
