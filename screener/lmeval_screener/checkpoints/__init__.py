"""Where checkpoints are: folders and repositories, read by ranges."""
