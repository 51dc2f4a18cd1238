"""What the build refuses in its pages: each way in which Markdown stays raw, and links that lead nowhere."""

from pathlib import Path

import pytest

from tools.site.check import faults_of_site

GOOD = """<nav><a href="b.html#there">B</a></nav><article><h1 id="top">A</h1><p>Prose, <code>| --- |</code>, 3 - 2 = 1.
<a href="#top">up</a> <a href="https://a.b/c">out</a></p><pre>- no list
|---|
## no heading</pre></article>"""
OTHER = '<article><h1 id="there">B</h1><p>Words.</p></article>'


def faults(folder: Path, body: str) -> list[str]:
    (folder / "a.html").write_text(GOOD.replace("</article>", f"{body}</article>"))
    (folder / "b.html").write_text(OTHER)
    return faults_of_site(folder)


def test_a_sound_site_has_no_fault(tmp_path: Path) -> None:
    assert faults(tmp_path, "") == []


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<p>| a | b |\n|---|---|\n| 1 | 2 |</p>", "a table stayed raw"),
        ("<p>What follows.\n- one\n- two</p>", "a list stayed raw"),
        ("<p>- one</p>", "a list stayed raw"),
        ("<ul><li>1. one</li></ul>", "a list stayed raw"),
        ("<p>```sh ls ```</p>", "a fence stayed raw"),
        ("<p>Text\n## Heading</p>", "a heading stayed raw"),
        ("<td>[a](b.md)</td>", "a link stayed raw"),
        ("<p>**strong words**</p>", "emphasis stayed raw"),
        ("<p>::: datakit.Blend</p>", "a directive stayed raw"),
        ('<p><a href="c.html">c</a></p>', "leads to no file"),
        ('<p><a href="b.html#gone">c</a></p>', "leads to no heading"),
        ('<p><img src="gone.svg"></p>', "leads to no file"),
    ],
)
def test_each_fault_is_named_with_its_page(body: str, fault: str, tmp_path: Path) -> None:
    [found] = faults(tmp_path, body)
    assert found.startswith("a.html")
    assert fault in found


def test_an_empty_page_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<nav>menu</nav><article></article>")
    assert faults_of_site(tmp_path) == ["a.html is empty"]
