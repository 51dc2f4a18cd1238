"""Every way to have a store's bytes with every way to cut its rows, against readers of the format pages and goldens.

The second readers here are docs/formats/token-store.md and packing-index.md in numpy, and megatron-core's GPTDataset
for one store; goldens are the streams of the release before a store was composed.
"""

import ast
import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import datakit
from datakit import (
    BatchOptions,
    Blend,
    Cursor,
    HostBatch,
    Loader,
    MegatronBlend,
    MegatronOrder,
    PackedRemoteStore,
    PackedStore,
    Packing,
    RemoteStore,
    Segment,
    TokenStore,
    archive,
    blame,
    pack,
    where,
    write_store,
)
from tests.datakit.rows.test_packing_format import compact
from tests.datakit.support.small_blocks import cut_blocks
from tests.datakit.test_token_store_format import permuted
from threefold.errors import CheckFailed, UserError

L = 16
PLACES = ("mapped", "opened", "cached", "archive")
ROWS = ("concat", "best_fit", "pad", "megatron")
GOLDEN = json.loads(Path(__file__).with_name("golden_streams.json").read_text())


def documents(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 299, size) for size in (0, 300, 1, *rng.integers(0, 90, 200), 0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores a and b with indices of their rows, and archives of them."""
    folder = tmp_path_factory.mktemp("stores")
    for number, name in enumerate("ab"):
        write_store(folder / name, documents(3 + number), vocab_size=300, eod_id=299, shard_documents=40 + number)
        for packing in ("best_fit", "pad"):
            for length in (L, 2 * L):
                pack(folder / name, seq_length=length, packing=packing)
        archive(folder / name, f"file://{folder}/{name}.archive")
        for packing in ("best_fit", "pad"):  # of the other length; that of L is named where the archive is opened
            index = f"packing-{packing}-{2 * L}"
            shutil.copytree(folder / name / index, folder / f"{name}.archive" / index)
    return folder


@pytest.fixture
def opened(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TokenStore]:
    """Return what opens one of the stores by its place and rows."""
    cut_blocks(monkeypatch, 512)

    def open_store(name: str, place: str, rows: str) -> TokenStore:
        packing = None
        if rows in ("best_fit", "pad"):
            index = str(folder / name / f"packing-{rows}-{L}") if place == "archive" else None
            packing = Packing(rows, L, index)
        if place in ("mapped", "opened"):
            return TokenStore.open(folder / name, reading="mmap" if place == "mapped" else "pread", rows=packing)
        url = f"file://{folder}/{name}" + ".archive" * (place == "archive")
        return TokenStore.open(url, cache=tmp_path / "cache", cache_mib=64, rows=packing)

    return open_store


def stream(store: TokenStore, rows: str) -> Blend:
    """Return the stream of one store, two epochs of which are read, or of Megatron's order one."""
    if rows == "megatron":
        return MegatronBlend([store], seq_length=L, seed=7, order=MegatronOrder(500))
    return Blend([(store, 1.0)], seq_length=L, seed=7)


def expected_rows(folder: Path, rows: str) -> list[list[tuple[int, int, bool]]]:
    """Return the pieces of each sample of store a: first token, number, and whether the token after is a label."""
    lengths = [len(document) for document in documents(3)]
    starts = np.cumsum(lengths) - lengths
    manifest = json.loads((folder / "a" / "manifest.json").read_bytes())
    if rows == "megatron":
        random = np.random.RandomState(7)
        order, num_rows = np.arange(len(lengths), dtype=np.int32), (sum(lengths) - 1) // L
        random.shuffle(order)
        row_order = np.arange(num_rows, dtype=np.uint32)
        random.shuffle(row_order)
        addresses = np.concatenate([starts[number] + np.arange(lengths[number]) for number in order])
        return [
            [(int(token), 1, False) for token in addresses[row * L : row * L + L + 1]] for row in row_order.tolist()
        ]
    if rows == "concat":
        name, num_rows = manifest["fingerprint"], (sum(lengths) - 1) // L
        pieces = [[(row * L, L, True)] for row in range(num_rows)]
    else:
        index = folder / "a" / f"packing-{rows}-{L}"
        record = json.loads((index / "packing.json").read_bytes())
        sums = [record["files"][column]["xxh3_64"] for column in ("ends", "starts", "sizes")]
        name = xxhash.xxh3_128_hexdigest(compact([record["store"], record["packing"], L, sums]))
        ends, firsts = (np.fromfile(index / f"{column}.bin", "<i8") for column in ("ends", "starts"))
        sizes = np.fromfile(index / "sizes.bin", "<i4")
        found = [(int(first), abs(int(size)), bool(size < 0)) for first, size in zip(firsts, sizes, strict=True)]
        num_rows, begins = record["num_rows"], [0, *ends[:-1].tolist()]
        pieces = [found[begin:end] for begin, end in zip(begins, ends.tolist(), strict=True)]
    keys = [f"7/{name}/{k // num_rows}".encode() for k in range(2 * num_rows)]
    return [pieces[permuted(k % num_rows, num_rows, key)] for k, key in enumerate(keys)]


def all_of(batch: HostBatch) -> list[Any]:
    return [getattr(batch, name) for name in ("tokens", "labels", "positions", "loss_mask")]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("place", PLACES)
def test_each_product_reads_what_the_pages_say(
    folder: Path, opened: Callable[..., TokenStore], place: str, rows: str
) -> None:
    store = opened("a", place, rows)
    blend, expected = stream(store, rows), expected_rows(folder, rows)
    tokens = np.concatenate(documents(3))
    samples = np.arange(len(expected))[:: max(1, len(expected) // 150)]
    batch = blend.batch(samples)
    for k, row in zip(samples.tolist(), range(len(samples)), strict=True):
        pieces = expected[k]
        read = np.concatenate([tokens[first : first + size] for first, size, _ in pieces])
        assert batch.tokens[row][: min(L, len(read))].tolist() == read[:L].tolist()
        after = np.concatenate([tokens[first + 1 : first + size + goes_on] for first, size, goes_on in pieces])
        if rows in ("concat", "megatron"):
            assert batch.labels[row].tolist() == (after if rows == "concat" else read[1:]).tolist()
        else:
            assert batch.labels[row][batch.loss_mask[row] > 0].tolist() == after.tolist()
    # which documents these are, and back
    passages = blame(blend, samples)
    for (_, _, document, start, stop), origin in islice(zip(passages.rows(), passages.origins(blend), strict=True), 40):
        assert store.document(document)[start:stop].tolist() == documents(3)[document][start:stop].tolist()
        assert origin == store.origin(document)
    num_samples = min(len(expected), 300)
    document = passages.rows()[7][2]
    inverse = where(blend, 0, document, num_samples).rows()
    assert inverse == [row for row in blame(blend, np.arange(num_samples)).rows() if row[2] == document]
    # it goes on at a cursor, and pickled elsewhere
    with Loader(blend, 3, 2, 1, 2) as loader:
        assert (
            loader.next_step().tokens.tolist()
            == blend.batch(loader.samples(0).ravel()).tokens.reshape(2, 3, L).tolist()
        )
        again, state = pickle.loads(pickle.dumps(loader)), json.loads(json.dumps(loader.state_dict()))
        with (
            Loader(stream(pickle.loads(pickle.dumps(store)), rows), 3, 2, 1, 2, Cursor.from_json(state)) as other,
            again,
        ):
            for _ in range(3):
                steps = [each.next_step() for each in (loader, again, other)]
                assert all(np.array_equal(*pair) for pair in zip(all_of(steps[0]), all_of(steps[1]), strict=True))
                assert all(np.array_equal(*pair) for pair in zip(all_of(steps[0]), all_of(steps[2]), strict=True))
    assert store.cache is None or store.cache.bytes_added > 0


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("place", PLACES)
def test_each_product_is_read_by_a_data_loader(opened: Callable[..., TokenStore], place: str, rows: str) -> None:
    torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[train]"')
    blend = stream(opened("a", place, rows), rows)
    dataset = import_module("datakit.torch").StreamDataset(blend, 4)
    batches = list(islice(torch.utils.data.DataLoader(dataset, batch_size=None), 5))
    for number, batch in enumerate(batches):
        assert batch["tokens"].tolist() == blend.batch(np.arange(4 * number, 4 * number + 4)).tokens.tolist()


def digest(*arrays: Any) -> str:
    total = hashlib.md5()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
        total.update(str(array.dtype).encode())
    return total.hexdigest()[:12]


def blend_of_two(stores: list[TokenStore], rows: str) -> Blend:
    """Return a stream of both stores, whose weights, masks, skips and lengths change."""
    if rows == "megatron":
        return MegatronBlend(stores, [1.0, 2.0], seq_length=L, seed=7, order=MegatronOrder(900, (9, 1)))
    later = [
        Segment(100, (2.0, 1.0), masked=((0, 1), (1, 7))),
        Segment(180, skip=((200, 230),)),
        Segment(240, seq_length=2 * L),
    ]
    blocks = 4 * L if rows == "blocks" else 0
    return Blend([(stores[0], 1.0), (stores[1], 3.0)], seq_length=L, seed=7, later=later, block_tokens=blocks)


def facts(blend: Blend) -> dict[str, str]:
    """Return digests of all that a stream promises to keep."""
    parts = []
    for first, stop in ((0, 100), (100, 240), (240, 600)) if len(blend.sources.lengths) > 1 else (
        (0, 100), (100, 200), (240, 340),
    ):  # fmt: skip
        parts += all_of(blend.batch(np.arange(first, stop), BatchOptions(reset_positions=True, mask_eod_loss=True)))
    passages, samples = blame(blend, np.arange(600)), np.arange(600)
    origins = np.array([[origin.line, origin.offset_bytes] for origin in passages.origins(blend)], np.int64)
    reported = [
        np.array(where(blend, source, k, 600).rows(), np.int64)
        for source in range(len(blend.stores))
        for k in (1, 7, 40)
    ]
    record = blend.record.to_json()
    for source in record["sources"]:
        source["path"] = source["path"].rsplit("/", 1)[-1].removesuffix(".archive")
    with Loader(blend, 3, 2, 1, 2, Cursor.start(blend, 96)) as loader:
        steps = [loader.next_step().tokens for _ in range(4)]
        cursor = json.dumps(loader.cursor.to_json(), sort_keys=True)
    return {
        "batches": digest(*parts),
        "order": digest(*blend.addresses(samples)),
        "blame": digest(np.array(passages.rows(), np.int64)),
        "origins": digest(origins),
        "where": digest(*reported),
        "record": hashlib.md5(json.dumps(record, sort_keys=True).encode()).hexdigest()[:12],
        "steps": digest(*steps),
        "cursor": cursor,
    }


@pytest.mark.parametrize("rows", GOLDEN)
@pytest.mark.parametrize("place", PLACES)
def test_each_stream_is_bit_for_bit_that_of_the_release_before(
    opened: Callable[..., TokenStore], place: str, rows: str
) -> None:
    assert facts(blend_of_two([opened(name, place, rows) for name in "ab"], rows)) == GOLDEN[rows]


def test_a_store_is_one_class_and_nobody_asks_which_it_is() -> None:
    assert not TokenStore.__subclasses__()
    asked = []
    for path in Path(datakit.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                asked += [f"{path.name}: {name}" for name in names if name.endswith(("Store", "Shards", "Rows"))]
    assert {name for name in asked if not name.endswith("ScannedShards")} == set()  # a list of entries


@pytest.mark.parametrize("rows", ["concat", "best_fit"])
@pytest.mark.parametrize("place", ["mapped", "cached"])
def test_older_names_answer_for_what_a_store_is(opened: Callable[..., TokenStore], place: str, rows: str) -> None:
    store = opened("a", place, rows)
    assert isinstance(store, RemoteStore) == (place == "cached")
    assert isinstance(store, PackedStore) == (rows == "best_fit")
    assert isinstance(store, PackedRemoteStore) == (place == "cached" and rows == "best_fit")
    assert not isinstance("store", RemoteStore)


def test_older_class_methods_open_the_same(folder: Path, opened: Callable[..., TokenStore], tmp_path: Path) -> None:
    place: dict[str, Any] = {"cache": str(tmp_path / "cache"), "cache_mib": 64}
    rows: dict[str, Any] = {"packing": "best_fit", "seq_length": L}
    url = f"file://{folder}/a"
    passages = [
        RemoteStore.at(url, **place), PackedStore.of(folder / "a", **rows),
        PackedStore.of(folder / "a", **rows, index=folder / "a" / f"packing-best_fit-{L}", reading="pread"),
        PackedRemoteStore.packed_at(url, **rows, **place),
    ]  # fmt: skip
    expected = [opened("a", "cached", "concat"), *[opened("a", "mapped", "best_fit")] * 3]
    assert [store.fingerprint for store in passages] == [store.fingerprint for store in expected]
    assert [store.is_mapped for store in passages] == [False, True, False, False]


def test_pickles_of_the_release_before_are_read(folder: Path, tmp_path: Path) -> None:
    """They name a function of a module and what it is called with."""
    store, packed = TokenStore.open(folder / "a"), TokenStore.open(folder / "a", rows=Packing("best_fit", L))
    place = {"cache": str(tmp_path / "cache"), "cache_mib": 64}
    index = str(folder / "a" / f"packing-best_fit-{L}")
    rows: dict[str, Any] = {"packing": "best_fit", "seq_length": L, "index": index}
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], TokenStore]] = [
        ("store.token_store", (str(folder / "a"), store.fingerprint, "pread"), {}, store),
        ("packing.packed_store", (str(folder / "a"), index, "best_fit", L, packed.fingerprint, "mmap"), {}, packed),
        ("remote.remote_store", (f"file://{folder}/a", store.fingerprint), place, store),
        (
            "remote.packed_remote_store",
            (f"file://{folder}/a", packed.fingerprint),
            place | rows | {"index": index},
            packed,
        ),
    ]
    for module, values, named, expected in calls:
        reopen = import_module(f"datakit.{module}")._reopen
        found = reopen(*values, **named)
        assert (found.fingerprint, found.packing) == (expected.fingerprint, expected.packing)
        others = tuple("0" * 32 if value == expected.fingerprint else value for value in values)
        with pytest.raises(CheckFailed, match=f"{folder}/a is not the store that was pickled"):
            reopen(*others, **named)


def test_what_is_another_store_or_index_by_now_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_store(path, documents(3), vocab_size=300)
    folder, _ = pack(path, seq_length=L)
    content = pickle.dumps(TokenStore.open(path, rows=Packing("best_fit", L)))
    shutil.rmtree(folder)
    pack(path, seq_length=L, window_documents=20)
    with pytest.raises(UserError, match=f"{folder} is not the index that was pickled"):
        pickle.loads(content)
    shutil.rmtree(path)
    write_store(path, documents(4), vocab_size=300)
    with pytest.raises(CheckFailed, match=f"{path} is not the store that was pickled: its fingerprint is"):
        pickle.loads(content)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"cache": "cache"}, "a is a folder, which is read without a cache"),
        ({"cache_mib": 64}, "a is a folder, which is read without a cache"),
        ({"url": True}, "no cache is named"),
        ({"url": True, "cache": "cache", "reading": "pread"}, "reading 'pread' is of stores in folders"),
        ({"rows": Packing("best_fit", L, "s3://bucket/index")}, "the store .*a has none"),
    ],
)
def test_what_has_no_effect_is_refused(folder: Path, named: dict[str, Any], message: str) -> None:
    place = f"file://{folder}/a" if named.pop("url", False) else folder / "a"
    with pytest.raises(UserError, match=message) as caught:
        TokenStore.open(place, **named)
    assert caught.value.hint
