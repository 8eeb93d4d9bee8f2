"""The task class that a YAML names: any task of lm-eval, with dispersion beside its own metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.task import ConfigurableTask

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness import requests, saving
from lmeval_dispersion.harness.metrics import METRICS, Figure, TaskMetrics
from lmeval_dispersion.harness.records import (
    CORRECT,
    DocRecord,
    DocState,
    check_judge,
    correctness,
    record_of,
    split_judge,
)
from lmeval_dispersion.harness.seams import (
    Surroundings,
    check_groups,
    state_of,
    surroundings,
    with_state,
)
from lmeval_dispersion.model.capture import resolve, split_names

requests.install()

log = logging.getLogger(__name__)


if hasattr(ConfigurableTask, "process_instances"):
    from lmeval_dispersion.harness.task_05 import HookedTask
else:
    from lmeval_dispersion.harness.task_04 import HookedTask


class DispersionTask(HookedTask):
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
        self._layers: list[str] = []
        self._run = saving.Run(Surroundings(), {}, None)
        self._rendered: dict[str, tuple[Any, Any]] = {}
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
            instance.dispersion_layers = tuple(self._layers)

    def construct_requests(self, doc: Any, ctx: Any, **options: Any) -> Any:
        """As lm-eval's, with request types that bring states back."""
        built = super().construct_requests(doc, ctx, **options)
        if self.only_predicts:
            return built
        for request in built if isinstance(built, list) else [built]:
            if request.request_type not in requests.REQUEST_TYPES:
                raise HarnessError(
                    f"{self.task_name} sends {request.request_type} requests, which have no states; run the "
                    "stock task"
                )
            request.request_type = requests.REQUEST_TYPES[request.request_type]
            query = self._remembered("text", doc)
            request.query = query if request.idx == 0 and isinstance(query, str) else None
        return built

    def doc_to_text(self, doc: Any, *args: Any, **options: Any) -> Any:
        """As lm-eval's; remembered, because rendering a template is not cheap."""
        return self._remember("text", doc, super().doc_to_text(doc, *args, **options), args, options)

    def doc_to_target(self, doc: Any, *args: Any, **options: Any) -> Any:
        """As lm-eval's; remembered likewise."""
        return self._remember("target", doc, super().doc_to_target(doc, *args, **options), args, options)

    def apply_filters(self) -> Any:
        """As lm-eval's; first every state gets the texts of its document's requests."""
        if not self.only_predicts:
            self._recover_states()
        texts: dict[Any, dict[int, str]] = {}
        for instance in self._instances or []:
            if len(instance.args) > 1 and isinstance(instance.args[1], str):
                texts.setdefault(instance.doc_id, {})[instance.idx] = instance.args[1]
        for instance in self._instances or []:
            state = state_of(instance.resps[0]) if instance.resps else None
            if state is not None:
                of_document = texts.get(instance.doc_id, {})
                state.continuations = [of_document[i] for i in sorted(of_document)]
        return super().apply_filters()

    def judged(
        self,
        doc: Any,
        state: DocState | None,
        answers: Sequence[Any],
        metrics: Mapping[str, Any],
        filter_name: str,
    ) -> dict[str, DocRecord]:
        """The document's record under each metric of ours."""
        if state is None:
            raise HarnessError(
                f"{self.task_name}: an answer came back without its state; report this with your versions of "
                "lm-eval and lmeval-dispersion"
            )
        # A function as a metric is listed by its own name, and gives its values others.
        check_judge(self.task_name, self._judge, self.filter_names, {**metrics, **super().aggregation()})
        named = split_judge(self._judge)[1]
        by, correct = correctness(metrics, named if named in metrics else None)
        self._correct_by = by or self._correct_by
        rolling = self.OUTPUT_TYPE == "loglikelihood_rolling"  # its target is the whole text
        record = record_of(
            doc,
            state,
            answers,
            doc_id=self.document_index(state.doc_id),
            correct=correct,
            target=None if rolling else self._remembered("target", doc),
            choices=self.OUTPUT_TYPE == "multiple_choice" and not self.several_contexts,
            alias=self.config.task_alias,
            filter_name=filter_name,
        )
        self._note([record])
        return {name + suffix: record for name in METRICS for suffix in ("", "_stderr")}

    def aggregation(self) -> dict[str, Any]:
        """lm-eval's functions and ours."""
        if self.only_predicts:
            return dict(super().aggregation())
        layer = self._layers[0] if self._layers else "last"
        figures: dict[str, Any] = {}
        for name in METRICS:
            figures |= {name: Figure(name, layer), f"{name}_stderr": Figure(name, layer, error=True)}
        if self._run.options.get("world_size", 1) > 1:
            figures = {name: _Gathered(figure, self._note) for name, figure in figures.items()}
        return {**super().aggregation(), **figures}

    def dump_config(self) -> dict[str, Any]:
        """lm-eval's, with the run's metrics and the place of its store under ``metadata.dispersion``.

        lm-eval asks for it once all metrics of the task are computed: the run ends here and is saved.
        """
        if self._records and not self._summary:
            self._save()
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
        layers = split_names(metadata.get("dispersion_layers", "last"))
        if around.lm is not None:
            requests.check_model(around.lm, self.task_name)
            layers = list(dict.fromkeys(site.name for site in resolve(around.lm.model, layers)))
        if around.groups is None or around.groups:
            check_groups()
        self._layers, self._records, self._summary, self._correct_by = layers, {}, {}, None
        self._run = saving.begin(self.task_name, metadata, around, options)

    def _recover_states(self) -> None:
        """Run the prompts whose answers lost their states: a cache may keep only what JSON can hold."""
        lost = [i for i in self._instances or [] if i.idx == 0 and i.resps and state_of(i.resps[0]) is None]
        lm = self._run.around.lm
        if not lost or lm is None:
            return
        log.warning(
            "%s: %d answers came from a cache without states; their prompts run", self.task_name, len(lost)
        )
        for instance, answer in zip(lost, requests.prefilled(lm, lost), strict=True):
            state = state_of(answer)
            if state is not None:
                instance.resps[0] = with_state(instance.resps[0], state)

    @property
    def _judge(self) -> str | None:
        """``FILTER/METRIC`` or ``METRIC`` that tells correct answers; None: the first one known."""
        return (self.config.metadata or {}).get("dispersion_correct")

    def _note(self, records: Sequence[DocRecord]) -> None:
        """Keep records of the run; noting one again changes nothing."""
        for record in records:
            self._records.setdefault(record.filter, {}).setdefault(record.doc_id, record)

    def _save(self) -> None:
        """Save the run; of several filters, which judge the same answers, that of the judge or the first."""
        chosen = split_judge(self._judge)[0] or next(iter(self._records))
        metrics = TaskMetrics(self.task_name, [*self._records[chosen].values()], self._layers)
        saving.remark(self._run, metrics)
        by = self._correct_by
        several = by is not None and len(self.filter_names) > 1
        self._summary = {**metrics.summary(), "correct_by": f"{chosen}/{by}" if several else by}
        self._summary["store"] = saving.save(self._run, self, metrics, self._summary)

    def _remember(self, what: str, doc: Any, value: Any, args: Any, options: Any) -> Any:
        if not args and not any(option is not None for option in options.values()):
            self._rendered[what] = (doc, value)
        return value

    def _remembered(self, what: str, doc: Any) -> Any:
        of, value = self._rendered.get(what, (None, None))
        if of is doc:
            return value
        return super().doc_to_text(doc) if what == "text" else super().doc_to_target(doc)


@dataclass(frozen=True)
class _Gathered:
    """A figure of several processes' run: their records reach the task as aggregations' arguments alone."""

    figure: Figure
    note: Callable[[Sequence[DocRecord]], None]

    def __call__(self, records: Sequence[DocRecord]) -> Any:
        self.note(records)
        return self.figure(records)

    def __reduce__(self) -> tuple[Any, ...]:
        return Figure, (self.figure.metric, self.figure.layer, self.figure.error)
