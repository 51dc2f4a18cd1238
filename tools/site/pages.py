"""All pages of the site in one folder: those of the root and of docs/, and those that are made of the code.

Pages are written for GitHub's Markdown, where a list or a table may follow a paragraph, a heading or a fence at once.
Python-Markdown wants a blank line there, so it is put in; `tools.site.check` fails the build on what stays raw.
"""

import re
import shutil
import tomllib
from collections.abc import Iterator
from os.path import relpath
from pathlib import Path, PurePosixPath
from typing import Any

from tools import results_page as results
from tools.site.commands import command_pages
from tools.site.configuration import configuration_page
from tools.site.foreign_names import foreign_names_page
from tools.site.reference import reference_pages

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "zensical.toml"
RESULTS = "benchmarks/*/results*.md"  # pages that a page lists, and the contents need not
SOURCES = tomllib.loads(CONFIG.read_text())["project"]["repo_url"]
WIDE = ("docs/index.md",)  # pages without a list of their headings beside them
MOVED = {
    "docs/index.md": "index.md",
    "README.md": "journeys.md",
    "benchmarks/README.md": "benchmarks/index.md",
}  # pages that have another place in the site
LINK = re.compile(r"(\]\(|\bsrc=\"|\bhref=\")(?![a-z]+:|#)([^)\s\"#]+)")
LIST_ITEM = re.compile(r"(?:[-*+]|1[.)]) ")


def gather_pages(folder: Path) -> None:
    """Write all pages, their pictures and the style sheet into a folder; ValueError if the contents miss a page."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "tools" / "site" / "site.css", folder)
    written = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob(RESULTS)]
    for page in written:
        name = page.relative_to(ROOT).as_posix()
        (folder / name).unlink(missing_ok=True)
        target = folder / MOVED.get(name, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        more = "hide: [toc]" if name in WIDE else "search:\n  exclude: true" if page.match(RESULTS) else ""
        head = f"---\nsource: {name}\n{more}\n---\n\n"
        target.write_text(head + with_blank_lines(relinked(page.read_text(), name)))
    for picture in ROOT.glob("benchmarks/*/*.png"):
        shutil.copy(picture, folder / picture.relative_to(ROOT))
    for name, text in made_pages().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(with_blank_lines(text))
    check_contents(tomllib.loads(CONFIG.read_text()), folder)


def made_pages() -> dict[str, str]:
    """Return the pages that are made of the code and of lists of files, by their places in the site."""
    made = {
        "docs/configuration.md": configuration_page(),
        "docs/foreign-names.md": foreign_names_page(),
        "benchmarks/index.md": results_page(),
    }
    return made | reference_pages() | command_pages()


def results_page() -> str:
    """Return the page of what holds today, and of the results of benchmarks by kit and date, the newest first."""
    lines = [results.page(results.claims()), "## All results\n"]
    for folder in sorted((ROOT / "benchmarks").iterdir()):
        pages = sorted(folder.glob("results*.md"), reverse=True) if folder.is_dir() else []
        lines += [f"### {folder.name}\n"] if pages else []
        for page in pages:
            day = page.stem.removeprefix("results").lstrip("-") or "all"
            title = page.read_text().partition("\n")[0].removeprefix("# ")
            lines += [f"- [{day}]({folder.name}/{page.name}): {title}"]
        lines += [""]
    return "\n".join(lines)


def relinked(text: str, name: str) -> str:
    """Return a page with its relative links led to where pages are in the site, and files that have no place there.

    A file of the project that is not in the site, such as an example, is a link to the sources.
    """
    here = PurePosixPath(name).parent
    new_here = PurePosixPath(MOVED.get(name, name)).parent

    def moved(link: re.Match[str]) -> str:
        place = relpath(here / link[2], ".")
        is_page = place.endswith((".md", ".png")) and not place.startswith("changes/")
        if (ROOT / place).is_file() and not place.startswith("docs/") and not is_page:
            return f"{link[1]}{SOURCES}/blob/main/{place}"
        return link[1] + relpath(MOVED.get(place, place), new_here)

    return re.sub(LINK, moved, text)


def with_blank_lines(text: str) -> str:
    """Return a page with a blank line before each list and table, as Python-Markdown wants it."""
    lines, block = [], ""  # what the line before is part of: "list", "table", another word, or "" after a blank line
    fence = ""
    for line in text.splitlines():
        kind = "table" if line.startswith("|") else "list" if LIST_ITEM.match(line) else "text"
        if fence:
            fence, block = ("", "fence") if line.strip() == fence else (fence, block)
        elif opened := re.match(r"`{3,}", line):
            fence = opened[0]
        elif not line.strip():
            block = ""
        else:
            if kind != "text" and block not in ("", kind):
                lines.append("")
            block = "list" if block == "list" and kind == "text" else kind  # a line of an item goes on
        lines.append(line)
    return "\n".join(lines) + "\n"


def listed(nav: Any) -> Iterator[str]:
    """Yield the pages of a table of contents, in order."""
    if isinstance(nav, str):
        yield nav
    for entry in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from listed(entry)


def check_contents(config: dict[str, Any], folder: Path) -> None:
    """Raise ValueError if the contents in zensical.toml miss a page, or list one twice or in vain."""
    there = {page.relative_to(folder).as_posix() for page in folder.rglob("*.md") if not page.match(RESULTS)}
    named = list(listed(config["project"]["nav"]))
    faults = [f"{page} is not in it: add it to the section of its kit" for page in sorted(there - set(named))]
    faults += [f"{page} is listed, and there is no such page" for page in sorted(set(named) - there)]
    faults += [f"{page} is listed twice" for page in sorted({page for page in named if named.count(page) > 1})]
    if faults:
        raise ValueError("the contents (nav) in zensical.toml are not those of the pages\n  " + "\n  ".join(faults))
