"""lm-eval's task class with what a dispersion task asks of it: one of 0.4, one of 0.5, chosen here.

Both call ``judged(instances, answers, metrics, filter_name)`` of a subclass once for each document and
filter, after the model has run; the metrics that it returns join lm-eval's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lm_eval.api.task import ConfigurableTask, Task

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness.records import DocRecord


def _of_documents(instances: Sequence[Any]) -> dict[int, list[Any]]:
    """Each document's requests in order."""
    of_document: dict[int, list[Any]] = defaultdict(list)
    for instance in sorted(instances, key=lambda instance: instance.idx):
        of_document[instance.doc_id].append(instance)
    return of_document


class HookedTask04(ConfigurableTask):  # type: ignore[misc]
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
    def several_contexts(self) -> bool:
        """Whether the choices of a document are in its contexts, as in Winogrande."""
        return bool(self.multiple_input)

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


class HookedTask05(Task):  # type: ignore[misc]
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
        """As in 0.4."""
        return bool(self._has_metric("bypass"))

    @property
    def several_contexts(self) -> bool:
        """As in 0.4."""
        return bool(self._multiple_inputs)

    @property
    def filter_names(self) -> list[str]:
        """As in 0.4."""
        return [scorer.name for scorer in self._scorers]

    def document_index(self, doc_id: int) -> int:
        """As in 0.4."""
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
    HookedTask = HookedTask04
elif hasattr(Task, "process_instances"):
    HookedTask = HookedTask05
else:
    HookedTask = HookedTask04
