"""A run's store: every document's vector, answer and scores in one folder, without pickles or torch.

``docs/reference/store.md`` describes the format. This package's modules are private.
"""

from lmeval_dispersion.store.format import COLUMNS, begin_store, write_store
from lmeval_dispersion.store.reading import Store, read_store

__all__ = [
    "COLUMNS",
    "Store",
    "begin_store",
    "open_store",
    "read_store",
    "write_store",
]

open_store = read_store  # public alias: the stub cannot rename
