"""The report: one self-contained HTML page that opens offline and loads nothing.

Findings, timeline and numbers are rendered here, so the page reads without scripts too; the script adds
sorting, searching and filters. Log text is hostile: it passes `visible` and `escape` (or a JSON block
with `<` escaped), and the page forbids every source but its own hashed style and script.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import polars as pl

from pipeline.errors import BadInput, SinkUnavailable
from pipeline.report import parts
from pipeline.report.findings import Finding, by_incident
from pipeline.report.text import headline, shown
from pipeline.units import plural

# The page stays under 5 MB whatever comes: what varies has a share, the rest is under 300 KB.
FINDINGS_BYTES: Final = 2_600_000
TEMPLATES_BYTES: Final = 1_900_000
FINDINGS: Final = 500  # nobody reads further; the table of templates still links them
TEMPLATES: Final = 5_000
SAMPLE_CHARS: Final = 2_000
TEMPLATE_CHARS: Final = 400
ROWS_WITHOUT_SCRIPT: Final = 100


def write(
    path: Path,
    *,
    findings: Sequence[Finding],
    templates: pl.DataFrame,
    summary: Mapping[str, Any],
    title: str,
    run: Mapping[str, object],
) -> int:
    """Write the report and return its size in bytes.

    `findings` come from `findings.collect`, in reading order; `summary` from `findings.summary`;
    `templates` needs template_id, template, count, first_seen, last_seen; `run` holds further facts to
    print, by name. The file appears whole or not at all. Raises SinkUnavailable when the disk is full
    or fails, BadInput when the path cannot be written.
    """
    page = render(findings=findings, templates=templates, summary=summary, title=title, run=run)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with scratch.open("wb") as out:
                out.write(page)
                out.flush()
                os.fsync(out.fileno())
            scratch.replace(path)
        except BaseException:
            with suppress(OSError):
                scratch.unlink()
            raise
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as exc:
        raise BadInput(
            f"the report cannot be written to {path} ({exc.strerror}); name a file in a folder you can write to"
        ) from exc
    except OSError as exc:
        raise SinkUnavailable(
            f"the report of {len(page):,} bytes could not be written to {path} ({exc.strerror}); "
            "free space on that disk or choose another path, then try again"
        ) from exc
    return len(page)


def render(
    *,
    findings: Sequence[Finding],
    templates: pl.DataFrame,
    summary: Mapping[str, Any],
    title: str,
    run: Mapping[str, object],
) -> bytes:
    """The page as UTF-8; the same arguments give the same bytes."""
    css, js = _resource("page.css"), _resource("page.js")
    fitting, cards = _cards(findings)
    rows = _template_rows(templates, findings[:fitting])
    timeline = summary["timeline"]
    buckets = [[_epoch(start), lines, odd] for start, lines, odd in timeline["buckets"]]
    data = {
        "templates": rows,
        "templates_total": templates.height,
        "timeline": {"bucket_s": timeline["bucket_s"], "buckets": buckets},
    }
    slots = {
        "csp": f"default-src 'none'; style-src {_csp(css)}; script-src {_csp(js)}; base-uri 'none'; form-action 'none'",
        "css": css,
        "js": js,
        "title": parts.text_html(title),
        "headline": parts.text_html(headline(findings, summary)),
        "sub": _sub(summary),
        "timeline": parts.timeline(buckets, timeline["bucket_s"]),
        "findings": cards or '<p class="note">No record was judged anomalous.</p>',
        "left_out": _left_out(len(findings) - fitting),
        "templates": "\n".join(parts.template_row(row) for row in rows[:ROWS_WITHOUT_SCRIPT]),
        "templates_state": _templates_state(len(rows), templates.height),
        "numbers": parts.numbers(len(findings), templates.height, summary, run),
        "data": _json(data),
    }
    # One pass, so that nothing inserted is read as a slot again.
    page = re.sub(r"\{\{(\w+)\}\}", lambda m: slots[m[1]], _resource("page.html"))
    return page.encode("utf-8", "replace")


def _resource(name: str) -> str:
    return files("pipeline.report").joinpath(name).read_text(encoding="utf-8")


def _csp(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


def _json(value: object) -> str:
    """JSON that no HTML parser can mistake for markup."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _epoch(moment: str) -> int:
    return int(datetime.fromisoformat(moment).timestamp())


