"""What the nodes hold is a step if it is of one attempt, of all writers once, and says the same."""

from dataclasses import replace

import pytest

from ckptkit.tiers.node_steps import NodeRoot, put_together

OWN = [NodeRoot(0, 0, "a", 0, 2, 4, 7), NodeRoot(1, 0, "a", 2, 2, 4, 7)]
REPLICAS = [replace(each, place=1) for each in OWN]


def test_each_share_is_found_where_it_is() -> None:
    assert put_together(OWN) == ([[OWN[0]], [OWN[1]]], "")
    assert put_together([*OWN[::-1], *REPLICAS]) == ([[OWN[0], REPLICAS[0]], [OWN[1], REPLICAS[1]]], "")
    assert put_together([REPLICAS[1], OWN[0]]) == ([[OWN[0]], [REPLICAS[1]]], "")


def test_of_two_attempts_the_whole_one_counts() -> None:
    broken = replace(OWN[1], attempt="b")
    assert put_together([OWN[0], broken, REPLICAS[1]])[0] == [[OWN[0]], [REPLICAS[1]]]
    assert put_together([replace(OWN[0], attempt="b"), broken, OWN[0]])[0][0][0].attempt == "b"


@pytest.mark.parametrize(
    ("held_steps", "why"),
    [
        ([], "no node has a root"),
        (OWN[:1], "no node that is here has the files of writers 2, 3 of 4"),
        ([OWN[0], replace(OWN[1], attempt="b")], "no node that is here has the files of writers"),
        (
            [OWN[0], NodeRoot(1, 0, fault="root.json is damaged")],
            "has the files of writers 2, 3 of 4; root.json is damaged",
        ),
        ([NodeRoot(0, 0, fault="root.json is damaged")], "root.json is damaged"),
        ([*OWN, NodeRoot(2, 0, "a", 1, 1, 4, 7)], "its roots name files of one writer twice"),
        ([OWN[0], replace(OWN[1], digest=8)], "its roots differ from node to node"),
    ],
)
def test_what_is_no_whole_step_says_why(held_steps: list[NodeRoot], why: str) -> None:
    shares, said = put_together(held_steps)
    assert shares == []
    assert why in said
