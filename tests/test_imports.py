"""What `import` of a kit brings: its public names, lazily, the same ones for completion, help and type checkers."""

import ast
import re
import shutil
import subprocess
import sys
import venv
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KITS = ("ckptkit", "datakit", "threefold", "trainer")
# the public names of the version before: one goes only if a deprecated alias takes its place
PUBLIC_BEFORE = {
    "ckptkit": """Box CheckpointReader Checkpointer CheckpointerOptions Coords Exchange NodeExchange ParallelLayout
        Piece Placement Retention Root SaveReport TensorInfo committed_steps copy_step hash_checkpoint latest_step pin
        prune reshard resolve restore restore_newest save unpin verify_checkpoint""",
    "datakit": """Blend Cursor HostBatch Loader Origin Recipe TokenShard TokenStore Tokenizer archive find_difference
        from_megatron merge open_tokenizer preprocess statistics to_megatron train_tokenizer unarchive verify
        write_store""",
    "trainer": """Batch Config Engine ProcessMesh Ranks StepStats TrainedModel evaluate_checkpoint generate_text gpipe
        load_config one_f_one_b open_checkpoint""",
}


@pytest.mark.parametrize("kit", KITS)
def test_every_public_name_is_there(kit: str) -> None:
    package = import_module(kit)
    for name in package.__all__:
        assert getattr(package, name).__module__.startswith(f"{kit}.")
    with pytest.raises(AttributeError, match="has no attribute"):
        _ = package.nothing_of_this_name


@pytest.mark.parametrize("kit", PUBLIC_BEFORE)
def test_a_name_that_was_public_stays(kit: str) -> None:
    assert set(PUBLIC_BEFORE[kit].split()) <= set(import_module(kit).__all__)


@pytest.mark.parametrize("kit", KITS)
def test_completion_help_and_type_checkers_see_the_same_names(kit: str) -> None:
    package = import_module(kit)
    assert dir(package) == sorted([*package.__all__, "__version__"])
    assert package.__version__ == import_module("threefold").__version__
    assert (ROOT / kit / "py.typed").is_file()
    stub = ast.parse((ROOT / kit / "__init__.pyi").read_text())
    typed = {each.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for each in node.names}
    assert sorted(typed) == package.__all__
    for name, module in typed.items():
        assert getattr(import_module(module), name) is getattr(package, name)


def test_a_package_of_public_names_imports_none_of_them() -> None:
    program = "import sys, threefold, datakit, ckptkit, trainer; print(*(name for name in sys.modules if '.' in name))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert {name for name in done.stdout.split() if name.split(".")[0] in KITS} == {
        "threefold.lazy",
        "threefold.version",
    }


def test_the_trainer_imports_no_compiler() -> None:
    """torch._dynamo costs each rank more than the rest of torch, and any decorator of torch.compiler brings it."""
    program = """
import sys, torch
before = "torch._dynamo" in sys.modules
import trainer.run.evaluate, trainer.run.loop
print(before, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    before, after = done.stdout.split()
    assert before == after


USER_PROGRAM = """
import ckptkit, datakit, threefold, trainer

store: datakit.TokenStore = datakit.TokenStore.open("store")
reveal_type(store.num_tokens)
reveal_type(datakit.verify)
reveal_type(ckptkit.ParallelLayout(tp=2).world_size)
reveal_type(trainer.load_config)
reveal_type(threefold.UserError("no").hint)
ckptkit.latest(1)
"""


@pytest.mark.ci
@pytest.mark.slow
def test_a_users_mypy_sees_the_types_of_the_installed_packages(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for kit in KITS:
        shutil.copytree(ROOT / kit, site / kit)
    (tmp_path / "user.py").write_text(USER_PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", tmp_path / "venv" / "bin" / "python"]
    done = subprocess.run([*command, "user.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    tokens, verify, size, load_config, hint = re.findall(r'Revealed type is "(.+)"', done.stdout)
    assert [re.sub("builtins[.]", "", shown) for shown in (tokens, size, hint)] == ["int", "int", "str | None"]
    assert "Any" not in verify + load_config
    faults = re.findall(r"error: (.*)", done.stdout)
    assert [fault for fault in faults if "find" not in fault] == ['Module has no attribute "latest"  [attr-defined]']
