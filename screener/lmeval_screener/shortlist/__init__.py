"""From a ranking to a short list, to lm-eval, and to a verdict on the screen."""
