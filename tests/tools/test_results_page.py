"""The page of what holds today: as current as the results, whose figures and scripts bear it out."""

import json
import re
from pathlib import Path

import pytest

from tools import results_page
from tools.results_page import KITS, PAGE, ROOT, faults, page, rows


def test_the_page_is_made_of_what_is_beside_the_results() -> None:
    assert (ROOT / PAGE).read_text() == page(rows()), "run: python -m tools.results_page"


def test_figures_are_in_their_results_and_scripts_are_there() -> None:
    found = rows()
    assert faults(found) == []
    assert {row.result.parent.name for row in found} == set(KITS)
    assert len(found) > 10


def test_a_newer_row_of_one_claim_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks" / "ops"
    folder.mkdir(parents=True)
    row = {"claim": "a", "peer": "b: 2", "limit": "c", "card": "d", "command": "python benchmarks/ops/norm.py"}
    for date, figure in (("2031-01-02", "4 ms"), ("2031-01-01", "5 ms")):
        (folder / f"results-{date}.json").write_text(json.dumps([row | {"date": date, "figure": figure}]))
        (folder / f"results-{date}.md").write_text("2, and 5 ms")
    monkeypatch.setattr(results_page, "ROOT", tmp_path)
    [newest] = rows()
    assert newest.figure == "4 ms"
    assert "**4 ms**" in page([newest])
    assert faults([newest]) == ["a: there is no benchmarks/ops/norm.py", "a: 4 is not in results-2031-01-02.md"]
    (folder / "results-2031-01-03.json").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=r"benchmarks/ops/results-2031-01-03.json: .*missing"):
        rows()


def test_the_readme_cites_one_figure_of_each_kit() -> None:
    text = (ROOT / "README.md").read_text()
    section = text.partition("## Figures\n")[2].partition("\n## ")[0]
    lines = {
        kit: re.search(rf"^- \*\*{kit}\*\*: (.+)$", section, re.MULTILINE) for kit in ("datakit", "ckptkit", "trainer")
    }
    made = (ROOT / PAGE).read_text()
    for kit, line in lines.items():
        assert line is not None, kit
        for number in re.findall(r"\d+(?:[.,]\d+)+", line[1]):
            assert number in made, f"{kit}: {number} is not in {PAGE}"
    assert f"({PAGE})" in section
