"""Tags: globs and folders against a plain reading of them; a document's tag through preprocess, merge and stats."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit import Recipe, TokenStore, merge, preprocess, statistics, write_store
from datakit.format.manifest import Manifest
from datakit.format.tags import StoreTags, Tag, tag_of
from datakit.reports.html import render_report
from datakit.tokenization.identity import TokenizerIdentity
from tests.datakit.conftest import Cli, write_jsonl
from threefold.errors import CheckFailed, UserError


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("corpus/code", "corpus/code/a/b.jsonl", True),
        ("corpus/code", "corpus/code.jsonl", False),
        ("./corpus//code/", "corpus/code/a.jsonl", True),
        ("/data/code", "/data/code/a.jsonl", True),
        ("data/code", "/data/code/a.jsonl", False),
        ("corpus/*.jsonl", "corpus/a.jsonl", True),
        ("corpus/*.jsonl", "corpus/x/a.jsonl", False),
        ("corpus/**/*.txt", "corpus/a.txt", True),
        ("corpus/**/*.txt", "corpus/x/y/a.txt", True),
        ("**/web-[0-9]?.jsonl", "a/b/web-07.jsonl", True),
        ("**/web-[!0-9]?.jsonl", "a/b/web-07.jsonl", False),
        ("s3://bucket/code", "s3://bucket/code/a.jsonl", True),
        ("Corpus", "corpus/a.jsonl", False),
    ],
)
def test_patterns_are_folders_or_globs_of_whole_paths(pattern: str, path: str, matches: bool) -> None:
    assert Tag.parse(f"t={pattern}").matches(path) is matches


NAMES = st.text("ab.", min_size=1, max_size=3).filter(lambda name: name.strip("."))
PARTS = NAMES | st.sampled_from(["*", "a*", "?", "**", "[ab]*"])


@given(st.lists(PARTS, min_size=1, max_size=4), st.lists(NAMES, min_size=1, max_size=5))
def test_a_pattern_is_the_regular_expression_that_it_stands_for(pattern: list[str], path: list[str]) -> None:
    parts = [
        "(?:[^/]+/)*" if part == "**" else re.escape(part).replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
        .replace(r"\[ab\]", "[ab]") + "/" for part in pattern
    ]  # fmt: skip
    expected = re.match("".join(parts), "/".join(path) + "/") is not None
    assert Tag("t", "/".join(pattern)).matches("/".join(path)) is expected


def test_the_first_tag_that_matches_counts() -> None:
    tags = [Tag("a", "x/a"), Tag("rest", "x"), Tag("never", "**")]
    assert [tag_of(tags, path) for path in ("x/a/1", "x/b", "y")] == ["a", "rest", "never"]
    assert tag_of(tags[:2], "y") is None


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """Three folders, `code`, `web` and `other`, of two files each."""
    folder = tmp_path_factory.mktemp("tagged")
    for number, name in enumerate(["code", "other", "web"]):
        (folder / name).mkdir()
        for part in range(2):
            start = 100 * number + 40 * part
            write_jsonl(folder / name / f"{part}.jsonl", texts[start : start + 40])
    return folder


def tags_of(store: TokenStore) -> dict[tuple[str | None, str], int]:
    """Tokens by tag and folder of the source, document by document."""
    found: dict[tuple[str | None, str], int] = {}
    for number in range(store.num_documents):
        key = store.tag(number), Path(store.origin(number).path).parent.name
        found[key] = found.get(key, 0) + len(store.document(number))
    return found


@pytest.mark.ci
@pytest.mark.slow
def test_documents_are_counted_by_tag_in_a_store_and_in_merges_of_merges(
    tmp_path: Path, corpus: Path, tokenizer_path: str
) -> None:
    tags = (Tag("code", f"{corpus}/code"), Tag("web", f"{corpus}/**/1.jsonl"))
    both = preprocess([str(corpus)], tmp_path / "a", Recipe(tokenizer_path, tags=tags), num_workers=2, item_bytes=4000)
    swapped = Recipe(tokenizer_path, tags=(Tag("other name", f"{corpus}/code"),))
    preprocess([str(corpus / "code")], tmp_path / "b", swapped)
    preprocess([str(corpus / "web")], tmp_path / "c", Recipe(tokenizer_path))
    preprocess([str(corpus / "code")], tmp_path / "d", swapped, item_bytes=4000)
    store = TokenStore.open(tmp_path / "a")
    assert store.manifest.settings["tags"] == [[tag.name, tag.pattern] for tag in tags]
    one = tags_of(store)
    assert set(one) == {
        ("code", "code"), ("web", "web"), ("web", "other"), (None, "web"), (None, "other"),
    }  # fmt: skip
    merge([tmp_path / "b", tmp_path / "d"], tmp_path / "shared")
    merge([tmp_path / "c", tmp_path / "shared"], tmp_path / "inner")
    merged = merge([tmp_path / "a", tmp_path / "inner", tmp_path / "a"], tmp_path / "m")
    merged_tags, code = tags_of(merged), tags_of(TokenStore.open(tmp_path / "b"))["other name", "code"]
    untagged = tags_of(TokenStore.open(tmp_path / "c"))[None, "web"]
    expected = {key: 2 * count for key, count in one.items()} | {("other name", "code"): 2 * code}
    assert merged_tags == expected | {(None, "web"): expected[None, "web"] + untagged}
    counted = statistics([tmp_path / "m"])
    assert sum(tag.num_documents for tag in counted.tags) == merged.num_documents
    assert counted.tags[-1].name is None
    for tag in counted.tags:
        assert tag.num_tokens == sum(count for (name, _), count in merged_tags.items() if name == tag.name)
    assert [tag.num_tokens for tag in counted.tags[:-1]] == sorted(
        (tag.num_tokens for tag in counted.tags[:-1]), reverse=True
    )
    assert both.num_documents == 240
    plain = preprocess([str(corpus)], tmp_path / "plain", Recipe(tokenizer_path), item_bytes=4000)
    assert plain.num_tokens == both.num_tokens
    assert TokenStore.open(tmp_path / "plain").fingerprint == store.fingerprint
    assert "tags" not in TokenStore.open(tmp_path / "plain").manifest.settings


@pytest.mark.ci
@pytest.mark.slow
def test_the_verbs_take_and_show_tags(
    tmp_path: Path, corpus: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["preprocess", corpus, "--tokenizer", tokenizer_path, "--output", tmp_path / "s"]
    tags = ["--tag", f"c<o>de={corpus}/code/", "--tag", f"web={corpus}/web"]
    assert cli(*words, *tags) == 0
    assert cli(*words, "--tag", f"code={corpus}/code") == 2
    assert "its tags is" in capsys.readouterr().err
    assert cli("inspect", tmp_path / "s", "--document", "0") == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(", tag c<o>de")
    assert cli("inspect", tmp_path / "s", "--document", "80") == 0
    assert ", tag" not in capsys.readouterr().out.splitlines()[0]
    assert cli("inspect", tmp_path / "s", "--sample", "0", "--seq-length", "9999", "--json") == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert {(Path(each["path"]).parent.name, each["tag"]) for each in sources} >= {("code", "c<o>de"), ("other", None)}
    assert cli("stats", tmp_path / "s") == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.split() == ["tokens", "documents", "tag"])
    assert sorted(line.split(maxsplit=2)[2] for line in lines[at + 1 : at + 4]) == ["c<o>de", "no tag", "web"]
    assert cli("stats", tmp_path / "s", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tags"][-1]["name"] is None
    page = render_report(statistics([tmp_path / "s"]))
    assert "<h2>Tokens by tag</h2>" in page
    assert "c&lt;o&gt;de" in page
    assert "by tag" not in render_report(statistics([write_store(tmp_path / "e", [[1]], vocab_size=9).path]))


def test_a_tag_that_matches_nothing_or_is_none_is_told(
    tmp_path: Path, corpus: Path, tokenizer_path: str, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["preprocess", corpus, "--tokenizer", tokenizer_path, "--output", tmp_path / "s"]
    assert cli(*words, "--tag", f"code={corpus}/code", "--tag", "books=books") == 2
    assert "tag 'books' matches no input file: books" in capsys.readouterr().err
    for wrong in ("books", "=books", "books="):
        assert cli(*words, "--tag", wrong) == 2
        assert f"{wrong!r} is not a tag like" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()
    with pytest.raises(UserError, match="matches no input"):
        preprocess([str(corpus)], tmp_path / "s", Recipe(tokenizer_path, tags=(Tag("x", "*.md"),)))


@pytest.mark.parametrize(
    "settings",
    [
        {"tags": 3}, {"tags": [["a"]]}, {"tags": [["a", 1]]}, {"tags": ["abc"]}, {"merged": [1]},
        {"merged": [{"num_shards": 1, "settings": {}}]}, {"merged": 5},
    ],
)  # fmt: skip
def test_settings_that_are_no_stores_are_told(settings: dict[str, object]) -> None:
    manifest = Manifest("uint16", TokenizerIdentity("none", "", 9, None, None), (), settings)
    with pytest.raises(CheckFailed, match=r"some/manifest\.json: settings"):
        StoreTags(manifest, "some/manifest.json")
