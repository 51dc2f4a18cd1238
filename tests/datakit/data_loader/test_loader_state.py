"""States of torchdata's loader under other geometries: what comes next is exact, or refused with a way that is."""

import json
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

from datakit.data_loader.loader_state import Geometry, parts_of, place_of
from tests.datakit.support.data_loaders import first_batches
from tests.datakit.support.streams import NumberedStream
from threefold.errors import UserError

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[train]"')
from datakit.torch import StreamDataset  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*set_vital"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
ROWS = 4  # of the micro-batches before a save


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> NumberedStream:
    return NumberedStream(tmp_path_factory.mktemp("stores") / "a")


def loader_of(dataset: Any, num_workers: int, **options: Any) -> Any:
    needed = "needs torchdata: pip install torchdata"
    kind = pytest.importorskip("torchdata.stateful_dataloader", reason=needed).StatefulDataLoader
    return kind(dataset, batch_size=None, num_workers=num_workers, **options)


def saved(stream: NumberedStream, num: int, num_workers: int, **options: Any) -> dict[str, Any]:
    """The state, as JSON has it, of a loader that returned some micro-batches."""
    loader = loader_of(StreamDataset(stream.blend, ROWS), num_workers, **options)
    first_batches(loader, num)
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def older(state: dict[str, Any]) -> dict[str, Any]:
    """A state as versions wrote it that named no geometry."""
    for part in state["_snapshot"]["_worker_snapshots"].values() if "_snapshot" in state else [state]:
        del part["dataset_state"]["geometry"]
    return state


def read(stream: NumberedStream, loader: Any, num: int = 3) -> list[list[int]]:
    return [stream.samples(batch) for batch in first_batches(loader, num)]


def resumed(stream: NumberedStream, state: Any, shape: tuple[int, int, int], num_workers: int) -> Iterable[list[int]]:
    """What a loader of some rows, dp rank and dp size reads after its dataset has loaded a state."""
    dataset = StreamDataset(stream.blend, *shape)
    dataset.load_state_dict(state)
    return read(stream, loader_of(dataset, num_workers))


SAVES = [(0, 3, 1), (1, 2, 1), (2, 5, 1), (2, 4, 1), (2, 0, 1), (2, 5, 3), (3, 5, None)]


@pytest.mark.parametrize(("num_workers", "num", "every"), SAVES)
def test_a_dataset_goes_on_from_a_whole_state_under_any_geometry(
    stream: NumberedStream, num_workers: int, num: int, every: int | None
) -> None:
    state = saved(stream, num, num_workers, snapshot_every_n_steps=every)
    for shape, workers in (((2, 0, 1), 0), ((3, 1, 2), 0), ((8, 0, 1), 0), ((ROWS, 1, 2), 3 - num_workers)):
        assert resumed(stream, state, shape, workers) == stream.expected(num * ROWS, 3, *shape)


@pytest.mark.parametrize(("num_workers", "num"), [(0, 3), (1, 3), (2, 5), (2, 4)])
def test_older_states_are_read_where_they_are_exact(stream: NumberedStream, num_workers: int, num: int) -> None:
    state = older(saved(stream, num, num_workers))
    assert resumed(stream, state, (2, 1, 2), 0) == stream.expected(num * ROWS, 3, 2, 1, 2)
    loader = loader_of(StreamDataset(stream.blend, ROWS), num_workers)
    loader.load_state_dict(state)
    assert read(stream, loader) == stream.expected(num * ROWS, 3, ROWS)


def test_an_older_state_that_cannot_be_exact_is_refused(stream: NumberedStream) -> None:
    with pytest.raises(UserError, match="has 2 batches since its snapshot, and not how many samples"):
        resumed(stream, older(saved(stream, 2, 2, snapshot_every_n_steps=3)), (ROWS, 0, 1), 0)
    loader = loader_of(StreamDataset(stream.blend, 7), 2)
    loader.load_state_dict(older(saved(stream, 5, 2)))
    with pytest.raises(UserError, match=r"of sample (16|24), was not made with micro_batch_size=7"):
        first_batches(loader, 1)


@pytest.mark.parametrize(
    ("shape", "num_workers"), [((2, 0, 1), 2), ((8, 0, 1), 2), ((ROWS, 1, 2), 2), ((ROWS, 0, 1), 3), ((ROWS, 0, 1), 1)]
)
def test_workers_refuse_states_of_another_geometry_and_the_hint_is_exact(
    stream: NumberedStream, shape: tuple[int, int, int], num_workers: int
) -> None:
    state = saved(stream, 5, 2)
    dataset = StreamDataset(stream.blend, *shape)
    loader = loader_of(dataset, num_workers)
    loader.load_state_dict(state)
    made = "micro_batch_size=4, dp_size=1, num_workers=2"
    with pytest.raises(UserError, match=f"made with {made}; a worker of (.|\n)*hint: dataset.load_state_dict"):
        first_batches(loader, 1)
    dataset.load_state_dict(state)
    assert read(stream, loader_of(dataset, num_workers)) == stream.expected(20, 3, *shape)


