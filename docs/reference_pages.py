"""Writes the pages of docs/reference/ that are made from the code: commands, metrics, errors, log
formats."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import errors
from pipeline.cli import parser
from pipeline.observe.counters import METERS, Meter
from pipeline.records.declared import shipped_formats
from pipeline.workers.api.app import specified_app
from pipeline.workers.gauges import SHOWN

WIDTH = 100
CODE = re.compile(r"`+[^`]+`+")


def write(folder: Path) -> None:
    """Write every page whose text has changed. An unchanged file keeps its time: a second build is quick."""
    folder.mkdir(exist_ok=True)
    for name, text in (
        ("commands.md", commands()),
        ("metrics.md", metrics()),
        ("errors.md", exceptions()),
        ("formats.md", log_formats()),
        ("routes.md", routes()),
    ):
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def commands() -> str:
    """Every verb with its flags, as `--help` prints them."""
    parts = [
        "# Commands",
        "Made from the parser of the command line. Exit codes: 0 done, 1 failed, 2 bad input, 130 after "
        "Ctrl-C, 143 after SIGTERM. `logweir gpu run` answers with the code of its program.",
        fenced(help_of(parser())),
    ]
    for one in verbs(parser()):
        parts += [f"## {one.prog}", fenced(help_of(one))]
    return "\n\n".join(parts) + "\n"


def verbs(parent: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parent._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield one
                yield from verbs(one)


def help_of(one: argparse.ArgumentParser) -> str:
    kind = one.formatter_class
    one.formatter_class = lambda prog: kind(prog, width=WIDTH)  # type: ignore[assignment,return-value]
    return one.format_help().rstrip()


def fenced(text: str) -> str:
    return f"```text\n{text}\n```"


def routes() -> str:
    """Every route of the API with its parameters, from the specification."""
    found = specified_app().openapi()
    parts = ["# Routes of the API", "Made from the [specification](../rest.md). Each is answered with JSON."]
    for path, methods in sorted(found["paths"].items()):
        for method, operation in sorted(methods.items()):
            parts += [f"## `{method.upper()} {path}`", escaped(operation.get("description", ""))]
            rows = [_parameter(one) for one in operation.get("parameters", ())]
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                schema = found["components"]["schemas"][name]
                wanted = schema.get("required", ())
                rows += [_field(field, one, field in wanted) for field, one in schema["properties"].items()]
            if rows:
                parts.append("\n".join(["| name | where | what |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _parameter(one: dict[str, Any]) -> str:
    return f"| `{one['name']}` | {one['in']} | {escaped(one.get('description', ''))} |"


def _field(name: str, one: dict[str, Any], wanted: bool) -> str:
    kind = one.get("type") or "/".join(part.get("type", "") for part in one.get("anyOf", ()))
    choice = ", ".join(f"`{value}`" for value in one.get("enum", ()))
    return f"| `{name}` | body | {choice or kind}{'' if wanted else ', may be left out'} |"


def log_formats() -> str:
    """Every known log format with a line of it."""
    parts = [
        "# Log formats",
        "In the order in which they are tried. [Log formats](../formats.md) says how they are chosen.",
    ]
    for form in shipped_formats():
        parts += [f"## {form.name}", fenced(form.example)]
    return "\n\n".join(parts) + "\n"


def metrics() -> str:
    """Every metric that the exporter serves."""
    return "\n".join(
        [
            "# Metrics",
            "",
            "Made from `pipeline/observe/counters.py` and `pipeline/workers/gauges.py`. "
            "[Operations](../operations.md#metrics) says how to read them.",
            "",
            "## Counters and histograms",
            "",
            "Processes count, and push to Redis what is new.",
            "",
            *table(METERS),
            "",
            "## Gauges",
            "",
            "The exporter computes gauges at each scrape.",
            "",
            *table(SHOWN),
            "",
        ]
    )


def table(meters: tuple[Meter, ...]) -> list[str]:
    rows = ["| metric | labels | meaning |", "|---|---|---|"]
    for meter in meters:
        kind = " Histogram." if meter.buckets else ""
        labels = "; ".join(f"`{name}`: {listed(values)}" for name, values in meter.labels.items())
        rows.append(f"| `{meter.name}` | {labels or '-'} | {meter.about}{kind} |")
    return rows


def listed(values: tuple[str, ...]) -> str:
    if not values:
        return "any"
    shown = [f"`{value}`" for value in values]
    return ", ".join(shown) if len(shown) <= 12 else f"{', '.join(shown[:12])} and {len(shown) - 12} more"


def exceptions() -> str:
    """The tree of exceptions, as `pipeline/errors.py` draws it."""
    return f"# Errors\n\nMade from `pipeline/errors.py`.\n\n{fenced(errors.__doc__.strip())}\n"


def plain_text(docstring: str) -> str:
    """A docstring as valid reStructuredText: paragraphs with code spans, indented parts word for word."""
    parts = []
    for block in re.split(r"\n\s*\n", docstring.rstrip()):
        lines = block.strip("\n").split("\n")
        if all(line.startswith("    ") for line in lines):
            parts.append("::\n\n" + "\n".join(lines))
        else:
            parts.append(escaped(" ".join(line.strip() for line in lines)))
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Code spans doubled, and every other character that reStructuredText reads escaped."""
    shown, at = [], 0
    for span in CODE.finditer(text):
        shown += [re.sub(r"([\\*_|:`<>])", r"\\\1", text[at : span.start()]), f"``{span[0].strip('`')}``\\ "]
        at = span.end()
    tail = re.sub(r"([\\*_|:`<>])", r"\\\1", text[at:])
    return re.sub(r"^([-+\d#(])", r"\\\1", "".join([*shown, tail]))
