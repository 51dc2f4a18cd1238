"""MLflow: one run for all starts of a run, found by a tag.

What a run has of steps that are taken again goes. MLflow's server takes nothing out of a run: there the run goes on in
another one with the same tag and the steps that stay, and the older one is deleted.
"""

import time
from collections.abc import Mapping
from io import BytesIO
from itertools import islice
from typing import Any

from trainer.observe.sinks.picture import Curve
from trainer.observe.sinks.sink import Opening, numbers_of, step_of, text_of

TAG, MOST, MOST_TEXT = "threefold.run", 900, 5000  # of one call: numbers, and characters of a value


class Mlflow:
    """A sink that is a run of MLflow; owned by its process."""

    def __init__(self, opening: Opening, uri: str, experiment: str, name: str) -> None:
        """Begin a run, or go on with it."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._curve = Metric, Curve(opening.step)
        self._client, self._waiting, self._events = MlflowClient(tracking_uri=uri), list[Any](), list[str]()
        known = self._client.get_experiment_by_name(experiment)
        place = known.experiment_id if known else self._client.create_experiment(experiment)
        self._place, self._tags = place, {TAG: opening.run, **({"mlflow.runName": name} if name else {})}
        query = f"tags.`{TAG}` = '{opening.run}'"
        runs = self._client.search_runs([place], query, max_results=1)
        run = runs[0] if runs else self._client.create_run(place, tags=self._tags)
        self._run = run.info.run_id
        if runs:
            self._rewind(opening.step)
            self._client.update_run(self._run, status="RUNNING")
        texts = {key: text[:MOST_TEXT] for key, text in opening.texts.items()}
        before = self._client.get_run(self._run).data.params
        fresh = [Param(key, text) for key, text in texts.items() if key not in before]
        changed = [RunTag(f"now.{key}", text) for key, text in texts.items() if before.get(key, text) != text]
        for some in chunks(fresh, 100):
            self._client.log_batch(self._run, params=some)
        for some in chunks(changed, 100):
            self._client.log_batch(self._run, tags=some)

    def _rewind(self, step: int) -> None:
        """Take out what the run has of later steps."""
        engine = getattr(self._client._tracking_client.store, "engine", None)  # of a database, not of a server
        if engine is not None:
            take_out(engine, self._run, step)
            return
        later = self._client.get_run(self._run)
        history = [metric for key in later.data.metrics for metric in self._client.get_metric_history(self._run, key)]
        if all(metric.step <= step for metric in history):
            return
        other = self._client.create_run(self._place, tags=self._tags, run_name=later.info.run_name)
        for some in chunks([metric for metric in history if metric.step <= step], MOST):
            self._client.log_batch(other.info.run_id, metrics=some)
        self._client.delete_run(self._run)
        self._run = other.info.run_id

    def write(self, line: Mapping[str, Any]) -> None:
        """Take a line's numbers, and of an event its text."""
        self._curve.add(line)
        now_ms, step = round(time.time() * 1000), step_of(line)
        self._waiting += [self._metric(key, value, now_ms, step) for key, value in numbers_of(line).items()]
        if text := text_of(line):
            self._events.append(text)
            self._client.set_tag(self._run, f"event.{line['event']}", text[:MOST_TEXT])

    def flush(self) -> None:
        """Log the numbers that wait."""
        waiting, self._waiting = self._waiting, []
        for some in chunks(waiting, MOST):
            self._client.log_batch(self._run, metrics=some)

    def close(self) -> None:
        """Add the events and the picture of the losses as artifacts, and end the run."""
        self.flush()
        self._client.log_text(self._run, "\n".join([*self._events, ""]), f"events/after-{self._curve.first}.jsonl")
        if picture := self._curve.png():
            from PIL import Image

            self._client.log_image(self._run, Image.open(BytesIO(picture)), "losses.png")
        self._client.set_terminated(self._run)


def take_out(engine: Any, run: str, step: int) -> None:
    """Take the numbers of steps after one out of a run in MLflow's database, of which the newest are kept apart."""
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric
    from sqlalchemy.orm import Session

    with Session(engine) as session, session.begin():
        for table in (SqlMetric, SqlLatestMetric):
            session.query(table).filter(table.run_uuid == run, table.step > step).delete()
        known = {key for (key,) in session.query(SqlLatestMetric.key).filter(SqlLatestMetric.run_uuid == run)}
        gone = session.query(SqlMetric).filter(SqlMetric.run_uuid == run, SqlMetric.key.not_in(known))
        newest: dict[str, Any] = {}
        for metric in gone.order_by(SqlMetric.step, SqlMetric.timestamp):
            newest[metric.key] = metric
        for metric in newest.values():
            columns = {name: getattr(metric, name) for name in ("run_uuid", "key", "value", "timestamp", "step")}
            session.add(SqlLatestMetric(**columns, is_nan=metric.is_nan))


def chunks(values: list[Any], size: int) -> list[list[Any]]:
    """Return lists of at most `size` of the values."""
    rest = iter(values)
    return list(iter(lambda: list(islice(rest, size)), []))
