"""The import direction is the architecture: kits above the ground floor, folders in order, no cycle, doors, limits.

Every import counts: at the top of a file, inside a function, under TYPE_CHECKING. What is not in order yet is named in
a list that only shrinks: an entry that no longer occurs fails its test. `pytest -rP` prints the figures.
"""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KITS = ("threefold", "datakit", "ckptkit", "trainer")
PROGRAMS = ("tools", "benchmarks", "examples")
BELOW = {"threefold": set(), "datakit": {"threefold"}, "ckptkit": {"threefold"}, "trainer": set(KITS) - {"trainer"}}
# folders of a kit from the lowest to the highest, with files beside them; other files are above all
FOLDERS = {
    "threefold": ["version", "masking", "errors", "debug", "console", "installing", "packages", "backoff", "closing",
                  "storage"],
    "ckptkit": ["model", "io", "format", "plan", "loading", "runs", "handoff", "tiers", "writer", "saving", "torch",
                "check", "mapping", "rewrite", "foreign", "commands"],
    "datakit": ["files", "text", "tokenization", "format", "shards", "store", "rows", "batches", "order", "loading",
                "config", "packing", "remote", "data_loader", "dedup", "preprocessing", "foreign", "reports",
                "commands"],
    "trainer": [
        "config", "job", "mesh", "ops",
        "linear", "store", "parallel", "model",
        "pipeline", "loss_scale", "verdict", "engine", "data", "observe", "checkpoint", "run", "verify", "plan",
        "commands",
    ],
}  # fmt: skip
# a folder that imports a higher one: "the folder -> the higher one"
UPWARD: set[str] = set()
CYCLES: set[str] = set()  # the first module of each
# what names torch outside trainer: the first inside functions, the others are imported by nothing else of their kit
TORCH_PLACES = ("ckptkit/io/torch_tensors.py", "ckptkit/torch/", "datakit/torch.py", "datakit/data_loader/")
TORCH_DOORS = {"ckptkit.torch", "datakit.torch"}
FILE_LINES, FUNCTION_LINES, PARAMETERS = 350, 60, 8
ROOM_FILES, ROOM_SHARE = 15, 0.14  # of a folder, without those in it, and of its kit's lines
ROOMY_KITS, HALLS = ("ckptkit", "datakit"), {"ckptkit/commands", "datakit/commands"}  # a file a verb
LONG_FILES = {
    "tests/ckptkit/saving/test_checkpointer.py",
    "tests/ckptkit/writer/test_copier.py",
    "tests/datakit/preprocessing/test_preprocess.py",
    "tests/datakit/tokenization/test_hostile_text.py",
}
LONG_FUNCTIONS = {
    "benchmarks/ckptkit/save_stall.py: main",
    "tests/threefold/support/fake_gcs.py: fake_gcs",
}
MANY_PARAMETERS = {
    "ckptkit/saving/save.py: save",
    "datakit/preprocessing/preprocess.py: preprocess",
    "trainer/ops/dropout.py: dropout",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path) -> frozenset[str]:
    """All modules that a file names in imports, with `from package import module` as that module."""
    imported = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{place(path)} line {node.lineno}: a relative import"
            assert not node.level, f"{place(path)} line {node.lineno}: a relative import"
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if is_module(name) else node.module for name in modules}
    return frozenset(imported)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return name.split(".")[0] in KITS and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


def module_graph() -> dict[str, set[str]]:
    """Each module of the packages with those of them that it imports."""
    names = {module_name(path): path for kit in KITS for path in sources(kit)}
    return {name: set(imports(path) & names.keys()) - {name} for name, path in names.items()}


def folder_of(module: str) -> str:
    """The folder of a kit that a module is in; the module itself if it lies beside the folders."""
    kit, _, rest = module.partition(".")
    return f"{kit}.{rest.split('.')[0]}" if rest else kit


