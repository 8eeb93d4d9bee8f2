"""The task class that a YAML names: any task of lm-eval, with dispersion beside its own metrics.

It stands on lm-eval's task class of 0.4 or of 0.5; either calls :meth:`DispersionTask.judged` once for each
document and filter, after the model has run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lm_eval.api.task import ConfigurableTask, Task

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness import requests, saving
from lmeval_dispersion.harness.records import (
    CORRECT,
    METRICS,
    DocRecord,
    Figure,
    TaskMetrics,
    check_judge,
    correctness,
    options_of,
    record_of,
    split_judge,
)
from lmeval_dispersion.harness.seams import Surroundings, surroundings
from lmeval_dispersion.model.capture import resolve, split_names

requests.install()


def _of_documents(instances: Sequence[Any]) -> dict[int, list[Any]]:
    """Each document's requests in order."""
    of_document: dict[int, list[Any]] = defaultdict(list)
    for instance in sorted(instances, key=lambda instance: instance.idx):
        of_document[instance.doc_id].append(instance)
    return of_document


class _Task04(ConfigurableTask):  # type: ignore[misc]
    """0.4 scores a document in ``process_results``, which is told neither its requests nor the filter.

    Both follow from where lm-eval is in the task's own ``doc_iterator``, which it asks for once a filter.
    """

    _selected: Sequence[int] = ()  # of --samples, ascending: instances are numbered by their place in it
    _filters_left: Iterator[str] = iter(())
    _place: tuple[int, Any, str | None] = (-1, None, None)  # the document's number, itself, the filter

    @property
    def only_predicts(self) -> bool:
        """Whether ``--predict_only`` replaced the metrics, so that nothing of ours applies."""
        return "bypass" in self._metric_fn_list

    @property
    def filter_names(self) -> list[str]:
        """The filters, each of which judges every answer."""
        return [ensemble.name for ensemble in self._filters]

    def document_index(self, doc_id: int) -> int:
        """Index in the task's split of the document that lm-eval's instances call ``doc_id``."""
        return self._selected[doc_id] if self._selected else doc_id

    def build_all_requests(self, **options: Any) -> None:
        """As lm-eval's; the selection of documents is remembered."""
        self._selected = sorted(set(options.get("samples") or ()))
        super().build_all_requests(**options)

    def apply_filters(self) -> Any:
        """As lm-eval's, which then goes through the documents filter by filter."""
        self._of_document = _of_documents(self._instances or [])
        self._filters_left = iter(self.filter_names)
        return super().apply_filters()

    def doc_iterator(self, **options: Any) -> Iterator[tuple[int, Any]]:
        """As lm-eval's; notes which document it is at, and for which filter."""
        filter_name = next(self._filters_left, None)
        for number, doc in super().doc_iterator(**options):
            self._place = number, doc, filter_name
            yield number, doc

    def process_results(self, doc: Any, results: Sequence[Any]) -> Any:
        """As lm-eval's, with what ``judged`` adds."""
        metrics = super().process_results(doc, results)
        if self.only_predicts:
            return metrics
        number, at, filter_name = self._place
        if at is not doc or filter_name is None:
            raise HarnessError(
                f"{self.task_name}: lm-eval goes through its documents in a way that this version does not "
                "know; use lm-eval 0.4.13, or the stock task"
            )
        return {**metrics, **self.judged(self._of_document[number], results, metrics, filter_name)}


