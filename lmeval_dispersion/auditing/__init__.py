"""What a finished run can tell: slices, mixtures, calibration, ranking, comparison with other runs.

Everything here reads stores or lm-eval's samples (``lmeval_dispersion.store``), never a model.
Its modules are private.
"""
