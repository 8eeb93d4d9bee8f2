"""Short lists: choice from a ranking, export to lm-eval, and the verdict on the screen by results."""
