"""Checkpoints asked a few questions of a task; its modules are private."""
