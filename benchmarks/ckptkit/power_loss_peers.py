"""What writes, and what reads, with each of the programs that power_loss.py compares: as their pages say it is done.

    PYTHON -c 'from benchmarks.ckptkit.power_loss_peers import run; run()' write NAME FOLDER
    PYTHON -c 'from benchmarks.ckptkit.power_loss_peers import run; run()' read NAME

The first promises each step, or the store, once it is complete by the program's page. The second answers lines of JSON
[FOLDER, STEP] with [STEP, DIGEST]; step 0 is the newest, as the program finds it. It needs the one program that is
named, in whichever Python runs it.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

STEPS = (1, 2)
SIZE, NAMES = 5000, ("first", "second")  # two tensors of five blocks of a disk each
NUM_SAMPLES, SAMPLE_BYTES = 6, 6000
Say = Callable[[str], None]


def arrays(step: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return the tensors of a step; no two blocks of a disk are equal."""
    rng = np.random.default_rng(step)
    return {name: rng.random(SIZE, np.float32) for name in NAMES}


def digest(values: dict[str, Any]) -> str:
    """Return the digest of some tensors by name."""
    data = b"".join(np.ascontiguousarray(values[name], np.float32).tobytes() for name in NAMES)
    return hashlib.sha256(data).hexdigest()


def samples() -> list[bytes]:
    """Return what a store holds."""
    rng = np.random.default_rng(1)
    return [rng.bytes(SAMPLE_BYTES) for _ in range(NUM_SAMPLES)]


def digest_of_samples(content: Iterator[bytes]) -> str:
    """Return the digest of samples in their order."""
    return hashlib.sha256(b"".join(content)).hexdigest()


def write_ckptkit(folder: Path, say: Say) -> None:
    import ckptkit

    tensors = [ckptkit.TensorInfo(name, "F32", (SIZE,), ckptkit.Placement("first")) for name in NAMES]
    for step in STEPS:
        box = ckptkit.Box((0,), (SIZE,))
        pieces = [ckptkit.Piece(name, box, 0, SIZE, value) for name, value in arrays(step).items()]
        ckptkit.save(
            str(folder / "run"),
            step,
            pieces,
            tensors=tensors,
            layout=ckptkit.ParallelLayout(),
            num_layers=1,
            metadata={},
        )
        say(f"step {step}")


def read_ckptkit(folder: Path, step: int) -> tuple[int, str]:
    import ckptkit

    values = {name: np.zeros(SIZE, np.float32) for name in NAMES}
    box = ckptkit.Box((0,), (SIZE,))
    pieces = [ckptkit.Piece(name, box, 0, SIZE, value) for name, value in values.items()]
    run = str(folder / "run")
    root = ckptkit.restore(run, step, pieces) if step else ckptkit.restore_newest(run, pieces, sets_aside=False)
    return root.step, digest(values)


def write_datakit(folder: Path, say: Say) -> None:
    import datakit

    documents = [np.frombuffer(sample, np.uint8).astype(np.int64) for sample in samples()]
    datakit.write_store(folder / "store", documents, vocab_size=256)
    say("step 1")


def read_datakit(folder: Path, step: int) -> tuple[int, str]:
    import datakit

    store = datakit.TokenStore.open(folder / "store")
    assert not datakit.verify(folder / "store"), "as its page says, before a store is used"
    return 1, digest_of_samples(store.document(n).astype(np.uint8).tobytes() for n in range(store.num_documents))


def write_dcp(folder: Path, say: Say) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    for step in STEPS:
        state = {name: torch.from_numpy(value) for name, value in arrays(step).items()}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / f"step-{step}", sync_files=True), no_dist=True)
        say(f"step {step}")


def write_dcp_async(folder: Path, say: Say) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    for step in STEPS:
        state = {name: torch.from_numpy(value) for name, value in arrays(step).items()}
        writer = dcp.FileSystemWriter(folder / f"step-{step}", sync_files=True)
        dcp.async_save(state, storage_writer=writer).result()
        say(f"step {step}")


def read_dcp(folder: Path, step: int) -> tuple[int, str]:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {name: torch.zeros(SIZE) for name in NAMES}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder / f"step-{step}"), no_dist=True)
    return step, digest({name: value.numpy() for name, value in state.items()})


def _checkpoint_manager() -> Any:
    """Return the object that saves, in the caller's process, and loads for torch_checkpointing."""
    from torch_checkpointing import CheckpointManager

    return CheckpointManager.Config.with_sync_save().build()


def write_torch_checkpointing(folder: Path, say: Say) -> None:
    import torch

    manager = _checkpoint_manager()
    for step in STEPS:
        state = {name: torch.from_numpy(value) for name, value in arrays(step).items()}
        manager.save(str(folder / f"step-{step}"), {"model": state})
        say(f"step {step}")
    manager.close()


def read_torch_checkpointing(folder: Path, step: int) -> tuple[int, str]:
    import torch

    state = {name: torch.zeros(SIZE) for name in NAMES}
    loaded = _checkpoint_manager().load(str(folder / f"step-{step}"), into={"model": state})["model"]
    return step, digest({name: value.numpy() for name, value in loaded.items()})


