"""Weights files: their formats, and the rows and final norm read from them."""
