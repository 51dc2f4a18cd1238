"""What an export writes: a run's tensors as a family's, laid out in safetensors files. Pure but for `export_of`."""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

from ckptkit.check.slabs import read_whole
from ckptkit.foreign.hf import experts
from ckptkit.foreign.hf.contents import CONFIG, FILES, carried, model_of, read_json
from ckptkit.foreign.hf.families import Family, family_for
from ckptkit.foreign.hf.folder import INDEX_SUFFIX, METADATA, SUFFIX
from ckptkit.foreign.hf.model_table import CAP, ModelTable, Row
from ckptkit.format.root import Root
from ckptkit.loading.chunk_source import ChunkSource
from ckptkit.model.tensor import ITEMSIZE, TensorInfo
from threefold.errors import UserError, listed
from threefold.storage import Storage

CAP_PHRASE = "a soft cap of logits ("  # of what imports recorded that knew no CAP
MASTER, STEM = "optim.master/", "model"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Outgoing:
    """One tensor of the folder, and the run's tensors that it is made of, each with its row."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[tuple[Row, TensorInfo], ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def is_turned(self) -> bool:
        """Whether the folder has it with its dims in the other order."""
        return self.sources[0][0].is_transposed

    def spans(self, start: int, stop: int) -> Iterator[tuple[TensorInfo, int, int]]:
        """Yield which elements of which tensors of the run its elements [start, stop) are, if it is not turned.

        Of q with 32 elements and k with 16 the elements [30, 40) are q's [30, 32) and k's [0, 8).
        """
        at = 0
        for row, info in self.sources:
            size = math.prod(row.box.shape)
            before = (row.expert or 0) * size - at
            first, last = max(start, at), min(stop, at + size)
            if first < last:
                yield info, first + before, last + before
            at += size


@dataclass(frozen=True)
class TensorFile:
    """One safetensors file: its header, then its tensors back to back."""

    name: str
    header: bytes
    tensors: tuple[Outgoing, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(tensor.size_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class Export:
    """All files of a folder: shards of weights, and small files by name."""

    shards: tuple[TensorFile, ...]
    files: Mapping[str, bytes]

    @property
    def small(self) -> dict[str, bytes]:
        """The files beside the shards, config.json last: it is written last."""
        return {name: self.files[name] for name in sorted(self.files, key=lambda name: (name == CONFIG, name))}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each file."""
        sizes = {shard.name: shard.size_bytes for shard in self.shards}
        return sizes | {name: len(data) for name, data in self.small.items()}


def export_of(source: ChunkSource, like: Storage | None, max_shard_bytes: int, dtype: str | None) -> Export:
    """Return what a step is as a folder, in its own dtype or another.

    UserError if it is of no known family, or if `like` is of another model.

    config.json and the tokenizer are those of the folder `like`, else those that the step was imported with; a step
    without both gets a config.json made of what the trainer recorded.
    """
    root, files = source.root, _files(source, like)
    if METADATA in root.metadata:
        return _export_of_own_names(root, files, max_shard_bytes, dtype)
    recorded = recorded_model(root)
    if CONFIG in files:
        where = f"{source.url if like is None else like.url}: {CONFIG}"
        family, model = model_of(_parsed(files[CONFIG], where), where)
        model = model.simplest()
        recorded = None if recorded is None else _with_pattern(recorded, model)
        faults = [
            f"{field.name}: {getattr(recorded, field.name)}, {CONFIG} says {getattr(model, field.name)}"
            for field in fields(ModelTable)
            if recorded is not None and getattr(recorded, field.name) != getattr(model, field.name)
        ]
        if faults:
            raise UserError(f"{source.url} is of another model than {where}:{listed(faults)}")
    elif recorded is None:
        text = f"{source.url} does not say of which model it is"
        raise UserError(text, hint="--like FOLDER, with the config.json of the model")
    else:
        if "window" not in root.metadata["config"]["model"]:  # an older run, which knew one window for all patterns
            recorded = replace(recorded, window=recorded.attention_window, attention_window=0)
        family, model = family_for(recorded), recorded
    prefix = root.metadata.get("hugging_face", {}).get("prefix", family.prefix) if like is None else family.prefix
    tensors = outgoing(family.rows(model, str(prefix)), root, source.url, dtype)
    if CONFIG not in files:
        files[CONFIG] = _config(family, model, root, tensors[0].dtype)
    return _laid_out(tensors, files, max_shard_bytes, dtype)


