"""The result of a screening, its sentences and its charts."""
