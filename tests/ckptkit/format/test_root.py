"""The root: round trip, one line a tensor, and refusal of everything that is damaged, impossible or hostile."""

import contextlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.format.keys import attempt_of, parse_step_folder, part_keys, step_folder
from ckptkit.format.root import Part, Root, Share
from ckptkit.format.saved import Saved
from ckptkit.io.blocks import xxh3_64
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Cut, Placement, TensorInfo
from threefold.errors import CheckFailed, UserError

ROOT = Root(
    step=100,
    attempt="a1",
    layout=ParallelLayout(tp=8, pp=4, dp=2),
    num_layers=30,
    tensors={
        info.name: info
        for info in (
            TensorInfo("embed.weight", "F32", (50257, 64), Placement("first", (Cut(0),), round_to=1)),
            TensorInfo("layers.3.attn.q.weight", "BF16", (64, 64), Placement(3, (Cut(1),))),
            TensorInfo("layers.3.up", "F32", (4, 8, 2), Placement(3, (Cut(0, "ep"), Cut(1, max_parts=4)))),
            TensorInfo("größe", "F64", (), Placement("last")),
            TensorInfo(
                "head.weight", "F32", (50257, 64), Placement("last", (Cut(0),), round_to=1, tied_to="embed.weight")
            ),
        )
    },
    parts=(Part(*[x for pair in zip(part_keys("a1", 3), (4096, 900), strict=True) for x in pair], 2**64 - 1),),
    metadata={"tokens": 5, "cursor": {"seed": 1}, "loss": 2.5},
    saved=Saved.from_json(
        {
            "saved_at": "2026-09-21T16:13:20.250+02:00",
            "host": "host",
            "version": "threefold 0.1.0",
            "code": "abc",
            "stall_s": 0.5,
            "write_s": 2.0,
            "commit_s": 0.125,
        }
    ),
)


def sealed(document: dict[str, Any]) -> bytes:
    """A document with a right checksum, as a hostile writer would make it."""
    body = json.dumps(document).encode()[:-1]
    return body + f',\n"checksum": "{xxh3_64(body):016x}"\n}}\n'.encode()


def document() -> dict[str, Any]:
    found = json.loads(ROOT.to_bytes())
    del found["checksum"]
    return dict(found)


def in_version_1(fields: dict[str, Any]) -> dict[str, Any]:
    """The document as programs wrote it before placements had several cuts; without the tensor that has two."""
    rows = []
    for row in fields["tensors"]:
        (cut, *more), place = row["placement"]["cuts"] or [{"dim": None, "axis": "tp"}], row["placement"]
        if not more:
            placement = {"stage": place["stage"], "dim": cut["dim"], "axis": cut["axis"]}
            placement |= {"padded": place["round_to"] is not None, "tied_to": place["tied_to"]}
            rows.append(row | {"placement": placement})
    return fields | {"version": 1, "tensors": rows}


def test_a_root_of_version_1_holds_the_same_in_the_placements_of_version_2() -> None:
    found = Root.from_bytes(sealed(in_version_1(document())), "here")
    assert found == replace(ROOT, tensors={n: info for n, info in ROOT.tensors.items() if n != "layers.3.up"})
    assert json.loads(found.to_bytes())["version"] == 2


def test_a_layout_names_etp_only_where_older_readers_would_be_wrong() -> None:
    root = replace(ROOT, layout=ParallelLayout(tp=2, ep=8, dp=4, etp=1))
    assert Root.from_bytes(root.to_bytes(), "here") == root
    assert json.loads(root.to_bytes())["layout"]["etp"] == 1
    for layout in (ROOT.layout, ParallelLayout(tp=2, ep=4, dp=4), ParallelLayout(tp=2, ep=4, dp=4, etp=2)):
        found = json.loads(replace(ROOT, layout=layout).to_bytes())["layout"]
        assert list(found) == ["tp", "cp", "ep", "dp", "pp", "virtual"]


def test_a_certificate_is_kept_as_it_is() -> None:
    root = replace(ROOT, certificate={"by": ["a", 1.5, None], "of": {"all": "00ff"}})
    root.check()
    assert Root.from_bytes(root.to_bytes(), "here") == root
    assert b"certificate" not in ROOT.to_bytes()


