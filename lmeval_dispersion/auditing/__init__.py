"""Uses of a finished run's dispersion: slices, mixtures, calibration, ranking, comparison.

Everything here reads stores (``lmeval_dispersion.store``) and never a model. Its modules are private.
"""
