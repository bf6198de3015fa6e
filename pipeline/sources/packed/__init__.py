"""Texts inside of other files: compressed ones, and archives of many."""