def test_round_trip_and_readable_lines() -> None:
    data = ROOT.to_bytes()
    assert Root.from_bytes(data, "here") == ROOT
    lines = data.decode().splitlines()
    assert sum(line.startswith('{"name": ') for line in lines) == len(ROOT.tensors)
    assert json.loads(data)["layout"]["tp"] == 8


def test_a_root_of_an_older_program_has_no_record_of_its_save() -> None:
    found = document()
    del found["saved"]
    assert Root.from_bytes(sealed(found), "here") == replace(ROOT, saved=None)
    assert "saved" not in json.loads(replace(ROOT, saved=None).to_bytes())


def test_what_is_recorded_of_a_save_is_cut_to_its_cap() -> None:
    saved = replace(ROOT.saved, host="ä" * 200, code="\ud800")
    root = Root.from_bytes(replace(ROOT, saved=saved).to_bytes(), "here")
    assert (root.saved.host, root.saved.code) == ("ä" * 127, "?")
    assert json.loads(ROOT.to_bytes())["saved"]["saved_at"] == "2026-09-21T14:13:20.250Z"


def test_files_of_an_attempt() -> None:
    for name in ("part-00003.index", "part-123456.2.safetensors", "part-00003.failed", "copying"):
        assert attempt_of(f"a1/{name}") == "a1"
    for key in (
        "root.json", "pin.json", "part-00003.index", "a1/part-3.index", "../part-00003.index",
        "a1/part-00003.1.failed", "a1/part-00003.index.bak",
        "a1/.part-00003.index", "a1/b/part-00003.index", "a1/part-00003.index\n",
    ):  # fmt: skip
        assert attempt_of(key) is None


def test_the_root_of_one_node_says_whose_files_it_names() -> None:
    root = replace(ROOT, share=Share(first=2, count=2, of=8))
    assert Root.from_bytes(root.to_bytes(), "here") == root
    assert (str(root.share), str(Share(0, 1, 2))) == ("writers 2-3", "writer 0")
    assert b'"share"' not in ROOT.to_bytes()


def test_a_diverged_loss_does_not_fail_a_save() -> None:
    root = replace(ROOT, metadata={"loss": math.nan, "history": [math.inf, 1.0], "ok": True})
    assert Root.from_bytes(root.to_bytes(), "here").metadata == {"loss": None, "history": [None, 1.0], "ok": True}


@given(st.integers(0, len(ROOT.to_bytes()) - 1), st.integers(1, 255))
def test_any_flipped_byte_is_found(at: int, flip: int) -> None:
    data = bytearray(ROOT.to_bytes())
    data[at] ^= flip
    with pytest.raises(UserError):
        Root.from_bytes(bytes(data), "here")


@given(st.integers(0, len(ROOT.to_bytes()) - 1))
def test_any_truncation_is_found(length: int) -> None:
    with pytest.raises(CheckFailed, match="here"):
        Root.from_bytes(ROOT.to_bytes()[:length], "here")


def test_another_format_version_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="format version 3, this program reads 1 and 2"):
        Root.from_bytes(sealed(document() | {"version": 3}), "here")


