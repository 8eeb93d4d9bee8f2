"""Representation dispersion for language models: audit, screening, training.

Importing this package loads nothing but the standard library; the parts are imported by their own names,
for example ``from lmeval_dispersion.geometry import dispersion``.
"""

__version__ = "0.1.0"
