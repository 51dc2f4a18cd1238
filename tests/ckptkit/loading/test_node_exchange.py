"""Ranks of a node, real processes: each byte is read once, results are those of a restore alone, and no fault hangs."""

import json
import os
import re
import socket
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptkit.loading.exchange import agreed
from ckptkit.loading.node_exchange import NodeExchange
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.fallback import restore_newest
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.exchange_program import BIG
from tests.ckptkit.support.model_tables import values
from tests.ckptkit.support.saves import ROOT, SMALL, assert_restored, pieces_of, save_whole
from threefold.errors import CheckFailed, StorageError
from threefold.storage import open_storage

NUM_BYTES = sum(info.size_bytes for info in BIG)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exchange")
    write_checkpoint(open_storage(folder), 1, ParallelLayout(tp=2, dp=2), 3, BIG, values(BIG))
    return folder


def start(run: Path, options: list[list[str]]) -> list[dict[str, Any]]:
    """Start a rank for each list of options; what the ranks that lived told, in the order of ranks."""
    job = uuid.uuid4().hex
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ckptkit.support.exchange_program", str(run), "1", str(rank),
             str(len(options)), job, *given],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )
        for rank, given in enumerate(options)
    ]  # fmt: skip
    try:
        return [
            json.loads(process.communicate(timeout=100)[0])
            for process, given in zip(processes, options, strict=True)
            if "--then" not in given
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.ci
@pytest.mark.parametrize(
    "layouts",
    [
        ["tp1", "tp1", "tp1"],
        pytest.param(["tp2:0", "tp2:1", "", "tp2:0", "tp2:1"], marks=pytest.mark.slow),
        pytest.param(["pp3:0", "tp1", "tp4:2", "dp3:1"], marks=pytest.mark.slow),
    ],
    ids=["replicas", "replicas of another layout and one that wants nothing", "any"],
)
def test_each_byte_is_read_once_and_results_are_equal(run: Path, layouts: list[str]) -> None:
    options = []
    for text in layouts:
        layout, _, rank = text.partition(":")
        options.append(["--layout", layout, "--as-rank", rank or "0"] if layout else [])
    told = start(run, options)
    assert [each.get("error") for each in told] == [None] * len(layouts)
    assert all(each["same"] for each in told)
    assert NUM_BYTES <= sum(each["read"] for each in told) <= 1.05 * NUM_BYTES
    assert len({layout for layout in layouts if layout}) > 1 or max(each["read"] for each in told) < NUM_BYTES / 2


@pytest.mark.ci
@pytest.mark.slow
def test_damage_that_one_rank_reads_is_told_to_all(run: Path) -> None:
    path = next(run.rglob("part-00002.safetensors"))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        told = start(run, [["--layout", "tp1"]] * 3)
    finally:
        path.write_bytes(content)
    assert len({each["error"] for each in told}) == 1
    assert {each["kind"] for each in told} == {"CheckFailed"}
    assert f"{path} is damaged between bytes " in told[0]["error"]
    assert "weight is stored" in told[0]["error"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("then", "message"),
    [
        ("die", "rank 1 of 3 is gone"),
        pytest.param("freeze", "nothing came within 4 s from rank 1 of 3", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone_is_named_by_all_others(run: Path, then: str, message: str) -> None:
    told = start(run, [["--layout", "tp1", "--deadline", "4", *(["--then", then] if r == 1 else [])] for r in range(3)])
    assert [each["rank"] for each in told] == [0, 2]
    assert all(message in each["error"] for each in told)
    assert {each["kind"] for each in told} == {"StorageError"}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("FSIZE=65536", "rank 1 has no memory for [0-9]+ bytes: File too large"),
        pytest.param("NOFILE=6", r"rank 1 may have no 3 more files open \(ulimit -n\)", marks=pytest.mark.slow),
    ],
)
def test_what_one_rank_lacks_is_told_to_all_at_once(run: Path, limit: str, message: str) -> None:
    given = ["--layout", "tp1", "--deadline", "300"]  # longer than the test may take
    told = start(run, [[*given, *(["--limit", limit] if rank == 1 else [])] for rank in range(3)])
    assert all(re.search(message, each["error"]) for each in told), told
    assert {each["kind"] for each in told} == {"StorageError"}


def together(size: int, work: Any, deadline_s: float = 20.0) -> list[Any]:
    """Call work(exchange) for each rank, one thread each; the results, errors among them."""
    job = uuid.uuid4().hex

    def one(rank: int) -> Any:
        try:
            with NodeExchange(rank, size, job, deadline_s=deadline_s) as exchange:
                return work(exchange)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_collectives_of_any_size_again_and_again() -> None:
    def work(exchange: NodeExchange) -> bool:
        for number in (3, 0, 100_000, 7):
            gathered = exchange.all_gather(bytes([exchange.rank]) * number * exchange.rank)
            assert gathered == [bytes([rank]) * number * rank for rank in range(4)]
            got = exchange.all_to_all([bytes([exchange.rank, to]) * number * to for to in range(4)])
            assert [bytes(each) for each in got] == [
                bytes([r, exchange.rank]) * number * exchange.rank for r in range(4)
            ]
        return True

    assert together(4, work) == [True] * 4


def test_an_error_of_one_rank_is_raised_by_all_and_the_exchange_goes_on() -> None:
    def work(exchange: NodeExchange) -> list[bytes]:
        def fail() -> bytes:
            if exchange.rank == 2:
                raise CheckFailed("a file is damaged", hint="look")
            return b"fine"

        with pytest.raises(CheckFailed, match="a file is damaged") as caught:
            agreed(exchange, fail)
        assert caught.value.hint == "look"
        return agreed(exchange, lambda: b"again")

    assert together(3, work) == [[b"again"] * 3] * 3


def test_a_fault_of_ours_keeps_its_type_where_it_happened() -> None:
    def work(exchange: NodeExchange) -> object:
        return agreed(exchange, lambda: {}["x"] if exchange.rank else b"")  # type: ignore[return-value]

    first, second = together(2, work)
    assert isinstance(first, StorageError)
    assert "rank 1 of 2 failed: KeyError" in first.message
    assert isinstance(second, KeyError)


def test_all_ranks_fall_back_together_past_what_one_of_them_finds(tmp_path: Path) -> None:
    for step in (1, 2):
        assert save_whole(tmp_path, step, SMALL, scale=step).ok
    data = next((tmp_path / "step-000000002").rglob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1  # of the one granule there is, which one of the ranks reads for all
    data.write_bytes(content)

    def work(exchange: NodeExchange) -> tuple[int, list[str]]:
        pieces, told = pieces_of(SMALL, ParallelLayout(), 0), list[str]()
        root = restore_newest(
            str(tmp_path), pieces, tensors=SMALL, exchange=exchange, report=told.append, sets_aside=False
        )
        assert_restored(pieces, pieces_of(SMALL, ParallelLayout(), 0, values(SMALL)))
        return root.step, [line.rpartition("; ")[2] for line in told]

    assert together(3, work) == [(1, ["falling back from step 2 to step 1"]), (1, []), (1, [])]


def test_ranks_that_never_come_are_named() -> None:
    job = uuid.uuid4().hex
    with pytest.raises(StorageError, match=r"nothing came within 0.3 s from ranks 1, 2 of 3"):
        NodeExchange(0, 3, job, deadline_s=0.3)
    with pytest.raises(StorageError, match=r"nothing came within 0.3 s from rank 0 of 3"):
        NodeExchange(1, 3, job, deadline_s=0.3)


def test_a_socket_that_another_user_holds_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    job, user = uuid.uuid4().hex, os.getuid()
    monkeypatch.setattr("os.getuid", lambda: user + 1)
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(f"\0threefold-{user + 1}-{job}")
        held.listen()
        with pytest.raises(StorageError, match=f"a process of user {user} holds the socket @threefold-{user + 1}"):
            NodeExchange(1, 2, job, deadline_s=1.0)


def test_two_jobs_of_one_name_are_refused() -> None:
    job = uuid.uuid4().hex
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(f"\0threefold-{os.getuid()}-{job}")
        with pytest.raises(StorageError, match=f"another process of this host holds the socket @threefold-.*{job}"):
            NodeExchange(0, 2, job, deadline_s=1.0)
