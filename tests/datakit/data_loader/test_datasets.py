"""Datasets: through any DataLoader comes the plain Loader's stream, and any resume continues it."""

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit import BatchOptions, Blend, Cursor, HostBatch, Loader, TokenStore, write_store
from datakit.batches.batch import PLAIN
from tests.datakit.support.data_loaders import first_batches
from threefold.errors import CheckFailed, UserError
from threefold.installing import install

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[train]"')
DataLoader = torch.utils.data.DataLoader
datasets = import_module("datakit.data_loader.datasets")
MapDataset, StreamDataset = datasets.MapDataset, datasets.StreamDataset

L = 8
ARRAYS = ("tokens", "labels", "positions", "loss_mask")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> Blend:
    folder, rng = tmp_path_factory.mktemp("stores"), np.random.default_rng(0)
    stores = [
        write_store(folder / str(size), np.array_split(rng.integers(0, 99, size), 7), vocab_size=99, eod_id=0)
        for size in (700, 300)
    ]
    return Blend([(stores[0], 2), (stores[1], 1)], seq_length=L, seed=5)


def expected(
    blend: Blend, num: int, shape: tuple[int, int, int] = (2, 0, 1), first: int = 0, options: BatchOptions = PLAIN
) -> list[dict[str, Any]]:
    """The plain Loader's first micro-batches from sample `first` on; `shape` is rows, dp rank and dp size."""
    rows, dp_rank, dp_size = shape
    found = []
    with Loader(blend, rows, 1, dp_rank, dp_size, Cursor.start(blend, first), options) as loader:
        for _ in range(num):
            step = loader.next_step()
            found.append({name: getattr(step, name)[0] for name in ARRAYS} | {"cursor": loader.cursor.to_json()})
    return found


def same(batches: Iterable[dict[str, Any]], expected_batches: list[dict[str, Any]]) -> bool:
    """Whether tensors have the values and types of arrays, and cursors are equal."""
    pairs = list(zip(batches, expected_batches, strict=True))
    for batch, other in pairs:
        assert batch.keys() == other.keys() == {*ARRAYS, "cursor"}
        assert batch["cursor"] == other["cursor"]
        for name in ARRAYS:
            array = batch[name].numpy()
            assert array.dtype == other[name].dtype
            assert (array == other[name]).all()
    return bool(pairs)


def state(blend: Blend, cursor: dict[str, Any], *shape: int) -> dict[str, Any]:
    """What a `state_dict` is at a cursor: that, the record, and the geometry of a dataset if there is one."""
    names = ("micro_batch_size", "dp_size", "num_workers", "worker")
    geometry = {"geometry": dict(zip(names, shape, strict=True))} if shape else {}
    return cursor | {"stream": blend.record.to_json()} | geometry


def as_worker(monkeypatch: pytest.MonkeyPatch, worker: int, num_workers: int) -> None:
    monkeypatch.setattr(datasets, "get_worker_info", lambda: SimpleNamespace(id=worker, num_workers=num_workers))


SHAPES = st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(3, 4))


@settings(max_examples=25)
@given(shape=SHAPES, first=st.integers(0, 10**12))
def test_items_are_the_micro_batches_of_the_loader(blend: Blend, shape: tuple[int, int, int], first: int) -> None:
    cursor = Cursor.start(blend, first)
    options = BatchOptions(mask_eod_loss=True, reset_positions=True)
    wanted = expected(blend, 5, shape, first, options)
    assert same(islice(StreamDataset(blend, *shape, cursor, options), 5), wanted)
    by_number = MapDataset(blend, shape[0], 5, *shape[1:], cursor, options)
    assert same([by_number[number] for number in (3, 0, 4)], [wanted[number] for number in (3, 0, 4)])
    assert same(by_number, wanted)


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_a_step_of_several_micro_batches_is_as_many_items(blend: Blend, num_microbatches: int) -> None:
    items = iter(StreamDataset(blend, 2, 1, 3))
    with Loader(blend, 2, num_microbatches, 1, 3) as loader:
        for _ in range(4):
            step = loader.next_step()
            parts = [next(items) for _ in range(num_microbatches)]
            assert (np.stack([part["tokens"].numpy() for part in parts]) == step.tokens).all()
            assert parts[-1]["cursor"] == loader.cursor.to_json()
            assert loader.state_dict() == state(blend, parts[-1]["cursor"])


