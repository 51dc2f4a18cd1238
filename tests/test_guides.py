"""The guides: every command in them is run, section by section, in a folder with a corpus, a tokenizer and a store."""

import ast
import dataclasses
import importlib
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ckptkit.model.layout import ParallelLayout
from datakit import Recipe, preprocess, train_tokenizer, verify
from datakit.tokenization.rank_file import LLAMA3_PATTERN
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.foreign_folders import write_torch_checkpointing, write_universal
from tests.ckptkit.support.hf_folders import write_folder
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.support.saves import SMALL, save_whole
from tests.datakit.conftest import ranks_of, write_jsonl, write_ranks
from tests.datakit.foreign.test_datatrove import write_ds
from tests.datakit.foreign.test_litdata import spec, write_litdata
from tests.datakit.foreign.test_megatron import write_dataset
from tests.datakit.foreign.test_mosaic import tokens_only, write_mds
from tests.trainer.support.launcher import write_launcher
from tests.trainer.support.speaking import SPEAKING, write_speaking
from threefold.storage import open_storage
from trainer.config import Config

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PACKAGES = (
    "torchdata", "transformers", "lightning", "accelerate", "tensorboard", "wandb", "mlflow", "lm_eval",
)  # fmt: skip
SET_UP_ELSEWHERE = re.compile(r"^(pip install|export AWS_).*\n", re.MULTILINE)

DOCUMENTS = [[1 + (number * place) % 499 for place in range(number % 60)] + [0] for number in range(200)]
STREAM = [token for document in DOCUMENTS for token in document]
ROWS = [STREAM[at : at + 64] for at in range(0, len(STREAM) - 63, 64)]  # of one length, cut out of the stream


def write_llama3(folder: Path) -> None:
    """A rank file of as many tokens as Llama 3's, most of them made up: the special tokens follow at 128,000."""
    ranks = ranks_of(str(folder / "tok.json"))
    unused = (token for token in map(bytes, itertools.product(range(256), repeat=3)) if token not in ranks)
    ranks |= {token: rank for rank, token in zip(range(len(ranks), 128_000), unused)}
    write_ranks(folder / "tokenizer.model", ranks, LLAMA3_PATTERN, {})


def write_megatron(folder: Path) -> None:
    for name in ("data", "en", "de"):
        write_dataset(folder / f"{name}_text_document", DOCUMENTS)


def write_datatrove(folder: Path) -> None:
    for part in range(2):
        write_ds(folder / "tokenized" / f"{part:05}_unshuffled.ds", DOCUMENTS[part::2])
    write_ds(folder / "old.ds", DOCUMENTS, index=False, metadata=None)


def write_mosaic(folder: Path) -> None:
    write_mds(folder / "mds", {"tokens": "ndarray"}, tokens_only(DOCUMENTS))
    two = [{"tokens": document, "lengths": [len(document)]} for document in DOCUMENTS]
    write_mds(folder / "columns", {"tokens": "ndarray:uint16", "lengths": "ndarray"}, two)
    raw = [{"tokens": np.array(row, "<i8").tobytes()} for row in ROWS]
    write_mds(folder / "raw", {"tokens": "bytes"}, raw, compression="zstd:7")


def write_lightning(folder: Path) -> None:
    write_litdata(folder / "optimized", ROWS, config={"item_loader": "TokensLoader"})
    names = {"data_spec": spec(["lengths", "tokens"])}
    write_litdata(folder / "table", DOCUMENTS, ["no_header_numpy:2", "no_header_numpy:2"], config=names)


def write_run(folder: Path) -> None:
    """A run of steps 100 and 200."""
    for step in (100, 200):
        assert save_whole(folder / "run", step, SMALL, scale=step).ok