@pytest.mark.parametrize("shape", [(2, 0, 1), (3, 1, 2)])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_where_one_process_reads_the_loader_itself_goes_on_under_other_rows_and_ranks(
    stream: NumberedStream, shape: tuple[int, int, int], num_workers: int
) -> None:
    loader = loader_of(StreamDataset(stream.blend, *shape), num_workers)
    loader.load_state_dict(saved(stream, 5, num_workers))
    assert read(stream, loader) == stream.expected(20, 3, *shape)


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"prefetch_factor": 5}, {"pin_memory": True}])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_a_second_iteration_of_a_resumed_loader_is_refused_and_the_hint_is_exact(
    stream: NumberedStream, options: dict[str, Any]
) -> None:
    dataset = StreamDataset(stream.blend, ROWS)
    loader = loader_of(dataset, 2, **options)
    loader.load_state_dict(saved(stream, 5, 2, **options))
    assert read(stream, loader, 2) == stream.expected(20, 2, ROWS)
    state = loader.state_dict()
    with pytest.raises(UserError, match=r"workers of an earlier iteration went on from states(.|\n)*next iter"):
        first_batches(loader, 1)
    dataset.load_state_dict(state)
    assert read(stream, loader_of(dataset, 2, **options)) == stream.expected(28, 3, ROWS)


def test_a_second_iteration_begins_at_the_cursor_that_one_process_loaded(stream: NumberedStream) -> None:
    for num_workers in (0, 1):
        loader = loader_of(StreamDataset(stream.blend, ROWS), num_workers)
        loader.load_state_dict(saved(stream, 5, num_workers))
        assert read(stream, loader, 2) == read(stream, loader, 2) == stream.expected(20, 2, ROWS)


def test_a_state_goes_on_twice_from_stops_in_mid_round(stream: NumberedStream) -> None:
    state, end = saved(stream, 3, 2), 3 * ROWS
    for num in (1, 2, 4):
        loader = loader_of(StreamDataset(stream.blend, ROWS), 2)
        loader.load_state_dict(state)
        assert read(stream, loader, num) == stream.expected(end, num, ROWS)
        state, end = json.loads(json.dumps(loader.state_dict())), end + num * ROWS
        assert resumed(stream, state, (6, 0, 1), 0) == stream.expected(end, 3, 6)


def state_of(begins: list[int], last: int, later: int = 0) -> dict[str, Any]:
    workers = {f"worker_{n}": {"dataset_state": {"num_samples": begin}} for n, begin in enumerate(begins)}
    return {
        "_snapshot": {"_worker_snapshots": workers, "_last_yielded_worker_id": last}, "_steps_since_snapshot": later
    }  # fmt: skip


def test_the_place_is_what_all_workers_say_together() -> None:
    for num_workers, rows, num, first in product((1, 2, 3, 4), (1, 5), range(9), (0, 7)):
        begins = [first + len(range(n, num, num_workers)) * num_workers * rows for n in range(num_workers)]
        state = state_of(begins, (num - 1) % num_workers)
        assert place_of(state, parts_of(state)) == first + num * rows
        if num_workers > 1:
            wrong = state_of(begins[::-1], (num - 1) % num_workers)
            if begins[::-1] != begins:
                with pytest.raises(UserError, match="did not come in the stream's order"):
                    place_of(wrong, parts_of(wrong))


def test_batches_after_a_snapshot_are_counted_by_the_geometry() -> None:
    state = state_of([24, 24, 12], 1, later=2)
    for part in parts_of(state):
        part["geometry"] = Geometry(2, 2, 3).to_json()
    parts = [part | {"geometry": Geometry(2, 2, 3).to_json()} for part in parts_of(state)]
    assert place_of(state, parts) == 12 + 2 * 4 + 2 * 4


@pytest.mark.parametrize("geometry", [5, {"micro_batch_size": 2}, {"micro_batch_size": 2, "dp_size": "2"}, {"x": 1}])
def test_what_is_not_a_geometry_is_refused(stream: NumberedStream, geometry: object) -> None:
    dataset = StreamDataset(stream.blend, ROWS)
    with pytest.raises(UserError, match="is not a geometry"):
        dataset.load_state_dict(dataset.state_dict() | {"geometry": geometry})
    with pytest.raises(UserError, match="is not of a StreamDataset"):
        dataset.load_state_dict({"_num_yielded": 1, "dataset_state": None})
    assert dataset.state_dict()["geometry"] == Geometry(ROWS, 1).to_json()
