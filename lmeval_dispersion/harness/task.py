"""The class that a task's YAML names: any task of lm-eval, with dispersion added to its metrics.

In the order of a run: requests get layers and a store, the model answers them under a recorder
(``recording``), a document's answer and state become its record, the figures cover all records
(``records``), and the store is written (``saving``). ``seams`` has all that works around lm-eval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.utils import handle_non_serializable

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness import recording, saving
from lmeval_dispersion.harness.records import METRICS, AggregatedMetric, DocRecord, TaskMetrics
from lmeval_dispersion.harness.seams import (
    RunningEvaluation,
    TaskBase,
    filters_of,
    one_sentence,
    running_evaluation,
)
from lmeval_dispersion.logs.judging import JUDGES, check_judge, correctness, split_judge
from lmeval_dispersion.model.capture import resolve, split_names
from lmeval_dispersion.store.documents import (
    document_columns,
    options_of,
)

recording.prepare_lm_eval()


class DispersionTask(TaskBase):
    """A task of lm-eval that also measures the dispersion of the model's hidden states.

    Each document gives one state, that of the last token before the answer; a text that is scored
    as a whole gives one for each segment that the model reads. Use the class in a YAML that
    includes any task of lm-eval::

        include: path/to/the/task.yaml
        task: the_task_dispersion
        class: !function lmeval_dispersion.harness.DispersionTask

    It adds the metrics ``dispersion``, ``dispersion_correct`` and ``dispersion_incorrect`` with
    jackknife standard errors, and writes a store of the states. The results JSON has the metrics of
    every layer under ``configs.<task>.metadata.dispersion``. ``--metadata`` accepts these keys:

    - ``dispersion_layers``: names of layers as in :mod:`lmeval_dispersion.model.capture`, with
      ``+`` between them. The first one is reported. Default: ``last``.
    - ``dispersion_store``: folder for the store.
    - ``dispersion_correct``: ``METRIC`` or ``FILTER/METRIC`` that says which answers are right.

    Attributes:
        saves: Whether a store is written at the end of each evaluation; a race calls :meth:`take`
            instead.
        our_metrics: Names of the metrics that are added, and of their errors.
    """

    saves = True
    our_metrics = tuple(name + suffix for name in METRICS for suffix in ("", "_stderr"))

    def __init__(self, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        settings = dict(config or {})
        settings.pop("class", None)  # lm-eval leaves it in, and its TaskConfig rejects it
        self._layers: tuple[str, ...] = ()
        self._run = saving.TaskRun(RunningEvaluation(), {}, None)
        self._correct_by: str | None = None
        self._records: dict[str, dict[int, DocRecord]] = {}  # filter -> true index -> record
        self._summary: dict[str, Any] = {}
        evaluation = running_evaluation()
        if evaluation.lm is not None and not evaluation.predict_only:
            with one_sentence():  # the model exists, the documents do not
                recording.check_model(evaluation.lm, str(settings.get("task")))
        super().__init__(config=settings, **options)  # last: it renders a document

    def build_all_requests(self, **options: Any) -> None:
        """Build the task's requests as lm-eval does, after a check of the dispersion settings.

        Raises:
            DispersionError: A setting is not supported. Under the command ``lm_eval``, the process
                exits with the message instead.
        """
        if not self.only_predicts:
            with one_sentence():
                self._prepare(options)
        super().build_all_requests(**options)
        for instance in self._instances or []:
            instance.dispersion_layers = self._layers

    def _prepare(self, options: Mapping[str, Any]) -> None:
        """Settle layers and store, or refuse."""
        metadata = self.config.metadata or {}
        judges = [*super().aggregation()]
        if any(callable(entry.get("metric")) for entry in self.config.metric_list or ()):
            judges += JUDGES  # HumanEval lists `pass_at_k`, a function that gives `pass@1`
        check_judge(self.task_name, self._judge, filters_of(self), judges)
        evaluation = running_evaluation()
        self._layers = tuple(split_names(metadata.get("dispersion_layers", "last")))
        if evaluation.lm is not None:
            recording.check_model(evaluation.lm, self.task_name)
            resolve(evaluation.lm.model, self._layers)
        self._records = {}
        self._summary = {}
        self._correct_by = None
        if self.saves:
            self._run = saving.begin(self.task_name, metadata, evaluation, options)

    def construct_requests(self, doc: Any, ctx: Any, **options: Any) -> Any:
        """Build a document's requests as lm-eval does, but of types whose hidden states are recorded.

        Raises:
            HarnessError: The task has requests of a type without hidden states.
        """
        built = super().construct_requests(doc, ctx, **options)
        if self.only_predicts:
            return built
        query = self.doc_to_text(doc)
        for request in built if isinstance(built, list) else [built]:
            kind = request.request_type
            if kind not in recording.REQUEST_TYPES:
                raise HarnessError(
                    f"{self.task_name} sends requests of type {kind}, which give no hidden states; run the "
                    "stock task"
                )
            request.request_type = recording.REQUEST_TYPES[kind]
            request.query = query if isinstance(query, str) else None
        return built

    def judged(
        self,
        instances: Sequence[Any],
        answers: Sequence[Any],
        metrics: Mapping[str, Any],
        filter_name: str,
    ) -> dict[str, DocRecord]:
        """Return a document's record (its state and score) under each name in ``our_metrics``.

        Args:
            instances: The document's requests, answered.
            answers: The answers after the filter.
            metrics: lm-eval's scores of the document.
            filter_name: Name of the filter.

        Raises:
            HarnessError: The metric in ``dispersion_correct`` does not exist.
        """
        # lm-eval lists a metric function by its own name, but its values have other names.
        check_judge(
            self.task_name, self._judge, filters_of(self), {**metrics, **super().aggregation()}
        )
        named = split_judge(self._judge)[1]
        by, correct = correctness(metrics, named if named in metrics else None)
        self._correct_by = by or self._correct_by
        first = instances[0]
        target = None
        if self.OUTPUT_TYPE != "loglikelihood_rolling":  # whose target is the whole text
            target = self.doc_to_target(first.doc)
        columns = document_columns(
            first.doc,
            first.args[0],
            answers,
            target=target,
            options=options_of([instance.args for instance in instances], self.OUTPUT_TYPE),
            alias=self.config.task_alias,
            encode=handle_non_serializable,
        )
        columns["text"] = first.query
        doc_id = self.document_index(first.doc_id)
        record = DocRecord(first.dispersion_state, doc_id, correct, filter_name, columns)
        return dict.fromkeys(self.our_metrics, record)

    def aggregation(self) -> dict[str, Any]:
        """Return the functions that aggregate the metrics, lm-eval's and ours, by name.

        Ours are left out with ``--predict_only``.
        """
        functions = dict(super().aggregation())
        if not self.only_predicts:
            for name in METRICS:
                functions[name] = AggregatedMetric(name, keep=self._keep)
                functions[f"{name}_stderr"] = AggregatedMetric(name, error=True, keep=self._keep)
        return functions

    def _keep(self, records: Sequence[DocRecord]) -> None:
        """Keep records of the run; repeated records change nothing."""
        for record in records:
            self._records.setdefault(record.filter, {}).setdefault(record.doc_id, record)

    def dump_config(self) -> dict[str, Any]:
        """Write the store, and return lm-eval's configuration of the task with a summary of the run.

        The summary, under ``metadata.dispersion``, has the metrics and the folder of the store.
        lm-eval calls this method once all metrics of the task are computed.
        """
        if self.saves and self._records and not self._summary:
            records, by = self.take()
            self._summary = saving.finish(self._run, self, TaskMetrics(self.task_name, records), by)
        config: dict[str, Any] = super().dump_config()
        if self._summary:
            config["metadata"] = {**(config.get("metadata") or {}), "dispersion": self._summary}
        return config

    def take(self) -> tuple[list[DocRecord], str | None]:
        """Return the records of the evaluated documents, and the name of the metric that scores them.

        The task keeps no copy. The records are those of one filter, the one that
        ``dispersion_correct`` names or else the first; if the task has several filters, the name is
        ``FILTER/METRIC``. The name is None if no metric says which answers are right.
        """
        # With several filters, use the judge's filter, else the first.
        chosen = split_judge(self._judge)[0] or next(iter(self._records), "")
        records = list(self._records.get(chosen, {}).values())
        self._records = {}
        metric = self._correct_by
        if metric is not None and len(filters_of(self)) > 1:
            metric = f"{chosen}/{metric}"
        return records, metric

    @property
    def _judge(self) -> str | None:
        """``FILTER/METRIC`` or ``METRIC`` that decides which answers are correct; None: the first known."""
        return (self.config.metadata or {}).get("dispersion_correct")
