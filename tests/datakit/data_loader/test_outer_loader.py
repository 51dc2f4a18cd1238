"""The loader around a dataset: options that change items or their order are refused, wherever it starts workers."""

import sys
import warnings
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from tests.datakit.support.data_loaders import first_batches
from tests.datakit.support.streams import NumberedStream
from threefold.errors import UserError

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[train]"')
from torch.utils.data import DataLoader  # noqa: E402

from datakit.torch import MapDataset, StreamDataset  # noqa: E402

ROWS = 4
FORMATS = pytest.mark.parametrize("name", ["datakit", "transformers"])


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> NumberedStream:
    return NumberedStream(tmp_path_factory.mktemp("stores") / "a")


def read_by_hint(stream: NumberedStream, hint: str | None, dataset: Any) -> list[list[int]]:
    """What the loader of a hint's first part reads."""
    names = {"DataLoader": DataLoader, "dataset": dataset}
    return [stream.samples(batch) for batch in first_batches(eval(str(hint).split(";")[0], names), 3)]


@FORMATS
@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"batch_size": 3, "collate_fn": list}])
def test_a_loader_that_would_join_items_is_refused_and_the_hint_reads_the_stream(
    stream: NumberedStream, name: str, num_workers: int, options: dict[str, Any]
) -> None:
    dataset = StreamDataset(stream.blend, ROWS, format=name)
    with pytest.raises(UserError, match=r"item of this dataset is a whole micro-batch, and batch_size=\d would join"):
        first_batches(DataLoader(dataset, num_workers=num_workers, **options), 1)
    hint = f"DataLoader(dataset, batch_size=None, num_workers={num_workers})"
    assert read_by_hint(stream, hint, dataset) == stream.expected(0, 3, ROWS)


def test_one_item_in_a_list_is_taken(stream: NumberedStream) -> None:
    loader = DataLoader(StreamDataset(stream.blend, ROWS), num_workers=2, collate_fn=lambda items: items[0])
    assert [stream.samples(batch) for batch in first_batches(loader, 5)] == stream.expected(0, 5, ROWS)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_another_order_is_refused_where_there_is_one(stream: NumberedStream, start: str) -> None:
    dataset = StreamDataset(stream.blend, ROWS)
    options: dict[str, Any] = {"batch_size": None, "in_order": False, "multiprocessing_context": start}
    with pytest.raises(UserError, match=r"with in_order=False and 2 workers(.|\n)*hint: DataLoader"):
        first_batches(DataLoader(dataset, num_workers=2, **options), 1)
    assert [stream.samples(batch) for batch in first_batches(DataLoader(dataset, num_workers=1, **options), 3)] == (
        stream.expected(0, 3, ROWS)
    )


def test_the_options_are_those_of_the_loader_that_reads(stream: NumberedStream) -> None:
    """Another loader over another dataset, even if it is at hand, says nothing."""
    loader = DataLoader(StreamDataset(stream.blend, 1), in_order=False, num_workers=2)
    assert loader.batch_size == 1
    assert stream.samples(next(iter(StreamDataset(stream.blend, ROWS)))) == stream.expected(0, 1, ROWS)[0]


class DataLoaderDispatcher:
    """What reads in one process for all, by its name in accelerate."""

    def __init__(self, num_processes: int) -> None:
        self.state = SimpleNamespace(num_processes=num_processes)

    def read(self, dataset: Any) -> list[Any]:
        return list(islice(dataset, 2))


class IterableDatasetShard:
    """What passes over the items of other processes, by its name in accelerate."""

    def __init__(self, dataset: Any, num_processes: int) -> None:
        self.dataset, self.num_processes = dataset, num_processes

    def read(self) -> list[Any]:
        return list(islice(self.dataset, 2))


def test_another_loader_over_the_same_dataset_that_nothing_reads_is_not_judged(stream: NumberedStream) -> None:
    dataset = StreamDataset(stream.blend, ROWS)
    loader = DataLoader(dataset, batch_size=3)
    read = DataLoader(dataset, batch_size=None)
    assert [stream.samples(batch) for batch in first_batches(read, 3)] == stream.expected(0, 3, ROWS)
    assert loader.batch_size == 3


class _PrefetchDataFetcher:
    """As Lightning's: it has the next batch before the last one is trained on."""

    def __init__(self, loader: Any, *, prefetch_batches: int) -> None:
        self.loader, self.prefetch_batches, self.length = loader, prefetch_batches, None

    def batches(self) -> list[Any]:
        return first_batches(self.loader, 2)


class StatefulLoader(DataLoader):
    def load_state_dict(self, state: Any) -> None:
        """As that of torchdata."""


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "ahead", "warns"), [(StatefulLoader, 1, 1), (StatefulLoader, 0, 0), (DataLoader, 1, 0)]
)
def test_a_state_that_will_be_ahead_is_warned_of(
    stream: NumberedStream,
    kind: type[DataLoader],
    ahead: int,
    warns: int,
    num_workers: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = kind(StreamDataset(stream.blend, ROWS), batch_size=None, num_workers=num_workers)
    said = "passes one over: Trainer(callbacks=[LightningCursor(dataset)])"
    with monkeypatch.context() as patch:  # of the workers, which are forked, too
        patch.setattr(warnings, "warn", lambda text, **_: print(text, file=sys.stderr, flush=True))
        read = _PrefetchDataFetcher(loader, prefetch_batches=ahead).batches()
    assert [stream.samples(batch) for batch in read] == stream.expected(0, 2, ROWS)
    assert capfd.readouterr().err.count(said) == warns


def test_a_dispatcher_that_is_being_made_is_no_fault(stream: NumberedStream) -> None:
    dispatcher = DataLoaderDispatcher(2)
    del dispatcher.state
    assert len(dispatcher.read(StreamDataset(stream.blend, ROWS, 1, 2))) == 2


def test_items_that_are_shared_twice_are_refused(stream: NumberedStream) -> None:
    one, half = StreamDataset(stream.blend, ROWS), StreamDataset(stream.blend, ROWS, 1, 2)
    for num_processes in (1, 2):
        assert len(DataLoaderDispatcher(num_processes).read(one)) == 2
        assert len(IterableDatasetShard(one, num_processes).read()) == 2
    assert len(DataLoaderDispatcher(1).read(half)) == 2
    for reads in (lambda: DataLoaderDispatcher(2).read(half), IterableDatasetShard(half, 2).read):
        with pytest.raises(UserError, match="shares the items of this dataset among 2 processes, and it has one of 2"):
            reads()


def test_a_cursor_that_was_collated_is_refused(stream: NumberedStream) -> None:
    [batch] = first_batches(DataLoader(MapDataset(stream.blend, ROWS, 9)), 1)
    dataset = StreamDataset(stream.blend, ROWS)
    with pytest.raises(UserError, match=r"is not a cursor(.|\n)*hint: .*batch_size=None"):
        dataset.load_state_dict(batch["cursor"])
    assert stream.samples(next(iter(dataset))) == stream.expected(0, 1, ROWS)[0]
