"""A folder as `transformers` saves it, open as a checkpoint of one step: `hf:FOLDER`, on any storage.

Everything that needs no tensor data is checked when it is opened: config.json, the index, the header of each file, the
shape of each tensor. The folder has no checksums, so its bytes are read unverified.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ckptkit.foreign.families import Family, ModelTable, Row, family_of
from ckptkit.foreign.safetensors_file import ForeignTensor, read_header
from ckptkit.format.root import Root
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.placement import Placement
from ckptkit.model.tensor import TensorInfo
from threefold.errors import CheckFailed, UserError, listed
from threefold.storage import Storage, open_storage

SCHEME, ATTEMPT, FILES = "hf:", "import", "files/"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
CARRIED = (  # files beside the weights that a run keeps as they are, each a tensor of bytes
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
MAX_FILE_BYTES, MAX_JSON_BYTES, MAX_FILES = 256 << 20, 64 << 20, 10_000
OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")
SEQ_LENGTH = 1024  # of an evaluation that says nothing else, or the model's own if that is shorter


@dataclass(frozen=True)
class Contents:
    """What a folder holds: the family and the model that its config.json names, its tensors and other files.

    `prefix` begins the names of tensors: GPT-2's are known with and without one.
    """

    family: Family
    model: ModelTable
    config: Mapping[str, Any]
    prefix: str
    rows: tuple[Row, ...]
    tensors: Mapping[str, ForeignTensor]
    weights: Mapping[str, int]
    files: Mapping[str, int]


class HfFolder:
    """One model folder, with the methods of a Run that holds one step, 0; nothing is read before the first of them."""

    def __init__(self, url: str) -> None:
        self._place = url.removeprefix(SCHEME)
        self.url, self.named = f"{SCHEME}{self._place}", 0

    @cached_property
    def storage(self) -> Storage:
        """Return the storage of the folder, opened at first use."""
        return open_storage(self._place)

    @cached_property
    def contents(self) -> Contents:
        """Return what the folder holds; CheckFailed or UserError if it is not whole or not of a known kind."""
        return read_contents(self.storage)

    def newest_first(self) -> Iterator[int]:
        """Return its only step."""
        return iter([self.resolve()])

    def resolve(self) -> int:
        """Return its only step; an error if the folder is not sound."""
        return self.root(self.named).step

    def root(self, step: int, exchange: object = None) -> Root:
        """Return the root that a run has whose step this folder is."""
        contents = self.contents
        infos = [_info(row, contents) for row in contents.rows]
        infos += [TensorInfo(FILES + name, "U8", (size,), Placement("first")) for name, size in contents.files.items()]
        positions = int(contents.config.get("max_position_embeddings") or contents.model.num_positions or SEQ_LENGTH)
        metadata = {
            "config": {"model": asdict(contents.model), "train": {"seq_length": min(positions, SEQ_LENGTH)}},
            "hugging_face": {"model_type": contents.family.model_type, "prefix": contents.prefix},
        }
        tensors = {info.name: info for info in infos}
        return Root(step, self.attempt, ParallelLayout(), contents.model.num_layers, tensors, (), metadata)

    @cached_property
    def attempt(self) -> str:
        """Return the name that every import of this folder, as it is now, has on a run's storage."""
        infos = [self.storage.info(name) for name in sorted({*self.contents.weights, *self.contents.files})]
        state = hashlib.sha256(self.storage.url.encode())
        for info in infos:
            state.update(repr(info).encode())
        return f"{ATTEMPT}-{state.hexdigest()[:12]}"


def is_folder(url: str) -> bool:
    """Return whether an address means a model folder: `hf:FOLDER`."""
    return url.startswith(SCHEME) and not url.startswith(f"{SCHEME}//")


def read_contents(storage: Storage) -> Contents:
    """Return what a folder holds, checked."""
    config = read_json(storage, CONFIG)
    family, model = model_of(config, f"{storage.url}/{CONFIG}")
    tensors, weights = _tensors(storage)
    prefix = family.prefix if any(name.startswith(family.prefix) for name in tensors) else ""
    rows = tuple(family.rows(model, prefix))
    tensors = {name: each for name, each in tensors.items() if not name.endswith(family.ignored)}
    faults = misfits(rows, tensors)
    if faults:
        text = f"{storage.url} does not hold the model of its {CONFIG}:{listed(faults)}"
        raise UserError(text, hint="fetch the folder again, with all its files")
    return Contents(family, model, config, prefix, rows, tensors, weights, carried(storage))


