"""Formats of weights files: a module for each, which reads a header, and zip archives below one of them."""
