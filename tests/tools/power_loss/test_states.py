"""Which trees a loss of power may leave, by hand."""

import os
from collections.abc import Sequence
from pathlib import Path

from tools.power_loss.calls import Call
from tools.power_loss.disk import BLOCK, Recording, Tree, replay, tree_of
from tools.power_loss.states import State, explore, states

ROOT = "/disk"
SAID = ((b"b", "one"), (b"b", "two"), (b"a", "two"))


def call(number: int, line: str) -> Call:
    """The call that a line says, as `create x`, `write x abc`, `rename x y` or `sync .`."""
    kind, *words = line.split()
    if kind == "say":
        return Call("say", number, number, data=words[0].encode())
    path, text = os.path.normpath(f"{ROOT}/{words[0]}"), "".join(words[1:])
    if kind == "write":
        return Call("write", number, number, path, data=text.encode())
    return Call(kind, number, number, path, f"{ROOT}/{text}")


def recording(*lines: str | Call, before: Tree | None = None) -> Recording:
    """The recording of calls below a folder, one after the other."""
    calls = [line if isinstance(line, Call) else call(number, line) for number, line in enumerate(lines)]
    return replay(calls, Path(ROOT), before or {})


def last_trees(recording: Recording, model: str = "weakest") -> list[Tree]:
    """The trees of the last moment, each once."""
    drawn = list(states(recording, model))
    last = [recording.tree(state.changes) for state in drawn if state.moment == drawn[-1].moment]
    return [tree for number, tree in enumerate(last) if tree not in last[:number]]


def test_a_file_without_fsync_may_be_absent_empty_short_or_zeros() -> None:
    big = "a" * BLOCK + "b"
    trees = last_trees(recording("create x", f"write x {big}", "say end"))
    contents = [tree.get("x") for tree in trees]
    zeros = bytes(BLOCK + 1)
    assert None in contents, "its name is lost"
    assert {b"", big.encode(), zeros[:BLOCK] + b"b", b"a" * BLOCK + b"\0"} <= {*contents}


def test_an_fsync_of_the_file_keeps_its_bytes_and_not_its_name() -> None:
    made = recording("create x", "write x abc", "sync x", "say end")
    assert last_trees(made) == [{"x": b"abc"}, {}]
    both = recording("create x", "write x abc", "sync x", "sync .", "say end")
    assert last_trees(both) == [{"x": b"abc"}]


def test_an_fsync_that_began_before_the_call_had_ended_keeps_nothing() -> None:
    create = Call("create", 1, 3, f"{ROOT}/x")
    for began, trees in ((2, [{"x": b""}, {}]), (4, [{"x": b""}])):
        sync, end = Call("sync", began, 5, ROOT), Call("say", 6, 6, data=b"end")
        assert last_trees(recording(create, sync, end)) == trees


def test_a_rename_is_one_change_and_a_link_with_its_unlink_are_two() -> None:
    renamed = recording("rename x y", "say end", before={"x": b"1"})
    assert last_trees(renamed) == [{"y": b"1"}, {"x": b"1"}]
    linked = recording("link x y", "remove x", "say end", before={"x": b"1"})
    assert sorted(map(sorted, last_trees(linked))) == [[], ["x"], ["x", "y"], ["y"]]


def test_a_journal_keeps_names_in_their_order() -> None:
    two = recording("create x", "create y", "say end")
    assert sorted(map(sorted, last_trees(two))) == [[], ["x"], ["x", "y"], ["y"]]
    assert sorted(map(sorted, last_trees(two, "journal"))) == [[], ["x"], ["x", "y"]]
    elsewhere = recording("create x", "mkdir d", "sync d", "say end")
    assert last_trees(elsewhere, "journal") == [{"x": b"", "d": None}], "any fsync commits all names before it"
    assert len(last_trees(elsewhere)) == 4


def test_what_is_below_a_folder_that_is_lost_is_lost() -> None:
    made = recording("mkdir d", "create d/x", "sync d", "say end")
    assert last_trees(made) == [{"d": None, "d/x": b""}, {}]


def test_a_promise_holds_from_its_own_moment_on(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()

    def check(folder: Path, promises: Sequence[str]) -> str:
        return "lost" if promises and tree_of(folder) != {"x": b""} else ""

    for last, faults in (("sync .", {}), ("seek x", {"lost": 2})):
        made = recording("create x", last, "say kept")
        tally = explore(made, "weakest", check, folder)
        assert tally.faults == faults
        assert tally.num_trees >= 3


def test_one_use_of_fsync_left_out() -> None:
    made = recording("create a1", "sync a1", "create a2", "sync a2", "sync .", "say end")
    assert {sync.use for sync in made.syncs} == {"a#", "."}
    assert len(last_trees(made)) == 1
    assert len(last_trees(made.without("."))) == 4


def test_a_lost_host_takes_what_nobody_synced_and_the_others_go_on() -> None:
    end = Call("say", 5, 5, data=b"end", host="b")
    calls = [Call("create", 0, 0, f"{ROOT}/x", host="a"), Call("create", 2, 2, f"{ROOT}/root", host="b")]

    def drawn(*syncs: Call) -> list[tuple[list[str], tuple[str, ...]]]:
        made = recording(*calls, *syncs, end)
        found = [([*made.tree(state.changes)], state.promises) for state in states(made, "hosts")]
        return [each for number, each in enumerate(found) if each not in found[:number]]

    whole, half = (["x", "root"], ("end",)), (["root"], ("end",))
    assert half in drawn(), "x is lost with its host, and is named by the root of the other"
    assert whole in drawn()
    assert half in drawn(Call("sync", 3, 3, ROOT, host="a")), "the host was lost before its own sync had ended"
    assert half not in drawn(Call("sync", 3, 3, ROOT, host="b")), "the other made durable what it relied on"


def test_states_beyond_a_recording_are_those_that_it_cannot_leave(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    synced = recording("create x", "write x abc", "sync x", "create y", "sync .", "say end")
    assert explore(synced, "weakest", lambda *_: "wrong", folder, beyond=synced).num_trees == 0
    less = synced.without("x")
    for model, durable_at in (("weakest", synced.durable_at), ("journal", synced.in_journal_at)):

        def loses_more(state: State, durable_at: Sequence[float] = durable_at) -> bool:
            return any(at <= state.moment and number not in state.changes for number, at in enumerate(durable_at))

        beyond = [*states(less, model, beyond=synced)]
        assert beyond
        assert all(map(loses_more, beyond))
        moments = [state.moment for state in beyond]
        assert moments == sorted(moments, reverse=True)
        expected = {state.changes for state in filter(loses_more, states(less, model))}
        assert expected <= {state.changes for state in beyond}


def test_a_promise_that_two_hosts_make_is_one() -> None:
    said = [Call("say", 1 + at, 1 + at, data=text, host=host) for at, (text, host) in enumerate(SAID)]
    made = recording(Call("create", 0, 0, f"{ROOT}/x"), *said)
    assert [*dict.fromkeys(state.promises for state in states(made, "weakest"))] == [(), ("b",), ("a", "b")]
