"""TensorBoard: an event file a start of the run, written record by record. Its numbers have 32 bits.

A start's first record makes TensorBoard drop what earlier files have of later steps.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.observe.sinks.picture import Curve
from trainer.observe.sinks.sink import Opening, numbers_of, step_of, text_of


class TensorBoard:
    """A sink that writes a file of events; owned by its process."""

    def __init__(self, opening: Opening, folder: str) -> None:
        """Begin a file that replaces steps after the opening's, with the settings as a table."""
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events, self._summaries, self._tensors = event_pb2, summary_pb2, tensor_pb2
        self._curve = Curve(opening.step)
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(Path(folder) / name, "xb")  # noqa: SIM115 (closed by close)
        self._records = RecordWriter(self._file)
        self._put(file_version="brain.Event:2")
        first = opening.step + 1 if opening.is_resumed else 0
        self._put(step=first, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        rows = [f"| {name} | {text.replace('|', '&#124;')} |" for name, text in opening.texts.items()]
        self._text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]), opening.step)
        self._hyperparameters(opening)
        self.flush()

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line's numbers, and of an event its text."""
        self._curve.add(line)
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=number) for name, number in numbers_of(line).items()
        ]
        if values:
            self._put(step=step_of(line), summary=self._summaries.Summary(value=values))
        if text := text_of(line):
            self._text(f"events/{line['event']}", text, step_of(line))

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._file.flush()

    def close(self) -> None:
        """Add the picture of the losses, and close the file."""
        if picture := self._curve.png():
            size = dict(zip(("width", "height"), self._curve.size))
            image = self._summaries.Summary.Image(encoded_image_string=picture, colorspace=3, **size)
            value = self._summaries.Summary.Value(tag="losses", image=image)
            self._put(step=self._curve.step, summary=self._summaries.Summary(value=[value]))
        self._file.close()

    def _put(self, **values: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **values).SerializeToString())

    def _text(self, tag: str, text: str, step: int) -> None:
        tensor = self._tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        tensor.tensor_shape.dim.add(size=1)
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin, data_class="DATA_CLASS_TENSOR")
        value = self._summaries.Summary.Value(tag=f"{tag}/text_summary", tensor=tensor, metadata=metadata)
        self._put(step=step, summary=self._summaries.Summary(value=[value]))

    def _hyperparameters(self, opening: Opening) -> None:
        from tensorboard.plugins.hparams import summary_v2

        plain = {
            name: value if isinstance(value, int | float | str) else opening.texts[name]
            for name, value in opening.settings.items()
        }
        self._put(step=opening.step, summary=summary_v2.hparams_pb(plain, trial_id=opening.run))