def _export_of_own_names(root: Root, files: dict[str, bytes], max_shard_bytes: int, dtype: str | None) -> Export:
    """Return a step whose tensors have the names that a folder had them under; other numbers than floats stay."""
    tensors = [
        Outgoing(
            info.name,
            dtype if dtype and info.dtype in DTYPES else info.dtype,
            info.shape,
            ((Row(info.name, info.name, info.shape, info.placement), info),),
        )
        for info in root.tensors.values()
        if not info.name.startswith(FILES)
    ]
    return _laid_out(tensors, files, max_shard_bytes, dtype, str(root.metadata[METADATA].get("stem", STEM)))


def _laid_out(
    tensors: Sequence[Outgoing], files: dict[str, bytes], max_shard_bytes: int, dtype: str | None, stem: str = STEM
) -> Export:
    """Return tensors in shards, and the files beside them, whose config.json says to which dtype they were rounded."""
    if dtype is not None and CONFIG in files:
        config = _parsed(files[CONFIG], CONFIG)
        names = [name for name in ("torch_dtype", "dtype") if name in config] or ["torch_dtype"]
        files[CONFIG] = _json(config | dict.fromkeys(names, DTYPES[dtype]))
    shards = shards_of(tensors, max_shard_bytes, stem)
    if len(shards) > 1:
        files[stem + INDEX_SUFFIX] = index_of(shards)
    return Export(shards, files)


def outgoing(rows: Iterable[Row], root: Root, url: str, dtype: str | None) -> list[Outgoing]:
    """Return the tensors of a folder, in a dtype if one is given.

    UserError lists those that the step lacks or has in another shape.
    """
    results, faults = [], []
    prefix = "" if "embed.weight" in root.tensors else MASTER
    written = (row for row in rows if row.placement.tied_to is None)
    for name, group in groupby(sorted(written, key=_order), lambda row: row.foreign):
        sources = [(row, root.tensors.get(prefix + row.name)) for row in sorted(group, key=lambda row: row.first)]
        present = [(row, info) for row, info in sources if info is not None]
        faults += [
            f"{row.name}: {'missing' if info is None else list(info.shape)}, wanted {list(row.shape)}"
            for row, info in sources
            if info is None or info.shape != row.shape
        ]
        if len({info.dtype for _, info in present}) > 1:
            faults.append(f"{name}: its parts are of several dtypes")
        if present:
            results.append(Outgoing(name, dtype or present[0][1].dtype, present[-1][0].foreign_shape, tuple(present)))
    if faults:
        raise UserError(f"{url} does not hold the model of its {CONFIG}:{listed(faults)}")
    return results


