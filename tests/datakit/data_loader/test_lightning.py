"""Lightning's own resume, with the callback: micro-batches go on after the last one that was trained on."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.datakit.support.streams import NumberedStream
from threefold.errors import UserError

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[train]"')
pl = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install lightning")
from torch.utils.data import DataLoader  # noqa: E402

from datakit.torch import LightningCursor, StreamDataset  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> NumberedStream:
    return NumberedStream(tmp_path_factory.mktemp("stores") / "a")


class Model(pl.LightningModule):  # type: ignore[misc,name-defined]
    """A model of one number, which notes what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, number: int) -> Any:
        self.seen.append(batch)
        return (self.weight - batch["tokens"].float().mean() / 1000).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    folder: Path, stream: NumberedStream, num_steps: int, *, rows: int = 4, loader: Any = DataLoader,
    num_workers: int = 0, **options: Any,
) -> tuple[Model, list[list[int]]]:  # fmt: skip
    """Train to a step from the checkpoint in a folder, and save there; return the model and the samples it saw."""
    dataset, model, path = StreamDataset(stream.blend, rows), Model(), folder / "saved.ckpt"
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    trainer = pl.Trainer(
        max_steps=num_steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[LightningCursor(dataset)], default_root_dir=folder, **options,
    )  # fmt: skip
    resume = {"ckpt_path": str(path), "weights_only": False} if path.exists() else {}
    trainer.fit(model, loader(dataset, batch_size=None, **workers), **resume)
    trainer.save_checkpoint(path)
    return model, [stream.samples(batch) for batch in model.seen]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_ends_in_the_weights_of_a_whole_one(
    stream: NumberedStream, tmp_path: Path, num_workers: int
) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole, seen = fit(tmp_path / "whole", stream, 7)
    assert seen == stream.expected(0, 7, 4)
    for begin, end in ((0, 2), (2, 3), (3, 7)):
        model, seen = fit(tmp_path / "cut", stream, end, num_workers=num_workers)
        assert seen == stream.expected(begin * 4, end - begin, 4)
    assert model.weight.equal(whole.weight)


def test_other_rows_go_on_at_the_sample(stream: NumberedStream, tmp_path: Path) -> None:
    fit(tmp_path, stream, 3)
    assert fit(tmp_path, stream, 5, rows=3)[1] == stream.expected(12, 2, 3)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_of_some_batches_follow_each_other(stream: NumberedStream, tmp_path: Path, num_workers: int) -> None:
    _, seen = fit(tmp_path, stream, 8, limit_train_batches=3, num_workers=num_workers)
    assert seen == stream.expected(0, 8, 4)


def test_accumulated_steps_are_counted_by_their_micro_batches(stream: NumberedStream, tmp_path: Path) -> None:
    fit(tmp_path, stream, 2, accumulate_grad_batches=2)
    assert fit(tmp_path, stream, 3, accumulate_grad_batches=2)[1] == stream.expected(16, 2, 4)


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_a_loader_with_a_state_of_its_own_is_refused(stream: NumberedStream, tmp_path: Path) -> None:
    needed = "needs torchdata: pip install torchdata"
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason=needed).StatefulDataLoader
    with pytest.raises(UserError, match=r"Lightning saves the state of a StatefulDataLoader one micro-batch late"):
        fit(tmp_path, stream, 2, loader=stateful)


def test_a_loader_with_a_state_is_warned_of_without_the_callback(stream: NumberedStream) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata: pip install torchdata")
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    loaders = stateful.StatefulDataLoader, DataLoader
    for loader, warns in zip(loaders, (True, False), strict=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = pl.Trainer(max_steps=2, enable_model_summary=False, **options)
            trainer.fit(Model(), loader(StreamDataset(stream.blend, 4), batch_size=None))
        assert any("passes one over" in str(warning.message) for warning in caught) == warns
