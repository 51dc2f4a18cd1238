"""Preprocessing on a Ray cluster: the same bytes as here, also when a node dies in the middle."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.datakit.conftest import Cli, files_of, write_jsonl
from threefold.errors import StorageError, UserError

ROOT = Path(__file__).parents[3]
READY_WITHIN_S = 90.0


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_node(*flags: str) -> psutil.Process:
    """A Ray node with one CPU, in the foreground of a process of its own."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--disable-usage-stats",
               "--node-ip-address=127.0.0.1", "--object-store-memory=80000000", *flags]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    return psutil.Process(process.pid)


def kill_tree(process: psutil.Process) -> None:
    for each in [process, *process.children(recursive=True)]:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(30)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, psutil.Process]]:
    """The address of two nodes on loopback, and the second one's process."""
    pytest.importorskip("ray", reason="needs ray: pip install -e '.[ray]'")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a token of other clusters may lie in the home folder
    address = f"127.0.0.1:{free_port()}"
    nodes = [start_node("--head", f"--port={address[10:]}", "--include-dashboard=false")]
    try:
        wait_for(address, 1)
        nodes.append(start_node(f"--address={address}"))
        wait_for(address, 2)
        yield address, nodes[1]
    finally:
        for node in reversed(nodes):
            if node.is_running():
                kill_tree(node)


def wait_for(address: str, num_nodes: int) -> None:
    program = (
        "import ray, sys; ray.init(sys.argv[1], _node_ip_address='127.0.0.1', log_to_driver=False);"
        "sys.exit(sum(node['Alive'] for node in ray.nodes()) != int(sys.argv[2]))"
    )
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        command = [sys.executable, "-c", program, address, str(num_nodes)]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return
        time.sleep(1)
    raise TimeoutError(f"no Ray cluster of {num_nodes} nodes at {address}")


def preprocess(store: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "datakit", "preprocess", "a.jsonl", "--output", str(store), "--tokenizer",
               "tok.json", "--append-eod", "--dedup", "--workers", "2", "--item-size", "64KiB", *flags]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=store.parent, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_that_loses_a_node_gives_the_same_bytes(
    cluster: tuple[str, psutil.Process], tmp_path: Path, tokenizer_path: str, texts: list[str]
) -> None:
    address, second = cluster
    write_jsonl(tmp_path / "a.jsonl", [f"{number} {text}" for number in range(300) for text in texts])
    (tmp_path / "tok.json").write_bytes(Path(tokenizer_path).read_bytes())
    (tmp_path / "orjson.py").write_text("raise SystemExit('a module of the current folder')")
    assert preprocess(tmp_path / "local").wait() == 0
    slow = ["--tokenizer-backend", "tokenizers"]  # so that there is a middle to kill in
    run = preprocess(tmp_path / "ray", "--engine", "ray", "--ray-address", address, *slow)
    records = tmp_path / "ray" / ".work" / "items"
    while not records.is_dir() or len(list(records.iterdir())) < 8:
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.05)
    kill_tree(second)
    assert records.is_dir(), "the node was killed after the end"
    _, said = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "local")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_that_cannot_begin_end_the_run(
    cluster: tuple[str, psutil.Process], tmp_path: Path, tokenizer_path: str
) -> None:
    from datakit.preprocessing.ray_pool import RayPool
    from datakit.preprocessing.recipe import Recipe
    from datakit.preprocessing.task import Task
    from datakit.tokenization.identity import TokenizerIdentity

    task = Task(
        str(tmp_path), Recipe(str(tmp_path / "nowhere.json")), TokenizerIdentity("", "", 9, None, None), "tokenizers"
    )
    with (
        RayPool(2, address=cluster[0]) as pool,
        pytest.raises(StorageError, match=r"no worker can begin on the Ray cluster: .*no such tokenizer"),
    ):
        next(pool.run(task, iter([])))


def test_no_cluster_at_an_address_is_told(
    cli: Cli, tmp_path: Path, tokenizer_path: str, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install -e '.[ray]'")
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    flags = ["--tokenizer", tokenizer_path, "--engine", "ray", "--ray-address", f"127.0.0.1:{free_port()}"]
    assert cli("preprocess", source, "--output", tmp_path / "s", *flags) == 3
    assert "error: no Ray cluster answers at 127.0.0.1:" in capsys.readouterr().err


def test_without_ray_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from datakit.preprocessing.ray_pool import _import_ray

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="needs the package ray, which is not installed") as caught:
        _import_ray()
    assert caught.value.hint == 'pip install "ray>=2.40"'
