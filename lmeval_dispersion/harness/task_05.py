"""lm-eval 0.5's task classes: one for each output type, whose scorers score a task's documents at once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from lm_eval.api.task import Task

from lmeval_dispersion.harness.records import DocRecord
from lmeval_dispersion.harness.seams import plain, state_of


class HookedTask(Task):  # type: ignore[misc]
    """As that of 0.4. Making one gives a subclass that is also lm-eval's class of the output type."""

    def __new__(cls, config: Any = None, **_: Any) -> Any:
        """An object of lm-eval's class for the configuration's output type, with this class before it."""
        kind = Task._registry.get((config or {}).get("output_type"))
        if kind is not None and not issubclass(cls, kind):
            cls = type(cls.__name__, (cls, kind), {"__module__": cls.__module__, "__doc__": cls.__doc__})
        return super().__new__(cls)

    @property
    def only_predicts(self) -> bool:
        """Whether ``--predict_only`` replaced the metrics, so that nothing of ours applies."""
        return bool(self._has_metric("bypass"))

    @property
    def several_contexts(self) -> bool:
        """Whether the choices of a document are in its contexts, as in Winogrande."""
        return bool(self._multiple_inputs)

    @property
    def filter_names(self) -> list[str]:
        """The filters, each of which judges every answer."""
        return [scorer.name for scorer in self._scorers]

    def document_index(self, doc_id: int) -> int:
        """Index in the task's split of the document that lm-eval's instances call ``doc_id``."""
        return doc_id

    def process_instances(self) -> None:
        """As lm-eval's, with what :meth:`judged` adds to every document's scores."""
        super().process_instances()
        if self.only_predicts:
            return
        of_document: dict[int, list[Any]] = defaultdict(list)
        for instance in sorted(self._instances or [], key=lambda i: i.idx):
            of_document[instance.doc_id].append(instance)
        for scorer in self._scorers:
            results = {}
            for doc_id, scored in scorer.raw_docs.items():
                instances = of_document[doc_id]
                ours = self.judged(
                    instances[0].doc,
                    state_of(instances[0].resps[0]),
                    [plain(answer) for i in instances for answer in i.filtered_resps[scorer.name]],
                    scorer.reduced_docs[doc_id],
                    scorer.name,
                )
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
