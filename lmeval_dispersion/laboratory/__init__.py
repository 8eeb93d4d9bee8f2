"""The geometry laboratory: a model's states on your own text.

Four analyses: ``law``, ``sublayers``, ``condensation`` and ``clusters``.
One runner (``analysis.py``) measures models and texts and keeps a study (``study.py``). Import them from
:mod:`lmeval_dispersion`; the modules are private.
"""