@settings(max_examples=25)
@given(layouts=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4))
def test_any_sequence_of_layouts_reads_the_one_stream(blend: Blend, layouts: list[tuple[int, int, int]]) -> None:
    """Other rows, other ranks: each goes on at the cursor of the last micro-batch of the layout before."""
    state, rows = Cursor.start(blend).to_json(), []
    for size, dp_size, num in layouts:
        ranks = [StreamDataset(blend, size, rank, dp_size) for rank in range(dp_size)]
        for rank in ranks:
            rank.load_state_dict(json.loads(json.dumps(state)))
        batches = list(islice(zip(*ranks), num))
        rows += [batch["tokens"].numpy() for step in batches for batch in step]
        assert len({json.dumps(batch["cursor"]) for batch in batches[-1]}) == 1
        state = batches[-1][0]["cursor"]
    found = np.concatenate(rows)
    assert len(found) == state["num_samples"]
    assert (found == blend.batch(np.arange(len(found))).tokens).all()


@settings(max_examples=25)
@given(num_workers=st.integers(1, 4), before=st.integers(0, 9), after=st.integers(1, 9), first=st.integers(0, 99))
def test_workers_by_turns_make_the_stream_and_resume_it(
    blend: Blend, num_workers: int, before: int, after: int, first: int
) -> None:
    """As StatefulDataLoader does: each worker's state is loaded by that worker, and the next one's turn comes next."""
    expected_batches = expected(blend, before + after, first=first)
    states, batches = [{}] * num_workers, []
    for begin, end in ((0, before), (before, before + after)):
        shares, workers = [], []
        for worker in range(num_workers):
            dataset = pickle.loads(pickle.dumps(StreamDataset(blend, 2, cursor=Cursor.start(blend, first))))
            with pytest.MonkeyPatch.context() as patch:
                as_worker(patch, worker, num_workers)
                if begin:
                    dataset.load_state_dict(json.loads(json.dumps(states[worker])))
                shares.append(iter(dataset))
            workers.append(dataset)
        batches += [next(shares[number % num_workers]) for number in range(begin, end)]
        for worker, dataset in enumerate(workers):
            with pytest.MonkeyPatch.context() as patch:
                as_worker(patch, worker, num_workers)
                states[worker] = dataset.state_dict()
        if not begin and not end:
            cursor = Cursor.start(blend, first).to_json()
            assert states == [state(blend, cursor, 2, 1, num_workers, worker) for worker in range(num_workers)]
    assert same(batches, expected_batches)


def test_each_iteration_begins_at_the_cursor(blend: Blend) -> None:
    dataset = StreamDataset(blend, 2, cursor=Cursor.start(blend, 6))
    expected_batches = expected(blend, 4, first=6)
    for _ in range(2):
        assert same(islice(dataset, 3), expected_batches[:3])
        assert dataset.state_dict() == state(blend, expected_batches[2]["cursor"], 2, 1, 0, 0)
    _ = iter(dataset)
    assert dataset.state_dict() == state(blend, Cursor.start(blend, 6).to_json(), 2, 1, 0, 0)
    dataset.load_state_dict(expected_batches[2]["cursor"])
    assert dataset.state_dict() == state(blend, expected_batches[2]["cursor"], 2, 1, 0, 0)
    assert same(islice(dataset, 1), expected_batches[3:])


def test_the_tensors_of_a_batch_share_one_storage(blend: Blend) -> None:
    batch = next(iter(StreamDataset(blend, 3)))
    assert len({batch[name].untyped_storage().data_ptr() for name in ARRAYS}) == 1
    assert batch["tokens"].untyped_storage().nbytes() == HostBatch.num_bytes((3, L))
    assert len(json.dumps(batch["cursor"])) < 1024


