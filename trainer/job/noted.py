"""NotedExchange: the exchange of all ranks, with each of its calls noted in this rank's page."""

from collections.abc import Sequence

from ckptkit import Exchange
from threefold.storage import Buffer
from trainer.job.page import Calls


class NotedExchange:
    """An exchange whose calls others may wait for."""

    def __init__(self, exchange: Exchange, calls: Calls) -> None:
        self._exchange, self._calls = exchange, calls
        self.rank, self.size = exchange.rank, exchange.size

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in their order."""
        self._calls.begin("exchange", waits=True)
        gathered = self._exchange.all_gather(data)
        self._calls.end()
        return gathered

    def all_to_all(self, send: Sequence[Buffer]) -> list[Buffer]:
        """Send send[r] to each rank r, and return what each rank sent to this one."""
        self._calls.begin("exchange", waits=True)
        received = self._exchange.all_to_all(send)
        self._calls.end()
        return received
