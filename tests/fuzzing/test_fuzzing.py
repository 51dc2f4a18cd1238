"""Every parser on made-up bytes: what it raises is an error of ours, in a second and in half a GiB; planted faults."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzzing.parsers import PARSERS
from threefold.errors import CheckFailed
from tools.fuzzing.fuzz import MAX_FAULTS, Parser, fuzz

EXECUTIONS = int(os.environ.get("FUZZ_EXECUTIONS", "4000"))


QUICK = [
    pytest.param(name, marks=[pytest.mark.slow, pytest.mark.ci] if parser.fresh else [])
    for name, parser in PARSERS.items()
]


@pytest.mark.parametrize("name", QUICK)
def test_a_parser_refuses_made_up_bytes(name: str) -> None:
    skip_without_packages(name)
    tally = fuzz(PARSERS[name], executions=60, seed=len(name))
    assert tally.faults == []
    assert tally.num_places > 1


MANY = [pytest.param(name, marks=[] if parser.fresh else pytest.mark.ci) for name, parser in PARSERS.items()]


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_a_parser_refuses_many_made_up_bytes(name: str) -> None:
    skip_without_packages(name)
    assert fuzz(PARSERS[name], executions=EXECUTIONS, seconds=60, seed=1).faults == []


def skip_without_packages(name: str) -> None:
    if name.startswith("zarr"):
        pytest.importorskip("tensorstore", reason="needs tensorstore: pip install -e '.[tensorstore]'")


def checked(data: bytes) -> None:
    """A parser of text that refuses what is not ASCII."""
    try:
        data.decode("ascii")
    except UnicodeDecodeError:
        raise CheckFailed("not ASCII") from None


def looking_up(data: bytes) -> None:
    checked(data)
    _ = b"sound"[len(data)]


def endless(data: bytes) -> None:
    while len(data) != len(b"sound"):
        pass


def hungry(data: bytes) -> None:
    try:
        bytearray(len(data) << 28 if len(data) != len(b"sound") else 0)
    except Exception:
        raise CheckFailed("refused, after it took all memory") from None


def crashing(data: bytes) -> None:
    if len(data) > len(b"sound"):
        os.kill(os.getpid(), signal.SIGSEGV)


def panicking(data: bytes) -> None:
    if data != b"sound":
        raise BaseException("what native code raises in its panic")


@pytest.mark.parametrize(
    ("parse", "what"),
    [
        (looking_up, "IndexError"),
        (endless, "more than 1 s"),
        (hungry, "more than 512 MiB"),
        (crashing, "the process ended by signal 11"),
        (panicking, "BaseException"),
    ],
)
def test_a_planted_fault_is_found(parse: Callable[[bytes], object], what: str) -> None:
    faults = fuzz(Parser("planted", lambda: [b"sound"], parse), executions=3 * MAX_FAULTS).faults
    assert faults[0][0].startswith(what)
    assert faults[0][1], "the input that shows it"


def test_a_sound_input_that_is_refused_is_a_fault() -> None:
    assert fuzz(Parser("planted", lambda: [b"\xff"], checked), executions=1).faults[0][0].startswith("1 of 1 sound")


def test_inputs_that_led_to_a_new_place_are_kept_and_few(tmp_path: Path) -> None:
    parser = Parser("text", lambda: [b"sound"], checked)
    first = fuzz(parser, executions=200, corpus=tmp_path / "text")
    assert len(list((tmp_path / "text").iterdir())) == 1, "there is one way to be refused"
    assert fuzz(parser, executions=2, corpus=tmp_path / "text").num_places == first.num_places
