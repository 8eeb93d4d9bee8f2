"""Does G order released checkpoints? One command that asks the real Hub and its published scores."""