def spoil(fields: dict[str, Any], path: str, value: object) -> bytes:
    """A sound document with one value replaced, sealed."""
    at: Any = fields
    *parents, last = path.split(".")
    for key in parents:
        at = at[int(key) if key.isdecimal() else key]
    at[int(last) if last.isdecimal() else last] = value
    return sealed(fields)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("step", -1), ("step", 1.5), ("step", True), ("step", 10**30),
        ("attempt", "../a1"), ("attempt", "a/b"), ("attempt", ""), ("attempt", "x" * 200), ("attempt", 3),
        ("layout", {"tp": 0}), ("layout", {"gp": 1}), ("layout", 3), ("layout.etp", 1), ("layout.etp", 3),
        ("saved", None), ("saved", 3), ("saved", {}), ("saved.saved_at", 3), ("saved.saved_at", "yesterday"),
        ("saved.saved_at", "2026-11-21T10:00:00"), ("saved.saved_at", "9999-12-31T23:59:59-23:59"),
        ("saved.saved_at", "0001-01-01T00:00:00+23:59"), ("saved.host", None), ("saved.code", "x" * 256),
        ("saved.write_s", "1"), ("saved.write_s", -1), ("saved.commit_s", True), ("saved.commit_s", 10**400),
        ("num_layers", 10**9), ("metadata", 3), ("tensors", 3), ("tensors.0", "x"),
        ("tensors.0.name", ""), ("tensors.0.name", "x" * 300), ("tensors.0.name", "größe"),
        ("tensors.0.dtype", "F33"), ("tensors.0.shape", [2**40, 2**40]), ("tensors.0.shape", [-1]),
        ("tensors.0.shape", [1] * 9), ("tensors.0.shape", ["3"]), ("tensors.0.shape", None),
        ("tensors.0.placement.cuts.0.dim", 2), ("tensors.0.placement.cuts.0.dim", -1),
        ("tensors.0.placement.cuts.0.dim", True), ("tensors.0.placement.cuts.0.axis", "dp"),
        ("tensors.0.placement.cuts.0.axis", ["tp"]), ("tensors.0.placement.cuts.0.max_parts", 0),
        ("tensors.0.placement.cuts.0.max_parts", 2.0), ("tensors.0.placement.cuts.0.extra", 1),
        ("tensors.0.placement.cuts.0", 3), ("tensors.0.placement.cuts", None), ("tensors.0.placement.cuts", "tp"),
        ("tensors.0.placement.round_to", 0), ("tensors.0.placement.round_to", True),
        ("tensors.0.placement.round_to", 2**30), ("tensors.0.placement.stage", "middle"),
        ("tensors.0.placement.extra", 1), ("tensors.2.placement.cuts.1.axis", "ep"),
        ("tensors.2.placement.cuts.1.axis", "cp"), ("tensors.2.placement.cuts.1.max_parts", 3),
        ("certificate", None), ("certificate", 3), ("certificate", [1]),
        ("tensors.4.dtype", "F64"), ("tensors.4.shape", [1]), ("tensors.4.placement.tied_to", "nothing"),
        ("tensors.0.placement.tied_to", "head.weight"), ("parts.0.data", "a1/../../etc/passwd"),
        ("parts.0.data", "/etc/passwd"),
        ("parts.0.data", "a2/part-00003.safetensors"), ("parts.0.data", "a1/part-00004.index"),
        ("parts.0.data", "a1/part-00003.safetensors/x"), ("parts.0.index", "a1/x.index"),
        ("parts.0.index", "a1/part-00004.safetensors"),
        ("parts.0.data_bytes", 2**60), ("parts.0.index_bytes", 2**40), ("parts.0.index_bytes", -1),
        ("parts.0.index_xxh3", "zz"), ("parts.0.index_xxh3", 5),
        ("share", 3), ("share", {}), ("share", {"first": 0, "count": 0, "of": 2}),
        ("share", {"first": 1, "count": 2, "of": 2}), ("share", {"first": -1, "count": 2, "of": 2}),
        ("share", {"first": 0, "count": 1, "of": 10**12}),
    ],
)  # fmt: skip
def test_impossible_values_are_refused_though_the_checksum_holds(path: str, value: object) -> None:
    Root.from_bytes(sealed(document()), "here")
    with pytest.raises(CheckFailed, match="here"):
        Root.from_bytes(spoil(document(), path, value), "here")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dim", 2), ("dim", -1), ("dim", "0"), ("stage", "middle"), ("axis", "dp"), ("axis", "cp"), ("axis", None),
        ("padded", 1), ("padded", None), ("extra", 1), ("cuts", []), ("round_to", 1),
    ],
)  # fmt: skip
def test_impossible_placements_of_version_1_are_refused(field: str, value: object) -> None:
    Root.from_bytes(sealed(in_version_1(document())), "here")
    with pytest.raises(CheckFailed, match="here"):
        Root.from_bytes(spoil(in_version_1(document()), f"tensors.0.placement.{field}", value), "here")


