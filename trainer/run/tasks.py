"""Tasks of lm-eval on a checkpoint: which there are, their results, and the items that they were measured on.

lm-eval runs on a thread of the first rank; all ranks score and continue its texts together. So its results do not
depend on the layout but in the last bits of log-likelihoods.
"""

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from threefold.errors import UserError, quoted
from threefold.packages import needed_for
from trainer.run.continuation import Until
from trainer.run.environment import ranks_of
from trainer.run.generate import Generation
from trainer.run.inference import Checkpoint
from trainer.run.orders import Orders
from trainer.run.sampling import Sampling
from trainer.run.scoring import ScoredRow, Scorer
from trainer.run.tokenizer import end_tokens, json_beside, prompt_tokenizer, special_tokens

WHAT = "trainer eval --tasks"


@dataclass(frozen=True, slots=True)
class Asked:
    """Which tasks, by name, a folder with more of them, the items of each (0: all), examples before an item (None: as
    the task says), and rows that are read at once.
    """

    tasks: tuple[str, ...]
    folder: str = ""
    limit: int = 0
    num_fewshot: int | None = None
    batch_size: int = 16


def open_tasks(asked: Asked) -> Any:
    """Return the TaskManager of lm-eval; UserError if that is missing, or lacks a task, with near ones."""
    with needed_for(WHAT):
        from lm_eval.tasks import TaskManager

    if asked.folder and not os.path.isdir(asked.folder):
        raise UserError(f"{asked.folder} is not a folder of tasks", hint="--tasks-path FOLDER, with a YAML file a task")
    try:
        if asked.folder:  # lm-eval's own are many, and reading them takes seconds
            manager = TaskManager(include_path=asked.folder, include_defaults=False)
            if set(asked.tasks) <= set(manager.all_subtasks):
                return manager
        manager = TaskManager(include_path=asked.folder or None)
    except Exception as error:  # of whatever kind a file there brings
        text = f"lm-eval cannot read the tasks of {asked.folder}: {first_line(error)}"
        raise UserError(text, hint=f"ls {quoted(asked.folder)}") from error
    for name in asked.tasks:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, 5, 0.6)
            known = f"near ones are {', '.join(near)}" if near else f"there are {len(manager.all_tasks)} others"
            others = ",".join(near[0] if task == name and near else task for task in asked.tasks)
            hint = f"--tasks {others}" if near else "--tasks-path FOLDER names a folder with tasks of your own"
            raise UserError(f"lm-eval has no task {name}: {known}", hint=hint)
    return manager


def evaluate_tasks(checkpoint: Checkpoint, asked: Asked) -> dict[str, Any]:
    """Return the results of lm-eval for a checkpoint, on the first rank, with the step; nothing on others."""
    with ranks_of(checkpoint.config) as ranks:
        manager = ranks.on_all(lambda: open_tasks(asked) if ranks.rank == 0 else None)
        tokenizer = ranks.on_all(lambda: prompt_tokenizer(checkpoint))
        generation = Generation(checkpoint, ranks, tokenizer)
        ends = end_tokens(checkpoint, tokenizer)
        orders: Orders[dict[str, Any]] = Orders(ranks)

        def program() -> dict[str, Any]:
            from trainer.run.harness_model import HarnessModel

            prefix = prefix_token(checkpoint, generation, ends)
            return run_harness(HarnessModel(tokenizer, prefix, generation.window, orders.ask), asked, manager)

        results = orders.serve(program, handlers(generation, ends, asked.batch_size))
        return {"step": checkpoint.root.step, **(results or {})}


def prefix_token(checkpoint: Checkpoint, generation: Generation, ends: frozenset[int]) -> int:
    """Return what comes before a text that has nothing before it: the token that begins texts, else ends them."""
    name = special_tokens(json_beside(checkpoint, "tokenizer_config.json")).get("bos_token", "")
    number = generation.tokenizer.token_id(name) if name else None
    if number is None and not ends:
        raise UserError(
            "no token begins or ends a text of this model, and lm-eval needs one before a text",
            hint="--data.tokenizer FILE, beside which tokenizer_config.json names its eos_token",
        )
    return min(ends) if number is None else number


def handlers(generation: Generation, ends: frozenset[int], batch_size: int) -> dict[str, Callable[[Any], Any]]:
    """Return what all ranks do for each kind of order."""
    scorer = Scorer(generation.model.engine, batch_size=batch_size)

    def score(rows: Sequence[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
        scores = scorer.score([ScoredRow(tokens, num_scored) for tokens, num_scored in rows])
        return [(score.logprob, score.is_greedy) for score in scores]

    def extend(order: dict[str, Any]) -> list[str]:
        until = Until(order["num_tokens"], ends, tuple(order["texts"]))
        texts = [""] * len(order["prompts"])
        for piece in generation.stream(order["prompts"], until, Sampling(**order["sampling"]), batch_size=batch_size):
            texts[piece.prompt] += piece.text
        return texts

    return {"score": score, "continue": extend}


def run_harness(model: Any, asked: Asked, manager: Any) -> dict[str, Any]:
    """Return what lm-eval measures with a model; UserError for whatever fails in it, such as a download."""
    from lm_eval import simple_evaluate

    try:
        with redirect_stdout(sys.stderr):
            return dict(
                simple_evaluate(
                    model,
                    tasks=list(asked.tasks),
                    num_fewshot=asked.num_fewshot,
                    limit=asked.limit or None,
                    batch_size=asked.batch_size,
                    task_manager=manager,
                    log_samples=True,
                )
            )
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"lm-eval did not get through {', '.join(asked.tasks)}: {first_line(error)}",
            hint=f"lm_eval run --model dummy --tasks {','.join(asked.tasks)} --limit 1 tries the same without a model",
        ) from error


def first_line(error: Exception) -> str:
    """Return what kind of error it is, and the first line of what it says."""
    lines = str(error).strip().splitlines() or ["no more is known"]
    return f"{type(error).__name__}: {lines[0]}"