class _Task05(Task):  # type: ignore[misc]
    """0.5 has a class for each output type, whose scorers score a task's documents at once.

    Making a task gives a subclass that is also lm-eval's class of the output type.
    """

    def __new__(cls, config: Any = None, **_: Any) -> Any:
        """An object of lm-eval's class for the configuration's output type, with this class before it."""
        kind = Task._registry.get((config or {}).get("output_type"))
        if kind is not None and not issubclass(cls, kind):
            cls = type(cls.__name__, (cls, kind), {"__module__": cls.__module__, "__doc__": cls.__doc__})
        return super().__new__(cls)

    @property
    def only_predicts(self) -> bool:
        return bool(self._has_metric("bypass"))

    @property
    def filter_names(self) -> list[str]:
        return [scorer.name for scorer in self._scorers]

    def document_index(self, doc_id: int) -> int:
        return doc_id

    def process_instances(self) -> None:
        """As lm-eval's, with what ``judged`` adds to every document's scores."""
        super().process_instances()
        if self.only_predicts:
            return
        of_document = _of_documents(self._instances or [])
        for scorer in self._scorers:
            results = {}
            for doc_id, scored in scorer.raw_docs.items():
                instances = of_document[doc_id]
                answers = [answer for i in instances for answer in i.filtered_resps[scorer.name]]
                ours = self.judged(instances, answers, scorer.reduced_docs[doc_id], scorer.name)
                scores = {name: [value] for name, value in ours.items()}
                results[doc_id] = replace(scored, scores={**scored.scores, **scores})
            scorer.set_results(results)

    def aggregate(self, bootstrap_iters: int | None = 100000) -> tuple[dict[str, Any], int]:
        """As lm-eval's, which bootstraps all that is no mean: metrics of ours bring their own errors."""
        if self.only_predicts:
            return super().aggregate(bootstrap_iters)  # type: ignore[no-any-return]
        functions, figures, documents = self.aggregation(), {}, 0
        for scorer in self._scorers:
            for ours, draws in ((False, bootstrap_iters), (True, 0)):
                scores = {
                    doc_id: {name: v for name, v in of_document.items() if isinstance(v, DocRecord) is ours}
                    for doc_id, of_document in scorer.reduced_docs.items()
                }
                aggregated, count = scorer.aggregate(scores, draws, functions)
                figures.update(aggregated)
                documents = max(documents, count)
        return figures, documents


if TYPE_CHECKING:
    Base = _Task04
elif hasattr(Task, "process_instances"):
    Base = _Task05
else:
    Base = _Task04


