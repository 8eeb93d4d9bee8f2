"""The geometry laboratory: what a model's states look like on your own text.

Four analyses, each a function that returns a dataclass with ``to_frame()``, ``plot()``, ``to_markdown()``
and ``to_html()``:

- :func:`law`: perplexity against dispersion over texts, per layer;
- :func:`sublayers`: which sub-layer should key a kNN-LM;
- :func:`condensation`: similarity of a text's tokens, layer by layer;
- :func:`clusters`: distances within and between clusters of contexts that go on alike.

:func:`compare_studies` holds two of their results, as folders keep them, side by side.

Importing this package loads no torch; the first use of a function does. Its modules are private.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmeval_dispersion.laboratory.comparison import compare_studies
    from lmeval_dispersion.laboratory.context_clusters import clusters
    from lmeval_dispersion.laboratory.perplexity_law import law
    from lmeval_dispersion.laboratory.sublayer_choice import sublayers
    from lmeval_dispersion.laboratory.token_condensation import condensation

__all__ = ["clusters", "compare_studies", "condensation", "law", "sublayers"]

_MODULES = {
    "law": "perplexity_law",
    "sublayers": "sublayer_choice",
    "condensation": "token_condensation",
    "clusters": "context_clusters",
    "compare_studies": "comparison",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
