"""A real S3 server that refuses, breaks off or never answers, in every phase of a save and a restore."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from ckptkit.format.keys import ROOT_KEY
from ckptkit.handoff.report import SaveReport
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from tests.ckptkit.support.model_tables import gpt_tensors
from tests.ckptkit.support.saves import SMALL, newest_good, save_one, save_whole, wait_until
from threefold.errors import StorageError
from threefold.storage import AlreadyExists, open_storage
from threefold.storage.object_store import PART_BYTES
from tools.fault_proxy import Fault, FaultProxy

pytestmark = pytest.mark.timeout(120)  # where a deadline is missing
LARGE = gpt_tensors(hidden=128, ffn=256, vocab=8000, dtype="F32")  # goes up in several parts


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage clients give up within seconds."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "2")


@pytest.fixture
def checkpointer(s3_proxy: FaultProxy, s3_url: str) -> Iterator[Checkpointer]:
    """Of a run on S3 that holds step 1."""
    with Checkpointer(s3_url, attempt="a", options=CheckpointerOptions(retry_s=3.0)) as checkpointer:
        save_one(checkpointer, 1, SMALL)
        assert checkpointer.wait()[0].ok
        yield checkpointer


PASSING = [
    Fault("409", method="PUT", target="root.json", times=1),
    Fault("drop", method="PUT", target=".safetensors", after_bytes=50_000, times=1),
]
SLOWLY_PASSING = [
    Fault("reset", method="PUT", target="root.json"),  # stored at once, and no acknowledgement ever comes
    *(Fault(kind, method="PUT", target="root.json", times=1) for kind in ("412", "drop", "reset", "cut", "503")),
    *(Fault(kind, method="PUT", target=".safetensors", times=1) for kind in ("reset", "cut", "503")),
    *(Fault(kind, method="GET", times=1) for kind in ("reset", "503", "drop")),
    *(Fault(kind, method="HEAD", times=1) for kind in ("reset", "503")),
]
LASTING = [
    Fault("412", method="PUT", target="root.json"),
]
SLOWLY_LASTING = [
    Fault("stall", method="PUT", target=".safetensors"),
    *(Fault(kind, method="PUT", target="root.json") for kind in ("drop", "409", "503")),
    *(Fault(kind, method="PUT", target=".safetensors") for kind in ("reset", "503")),
    Fault("drop", method="PUT", target=".safetensors", after_bytes=50_000),
    *(Fault(kind, method="GET") for kind in ("reset", "503", "stall")),
]


def _faults(fast: Iterable[Fault], slow: Iterable[Fault]) -> list[Any]:
    """Faults as parameters with readable names."""

    def name(fault: Fault) -> str:
        times = "once" if fault.times else "always"
        return "-".join(filter(None, [fault.kind, fault.method, fault.target, times]))

    return [
        *(pytest.param(fault, id=name(fault)) for fault in fast),
        *(pytest.param(fault, id=name(fault), marks=pytest.mark.slow) for fault in slow),
    ]


def saved_under(fault: Fault, proxy: FaultProxy, checkpointer: Checkpointer) -> SaveReport:
    """Save step 2 under a fault, which is then over."""
    proxy.fault = fault
    save_one(checkpointer, 2, SMALL, scale=2)
    report = checkpointer.wait()[0]
    proxy.fault = Fault()
    return report


@pytest.mark.parametrize("fault", _faults(PASSING, SLOWLY_PASSING))
def test_a_fault_that_passes_costs_no_save(
    s3_proxy: FaultProxy, s3_url: str, checkpointer: Checkpointer, fault: Fault
) -> None:
    report = saved_under(fault, s3_proxy, checkpointer)
    assert s3_proxy.num_faults
    assert report.ok, report.error
    assert newest_good(s3_url, SMALL) == 2


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("fault", _faults(LASTING, SLOWLY_LASTING))
def test_a_fault_that_lasts_costs_one_save(
    s3_proxy: FaultProxy, s3_url: str, checkpointer: Checkpointer, fault: Fault
) -> None:
    report = saved_under(fault, s3_proxy, checkpointer)
    assert not report.ok
    assert f"127.0.0.1:{s3_proxy.port}" in report.error
    assert newest_good(s3_url, SMALL) == 1
    for step in (2, 3):
        save_one(checkpointer, step, SMALL, scale=step)
        assert checkpointer.wait()[0].ok
        assert newest_good(s3_url, SMALL) == step


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.usefixtures("_impatient")
def test_a_server_that_goes_away_costs_one_save(s3_proxy: FaultProxy, s3_url: str, checkpointer: Checkpointer) -> None:
    s3_proxy.__exit__(None, None, None)  # connections are refused
    save_one(checkpointer, 2, SMALL, scale=2)
    report = checkpointer.wait()[0]
    s3_proxy.__enter__()
    assert not report.ok
    assert f"127.0.0.1:{s3_proxy.port}" in report.error
    assert newest_good(s3_url, SMALL) == 1
    save_one(checkpointer, 2, SMALL, scale=2)
    assert checkpointer.wait()[0].ok
    assert newest_good(s3_url, SMALL) == 2


@pytest.mark.slow
def test_a_storm_of_refusals_that_passes_costs_no_save(
    s3_proxy: FaultProxy, s3_url: str, checkpointer: Checkpointer
) -> None:
    s3_proxy.fault = Fault("503")

    def clear() -> None:
        s3_proxy.fault = Fault()

    end = threading.Timer(3.0, clear)
    end.start()
    save_one(checkpointer, 2, SMALL, scale=2)
    report = checkpointer.wait()[0]
    end.join()
    assert s3_proxy.num_faults >= 3
    assert report.ok, report.error
    assert newest_good(s3_url, SMALL) == 2


@pytest.mark.parametrize("kind", ["409", "412"])
def test_a_refused_root_is_ours_only_if_its_bytes_are(s3_proxy: FaultProxy, s3_url: str, kind: str) -> None:
    storage = open_storage(s3_url)
    storage.write(ROOT_KEY, b"one", if_absent=True)
    for times in (1, None):
        s3_proxy.fault = Fault(kind, method="PUT", target=ROOT_KEY, times=times)
        storage.write(ROOT_KEY, b"one", if_absent=True)
        with pytest.raises(AlreadyExists, match="another writer won"):
            storage.write(ROOT_KEY, b"other", if_absent=True)
    assert storage.read(ROOT_KEY) == b"one"


@pytest.mark.usefixtures("_impatient")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reset", "cut", "stall", "503"])
def test_a_restore_from_a_server_that_fails_is_an_error_and_no_damage(
    s3_proxy: FaultProxy, s3_url: str, kind: str
) -> None:
    """Nothing is taken for lost because a server is ill: the newest step is not passed over."""
    for step in (1, 2):
        assert save_whole(s3_url, step, SMALL, scale=step).ok
    s3_proxy.fault = Fault(kind, method="GET", target=".safetensors", after_bytes=1000)
    with pytest.raises(StorageError, match=f"part-00000.safetensors: .*127.0.0.1:{s3_proxy.port}"):
        newest_good(s3_url, SMALL)
    s3_proxy.fault = Fault()
    assert newest_good(s3_url, SMALL) == 2


@pytest.mark.slow
@pytest.mark.parametrize("then", [pytest.param("killed", marks=pytest.mark.ci), "fails"])
def test_a_stuck_upload_of_parts_costs_one_save(
    s3_proxy: FaultProxy, s3_url: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed writer leaves of an upload is no object, and in nobody's way."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "6")  # time enough for a part
    assert sum(info.size_bytes for info in LARGE) > PART_BYTES
    with Checkpointer(s3_url, attempt="a", options=CheckpointerOptions(retry_s=3.0)) as checkpointer:
        save_one(checkpointer, 1, SMALL)
        assert checkpointer.wait()[0].ok
        s3_proxy.fault = Fault("stall", method="PUT", target="partNumber=2")
        save_one(checkpointer, 2, LARGE, scale=2)
        if then == "killed":
            wait_until(lambda: s3_proxy.num_faults > 0)
            os.kill(checkpointer.writer_pid, signal.SIGKILL)
        report = checkpointer.wait()[0]
        s3_proxy.fault = Fault()
        assert not report.ok
        assert ("killed by SIGKILL" if then == "killed" else "part-00000.safetensors") in report.error
        storage = open_storage(s3_url)
        assert [item.key for item in storage.list("step-000000002/")] == []
        assert newest_good(s3_url, SMALL) == 1
        save_one(checkpointer, 2, LARGE, scale=2)
        assert checkpointer.wait()[0].ok
    assert newest_good(s3_url, LARGE) == 2
