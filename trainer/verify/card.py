"""The card of a verification: the verdict, the checks with their figures, and what was verified."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ckptkit import git_commit
from threefold import __version__
from threefold.masking import masked_values
from threefold.page import render_page
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.verify.result import Result
from trainer.verify.shrink import Shrunk


def verdict_of(results: Sequence[Result]) -> str:
    """Return FAILED if a check failed, "partial" if one was not run, else ok."""
    states = {result.state for result in results}
    return "FAILED" if "FAILED" in states else "partial" if "not run" in states else "ok"


def card(
    source: str, run: Config, small: Shrunk, results: Sequence[Result], wide: Shrunk | None = None
) -> dict[str, Any]:
    """Return all that is known of a verification as plain data, with passwords masked; `wide` ran on a GPU."""
    has_gpu = wide is not None and torch.cuda.is_available()
    of_gpu = {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)} if has_gpu else {}
    versions = {"threefold": __version__, "torch": torch.__version__, "python": platform.python_version()}
    known = {
        "verdict": verdict_of(results),
        "source": source,
        "layout": str(layout_of(small.config)),
        "layout_of_run": str(layout_of(run)),
        "checks": [asdict(result) for result in results],
        "changes": [asdict(change) for change in small.changes],
        "changes_at_true_width": [asdict(change) for change in wide.changes] if wide is not None else [],
        "config": asdict(run),
        "versions": versions | of_gpu,
        "commit": git_commit(),
    }
    return {name: masked_values(value) for name, value in known.items()}


def page(known: Mapping[str, Any]) -> str:
    """Return a card as an HTML page that needs nothing else."""
    names = ("name", "state", "difference", "bound", "text", "seconds")
    rows = [[f"{check[name]:.1f}" if name == "seconds" else check[name] for name in names] for check in known["checks"]]
    titles = {"source": "run", "layout_of_run": "its layout", "layout": "layout here", "commit": "commit"}
    facts = [[title, known[name]] for name, title in titles.items()]
    facts += [[name, version] for name, version in known["versions"].items()]
    changes, wide_changes = (
        [[change["key"], str(change["was"]), str(change["now"])] for change in known[name]]
        for name in ("changes", "changes_at_true_width")
    )
    options = [
        [f"{table}.{key}", str(value)] for table, values in known["config"].items() for key, value in values.items()
    ]
    return render_page(
        __package__,
        "card.html.j2",
        title=f"{known['source']}: {known['verdict']}",
        rows=rows,
        facts=facts,
        changes=changes,
        wide_changes=wide_changes,
        options=options,
    )
