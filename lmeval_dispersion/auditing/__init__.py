"""What the dispersion of a finished run is good for: slices, mixtures, calibration, ranking, comparison.

Everything here reads stores (``lmeval_dispersion.store``) and never a model. Its modules are private.
"""
