"""A list of what is normal, for runs without a pipeline that remembers marks."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import polars as pl

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.records.schema import raw_frame
from pipeline.report.findings import Finding
from pipeline.sources import formats

MAX_ROWS: Final = 10_000
MAX_BYTES: Final = 16 << 20
_WILDCARD: Final = "<*>"


@dataclass(frozen=True, slots=True)
class NormalList:
    """Templates and lines that somebody called normal, as words of masked text."""

    texts: frozenset[tuple[str, ...]] = frozenset()

    @classmethod
    def load(cls, paths: Iterable[Path], masks: MaskSet) -> Self:
        """Reads files with a template or a whole line in each row; blank rows and rows with `# ` are skipped.

        Raises BadInput for a file that cannot be read or is no list of at most MAX_ROWS rows."""
        rows: list[str] = []
        for path in paths:
            rows += _rows(path)
        if len(rows) > MAX_ROWS:
            raise BadInput(
                f"--normal: {len(rows):,} rows are more than the {MAX_ROWS:,} that are looked at; "
                "give these times as --baseline instead"
            )
        if not rows:
            return cls()
        read = formats.parse(raw_frame(rows), formats.detect(rows), arrived=utc_now())
        masked: list[pl.Series] = [masks.mask(text)["masked"] for text in (read["message"], pl.Series(rows))]
        return cls(frozenset(tuple(text.split()) for text in (*rows, *masked[0], *masked[1]) if text))

    def covers(self, finding: Finding) -> bool:
        """True when a row is the finding's template, or a line of it."""
        template = tuple(finding.template.split())
        if template in self.texts:
            return True
        if _WILDCARD not in finding.template:
            return False
        return any(_matches(template, text) for text in self.texts if len(text) == len(template))


def _matches(template: tuple[str, ...], text: tuple[str, ...]) -> bool:
    return all(_WILDCARD in part or part == word for part, word in zip(template, text, strict=True))


def _rows(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise BadInput(f"--normal {path} cannot be read ({exc.strerror}); name a file of templates") from exc
    if len(data) > MAX_BYTES:
        raise BadInput(f"--normal {path} is larger than {MAX_BYTES >> 20} MiB; name a file of templates")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise BadInput(f"--normal {path} is not UTF-8 text; write a template or a line in each row") from exc
    return [row for row in text.splitlines() if row.strip() and not row.startswith("# ")]
