"""Job: ranks that save and load a run whose first tier is each node's own, as threads of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckptkit import CheckpointerOptions, Tier, nodes_of
from ckptkit import Run as AnyRun
from ckptkit.torch import LoadReport, Run
from tests.ckptkit.support.thread_exchange import ThreadExchange
from tests.support.checks import require


class Job:
    """Ranks on nodes whose disks only they see: a rank has no path to another node's folder."""

    def __init__(self, folder: Path, sizes: tuple[int, ...] = (2, 2), *, replica: bool = True, slower: int = 0) -> None:
        starts = [sum(sizes[:number]) for number, size in enumerate(sizes) for _ in range(size)]
        names = [f"n{number}" for number, size in enumerate(sizes) for _ in range(size)]
        self.folder, self.nodes = folder, nodes_of(names, starts)
        replicas = [Tier(f"{folder}/mounted/{{peer}}/replica/{{node}}")] if replica else []
        self._tiers = (*replicas, *([Tier(f"{folder}/slow", every=slower)] if slower else []))

    def disk(self, name: str) -> Path:
        return self.folder / f"machine-{name}" / name

    def replica(self, name: str, peer: str) -> Path:
        return self.folder / "mounted" / peer / "replica" / name

    def steps(self) -> list[list[int]]:
        """The committed steps of each node's own disk."""
        return [AnyRun(self.disk(node.name)).steps() for node in dict.fromkeys(self.nodes)]

    def open(self, exchange: ThreadExchange, step: str = "", **options: Any) -> Run:
        node = self.nodes[exchange.rank]
        made = CheckpointerOptions(node=node, tiers=self._tiers, deadline_s=5, retry_s=0, **options)
        url = f"{self.folder}/machine-{node.name}/{{node}}{step}"
        return Run(url, made, exchange=None if exchange.size == 1 else exchange)

    def run(self, function: Callable[[Run, int], Any], **options: Any) -> list[Any]:
        """Call a function with the run of each rank and the rank's number."""

        def work(exchange: ThreadExchange) -> Any:
            with self.open(exchange, **options) as run:
                return function(run, exchange.rank)

        return ThreadExchange(len(self.nodes)).run(work)

    def save(self, *steps: int, **options: Any) -> None:
        def save(run: Run, rank: int) -> None:
            for step in steps:
                run.save(step, state_of(rank, step), {"loss": float(step + rank)})
                run.wait()

        self.run(save, **options)

    def load(self, step: int | None = None, *, strict: bool = True) -> list[LoadReport]:
        """Load on all ranks, which all have to hold what was saved bit for bit."""

        def load(run: Run, rank: int) -> LoadReport:
            state = state_of(rank, 0)
            report = run.load(state, step, strict=strict)
            expected = state_of(rank, report.step)
            for one, other in zip(state["model"].parameters(), expected["model"].parameters(), strict=True):
                require(torch.equal(one, other), "parameters are bit for bit what was saved")
            require(torch.equal(state["plain"], state_of(0, report.step)["plain"]), "the first rank's")
            require(state["step"] == report.step, "values are the step's")
            require(not strict or state["own"]["rank"] == rank, "each rank has its own")
            return report

        return self.run(load)


def state_of(rank: int, step: int) -> dict[str, Any]:
    """Parameters that are equal on all ranks, a plain tensor that is not, and values of each rank."""
    values = torch.Generator().manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(300, 500, bias=False), torch.nn.Linear(500, 7), torch.nn.Linear(7, 7))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=values)
    plain = torch.full((1000,), 10.0 * step + rank)
    return {"model": model, "plain": plain, "own": {"rank": rank, "of": torch.full((3,), rank)}, "step": step}
