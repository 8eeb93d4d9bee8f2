"""The laboratory: analyses of a model's states on your own text.

The four analyses are ``law``, ``sublayers``, ``condensation`` and ``clusters``. Each is a measure
that yields rows; ``study.py`` runs it for every model and text, and keeps finished work. Import
them from :mod:`lmeval_dispersion`; the modules are private.
"""
