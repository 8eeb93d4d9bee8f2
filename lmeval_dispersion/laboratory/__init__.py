"""The geometry laboratory: a model's states on your own text.

Four analyses: ``law``, ``sublayers``, ``condensation`` and ``clusters``.
Each is a measure that gives rows; ``study.py`` keeps its work and makes the result. Import them from
:mod:`lmeval_dispersion`; the modules are private.
"""
