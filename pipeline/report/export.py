"""Findings for programs: facts for JSON, rows for CSV, and whether there is reason to fail."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from pipeline.errors import BadInput, SinkUnavailable
from pipeline.report.findings import Finding, FindingSample, finding_severity
from pipeline.report.why import why
from pipeline.units import one_line

_SEVERITIES: Final = {3: "error", 2: "warning", 1: "info"}
RAW_CHARS: Final = 2_000  # of a sample
_CSV: Final = (
    "label", "severity", "level", "workload", "count", "lines", "first_seen", "last_seen", "template",
    "why", "source", "line", "sample",
)  # fmt: skip
# A spreadsheet takes a cell that begins so for a formula.
FORMULA_MARKS: Final = ("=", "+", "-", "@", "\t", "\r")


def facts(finding: Finding) -> dict[str, Any]:
    """One finding as `summary.json` holds it (docs/findings.md); times are ISO 8601, null without a time."""
    timed = finding.timed
    return {
        "label": finding.label,
        "incident": finding.incident or None,
        "place": finding.place,
        "folded": finding.folded,
        "news": finding.news,
        "severity": _SEVERITIES[finding_severity(finding)],
        "level": finding.level,
        "workload": finding.workload,
        "template_id": finding.template_id,
        "alike": list(finding.alike),
        "template": finding.template,
        "count": finding.count,
        "lines": finding.lines,
        "first_seen": finding.first_seen.isoformat() if timed else None,
        "last_seen": finding.last_seen.isoformat() if timed else None,
        "score": round(finding.score, 4),
        "p_value": finding.p_value,
        "reasons": list(finding.reasons),
        "why": why(finding),
        "samples": [_sample(sample) for sample in finding.samples],
    }


def _sample(sample: FindingSample) -> dict[str, Any]:
    return {
        "source": sample.source,
        "line": sample.line,
        "time": sample.timestamp.isoformat() if sample.timed else None,
        "raw": sample.raw if len(sample.raw) <= RAW_CHARS else sample.raw[: RAW_CHARS - 1] + "…",
        "before": list(sample.before),
        "after": list(sample.after),
    }


def check_csv(path: Path) -> None:
    """Raises BadInput where findings would replace something else, or may not be written into a file."""
    if not path.is_file():
        raise BadInput(f"--csv {path} is not a file; name one, for example {path / 'findings.csv'}")
    begin = ",".join(_CSV).encode()
    try:
        with path.open("r+b") as file:
            first = file.read(len(begin))
    except OSError as exc:
        raise BadInput(
            f"--csv {path} cannot be read and written ({exc.strerror}); choose another name"
        ) from exc
    if first and first != begin:
        raise BadInput(f"--csv {path} exists and holds no findings; choose another name")


def write_csv(path: Path, findings: Iterable[Finding]) -> None:
    """A header and a row for each finding with its first sample. Raises SinkUnavailable."""
    try:
        with path.open("w", encoding="utf-8", newline="", errors="backslashreplace") as file:
            writer = csv.writer(file)
            writer.writerow(_CSV)
            for finding in findings:
                row = facts(finding) | (_sample(finding.samples[0]) if finding.samples else {})
                row["sample"] = row.get("raw", "")
                writer.writerow([_cell(row.get(name)) for name in _CSV])
    except OSError as exc:
        raise SinkUnavailable(f"--csv {path} cannot be written ({exc.strerror}); name another file") from exc


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = one_line(value)
    return "'" + text if text.startswith(FORMULA_MARKS) else text


def fails(findings: Sequence[Finding], limit: str | None) -> bool:
    """True when a finding is as grave as `limit` (of `--fail-on`); None never fails.

    `fatal` counts levels fatal and critical, `error` every error-like line, `any` every finding but news."""
    match limit:
        case None:
            return False
        case "any":
            return any(not finding.news for finding in findings)
        case "error":
            return any(finding_severity(finding) == 3 for finding in findings)
        case _:
            return any(finding.level in ("fatal", "critical") for finding in findings)
