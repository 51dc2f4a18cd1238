"""What of a step's optimizer state another optimizer goes on with, and what begins at zero: pure arithmetic.

A row keeps its states if the step has all of them. AdamW counts the updates of all its rows together, so if one of
these begins at zero, all do, and the count with them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit import Root
from threefold.errors import UserError, quoted
from trainer.store.optimizers import OPTIMIZERS
from trainer.store.parameter import Parameter

STATES = tuple(dict.fromkeys(state for optimizer in OPTIMIZERS.values() for state in optimizer.states))


@dataclass(frozen=True, slots=True)
class Reset:
    """The tensors of states that a restore reads, those that begin at zero, and those of the step that it leaves."""

    continued: Sequence[str]
    zeroed: Sequence[str]
    unread: Sequence[str]
    counts_again: bool

    def __str__(self) -> str:
        parts = [("kept is", self.continued), ("at zero begins", self.zeroed), ("not read is", self.unread)]
        return ", ".join(f"{how} {_counted(names)}" for how, names in parts if names)


def reset_of(table: Mapping[str, Parameter], stored: Mapping[str, object]) -> Reset | None:
    """Return what happens to states that are of other optimizers than the table's; None if all are of its own.

    `stored` are the step's tensors. One that is merely missing is damage, which a restore reports.
    """
    rows = {name: row.optimizer for name, row in table.items() if row.placement.tied_to is None}
    stored_states = {name: {state for state in STATES if _tensor(state, name) in stored} for name in rows}
    own_states = {name: set(OPTIMIZERS[optimizer].states) for name, optimizer in rows.items()}
    known = [set(optimizer.states) for optimizer in OPTIMIZERS.values()]
    if stored_states == own_states or any(states not in known for states in stored_states.values()):
        return None
    short = {name for name in rows if not own_states[name] <= stored_states[name]}
    counts_again = any(OPTIMIZERS[rows[name]].counts for name in short)
    if counts_again:
        short |= {name for name, optimizer in rows.items() if OPTIMIZERS[optimizer].counts}
    continued, zeroed, unread = list[str](), list[str](), list[str]()
    for name in rows:
        zeroed += [_tensor(state, name) for state in STATES if state in own_states[name] and name in short]
        continued += [_tensor(state, name) for state in STATES if state in own_states[name] and name not in short]
        unread += [_tensor(state, name) for state in STATES if state in stored_states[name]]
    return Reset(continued, zeroed, [name for name in unread if name not in set(continued)], counts_again)


def refuse_reset(reset: Reset | None, root: Root, where: str, *, allowed: bool) -> None:
    """Raise UserError if a run would go on with another optimizer, unless that is allowed."""
    if reset is None or allowed:
        return
    trained = root.metadata.get("config", {}).get("optim", {}).get("name", "adamw")
    text = f"{where} has the optimizer state of another optimizer: {reset}"
    raise UserError(text, hint=f"--optim.allow-reset goes on so, --optim.name {quoted(str(trained))} as it was trained")


def voids_of(root: Root, reset: Reset | None) -> int:
    """Return how many steps AdamW does not count: void ones, or all before its states began at zero."""
    updates = root.metadata.get("updates")  # older steps have as many as steps
    if reset is not None and reset.counts_again:
        return root.step
    return root.step - updates if isinstance(updates, int) else 0


def reset_lines(reset: Reset | None) -> Iterator[str]:
    """Yield sentences on a reset, if there is one."""
    if reset is not None:
        again = "; AdamW counts its updates from here on" if reset.counts_again else ""
        yield f"another optimizer goes on with the parameters: {reset}{again}"


def _tensor(state: str, name: str) -> str:
    return f"optim.{state}/{name}"


def _counted(names: Sequence[str]) -> str:
    """Return how many tensors each state has, as `exp_avg of 12 tensors`."""
    numbers: dict[str, int] = {}
    for name in names:
        state = name.partition("/")[0].removeprefix("optim.")
        numbers[state] = numbers.get(state, 0) + 1
    return " and ".join(f"{state} of {number} tensors" for state, number in numbers.items())
