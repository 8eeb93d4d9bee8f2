"""Uses of a finished run's dispersion: slices, mixtures, calibration, ranking, comparison.

Everything here reads stores or lm-eval's samples (``lmeval_dispersion.store``), never a model.
Its modules are private.
"""
