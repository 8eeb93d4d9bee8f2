"""The checkpoints that a user asks for: names, families, training runs, the demo. Its modules are private."""
