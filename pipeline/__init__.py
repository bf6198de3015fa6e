"""Logweir: finds the lines that matter in a river of logs."""

__version__ = "0.1.0"