class DispersionTask(Base):
    """lm-eval's ConfigurableTask, whose requests bring back the state of the last context token.

    Use it from a YAML that includes any task of lm-eval::

        include: path/to/the/task.yaml
        task: the_task_dispersion
        class: !function lmeval_dispersion.harness.DispersionTask

    Adds the metrics ``dispersion``, ``dispersion_correct`` and ``dispersion_incorrect`` with jackknife
    errors, their values for every captured layer in the results JSON under
    ``configs.<task>.metadata.dispersion``, and a store of the vectors. ``--metadata`` takes
    ``dispersion_layers`` (names as in :mod:`lmeval_dispersion.model.capture` with ``+`` between
    them; the first one is reported; default ``last``), ``dispersion_store`` (a folder) and
    ``dispersion_correct`` (``METRIC`` or ``FILTER/METRIC`` that says what is correct).
    """

    def __init__(self, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        settings = dict(config or {})
        settings.pop("class", None)  # lm-eval leaves it in, and its TaskConfig does not know it
        self._layers: tuple[str, ...] = ()
        self._run = saving.Run(Surroundings(), {}, None)
        self._rendered: tuple[Any, Any] = None, None  # the latest document and its query
        self._correct_by: str | None = None
        self._records: dict[str, dict[int, DocRecord]] = {}  # filter -> true index -> record
        self._summary: dict[str, Any] = {}
        super().__init__(config=settings, **options)  # last: it renders a document

    def build_all_requests(self, **options: Any) -> None:
        """As lm-eval's; first refuses what cannot work, before any model runs."""
        if not self.only_predicts:
            self._prepare(options)
        super().build_all_requests(**options)
        for instance in self._instances or []:
            instance.dispersion_layers = self._layers

    def construct_requests(self, doc: Any, ctx: Any, **options: Any) -> Any:
        """As lm-eval's, with request types that bring states back."""
        built = super().construct_requests(doc, ctx, **options)
        if self.only_predicts:
            return built
        rendered_doc, query = self._rendered
        if rendered_doc is not doc:
            query = super().doc_to_text(doc)
        for request in built if isinstance(built, list) else [built]:
            if request.request_type not in requests.REQUEST_TYPES:
                raise HarnessError(
                    f"{self.task_name} sends {request.request_type} requests, which have no states; run the "
                    "stock task"
                )
            request.request_type = requests.REQUEST_TYPES[request.request_type]
            request.query = query if isinstance(query, str) else None
        return built

    def doc_to_text(self, doc: Any, *args: Any, **options: Any) -> Any:
        """As lm-eval's; remembered, because rendering a template is not cheap."""
        text = super().doc_to_text(doc, *args, **options)
        if not args and all(option is None for option in options.values()):
            self._rendered = doc, text
        return text

    def judged(
        self, instances: Sequence[Any], answers: Sequence[Any], metrics: Mapping[str, Any], filter_name: str
    ) -> dict[str, DocRecord]:
        """A document's record under each metric of ours."""
        # A function as a metric is listed by its own name, and gives its values others.
        check_judge(self.task_name, self._judge, self.filter_names, {**metrics, **super().aggregation()})
        named = split_judge(self._judge)[1]
        by, correct = correctness(metrics, named if named in metrics else None)
        self._correct_by = by or self._correct_by
        doc, rolling = instances[0].doc, self.OUTPUT_TYPE == "loglikelihood_rolling"
        record = record_of(
            doc,
            instances[0],
            answers,
            doc_id=self.document_index(instances[0].doc_id),
            correct=correct,
            target=None if rolling else self.doc_to_target(doc),  # rolling: the whole text
            options=options_of([instance.args for instance in instances], self.OUTPUT_TYPE),
            alias=self.config.task_alias,
            filter_name=filter_name,
        )
        return {name + suffix: record for name in METRICS for suffix in ("", "_stderr")}

    def aggregation(self) -> dict[str, Any]:
        """lm-eval's functions and ours."""
        functions = dict(super().aggregation())
        if not self.only_predicts:
            for name in METRICS:
                functions[name] = Figure(name, note=self._note)
                functions[f"{name}_stderr"] = Figure(name, error=True, note=self._note)
        return functions

    def dump_config(self) -> dict[str, Any]:
        """lm-eval's, with the run's metrics and the place of its store under ``metadata.dispersion``.

        lm-eval asks for it once all metrics of the task are computed: the run ends here and is saved.
        """
        if self._records and not self._summary:
            # Several filters judge the same answers: the judge's counts, or the first.
            chosen = split_judge(self._judge)[0] or next(iter(self._records))
            metrics = TaskMetrics(self.task_name, [*self._records[chosen].values()])
            several = self._correct_by is not None and len(self.filter_names) > 1
            by = f"{chosen}/{self._correct_by}" if several else self._correct_by
            self._summary = saving.finish(self._run, self, metrics, by)
        config: dict[str, Any] = super().dump_config()
        if self._summary:
            config["metadata"] = {**(config.get("metadata") or {}), "dispersion": self._summary}
        return config

    def _prepare(self, options: Mapping[str, Any]) -> None:
        """Settle layers and store, or refuse."""
        metadata = self.config.metadata or {}
        judges = [*super().aggregation()]
        if any(callable(entry.get("metric")) for entry in self.config.metric_list or ()):
            judges += CORRECT  # HumanEval lists `pass_at_k`, a function that gives `pass@1`
        check_judge(self.task_name, self._judge, self.filter_names, judges)
        around = surroundings()
        self._layers = tuple(split_names(metadata.get("dispersion_layers", "last")))
        if around.lm is not None:
            requests.check_model(around.lm, self.task_name)
            resolve(around.lm.model, self._layers)
        self._records, self._summary, self._correct_by = {}, {}, None
        self._run = saving.begin(self.task_name, metadata, around, options)

    @property
    def _judge(self) -> str | None:
        """``FILTER/METRIC`` or ``METRIC`` that tells correct answers; None: the first one known."""
        return (self.config.metadata or {}).get("dispersion_correct")

    def _note(self, records: Sequence[DocRecord]) -> None:
        """Keep records of the run; noting one again changes nothing."""
        for record in records:
            self._records.setdefault(record.filter, {}).setdefault(record.doc_id, record)
