"""Commands that install: what they name is on the index, and this project, which is on none, is named by its place."""

import re
import tomllib
from pathlib import Path

import pytest

from threefold import installing
from threefold.packages import EXTRA_OF

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# on the index, for peers and tests; none of them is a dependency
OTHERS = {"transformers", "accelerate", "lightning", "torchdata", "paramiko", "datasets", "deepspeed", "megatron-core",
          "torch_checkpointing", "ziglang", "uv"}  # fmt: skip
NAME = re.compile(r"[A-Za-z][\w.-]*")
FLAGS_WITH_VALUE = {"--target", "-C", "--progress-bar"}


def names(line: str) -> list[str]:
    """The names that a line's `pip install` asks an index for; places and flags are left out."""
    text = re.split(r"[;)`&]|    #|:|, | or | and run |\\n|\?", line.partition("pip install")[2])[0]
    words, found = re.findall(r"[^\s\"']+", text), []
    for before, word in zip(["", *words], words, strict=False):
        is_place = before == "-e" or "/" in word or word.startswith((".", "-", "$", "{")) or "*" in word
        if before not in FLAGS_WITH_VALUE and not is_place and NAME.match(word):
            found.append(NAME.match(word)[0])  # type: ignore[index]
    return found


def lines() -> list[tuple[str, str]]:
    files = [path for folder in ("threefold", *("datakit", "ckptkit", "trainer"), "tools", "docs", "examples")
             for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".toml", ".sbatch")]  # fmt: skip
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Dockerfile"]
    return [(f"{path.relative_to(ROOT)}: {line.strip()}", line) for path in files
            for line in path.read_text().splitlines() if re.search(r"pip install\b", line)]  # fmt: skip


def test_no_command_of_the_tree_asks_an_index_for_this_project() -> None:
    shown = lines()
    assert len(shown) > 15
    named = [*PROJECT["dependencies"], *(each for extra in EXTRAS.values() for each in extra)]
    known = {re.split(r"[<>=\[;]", each)[0] for each in named}
    unknown = [f"{where} ({name})" for where, line in shown for name in names(line) if name not in known | OTHERS]
    assert not unknown
    assert not [where for where, line in shown if "threefold" in names(line)]


@pytest.mark.parametrize(
    "line", ["pip install 'threefold[s3]'", 'hint="pip install -U threefold"', "pip install threefold"]
)
def test_such_a_command_would_be_seen(line: str) -> None:
    assert names(line) == ["threefold"]


def test_an_extra_is_installed_by_what_it_names() -> None:
    for extra in {*EXTRA_OF.values()}:
        wanted = [re.split(r"[<>=\[;]", each)[0] for each in EXTRAS[extra]]
        assert [re.split(r"[<>=\[;]", each)[0] for each in installing.requirements(extra)] == wanted
    assert installing.install("jinja2", "plot") == 'pip install "matplotlib>=3.8" "jinja2>=3.1"'
    assert installing.install("numpy") == 'pip install "numpy"'


class Installed:
    def __init__(self, text: str | None) -> None:
        self.text = text

    def read_text(self, _: str) -> str | None:
        return self.text


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ('{"url": "file:///src/three%20fold", "dir_info": {"editable": true}}', "-e '/src/three fold'"),
        ('{"url": "file:///w/threefold-0.1.0-py3-none-any.whl"}', "/w/threefold-0.1.0-py3-none-any.whl"),
        ('{"url": "https://host/threefold.whl"}', "threefold-*.whl"),
        (None, "threefold-*.whl"),
        ("{", "threefold-*.whl"),
    ],
)
def test_a_repair_names_where_this_was_installed_of(
    monkeypatch: pytest.MonkeyPatch, text: str | None, source: str
) -> None:
    monkeypatch.setattr(installing, "distribution", lambda _: Installed(text))
    assert installing.repair() == f"pip install --force-reinstall --no-deps {source}"
