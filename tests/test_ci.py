"""What every change must pass is said by a mark beside each slow test, not by a list in another place."""

import re
from pathlib import Path

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).parent.parent
RUN = ROOT / ".ci" / "run"
MARK = re.compile(r"pytest\.mark\.ci\b")


@pytest.mark.skipif(not RUN.exists(), reason="a source distribution has no .ci")
def test_the_slow_tests_of_a_change_are_those_with_the_mark() -> None:
    text = RUN.read_text()
    [last] = [line for line in text.splitlines() if line.startswith("timeout 2700")]
    assert "pytest" in last
    after = text[text.index(last) :]
    assert '-m "slow and ci"' in after
    assert "tests/" not in after
    assert "--deselect" not in after


def test_the_mark_is_beside_slow_tests_alone() -> None:
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if MARK.search(path.read_text())]
    assert len(marked) > 70
    for path in marked:
        assert "pytest.mark.slow" in path.read_text(), f"{path.relative_to(ROOT)}: no slow test for the mark ci"


def test_files_that_begin_first_are_there() -> None:
    stems = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(LONGEST) <= stems
