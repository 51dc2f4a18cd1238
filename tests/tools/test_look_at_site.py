"""The built site in a browser: no page has a fault on a wide or a narrow screen, and its search finds what is typed."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "docs-venv" / "bin" / "python"
BAD = """<!doctype html><meta name="viewport" content="width=device-width"><article><h1>Bad</h1>
<p>- an item that stayed raw, with enough words on this page for it not to be empty, so that it has its own
faults alone</p><p>|---|</p><p><a href="gone.html">gone</a> <a href="#gone">gone</a></p>
<div style="width: 600px">wide</div></article>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the site's tools: make docs"),
    pytest.mark.skipif(
        not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
        reason="needs a browser: apt-get install chromium",
    ),
]


def look(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, "-m", "tools.look_at_site", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def site() -> Path:
    """The site, built now."""
    done = subprocess.run([PYTHON, "-m", "tools.make_site"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "build" / "site"


@pytest.mark.ci
def test_no_page_has_a_fault(site: Path) -> None:
    done = look(site)
    assert (done.returncode, done.stdout) == (0, "")
    num_pages = len(list(site.rglob("*.html")))
    assert num_pages > 70
    assert f"{num_pages} pages at 1280 and 390 pixels: 0 faults" in done.stderr


@pytest.mark.ci
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("--text-key", "docs/commands/datakit.html"),
        ("out of memory", "docs/guides/debug.html"),
        ("DcpWriter", "docs/api/"),
    ],
)
def test_the_search_finds_what_is_typed(words: str, page: str, site: Path) -> None:
    done = look(site, f"--find={words}")
    assert done.returncode == 0, done.stderr
    assert any(page in hit["address"] for hit in json.loads(done.stdout)), done.stdout


@pytest.mark.ci
def test_the_search_does_not_find_what_is_not_there(site: Path) -> None:
    assert json.loads(look(site, "--find=xylophones").stdout) == []


@pytest.mark.ci
def test_each_fault_of_a_page_is_seen(tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(BAD)
    done = look(tmp_path)
    assert done.returncode == 1, done.stderr
    for fault in (
        "'<p>- '",
        "'|---'",
        "gone.html leads to no page",
        "#gone leads to no place",
        "at 390 pixels scrolls sideways",
    ):
        assert fault in done.stdout
    assert "at 1280" not in done.stdout