def model() -> Any:
    """Return a model of transformers that has the two tensors among others."""
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    class Two(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            for name in NAMES:
                setattr(self, name, torch.nn.Parameter(torch.zeros(SIZE)))
            self.post_init()

        def _init_weights(self, module: object) -> None:
            pass

    return Two


def write_transformers(folder: Path, say: Say) -> None:
    import torch
    from transformers import PretrainedConfig

    for step in STEPS:
        two = model()(PretrainedConfig())
        for name, value in arrays(step).items():
            getattr(two, name).data = torch.from_numpy(value)
        two.save_pretrained(folder / f"checkpoint-{step}")
        say(f"step {step}")


def read_transformers(folder: Path, step: int) -> tuple[int, str]:
    from transformers.trainer_utils import get_last_checkpoint

    path = str(folder / f"checkpoint-{step}") if step else get_last_checkpoint(str(folder))
    assert path is not None, "no checkpoint"
    two = model().from_pretrained(path)
    return int(path.rpartition("-")[2]), digest({name: getattr(two, name).detach().numpy() for name in NAMES})


def write_orbax(folder: Path, say: Say) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder / "run") as manager:
        for step in STEPS:
            manager.save(step, args=ocp.args.StandardSave(arrays(step)))
            manager.wait_until_finished()
            say(f"step {step}")


def read_orbax(folder: Path, step: int) -> tuple[int, str]:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder / "run", options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        step = step or manager.latest_step()
        values = manager.restore(step, args=ocp.args.StandardRestore(arrays(step)))
    return step, digest(values)


def write_lightning(folder: Path, say: Say) -> None:
    import lightning
    import torch

    class Two(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            for name in NAMES:
                setattr(self, name, torch.nn.Parameter(torch.zeros(SIZE)))

    tempfile.tempdir = str(folder)  # where a file is before it is renamed: of the same disk, which is the best case
    two = Two()
    trainer = lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.strategy.connect(two)
    for step in STEPS:
        for name, value in arrays(step).items():
            getattr(two, name).data = torch.from_numpy(value)
        trainer.save_checkpoint(folder / f"step={step}.ckpt")
        say(f"step {step}")


def read_lightning(folder: Path, step: int) -> tuple[int, str]:
    import torch

    state = torch.load(folder / f"step={step}.ckpt", weights_only=True)["state_dict"]
    return step, digest({name: value.numpy() for name, value in state.items()})


def _without_pictures() -> None:
    """Let MosaicML's datasets of pictures, which are imported with all others and need torchvision, be empty."""
    from types import ModuleType

    for name in ("streaming.vision", "streaming.multimodal"):
        sys.modules[name] = ModuleType(name)


def write_mosaic(folder: Path, say: Say) -> None:
    _without_pictures()
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "store"), columns={"x": "bytes"}, size_limit=3 * SAMPLE_BYTES) as writer:
        for sample in samples():
            writer.write({"x": sample})
    say("step 1")


def read_mosaic(folder: Path, step: int) -> tuple[int, str]:
    _without_pictures()
    from streaming import LocalDataset

    dataset = LocalDataset(local=str(folder / "store"))
    return 1, digest_of_samples(dataset[number]["x"] for number in range(len(dataset)))


def write_litdata(folder: Path, say: Say) -> None:
    from litdata.streaming.cache import Cache

    cache = Cache(str(folder / "store"), chunk_bytes=3 * SAMPLE_BYTES)
    for number, sample in enumerate(samples()):
        cache[number] = sample
    cache.done()
    cache.merge()
    say("step 1")


def read_litdata(folder: Path, step: int) -> tuple[int, str]:
    from litdata import StreamingDataset

    dataset = StreamingDataset(str(folder / "store"), shuffle=False)
    return 1, digest_of_samples(dataset[number] for number in range(len(dataset)))


PEERS = {
    "ckptkit": (write_ckptkit, read_ckptkit),
    "datakit": (write_datakit, read_datakit),
    "dcp": (write_dcp, read_dcp),
    "dcp-async": (write_dcp_async, read_dcp),
    "torch_checkpointing": (write_torch_checkpointing, read_torch_checkpointing),
    "transformers": (write_transformers, read_transformers),
    "orbax": (write_orbax, read_orbax),
    "lightning": (write_lightning, read_lightning),
    "mosaicml-streaming": (write_mosaic, read_mosaic),
    "litdata": (write_litdata, read_litdata),
}


def say(text: str) -> None:
    """Promise something, where strace sees it."""
    sys.stdout.flush()
    os.write(1, b"ACKNOWLEDGED " + text.encode() + b"\n")


def answers(read: Callable[[Path, int], tuple[int, str]]) -> None:
    """Answer each line of JSON until there are none."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    for line in sys.stdin:
        folder, step = json.loads(line)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                reply: list[Any] = [*read(Path(folder), step)]
        except BaseException as error:  # as CheckpointException is, of torch
            reply = [-1, f"{type(error).__name__}: {error}"[:200]]
        print(json.dumps(reply), file=replies, flush=True)


def run() -> None:
    """Write or read, as the command line says."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    what, name, *folder = sys.argv[1:]
    write, read = PEERS[name]
    if what == "write":
        write(Path(folder[0]), say)
    else:
        answers(read)
