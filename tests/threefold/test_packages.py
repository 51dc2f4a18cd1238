"""Packages that are missing or another's: every verb works or ends in one line, and a shadowed kit is named."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.test_help import KITS, verbs
from threefold.installing import install
from threefold.packages import EXTRA_OF
from tools.try_verbs import COMMANDS

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_without_any_extra_each_verb_works_or_ends_in_one_line() -> None:
    command = [sys.executable, ROOT / "tools" / "try_verbs.py", "--hide", *EXTRA_OF]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    hints = [hint for each in ended for hint in re.findall(r"^hint: (.*)", each["said"], re.MULTILINE)]
    assert {*hints} >= {install("", extra) for extra in ("train", "s3", "arrow", "tiktoken", "ray", "plot")}
    assert sum(each["code"] == 0 for each in ended) >= 18


def test_what_is_tried_has_every_verb() -> None:
    tried = {tuple(line.split()[:2]) for line in COMMANDS.strip().splitlines()}
    assert tried == {(kit, verb) for kit in KITS for verb in verbs(kit)}


def test_each_extra_that_a_hint_names_installs_the_package() -> None:
    for package, extra in EXTRA_OF.items():
        name = package.replace("_", "[-_]")
        assert package in ("botocore", "pynvml") or any(re.match(rf"{name}\b", line) for line in EXTRAS[extra])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the four packages, as an installer leaves them."""
    for package in ("threefold", *KITS):
        shutil.copytree(ROOT / package, tmp_path / "site" / package, ignore=shutil.ignore_patterns("*.so"))
    return tmp_path / "site"


def run(site: Path, kit: str, *before: Path) -> tuple[int, str]:
    """Exit code and stderr of a kit's `--help` with nothing but these folders to import from."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*before, site]))}
    command = [sys.executable, "-S", "-P", "-c", f"import sys, threefold.packages as p; sys.exit(p.{kit}())", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_kit_that_is_ours_starts(site: Path) -> None:
    assert run(site, "ckptkit") == (0, "")


@pytest.mark.parametrize("init", ["VERSION = '0.3.0'\n", "import a_package_of_theirs\n"])
def test_another_distributions_files_among_ours_are_named(site: Path, init: str) -> None:
    (site / "ckptkit" / "__init__.py").write_text(init)
    (site / "ckptkit-0.3.0.dist-info").mkdir()
    (site / "ckptkit-0.3.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ckptkit\nVersion: 0.3.0\n")
    (site / "ckptkit-0.3.0.dist-info" / "RECORD").write_text("ckptkit/__init__.py,,\n")
    for kit in ("ckptkit", "trainer"):
        code, said = run(site, kit)
        assert code == 2
        assert said == (
            f"error: the package ckptkit in {site / 'ckptkit'} is that of ckptkit, not of threefold\n"
            "hint: pip uninstall -y ckptkit && pip install --force-reinstall --no-deps threefold-*.whl\n"
        )


def test_a_folder_that_shadows_a_kit_is_named(site: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "work" / "trainer"
    theirs.mkdir(parents=True)
    (theirs / "__init__.py").write_text("raise SystemExit('executed')")
    code, said = run(site, "trainer", theirs.parent)
    assert code == 2
    assert said.startswith(f"error: {theirs} is found in place of threefold's package trainer\nhint: rename it")


@pytest.mark.parametrize("lost_file", ["ckptkit", "ckptkit/__init__.py", "ckptkit/cli.py"])
def test_a_kit_that_is_not_whole_is_named(site: Path, lost_file: str) -> None:
    path = site / lost_file
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    code, said = run(site, "ckptkit")
    assert code == 2
    assert re.fullmatch(r"error: .*ckptkit.*\nhint: .*\n", said)
