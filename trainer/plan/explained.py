"""What is known of a run before it runs: who is in which group, holds which part of which tensor, and moves what.

All of it is read off the engine of a rank that holds shapes alone, and off the calls that its step makes.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ckptkit import Coords
from threefold.errors import UserError
from threefold.masking import masked_values
from threefold.page import render_page
from trainer.config import Config
from trainer.config.resolve import kv_replicas, layout_of, schedule_of
from trainer.data import with_vocabulary
from trainer.engine import Engine
from trainer.mesh.layout import groups_needed
from trainer.model.stages import stage_flops, stage_ranges
from trainer.model.table import parameter_table
from trainer.pipeline.actions import PASSES, Action
from trainer.pipeline.draw import COLOURS
from trainer.pipeline.schedules import SCHEDULES, with_transfers
from trainer.pipeline.simulate import Timeline, costs, simulate
from trainer.plan.trace import Trace, totals, traced
from trainer.run.memory import rank_memory
from trainer.store.bucket import Bucket
from trainer.store.plan import Segment

OPEN_VOCABULARY = 32768
MOST_DRAWN, MOST_RANKS = 24, 64  # micro-batches of a drawn schedule, and ranks of a page's grid


def with_known_vocabulary(config: Config) -> tuple[Config, str]:
    """Return the run with a vocabulary, of its stores if they are there, and what was assumed otherwise."""
    if config.model.vocab_size:
        return config, ""
    try:
        return with_vocabulary(config), ""
    except (UserError, OSError):
        text = f"no store says the vocabulary's size: {OPEN_VOCABULARY:,} is assumed (--model.vocab-size N)"
        return replace(config, model=replace(config.model, vocab_size=OPEN_VOCABULARY)), text


def explained(config: Config, source: str, rank: int) -> dict[str, Any]:
    """Return what is known of a resolved run as plain data, the tensors and groups of one rank among it."""
    layout = layout_of(config)
    if not 0 <= rank < layout.world_size:
        text = f"--rank {rank}: {layout} has ranks 0 to {layout.world_size - 1}"
        raise UserError(text, hint=f"--rank {layout.world_size - 1}")
    own_pp = layout.coords(rank).pp
    shown = [rank if pp == own_pp else layout.rank(Coords(pp=pp)) for pp in range(layout.pp)]
    traces = [traced(config, number) for number in shown]
    own = traces[own_pp]
    known = {
        "source": source,
        "layout": str(layout),
        "world_size": layout.world_size,
        "rank": rank,
        "ranks": rank_rows(config),
        "groups": group_rows(config, own),
        "tensors": tensor_rows(own.engine),
        "schedule": schedule_rows(config),
        "memory": [{"pp": pp, **rank_memory(config, pp).parts} for pp in range(layout.pp)],
        "transfers": [row for pp, trace in enumerate(traces) for row in transfer_rows(pp, trace)],
        "config": asdict(config),
    }
    return {name: masked_values(value) for name, value in known.items()}


def rank_rows(config: Config) -> list[dict[str, Any]]:
    """Return the place of each rank in the layout, and its layers."""
    layout, rows = layout_of(config), []
    ranges = stage_ranges(config, parameter_table(config), layout.num_stages)
    for rank in range(layout.world_size):
        coords = layout.coords(rank)
        stages = range(coords.pp, layout.num_stages, layout.pp)
        layers = ", ".join(span_text(ranges[stage]) for stage in stages)
        ends = ["embedding"] * (0 in stages) + ["head"] * (layout.num_stages - 1 in stages)
        row = {"rank": rank, "tp": coords.tp, "cp": coords.cp, "dp": coords.dp, "pp": coords.pp, "layers": layers}
        rows.append({**row, "ends": " and ".join(ends)})
    return rows


def span_text(layers: range) -> str:
    """Return the first and the last of some layers."""
    return f"{layers.start}-{layers[-1]}" if len(layers) > 1 else f"{layers.start}" if layers else "none"


def group_rows(config: Config, trace: Trace) -> list[dict[str, Any]]:
    """Return the groups that a rank calls in a step."""
    mesh, called = trace.engine.mesh, {move.group for move in trace.moves}
    needed = groups_needed(mesh.layout, kv_replicas(config), config.parallel.dp_shard)
    return [
        {"group": name, "size": len(ranks), "groups": len(members), "ranks": list(ranks)}
        for name, members in needed.items()
        for ranks in members
        if name in called and mesh.rank in ranks
    ]


def tensor_rows(engine: Engine) -> list[dict[str, Any]]:
    """Return each tensor of a rank: its whole shape, the part here, who holds the same, and what this rank owns."""
    return [row for bucket in engine.store.buckets for row in bucket_rows(engine, bucket)]


def bucket_rows(engine: Engine, bucket: Bucket) -> list[dict[str, Any]]:
    """Return the tensors of a bucket."""
    mesh, rows = engine.mesh, []
    owned = {segment.name: segment for segment in bucket.owned_segments}
    resident = {segment.name: segment for segment in bucket.resident_segments}
    for name, shape, _ in bucket.plan.parameters():
        row = engine.table[name]
        box = row.placement.local_box(name, row.shape, mesh.layout, mesh.coords)
        rows.append(
            {
                "tensor": name,
                "shape": list(row.shape),
                "held": cut_text(box.offset, box.shape),
                "live_shape": list(shape),
                "holders": bucket.group.name if bucket.group.size > 1 else "this rank",
                "num_holders": bucket.group.size,
                "keeps": elements_text(resident.get(name)),
                "updates": elements_text(owned.get(name)),
            }
        )
    return rows


def cut_text(offset: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Return a part of a tensor as slices, such as [0:64, 0:128]."""
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in zip(offset, shape, strict=True)) + "]"


