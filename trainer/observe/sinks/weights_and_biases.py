"""Weights & Biases: one run for all starts of a run, rewound to the step that a start begins from.

Without a connection or a key the lines are kept in an offline folder, which `wandb sync` sends later.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

from trainer.observe.sinks.picture import Curve
from trainer.observe.sinks.sink import Opening, numbers_of, step_of, text_of

CONNECT_WITHIN_S, REACH_WITHIN_S = 15.0, 5.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


class WeightsAndBiases:
    """A sink that is a run of W&B; owned by its process."""

    def __init__(self, opening: Opening, project: str, name: str, say: Any) -> None:
        """Begin a run, or go on with it; `say` takes a line on what is kept offline."""
        import wandb

        self._wandb, self._curve = wandb, Curve(opening.step)
        is_known = opening.is_resumed and "wandb" in opening.sinks
        self._step = opening.step + is_known  # no line goes before it
        key = os.environ.get("WANDB_RUN_ID") or opening.run
        named: dict[str, Any] = {"project": project, "name": name or None, "config": dict(opening.settings)}
        named["settings"] = wandb.Settings(console="off", silent=True, init_timeout=CONNECT_WITHIN_S)
        ways = [{"resume_from": f"{key}?_step={opening.step}"}] if is_known else []
        self._run = self._begin([*ways, {"id": key, "resume": "allow"}], named, say)
        self._run.define_metric("*", step_metric="step")

    def _begin(self, ways: list[dict[str, Any]], named: dict[str, Any], say: Any) -> Any:
        """Return a run in the first way that works, offline if none does."""
        fault = unreachable(self._wandb.setup().settings)
        for way in ways if fault is None else ():  # the second is for a run whose step is not there to go back to
            try:
                return self._wandb.init(**named, **way)
            except Exception as error:
                fault = error
                with suppress(Exception):
                    self._wandb.teardown()
        run = self._wandb.init(**named, **ways[0], mode="offline")
        folder = os.path.dirname(run.dir)
        cause = " ".join(str(fault).split())[:300]
        say(f"no connection ({cause}): lines are kept in {folder}; later: wandb sync {folder}")
        return run

    def write(self, line: Mapping[str, Any]) -> None:
        """Log a line's numbers, and of an event its text, at its step or the last one that was logged."""
        self._curve.add(line)
        self._step = max(self._step, step_of(line))
        values: dict[str, Any] = dict(numbers_of(line))
        if text := text_of(line):
            values |= {f"{line['event']}/text": text, f"{line['event']}/step": step_of(line)}
        else:
            values["step"] = step_of(line)
        self._run.log(values, step=self._step)

    def flush(self) -> None:
        """Do nothing: wandb sends by itself."""

    def close(self) -> None:
        """Add the picture of the losses, and wait until all is sent."""
        if picture := self._curve.png():
            from PIL import Image

            self._run.log({"losses": self._wandb.Image(Image.open(BytesIO(picture)))}, step=self._step)
        self._run.finish()


def unreachable(settings: Any) -> Exception | None:
    """Return why the server of wandb's settings cannot be reached; None if it may be, or need not be."""
    if str(settings.mode) != "online" or any(os.environ.get(name) for name in PROXIES):
        return None
    url = urlsplit(str(settings.base_url))
    try:
        socket.create_connection(
            (url.hostname, url.port or (80 if url.scheme == "http" else 443)), REACH_WITHIN_S
        ).close()
    except OSError as error:
        return OSError(f"{url.hostname}: {error.strerror or error}")
    return None
