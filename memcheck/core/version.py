"""The version, which is read without importing torch."""

__version__ = "0.3.0"
