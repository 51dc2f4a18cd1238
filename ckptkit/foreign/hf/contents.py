"""What a folder holds that `transformers` saved: model, tensors and other files, on any storage.

Everything that needs no tensor data is checked: config.json, the index, the header of each file, each tensor's shape.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any

from ckptkit.foreign.checks import checked, shown, size_of
from ckptkit.foreign.hf.families import Family, family_of
from ckptkit.foreign.hf.model_table import ModelTable, Row
from ckptkit.foreign.safetensors_file import ForeignTensor, read_file
from threefold.errors import CheckFailed, UserError, listed
from threefold.storage import Storage
from threefold.storage.folders import local_root
from threefold.storage.hub import download_command, folder_of, is_hub_name

FILES = "files/"  # how the names of the run's tensors begin that are such files
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
CARRIED = (  # files beside the weights that a run keeps as they are, each a tensor of bytes
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
STACKED = ".mlp.experts.gate_up_proj"  # how the name ends of a tensor that holds all experts of a layer
BLOCK_BYTES = 16 << 20  # of tensors that are compared
SEQ_LENGTH = 1024  # of an evaluation that says nothing else, or the model's own if that is shorter
MAX_FILE_BYTES, MAX_JSON_BYTES, MAX_FILES = 256 << 20, 64 << 20, 10_000
OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")


@dataclass(frozen=True)
class Contents:
    """What a folder holds: its tensors and where they go, its files with their sizes, what a run records of it."""

    rows: tuple[Row, ...]
    tensors: Mapping[str, ForeignTensor]
    weights: Mapping[str, int]
    files: Mapping[str, int]
    num_layers: int
    metadata: Mapping[str, Any]


def read_contents(storage: Storage) -> Contents:
    """Return what a folder of a known family holds, checked.

    GPT-2's names are known with and without their prefix.
    """
    config = read_json(storage, CONFIG)
    family, model = model_of(config, f"{storage.url}/{CONFIG}", hint=by_own_names(storage))
    tensors, weights = _tensors(storage)
    is_stacked = any(name.endswith(STACKED) for name in tensors)
    most_experts = max((tensor.shape[0] for tensor in tensors.values() if tensor.shape), default=0)
    if model.num_layers > len(tensors) or model.num_experts > (most_experts if is_stacked else len(tensors)):
        said = f"{model.num_layers:,} layers" + (f" of {model.num_experts:,} experts" if model.num_experts else "")
        text = f"{storage.url} does not hold the model of its {CONFIG}: {said}, and {len(tensors):,} tensors"
        raise UserError(text, hint="fetch the folder again, with all its files")
    prefix = family.prefix if any(name.startswith(family.prefix) for name in tensors) else ""
    rows = tuple(family.rows(model, prefix, is_stacked=is_stacked))
    tensors = {name: each for name, each in tensors.items() if not name.endswith(family.ignored)}
    faults = misfits(rows, tensors)
    if faults:
        text = f"{storage.url} does not hold the model of its {CONFIG}:{listed(faults)}"
        raise UserError(text, hint="fetch the folder again, with all its files")
    _compare_tied(storage, rows, tensors)
    positions = config.get("max_position_embeddings") or model.num_positions or SEQ_LENGTH
    if not isinstance(positions, int) or positions < 1:
        text = f"{storage.url}/{CONFIG}: max_position_embeddings must be a whole number above 0, got {shown(positions)}"
        raise UserError(text, hint="fetch the folder again, with all its files")
    seq_length = min(positions, model.attention_window or positions, SEQ_LENGTH)
    metadata = {
        "config": {"model": model.to_json(), "train": {"seq_length": seq_length}},
        "hugging_face": {"model_type": family.model_type, "prefix": prefix},
    }
    return Contents(rows, tensors, weights, carried(storage), model.num_layers, metadata)


def by_own_names(storage: Storage) -> str:
    """Return the command that takes a folder whatever its family."""
    return f"take its tensors by their own names: ckptkit import {quote(storage.url)} RUN --family generic"


def model_of(config: Mapping[str, Any], where: str, *, hint: str | None = None) -> tuple[Family, ModelTable]:
    """Return the family and the model that a config.json names; UserError if they are not known or cannot be held."""
    try:
        family = family_of(config)
        return family, family.model(config)
    except UserError as error:
        raise UserError(f"{where}: {error.message}", hint=error.hint or hint) from None
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{where} cannot be used: {error}") from None


def _model_hint(storage: Storage) -> str:
    """Return how to come by a folder of a model: from the Hub, if there is none of a name that may be one of its."""
    root = local_root(storage)
    name = "" if root is None or root.exists() else os.path.relpath(root)
    if not is_hub_name(name):
        return "name a folder that transformers' save_pretrained made"
    return f"{download_command(name)}, then hf:{folder_of(name)}"


def read_json(storage: Storage, key: str) -> dict[str, Any]:
    """Return the JSON object that a file of the folder holds; CheckFailed if it is missing or damaged."""
    where = f"{storage.url}/{key}"
    size_of(storage, key, MAX_JSON_BYTES, hint=_model_hint(storage))
    with checked(f"{where} is not JSON"):
        document = json.loads(storage.read(key))
    if not isinstance(document, dict):
        raise CheckFailed(f"{where} holds no JSON object")
    return document


def misfits(rows: tuple[Row, ...], tensors: Mapping[str, ForeignTensor]) -> list[str]:
    """Return what is wrong with each tensor of a folder: missing, of another shape, or of no use."""
    tied = {row.foreign for row in rows if row.placement.tied_to is not None}
    # the last of several rows ends where the tensor does
    shapes = {row.foreign: list(row.foreign_shape) for row in rows if row.foreign not in tied}
    stored = {name: list(tensor.shape) for name, tensor in tensors.items()}
    faults = [
        f"{name}: {stored.get(name, 'missing')}, wanted {shape}"
        for name, shape in shapes.items()
        if stored.get(name) != shape
    ]
    first = {row.name: row.foreign for row in reversed(rows)}
    faults += [
        f"{row.foreign}: {tensors[row.foreign].dtype}, that of another expert has another dtype"
        for row in (rows if not faults else ())
        if row.expert and tensors[row.foreign].dtype != tensors[first[row.name]].dtype
    ]
    return faults + [f"{name}: not a tensor of this model" for name in tensors if name not in shapes.keys() | tied]


def _compare_tied(storage: Storage, rows: tuple[Row, ...], tensors: Mapping[str, ForeignTensor]) -> None:
    """Raise UserError if a tensor is there that config.json ties to another one, and is not equal to it."""
    foreign = {row.name: row.foreign for row in rows}
    for row in rows:
        one, other = tensors.get(row.foreign), tensors.get(foreign.get(row.placement.tied_to or "", ""))
        if one is None or other is None:
            continue
        is_equal = (one.dtype, one.shape) == (other.dtype, other.shape) and all(
            _bytes_at(storage, one, start) == _bytes_at(storage, other, start)
            for start in range(0, one.size_bytes, BLOCK_BYTES)
        )
        if not is_equal:
            raise UserError(
                f"{storage.url}: {one.name} is not {other.name}, to which {CONFIG} ties it",
                hint='if the model has both, set "tie_word_embeddings": false there',
            )


def _bytes_at(storage: Storage, tensor: ForeignTensor, start: int) -> bytes:
    stop = min(start + BLOCK_BYTES, tensor.size_bytes)
    [found] = storage.read_ranges(tensor.file, [(tensor.offset + start, tensor.offset + stop)])
    return bytes(found)


def _tensors(storage: Storage) -> tuple[dict[str, ForeignTensor], dict[str, int]]:
    """Return the tensors of all files of weights, and the size of each file."""
    if storage.info(WEIGHTS) is not None:
        tensors, size, _ = read_file(storage, WEIGHTS)
        return tensors, {WEIGHTS: size}
    if storage.info(INDEX) is None:
        other = next((name for name in OTHER_WEIGHTS if storage.info(name) is not None), None)
        has = f" but {other}, which is not read" if other else ""
        hint = "save it as safetensors: model.save_pretrained(FOLDER)" if other else None
        raise CheckFailed(f"{storage.url} has no {WEIGHTS} and no {INDEX}{has}", hint=hint)
    return indexed(storage, INDEX)


def indexed(storage: Storage, index: str) -> tuple[dict[str, ForeignTensor], dict[str, int]]:
    """Return the tensors of the files that an index names, and the size of each file."""
    places, where = read_places(storage, index), f"{storage.url}/{index}"
    files = sorted(set(places.values()))
    all_tensors: dict[str, ForeignTensor] = {}
    sizes = {}
    for file in files:
        tensors, sizes[file], _ = read_file(storage, file)
        named = {name for name, place in places.items() if place == file}
        if named != tensors.keys():
            raise CheckFailed(f"{where} and {file} differ: {min(named ^ tensors.keys())} is in one of them only")
        all_tensors |= tensors
    return all_tensors, sizes


def read_places(storage: Storage, index: str = INDEX) -> dict[str, str]:
    """Return the file of each tensor, as the index says; CheckFailed if it is not sound."""
    places, where = read_json(storage, index).get("weight_map"), f"{storage.url}/{index}"
    if not isinstance(places, dict) or not all(_is_weights(file) for file in places.values()):
        raise CheckFailed(f"{where} has no sound weight_map from tensors to .safetensors files beside it")
    if (num_files := len(set(places.values()))) > MAX_FILES:
        raise CheckFailed(f"{where} names {num_files:,} files, at most {MAX_FILES:,} are read")
    return places


def _is_weights(file: object) -> bool:
    return isinstance(file, str) and file.endswith(".safetensors") and "/" not in file and not file.startswith(".")


def carried(storage: Storage) -> dict[str, int]:
    """Return the files of a folder beside its weights that a run keeps, with their sizes."""
    infos = {name: storage.info(name) for name in CARRIED}
    sizes = {name: info.size_bytes for name, info in infos.items() if info is not None and info.size_bytes}
    for name, size in sizes.items():
        if size > MAX_FILE_BYTES:
            raise UserError(f"{storage.url}/{name} has {size:,} bytes, a run carries at most {MAX_FILE_BYTES:,}")
    return sizes
