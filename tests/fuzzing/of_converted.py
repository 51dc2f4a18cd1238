"""Parsers of what other programs converted: universal checkpoints of DeepSpeed, tokenized files of datatrove."""

import io
import struct
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckptkit.foreign.deepspeed.folder import UcpFolder
from ckptkit.foreign.torch_files.pickle_writer import Call, Global, pickled
from datakit.foreign.datatrove import _DsFile
from datakit.foreign.foreign_store import Pieces
from tests.fuzzing.of_folders import described, tensor_zip
from threefold.storage.memory import MemoryStorage
from tools.fuzzing.fuzz import Parser

NUM_TOKENS = 40
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def module_state() -> bytes:
    """Return the pickled state of a module, as far as its shapes are looked for there."""
    shapes = {"weight": Call(Global("torch", "Size"), ((2, 3),))}
    return pickled({"param_shapes": [shapes], "buffer_names": ["inv_freq"], "frozen_param_shapes": None})


def read_universal(files: dict[str, bytes]) -> object:
    """Read a universal checkpoint of one parameter, in which some files are these."""
    storage: Any = MemoryStorage()
    sound = {f"zero/weight/{state}.pt": tensor_zip(6) for state in STATES}
    for key, data in (sound | {"mp_rank_00_model_states.pt": described(module_state())} | files).items():
        storage.write(key, data)
    folder = UcpFolder("ucp:folder")
    folder.storage = storage
    with redirect_stderr(io.StringIO()):  # it names what it does not read
        return folder.root(0)


@cache
def tokens() -> TemporaryDirectory[str]:
    """Return a folder with a file of tokens."""
    folder = TemporaryDirectory()
    Path(folder.name, "0.ds").write_bytes(bytes(2 * NUM_TOKENS))
    return folder


def read_tokens(**files: bytes) -> object:
    """Read the samples of a file of datatrove, beside which these are."""
    path = Path(tokens().name, "0.ds")
    for suffix, data in files.items():
        path.with_name(f"{path.name}.{suffix}").write_bytes(data)
    file = _DsFile.open(path, None, Pieces())
    return [len(sample) for sample, _ in file.samples()]


CONVERTED = (
    Parser(
        "deepspeed-module",
        lambda: [module_state()],
        lambda data: read_universal({"a_model_states.pt": described(data)}),
    ),
    Parser("deepspeed-tensor", lambda: [tensor_zip(6)], lambda data: read_universal({"zero/weight/fp32.pt": data})),
    Parser(
        "datatrove-index",
        lambda: [struct.pack("<3Q", 7, 7, NUM_TOKENS), struct.pack("<Q", NUM_TOKENS)],
        lambda data: read_tokens(index=data),
    ),
    Parser(
        "datatrove-metadata",
        lambda: [f"tokenizer.json|2\n{NUM_TOKENS}\n40 T".encode()],
        lambda data: read_tokens(metadata=data, index=struct.pack("<Q", NUM_TOKENS)),
    ),
)
