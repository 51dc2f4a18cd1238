"""Leases: bounded, at the same addresses in every step; what is under way is waited for before memory is reused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checks import require, require_equal
from tests.trainer.support.parity import local_batch, make_engine
from tests.trainer.test_equalities import config, deep, sharded
from trainer.config import Config
from trainer.config.resolve import layout_of
from trainer.mesh.group import Network
from trainer.store.leases import LEASES, Lease, Leases, num_leased
from trainer.store.residence import Residence, size_of
from trainer.verify.threads import run_threads, wrapped

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("leases_with_content")


def test_a_lease_has_its_content_until_another_tenant_takes_the_memory() -> None:
    leases, waited = Leases([4, 4, 4, 7], torch.float32, CPU, 2), list[str]()
    assert leases.nbytes == 4 * num_leased([4, 4, 4, 7], 2) == 4 * (4 + 4 + 7)
    one, is_kept = leases.take(4, "one")
    assert not is_kept
    one.pending.append(lambda: waited.append("one"))
    leases.give_back(one)
    assert leases.take(4, "one") == (one, True)
    assert not waited
    leases.give_back(one)
    two, _ = leases.take(4, "two")
    assert two is not one
    three, is_kept = leases.take(4, "three")
    assert (three, is_kept, waited) == (one, False, ["one"])
    assert not leases.is_free(4)
    assert leases.is_free(7)
    assert (leases.has("two"), leases.has("one")) == (True, False)
    with pytest.raises(AssertionError, match="no lease of 4 elements is free"):
        leases.take(4, "four")
    with pytest.raises(AssertionError, match="2 leases were not given back"):
        leases.begin_step()
    leases.give_back(two)
    leases.give_back(three)
    leases.forget()
    assert not leases.has("two")


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(1, 4))
def test_as_many_of_a_size_as_have_it_and_no_more_than_most(sizes: list[int], most: int) -> None:
    leases = Leases(sizes, torch.float64, CPU, most)
    assert leases.nbytes == 8 * sum(size * min(sizes.count(size), most) for size in {*sizes} - {0})


def addresses(rank: int, config: Config, *, network: Network) -> list[list[tuple[str, int]]]:
    """Where each lease of a step was, by what it was for, of three steps; and the bound holds."""
    engine, steps = make_engine(rank, config, network=network), list[list[tuple[str, int]]]()
    units = {id(each): unit for unit, each in engine.store.residences.items()}

    def taking(real: Callable[..., tuple[Lease, bool]]) -> Callable[..., tuple[Lease, bool]]:
        def take(self: Leases, size: int, tenant: Any) -> tuple[Lease, bool]:
            found = real(self, size, tenant)
            if id(tenant) in units:
                steps[-1].append((units[id(tenant)], found[0].memory.data_ptr()))
            return found

        return take

    with wrapped(Leases, "take", taking):
        for step in range(3):
            steps.append([])
            engine.train_step(step, local_batch(config, step, engine.mesh))
    store = engine.store
    for leases in (store.parameter_leases, store.gradient_leases):
        leases.begin_step()  # all are back
    sizes = [size_of([each for each in where.buckets if each.cuts_gradients]) for where in store.residences.values()]
    require(store.gradient_leases.peak <= 2, f"{store.gradient_leases.peak} buffers of gradients at once")
    require(store.gradient_leases.nbytes == 8 * num_leased(sizes, LEASES), "bytes of gradients")
    if config.parallel.reshard_after_forward == "on":
        require(store.parameter_leases.peak <= 2, f"{store.parameter_leases.peak} buffers of parameters at once")
    return steps


@pytest.mark.parametrize(
    ("model", "layout", "options"),
    [
        ("llama", "dp2", {"reshard_after_forward": "on"}),
        ("llama", "dp4", {"reshard_after_forward": "on", "dp_shard": 2}),
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.ci])
            for case in (
                ("gpt2", "dp2-pp2", {"reshard_after_forward": "on", "schedule": "zb-h1"}),
                ("llama", "tp2-dp2", {"reshard_after_forward": "off"}),
            )
        ),
    ],
)
def test_a_unit_has_the_same_memory_in_every_step(model: str, layout: str, options: dict[str, Any]) -> None:
    made = sharded(deep(config(model, layout)), 3, **options)
    for first, second, third in run_threads(layout_of(made).world_size, addresses, made):
        assert len(first) > 8
        assert first == second == third


def gathers_in_time(rank: int, config: Config, *, network: Network) -> list[tuple[str, bool]]:
    """What passes of the second step began to read, and whether its gather was under way before."""
    engine, passes = make_engine(rank, config, network=network), list[tuple[str, bool]]()
    units = {id(each): unit for unit, each in engine.store.residences.items()}
    engine.train_step(0, local_batch(config, 0, engine.mesh))

    def using(real: Callable[[Residence, object], bool]) -> Callable[[Residence, object], bool]:
        def use(self: Residence, reader: object) -> bool:
            was_there = self._parameters.has(self)
            is_first = real(self, reader)
            if is_first and self.is_gathered and id(self) in units:
                passes.append((units[id(self)], was_there))
            return is_first

        return use

    with wrapped(Residence, "use", using):
        engine.train_step(1, local_batch(config, 1, engine.mesh))
    require_equal(len({unit for unit, _ in passes}) > 4, "units")
    return passes


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_unit_is_gathered_before_its_pass_begins(recompute: Any) -> None:
    made = sharded(deep(config("llama", "dp2")), 3)
    made = replace(made, train=replace(made.train, recompute=recompute))
    for passes in run_threads(2, gathers_in_time, made):
        assert [unit for unit, is_there in passes if not is_there] == []
