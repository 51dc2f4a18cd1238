"""What keeps launchers from meeting is one sentence with the host, the address and what to try."""

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.run import get_args_parser

from trainer.job.launch_faults import FailedLaunch
from trainer.job.launcher import parse
from trainer.job.meeting import Meeting

HOST = socket.gethostname()


def meeting(endpoint: str, backend: str = "c10d", *more: str) -> Meeting:
    where = [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}"]
    return Meeting.of(parse([*where, "--nnodes=2", "--rdzv-id=job", *more, "train"], ["train"]))


def missed(error: Exception, endpoint: str, backend: str = "c10d") -> tuple[str, str]:
    return sentence(meeting(endpoint, backend).fault(error, 4.2))


def sentence(failed: FailedLaunch) -> tuple[str, str]:
    assert failed.exit_code == 3
    assert failed.message.startswith(f"the launcher on {HOST}: ")
    return failed.message.partition(": ")[2], str(failed.hint)


def lost(cause: str) -> RendezvousConnectionError:
    error = RendezvousConnectionError("The connection to the C10d store has failed.")
    error.__cause__ = RuntimeError(f"{cause}\nException raised from ... (frames)")
    return error


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    ("backend", "flag"), [("c10d", "--rdzv-endpoint HOST:29500"), ("static", "--master-addr HOST")]
)
def test_a_name_without_an_address(backend: str, flag: str) -> None:
    said, hint = missed(lost("timed out"), "nowhere.invalid:29500", backend)
    assert said.startswith("nowhere.invalid has no address: ")
    assert hint.startswith("getent hosts nowhere.invalid; ")
    assert flag in hint


def test_a_port_of_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said, hint = missed(lost("no answer"), f"127.0.0.1:{port}")
    assert said == f"port {port} of 127.0.0.1 is in use by another program"
    assert hint.startswith(f"--rdzv-endpoint 127.0.0.1:{port % 65535 + 1} on all nodes; ss -ltnp 'sport = :{port}'")


def test_nobody_at_the_address(closed_port: int) -> None:
    said, hint = missed(lost("[c10d] Connection refused"), f"127.0.0.1:{closed_port}")
    assert said == f"nobody answers at 127.0.0.1:{closed_port} any more, or yet: Connection refused"
    assert hint.endswith(f"nc -vz 127.0.0.1 {closed_port}")


@pytest.mark.parametrize("error", [RendezvousTimeoutError(), lost("Timed out. 1/2 clients joined.")])
def test_launchers_that_do_not_come(error: Exception, closed_port: int) -> None:
    said, hint = missed(error, f"127.0.0.1:{closed_port}")
    assert said == f"not all of the 2 nodes came to 127.0.0.1:{closed_port} within 4 s"
    assert "--rdzv-conf join_timeout=1800" in hint


def test_a_job_that_is_over_and_an_endpoint_without_a_port() -> None:
    assert missed(RendezvousClosedError(), "localhost")[0] == "the job 'job' at localhost:29400 is over"


@pytest.mark.slow
@pytest.mark.ci
def test_a_program_that_never_answers_is_found_before_torch_waits_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        with pytest.raises(FailedLaunch) as raised:
            meeting(f"127.0.0.1:{port}", "c10d", "--rdzv-conf=read_timeout=1").check()
    assert sentence(raised.value)[0] == f"port {port} of 127.0.0.1 is in use by another program"


def test_a_place_where_the_first_launcher_is_or_nobody_yet_is_none_of_these(closed_port: int) -> None:
    meeting(f"127.0.0.1:{closed_port}").check()
    store = TCPStore("127.0.0.1", closed_port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9))
    meeting(f"127.0.0.1:{closed_port}").check()
    del store


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        (["--nproc-per-node=2"], f"127.0.0.1:{get_args_parser().get_default('master_port') or 0}"),
        (["--standalone"], "127.0.0.1:0"),
        (["--nnodes=2"], "127.0.0.1:29500"),
        (["--nnodes=2", "--master-addr=a", "--master-port=7"], "a:7"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:7"], "::1:7"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=b"], "b:29400"),
    ],
)
def test_where_launchers_meet_is_read_as_torchrun_reads_it(flags: list[str], place: str) -> None:
    assert Meeting.of(parse([*flags, "train"], ["train"])).place == place
