"""How tiers are written down, when they are due, and what several nodes hold in common."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.runs.retention import Retention
from ckptkit.tiers.tier import (
    Node,
    Tier,
    Tiers,
    node_name,
    nodes_of,
    parse_tiers,
)
from threefold.errors import UserError

HERE = Node("n1", "n2", first_writer=2, num_local=2, num_writers=6)


def test_tiers_are_written_as_a_url_and_options() -> None:
    tiers = parse_tiers(["/nvme/run,keep_last=2", "s3://bucket/run,every=1000,keep_last=0", "/archive/run"])
    slower = (Tier("s3://bucket/run", every=1000), Tier("/archive/run"))
    assert tiers == Tiers(Tier("/nvme/run", retention=Retention(keep_last=2)), slower)
    assert tiers.urls == ("/nvme/run", "s3://bucket/run", "/archive/run")


@pytest.mark.parametrize("url", ["/a,b", "s3://bucket/x,y,z", "/data/,", "/a=b", "/a,1=2", "memory://run?x=1"])
def test_commas_and_equals_signs_are_parts_of_a_url(url: str) -> None:
    assert parse_tiers([url]) == Tiers(Tier(url))
    assert parse_tiers(["/fast", f"{url},every=5"]).slower == (Tier(url, every=5),)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([",every=5"], "names no URL"),
        (["/a,evry=5"], "unknown option evry, known are every, keep_last"),
        (["/a,keep_last=2,keep_last=3"], "keep_last is given twice"),
        (["/a,keep_last=many"], "keep_last=many is not a whole number"),
        (["/a,keep_last=-1"], "keep_last=-1 is not a whole number"),
        (["/a,every=10"], "the first tier takes every save"),
        (["/a", "/b/{node}"], "only the first tier may be of one node"),
        (["/a/{peer}"], "has a meaning in replica= only"),
        (["/a/{node}", "/b,replica=/c/{peer}/{node}"], "a replica is of the first tier"),
        (["/a,replica=/c/{peer}/{node}"], "a replica is of a first tier with {node}"),
        (["/a/{node},replica=/c/{node}"], "is kept by the next node, {peer}"),
        (["/a", "/b", "/a/"], "/a is named twice as a tier"),
    ],
)
def test_what_is_not_well_written_is_refused_with_a_hint(texts: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_tiers(texts)
    assert message in raised.value.message
    assert raised.value.hint


def test_names_of_nodes_are_filled_in() -> None:
    tiers = parse_tiers(["/nvme/{node},keep_last=3,replica=sftp://{peer}/replica/{node}", "s3://b/run,every=10"])
    assert tiers.first.of_node
    here = replace(tiers, node=HERE)
    assert here.own_urls == ("/nvme/n1", "sftp://n2/replica/n1")
    assert (tiers.own_urls[0], here.urls) == ("/nvme/{node}", ("/nvme/{node}", "s3://b/run"))
    replica, slower = here.destinations
    assert replica == Tier("sftp://n2/replica/n1", retention=Retention(keep_last=3), of_node=True)
    assert slower == Tier("s3://b/run", every=10)


def test_a_node_is_named_by_the_environment_or_its_host() -> None:
    assert node_name({"THREEFOLD_NODE": "node7"}, "host") == "node7"
    assert node_name({"THREEFOLD_NODE": ""}, "host-3.cluster") == "host-3.cluster"
    with pytest.raises(UserError, match=r"'\.\./up' is not a name for a node's folder"):
        node_name({"THREEFOLD_NODE": "../up"}, "host")


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_each_writer_is_on_one_node_and_each_node_is_one_peer(sizes: list[int]) -> None:
    starts = [sum(sizes[:node]) for node, size in enumerate(sizes) for _ in range(size)]
    nodes = nodes_of([f"n{start}" for start in starts], starts)
    assert [node.first_writer for node in nodes] == starts
    assert {writer for node in nodes for writer in range(node.first_writer, node.first_writer + node.num_local)} == set(
        range(sum(sizes))
    )
    assert sorted({node.peer for node in nodes}) == sorted({node.name for node in nodes})
    assert len(sizes) == 1 or all(node.peer != node.name for node in nodes)


def test_two_nodes_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="2 nodes have the name box") as raised:
        nodes_of(["box", "box", "other", "box"], [0, 0, 2, 3])
    assert "export THREEFOLD_NODE=" in str(raised.value.hint)
