"""Checkpoints wherever they lie: each is a `Snapshot` (snapshot.py), opened by `Sources` (source.py)."""
