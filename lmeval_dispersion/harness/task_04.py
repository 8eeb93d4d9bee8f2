"""lm-eval 0.4's task class, which scores a document in ``process_results``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.task import ConfigurableTask

from lmeval_dispersion.harness.seams import filter_of, plain, state_of, with_state


class HookedTask(ConfigurableTask):  # type: ignore[misc]
    """lm-eval's task class with what a dispersion task asks of any generation of it.

    The properties and :meth:`document_index`; and ``judged(doc, state, answers, metrics, filter_name)`` of a
    subclass is called once for each document and filter: its metrics join lm-eval's.
    """

    _selected: Sequence[int] = ()  # of --samples, ascending: instances are numbered by their place in it

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
        """As lm-eval's; filters make new strings, so states are put back on their results."""
        result = super().apply_filters()
        for instance in self._instances or []:
            state = state_of(instance.resps[0]) if instance.resps else None
            if state is not None:
                for key, value in instance.filtered_resps.items():
                    instance.filtered_resps[key] = with_state(plain(value), state, key)
        return result

    def process_results(self, doc: Any, results: Sequence[Any]) -> Any:
        """As lm-eval's on the plain answers, with what :meth:`judged` adds."""
        answers = [plain(result) for result in results]
        metrics = super().process_results(doc, answers)
        if self.only_predicts:
            return metrics
        # The caller goes filter by filter and does not say which one it is at: the answers do.
        ours = self.judged(doc, state_of(results[0]), answers, metrics, filter_of(results[0]))
        return {**metrics, **ours}
