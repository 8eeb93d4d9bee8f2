"""Weights files: their formats, and reading rows and the final norm from them."""