def _sub(summary: Mapping[str, Any]) -> str:
    if not summary["records"]:
        return "There is nothing to show yet."
    first, last = (datetime.fromisoformat(summary[name]) for name in ("first", "last"))
    facts = [
        f"{parts.time_html(first)} – {parts.time_html(last)} UTC",
        plural(len(summary["by_workload"]), "workload"),
    ]
    if summary["warming"] and summary["warming"] != summary["records"]:
        facts.append(f"{plural(summary['warming'], 'record')} not judged: the model was warming up")
    return " · ".join(facts)


def _cards(findings: Sequence[Finding]) -> tuple[int, str]:
    """How many findings fit, and their HTML under their incidents; past half of the share, samples get short."""
    out: dict[int, str] = {}
    used = 0
    for number, finding in enumerate(findings[:FINDINGS], start=1):
        roomy = used < FINDINGS_BYTES // 2
        card = parts.card(number, finding, *((5, SAMPLE_CHARS) if roomy else (2, 300)))
        used += len(card.encode("utf-8", "replace"))
        if used > FINDINGS_BYTES:
            break
        out[number] = card
    # The first of the list are the first of each incident, so both go through the incidents in the same order.
    entries = zip(by_incident(findings[: len(out)]), by_incident(findings), strict=False)
    incidents = [
        parts.incident([f for _, f in whole], [out[place] for place, _ in here]) for here, whole in entries
    ]
    return len(out), "\n".join(incidents)


def _left_out(count: int) -> str:
    if count <= 0:
        return ""
    verb = "is" if count == 1 else "are"
    return f'<p class="note">{plural(count, "more finding")} {verb} not on this page; the results hold them all.</p>'


def _template_rows(templates: pl.DataFrame, findings: Sequence[Finding]) -> list[list[Any]]:
    """`[id, template, lines, first, last, finding number or 0]`, most lines first, within the share.

    Where not all fit, those with a finding go first.
    """
    number: dict[int, int] = {}
    for at, finding in enumerate(findings, start=1):
        number.setdefault(finding.template_id, at)
    ranked = (
        templates.lazy()
        # Records that no template holds share the id 0.
        .with_columns(pl.col("template_id").fill_null(0), pl.col("template").fill_null("(unclassified)"))
        .with_columns(pl.col("template_id").is_in(list(number)).alias("flagged"))
        .sort("flagged", "count", "template_id", descending=[True, True, False])
        .head(TEMPLATES)
        .select("template_id", "template", "count", "first_seen", "last_seen")
        .collect()
    )
    rows, used = [], 0
    for template_id, template, count, first, last in ranked.iter_rows():
        text = shown(template, TEMPLATE_CHARS)
        seen = [int(moment.timestamp()) if moment else 0 for moment in (first, last)]
        row = [template_id, text, count, *seen, number.get(template_id, 0)]
        used += len(_json(row).encode("utf-8", "replace")) + 1
        if used > TEMPLATES_BYTES:
            break
        rows.append(row)
    return sorted(rows, key=lambda row: (-row[2], row[0]))


def _templates_state(shown: int, total: int) -> str:
    if shown == total:
        note = plural(total, "template")
    else:
        note = f"{shown:,} of {plural(total, 'template')}: those with a finding, then the most frequent"
    return note + (
        f"; the {ROWS_WITHOUT_SCRIPT} most frequent without scripts" if shown > ROWS_WITHOUT_SCRIPT else ""
    )