def elements_text(segment: Segment | None) -> str:
    """Return which elements of a rank's part, row by row, an interval has."""
    return "none" if segment is None else f"{segment.start:,}-{segment.stop - 1:,}"


def timeline_of(config: Config) -> Timeline:
    """Return a step of the run's schedule, whose passes take as long as their arithmetic; of few micro-batches."""
    layout = layout_of(config)
    number = min(config.train.gradient_accumulation_steps, max(MOST_DRAWN, 2 * layout.pp))
    schedule = SCHEDULES[schedule_of(config)](layout.pp, number, layout.virtual)
    work = stage_flops(config, parameter_table(config), layout.num_stages)
    return simulate(with_transfers(schedule), costs(schedule, work=work))


def schedule_rows(config: Config) -> list[dict[str, Any]]:
    """Return the passes of each pipeline rank in its order, with when each begins and ends."""
    timeline = timeline_of(config)

    def row_of(action: Action) -> dict[str, Any]:
        start, end = timeline.spans[action]
        return {"pass": str(action), "stage": action.stage, "start": round(start, 4), "end": round(end, 4)}

    rows = [[row_of(action) for action in row if action.kind in PASSES] for row in timeline.schedule]
    return [{"pp": pp, "passes": passes} for pp, passes in enumerate(rows)]


def transfer_rows(pp: int, trace: Trace) -> list[dict[str, Any]]:
    """Return what a rank of a pipeline rank calls in a step, by kind, group and reason."""
    names = ("kind", "group", "reason", "calls", "bytes")
    rows = sorted(totals(trace.moves), key=lambda total: -total[-1])
    return [{"pp": pp, **dict(zip(names, total, strict=True))} for total in rows]


def page(known: Mapping[str, Any]) -> str:
    """Return what is known as an HTML page that needs nothing else."""
    return render_page(
        __package__,
        "explained.html.j2",
        title=f"{known['source']}: {known['layout']}, {known['world_size']} ranks",
        known=known,
        grid=grid_of(known["ranks"][:MOST_RANKS]),
        left_out=max(len(known["ranks"]) - MOST_RANKS, 0),
        colours=COLOURS,
        end=max(each["end"] for row in known["schedule"] for each in row["passes"]),
        totals=reason_totals(known["transfers"]),
        parts=(parts := list(dict.fromkeys(name for row in known["memory"] for name in row if name != "pp"))),
        memory=[[row["pp"], *(row.get(name, 0) for name in parts)] for row in known["memory"]],
    )


def grid_of(ranks: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return ranks by their pipeline rank."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in ranks:
        rows.setdefault(row["pp"], []).append(row)
    return rows


def reason_totals(transfers: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return the bytes of each reason in the calls of a rank of each pipeline rank, the most first."""
    sizes: Counter[str] = Counter()
    for row in transfers:
        sizes[row["reason"]] += row["bytes"]
    return sizes.most_common()
