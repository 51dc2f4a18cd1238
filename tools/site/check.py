"""What is wrong with built pages: Markdown that stayed raw, links that lead nowhere, classes without an example."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

VOID = {"area", "br", "col", "hr", "img", "input", "link", "meta", "path", "source", "use", "rect", "circle", "wbr"}
LITERAL = {"pre", "code", "script", "style", "svg", "title"}
RAW = {  # what Markdown looks like where it was not read
    "a table": re.compile(r"\|\s*:?-{3,}"),
    "a list": re.compile(r"(?:^|\n)\s*(?:[-*+]|1[.)]) \S"),
    "a fence": re.compile(r"```|~~~"),
    "a heading": re.compile(r"(?:^|\n)#{1,6} \S"),
    "a link": re.compile(r"\]\([^)\s]+\)|\]\[[^\]]*\]"),
    "emphasis": re.compile(r"\*\*\S[^*]*\*\*"),
    "a directive": re.compile(r"(?:^|\n)::: \S"),
}


class Page(HTMLParser):
    """One page: its prose by paragraphs, the names that links may lead to, and its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.prose: list[str] = [""]
        self._open: list[str] = []
        self._article = 0  # how many elements are open around the content, 0 outside of it
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note names and links; begin a paragraph at any element that is one."""
        known = dict(attributes)
        self.names |= {known[key] or "" for key in ("id", "name") if known.get(key)}
        self.links += [known[key] or "" for key in ("href", "src") if known.get(key)]
        if tag in VOID:
            return
        self._open.append(tag)
        if tag == "article" and not self._article:
            self._article = len(self._open)
        if tag not in ("a", "em", "strong", "span", "b", "i", *LITERAL):
            self.prose.append("")

    def handle_endtag(self, tag: str) -> None:
        """Leave the element, and those that were not closed within it."""
        if tag in self._open:
            while self._open.pop() != tag:
                pass
            if self._article > len(self._open):
                self._article = 0

    def handle_data(self, data: str) -> None:
        """Add to the paragraph what is read as prose; code is a word of it."""
        if self._article:
            self.prose[-1] += "code" if LITERAL & set(self._open) else data


def faults_of_site(site: Path) -> list[str]:
    """Return the faults of all pages of a site, a sentence each."""
    pages = {file: Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    faults = []
    for file, page in pages.items():
        where = file.relative_to(site)
        if not any(text.strip() for text in page.prose) and file.name != "404.html":
            faults.append(f"{where} is empty")
        for text in page.prose:
            for what, pattern in RAW.items():
                if found := pattern.search(text):
                    line = text[max(found.start() - 20, 0) : found.end() + 60].strip()
                    faults.append(f"{where}: {what} stayed raw Markdown: {line!r}")
        faults += [f"{where}: {fault}" for link in page.links if (fault := dead(link, file, pages))]
    return faults


def dead(link: str, file: Path, pages: dict[Path, Page]) -> str:
    """Return what is wrong with a link of a page; empty if it leads somewhere, or out of the site."""
    parts = urlparse(link)
    if parts.scheme or parts.netloc or link.startswith("/"):
        return ""
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return f"the link {link} leads to no file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].names:
        return f"the link {link} leads to no heading"
    return ""
