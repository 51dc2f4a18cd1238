"""Help must be instant: no command line imports torch, or anything as heavy, before a verb runs."""

import functools
import json
import subprocess
import sys

import pytest

KITS = ["datakit", "ckptkit", "trainer"]
HEAVY = ["torch", "numpy", "tokenizers", "obstore", "fsspec", "matplotlib", "rich"]
PROGRAM = """
import contextlib, io, json, re, sys
from {kit}.cli import main

def help_of(*argv):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            main([*argv, "--help"])
        except SystemExit as stop:
            assert not stop.code, stop.code
    return printed.getvalue()

pages = {{"": help_of()}}
for verb in re.search(r"\\{{([a-z0-9,-]+)}}", pages[""])[1].split(","):
    pages[verb] = help_of(verb)
    heavy = [name for name in {heavy!r} if name in sys.modules]
    assert not heavy, f"{kit} {{verb}} --help imports {{heavy}}"
print(json.dumps(pages))
"""


@functools.cache
def pages(kit: str) -> dict[str, str]:
    """The help of the command line and of each of its verbs, all in one process, which imports nothing heavy."""
    program = PROGRAM.format(kit=kit, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def verbs(kit: str) -> list[str]:
    return [verb for verb in pages(kit) if verb]


@pytest.mark.parametrize("kit", KITS)
def test_help_of_every_verb_is_light(kit: str) -> None:
    assert len(pages(kit)) > 3
    assert all("usage:" in page for page in pages(kit).values())
