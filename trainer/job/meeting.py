"""Meeting: where the launchers of several nodes meet, and one sentence about what keeps them from it."""

import argparse
import re
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from torch.distributed.run import get_rdzv_endpoint

from threefold.errors import EXIT_IO
from trainer.job.launch_faults import FailedLaunch
from trainer.job.rendezvous import opened_within

FAULTS = (RendezvousError, DistError)
DEFAULT_PORT, READ_TIMEOUT_S = 29400, 60.0  # torch's, of a rendezvous by c10d that names none
CONNECT_WITHIN_S = 3.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """The host and port of torch's store, by the flags of torchrun; a node alone meets nobody, at localhost."""

    host: str
    port: int  # 0: any
    nnodes: str
    job: str
    is_static: bool
    waits_s: float  # for an answer of the store

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Meeting":
        """Read torchrun's flags."""
        endpoint, is_static = str(get_rdzv_endpoint(options)).strip(), options.rdzv_backend == "static"
        named = re.fullmatch(r"(.*?)(?::(\d+|None))?", endpoint)
        assert named is not None, "any text matches"
        host, number = named[1].strip("[]") or "localhost", named[2] or str(DEFAULT_PORT)
        is_alone = options.standalone or (options.nnodes in ("1", "1:1") and number == "None")
        port = 0 if is_alone else 29500 if number == "None" else int(number)
        found = re.search(rf"(?:^|,){'' if is_static else 'read_'}timeout=(\d+)(?:,|$)", options.rdzv_conf)
        waits_s = min(float(found[1]) if found else READ_TIMEOUT_S, READ_TIMEOUT_S)
        return cls(host, port, options.nnodes, options.rdzv_id, is_static, waits_s)

    @property
    def place(self) -> str:
        """Its address."""
        return f"{self.host}:{self.port}"

    def check(self) -> None:
        """Raise FailedLaunch if another program answers there, for which torch would wait without an end."""
        if not self.port or not self._answers():
            return
        timeout = timedelta(seconds=self.waits_s)
        store = partial(TCPStore, self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)
        try:
            opened_within(store, self.waits_s)
        except RuntimeError as error:
            raise self._in_use() from error

    def fault(self, error: Exception, waited_s: float) -> FailedLaunch:
        """Return what an error of FAULTS means, which came after some time."""
        cause = _cause(error)
        if name_fault := _name_fault(self.host):
            flags = "--master-addr HOST --master-port" if self.is_static else "--rdzv-endpoint HOST:"
            hint = f"getent hosts {self.host}; {flags}{' ' * self.is_static}{self.port}, where HOST is one of the nodes"
            return self._failed(f"{self.host} has no address: {name_fault}", hint)
        if isinstance(error, RendezvousClosedError):
            return self._failed(f"the job {self.job!r} at {self.place} is over", "another --rdzv-id on all nodes")
        if isinstance(error, RendezvousTimeoutError) or "clients joined" in cause:
            waits = "timeout" if self.is_static else "join_timeout"
            return self._failed(
                f"not all of the {self.nnodes} nodes came to {self.place} within {waited_s:.0f} s",
                f"the same command on the others; --nnodes 1 without them; --rdzv-conf {waits}=1800 waits longer",
            )
        if "EADDRINUSE" in cause or "address already in use" in cause or self._answers():
            return self._in_use()
        return self._failed(
            f"nobody answers at {self.place} any more, or yet: {cause}",
            f"is the launcher of {self.host} there, and its port open to this host? nc -vz {self.host} {self.port}",
        )

    def _in_use(self) -> FailedLaunch:
        other = self.port % 65535 + 1
        flag = f"--master-port {other}" if self.is_static else f"--rdzv-endpoint {self.host}:{other}"
        return self._failed(
            f"port {self.port} of {self.host} is in use by another program",
            f"{flag} on all nodes; ss -ltnp 'sport = :{self.port}' on {self.host} names the program",
        )

    def _failed(self, what: str, hint: str) -> FailedLaunch:
        return FailedLaunch(f"the launcher on {socket.gethostname()}: {what}", hint=hint, exit_code=EXIT_IO)

    def _answers(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), timeout=CONNECT_WITHIN_S).close()
        except OSError:
            return False
        return True


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).partition("\n")[0].removeprefix("[c10d] ")


def _name_fault(host: str) -> str:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return str(error.strerror)
    return ""
