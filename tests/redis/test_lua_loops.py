"""Redis runs one script at a time, so no script reads a whole collection for each of its arguments."""

import re
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "pipeline" / "redis" / "lua"
WHOLE = re.compile(r"'(HGETALL|HVALS|HKEYS|SMEMBERS)'|'Z?L?RANGE', \w+, 0, -1\b|\bfields\(")
TWO_KEYS = "for _, key in ipairs({ DEMAND, DEMAND_WINDOW }) do"  # of the forms of needs, at most 256 each


@pytest.mark.parametrize("path", sorted(SCRIPTS.rglob("*.lua")), ids=lambda path: path.stem)
def test_no_script_reads_a_whole_collection_within_a_loop(path: Path) -> None:
    loops: list[tuple[int, str]] = []  # that are open: indentation and head
    for line in path.read_text(encoding="utf-8").splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if not text or text.startswith("--"):
            continue
        while loops and indent <= loops[-1][0]:
            loops.pop()
        if WHOLE.search(text) and not text.startswith("for "):
            assert [head for _, head in loops if head != TWO_KEYS] == [], text
        elif WHOLE.search(text):
            assert not loops, text
        if text.startswith(("for ", "while ")):
            loops.append((indent, text))
