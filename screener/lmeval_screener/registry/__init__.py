"""A registry of checkpoints: what was measured, kept in a DuckDB file. Its modules are private."""
