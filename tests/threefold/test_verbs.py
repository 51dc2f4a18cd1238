"""The verbs of every kit: a file each, found by `help VERB` and completed by the shell."""

import dataclasses
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.printed import printed
from tests.test_help import KITS
from threefold.options import leaves
from threefold.verbs import summary

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("kit", KITS)
def test_each_verb_is_a_file_with_its_help_its_options_and_its_run(kit: str) -> None:
    package = import_module(f"{kit}.commands")
    files = {path.stem for path in (ROOT / kit / "commands").glob("*.py")} - {"__init__", "shared"}
    assert files == {verb.replace("-", "_") for verb in package.VERBS}
    assert len(package.VERBS) == len(files)
    for name in files:
        module = import_module(f"{kit}.commands.{name}")
        assert module.__doc__.startswith(f"`{kit} {name.replace('_', '-')}`: {summary(Path(module.__file__))}.")
        assert module.run.__doc__
        assert dataclasses.is_dataclass(module.Options)
        for leaf in leaves(module.Options):
            assert leaf.option.help, f"{kit} {name}: {leaf.name}"


@pytest.mark.parametrize("kit", KITS)
def test_help_of_a_verb_is_what_its_flag_prints(kit: str, capsys: Capture) -> None:
    main = import_module(f"{kit}.cli").main
    for verb in (*import_module(f"{kit}.commands").VERBS, "help", "completion"):
        assert printed(main, ["help", verb], capsys) == printed(main, [verb, "--help"], capsys)
    assert printed(main, ["help"], capsys) == printed(main, ["--help"], capsys)
    code, _, err = printed(main, ["help", "completio"], capsys)
    assert (code, err) == (2, f"error: verb: there is no completio, did you mean completion?\nhint: {kit} --help\n")


@pytest.mark.parametrize(("verb", "most"), [("eval", 31), ("generate", 50)])
def test_a_verb_that_reads_a_checkpoint_shows_its_own_flags_only(verb: str, most: int, capsys: Capture) -> None:
    main = import_module("trainer.cli").main
    _, out, _ = printed(main, [verb, "--help"], capsys)
    assert "--optim.lr" not in out
    assert "trainer train --help" in out
    assert len(out.splitlines()) < most
    assert "--optim.lr" in printed(main, ["train", "--help"], capsys)[1]


@pytest.mark.parametrize(
    ("words", "among"),
    [
        ("ckptkit ver", "verify"),
        ("ckptkit ls --so", "--sort"),
        ("ckptkit ls --sort val", "val_loss"),
        ("datakit preprocess --skip-e", "--skip-empty"),
        ("datakit preprocess --engine r", "ray"),
        ("trainer train --tensor", "--tensor-model-parallel-size"),
        ("trainer train exam", "examples"),
        ("trainer help", "help"),
    ],
)
def test_bash_completes_verbs_flags_choices_and_paths(words: str, among: str, capsys: Capture) -> None:
    pytest.importorskip("shtab")
    kit, *arguments = words.split()
    code, script, _ = printed(import_module(f"{kit}.cli").main, ["completion", "bash"], capsys)
    assert code == 0
    program = f"""{script}
COMP_WORDS=({words}); COMP_CWORD={len(arguments)}; COMP_LINE="{words}"
compopt() {{ :; }}
$(complete -p {kit} | sed 's/.*-F \\([^ ]*\\).*/\\1/') {kit} "{arguments[-1]}" ""
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert among in done.stdout.split(), done


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_a_script_too(shell: str, capsys: Capture) -> None:
    pytest.importorskip("shtab")
    for kit in KITS:
        code, script, err = printed(import_module(f"{kit}.cli").main, ["completion", shell], capsys)
        assert (code, err) == (0, "")
        assert kit in script


def test_without_the_package_completion_names_the_extra(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    code, out, err = printed(import_module("ckptkit.cli").main, ["completion", "bash"], capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: completion needs the package shtab")
