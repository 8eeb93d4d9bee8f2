"""The task class that a YAML names: any task of lm-eval, with dispersion beside its own metrics."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lm_eval.api.task import ConfigurableTask
from lm_eval.utils import handle_non_serializable, hash_string

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness import backend, run_store
from lmeval_dispersion.harness.compat import Surroundings, surroundings
from lmeval_dispersion.harness.figures import METRICS, Figures
from lmeval_dispersion.harness.pooled import check_groups
from lmeval_dispersion.harness.states import DocRecord, DocState, plain, state_of, with_state
from lmeval_dispersion.model.capture import resolve

log = logging.getLogger(__name__)
backend.install()

# Which metric says whether a document was answered correctly: the first of these that the task has.
CORRECT = ("acc", "exact_match", "prompt_level_strict_acc", "pass@1", "em", "acc_norm")


class DispersionTask(ConfigurableTask):  # type: ignore[misc]
    """lm-eval's ConfigurableTask, whose requests bring back the state of the last context token.

    Use it from a YAML that includes any task of lm-eval::

        include: path/to/the/task.yaml
        task: the_task_dispersion
        class: !function lmeval_dispersion.harness.DispersionTask

    Adds the metrics ``dispersion``, ``dispersion_correct`` and ``dispersion_incorrect`` with jackknife
    errors, their figures for every captured layer in the results JSON under
    ``configs.<task>.metadata.dispersion``, and a store of the vectors. ``--metadata`` takes
    ``dispersion_layers`` (names as in :mod:`lmeval_dispersion.model.capture` with ``+`` between
    them; the first one is reported; default ``last``), ``dispersion_store`` (a folder) and
    ``dispersion_correct`` (the metric that says what is correct).
    """

    def __init__(self, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        settings = dict(config or {})
        settings.pop("class", None)  # lm-eval leaves it in, and its TaskConfig does not know it
        self._around = Surroundings()
        self._options: dict[str, Any] = {}
        self._layers: list[str] = []
        self._selected: list[int] | None = None
        self._rendered: dict[str, tuple[Any, Any]] = {}
        self._folder: Any = None
        self._figures: dict[int, Figures] = {}
        self._summary: dict[str, Any] = {}
        super().__init__(config=settings, **options)  # last: it renders a document

    @property
    def _stock(self) -> bool:
        """Whether nothing of ours applies: ``--predict_only`` replaced the metrics."""
        return "bypass" in self._metric_fn_list

    def build_all_requests(self, **options: Any) -> None:
        """As lm-eval's; first refuses what cannot work, before any model runs."""
        if self._stock:
            super().build_all_requests(**options)
            return
        metadata = self.config.metadata or {}
        self._around, self._options = surroundings(), options
        layers = _names(metadata.get("dispersion_layers", "last"))
        lm = getattr(self._around.lm, "lm", self._around.lm)
        if lm is not None:
            backend.check_model(lm, self.task_name)
            layers = list(dict.fromkeys(site.name for site in resolve(lm.model, layers)))
        if self._around.groups is None or self._around.groups:
            check_groups()
        self._layers = layers
        samples = options.get("samples")
        self._selected = sorted(set(samples)) if samples else None
        if run_store.is_writer() and getattr(lm, "rank", 0) == 0:
            self._folder = run_store.store_folder(self.task_name, metadata, self._around)
            if self._folder is not None:
                run_store.begin(self._folder)
        super().build_all_requests(**options)
        for instance in self._instances or []:
            instance.dispersion_layers = tuple(layers)

    def construct_requests(self, doc: Any, ctx: Any, **options: Any) -> Any:
        """As lm-eval's, with request types that bring states back."""
        requests = super().construct_requests(doc, ctx, **options)
        if self._stock:
            return requests
        for request in requests if isinstance(requests, list) else [requests]:
            if request.request_type not in backend.REQUEST_TYPES:
                raise HarnessError(
                    f"{self.task_name} sends {request.request_type} requests, which have no states; run the "
                    "stock task"
                )
            request.request_type = backend.REQUEST_TYPES[request.request_type]
            query = self._remembered("text", doc)
            request.query = query if request.idx == 0 and isinstance(query, str) else None
        return requests

    def doc_to_text(self, doc: Any, *args: Any, **options: Any) -> Any:
        """As lm-eval's; remembered, because rendering a template is not cheap."""
        return self._remember("text", doc, super().doc_to_text(doc, *args, **options), args, options)

    def doc_to_target(self, doc: Any, *args: Any, **options: Any) -> Any:
        """As lm-eval's; remembered likewise."""
        return self._remember("target", doc, super().doc_to_target(doc, *args, **options), args, options)

    def apply_filters(self) -> Any:
        """As lm-eval's; filters make new strings, so states are put back on their results."""
        result = super().apply_filters()
        if self._stock:
            return result
        continuations: dict[Any, dict[int, str]] = {}
        for instance in self._instances or []:
            if len(instance.args) > 1 and isinstance(instance.args[1], str):
                continuations.setdefault(instance.doc_id, {})[instance.idx] = instance.args[1]
        for instance in self._instances or []:
            state = state_of(instance.resps[0]) if instance.resps else None
            if state is None:
                continue
            texts = continuations.get(instance.doc_id, {})
            state.continuations = [texts[i] for i in sorted(texts)]
            for key, value in instance.filtered_resps.items():
                instance.filtered_resps[key] = with_state(plain(value), state)
        return result

    def process_results(self, doc: Any, results: Sequence[Any]) -> Any:
        """As lm-eval's on the plain answers, and the document's record under each metric of ours."""
        metrics = super().process_results(doc, [plain(result) for result in results])
        if self._stock:
            return metrics
        state = state_of(results[0])
        if state is None:
            raise HarnessError(
                f"{self.task_name}: an answer came back without its state; report this with your versions of "
                "lm-eval and lmeval-dispersion"
            )
        record = self._record(doc, state, results, metrics)
        ours = {name + suffix: record for name in METRICS for suffix in ("", "_stderr")}
        return {**metrics, **ours}

    def aggregation(self) -> dict[str, Any]:
        """lm-eval's functions and ours."""
        ours = {} if self._stock else {name: partial(self._value, name) for name in METRICS}
        errors = {} if self._stock else {f"{name}_stderr": partial(self._error, name) for name in METRICS}
        return {**super().aggregation(), **ours, **errors}

    def dump_config(self) -> dict[str, Any]:
        """lm-eval's, with the run's figures and the place of its store under ``metadata.dispersion``."""
        config: dict[str, Any] = super().dump_config()
        if self._summary:
            config["metadata"] = {**(config.get("metadata") or {}), "dispersion": self._summary}
        return config

    def _value(self, metric: str, records: Sequence[DocRecord]) -> Any:
        return self._of(records).value(metric)

    def _error(self, metric: str, records: Sequence[DocRecord]) -> Any:
        return self._of(records).error(metric)

    def _of(self, records: Sequence[DocRecord]) -> Figures:
        """Figures of these records; lm-eval asks metric by metric and filter by filter."""
        key = hash(tuple(map(id, records)))
        if key not in self._figures:
            figures = Figures(self.task_name, records, self._layers)
            if not self._figures:  # further filters only judge the same answers otherwise
                figures.warn()
                self._summary = figures.summary()
                self._summary["correct_by"] = self._correct_metric
                self._summary["store"] = self._save(figures)
            self._figures[key] = figures
        return self._figures[key]

    def _save(self, figures: Figures) -> str | None:
        if self._folder is None:
            return None
        about = run_store.manifest(self, figures.layers, self._around, self._options)
        about["figures"] = self._summary
        category = self._around.category(self.task_name)
        written = run_store.write(
            self._folder, self.task_name, figures.records, figures.vectors, about, category
        )
        return str(written) if written else None

    def _record(
        self, doc: Any, state: DocState, results: Sequence[Any], metrics: Mapping[str, Any]
    ) -> DocRecord:
        answers = [plain(result) for result in results]
        pairs = [a for a in answers if isinstance(a, tuple)]
        logprobs = [float(a[0]) for a in pairs] or [float(a) for a in answers if isinstance(a, float)]
        rolling = self.OUTPUT_TYPE == "loglikelihood_rolling"  # its target is the whole text
        target = None if rolling else self._remembered("target", doc)
        prediction: str | None = None
        if self.OUTPUT_TYPE == "multiple_choice" and not self.multiple_input:
            choices = [text.strip() for text in state.continuations]
            scores = logprobs[: len(choices)]
            prediction = choices[scores.index(max(scores))] if scores else None
            if isinstance(target, int) and 0 <= target < len(choices):
                target = choices[target]
        elif isinstance(answers[0], str):
            prediction = answers[0]
        subject = doc.get("subject") if isinstance(doc, Mapping) else None
        subject = subject if isinstance(subject, str) else self.config.task_alias
        dumped = json.dumps(doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
        position = state.doc_id
        return DocRecord(
            state=state,
            doc_id=self._selected[position] if self._selected else position,
            correct=self._correct(metrics),
            prediction=prediction,
            target=None if target is None else str(target),
            logprobs=logprobs,
            doc_hash=hash_string(dumped),
            subject=subject,
        )

    _correct_metric: str | None = None

    def _correct(self, metrics: Mapping[str, Any]) -> float:
        named = (self.config.metadata or {}).get("dispersion_correct")
        if named is not None and named not in metrics:
            raise HarnessError(
                f"{self.task_name} has no metric {named!r} to tell correct answers by; it has "
                f"{', '.join(metrics)}"
            )
        for name in (named,) if named else CORRECT:
            if name in metrics and isinstance(metrics[name], int | float):
                self._correct_metric = name
                return float(metrics[name])
        return math.nan

    def _remember(self, what: str, doc: Any, value: Any, args: Any, options: Any) -> Any:
        if not args and not any(option is not None for option in options.values()):
            self._rendered[what] = (doc, value)
        return value

    def _remembered(self, what: str, doc: Any) -> Any:
        of, value = self._rendered.get(what, (None, None))
        if of is doc:
            return value
        return super().doc_to_text(doc) if what == "text" else super().doc_to_target(doc)


def _names(layers: Any) -> list[str]:
    if isinstance(layers, str):
        layers = layers.replace(",", "+").split("+")
    return [str(name).strip() for name in layers if str(name).strip()] or ["last"]
