"""Checkpoints in any storage: each is a `Snapshot` (snapshot.py), opened by `Sources` (source.py)."""
