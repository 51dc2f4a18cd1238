"""A value that torch's launcher would refuse is one line, which names the flag, the value and what the flag takes."""

import pytest

from threefold.errors import UserError
from trainer.job.launch_flags import BACKENDS, FLAGS, wrong_flag
from trainer.job.launcher import parse

VERBS = ("train", "eval")
WRONG = [
    ("--nproc-per-node", "two", "a number above 0"),
    ("--nproc-per-node", "0", "a number above 0"),
    ("--nproc-per-node", "-1", "a number above 0"),
    ("--nnodes", "0", "MIN:MAX"),
    ("--nnodes", "a:b", "MIN:MAX"),
    ("--nnodes", "2:1", "MIN:MAX"),
    ("--nnodes", "1:2:3", "MIN:MAX"),
    ("--rdzv-conf", "timeout", "NAME=VALUE"),
    ("--rdzv-conf", "=5", "NAME=VALUE"),
    ("--rdzv-conf", "a=1,,b=2", "NAME=VALUE"),
    ("--rdzv-conf", "join_timeout=long", "NAME=VALUE"),
    ("--rdzv-conf", "read_timeout=0", "NAME=VALUE"),
    ("--rdzv-backend", "nosuch", "c10d, static"),
    ("--rdzv-backend", "", "c10d, static"),
    ("--rdzv-endpoint", "host:port:x", "HOST:PORT"),
    ("--rdzv-endpoint", "host:29500:1", "HOST:PORT"),
    ("--rdzv-endpoint", "host:99999", "HOST:PORT"),
    ("--rdzv-endpoint", "a host:1", "HOST:PORT"),
    ("--rdzv-id", "", "a name"),
    ("--max-restarts", "-1", "0 or more"),
    ("--node-rank", "-1", "0 or more"),
    ("--monitor-interval", "-0.5", "0 or more"),
    ("--shutdown-timeout", "-1", "0 or more"),
    ("--master-port", "65536", "below 65536"),
    ("--local-ranks-filter", "0,x", "numbers of ranks"),
    ("--redirects", "4", "0 to 3"),
    ("--tee", "0:9", "0 to 3"),
    ("--event-log-handler", "x", "null or console"),
    ("--logs-specs", "nosuch", "a package installs"),
]


@pytest.mark.parametrize(("flag", "value", "takes"), WRONG)
def test_a_wrong_value_names_the_flag_and_what_it_takes(flag: str, value: str, takes: str) -> None:
    with pytest.raises(UserError) as raised:
        parse([f"{flag}={value}", "train", "run.toml"], VERBS)
    assert raised.value.message.startswith(f"{flag} {value}: it takes ")
    assert takes in raised.value.message
    assert "\n" not in raised.value.message
    assert (raised.value.exit_code, str(raised.value.hint)[:14]) == (2, "trainer launch")


def test_every_flag_with_a_reader_has_a_wrong_value_here() -> None:
    assert {flag.removeprefix("--").replace("-", "_") for flag, _, _ in WRONG} == FLAGS.keys()


@pytest.mark.parametrize(("flag", "value"), [("node-rank", "x"), ("max-restarts", "1.5"), ("start-method", "x")])
def test_what_argparse_reads_is_refused_in_the_same_way(flag: str, value: str) -> None:
    with pytest.raises(UserError, match=f"argument --{flag}.*{value}") as raised:
        parse([f"--{flag}", value, "train"], VERBS)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--nproc-per-node", "3", "--nnodes", "2:4", "--rdzv-conf", "join_timeout=5, is_host=1", "--rdzv-id", "a b"],
        ["--nproc-per-node", "cpu", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:0"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", "[::1]:29500", "--max-restarts", "2"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", " node1.cluster "],
        ["--rdzv-backend", "static", "--master-addr", "node1", "--master-port", "29501", "--node-rank", "1"],
        ["--standalone", "--rdzv-endpoint", "host:port:x", "--rdzv-backend", "nosuch"],
        ["--tee", "3", "--redirects", "0:1,1:2", "--local-ranks-filter", "0,1", "--shutdown-timeout", "0"],
        ["--event-log-handler", "console", "--monitor-interval", "0.5"],
    ],
)
def test_what_torch_takes_is_taken(words: list[str]) -> None:
    assert wrong_flag(parse([*words, "train"], VERBS)) is None


def test_a_static_rendezvous_needs_a_port() -> None:
    message = r"--rdzv-endpoint node1: it takes HOST:PORT, of a static rendezvous"
    with pytest.raises(UserError, match=message):
        parse(["--rdzv-endpoint", "node1", "train"], VERBS)
    assert "static" in BACKENDS
