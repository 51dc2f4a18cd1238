"""What ships beside the code: jobs for Slurm, Dockerfile, citation, whose commands and names are those of the tree."""

import re
import shlex
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from threefold.errors import UserError
from threefold.flags import read_options

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROGRAMS = ("datakit", "ckptkit", "trainer")
VALUES = {"SLURM_CPUS_PER_TASK": "32", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "first_node": "host"}
DIRECTIVES = {"job-name", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "output",
              "signal", "requeue"}  # fmt: skip


def commands(text: str) -> list[list[str]]:
    """The commands of a script that are of this project, with the values of its variables in their places."""
    defaults = dict(re.findall(r"^(\w+)=\$\{\w+:-([^}]*)\}$", text, re.MULTILINE)) | VALUES
    packages = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(re.sub(r"\$(\w+)", lambda match: defaults.get(match[1], match[0]), line), comments=True)
        if "launch" in words and words[0] == "srun":
            words = ["trainer", *words[words.index("train") :]]
        if words and words[0] in PROGRAMS:
            packages.append(words)
    return packages


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_a_job_of_slurm_is_a_script_whose_commands_are_ours(job: Path) -> None:
    text = job.read_text()
    assert subprocess.run(["bash", "-n", job], capture_output=True, check=False).returncode == 0
    assert text.startswith("#!/bin/bash\n")
    assert "set -euo pipefail" in text
    assert set(re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE)) <= DIRECTIVES
    known = commands(text)
    assert known
    for program, verb, *arguments in known:
        parser = import_module(f"{program}.cli").build_parser()
        parsed = parser.parse_args([verb, *arguments])
        module = import_module(f"{program}.commands.{verb}")
        options = read_options(module.Options, parsed)
        assert "$" not in repr(options), "a variable has no value"
        if verb == "train":
            from trainer.config.walk import load_config

            config = load_config(str(ROOT / options.config), options.flags, world_size=16)
            assert (config.parallel.tp, config.parallel.dp) == (8, 2)


def test_a_flag_that_does_not_exist_is_seen() -> None:
    [words] = commands('run=${RUN:-/data/run}\nckptkit verify "$run" --no-such-flag\n')
    assert words == ["ckptkit", "verify", "/data/run", "--no-such-flag"]
    with pytest.raises((SystemExit, UserError)):
        import_module("ckptkit.cli").build_parser().parse_args(words[1:])


def test_the_dockerfiles_lines_name_what_is_here() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    assert {word for word, _, _ in lines} <= {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    for word, _, rest in lines:
        if word == "RUN":
            assert subprocess.run(["bash", "-n", "-c", rest], capture_output=True, check=False).returncode == 0, rest
    [extras] = re.findall(r'"\.\[([a-z0-9,]+)\]"', text)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert re.findall(r"^FROM python:(\d+\.\d+)", text, re.MULTILINE)[0] in " ".join(PROJECT["classifiers"])
    make = (ROOT / "Makefile").read_text()
    assert re.findall(r"^ARG TORCH=(.*)$", text, re.MULTILINE) == re.findall(r"^TORCH \?= (.*)$", make, re.MULTILINE)


def test_the_citation_is_of_this_version() -> None:
    """It has the keys that the Citation File Format 1.2 asks for."""
    fields = dict(re.findall(r"^([a-z-]+): *(.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert fields["cff-version"] == "1.2.0"
    assert fields.keys() >= {"message", "title", "authors"}
    found = {fields[key] for key in ("title", "version", "license")}
    assert found == {PROJECT["name"], PROJECT["version"], PROJECT["license"]}
