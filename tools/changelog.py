"""The changelog: `changes/KIT-WORD.md` says what a change brings, and a release makes one section of all fragments.

    python -m tools.changelog        # prints CHANGELOG.md as a release of today would have it

A fragment holds one entry or more, each a paragraph of a kind: "fixed: `pack` of an empty store says so." What changed
for a user, who may have to act, comes first in a section, below a summary of what he gains: `changes/summary.md`.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = "changes"
SUMMARY = "summary.md"
KINDS = {
    "changed": "Changed: look here before you upgrade",
    "added": "Added",
    "faster": "Faster",
    "fixed": "Fixed",
}
KITS = ("threefold", "trainer", "datakit", "ckptkit", "project")  # the last: builds, docs, examples, tests
NAME = re.compile(rf"({'|'.join(KITS)})-[a-z0-9]+(-[a-z0-9]+)*\.md")
ENTRY = re.compile(rf"({'|'.join(KINDS)}): (\S.*)", re.DOTALL)
UNRELEASED = re.compile(r"^## (.+) \(unreleased\)$", re.MULTILINE)
WIDTH, SUMMARY_LINES, ENTRY_WORDS = 130, 30, 80


@dataclass(frozen=True, slots=True)
class Entry:
    """One change: its kind, the kits that it is in, and what it means for a user."""

    kind: str
    kits: str
    text: str

    @property
    def line(self) -> str:
        """The entry as an item of a list."""
        return textwrap.fill(
            f"- {self.kits}: {self.text}",
            WIDTH,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )

    @property
    def place(self) -> int:
        """The place of its first kit in a section."""
        names = [*KITS[:-1], re.split(r"\W", self.kits)[0]]
        return names.index(re.split(r"\W", self.kits)[0])


@dataclass(frozen=True, slots=True)
class Section:
    """What one release says: a summary for the first screen, then the entries of each kind."""

    summary: str
    entries: tuple[Entry, ...]

    def text(self, heading: str) -> str:
        """Return the Markdown of the section."""
        parts = [f"## {heading}\n{self.summary.strip()}\n"]
        for kind, title in KINDS.items():
            of_kind = sorted((entry for entry in self.entries if entry.kind == kind), key=lambda entry: entry.place)
            if of_kind:
                parts.append(f"### {title}\n" + "\n".join(entry.line for entry in of_kind) + "\n")
        return "\n".join(parts)


def main() -> int:
    found = faults(ROOT)
    print("\n".join(f"error: {fault}" for fault in found) or assembled(ROOT, "next (unreleased)"))
    return bool(found)


def fragments(root: Path) -> list[Path]:
    """Return the files with entries, in order."""
    return sorted(path for path in (root / FOLDER).glob("*.md") if path.name not in (SUMMARY, "README.md"))


def paragraphs(path: Path) -> list[str]:
    """Return the paragraphs of a fragment, each on one line; a line that begins with a kind begins one too."""
    starts = rf"\n\s*\n|\n(?=(?:{'|'.join(KINDS)}): )"
    return [" ".join(text.split()) for text in re.split(starts, path.read_text()) if text.strip()]


def entries_of(path: Path) -> Iterator[Entry]:
    """Yield the entries of a fragment without faults."""
    kit = path.name.partition("-")[0]
    for paragraph in paragraphs(path):
        match = ENTRY.fullmatch(paragraph)
        assert match is not None, f"{path} was looked at by faults()"
        yield Entry(match[1], kit, match[2])


def faults(root: Path) -> list[str]:
    """Return what is wrong with the fragments of a tree, each with its file."""
    problems = []
    for path in fragments(root):
        name = f"{FOLDER}/{path.name}"
        if not NAME.fullmatch(path.name):
            problems.append(f"{name}: the name is KIT-WORD.md, with one of the kits {', '.join(KITS)}")
        texts = paragraphs(path)
        if not texts:
            problems.append(f"{name} is empty: write an entry, such as `fixed: what a user sees now`")
        for text in texts:
            if not ENTRY.fullmatch(text):
                problems.append(
                    f"{name}: an entry begins with one of {', '.join(KINDS)} and a colon, not {text[:40]!r}"
                )
            elif len(text.split()) > ENTRY_WORDS:
                problems.append(f"{name}: an entry has at most {ENTRY_WORDS} words: the rest is for a page or a result")
    summary = root / FOLDER / SUMMARY
    if summary.exists() and len(summary.read_text().splitlines()) > SUMMARY_LINES:
        problems.append(f"{FOLDER}/{SUMMARY} has more than {SUMMARY_LINES} lines: it is what the first screen shows")
    return problems


def strays(root: Path) -> list[str]:
    """Return the entries that were written into CHANGELOG.md, above the summary of its next section."""
    text = (root / "CHANGELOG.md").read_text()
    marked = UNRELEASED.search(text)
    section = text[marked.end() :] if marked else ""
    return [line for line in section.partition("\n**")[0].splitlines() if line.startswith("- ")]


def section_of(text: str) -> Section:
    """Return what a section of CHANGELOG.md holds, its heading apart; entries above the first kind are changes."""
    summary, *parts = re.split(r"^### ", text, flags=re.MULTILINE)
    titles = {title: kind for kind, title in KINDS.items()}
    entries = []
    for part in parts:
        title, _, body = part.partition("\n")
        for item in re.split(r"^- ", body, flags=re.MULTILINE):
            kits, colon, said = " ".join(item.split()).partition(": ")
            if colon:
                entries.append(Entry(titles[title], kits, said))
    return Section(summary.strip(), tuple(entries))


def assembled(root: Path, heading: str) -> str:
    """Return CHANGELOG.md with the fragments of a tree put in under a heading; ValueError if there is nothing to say.

    A section that is marked as not released is completed; otherwise a new one comes before the others.
    """
    changelog, summary = (root / "CHANGELOG.md").read_text(), root / FOLDER / SUMMARY
    section, marked = Section("", ()), UNRELEASED.search(changelog)
    head, _, rest = changelog.partition("\n## ")
    rest = f"## {rest}" if rest else ""
    if marked:
        end = re.compile(r"^## ", re.MULTILINE).search(changelog, marked.end())
        stop = end.start() if end else len(changelog)
        section, rest = section_of(changelog[marked.end() : stop]), changelog[stop:]
    summary_text = summary.read_text() if summary.exists() else section.summary
    new = tuple(entry for path in fragments(root) for entry in entries_of(path))
    if not section.entries and not new:
        raise ValueError(f"{FOLDER}/ has no fragment, and CHANGELOG.md no section `## VERSION (unreleased)`")
    if not summary_text.strip():
        raise ValueError(f"{FOLDER}/{SUMMARY} does not say what a user gains, and what changes for him")
    written = Section(summary_text, (*section.entries, *new)).text(heading)
    return f"{head.rstrip()}\n\n{written}" + (f"\n{rest}" if rest else "")


if __name__ == "__main__":
    sys.exit(main())
