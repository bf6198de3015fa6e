"""The usual bounds of a question to files, without DuckDB."""

from typing import Final

MEMORY: Final = "512MB"  # the process needs about 200 MB more
LIMIT_S: Final = 60.0
