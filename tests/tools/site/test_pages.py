"""The pages of the site: lists and tables that GitHub reads, links of pages that moved, and contents that miss none."""

import re
import tomllib
from pathlib import Path

import pytest

from tools.site.pages import CONFIG, ROOT, check_contents, gather_pages, listed, made_pages, relinked, with_blank_lines


@pytest.mark.parametrize("before", ["a paragraph", "# A heading", "```sh\nls\n```", "**What follows.**"])
@pytest.mark.parametrize(
    "block", ["- one\n  goes on\n- two", "* one\n* two", "1. one\n2. two", "| a | b |\n|---|---|\n| 1 | 2 |"]
)
def test_a_list_or_a_table_may_follow_anything(before: str, block: str) -> None:
    assert with_blank_lines(f"{before}\n{block}\n") == f"{before}\n\n{block}\n"
    assert with_blank_lines(f"{before}\n\n{block}\n") == f"{before}\n\n{block}\n"


@pytest.mark.parametrize(
    "text",
    [
        "```text\nsome\n- no item\n| no | table |\n```\n",
        "in the year\n2026. It ended\n",
        "- one\ngoes on\n- two\n",
        "````\n```\n- x\n````\n",
    ],
)
def test_what_is_no_list_stays(text: str) -> None:
    assert with_blank_lines(text) == text


def test_links_follow_pages_that_moved() -> None:
    assert relinked("[a](guides/save.md#x)", "docs/index.md") == "[a](docs/guides/save.md#x)"
    assert relinked("[a](../README.md)", "docs/index.md") == "[a](journeys.md)"
    assert relinked("[a](../../README.md#install)", "docs/guides/save.md") == "[a](../../journeys.md#install)"
    assert relinked("[a](https://a.b/README.md) [b](#here)", "docs/ops.md") == "[a](https://a.b/README.md) [b](#here)"


def test_a_file_that_is_not_in_the_site_is_a_link_to_the_sources() -> None:
    [link] = re.findall(r"\((.+)\)", relinked("[a](../../examples/gpt-small.toml)", "docs/guides/save.md"))
    assert re.fullmatch(r"https://[^ ]+/blob/main/examples/gpt-small\.toml", link)
    assert relinked("[a](../../examples/gone.toml)", "docs/guides/save.md") == "[a](../../examples/gone.toml)"
    assert relinked("[a](changes/README.md)", "CHANGELOG.md").endswith("/blob/main/changes/README.md)")


def test_the_contents_list_every_page_once(tmp_path: Path) -> None:
    gather_pages(tmp_path)
    assert "docs/guides/save.md" in set(listed(tomllib.loads(CONFIG.read_text())["project"]["nav"]))
    (tmp_path / "docs" / "guides" / "new.md").write_text("# New\n")
    (tmp_path / "docs" / "guides" / "save.md").unlink()
    with pytest.raises(ValueError, match=r"docs/guides/new\.md is not in it: add it") as error:
        check_contents(tomllib.loads(CONFIG.read_text()), tmp_path)
    assert "docs/guides/save.md is listed, and there is no such page" in str(error.value)


def test_a_figure_of_the_front_page_is_in_the_result_that_it_cites() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    figures = text.partition('<div class="figures"')[2].partition("[All results]")[0].split("<div markdown>")[1:]
    assert len(figures) >= 5
    for figure in figures:
        [cited] = re.findall(r"\(\.\./(benchmarks/[^)]+)\)", figure)
        result = (ROOT / cited).read_text()
        said = re.findall(r"\d+(?:[.,]\d+)+", figure.partition("[")[0].partition("\n\n")[2].partition("\n\n")[2])
        numbers = [number for number in said if number != "0.2.2"]
        assert [number for number in numbers if number not in result] == []
        script = re.search(r"\[(\w+\.py)\]", figure)
        assert script is not None
        assert script[1] in result


def test_no_made_page_has_markdown_of_an_option() -> None:
    for name, text in made_pages().items():
        assert not re.search(r"^\|.*\|(?<!\|)$\n(?!\|)(?=\S)", text, re.MULTILINE), name
