"""A language model: loading it, the texts it runs over, its states by layer, its parts.

Public are ``load_model`` and ``capture``, as names of :mod:`lmeval_dispersion`. Its modules are private.
"""