def test_a_state_of_another_stream_is_refused(blend: Blend) -> None:
    other = Blend(list(zip(blend.stores, (1, 1))), seq_length=L, seed=5)
    seeded = Blend(list(zip(blend.stores, (2, 1))), seq_length=L, seed=6)
    dataset = StreamDataset(blend, 2)
    with Loader(blend, 2, 1) as loader:
        for target in (dataset, loader):
            with pytest.raises(
                UserError, match=r"the stores or weights are not those of the stream to resume.*\n.*0.5, is 0.6"
            ):
                target.load_state_dict(StreamDataset(other, 2).state_dict())
            with pytest.raises(UserError, match="the stream to resume has seed 6, this one 5"):
                target.load_state_dict(next(iter(StreamDataset(seeded, 2)))["cursor"])
            with pytest.raises(UserError, match="is not a cursor"):
                target.load_state_dict({"epoch": 1})
            geometry = (2, 1, 0, 0) if target is dataset else ()
            assert target.state_dict() == state(blend, Cursor.start(blend).to_json(), *geometry)
        assert same(islice(dataset, 2), expected(blend, 2))
    with pytest.raises(UserError, match="seed"):
        StreamDataset(blend, 2, cursor=Cursor.start(seeded))
    with pytest.raises(UserError, match="dp_rank is a whole number up to 1, not 2"):
        MapDataset(blend, 2, 9, 2, 2)


def test_a_loader_goes_on_at_a_state(blend: Blend) -> None:
    wanted = expected(blend, 9)
    with Loader(blend, 2, 1) as loader:
        for at in (4, 6, 0):  # forwards and back, whatever was made ahead
            loader.load_state_dict(json.loads(json.dumps(wanted[at]["cursor"])))
            for step, out in zip(wanted[at + 1 :], (None, np.empty(HostBatch.num_bytes(loader.shape), np.uint8))):
                assert (loader.next_step(out).tokens[0] == step["tokens"]).all()
                assert loader.state_dict() == state(blend, step["cursor"])


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1}, {"shuffle": True}, {"batch_size": None}])
def test_a_loader_in_a_dataloader_is_one_error_with_the_way_out(blend: Blend, arguments: dict[str, Any]) -> None:
    with Loader(blend, 4, 2, 1, 2) as loader:
        with pytest.raises(UserError, match="a Loader has no length") as caught:
            first_batches(DataLoader(loader, **arguments), 1)
        assert caught.value.hint is not None
        names = {"DataLoader": DataLoader, "datakit": SimpleNamespace(torch=datasets), "blend": blend}
        assert same(first_batches(eval(caught.value.hint, names), 2), expected(blend, 2, (4, 1, 2)))
        assert bool(loader)
        with pytest.raises(TypeError):
            len(loader)
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), TypeError)


def test_numbers_end_where_the_length_says(blend: Blend) -> None:
    dataset = MapDataset(blend, 2, 5)
    assert len(dataset) == len(DataLoader(dataset, batch_size=None)) == 5
    for number in (-1, 5):
        with pytest.raises(IndexError, match=f"micro-batch {number} of 5"):
            dataset[number]
    assert json.dumps(dataset[np.int64(3)]["cursor"]) == json.dumps(expected(blend, 4)[3]["cursor"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataloader_keeps_the_order_and_resumes_with_other_workers(blend: Blend, num_workers: int) -> None:
    wanted = expected(blend, 12, (2, 1, 2))
    before = first_batches(DataLoader(StreamDataset(blend, 2, 1, 2), batch_size=None, num_workers=num_workers), 7)
    resumed = StreamDataset(blend, 2, 1, 2, Cursor.from_json(before[-1]["cursor"]))
    after = first_batches(DataLoader(resumed, batch_size=None, num_workers=2 - num_workers), 5)
    assert same(before + after, wanted)


def test_a_dataloader_over_numbers_resumes_by_its_sampler(blend: Blend) -> None:
    dataset, wanted = MapDataset(blend, 2, 9), expected(blend, 9)
    assert same(first_batches(DataLoader(dataset, batch_size=None, num_workers=2), 10), wanted)
    assert same(DataLoader(dataset, batch_size=None, sampler=range(6, 9)), wanted[6:])


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_persist_begin_each_iteration_at_the_cursor(blend: Blend, start: str) -> None:
    dataset = StreamDataset(blend, 2, cursor=Cursor.start(blend, 4))
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": start}
    batches = DataLoader(dataset, batch_size=None, **options)
    wanted = expected(blend, 5, first=4)
    for num in (3, 5):
        assert same(first_batches(batches, num), wanted[:num])


def test_damage_in_a_worker_is_raised_with_the_name_of_the_file(tmp_path: Path) -> None:
    store = write_store(tmp_path / "a", [range(9)] * 20, vocab_size=99, shard_documents=1)
    index = tmp_path / "a" / "shard-000009-000.idx"
    index.write_bytes(b"X" + index.read_bytes()[1:])
    stream = Blend([(TokenStore.open(store.path), 1)], seq_length=L, seed=1)
    with pytest.raises(CheckFailed, match=index.name):
        first_batches(DataLoader(StreamDataset(stream, 1), batch_size=None, num_workers=1), 40)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("before", [0, 1, 4])
def test_torchdatas_loader_saves_and_resumes(blend: Blend, num_workers: int, before: int) -> None:
    needed = "needs torchdata: pip install torchdata"
    StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader", reason=needed).StatefulDataLoader
    expected_batches = expected(blend, before + 5)
    whole = StatefulDataLoader(StreamDataset(blend, 2), batch_size=None, num_workers=num_workers)
    assert same(first_batches(whole, before), expected_batches[:before]) == bool(before)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = StatefulDataLoader(StreamDataset(blend, 2), batch_size=None, num_workers=num_workers)
    resumed.load_state_dict(state)
    assert same(first_batches(resumed, 5), expected_batches[before:])


def test_without_torch_the_import_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datakit.torch", "datakit.data_loader.datasets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"^datakit.torch needs the package torch, which is not installed\n") as caught:
        import_module("datakit.torch")
    assert caught.value.hint == install("torch", "train")


def test_nothing_else_of_datakit_brings_torch() -> None:
    program = "import sys; from datakit import *; print('torch' in sys.modules, 'datakit.torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"]


