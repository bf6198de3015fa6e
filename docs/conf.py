"""Sphinx settings of this documentation: `scripts/docs` builds it, warnings are errors."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

import reference_pages

from pipeline import __version__

project = "Logweir"
author = "the authors of Logweir"
copyright = author
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Logweir {__version__}"
suppress_warnings = ["misc.highlighting_failure"]
# Headings become anchors as they do on code hosts, so `page.md#heading` works in both places.
myst_heading_anchors = 4
default_role = "literal"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
linkcheck_ignore = [r"http://127\.0\.0\.1", r"http://localhost", r"https?://(host|DASHBOARDS|OPENSEARCH)\b"]
linkcheck_timeout = 20

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")
CODE = re.compile(r"(`+)([^`]+)\1")


def name_files_outside(_app: Sphinx, page: str, source: list[str]) -> None:
    """Turns links to files that are no part of the documentation into their paths."""
    if "/" in page:  # a page of docs/reference/ links to docs/ that way
        return

    def shown(link: re.Match[str]) -> str:
        text, path = link[1].strip("`"), link[2]
        return f"`{path}`" if text in path else f"{text} (`{path}`)"

    source[0] = OUTSIDE.sub(shown, source[0])


def plain(_app: object, _kind: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Docstrings are plain text with backticks: all other marks of reStructuredText are escaped."""
    lines[:] = reference_pages.plain_text("\n".join(lines)).split("\n")


def setup(app: Sphinx) -> None:
    reference_pages.write(Path(__file__).parent / "reference")
    app.connect("source-read", name_files_outside)
    app.connect("autodoc-process-docstring", plain)
