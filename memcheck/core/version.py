"""The version, which is read without importing torch."""

__version__ = "0.2.0"
