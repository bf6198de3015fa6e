"""The formats of `config/formats.toml`, in the order in which they are tried."""

from collections.abc import Mapping
from typing import Final

from pipeline.records.declared import Declaration, shipped_formats

BY_NAME: Final[Mapping[str, Declaration]] = {form.name: form for form in shipped_formats()}
NAMES: Final = tuple(BY_NAME)
CRI: Final = BY_NAME["cri"]  # a container runtime's wrapper around a line
# Formats without a pattern are read by code.
TEXT_FORMATS: Final = tuple(form for form in BY_NAME.values() if form.pattern and form is not CRI)
# The remainder of a record; `(?s)` stands before every pattern.
ANYTHING: Final = "(?P<message>.*)$"
