"""The geometry laboratory: a model's states on your own text.

Four analyses: ``law``, ``sublayers``, ``condensation`` and ``clusters``.
Each is a measure that gives rows; ``study.py`` runs it for every model and text, and keeps its work.
Import them from :mod:`lmeval_dispersion`; the modules are private.
"""