def write_damaged_run(folder: Path) -> None:
    """A run whose step 200 was set aside, and a sound copy of it."""
    write_run(folder)
    shutil.copytree(folder / "run", folder / "backup")
    step = folder / "run" / "step-000000200"
    (step / "root.json").rename(step / "damaged-root.json")
    next(step.rglob("*.safetensors")).write_bytes(b"")


def write_long_run(folder: Path) -> None:
    """A run of five steps with falling losses."""
    tensors = gpt_tensors(1)
    for step in range(100, 600, 100):
        losses = {"val_loss": 4 - step / 200, "loss": 5 - step / 200, "config": {"optim": {"lr": 3e-4}}}
        storage = open_storage(folder / "run")
        write_checkpoint(storage, step, ParallelLayout(), 1, tensors, values(tensors), metadata=losses)


def write_config(folder: Path) -> None:
    """The configuration of a small run on the store."""
    (folder / "run.toml").write_text(
        "[model]\nnum_layers = 2\nhidden_size = 32\n[data]\nstores = ['store']\n"
        "[train]\ntrain_steps = 6\nseq_length = 32\ndevice = 'cpu'\n"
    )


def write_model(folder: Path) -> None:
    """A Hugging Face model of the tokenizer's vocabulary, and the configuration of a run from it."""
    write_folder(folder / "model", "qwen3", vocab_size=500)
    shutil.copy(folder / "tok.json", folder / "model" / "tokenizer.json")
    (folder / "tune.toml").write_text(
        "[data]\nstores = ['store']\n[data.valid]\nstores = ['store']\nnum_samples = 4\n"
        "[train]\ntrain_steps = 6\nseq_length = 32\ndevice = 'cpu'\n"
    )


ON_A_STORE = (  # with the configuration of write_config alone
    "Write lines of JSON|TensorBoard|Weights & Biases|MLflow|Hear of events|Times of each rank|Watch a run|"
    "Train with it|When a step runs out of memory|Two ranks of one machine|A rank that is gone|Save to two places|"
    "Several nodes|"
    "Read the report of a stall|What each rank did last|Find a slow rank|Look at the hardware first|Profile some steps|"
    "Each node's own disk|A replica on the next node|Memory as the first tier|Suspect a kernel|Read a step's line"
)
TAKEN_AS_GIVEN: dict[str, Callable[[Path], None]] = {  # by a section's title, besides corpus, tokenizer and store
    "Rank files": write_llama3,
    "From Megatron": write_megatron,
    "Turn a launcher into a file": write_launcher,
    "Type what you are used to": write_config,
    "From datatrove": write_datatrove,
    "From MosaicML streaming (MDS)": write_mosaic,
    "From litdata": write_lightning,
    "Look at a run there, and fetch it": write_run,
    "Save, and set the stripes": write_run,
    "Look for it": write_run,
    "See what differs": write_run,
    "A reshard is equal": write_run,
    "Compare within a tolerance": write_run,
    "Reshard a step": write_run,
    "Rename, drop, grow, repeat": write_run,
    "Split and fuse": write_run,
    "On many machines with Slurm": write_run,
    "On many machines with a launcher": write_run,
    "On many machines with Ray": write_run,
    "Look at the values of one": write_run,
    "Bring a step back from a copy": write_damaged_run,
    "Keep a copy elsewhere": write_run,
    "See what a run holds": write_long_run,
    "Find the best step": write_long_run,
    "Pin a step": write_long_run,
    "Prune by hand": write_long_run,
    "Remove steps": write_long_run,
    "Set newer steps aside": write_long_run,
    "Train on from an older step": write_config,
    "What a resume reports": write_config,
    "Let the batch grow": write_config,
    "Ask a run": write_run,
    "Compare in Python": write_run,
    "From an element to a byte, and back": write_run,
    "See requests and tracebacks": write_run,
    "Find what a step read": write_config,
    "Find the steps that read a document": write_config,
    "See what a run repeats": write_config,
    "Ask in a program": write_config,
    "Train on packed rows": write_config,
    "Keep attention inside documents of rows that are cut": write_config,
    "Change the mixture of a run": write_config,
    "Remove a source": write_config,
    "Skip samples, mask documents": write_config,
    "Undo a change": write_config,
    "Longer rows from a sample on": write_config,
    "Coming from Megatron": write_config,
    "Plan a curriculum": write_config,
    "Resume under another layout": write_config,
    "Read each byte once": write_config,
    "Bring a model into a run": write_model,
    "Any other model": write_model,
    "Train from a model": write_model,
    "Evaluate a model, and let it speak": write_model,
    **dict.fromkeys(SPEAKING, write_speaking),
    "Make a folder of a run": write_model,
    "From torch_checkpointing": write_torch_checkpointing,
    "From DeepSpeed": write_universal,
    "From and to Zarr, for tensorstore": write_run,
    "Read without mapping files": write_config,
    "Resume a run on other ranks": write_config,
    "After a crash": write_config,
    "Choose what fits in memory": write_config,
    "Make activations again": write_config,
    "Limit what a query sees": write_config,
    "Let attention be chosen": write_config,
    "Cut a model over the GPUs of a node": write_config,
    **dict.fromkeys(ON_A_STORE.split("|"), write_config),
}


