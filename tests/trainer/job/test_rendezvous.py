"""A start that fails is one sentence with the rank, the address and what to try, and prints nothing else."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.support.training import ROOT
from threefold.errors import StorageError, UserError
from trainer.job.rendezvous import Rendezvous


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which nobody listens, and that nobody else is assigned."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def fault(rank: int, host: str, port: int) -> str:
    with pytest.raises(StorageError) as raised:
        Rendezvous(rank, 4, host, port, 0.4, is_hosted=False).join("gloo")
    assert raised.value.hint
    return raised.value.message


def test_a_name_without_an_address() -> None:
    assert fault(1, "nowhere.invalid", 29500).startswith("rank 1 of 4: MASTER_ADDR nowhere.invalid has no address: ")


def test_nobody_at_the_address(port: int) -> None:
    said = fault(3, "127.0.0.1", port)
    assert said == f"rank 3 of 4: nobody answers at 127.0.0.1:{port} within 0.4 s: Connection refused"


def test_a_port_of_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert fault(0, "127.0.0.1", port) == f"rank 0 of 4: port {port} of this host is in use by another program"


def test_a_program_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself would wait for it without an end."""
    monkeypatch.setattr("trainer.job.rendezvous.ANSWERS_WITHIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        said = fault(1, "127.0.0.1", port)
    assert said.startswith(
        f"rank 1 of 4: 127.0.0.1:{port} does not answer as the place to meet: no answer within 0.4 s"
    )


def test_ranks_that_do_not_come_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert fault(0, "127.0.0.1", port) == (f"rank 0 of 4: ranks 1, 2, 3 did not come to 127.0.0.1:{port} within 0.4 s")


@pytest.mark.parametrize(
    ("address", "port"), [("", "1"), ("a", ""), ("a", "x"), ("a", "0"), ("a", "65536"), ("a", "-1")]
)
def test_variables_that_name_no_place(address: str, port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(UserError, match=f"rank 1 of 2: MASTER_ADDR is '{address}' and MASTER_PORT '{port}'"):
        Rendezvous.of_environment(1, 2, 1.0)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_peer_is_absent_says_so_in_two_lines(rank: int, job_config: Path, port: int) -> None:
    if rank == 0:  # it listens itself
        port = port + 1 if port < 65000 else port - 1
    environment = os.environ | {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "trainer", "train", job_config, "--dp", "2", "--parallel.timeout-s", "2"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=ROOT, env=environment, timeout=100, check=False
    )
    assert done.returncode == 3
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: rank {rank} of 2: ")
    assert hint.startswith("hint: ")
