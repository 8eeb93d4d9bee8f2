"""The geometry laboratory: what a model's states look like on your own text.

Four analyses, ``law``, ``sublayers``, ``condensation`` and ``clusters``, each a measure that one runner
(``analysis.py``) takes over models and texts and keeps in a study (``study.py``), and the comparison of two
studies. They are names of :mod:`lmeval_dispersion`; the modules are private.
"""
