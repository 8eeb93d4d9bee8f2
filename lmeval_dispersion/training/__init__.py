"""Dispersion losses for anyone's training loop: functions, hooks for any model, a Trainer, a command.

Public are ``losses`` and the names that :mod:`lmeval_dispersion` has. Its modules are private.
"""
