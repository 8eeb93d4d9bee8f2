"""Dispersion losses for any training loop: functions, hooks for any model, a Trainer.

``losses`` and the names in :mod:`lmeval_dispersion` are public. The modules are private.
"""
