"""Stores of a model's vectors without its evaluation: from plain texts, or from lm-eval's samples."""