IMPOSSIBLE = [
    {"step": -1}, {"step": 1.5}, {"step": None}, {"step": 10**16}, {"num_layers": -1}, {"num_layers": "3"},
    {"attempt": "../a"}, {"attempt": 3}, {"layout": "tp1"}, {"metadata": [1]}, {"metadata": None},
    {"metadata": {"a": b"x"}}, {"metadata": {"a": "\udcff"}},
    {"certificate": [1]}, {"certificate": {"a": b"x"}}, {"certificate": {"a": math.nan}},
]  # fmt: skip
IMPOSSIBLE_TENSORS = [
    TensorInfo("", "F32", (), Placement("first")), TensorInfo("x" * 256, "F32", (), Placement("first")),
    TensorInfo("\udcff", "F32", (), Placement("first")), TensorInfo("w", "float32", (), Placement("first")),
    TensorInfo("w", "F32", (1,) * 9, Placement("first")), TensorInfo("w", "F32", (4.0,), Placement("first")),
    TensorInfo("w", "F32", (-1,), Placement("first")), TensorInfo("w", "F32", (2**30, 2**30), Placement("first")),
    TensorInfo("w", "F32", (4,), Placement("first", (Cut(1),))), TensorInfo("w", "F32", (4,), Placement("middle")),
    TensorInfo("w", "F32", (4,), Placement("first", (Cut(0, "dp"),))),
    TensorInfo("w", "F32", (4,), Placement("first", 0)), TensorInfo("w", "F32", (4,), Placement("first", [Cut(0)])),
    TensorInfo("w", "F32", (4,), Placement("first", Cut(0))), TensorInfo("w", "F32", (4,), Placement(0, round_to=0)),
    TensorInfo("w", "F32", (4, 4), Placement("first", (Cut(0), Cut(1)))),
    TensorInfo("w", "F32", (4, 4), Placement("first", (Cut(0, "ep"), Cut(1, "cp")))),
    TensorInfo("w", "F32", (4, 4), Placement("first", (Cut(0, max_parts=3),))),
    TensorInfo("w", "F32", (4,), Placement("last", tied_to="nothing")),
]  # fmt: skip


@pytest.mark.parametrize("fields", IMPOSSIBLE + [{"tensors": {info.name: info}} for info in IMPOSSIBLE_TENSORS])
def test_what_no_reader_would_take_is_refused_before_it_is_saved(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"no reader would take|is not JSON|is not a name|is not a whole number"):
        replace(ROOT, **fields).check()


anything = st.integers(-2, 12) | st.none() | st.booleans() | st.text(max_size=3) | st.floats(0, 9)
cuts = st.builds(Cut, st.integers(-1, 9), st.sampled_from(["tp", "ep", "dp"]), st.none() | st.integers(-1, 9))
placements = st.builds(
    Placement, st.sampled_from(["first", "last", "x", 3, -1]), st.lists(cuts, max_size=2).map(tuple),
    anything, st.none() | st.sampled_from(["w", "v", ""]),
)  # fmt: skip
infos = st.builds(
    TensorInfo, st.sampled_from(["w", "v", "ü", "", "x" * 256]), st.sampled_from(["F32", "U8", "f4"]),
    st.lists(st.integers(-1, 2**25), max_size=9).map(tuple), placements,
)  # fmt: skip


@given(
    step=anything, num_layers=anything, tensors=st.lists(infos, max_size=2),
    metadata=anything | st.dictionaries(st.text(max_size=2), anything, max_size=2),
)  # fmt: skip
def test_what_is_not_refused_before_is_read_back(
    step: Any, num_layers: Any, tensors: list[TensorInfo], metadata: Any
) -> None:
    table = {info.name: info for info in tensors}
    root = replace(ROOT, step=step, num_layers=num_layers, tensors=table, metadata=metadata)
    with contextlib.suppress(UserError):
        root.check()
        assert Root.from_bytes(root.to_bytes(), "here") == root


def test_a_root_that_is_too_large_is_refused() -> None:
    with pytest.raises(UserError, match=r"the root of step 100 has [0-9,]+ bytes, at most 2,000 can be read"):
        replace(ROOT, metadata={"notes": "x" * 2000}).to_bytes(max_bytes=2000)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": "ckptkit"}'])
def test_what_is_no_root_is_refused(data: bytes) -> None:
    with pytest.raises(UserError, match="here"):
        Root.from_bytes(data, "here")


def test_a_file_listed_twice_is_refused() -> None:
    found = document()
    found["parts"] *= 2
    with pytest.raises(CheckFailed, match="listed twice"):
        Root.from_bytes(sealed(found), "here")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(document())), json_values)
def test_no_value_anywhere_can_do_more_than_be_refused(key: str, value: object) -> None:
    with contextlib.suppress(UserError):
        Root.from_bytes(sealed(document() | {key: value}), "here")


@given(st.integers(0, 10**12))
def test_step_folders(step: int) -> None:
    assert parse_step_folder(step_folder(step)) == step


@pytest.mark.parametrize("name", ["step-1", "step-0000000100", "step-00000010x", "xstep-000000100", "step-000000100/"])
def test_other_folders_are_no_steps(name: str) -> None:
    assert parse_step_folder(name) is None
