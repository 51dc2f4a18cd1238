"""README's three journeys run as typed, one after the other in one folder, with the lines of Python between them."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.datakit.conftest import write_jsonl
from tests.test_guides import ROOT, run_as_typed

README = (ROOT / "README.md").read_text()
SMALL = """
[model]
num_layers = 2
hidden_size = 32
num_heads = 4
num_kv_heads = 2
[train]
train_steps = 10
seq_length = 16
micro_batch_size = 1
global_batch_size = 2
device = "cpu"
[data.valid]
num_samples = 4
"""
SMALLER = {  # for a machine of two cores; nothing else of what README says is changed
    "--vocab-size 32768": "--vocab-size 600",
    "--nproc-per-node 8": "--nproc-per-node 4",
    "--workers 8": "--workers 2",
    "-interval 500": "-interval 10",
    "trainer launch": "sed -i s/train_steps.=.10/train_steps=20/ examples/gpt-small.toml\ntrainer launch",
}


def journeys() -> str:
    """All commands of the journeys, in order; lines of Python are handed to the interpreter."""
    commands = ""
    for language, block in re.findall(
        r"^```(sh|python)\n(.*?)^```", README.partition("\n## Journey 1")[2], re.M | re.S
    ):
        commands += block if language == "sh" else f"python - <<'PYTHON'\n{block}PYTHON\n"
    return commands


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_journeys_run_as_typed(tmp_path: Path, s3_url: str) -> None:
    folder = tmp_path / "here"
    (folder / "corpus").mkdir(parents=True)
    sources = sorted((ROOT / "datakit").rglob("*.py")) + sorted((ROOT / "ckptkit").rglob("*.py"))
    lines = [line for path in sources for line in path.read_text().splitlines()]
    pieces = [
        "\n".join(lines[at : at + 20]) for at in range(0, len(lines), 20)
    ]  # one of 100 is for validation, by its hash
    write_jsonl(folder / "corpus" / "a.jsonl", pieces)
    (folder / "examples").mkdir()
    (folder / "examples" / "gpt-small.toml").write_text(SMALL)
    tiny = (ROOT / "examples" / "tiny.toml").read_text()
    (folder / "examples" / "tiny.toml").write_text(tiny.replace("train_steps = 80", "train_steps = 12"))
    commands = re.sub(r"(?<= )/data/", f"{tmp_path}/data/", journeys().replace("s3://bucket", s3_url))
    for typed, smaller in SMALLER.items():
        assert typed in commands
        commands = commands.replace(typed, smaller)
    done = run_as_typed(commands, folder, timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "keep 20" in done.stdout or "step-000000020" in done.stdout


def test_each_kit_has_its_lines_of_python() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    for kit, block in zip(("datakit", "trainer", "ckptkit"), blocks, strict=True):
        assert re.search(rf"^from {kit}(\.torch)? import ", block, re.M)
        assert len([line for line in block.splitlines() if line and "import" not in line]) <= 6


def test_the_install_lines_name_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for line in re.findall(r"\[([a-z0-9,]+)\]\"", README) for name in line.split(",")}
    assert {"train", "s3", "fast"} <= named <= extras.keys()
