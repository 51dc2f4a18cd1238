"""The page of what holds today: as current as the results, whose figures and scripts bear it out."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.record import ratio
from tools.results_page import KITS, PAGE, ROOT, all_claims, claims, faults, page


def test_the_page_is_made_of_what_is_beside_the_results() -> None:
    assert (ROOT / PAGE).read_text() == page(claims()), "run: python -m tools.results_page"


def test_figures_are_in_their_results_and_scripts_are_there() -> None:
    newest = claims()
    assert faults(newest) == []
    assert {claim.result.parent.name for claim in newest} == set(KITS)
    assert len(newest) > 10


def test_a_ratio_is_that_of_the_values_beside_it() -> None:
    for claim in all_claims():
        row = claim.row
        assert row.ratio == ratio(row.value, {**row.peer, **row.limit}), row.claim


def test_a_newer_row_of_one_claim_holds(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "ops"
    folder.mkdir(parents=True)
    row = {
        "claim": "a", "unit": "ms", "peer": {"b": 2, "b [s]": 1.5}, "limit": {}, "ratio": 2.0, "machine": "d",
        "command": "python benchmarks/ops/norm.py",
    }  # fmt: skip
    for date, value in (("2031-01-02", 4000), ("2031-01-01", 5)):
        (folder / f"results-{date}.json").write_text(json.dumps([row | {"date": date, "value": value}]))
        (folder / f"results-{date}.md").write_text("2, and 5 ms, 1.5")
    [newest] = claims(tmp_path)
    assert newest.row.value == 4000
    assert "| a | **4,000 ms** | b: 2; b: 1.5 s | none | 2 | d | [2031-01-02](" in page([newest])
    assert faults([newest]) == ["a: there is no benchmarks/ops/norm.py", "a: 4,000 is not in results-2031-01-02.md"]
    (folder / "results-2031-01-01.json").write_text("[]")
    (folder / "results-2031-01-02.json").write_text(
        json.dumps([row | {"date": "2031-01-02", "value": 2, "command": "trainer train benchmarks/ops/a.toml"}])
    )
    assert faults(claims(tmp_path)) == ["a: there is no benchmarks/ops/a.toml"]
    (folder / "a.toml").touch()
    assert faults(claims(tmp_path)) == []
    (folder / "results-2031-01-03.json").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=r"benchmarks/ops/results-2031-01-03.json: .*missing"):
        claims(tmp_path)


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
