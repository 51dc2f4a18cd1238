"""Rates: what a GPU computes and moves in a second, by the data sheet of its card or as a calibration measured it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from threefold.errors import UserError
from trainer.observe.peaks import capacity_bytes, known_devices, link_bytes_per_s, memory_bytes_per_s, peak_flops
from trainer.plan.calibration import Calibration
from trainer.run.bench_comm import bus_factor

LAUNCH_S, CALL_S = 5e-6, 15e-6  # what the host takes to start a kernel, and what a collective takes without bytes
KERNELS = {"F": 16, "B": 28}  # that the passes of a layer start, about
# kernels that the host could start in the time of a call of a group, or of norms that are made again, about
CALL_LAUNCHES, AGAIN_LAUNCHES = 4, 8
HOST_BYTES_S = 50e9  # of PCIe 5.0 with 16 lanes, each way
EIGHT_BITS = "fp8-"  # before a recipe: the dtype of products in eight bits, which data sheets have twice as fast
# as what moves are timed; what one rank sends to another is a broadcast of two
OPERATIONS = {"send": "broadcast", "receive": "broadcast", "all_gather_coalesced": "all_gather"}
AS = {"fp16": "bf16"}  # dtypes of one rate
Way = Literal["forward", "backward", "dgrad", "wgrad"]


@dataclass(frozen=True, slots=True)
class Rates:
    """A GPU's operations and bytes a second; `link` is inside a node of so many GPUs, `network` between nodes.

    `flops` bounds all of its arithmetic. Where it was measured the figures of `measured` count, else those of a sheet.
    """

    name: str
    flops: float
    memory: float
    capacity: float
    link: float
    network: float
    node: int
    measured: Calibration | None = None

    @classmethod
    def of_card(cls, name: str, *, network: float, node: int) -> "Rates":
        """Return those of a data sheet; UserError lists the cards that are known."""
        figures = [of(name) for of in (peak_flops, memory_bytes_per_s, capacity_bytes, link_bytes_per_s)]
        flops, memory, capacity, link = (figure or 0.0 for figure in figures)
        if not all(figures):
            text = f"no GPU named {name} is known here; known are {', '.join(known_devices())}"
            raise UserError(text, hint="--gpu h100")
        return cls(name, flops, memory, capacity, link, network, node)

    @classmethod
    def of_calibration(cls, measured: Calibration, *, network: float, node: int) -> "Rates":
        """Return those of a calibration; links that it has not timed are those of the card's data sheet, if known."""
        link = link_bytes_per_s(measured.card) or 0.0
        memory = max(each.rate for each in measured.figures if each.part == "copy")
        return cls(measured.card, measured.fastest, memory, measured.capacity, link, network, node, measured)

    def product_s(self, way: Way, dtype: str, sides: tuple[int, float, int]) -> float:
        """Return the seconds of a product of a linear, by tokens, rows and columns of its weight."""
        operations = 2.0 * sides[0] * sides[1] * sides[2]
        if self.measured is None:
            return operations / self.flops / (2 if dtype.startswith(EIGHT_BITS) else 1)
        return self.measured.seconds("product", way, AS.get(dtype, dtype), sides, operations)

    def attention_s(self, way: Way, dtype: str, shape: tuple[float, ...], operations: float) -> float:
        """Return the seconds of a pass of attention by length, size of a head and query heads a key head."""
        if self.measured is None:
            return operations / self.flops
        return self.measured.seconds("attention", way, AS.get(dtype, dtype), shape, operations)

    def kernel_s(self, part: str, way: Way, num_bytes: float) -> float:
        """Return the seconds of a kernel that reads and writes so many bytes."""
        if self.measured is None or not num_bytes:
            return num_bytes / self.memory
        return self.measured.seconds(part, way, "any", (num_bytes,), num_bytes)

    def stream_s(self, num_bytes: float) -> float:
        """Return the seconds in which so many bytes come from the host, and as many go there."""
        if self.measured is None or not num_bytes or not self.measured.has("stream", "forward", "any"):
            return num_bytes / HOST_BYTES_S
        return self.measured.seconds("stream", "forward", "any", (num_bytes,), num_bytes)

    def layer_host_s(self, kind: str) -> float:
        """Return what the host takes for pass F or B of a layer."""
        return KERNELS[kind] * LAUNCH_S if self.measured is None else self.measured.host_s[kind]

    def call_host_s(self) -> float:
        """Return what the host takes to make a call of a group, and to wait for it."""
        return self._host.get("call", self.launch_s(CALL_LAUNCHES))

    def again_host_s(self) -> float:
        """Return what the host takes to make the norms of a layer again."""
        return self._host.get("again", self.launch_s(AGAIN_LAUNCHES))

    @property
    def _host(self) -> Mapping[str, float]:
        return {} if self.measured is None else self.measured.host_s

    def hidden_s(self, kind: str, place: tuple[float, int], call_s: float, beside_s: float) -> float:
        """Return how much of a call, by its bytes and ranks, a product beside it hides, which it slows too.

        Where that was not measured it is the shorter of the two.
        """
        operation, shorter = OPERATIONS.get(kind, kind), min(call_s, beside_s)
        if self.measured is None or not self.measured.has("beside", operation, "any"):
            return shorter
        return shorter * min(self.measured.rate("beside", operation, "any", place), 1.0)

    def launch_s(self, num_kernels: int) -> float:
        """Return what the host takes to start kernels."""
        return num_kernels * (LAUNCH_S if self.measured is None else self.measured.launch_s)

    def call_s(self, kind: str, num_bytes: float, num_ranks: int, span: int) -> float:
        """Return the seconds of a call that nothing is beside: those of its bytes, and of the call itself."""
        if num_ranks == 1:
            return CALL_S
        is_timed = span <= self.node and self._is_timed(kind)
        return self.collective_s(kind, num_bytes, num_ranks, span) + (0.0 if is_timed else CALL_S)

    def collective_s(self, kind: str, num_bytes: float, num_ranks: int, span: int) -> float:
        """Return the seconds of a call on ranks of which the first and the last are `span` ranks apart at most."""
        if num_ranks == 1 or not num_bytes:
            return 0.0
        operation, carried = OPERATIONS.get(kind, kind), self.carried_bytes(kind, num_bytes, num_ranks)
        if span > self.node:
            return carried / self.network
        if self.measured is not None and self._is_timed(kind):
            return self.measured.seconds("collective", operation, "any", (num_bytes, num_ranks), carried)
        if not self.link:
            text = f"the calibration of {self.name} has no transfers between GPUs, and no data sheet is known"
            hint = "trainer launch --nproc-per-node 2 bench gpu --output calibration.json"
            raise UserError(text, hint=hint)
        return carried / self.link

    @staticmethod
    def carried_bytes(kind: str, num_bytes: float, num_ranks: int) -> float:
        """Return what a link of the bus carries of a call."""
        return num_bytes * bus_factor(OPERATIONS.get(kind, kind), num_ranks)

    def _is_timed(self, kind: str) -> bool:
        return self.measured is not None and self.measured.has("collective", OPERATIONS.get(kind, kind), "any")
