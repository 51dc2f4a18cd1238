"""Restoring one step into an engine: which tensors it must hold, what is refused, and what counts as damage."""

import dataclasses

from ckptkit.format.root import Root
from ckptkit.loading.exchange import Exchange, together
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import restore_from
from ckptkit.tensor import TensorInfo
from threefold.errors import UserError, listed
from threefold.storage import Storage
from trainer.engine import MASTER, Engine

UNSEEN_IN_SHAPES = ("num_heads", "num_kv_heads", "norm", "position", "activation")  # of the model's configuration


def restore_step(engine: Engine, storage: Storage, step: int, exchange: Exchange | None = None) -> Root:
    """Read one step into the engine, together with the other ranks of an exchange, which all call this.

    CheckFailed where it is damaged, UserError with a report of each tensor where it is of another model.
    """
    with CheckpointReader(storage, step, exchange=exchange) as reader:
        root = reader.root
        together(reader.exchange, lambda: refuse_another_model(engine, root, reader.url))
        restore_from(reader, engine.restore_pieces(root.tensors), tensors=expected_tensors(engine, root))
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
        raise UserError(f"{where} is of another model:{listed(faults)}", hint=f"ckptkit inspect {where}")
