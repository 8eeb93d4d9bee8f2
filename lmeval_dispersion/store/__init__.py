"""The store of one run: every document's vector, answer and scores in one folder, without pickles or torch.

A folder holds ``vectors.safetensors`` (float16 unit rows and float32 norms a layer), ``documents.parquet``
(one row a document, in the same order) and ``manifest.json``, which is written last: a folder without it
is a store whose run did not finish. ``docs/reference/store.md`` is the contract. Its modules are private.
"""

from lmeval_dispersion.store.format import COLUMNS, begin_store, write_store
from lmeval_dispersion.store.identity import check_comparable
from lmeval_dispersion.store.reading import Store, read_store

__all__ = ["COLUMNS", "Store", "begin_store", "check_comparable", "read_store", "write_store"]
