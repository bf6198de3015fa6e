"""The report: one self-contained HTML page that opens offline and loads nothing.

Findings, timeline and numbers are rendered here, so the page reads without scripts; the script adds sorting,
searching and filters. Log text is hostile: `visible` shows its control characters, and the templates escape
it. The JSON block escapes `<`, and the page forbids every source except its own hashed style and script."""

import base64
import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import polars as pl

from pipeline.errors import BadInput, SinkUnavailable
from pipeline.records.levels import LEVELS
from pipeline.report.findings import Finding, by_incident
from pipeline.report.fragments import (
    chart,
    environment,
    epoch,
    fact_text,
    level_name,
    resource,
    workload_name,
)
from pipeline.report.samples import CHARS
from pipeline.report.text import (
    NO_BASELINE,
    OVERALL,
    all_new,
    followers,
    headline,
    incident_header,
    units_section,
    without_baseline,
)
from pipeline.units import clipped, plural

# The page stays under 5 MB whatever comes: what varies has a share, the rest is under 600 KB.
FINDINGS_BYTES: Final = 2_200_000
TEMPLATES_BYTES: Final = 1_200_000
EXAMPLES_BYTES: Final = 900_000  # a sample of each template
FINDINGS: Final = 500  # a reader stops earlier; the table of templates still links them
TEMPLATES: Final = 5_000
SAMPLE_CHARS: Final = 2_000
TEMPLATE_CHARS: Final = 400
ROWS_WITHOUT_SCRIPT: Final = 100
LISTED: Final = 12  # workloads and levels in the numbers
CHIPS: Final = 60  # workloads to filter by; the search finds the others

_NO_SAMPLES: Final = pl.DataFrame(
    schema={"template_id": pl.Int64, "source": pl.String, "line": pl.UInt64, "raw": pl.String}
)


def write_page(
    path: Path,
    *,
    findings: Sequence[Finding],
    templates: pl.DataFrame,
    summary: Mapping[str, Any],
    title: str,
    run: Mapping[str, object],
    samples: pl.DataFrame = _NO_SAMPLES,
) -> int:
    """Write the report and return its size in bytes.

    `findings` come from `findings.collect`, in reading order; `summary` from `summary.run_summary`;
    `templates` needs template_id, template, count, first_seen, last_seen; `samples` is of
    `samples.first_records`; `run` holds further facts to print, by name. The file appears whole or not at
    all. Raises SinkUnavailable when the disk is full or fails, BadInput when the path cannot be written.
    """
    page = render_page(
        findings=findings, templates=templates, summary=summary, title=title, run=run, samples=samples
    )
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
            f"the report cannot be written to {path} ({exc.strerror}); name a file in a folder you can write "
            "to"
        ) from exc
    except OSError as exc:
        raise SinkUnavailable(
            f"the report of {len(page):,} bytes could not be written to {path} ({exc.strerror}); "
            "free space on that disk or choose another path, then try again"
        ) from exc
    return len(page)


def render_page(
    *,
    findings: Sequence[Finding],
    templates: pl.DataFrame,
    summary: Mapping[str, Any],
    title: str,
    run: Mapping[str, object],
    samples: pl.DataFrame = _NO_SAMPLES,
) -> bytes:
    """The page as UTF-8; the same arguments give the same bytes."""
    css, js = resource("page.css"), resource("page.js")
    fitting, incidents = _incidents(findings)
    rows = _template_rows(templates, findings[:fitting], samples)
    timeline = summary["timeline"]
    buckets = [
        [epoch(datetime.fromisoformat(start)), lines, odd] for start, lines, odd in timeline["buckets"]
    ]
    data = {
        "templates": rows,
        "templates_total": templates.height,
        "timeline": {"bucket_s": timeline["bucket_s"], "buckets": buckets},
    }
    units_heading, units = units_section(summary)
    policy = f"default-src 'none'; style-src {_csp(css)}; script-src {_csp(js)}"
    facts = {name.replace("_", " "): fact_text(value) for name, value in run.items()}
    if summary["model_versions"]:
        facts.setdefault("model version", ", ".join(summary["model_versions"][:5]))
    page = (
        environment()
        .get_template("page.html")
        .render(
            csp=f"{policy}; base-uri 'none'; form-action 'none'",
            css=css,
            js=js,
            title=title,
            headline=headline(findings, summary),
            summary=summary,
            first=datetime.fromisoformat(summary["first"]) if summary["first"] else None,
            last=datetime.fromisoformat(summary["last"]) if summary["last"] else None,
            chart=chart(buckets, timeline["bucket_s"]),
            incidents=incidents,
            overall_heading=OVERALL,
            overall=summary.get("facts", ()),
            units_heading=units_heading,
            units=units,
            choices=_choices(findings[:fitting]),
            no_baseline=NO_BASELINE if without_baseline(summary) else "",
            more_findings=len(findings) - fitting,
            rows=rows[:ROWS_WITHOUT_SCRIPT],
            templates_state=_templates_state(len(rows), templates.height),
            counts={
                "Lines": summary["lines"],
                "Anomalous lines": summary["anomalous_lines"],
                "Findings": len(findings),
                "Templates": templates.height,
                "Not judged by the model": summary["not_judged"],
            },
            facts=facts,
            listed=LISTED,
            data=_json(data),
        )
    )
    return page.encode("utf-8", "replace")


