"""No load path unpickles: with every way to do so poisoned, restore, verify, hash, reshard, copy and ls still work."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ckptkit.support.saves import ROOT, SMALL, save_whole

PROGRAM = """
import _pickle, pickle, sys

def poisoned(*_, **__):
    raise AssertionError("something was unpickled")

class Poisoned:
    __init__ = poisoned

for module in (pickle, _pickle):
    for name in ("load", "loads", "_load", "_loads"):
        if hasattr(module, name):
            setattr(module, name, poisoned)
    module.Unpickler = Poisoned
pickle._Unpickler = Poisoned
import numpy, torch
torch.load = numpy.load = poisoned
for attempt in (lambda: pickle.loads(b"N."), lambda: torch.load("x"), lambda: pickle.Unpickler(None)):
    try:
        attempt()
    except AssertionError:
        continue
    sys.exit("the poison does not work")

from ckptkit.cli import main
from ckptkit import restore, restore_newest
from tests.ckptkit.support.saves import ONE, SMALL, pieces_of

run, copied, cut = sys.argv[1:]
tensors = pieces_of(SMALL, ONE, 0, None, lambda flat: torch.from_numpy(flat.copy()))
restore(run, 1, tensors, tensors=SMALL)
restore_newest(run, pieces_of(SMALL, ONE, 0), tensors=SMALL)
for argv in (["ls", run], ["inspect", run], ["verify", run], ["verify", run, "--manifest"], ["hash", run],
             ["diff", run, run], ["inspect", run, "--stats"],
             ["copy", run, copied], ["reshard", run, cut, "--pp", "3"], ["verify", cut]):
    assert main(argv) == 0, argv
print("all worked")
"""


@pytest.mark.ci
@pytest.mark.slow
def test_every_load_path_works_where_nothing_can_be_unpickled(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert save_whole(run, 1, SMALL).ok
    command = [sys.executable, "-c", PROGRAM, str(run), str(tmp_path / "copied"), str(tmp_path / "cut")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all worked\n")
