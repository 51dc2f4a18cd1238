"""The words of this project: some are out, and every domain noun of the concept pages is in the glossary."""

import re
import subprocess
import sys

from tests.test_docs import PAGES, ROOT, anchors, prose

OUT = {  # word: what it looks like; CONTRIBUTING.md says what to write instead
    "tell": r"tells?|telling|told",
    "give": r"gives",
    "stand": r"stands",
    "lie": r"lies",
    "anew": r"anew",
    "begun of": r"begun of",
    "is no": r"is no (?!longer|more|such|\w+er than)\w+",
}
ANY_OUT = re.compile(r"\b(?:" + "|".join(f"({word})" for word in OUT.values()) + r")\b", re.IGNORECASE)
AREAS = {
    "docs": ["*.md", "docs/**/*.md", "changes/*.md"],
    "threefold": ["threefold/**/*.py"],
    "datakit": ["datakit/**/*.py", "csrc/datakit/*", "csrc/mapped/*"],
    "ckptkit": ["ckptkit/**/*.py", "csrc/ckptkit/*", "csrc/hashing/*"],
    "trainer": ["trainer/**/*.py", "csrc/ops/*"],
    "programs": ["tools/**/*.py", "examples/**/*.py", "benchmarks/**/*.py"],
}
LEFT: dict[str, dict[str, int]] = {  # how many are left; these numbers only shrink
    "datakit": {"tell": 2, "give": 1, "is no": 5},
    "trainer": {"give": 1, "lie": 1, "is no": 1},
    "programs": {"tell": 6, "give": 4, "stand": 1, "lie": 1, "is no": 1},
}
PLAIN = {  # terms that are also plain words, which no page has to link
    "action", "archive", "batch", "commit", "cover", "cut", "entry", "overflow", "part", "place", "row", "run", "share",
    "split", "step", "tag", "unit",
}  # fmt: skip
HARD = {  # terms that no page but the glossary uses before it links or defines them
    "arena", "attempt", "box", "chunk", "data file", "exclusive write", "first writer", "granule", "layout",
    "manifest", "master weight", "micro-batch", "orphan", "part index", "piece", "placement", "quarantine", "rank",
    "recipe", "root", "slab", "tier", "window", "work item", "writer process",
}  # fmt: skip
OWN = {  # words of the code that only this project uses so: they are in the glossary, or go away
    "attempt",
    "border",
    "certificate",
    "claim",
    "debris",
    "entry",
    "era",
    "geometry",
    "granule",
    "holder",
    "overflow",
    "passage",
    "quarantine",
    "seal",
    "seat",
    "second look",
    "slab",
    "split master",
    "tier",
    "unit",
    "verdict",
    "window",
}
MEANS_ANOTHER = {  # pages where a word is other people's, or plain
    ("archive.md", "piece"), ("convert.md", "chunk"), ("preprocess.md", "rank"), ("token-store.md", "chunk"),
    ("hugging-face.md", "window"),
}  # fmt: skip
WRITTEN_SO = ["ARCHITECTURE.md", "docs/glossary.md", "docs/concepts/*.md", "docs/decisions/*.md"]
MAX_WORDS = 25
FIRST_TERMS = 8  # of the glossary, that a guide needs up to its first example
NOT_IMPERATIVE = {
    "threefold": 0,
    "datakit": 0,
    "ckptkit": 0,
    "trainer": 0,
}  # functions whose docstring begins otherwise, by kit; these numbers only shrink


def occurrences(area: str) -> dict[str, list[str]]:
    """Return the lines of an area that have words that are out, by word, each with its place; code in pages is left."""
    places: dict[str, list[str]] = {word: [] for word in OUT}
    words = list(OUT)
    for path in sorted(path for pattern in AREAS[area] for path in ROOT.glob(pattern)):
        text = re.sub(r"`[^`\n]*`", "", path.read_text()) if path.suffix == ".md" else path.read_text()
        for match in ANY_OUT.finditer(text):
            number = text.count("\n", 0, match.start()) + 1
            line = text.splitlines()[number - 1].strip()
            places[words[(match.lastindex or 1) - 1]].append(f"{path.relative_to(ROOT)}:{number}: {line}")
    return places


def test_words_that_are_out_only_become_fewer() -> None:
    for area in AREAS:
        for word, lines in occurrences(area).items():
            allowed = LEFT.get(area, {}).get(word, 0)
            assert len(lines) <= allowed, f"{word!r}: {len(lines)} in {area}, {allowed} are left\n" + "\n".join(lines)


def test_docstrings_that_begin_without_a_verb_only_become_fewer() -> None:
    for kit, allowed in NOT_IMPERATIVE.items():
        command = ["ruff", "check", "--isolated", "--select", "D401", "--output-format", "concise", kit]
        run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        found = [line for line in run.stdout.splitlines() if "D401" in line]
        assert len(found) <= allowed, f"{len(found)} in {kit}, {allowed} are left\n" + "\n".join(found)


