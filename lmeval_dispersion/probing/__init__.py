"""Ranking checkpoints by a few questions of a task; its modules are private."""