def sections() -> list[object]:
    """Each guide's sections that have commands: the guide's name, the title, the commands."""
    blocks = []
    for guide in GUIDES:
        for section in guide.read_text().split("\n## ")[1:]:
            commands = "\n".join(re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
            if commands:
                title = section.partition("\n")[0]
                blocks.append(pytest.param(guide.stem, title, commands, id=f"{guide.stem}: {title}"))
    return blocks


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the guides take as given: `corpus`, `tok.json` and `store`."""
    folder = tmp_path_factory.mktemp("guides")
    texts = [f"document {number}: " + "The store holds tokens. " * (number % 50) for number in range(600)]
    for part in range(2):
        (folder / "corpus" / f"part-{part:02}").mkdir(parents=True)
        write_jsonl(folder / "corpus" / f"part-{part:02}" / "a.jsonl", texts[part::2])
    write_jsonl(folder / "corpus" / "b.jsonl", texts[:50])
    train_tokenizer([str(folder / "corpus")], str(folder / "tok.json"), vocab_size=500)
    return folder


def make_store(folder: Path) -> None:
    before = os.getcwd()
    os.chdir(folder)
    try:
        preprocess(["corpus"], "store", Recipe("tok.json", append_eod=True))
    finally:
        os.chdir(before)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_as_typed(commands: str, folder: Path, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    """Run commands in a folder, with this interpreter's programs first on the path; stop at the first fault."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"}
    (folder / "bin").mkdir()
    modules = {"ray": "-m ray.scripts.scripts", "torchrun": "-m torch.distributed.run", "python": ""}
    for program in ("datakit", "ckptkit", "trainer", "ray", "torchrun", "python"):
        module = modules.get(program, f"-m {program}")
        (folder / "bin" / program).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (folder / "bin" / program).chmod(0o755)
    return subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", commands], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=timeout_s, check=False,
    )  # fmt: skip


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize(("guide", "title", "commands"), sections())
def test_every_command_of_a_guide_runs(
    guide: str, title: str, commands: str, prepared: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "here"
    shutil.copytree(prepared, folder)
    if " --output store " not in commands:
        make_store(folder)
    if title in TAKEN_AS_GIVEN:
        TAKEN_AS_GIVEN[title](folder)
    url = ""
    if "s3://bucket" in commands:
        url = request.getfixturevalue("s3_url")
        for given_folder in ("corpus", "run"):
            for path in filter(Path.is_file, (folder / given_folder).rglob("*")):
                open_storage(url).write(str(path.relative_to(folder)), path.read_bytes())
        if "s3://bucket/store" in commands and "--output s3://bucket/store" not in commands:
            preprocess([str(folder / "corpus")], f"{url}/store", Recipe(str(folder / "tok.json"), append_eod=True))
    if "ray start" in commands:
        pytest.importorskip("ray", reason="needs ray: pip install -e '.[ray]'")
    if "import tensorstore" in commands:
        pytest.importorskip("tensorstore", reason="needs tensorstore: pip install -e '.[tensorstore]'")
    for package in PACKAGES:
        if re.search(f'pip install "?{package.replace("_", ".")}', commands):
            pytest.importorskip(package, reason=f"needs {package}: pip install {package}", exc_type=ImportError)
    port = free_port()
    head = f"ray start --head --port {port} --num-cpus 2 --disable-usage-stats --include-dashboard=false"
    kept_commands = SET_UP_ELSEWHERE.sub("", commands)
    kept_commands = re.sub(r"([ =])/(data|dev/shm)/", rf"\1{tmp_path}/\2/", kept_commands.replace("s3://bucket", url))
    kept_commands = (
        kept_commands.replace("HOST:6379", f"127.0.0.1:{port}")
        .replace("localhost:29500", f"localhost:{port}")
        .replace("ray start --head --port 6379", head)
        .replace("--workers 64", "--workers 2")
    )
    if "#SBATCH" in kept_commands:  # an array of two tasks, of 16 cores each where there are so many
        before, _, job = kept_commands.partition("#!/bin/bash\n")
        job, *rest = re.split("(?=datakit merge)", job)
        array = "SLURM_ARRAY_TASK_MIN=0 SLURM_ARRAY_TASK_STEP=1 SLURM_ARRAY_TASK_COUNT=2"
        tasks = (f"(\nexport SLURM_ARRAY_TASK_ID={task} {array}\n{job})\n" for task in range(2))
        kept_commands = "".join([before, *tasks, *rest])
        kept_commands = kept_commands.replace("--workers 16", "--workers 2")
    try:
        run = run_as_typed(kept_commands, folder)
    finally:
        if "ray start" in commands:
            subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "stop"], capture_output=True, check=False)
    assert run.returncode == 0, run.stderr
    for manifest in tmp_path.rglob("manifest.json"):
        assert not verify(manifest.parent)


