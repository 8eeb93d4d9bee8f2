"""The interface between a dispersion task and lm-eval's own task class, whatever its generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmeval_dispersion.harness.records import DocState


class TaskHooks(ABC):
    """What lm-eval's task class gives to a dispersion task, and what it asks of one.

    A generation of lm-eval has one implementation: a subclass of this and of lm-eval's own task class, which
    answers the questions and calls :meth:`judged` from wherever that lm-eval scores its documents.
    """

    @property
    @abstractmethod
    def only_predicts(self) -> bool:
        """Whether ``--predict_only`` replaced the metrics, so that nothing of ours applies."""

    @property
    @abstractmethod
    def several_contexts(self) -> bool:
        """Whether the choices of a document are in its contexts, as in Winogrande."""

    @property
    @abstractmethod
    def filter_names(self) -> list[str]:
        """The filters that judge every answer, each in its way."""

    @abstractmethod
    def document_index(self, doc_id: int) -> int:
        """Index in the task's split of the document that lm-eval's instances call ``doc_id``."""

    @abstractmethod
    def judged(
        self,
        doc: Any,
        state: DocState | None,
        answers: Sequence[Any],
        metrics: Mapping[str, Any],
        filter_name: str,
    ) -> Mapping[str, Any]:
        """Metrics to add to those of one document. Called once for each document and filter.

        Args:
            doc: The document.
            state: What came back from the model with its first answer; None where nothing did.
            answers: The filtered answers, plain.
            metrics: lm-eval's own metrics of the document.
            filter_name: The filter.
        """
