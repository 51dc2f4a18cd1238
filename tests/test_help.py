"""Help must be instant: no command line imports torch, or anything as heavy, before a verb runs."""

import re
import subprocess
import sys

import pytest

KITS = ["datakit", "ckptkit", "trainer"]
HEAVY = ["torch", "numpy", "tokenizers", "obstore", "fsspec", "matplotlib", "rich"]
PROGRAM = """
import sys
from {kit}.cli import main
try:
    main({argv!r})
except SystemExit as stop:
    assert not stop.code, stop.code
print("heavy:", *[name for name in {heavy!r} if name in sys.modules])
"""


def run_help(kit: str, argv: list[str]) -> str:
    program = PROGRAM.format(kit=kit, argv=argv, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def verbs(kit: str) -> list[str]:
    match = re.search(r"\{([a-z0-9,-]+)\}", run_help(kit, ["--help"]))
    assert match, f"{kit} --help lists no verbs"
    return match[1].split(",")


@pytest.mark.parametrize("kit", KITS)
def test_help_of_every_verb_is_light(kit: str) -> None:
    for argv in [["--help"], *([verb, "--help"] for verb in verbs(kit))]:
        output = run_help(kit, argv)
        assert "usage:" in output
        assert output.rstrip().endswith("heavy:"), f"{kit} {' '.join(argv)} imports {output.splitlines()[-1]}"
