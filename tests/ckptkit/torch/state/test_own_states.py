"""What each rank has for its own, as the state of its data loader, comes back on its rank, or is refused elsewhere."""

from pathlib import Path
from typing import Any

import pytest

from ckptkit.torch import Run
from tests.trainer.support.ranks import run_ranks
from threefold.errors import UserError


class Stream:
    def __init__(self, rank: int) -> None:
        import torch

        self.at: dict[str, Any] = {"sample": rank, "order": torch.full((3,), rank), "seen": [rank] * rank}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.at)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state


def save_own(rank: int, url: str) -> Any:
    import torch

    model = {f"layers.{rank}.weight": torch.full((2,), rank), "shared": torch.full((1 << 10,), 7.0)}
    with Run(url) as run:
        for step in (1, 2):
            run.save(step, {"loader": Stream(rank), "model": model, "rng": True, "step": step})
        state = {"loader": Stream(5), "model": {name: each * 0 for name, each in model.items()}, "step": 0}
        report = run.load(state)
        assert (report.step, state["step"]) == (2, 2)
        assert all(torch.equal(state["model"][name], each) for name, each in model.items())
        wrong: Any = {"model": {"shared": torch.zeros(1 << 10)}, "step": 0} if rank else {"model": {}, "step": [set()]}
        with pytest.raises(UserError, match="set"):
            run.save(3, wrong)  # one rank's error is raised on all
        with pytest.raises(UserError, match="shapes"):
            run.save(3, {"x": torch.zeros(rank + 1)})
        return state["loader"].at["sample"], state["loader"].at["order"].tolist(), state["loader"].at["seen"]


@pytest.mark.ci
@pytest.mark.slow
def test_states_of_ranks_come_back_on_their_ranks(tmp_path: Path) -> None:
    import torch

    url = str(tmp_path / "run")
    assert run_ranks(2, save_own, url) == [(0, [0, 0, 0], []), (1, [1, 1, 1], [1])]
    both = {f"layers.{rank}.weight": torch.zeros(2, dtype=torch.int64) for rank in range(2)}
    with Run(url) as run:
        run.load({"model": both | {"shared": torch.zeros(1 << 10)}, "rng": True})
        assert both["layers.1.weight"].tolist() == [1, 1]
        with pytest.raises(UserError, match="loader: each of the 2 ranks that saved it had its own"):
            run.load({"loader": Stream(0)})
        stream = Stream(5)
        run.load({"loader": stream}, strict=False)
        assert stream.at["sample"] == 0
