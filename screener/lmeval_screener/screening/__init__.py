"""One screening: what is asked, the checkpoints that are meant, and the run."""
