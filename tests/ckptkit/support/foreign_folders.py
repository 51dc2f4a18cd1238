"""Small folders as other programs write them, for the guides."""

from pathlib import Path

import torch


def write_torch_checkpointing(folder: Path) -> None:
    """What torch_checkpointing saves of a model, its optimizer and a number."""
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    (folder / "saved").mkdir()
    for key, value in {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 100}.items():
        torch.save(value, folder / "saved" / f"{key}_0.pt")


def write_universal(folder: Path) -> None:
    """What DeepSpeed's converter makes of a matrix."""
    path = folder / "global_step100_universal" / "zero" / "encoder.0.weight"
    path.mkdir(parents=True)
    for name in ("fp32", "exp_avg", "exp_avg_sq"):
        torch.save({"cat_dim": 0, "param": torch.randn(8, 4)}, path / f"{name}.pt")
