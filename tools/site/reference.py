"""The pages of the reference: the public names of each door, which mkdocstrings fills in from the code.

A name is public if the package's stub (`__init__.pyi`) or the `__all__` of a door has it. Each class has an example in
`examples/reference`, a file a door, whose sections begin with `# %% NAME`.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOORS = ("datakit", "datakit.torch", "ckptkit", "ckptkit.torch", "trainer", "threefold")
NAMED = {  # modules whose public names pages use, and no door has
    "trainer.ops": (
        ("norm", "rms_norm layer_norm add_norm"),
        ("rope", "QkNorm rope rope_turns"),
        ("activation", "activate"),
        ("cross_entropy", "VocabularyPart row_sums write_gradient"),
        ("dropout", "dropout"),
        ("adamw", "Interval IntervalTable"),
        ("philox", "normal_"),
    ),
    "threefold.storage": (
        ("dry_run", "DryRunStorage"),
        ("fault", "Fault FaultStorage"),
        ("memory", "MemoryStorage"),
        ("request_log", "LoggingStorage"),
    ),
}
SECTION = re.compile(r"^# %%(.*)\n", re.MULTILINE)


def public_names(door: str) -> dict[str, str]:
    """Return the public names of a door, each with the module that defines it."""
    if door in NAMED:
        return {name: f"{door}.{module}" for module, names in NAMED[door] for name in names.split()}
    stem = ROOT / door.replace(".", "/")
    files = (stem / "__init__.pyi", stem / "__init__.py", stem.with_suffix(".py"))
    tree = ast.parse(next(file for file in files if file.is_file()).read_text())
    imports = {
        alias.asname or alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    exported = next((ast.literal_eval(node.value) for node in tree.body if is_all(node)), imports)
    return {name: imports[name] for name in sorted(exported)}


def is_all(node: ast.stmt) -> bool:
    """Return whether a statement sets `__all__` to a list that is written there."""
    is_set = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    return is_set and isinstance(node.value, ast.List)


def examples(door: str) -> dict[str, str]:
    """Return the example of each name of a door that has one."""
    file = ROOT / "examples" / "reference" / f"{door.replace('.', '_')}.py"
    _, *sections = SECTION.split(file.read_text()) if file.is_file() else ("",)
    return {name.strip(): code.strip() for name, code in zip(sections[::2], sections[1::2]) if name.strip()}


def reference_page(door: str) -> str:
    """Return the page of a door: what its docstring says, and each public name, to be filled in."""
    names = public_names(door)
    options = "    options:\n      heading: {0}\n      toc_label: {0}\n"
    entries = [f"::: {module}.{name}\n{options.format(name)}" for name, module in names.items()]
    where = f"the modules of `{door}`" if door in NAMED else f"`{door}`"
    return "\n".join([f"# {door}\n", docstring(door) + "\n", f"Import these from {where}.\n", *entries])


def docstring(door: str) -> str:
    """Return what a door says of itself, without its name in front."""
    stem = ROOT / door.replace(".", "/")
    file = next(file for file in (stem / "__init__.py", stem.with_suffix(".py")) if file.is_file())
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    text = text.removeprefix(f"{door}: ")
    return text[:1].upper() + text[1:]


def reference_pages() -> dict[str, str]:
    """Return the pages of all doors, by their places in the site."""
    return {f"docs/api/{door.replace('.', '-')}.md": reference_page(door) for door in (*DOORS, *NAMED)}