LOOP = """
import json, os, sys
from datakit import BatchOptions, Blend, TokenStore
from datakit.torch import StreamDataset
from torch.utils.data import DataLoader

folder, num_workers = sys.argv[1], int(sys.argv[2])
blend = Blend([(TokenStore.open(f"{folder}/a"), 2), (TokenStore.open(f"{folder}/b"), 1)], seq_length=8, seed=5)
dataset = StreamDataset(blend, 2)
if os.path.exists(f"{folder}/cursor.json"):
    with open(f"{folder}/cursor.json") as file:
        dataset.load_state_dict(json.load(file))
for batch in DataLoader(dataset, batch_size=None, num_workers=num_workers):
    with open(f"{folder}/next.json", "w") as file:
        json.dump(batch["cursor"], file)
    print(batch["cursor"]["num_samples"], batch["tokens"].tolist(), flush=True)  # the step, and its loss
    os.replace(f"{folder}/next.json", f"{folder}/cursor.json")
"""


@pytest.mark.slow
def test_a_killed_loop_goes_on_with_the_exact_remaining_stream(tmp_path: Path) -> None:
    """Killed by SIGKILL with 2 workers at work, again with 1 and with 3: what was not saved is read again."""
    for name, size in (("a", 700), ("b", 300)):
        write_store(tmp_path / name, [np.random.default_rng(size).integers(0, 99, size)], vocab_size=99)
    stream = Blend([(TokenStore.open(tmp_path / name), 2 - (name == "b")) for name in "ab"], seq_length=L, seed=5)
    reads: dict[int, str] = {}
    for num_workers, num_lines in ((2, 9), (1, 4), (3, 7)):
        saved = tmp_path / "cursor.json"
        begin = json.loads(saved.read_text())["num_samples"] if saved.exists() else 0
        loop = subprocess.Popen(
            [sys.executable, "-c", LOOP, tmp_path, str(num_workers)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert loop.stdout is not None
        lines = [loop.stdout.readline() for _ in range(num_lines)]
        loop.send_signal(signal.SIGKILL)
        lines += loop.communicate(timeout=60)[0].splitlines(keepends=True)  # ends once the workers have ended too
        for number, line in enumerate(lines, 1):
            samples, _, tokens = line.partition(" ")
            assert int(samples) == begin + 2 * number
            assert reads.setdefault(int(samples), tokens) == tokens
    assert sorted(reads) == list(range(2, 2 * len(reads) + 1, 2))
    assert len(reads) >= 18
    for samples, tokens in reads.items():
        assert json.loads(tokens) == stream.batch([samples - 2, samples - 1]).tokens.tolist()
