"""The pages of the documentation: every link leads to a page, a heading or a file, and the site has them all."""

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DOCS_PYTHON = ROOT / "build" / "docs-venv" / "bin" / "python"


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings, as the site makes them: `## Keys and names` is `keys-and-names`."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    names = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", name) for name in names}


def test_every_link_leads_somewhere() -> None:
    num_links = 0
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
            if link.startswith("https://"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.is_file(), f"{page.relative_to(ROOT)}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.relative_to(ROOT)}: {link}"
            num_links += 1
    assert num_links > 20


def defined_in(path: Path) -> set[str]:
    """Return the functions, classes and methods of a source file, methods as `Class.method`."""
    if path.suffix != ".py":
        return set(re.findall(r"\b(\w+)\(", path.read_text()))
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


def test_places_in_code_that_pages_name_exist() -> None:
    num_places = 0
    for page in PAGES:
        for path, name in re.findall(r"`([\w/]+\.(?:py|cpp|h)):\s+([\w.]+)`", page.read_text()):
            assert (ROOT / path).is_file(), f"{page.name}: {path}"
            assert name in defined_in(ROOT / path), f"{page.name}: {path} has no {name}"
            num_places += 1
    assert num_places > 25


def test_the_sites_contents_list_every_page_once() -> None:
    listed = re.findall(r'"([^"]+\.md)"', (ROOT / "zensical.toml").read_text())
    pages = {str(page.relative_to(ROOT)) for page in PAGES} - {"README.md"} | {"index.md"}
    assert sorted(page for page in listed if not page.startswith("docs/api/")) == sorted(pages)


def test_the_reference_has_every_public_name() -> None:
    from tools.make_site import KITS, reference

    for kit in KITS:
        module = __import__(kit)
        named = set(re.findall(r"^## `(\w+)`$", reference(kit), re.MULTILINE))
        assert named == set(module.__all__) - {"__version__"}


@pytest.mark.slow
@pytest.mark.skipif(not DOCS_PYTHON.exists(), reason="needs the site's tools: make docs")
def test_the_site_builds() -> None:
    done = subprocess.run([DOCS_PYTHON, "tools/make_site.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TokenStore" in (ROOT / "build" / "site" / "docs" / "api" / "datakit.html").read_text()
