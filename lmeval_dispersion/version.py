"""The version, apart from the package, so that what the package imports can say it."""

__version__ = "0.2.0"
