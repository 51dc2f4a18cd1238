"""What a process and its workers know of each other: the start that is loaded later, and who read last."""

import json
import pickle
from typing import Any

import pytest

from datakit.data_loader.shared_place import SharedPlace
from tests.datakit.support.data_loaders import first_batches
from tests.datakit.support.streams import NumberedStream
from threefold.errors import UserError

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[train]"')
from torch.utils.data import DataLoader  # noqa: E402

from datakit.torch import StreamDataset  # noqa: E402

STARTS = pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> NumberedStream:
    return NumberedStream(tmp_path_factory.mktemp("stores") / "a")


def test_processes_that_share_the_memory_write_under_their_own_id() -> None:
    place = SharedPlace()
    assert place.cursor(1) is None
    place.begin_at({"num_samples": 20}, owner=1)
    assert (place.cursor(1), place.cursor(2)) == ({"num_samples": 20}, None)
    place.note_reader(1, is_worker=True)
    place.note_resumed(1)
    assert place.is_read_by_workers(1) > place.is_read_by_workers(2)
    assert place.is_resumed_by_workers(1) > place.is_resumed_by_workers(2)
    place.note_reader(2, is_worker=False)
    place.begin_at({"num_samples": 3}, owner=2)
    assert place.is_read_by_workers(1)
    assert place.is_resumed_by_workers(1)
    assert (place.cursor(1), place.cursor(2)) == (None, {"num_samples": 3})
    assert pickle.loads(pickle.dumps(place)).cursor(2) is None, "a copy that is not for a worker is its own"
    place.begin_at({"num_samples": 4}, owner=1)
    assert not place.is_read_by_workers(1)
    assert not place.is_resumed_by_workers(1)


@STARTS
@pytest.mark.parametrize("persistent", [False, True])
def test_the_place_of_what_workers_read_is_refused_to_their_parent(
    stream: NumberedStream, start: str, persistent: bool
) -> None:
    dataset = StreamDataset(stream.blend, 4)
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": start, "persistent_workers": persistent}
    before = dataset.state_dict()
    loader = DataLoader(dataset, batch_size=None, **options)
    batches = first_batches(loader, 3)
    with pytest.raises(UserError, match=r"workers read this dataset(.|\n)*hint: save batch\[\"cursor\"\]"):
        dataset.state_dict()
    dataset.load_state_dict(json.loads(json.dumps(batches[-1]["cursor"])))
    assert dataset.state_dict() == before | batches[-1]["cursor"]
    assert [stream.samples(batch) for batch in first_batches(loader, 3)] == stream.expected(12, 3, 4)
    next(iter(dataset))
    assert dataset.state_dict()["num_samples"] == 16, "this process reads now"


def test_forked_workers_read_on_after_what_is_loaded_between(stream: NumberedStream) -> None:
    dataset = StreamDataset(stream.blend, 4)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    for first in (0, 40, 8):
        dataset.load_state_dict(StreamDataset(stream.blend, 4).cursor_after(first))
        assert [stream.samples(batch) for batch in first_batches(loader, 3)] == stream.expected(first, 3, 4)
