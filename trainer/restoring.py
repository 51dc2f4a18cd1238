"""Restoring one step into an engine: which tensors it must hold, what is refused, and what counts as damage."""

import dataclasses

from ckptkit.format.root import Root, step_folder
from ckptkit.loading.reader import read_root
from ckptkit.loading.restore import restore
from ckptkit.tensor import TensorInfo
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import Storage
from trainer.engine import MASTER, Engine

MAX_NAMED = 30
UNSEEN_IN_SHAPES = ("num_heads", "num_kv_heads", "norm", "position", "activation")  # of the model's configuration


def restore_step(engine: Engine, storage: Storage, step: int) -> Root:
    """Read one step into the engine.

    CheckFailed where it is damaged, UserError with a report of each tensor where it is of another model.
    """
    root = read_root(storage, step)
    refuse_another_model(engine, root, f"{storage.url}/{step_folder(step)}")
    try:
        restore(storage.url, step, engine.restore_pieces(root.tensors), tensors=expected_tensors(engine, root))
    except StorageError as error:
        raise_missing_file(storage, root, error)
        raise
    return root


def expected_tensors(engine: Engine, root: Root) -> list[TensorInfo]:
    """What a checkpoint of the engine's model holds, parameters under the names that the root has them under."""
    prefix = MASTER if MASTER + "embed.weight" in root.tensors else ""
    infos = []
    for info in engine.tensors():
        name = info.name.removeprefix(MASTER)
        if name in engine.table:
            infos.append(dataclasses.replace(info, name=prefix + name))
        elif engine.trains:
            infos.append(info)
    return infos


def refuse_another_model(engine: Engine, root: Root, where: str) -> None:
    """UserError where a step was saved by a model that has more parameters, or uses the same ones in another way."""
    trained, model = root.metadata.get("config", {}).get("model", {}), engine.config.model
    faults = [
        f"model.{name}: it was trained with {trained[name]}, configured is {getattr(model, name)}"
        for name in UNSEEN_IN_SHAPES
        if name in trained and trained[name] != getattr(model, name)
    ]
    for name, info in root.tensors.items():
        row = engine.table.get(name.removeprefix(MASTER))
        is_parameter = not name.removeprefix(MASTER).startswith("optim.")
        if is_parameter and (row is None or (row.placement.tied_to and not info.placement.tied_to)):
            faults.append(f"{name}: {info.dtype} {list(info.shape)}, which the configured model has not")
    if faults:
        listed = faults[:MAX_NAMED] + ([f"and {len(faults) - MAX_NAMED} more"] if len(faults) > MAX_NAMED else [])
        raise UserError("\n  ".join([f"{where} is of another model:", *listed]), hint=f"ckptkit inspect {where}")


def raise_missing_file(storage: Storage, root: Root, error: StorageError) -> None:
    """CheckFailed where a file of the step is gone or cut: the reason why reading failed, unless the storage is."""
    for part in root.parts:
        for key, num_bytes in ((part.data, part.data_bytes), (part.index, part.index_bytes)):
            info = storage.info(f"{step_folder(root.step)}/{key}")
            if info is None or info.size_bytes != num_bytes:
                found = "is missing" if info is None else f"has {info.size_bytes} bytes, not {num_bytes}"
                raise CheckFailed(f"{storage.url}/{step_folder(root.step)}/{key} {found}") from error
