"""Mutants are small changes at places that are computed with; drawn from a seed, tried on their own run."""

import ast
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tools.mutants.reached import lines_reached
from tools.mutants.sites import all_mutants, drawn, mutants_of
from tools.mutants.try_mutants import PLACES, ROOT, in_a_fork

SOURCE = '''"""A module."""

def mean(values: tuple[int, ...], mesh: object) -> int:
    assert values[0] == 1, "never"
    if len(values) > 2 and "é" in values:
        raise ValueError(f"{values[0] + 1} of them")
    total = sum(values[1:]) + values[0]
    text = "a" + str(total)
    return total // mesh.dp.size
'''


def test_each_change_is_one_expression() -> None:
    mutants = list(mutants_of(SOURCE, "mean.py"))
    assert [(mutant.line, mutant.kind, mutant.before, mutant.after) for mutant in mutants] == [
        (5, "comparison", "len(values) > 2", "((len(values)) >= (2))"),
        (5, "comparison", '"é" in values', '(("é") not in (values))'),
        (7, "arithmetic", "sum(values[1:]) + values[0]", "((sum(values[1:])) - (values[0]))"),
        (7, "slice", "values[1:]", "values[(1) + 1:]"),
        (7, "index", "values[0]", "values[1]"),
        (9, "arithmetic", "total // mesh.dp.size", "((total) * (mesh.dp.size))"),
        (9, "group", "mesh.dp.size", "mesh.dp.index"),
        (9, "group", "mesh.dp", "mesh.tp"),
    ]
    for mutant in mutants:
        lines = zip(SOURCE.splitlines(), mutant.source.splitlines(), strict=True)
        assert [number for number, (own, other) in enumerate(lines, 1) if own != other] == [mutant.line]


def test_a_seed_draws_the_same_mutants_and_all_are_programs() -> None:
    mutants = all_mutants(ROOT, PLACES)
    lines = {(mutant.path, mutant.line) for mutant in mutants}
    some = [drawn(mutants, lines, f"3 {number}", set()) for number in range(40)]
    assert some == [drawn(mutants, lines, f"3 {number}", set()) for number in range(40)]
    assert len({str(mutant) for mutant in some}) > 30
    for mutant in some:
        ast.parse(mutant.source)


def test_what_no_run_reaches_is_not_drawn(tmp_path: Path) -> None:
    text = "def double(number):\n    if number < 0:\n        return number + number\n    return number * 2\n"
    (tmp_path / "places").mkdir()
    (tmp_path / "places" / "double.py").write_text(text)
    (tmp_path / "beside.py").write_text(text)
    names: dict[str, dict[str, Any]] = {"places/double.py": {}, "beside.py": {}}
    for name, space in names.items():
        exec(compile(text, tmp_path / name, "exec"), space)

    def work() -> None:
        thread = threading.Thread(target=names["places/double.py"]["double"], args=(1,))
        thread.start()
        thread.join()
        names["beside.py"]["double"](1)

    lines = lines_reached(work, tmp_path, ["places"])
    assert lines == {("places/double.py", 1), ("places/double.py", 2), ("places/double.py", 4)}
    mutants = all_mutants(tmp_path, ["places"])
    assert {mutant.line for mutant in mutants} == {2, 3, 4}
    known = {"places/double.py:2: number < 0 -> ((number) <= (0))"}
    assert {drawn(mutants, lines, str(seed), known).line for seed in range(9)} == {4}


def test_a_fork_that_ends_returns_nothing() -> None:
    assert in_a_fork(lambda: [1, 2]) == [1, 2]
    assert in_a_fork(lambda: 1 / 0) is None


@pytest.mark.slow
def test_a_report_goes_on_behind_its_last_mutant(tmp_path: Path) -> None:
    report, states = tmp_path / "mutants.json", []
    for number in ("2", "3"):
        words = ["-m", "tools.mutants.try_mutants", "--seed", "1", "--number", number, "--report", str(report)]
        ran = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, cwd=ROOT)
        assert f"{number} of {number} mutants" in ran.stdout
        states.append([outcome["state"] for outcome in json.loads(report.read_text())])
    assert states[0] == states[1][:2]
    assert {state for some in states for state in some} <= {"equal", "found", "rounding", "survived"}
