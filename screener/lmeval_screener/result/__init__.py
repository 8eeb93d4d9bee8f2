"""The result of a screening, its sentences and its charts."""

from lmeval_screener.result.result import Gate, Result

__all__ = ["Gate", "Result"]