def folder_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = defaultdict(set)
    for module, imported in module_graph().items():
        graph[folder_of(module)] |= {folder_of(name) for name in imported} - {folder_of(module)}
    return dict(graph)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other."""
    reach = {node: set(targets) for node, targets in graph.items()}
    for middle in graph:
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    groups = {
        frozenset(other for other in reach[node] if node in reach[other]) for node in graph if node in reach[node]
    }
    return sorted(sorted(group) for group in groups)


def shrinks(name: str, allowed: set[str], broken: Iterable[str]) -> None:
    """Fail on what is not on a list of exceptions, and on what is there and no longer occurs."""
    broken = set(broken)
    assert not broken - allowed, f"not in order: {sorted(broken - allowed)}"
    assert not allowed - broken, f"mended, take it out of {name}: {sorted(allowed - broken)}"


@pytest.mark.parametrize("kit", KITS)
def test_a_kit_imports_only_what_is_below_it(kit: str) -> None:
    assert sources(kit)
    for path in sources(kit):
        tops = {name.split(".")[0] for name in imports(path)}
        assert tops & set(KITS) - {kit} <= BELOW[kit], f"{place(path)} imports {sorted(tops & set(KITS))}"
        may_import_torch = kit == "trainer" or place(path).startswith(TORCH_PLACES)
        assert may_import_torch or "torch" not in tops, f"{place(path)} imports torch"
        if kit != "trainer" and not place(path).startswith("ckptkit/torch/"):
            doors = {".".join(name.split(".")[:2]) for name in imports(path)} & TORCH_DOORS
            assert not doors, f"{place(path)} imports {sorted(doors)}"


def test_a_folder_imports_only_folders_below_it() -> None:
    imports = set()
    for kit, order in FOLDERS.items():
        folders = {path.name for path in (ROOT / kit).iterdir() if any(path.glob("*.py"))}
        assert folders <= set(order), f"{kit}/: give {sorted(folders - set(order))} a place in FOLDERS"
        height = {f"{kit}.{folder}": number for number, folder in enumerate(order)}
        for folder, imported in folder_graph().items():
            if folder in height:
                inside = {name for name in imported if name.split(".")[0] == kit}
                imports |= {f"{folder} -> {name}" for name in inside if height.get(name, len(order)) >= height[folder]}
    shrinks("UPWARD", UPWARD, imports)


@pytest.mark.parametrize("graph", [module_graph, folder_graph])
def test_nothing_imports_itself_round_about(graph: Callable[[], dict[str, set[str]]]) -> None:
    imports = graph()
    num_imports = sum(map(len, imports.values()))
    print(f"{graph.__name__}: {len(imports)} nodes, {num_imports} imports, {len(cycles(imports))} cycles")
    if graph is folder_graph:
        assert cycles(imports) == []
    else:
        shrinks("CYCLES", CYCLES, (first for first, *_ in cycles(imports)))


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"f"}}
    assert cycles(graph) == [["a", "b", "c"], ["f"]]


def test_kits_are_entered_by_their_door() -> None:
    """Other kits and programs import public names of the top packages, and of their doors for PyTorch, alone."""
    for top in (*KITS, *PROGRAMS):
        for path in sources(top):
            found = {name for name in imports(path) if name.startswith(("datakit.", "ckptkit."))}
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.ImportFrom) and node.module in {"ckptkit", "datakit", *TORCH_DOORS}:
                    public = import_module(node.module).__all__
                    found |= {f"{node.module}.{each.name}" for each in node.names if each.name not in public}
            inner = {name for name in found - TORCH_DOORS if name.split(".")[0] != top}
            assert not inner, f"{place(path)} imports {sorted(inner)}: take the names from the package itself"


@pytest.mark.parametrize("folder", PROGRAMS)
def test_programs_import_no_private_name(folder: str) -> None:
    for path in sources(folder):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                parts = {part for name in names for part in name.split(".") if part.startswith("_")}
                assert not parts - {"__future__", "__version__"}, f"{place(path)} imports {sorted(parts)}"


@cache
def functions(path: Path) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions of a file by place and name, those in classes and functions too."""
    long_files = []
    waiting: list[tuple[str, ast.AST]] = [(f"{place(path)}: ", tree(path))]
    while waiting:
        name, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}{child.name}."
                if not isinstance(child, ast.ClassDef):
                    long_files.append((f"{name}{child.name}", child))
            waiting.append((inner, child))
    return long_files


def limited() -> list[Path]:
    return [path for top in (*KITS, *PROGRAMS, "tests") for path in sources(top)]


def test_files_are_short() -> None:
    lines = {place(path): path.read_text().count("\n") for path in limited()}
    shrinks("LONG_FILES", LONG_FILES, (name for name, count in lines.items() if count > FILE_LINES))


@pytest.mark.parametrize("kit", ROOMY_KITS)
def test_rooms_are_small(kit: str) -> None:
    rooms: dict[str, list[int]] = defaultdict(list)
    for path in sources(kit):
        rooms[place(path.parent)].append(path.read_text().count("\n"))
    most = ROOM_SHARE * sum(map(sum, rooms.values()))
    large = {room for room, lines in rooms.items() if len(lines) > ROOM_FILES or sum(lines) > most}
    shrinks("HALLS", {hall for hall in HALLS if hall.startswith(kit)}, large)


def test_functions_are_short() -> None:
    lengths = {name: node.end_lineno - node.lineno + 1 for path in limited() for name, node in functions(path)}
    shrinks("LONG_FUNCTIONS", LONG_FUNCTIONS, (name for name, count in lengths.items() if count > FUNCTION_LINES))


def test_functions_have_few_parameters() -> None:
    names = set()
    for path in limited():
        for name, node in functions(path):
            named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(each.arg not in ("self", "cls") for each in named)
            if count + (node.args.vararg is not None) + (node.args.kwarg is not None) > PARAMETERS:
                names.add(name)
    shrinks("MANY_PARAMETERS", MANY_PARAMETERS, names)


def test_helpers_of_tests_check_under_python_o_too() -> None:
    """Test files are rewritten by pytest, so that their `assert` is executed; helpers call tests.support.checks."""
    helpers = [*ROOT.glob("tests/support/*.py"), *ROOT.glob("tests/*/support/*.py")]
    bare = [
        f"{path.relative_to(ROOT)} line {node.lineno}"
        for path in helpers
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert not bare
    assert len(helpers) > 10


def test_no_assertion_of_a_kit_takes_what_python_o_would_leave() -> None:
    """`python -O` leaves assertions out, and the calls in them."""
    takes = {"receive", "pop", "popleft", "popitem", "acquire", "release", "wait", "send", "add", "append", "remove"}
    taking = [
        f"{place(path)} line {node.lineno}"
        for kit in KITS
        for path in sources(kit)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assert)
        for call in ast.walk(node.test)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in takes
    ]
    assert not taking
