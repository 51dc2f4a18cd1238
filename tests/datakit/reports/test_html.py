"""Report: one HTML file with plots as SVG that fetches nothing, and a clear error where plots cannot be drawn."""

import re
import sys
from pathlib import Path

import pytest

from datakit import write_store
from datakit.reports.html import render_report
from datakit.reports.statistics import statistics
from tests.datakit.conftest import Cli


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "a<b>&$x^$", [[1] * (i % 40) for i in range(100)], vocab_size=9).path


def test_a_report_needs_nothing_else(store: Path, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "r.html"
    assert cli("stats", store, "--report", file) == 0
    page = file.read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == page.count("</svg>") == 3
    assert "a&lt;b&gt;&amp;$x^$" in page
    assert "<b>" not in page
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(address.startswith("#") for address in addresses)
    assert "<script" not in page
    assert "<!DOCTYPE svg" not in page


def test_a_report_is_the_same_for_the_same_stores(store: Path) -> None:
    found = statistics([store])
    assert render_report(found) == render_report(found)


def test_a_report_of_nothing(tmp_path: Path) -> None:
    page = render_report(statistics([write_store(tmp_path / "s", [], vocab_size=9).path]))
    assert "</html>" in page


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_a_package_the_hint_installs_it(
    package: str, store: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, package, None)
    assert cli("stats", store, "--report", tmp_path / "r.html") == 2
    assert 'hint: pip install "matplotlib>=3.8" "jinja2>=3.1"' in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_a_report_into_no_folder_is_refused(
    store: Path, cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("stats", store, "--report", tmp_path / "none" / "r.html") == 2
    assert "hint: mkdir -p" in capsys.readouterr().err
