"""The pages of the documentation: every link leads to a page, a heading or a file, and the site has them all."""

import ast
import functools
import re
from pathlib import Path

from tools.site.pages import made_pages

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MADE = made_pages()  # pages of the site that are no files: its build follows links to them


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
            if target.is_relative_to(ROOT) and str(target.relative_to(ROOT)) in MADE:
                continue
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
