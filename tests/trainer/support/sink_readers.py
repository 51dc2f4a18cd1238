"""What sinks hold, as their own packages and SQL read it: the numbers of each step by name, after all rewinds."""

import json
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Numbers = dict[int, dict[str, Any]]
BLOCK, HEADER = 32768, struct.Struct("<IHB")  # of LevelDB's log format, in which wandb keeps its records


def of_tensorboard(folder: Path) -> Numbers:
    """TensorBoard's own accumulator; each number once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    numbers: Numbers = defaultdict(dict)
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            if tag in numbers[event.step]:
                raise AssertionError(f"step {event.step} has {tag} twice")
            numbers[event.step][tag] = event.value
    return dict(numbers)


def records(path: Path) -> Iterator[Any]:
    """The records of a file of wandb."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at < len(data):
        if (left := BLOCK - at % BLOCK) < HEADER.size:
            at += left
            continue
        _, size, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        whole += data[at : at + size]
        at += size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def of_wandb(folder: Path) -> tuple[set[str], Numbers]:
    """The ids of all offline runs, and their rows as they are once all are sent in turn."""
    ids, rows = set[str](), Numbers()
    for path in sorted(folder.glob("offline-run-*/run-*.wandb")):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                if point := config["_wandb"].get("branch_point"):
                    rows = {step: row for step, row in rows.items() if step <= point["step"]}
            elif kind == "history":
                names = ["/".join(item.nested_key) or item.key for item in record.history.item]
                row = dict(zip(names, (json.loads(item.value_json) for item in record.history.item)))
                rows[row["_step"]] = row
    return ids, rows


def of_mlflow(database: Path) -> tuple[set[str], Numbers]:
    """The ids of runs that are not deleted, and their numbers; each number once."""
    ids, numbers = set[str](), Numbers()
    query = "select run_uuid, key, step, value from metrics join runs using (run_uuid) where lifecycle_stage = 'active'"
    with sqlite3.connect(database) as connection:
        for run, key, step, value in connection.execute(query):
            ids.add(run)
            if key in numbers.setdefault(step, {}):
                raise AssertionError(f"step {step} has {key} twice")
            numbers[step][key] = value
        latest = "from latest_metrics join runs using (run_uuid) where key = 'loss' and lifecycle_stage = 'active'"
        [(newest, last)] = connection.execute(f"select max(step), count(*) {latest}")
    if newest != max(numbers) or last != len(ids):
        raise AssertionError(f"the newest numbers are of step {newest}")
    return ids, numbers
