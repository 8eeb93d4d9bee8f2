"""A language model: loading it, the texts it runs over, its states by layer, its parts."""
