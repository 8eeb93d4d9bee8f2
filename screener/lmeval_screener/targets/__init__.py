"""The checkpoints that a user asks for: names, addresses, folders of training runs, families."""
