"""What `make test-dockerfile` would do: the lines with their folders and variables, and why it does nothing here."""

import shlex
from pathlib import Path

import pytest

from tools import try_dockerfile
from tools.try_dockerfile import lent_settings, main, refused, steps

ROOT = Path(__file__).parents[2]


def test_each_line_has_the_folder_and_variables_of_the_lines_before() -> None:
    text = 'FROM python:3.11-slim-bookworm\nARG A=1\nRUN a\nENV B="2 3" C=4\nWORKDIR /work\n# a comment\nCOPY . .\n'
    text += 'RUN b \\\n  c\nENTRYPOINT ["x", "-c", "y z"]\nCMD ["--help"]\n'
    begin, first, folder, copied, second, command = steps(text, {"A": "given"})
    assert begin.rest == "python:3.11-slim-bookworm"
    assert (first.rest, first.folder, first.variables) == ("a", "/", {"A": "given"})
    assert (folder.folder, copied.folder) == ("/work", "/work")
    assert (second.rest, second.variables) == ("b    c", {"A": "given", "B": "2 3", "C": "4"})
    assert shlex.split(command.rest) == ["x", "-c", "y z", "--help"]


def test_the_image_of_this_project_is_understood() -> None:
    lines = steps((ROOT / "Dockerfile").read_text(), {})
    assert [line.word for line in lines].count("RUN") == 4
    assert lines[-1].variables["TORCH"].startswith("torch==")
    assert shlex.split(lines[-1].rest)[-2:] == ["trainer", "--help"]


def test_a_word_that_is_not_known_ends_it() -> None:
    with pytest.raises(ValueError, match="HEALTHCHECK"):
        steps("HEALTHCHECK CMD true\n", {})


def test_folders_that_pips_settings_name_are_lent(tmp_path: Path) -> None:
    settings = {
        "find-links": f"{tmp_path}\n/not/here",
        "index-url": "https://one.example",
        "extra-index-url": "file:///a",
    }
    variables, lent = lent_settings(settings)
    assert variables == {"PIP_FIND_LINKS": f"{tmp_path}\n/not/here", "PIP_INDEX_URL": "https://one.example"}
    assert lent == [str(tmp_path)]


def test_without_root_or_its_programs_nothing_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(try_dockerfile.os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match=r"made by root\nhint: sudo make test-dockerfile"):
        main([])
    monkeypatch.setattr(try_dockerfile.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refused() == "debootstrap is not installed\nhint: apt-get install debootstrap util-linux"
