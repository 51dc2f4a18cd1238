"""Situations that are rare, and of which a night of seeds must reach every one: "sometimes", beside "always".

A promise that holds in every order says little about an order that never came up. So each situation that the code has
words or a branch for has a name here, and the simulation counts how often it came up.
"""

from collections import Counter
from typing import Any

from ckptkit.format.keys import ROOT_KEY, attempt_of, parse_step_folder
from tests.support.checks import require
from threefold.storage.wrapping import Request

SITUATIONS = {
    "root-put-answer-lost": "a root was put, and its writer did not learn of it",
    "root-put-late": "a root landed after its writer had had an error for it",
    "file-late-after-abort": "a file landed after the files of its try had been removed",
    "pin-late-after-unpin": "a pin landed after the step had been unpinned",
    "own-root-met": "a root was put twice, since the answer to the first was lost or late",
    "lost-to-another": "a job was told that another committed the step first",
    "committed-before-begin": "a save began with a step that was committed already",
    "two-jobs-ready": "a root was put while another job had all files of the step ready",
    "saved-again": "a step was committed again, after a rollback had set it aside",
    "outcome-after-next-began": "a writer learned of its save once another writer of the job was in the next one",
    "leader-killed-ready": "the first writer was killed when all files were there and no root",
    "leader-killed-committed": "the first writer was killed after it had put the root, while another waited",
    "other-killed": "another writer was killed in its save",
    "leader-gave-up": "the first writer waited in vain until its deadline",
    "other-gave-up": "another writer waited in vain until its deadline",
    "failure-told": "a writer learned by a word left for it that another had failed",
    "file-after-deadline": "the last file of a writer was put once the first one had given up",
    "commit-during-prune": "a root was put while a prune was under way",
    "prune-warned": "a prune after a save did not come to its end, and said so",
    "pin-met-by-prune": "a prune met a pin that was put after it had listed the run",
    "pin-met-root-gone": "a prune put a root back, as it met a pin once the root was gone",
    "pin-met-by-rollback": "a rollback put a root back, as it met a pin once the root was gone",
    "pin-refused-rollback": "a rollback was refused, as a newer step was pinned",
    "pin-too-late": "a pin was taken back, as its step had gone meanwhile",
    "two-prunes": "two prunes deleted the same root",
    "prune-killed-half": "a prune was killed between a root and its data",
    "orphan-swept": "a sweep removed the files of a try that never was committed",
    "newest-went": "a prune kept what it wanted to delete, as the newest step went away meanwhile",
    "listing-missed-root": "a listing did not show the newest root yet",
    "listing-missed-index": "a listing did not show a file that a first writer waited for",
    "read-during-prune": "a step went away while it was read",
    "nothing-to-read": "a reader found no committed step",
    "rollback-during-read": "a rollback took the step that was being read",
    "rollback-during-copy": "a rollback took the step that was being copied",
    "rollback-during-save": "a rollback took a root while a save was under way",
    "rollback-killed-half": "a rollback was killed between two of its steps' roots, or in the midst of one",
    "rollback-undone": "a rollback was undone",
    "undo-met-saved-again": "a rollback was not undone, as its step had been saved again",
    "copy-lost-its-source": "a copy ended as its step went away",
    "copy-went-on": "a copy kept files that another had written",
    "copies-at-once": "two programs copied a step to one place at once",
    "copy-passed-over": "a copy to a slower tier was passed over for a newer step",
    "copy-tried-again": "a copy to a slower tier was tried again and came to its end",
    "tier-pruned": "a slower tier deleted a step",
    "removed-during-read": "a step was removed while it was read",
    "remove-refused": "the newest step was to be removed, which was refused",
}


class Situations:
    """Counts of situations of one simulation, which calls it."""

    def __init__(self, simulation: Any) -> None:
        self.counts = Counter[str]()
        self._simulation = simulation

    def met(self, name: str, is_met: object = True) -> None:
        """Count a situation, if it is one."""
        if is_met:
            require(name in SITUATIONS, f"{name} is a situation")
            self.counts[name] += 1

    def served(self, program: Any, place: str, request: Request) -> None:
        """Look at a request that was served and changed something."""
        for key in request.keys:
            folder, _, name = key.partition("/")
            step = parse_step_folder(folder)
            if request.operation == "delete":
                program.verb.is_half = name == ROOT_KEY
            if name.endswith("/copying") and request.operation == "write":
                program.verb.num_begun += 1
            elif name == ROOT_KEY and step is not None and request.operation == "write":
                self._root_put(program, place, step)
            elif name == ROOT_KEY and step is not None and request.operation == "delete":
                self._root_gone(program, place, step)
            elif request.operation == "write" and program.verb.name == "save" and name.endswith(".index"):
                self.met("file-after-deadline", attempt_of(name) in self._simulation.given_up)
            elif request.operation == "delete" and program.verb.name == "prune" and (attempt := attempt_of(name)):
                history = self._simulation.watched[place].history
                self.met("orphan-swept", attempt not in history.get(step, []))

    def killed(self, program: Any) -> None:
        """Look at a program that is killed now."""
        verb, run = program.verb, self._simulation.watched["memory://run"]
        if verb.name == "save":
            job, _, rank = program.process.partition(".")
            if rank != "0":
                self.met("other-killed")
                return
            attempt = f"{job}-{verb.step}"
            root = run.roots.get(verb.step)
            if root is not None and root[1].attempt == attempt:
                self.met("leader-killed-committed", self._doing(program, "save", verb.step))
            else:
                self.met("leader-killed-ready", self._simulation.is_ready(attempt, verb.step))
        elif verb.name == "prune":
            self.met("prune-killed-half", verb.is_half)
        elif verb.name == "rollback":
            self.met("rollback-killed-half", self._simulation.last_rollback >= verb.began)

    def _root_put(self, program: Any, place: str, step: int) -> None:
        if place != "memory://run":
            self.met("copy-tried-again", program.verb.num_begun > 1)
            return
        match program.verb.name:
            case "save":
                self.met("commit-during-prune", self._doing(program, "prune"))
                self.met("saved-again", step in self._simulation.set_aside)
                other = {"a": "b", "b": "a"}.get(program.name[0], "")
                self.met("two-jobs-ready", other and self._simulation.is_ready(f"{other}-{step}", step))
            case "prune" | "remove":
                self.met("pin-met-root-gone")
            case "rollback":
                self.met("pin-met-by-rollback")

    def _root_gone(self, program: Any, place: str, step: int) -> None:
        verb = program.verb.name
        if place != "memory://run":
            self.met("tier-pruned", verb in ("tier", "prune"))
        elif verb == "rollback":
            self.met("rollback-during-read", self._doing(program, "read", step))
            self.met("rollback-during-copy", self._doing(program, "copy", step) or self._doing(program, "tier", step))
            self.met("rollback-during-save", self._doing(program, "save"))
        elif verb in ("prune", "remove"):
            self.met("two-prunes", step in self._simulation.watched[place].gone)
            self.met(
                "read-during-prune" if verb == "prune" else "removed-during-read", self._doing(program, "read", step)
            )

    def _doing(self, program: Any, verb: str, step: int | None = None) -> bool:
        """Return whether another program does something, to a step if one is named."""
        return any(
            each is not program and not each.is_over and each.verb.name == verb and step in (None, each.verb.step)
            for each in self._simulation.programs
        )
