"""What a program on a thread orders is done by the main threads of all ranks."""

import threading

import pytest

from threefold.errors import UserError
from trainer.job.ranks import Ranks
from trainer.run.orders import Orders


def test_orders_are_done_by_the_main_thread() -> None:
    threads: list[str] = []

    def double(numbers: list[int]) -> list[int]:
        threads.append(threading.current_thread().name)
        return [2 * number for number in numbers]

    with Ranks("cpu", timeout_s=60) as ranks:
        desk: Orders[list[int]] = Orders(ranks, word_every_s=0.001)

        def program() -> list[int]:
            threading.Event().wait(0.01)
            return desk.ask("double", desk.ask("double", [1, 2]))

        assert desk.serve(program, {"double": double}) == [4, 8]
    assert threads == ["MainThread"] * 2


def test_an_error_of_the_program_is_raised() -> None:
    def program() -> None:
        raise UserError("no task")

    with Ranks("cpu", timeout_s=60) as ranks, pytest.raises(UserError, match="no task"):
        Orders[None](ranks).serve(program, {})