def shards_of(tensors: Sequence[Outgoing], max_bytes: int, stem: str = STEM) -> tuple[TensorFile, ...]:
    """Return tensors in files of at most so many bytes of them, or of one larger tensor; `stem` begins their names."""
    groups: list[list[Outgoing]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.size_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.size_bytes
    count = len(groups)
    names = [f"{stem}-{n:05d}-of-{count:05d}{SUFFIX}" for n in range(1, count + 1)] if count > 1 else [stem + SUFFIX]
    return tuple(_shard(name, group) for name, group in zip(names, groups, strict=True))


def index_of(shards: Sequence[TensorFile]) -> bytes:
    """Return the index of several files."""
    total = sum(tensor.size_bytes for shard in shards for tensor in shard.tensors)
    places = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    return _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def recorded_model(root: Root) -> ModelTable | None:
    """Return the model that a root's metadata records in the trainer's words, in its simplest spelling.

    None if it does not.
    """
    config = root.metadata.get("config")
    recorded = config.get("model") if isinstance(config, Mapping) else None
    if not isinstance(recorded, Mapping):
        return None
    values = {field.name: recorded[field.name] for field in fields(ModelTable) if field.name in recorded}
    try:
        heads, hidden = values["num_heads"], values["hidden_size"]
        values["num_kv_heads"] = values.get("num_kv_heads") or heads
        values["head_size"] = values.get("head_size") or hidden // heads
        is_rope = values.get("position", "rope") == "rope"
        unused = ["num_positions"] if is_rope else ["rope_theta", "rope_scaling"]
        if not is_rope:
            train = config.get("train", {}) if isinstance(config, Mapping) else {}
            values["num_positions"] = values.get("num_positions") or train.get("seq_length", 0)
        if not is_rope or values.get("rope_scaling", "none") != "llama3":
            unused += ["rope_low_factor", "rope_high_factor", "rope_original_length"]
        if not is_rope or values.get("rope_scaling", "none") == "none":
            unused.append("rope_factor")
        if values.get("window_every", 0) > values["num_layers"]:
            unused.append("window_every")
        values |= _cap_of_old(values.get("beyond", ()))
        values["beyond"] = tuple(values.get("beyond", ())) + experts.beyond_folders(recorded)
        return ModelTable(**{name: value for name, value in values.items() if name not in unused}).simplest()
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _cap_of_old(beyond: Sequence[str]) -> dict[str, Any]:
    """Return the soft cap of logits that an older import has as a phrase, and the other phrases."""
    for phrase in beyond:
        if str(phrase).startswith(CAP_PHRASE):
            others = [other for other in beyond if other != phrase]
            return {CAP: float(phrase.removeprefix(CAP_PHRASE).rstrip(")")), "beyond": others}
    return {}


def _with_pattern(recorded: ModelTable, model: ModelTable) -> ModelTable:
    """Return what a run recorded, in whose rows the window cut nothing, with the pattern of a folder's layers."""
    if recorded.window or recorded.attention_window != (model.window or model.attention_window):
        return recorded
    names = ("window", "window_every", "attention_window")
    return replace(recorded, **{name: getattr(model, name) for name in names})


def _order(row: Row) -> tuple[int, int, str, int]:
    """Sort key of tensors of a folder: by depth, experts by number, so that a tensor of the run is read in order."""
    stage = row.placement.stage
    depth = ({"first": 0, "last": 2}[stage], 0) if isinstance(stage, str) else (1, stage)
    return (*depth, row.foreign, 0) if row.expert is None else (*depth, row.name, row.expert)


def _shard(name: str, tensors: Sequence[Outgoing]) -> TensorFile:
    ordered = tuple(sorted(tensors, key=lambda tensor: -ITEMSIZE[tensor.dtype]))  # elements stay aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        offsets = [at, at + tensor.size_bytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return TensorFile(name, struct.pack("<Q", len(text)) + text, ordered)


def _files(source: ChunkSource, like: Storage | None) -> dict[str, bytes]:
    if like is not None:
        read_json(like, CONFIG)
        return {name: like.read(name) for name in carried(like)}
    infos = [info for name, info in source.root.tensors.items() if name.startswith(FILES)]
    return {info.name.removeprefix(FILES): read_whole(source, info) for info in infos}


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    return dict(found)


def _config(family: Family, model: ModelTable, root: Root, dtype: str) -> bytes:
    recorded = root.metadata.get("seq_length") or root.metadata.get("config", {}).get("train", {}).get("seq_length")
    head = {"architectures": [family.architecture], "model_type": family.model_type, "torch_dtype": DTYPES[dtype]}
    assert family.config is not None, "family_for returns a family that has it"
    return _json(head | family.config(model, int(recorded or 1)))


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