def _csp(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


def _json(value: object) -> str:
    """JSON that no HTML parser can mistake for markup."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _incidents(findings: Sequence[Finding]) -> tuple[int, list[str]]:
    """How many findings fit, and the HTML of their incidents; samples get short past half of the share."""
    fragment: Any = environment().get_template("fragments.html").module
    cards: dict[str, str] = {}
    used = 0
    novel = {members[0].entry: all_new(members) for members in by_incident(findings)}
    for finding in findings[:FINDINGS]:
        samples, chars = (5, SAMPLE_CHARS) if used < FINDINGS_BYTES // 2 else (2, 300)
        card = fragment.card(finding, samples, chars, new_is_said=novel[finding.entry])
        used += len(card.encode("utf-8", "replace"))
        if used > FINDINGS_BYTES:
            break
        cards[finding.label] = card
    # The list begins with the headline of each incident, so both go through the incidents in one order.
    entries = zip(by_incident(findings[: len(cards)]), by_incident(findings), strict=False)
    return len(cards), [
        fragment.incident(
            members[0].entry,
            incident_header(members),
            [cards[finding.label] for finding in fitting],
            sum(not finding.folded for finding in fitting),
            _behind(members) if any(finding.folded for finding in fitting) else "",
            len(members) - len(fitting),
        )
        for fitting, members in entries
    ]


def _behind(members: Sequence[Finding]) -> str:
    return followers(members, sum(not finding.folded for finding in members))


def _choices(findings: Sequence[Finding]) -> list[tuple[str, list[tuple[str, int]]]]:
    """The filters: levels, the gravest first, and workloads, those with most findings first.

    As the cards spell them, with the number of findings."""
    levels = Counter(level_name(finding) for finding in findings)
    workloads = Counter(workload_name(finding) for finding in findings)
    gravest = sorted(levels.items(), key=lambda item: -LEVELS.index(item[0]) if item[0] in LEVELS else 1)
    busiest = sorted(workloads.items(), key=lambda item: (-item[1], item[0]))
    return [("level", gravest), ("workload", busiest[:CHIPS])]


def _template_rows(
    templates: pl.DataFrame, findings: Sequence[Finding], samples: pl.DataFrame
) -> list[list[Any]]:
    """`[id, template, lines, first, last, label of the finding or "", place, sample]`, most lines first.

    All are within their share; a row whose sample does not fit ends before `place`.

    Where not all fit, those with a finding go first.
    """
    labels: dict[int, str] = {}
    for finding in findings:
        for template_id in finding.template_ids:
            labels.setdefault(template_id, finding.label)
    ranked = (
        templates.lazy()
        # Records that no template holds share the id 0.
        .with_columns(pl.col("template_id").fill_null(0), pl.col("template").fill_null("(unclassified)"))
        .with_columns(pl.col("template_id").is_in(list(labels)).alias("flagged"))
        .sort("flagged", "count", "template_id", descending=[True, True, False])
        .head(TEMPLATES)
        .select("template_id", "template", "count", "first_seen", "last_seen")
        .collect()
    )
    examples = {template_id: values for template_id, *values in samples.iter_rows()}
    rows, used, used_by_examples = [], 0, 0
    for template_id, template, count, first, last in ranked.iter_rows():
        text = clipped(template, TEMPLATE_CHARS)
        times = [epoch(moment) if moment else 0 for moment in (first, last)]
        row = [template_id, text, count, *times, labels.get(template_id, "")]
        used += len(_json(row).encode("utf-8", "replace")) + 1
        if used > TEMPLATES_BYTES:
            break
        if template_id in examples and used_by_examples < EXAMPLES_BYTES:
            source, line, raw = examples[template_id]
            example = [f"{clipped(source, 120)}:{line}", clipped(raw, CHARS)]
            used_by_examples += len(_json(example).encode("utf-8", "replace"))
            row += example
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
