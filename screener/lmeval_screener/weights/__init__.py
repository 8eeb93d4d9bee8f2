"""Which matrix of a checkpoint is the output projection, and its rows."""
