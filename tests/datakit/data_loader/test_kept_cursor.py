"""KeptCursor: the place of a loop, whatever was read ahead; through Accelerate's own save and resume too."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.datakit.support.data_loaders import first_batches
from tests.datakit.support.streams import NumberedStream
from threefold.errors import UserError

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[train]"')
from torch.utils.data import DataLoader  # noqa: E402

from datakit.torch import KeptCursor, StreamDataset  # noqa: E402


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> NumberedStream:
    return NumberedStream(tmp_path_factory.mktemp("stores") / "a")


def test_it_goes_on_after_what_was_kept_under_another_geometry(stream: NumberedStream) -> None:
    dataset = StreamDataset(stream.blend, 4)
    cursor = KeptCursor(dataset)
    for batch in first_batches(DataLoader(dataset, batch_size=None, num_workers=2), 5)[:3]:
        cursor.keep(batch)
    state = json.loads(json.dumps(cursor.state_dict()))
    halves = StreamDataset(stream.blend, 2, 1, 2)
    other = KeptCursor(halves)
    other.load_state_dict(state)
    assert other.state_dict() == state
    batch = next(iter(halves))
    assert stream.samples(batch) == [14, 15]
    other.keep(batch)
    assert other.state_dict()["num_samples"] == 16
    cursor.go_on()
    assert stream.samples(next(iter(dataset))) == [12, 13, 14, 15]


def test_what_is_not_the_next_micro_batch_is_refused(stream: NumberedStream) -> None:
    dataset = StreamDataset(stream.blend, 4)
    cursor, batches = KeptCursor(dataset), first_batches(dataset, 3)
    cursor.keep(batches[0])
    for batch in (batches[0], batches[2], next(iter(StreamDataset(stream.blend, 3)))):
        with pytest.raises(UserError, match=r"training was at sample 4, and this micro-batch of 4 samples ends at"):
            cursor.keep(batch)
    plain = next(iter(StreamDataset(stream.blend, 4, format="transformers")))
    for other in (plain, [], None):
        with pytest.raises(UserError, match="a batch without its cursor"):
            cursor.keep(other)
    assert cursor.state_dict() == batches[0]["cursor"]
    with pytest.raises(UserError, match="dataset is of class StreamDataset"):
        KeptCursor(batches)


def accelerated(folder: Path, stream: NumberedStream, num: int, *, prepare: bool, num_workers: int) -> list[list[int]]:
    """Read micro-batches through Accelerate, from where its checkpoint in a folder is, and save there."""
    needed = "needs accelerate: pip install accelerate"
    accelerator = pytest.importorskip("accelerate", reason=needed).Accelerator(cpu=True)
    dataset = StreamDataset(stream.blend, 4)
    cursor = KeptCursor(dataset)
    accelerator.register_for_checkpointing(cursor)
    if folder.exists():
        accelerator.load_state(str(folder))
    loader: Any = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    batches = first_batches(accelerator.prepare(loader) if prepare else loader, num)
    for batch in batches:
        cursor.keep(batch)
    accelerator.save_state(str(folder))
    return [stream.samples(batch) for batch in batches]


@pytest.mark.parametrize(("prepare", "num_workers"), [(False, 2), (True, 0), (True, 2)])
@pytest.mark.filterwarnings("ignore")
def test_accelerates_own_resume_goes_on_exactly(
    stream: NumberedStream, tmp_path: Path, prepare: bool, num_workers: int
) -> None:
    for first, num in ((0, 3), (12, 2), (20, 3)):
        found = accelerated(tmp_path / "saved", stream, num, prepare=prepare, num_workers=num_workers)
        assert found == stream.expected(first, num, 4)
