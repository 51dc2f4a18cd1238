"""Trees in which no reader sees a difference have one key, and no others."""

from tests.tools.power_loss.test_states import ROOT, recording
from tools.power_loss.calls import Call
from tools.power_loss.equivalence import Equivalence, kinds
from tools.power_loss.states import State

FIRST, SECOND = "0123456789abcdef", "fedcba9876543210"


def key(lines: list[str], *changes: int, promises: tuple[str, ...] = (), of: str = "one") -> bytes:
    """Return the key of a tree of a program."""
    return Equivalence(recording(*lines), of).key(State(0, changes, promises))


def published(random: str, text: str) -> list[str]:
    """Return the calls of a file that is written under a hidden name, which is random, and renamed; changes 0 to 3."""
    return [f"create .x.{random}.tmp", f"write .x.{random}.tmp {text}", f"rename .x.{random}.tmp x"]


def test_names_and_contents_that_are_of_one_recording_make_no_difference() -> None:
    for changes in ((), (0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 2, 3)):
        assert key(published(FIRST, "abc"), *changes) == key(published(SECOND, "xyz"), *changes)


def test_what_a_temporary_file_holds_makes_none_and_that_it_is_there_does() -> None:
    lines = published(FIRST, "abc")
    assert key(lines, 0) == key(lines, 0, 1, 2)
    assert key(lines) != key(lines, 0)
    assert key(lines, 0, 1, 2, 3) != key(lines, 0, 3), "under its name it is read"


def test_of_temporary_files_in_a_folder_one_is_as_good_as_two() -> None:
    lines = ["mkdir d", *(f"create {name}.{FIRST}.tmp" for name in (".x", ".y", "d/.x"))]
    assert key(lines, 0, 1) == key(lines, 0, 2) == key(lines, 0, 1, 2)
    assert len({key(lines, 0), key(lines, 0, 1), key(lines, 0, 3), key(lines, 0, 1, 3)}) == 4


def test_a_file_is_known_by_who_made_it_and_a_folder_is_not() -> None:
    def keys(*hosts: str) -> list[bytes]:
        folder = Call("mkdir", 0, 0, f"{ROOT}/d", host=hosts[0])
        hidden = [f"{ROOT}/d/.x.{random}.tmp" for random in (FIRST, SECOND)]
        made = [Call("create", 1 + at, 1 + at, hidden[at], host=host) for at, host in enumerate(hosts)]
        named = [Call("rename", 3 + at, 3 + at, path, f"{ROOT}/d/x") for at, path in enumerate(hidden)]
        trees = Equivalence(recording(folder, *made, *named), "one")
        return [trees.key(State(0, (0, 1, 2, number), ())) for number in (3, 4)]

    assert keys("a", "b") == keys("b", "a")[::-1]
    assert len({*keys("a", "b")}) == 2


def test_lost_bytes_promises_and_programs_make_a_difference() -> None:
    lines = ["create x", "write x abc", "create y"]
    keys = {key(lines, 0, 1, 2), key(lines, 0, 1), key(lines, 0), key(lines, 0, 1, 2, 3)}
    assert len({*keys, key(lines, 0, promises=("whole 1",)), key(lines, 0, of="other")}) == 6


def test_a_write_that_another_covers_makes_none() -> None:
    lines = ["create x", "write x abc", "create x", "write x abd"]
    covered = recording(*lines)
    offsets = [change.offset for change in covered.changes if change.data]
    assert offsets == [0, 0]
    assert key(lines, 0, 1, 2, 3) == key(lines, 0, 1, 3)


def test_each_moment_has_the_kind_of_its_call() -> None:
    made = recording("create x", "write x abc", "sync x", "say end")
    assert kinds(made) == {0: "name", 1: "data", 2: "fsync", 3: "promise"}
