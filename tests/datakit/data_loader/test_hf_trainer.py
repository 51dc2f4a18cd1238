"""The Trainer of transformers: it reads the stream, and goes on in it, by its own resume and by the callback."""

from pathlib import Path
from typing import Any

import pytest

from datakit import Blend
from tests.datakit.support.streams import NumberedStream
from threefold.errors import UserError

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[train]"')
for package in ("transformers", "accelerate"):
    pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
from torch.utils.data import DataLoader  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from datakit.torch import HfTrainerCursor, StreamDataset  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> NumberedStream:
    return NumberedStream(tmp_path_factory.mktemp("stores") / "a")


class Sum(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A model of one number, which notes what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []

    def forward(self, input_ids: Any, labels: Any, position_ids: Any) -> dict[str, Any]:
        self.seen.append({"input_ids": input_ids.clone()})
        return {"loss": (self.weight - input_ids.float().mean() / 1000).square().mean()}


class PlainLoader(Trainer):  # type: ignore[misc]
    """A Trainer whose loader is a plain one."""

    num_workers = 0

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=None, num_workers=self.num_workers)


def train(
    folder: Path, blend: Blend, num_steps: int, *, rows: int = 2, num_workers: int = 0, keep: bool = True,
    kind: Any = PlainLoader, ga: int = 2,
) -> tuple[Sum, list[Any]]:  # fmt: skip
    """Train to a step from the checkpoint in a folder, with one every 2; return the model and what it was shown."""
    dataset = StreamDataset(blend, rows, format="transformers")
    arguments = TrainingArguments(
        str(folder), max_steps=num_steps, save_steps=2, logging_steps=100, report_to=[], use_cpu=True,
        disable_tqdm=True, per_device_train_batch_size=1, gradient_accumulation_steps=ga, lr_scheduler_type="constant",
    )  # fmt: skip
    model = Sum()
    callbacks = [HfTrainerCursor(dataset)] if keep else []
    trainer = kind(model, arguments, train_dataset=dataset, callbacks=callbacks, data_collator=lambda items: items[0])
    trainer.num_workers = num_workers
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)
    return model, model.seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PlainLoader, Trainer])
@pytest.mark.parametrize(("keep", "num_workers"), [(True, 0), (False, 0), (True, 2)])
def test_a_resumed_run_reads_the_rest_of_the_stream(
    stream: NumberedStream, tmp_path: Path, keep: bool, num_workers: int, kind: Any
) -> None:
    whole, seen = train(tmp_path / "whole", stream.blend, 4, kind=kind)
    assert [stream.samples(batch) for batch in seen] == stream.expected(0, 8, 2)
    options = {"keep": keep, "num_workers": num_workers, "kind": kind}
    train(tmp_path / "cut", stream.blend, 2, **options)
    model, seen = train(tmp_path / "cut", stream.blend, 4, **options)
    assert [stream.samples(batch) for batch in seen] == stream.expected(8, 4, 2)
    assert model.weight.equal(whole.weight)


@pytest.mark.slow
def test_other_rows_and_accumulation_go_on_where_the_step_was(stream: NumberedStream, tmp_path: Path) -> None:
    train(tmp_path / "run", stream.blend, 2)
    _, seen = train(tmp_path / "run", stream.blend, 4, rows=3, ga=1)
    assert [stream.samples(batch) for batch in seen] == stream.expected(8, 2, 3)
    _, seen = train(tmp_path / "run", stream.blend, 6, rows=2, ga=1)
    assert [stream.samples(batch) for batch in seen] == stream.expected(14, 2, 2)


@pytest.mark.slow
def test_a_checkpoint_without_the_callback_goes_on_as_the_trainer_would(stream: NumberedStream, tmp_path: Path) -> None:
    train(tmp_path / "run", stream.blend, 2, keep=False)
    _, seen = train(tmp_path / "run", stream.blend, 4)
    assert [stream.samples(batch) for batch in seen] == stream.expected(8, 4, 2)


def test_what_joins_items_is_refused_with_the_trainers_options(stream: NumberedStream, tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    dataset = StreamDataset(stream.blend, 2, format="transformers")
    for options in ({}, {"data_collator": lambda items: items[0]}):
        trainer = Trainer(Sum(), arguments, train_dataset=dataset, **options)
        with pytest.raises(UserError, match=r"batch_size=8 would join items\n.*per_device_train_batch_size=1"):
            trainer.train()


def test_a_callback_that_came_too_late_is_refused(stream: NumberedStream, tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    dataset = StreamDataset(stream.blend, 2, format="transformers")
    trainer = PlainLoader(Sum(), arguments, train_dataset=dataset)
    trainer.add_callback(HfTrainerCursor(dataset))
    with pytest.raises(UserError, match="would pass over batches that the dataset has passed over"):
        trainer.train()
    with pytest.raises(UserError, match="dataset is of class StreamDataset, not list"):
        HfTrainerCursor([])
