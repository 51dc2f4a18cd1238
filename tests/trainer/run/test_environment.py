"""What a run sets before CUDA starts: one place says how many queues each kind takes, and how memory is allocated."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainer
from trainer.config import Config
from trainer.config.walk import config_from
from trainer.run import environment
from trainer.run.environment import ALLOCATOR, GROWING, VARIABLE, queues_of, queues_text, ranks_of

CUDA = torch.device("cuda", 0)
KINDS: list[tuple[dict[str, Any], str]] = [
    ({"tp": 2}, "1"),
    ({"tp": 2, "dp": 4, "zero_stage": 3, "dp_shard": 2}, "1"),
    ({"tp": 2, "sequence_parallel": "off"}, "8"),
    ({}, "8"),
    ({"dp": 4}, "8"),
    ({"dp": 4, "zero_stage": 3, "dp_shard": 2}, "8"),
    ({"pp": 2}, "8"),
]


def config_of(parallel: dict[str, Any], device: str = "auto") -> Config:
    train = {"device": device, "global_batch_size": 16}
    return config_from({"parallel": parallel, "train": train}, source="", world_size=None)


@pytest.mark.parametrize(("parallel", "number"), KINDS)
def test_a_run_sets_the_number_of_its_kind_and_says_so(
    parallel: dict[str, Any], number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, found = config_of(parallel), SimpleNamespace()
    monkeypatch.setattr(environment, "Ranks", lambda device, *, timeout_s: found)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    assert ranks_of(config) is found
    assert (queues_of(config)[0], environment.os.environ[VARIABLE]) == (number, number)
    assert queues_text(config, CUDA).startswith(f"{number} between host and GPU (CUDA_DEVICE_MAX_CONNECTIONS): ")
    assert queues_text(config, torch.device("cpu")) == ""


def test_what_the_user_set_stays_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "Ranks", lambda device, *, timeout_s: None)
    monkeypatch.setenv(VARIABLE, "32")
    config = config_of({"tp": 2})
    ranks_of(config)
    assert environment.os.environ[VARIABLE] == "32"
    assert queues_text(config, CUDA) == (
        "32 between host and GPU, as CUDA_DEVICE_MAX_CONNECTIONS says; a run of this kind takes 1"
    )


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all as if nothing was set."""
    monkeypatch.setattr(environment, "Ranks", lambda device, *, timeout_s: None)
    for name in (VARIABLE, ALLOCATOR, "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is as before behind the test
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("unset")
def test_segments_of_the_allocator_grow() -> None:
    ranks_of(config_of({}))
    assert environment.os.environ[ALLOCATOR] == GROWING


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("name", [ALLOCATOR, "PYTORCH_ALLOC_CONF"])
def test_the_allocator_is_as_the_user_set_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:256")
    ranks_of(config_of({}))
    assert [environment.os.environ.get(each) for each in (ALLOCATOR, "PYTORCH_ALLOC_CONF")].count(None) == 1
    assert environment.os.environ[name] == "max_split_size_mb:256"


@pytest.mark.usefixtures("unset")
def test_a_run_on_cpus_sets_nothing() -> None:
    ranks_of(config_of({}, "cpu"))
    assert {VARIABLE, ALLOCATOR}.isdisjoint(environment.os.environ)


def test_no_verb_joins_ranks_of_a_configuration_by_itself() -> None:
    root = Path(trainer.__file__).parent
    texts = {path.relative_to(root): path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    joining = {str(path) for path, text in texts.items() if re.search(r"(?<!class )\bRanks\(", text)}
    assert joining == {
        "run/environment.py",
        "run/bench_comm.py",
        "commands/bench.py",
    }  # the others have no configuration
    assert [str(path) for path, text in texts.items() if VARIABLE in text] == ["run/environment.py"]
