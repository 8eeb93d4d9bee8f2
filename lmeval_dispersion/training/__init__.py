"""Dispersion losses for anyone's training loop: functions, hooks for any model, a Trainer, a command."""