def test_every_guide_has_commands_and_each_verb_is_known() -> None:
    from ckptkit import cli as ckptkit_cli
    from datakit import cli as datakit_cli

    shown = " ".join(guide.read_text() for guide in GUIDES)
    found = [param.values for param in sections()]  # type: ignore[attr-defined]
    assert {guide for guide, _, _ in found} == {guide.stem for guide in GUIDES}
    assert TAKEN_AS_GIVEN.keys() <= {title for _, title, _ in found}
    for name, cli in (("datakit", datakit_cli), ("ckptkit", ckptkit_cli)):
        [verbs] = [action.choices for action in cli.build_parser()._actions if action.choices]
        assert set(re.findall(rf"^{name} ([a-z-]+)", shown, re.MULTILINE)) <= set(verbs)


def test_settings_and_imports_in_the_guides_exist() -> None:
    """What no command runs: TOML, settings named in the text, and the imports of Python examples."""
    tables = {table.name: table.default_factory() for table in dataclasses.fields(Config)}  # type: ignore[operator, misc]
    known = {f"{name}.{each.name}" for name, table in tables.items() for each in dataclasses.fields(table)}
    num_named = num_imported = 0
    for guide in GUIDES:
        text = guide.read_text()
        named = set(re.findall(rf"`((?:{'|'.join(tables)})\.[a-z_]+)(?![a-z_/])", text))  # with / it is a tensor
        for block in re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            named |= {f"{table}.{key}" for table, values in tomllib.loads(block).items() for key in values}
        assert named <= known, guide.name
        num_named += len(named)
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom):
                    assert node.module
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, each.name) for each in node.names), guide.name
                    num_imported += len(node.names)
    assert num_named > 20
    assert num_imported > 5