def test_a_glossary_term_is_linked_where_a_concept_page_first_uses_it() -> None:
    glossary = ROOT / "docs" / "glossary.md"
    terms = re.findall(r"^### (.+)$", glossary.read_text(), re.MULTILINE)
    assert len(terms) > 60
    for page in sorted((ROOT / "docs" / "concepts").glob("*.md")):
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)|^[#|].*$|`[^`\n]*`", "", prose(page), flags=re.MULTILINE)
        for term in terms:
            words = re.escape(term).replace(r"\ ", r"\s+")
            link = re.compile(rf"\[[^\]]*{words}[^\]]*\]\([^)]*\)", re.IGNORECASE)
            linked = link.search(text)
            used = re.search(rf"(?<![\w-]){words}(?:e?s)?(?![\w-])", re.sub(r"\]\([^)]*\)", "]", text), re.IGNORECASE)
            assert term.lower() in PLAIN or not used or linked, f"{page.name} uses {term!r} without a link"


def test_own_words_of_the_code_are_in_the_glossary_and_all_of_it_is_used() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    terms = {term.lower() for term in re.findall(r"^### (.+)$", glossary, re.MULTILINE)}
    assert not OWN - terms, "define them, or say it in plain words"
    kits = [
        path.read_text()
        for kit in ("threefold", "datakit", "ckptkit", "trainer")
        for path in ROOT.glob(f"{kit}/**/*.py")
    ]
    text = "\n".join([*kits, *(page.read_text() for page in PAGES if page.name != "glossary.md")]).lower()
    unused = [term for term in terms if not re.search(rf"{re.escape(term)}|{re.escape(term.replace(' ', '_'))}", text)]
    assert not unused, f"nothing says these: {unused}"


def blanked(pattern: str, text: str) -> str:
    """Return the text with what matches as spaces, so that places stay."""
    return re.sub(pattern, lambda found: " " * len(found[0]), text, flags=re.MULTILINE)


def test_a_hard_term_is_linked_or_defined_where_a_page_first_uses_it() -> None:
    num_used = 0
    for page in PAGES:
        text = blanked(r"!\[[^\]]*\]\([^)]*\)|^[#|].*$|`[^`]+`", prose(page))
        text = blanked(r"(?<=\])\([^)]*\)", text)
        for term in sorted(HARD):
            words = term.replace(" ", r"\s+")
            used = re.search(rf"(?<![\w-]){words}(?:e?s)?(?![\w-])", text, re.IGNORECASE)
            if page.name in ("CHANGELOG.md", "glossary.md") or (page.name, term) in MEANS_ANOTHER or not used:
                continue
            before = text[: used.start()]
            is_linked, is_defined = before.rfind("[") > before.rfind("]"), before.endswith("*")
            assert is_linked or is_defined, f"{page.relative_to(ROOT)} first uses {used[0]!r} without a link"
            num_used += 1
    assert num_used > 100


def test_public_classes_that_concept_pages_name_are_in_the_glossary() -> None:
    import ckptkit
    import datakit
    import trainer

    defined = anchors(ROOT / "docs" / "glossary.md")
    for page in sorted((ROOT / "docs" / "concepts").glob("*.md")):
        for name in set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", prose(page))):
            if any(name in kit.__all__ for kit in (ckptkit, datakit, trainer)):
                assert name.lower() in defined, f"{page.name}: {name}"


def test_a_guide_needs_few_terms_up_to_its_first_example() -> None:
    terms = [term.lower() for term in re.findall(r"^### (.+)$", (ROOT / "docs" / "glossary.md").read_text(), re.M)]
    for page in sorted((ROOT / "docs" / "guides").glob("*.md")):
        before, *_ = re.split(r"^```", page.read_text(), maxsplit=1, flags=re.MULTILINE)
        text = re.sub(r"`[^`]+`", "", re.sub(r"\]\([^)]*\)", "]", before))
        used = [
            term
            for term in terms
            if term not in PLAIN and re.search(rf"(?<![\w-]){re.escape(term)}(?:e?s)?(?![\w-])", text, re.IGNORECASE)
        ]
        assert len(used) <= FIRST_TERMS, f"{page.name}: {', '.join(used)}"


def test_sentences_are_short() -> None:
    for pattern in WRITTEN_SO:
        for page in sorted(ROOT.glob(pattern)):
            text = re.sub(r"^[#|!].*$|^\d+\. |^- ", "", prose(page), flags=re.MULTILINE)
            text = re.sub(r"`[^`\n]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))
            for sentence in re.split(r"[.?:;](?:\W*\s)|\n\n", text):
                assert len(sentence.split()) <= MAX_WORDS, f"{page.relative_to(ROOT)}: {sentence}"
