"""The reference: all public names, an example for each public class, all flags of all verbs, all keys."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ckptkit.support.hf_folders import write_folder
from threefold.options import leaves
from tools.site.commands import KITS, command_page
from tools.site.configuration import configuration_page
from tools.site.reference import DOORS, NAMED, ROOT, SECTION, examples, public_names, reference_page
from trainer.config import Config


@pytest.mark.parametrize("door", DOORS)
def test_a_page_has_every_public_name_of_its_door(door: str) -> None:
    named = re.findall(r"^::: ([\w.]+)\.(\w+)$", reference_page(door), re.MULTILINE)
    public = import_module(door).__all__
    assert sorted(name for _, name in named) == sorted(set(public) - {"__version__"})


def class_names(door: str) -> set[str]:
    """The public names of a door that are classes in the module that defines them."""
    names = set()
    for name, module in public_names(door).items():
        stem = ROOT / module.replace(".", "/")
        source = next(file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()).read_text()
        tree = ast.parse(source)
        again = {
            alias.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        if again.get(name):
            tree = ast.parse((ROOT / f"{again[name].replace('.', '/')}.py").read_text())
        names |= {name for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name}
    return names


@pytest.mark.parametrize("door", [*DOORS, *NAMED])
def test_every_public_class_has_an_example_that_names_it(door: str) -> None:
    shown = examples(door)
    place = f"examples/reference/{door.replace('.', '_')}.py"
    assert class_names(door) - set(shown) == set(), f"these have no section `# %% NAME` in {place}"
    assert set(shown) - class_names(door) == set(), f"{place} has sections of what is not a public class"
    for name, code in shown.items():
        assert code, name


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("door", [*DOORS, *NAMED])
def test_the_examples_run(door: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "llama", "llama")
    source = (ROOT / "examples" / "reference" / f"{door.replace('.', '_')}.py").read_text()
    head, *sections = SECTION.split(source)
    parts = list(zip(sections[::2], sections[1::2], strict=True))
    there = [code for _, code in parts if all(find_spec(top) for top in imported(code))]
    assert len(there) > len(parts) // 2
    (tmp_path / "example.py").write_text("\n".join([head, *there]))
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(tmp_path)


def imported(code: str) -> set[str]:
    """The packages that a section needs; those that are not installed leave it out."""
    tree = ast.walk(ast.parse(code))
    return {name.split(".")[0] for node in tree for name in names_in(node)} | (
        {"transformers"} if "HfTrainer" in code else {"lightning"} if "Lightning" in code else set()
    )


def names_in(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


@pytest.mark.parametrize("kit", KITS)
def test_a_page_has_every_flag_of_every_verb(kit: str) -> None:
    page = command_page(kit)
    parser = import_module(f"{kit}.cli").build_parser()
    [verbs] = [action for action in parser._actions if hasattr(action, "choices") and action.choices]
    for name, verb in verbs.choices.items():
        verb.fill()
        section = page.partition(f"## `{kit} {name}`\n")[2].partition("\n## ")[0]
        for action in verb._actions:
            for flag in action.option_strings if action.help != "==SUPPRESS==" else ():
                assert flag in ("-h", "--help") or re.search(rf"<code>{re.escape(flag)}[ <]", section), (
                    f"{name}: {flag}"
                )


def test_a_page_has_every_key() -> None:
    page = configuration_page()
    for leaf in leaves(Config):
        table, _, key = leaf.name.rpartition(".")
        section = page.partition(f"## `[{table}]`")[2].partition("\n## ")[0]
        [row] = [line for line in section.splitlines() if line.startswith(f"| <code>{key}</code>")]
        cells = row.strip("| ").split(" | ")
        assert len(cells) == 6
        assert cells[4].strip() == ("yes" if leaf.option.keeps_bits else "no")
    name = "<code>save_interval_s</code><br><code>--save-interval-s</code>"
    assert f"| {name} | number, \\>= -1 | <code>-1</code> | seconds | yes |" in page
    assert "`[[data.mixture]]`" in page


def test_public_names_have_docstrings() -> None:
    for door in ("datakit", "ckptkit", "threefold"):
        for name in public_names(door):
            assert inspect.getdoc(getattr(import_module(door), name)), f"{door}.{name}"