def model_of(config: Mapping[str, Any], where: str) -> tuple[Family, ModelTable]:
    """Return the family and the model that a config.json names; UserError if they are not known or cannot be held."""
    try:
        family = family_of(config)
        return family, family.model(config)
    except UserError as error:
        raise UserError(f"{where}: {error.message}", hint=error.hint) from None
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{where} cannot be used: {error}") from None


def read_json(storage: Storage, key: str) -> dict[str, Any]:
    """Return the JSON object that a file of the folder holds; CheckFailed if it is missing or damaged."""
    info, where = storage.info(key), f"{storage.url}/{key}"
    if info is None:
        raise CheckFailed(f"{where} is missing", hint="name a folder that transformers' save_pretrained made")
    if info.size_bytes > MAX_JSON_BYTES:
        raise CheckFailed(f"{where} has {info.size_bytes:,} bytes, more than such a file may have")
    try:
        found = json.loads(storage.read(key))
    except (ValueError, RecursionError) as error:
        raise CheckFailed(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckFailed(f"{where} holds no JSON object")
    return found


def misfits(rows: tuple[Row, ...], tensors: Mapping[str, ForeignTensor]) -> list[str]:
    """Return what is wrong with each tensor of a folder: missing, of another shape, or of no use."""
    wanted: dict[str, tuple[int, ...]] = {}
    tied = {row.foreign for row in rows if row.placement.tied_to is not None}
    for row in rows:
        if row.foreign not in tied:
            wanted[row.foreign] = foreign_shape(row)  # the last of several rows ends where the tensor does
    faults = []
    for name, shape in wanted.items():
        found = tensors.get(name)
        if found is None:
            faults.append(f"{name}: missing, wanted {list(shape)}")
        elif found.shape != shape:
            faults.append(f"{name}: {list(found.shape)}, wanted {list(shape)}")
    return faults + [f"{name}: not a tensor of this model" for name in tensors if name not in wanted.keys() | tied]


def foreign_shape(row: Row) -> tuple[int, ...]:
    """Return the shape of a folder's tensor, given the last of the run's tensors that it holds."""
    if row.is_transposed:
        return row.shape[1], row.first + row.shape[0]
    return (row.first + row.shape[0], *row.shape[1:])


def _info(row: Row, contents: Contents) -> TensorInfo:
    name = row.foreign
    if row.placement.tied_to is not None:
        name = next(each.foreign for each in contents.rows if each.name == row.placement.tied_to)
    return TensorInfo(row.name, contents.tensors[name].dtype, row.shape, row.placement)


def _tensors(storage: Storage) -> tuple[dict[str, ForeignTensor], dict[str, int]]:
    """Return the tensors of all files of weights, and the size of each file."""
    if storage.info(WEIGHTS) is not None:
        tensors, size = read_header(storage, WEIGHTS)
        return tensors, {WEIGHTS: size}
    if storage.info(INDEX) is None:
        other = next((name for name in OTHER_WEIGHTS if storage.info(name) is not None), None)
        has = f" but {other}, which is not read" if other else ""
        hint = "save it as safetensors: model.save_pretrained(FOLDER)" if other else None
        raise CheckFailed(f"{storage.url} has no {WEIGHTS} and no {INDEX}{has}", hint=hint)
    places = read_json(storage, INDEX).get("weight_map")
    where = f"{storage.url}/{INDEX}"
    if not isinstance(places, dict) or not all(_is_weights(file) for file in places.values()):
        raise CheckFailed(f"{where} has no sound weight_map from tensors to .safetensors files beside it")
    files = sorted(set(places.values()))
    if len(files) > MAX_FILES:
        raise CheckFailed(f"{where} names {len(files):,} files, at most {MAX_FILES:,} are read")
    found: dict[str, ForeignTensor] = {}
    sizes = {}
    for file in files:
        tensors, sizes[file] = read_header(storage, file)
        here = {name for name, place in places.items() if place == file}
        if here != tensors.keys():
            name = min(here ^ tensors.keys())
            raise CheckFailed(f"{where} and {file} differ: {name} is in one of them only")
        found |= tensors
    return found, sizes


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
