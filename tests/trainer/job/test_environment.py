"""torch is quiet and its threads wait without spinning, unless the user says otherwise or it is loaded already."""

import subprocess
import sys

import pytest

from tests.trainer.support.training import ROOT
from trainer.job.environment import prepare_torch

SHOWN = """
import os, sys
from trainer.cli import main
try:
    main(["--version"])
except SystemExit:
    pass
print("torch" in sys.modules, os.environ["TORCH_CPP_LOG_LEVEL"], os.environ["OMP_WAIT_POLICY"])
"""


@pytest.mark.parametrize(("variables", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_what_torch_reads_is_set_before_it_is_loaded(variables: dict[str, str], policy: str) -> None:
    environment = {"PATH": "/usr/bin", **variables}
    done = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout.splitlines()[-1] == f"False ERROR {policy}", done.stderr


def test_a_process_that_has_torch_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: F401

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert not prepare_torch()
    import os

    assert "OMP_WAIT_POLICY" not in os.environ
