"""`logweir intake --explain`: the rule that names the workload of a record, and why others do not apply."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console

from pipeline.commands.common import out, print_json, settings_of
from pipeline.errors import BadInput
from pipeline.sources.protocols.contract import Decoded, Hints
from pipeline.sources.protocols.rules import (
    HINTS,
    HintsOf,
    WorkloadRules,
    check_hint,
    read_rules,
)
from pipeline.units import one_line, plural

STDIN: Final = "-"
SHOWN: Final = 20  # sets of hints
_OF_REQUEST: Final = ("protocol", "key", "peer")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBy:
    """How one set of hints is named. `rule`: its number, 0 for none; `passed`: why others do not apply."""

    hints: Mapping[str, str]
    rule: int
    name: str
    workload: str
    passed: Sequence[str]
    records: int = 1


class _Recorder(WorkloadRules):
    """The rules, which note each set of hints that they are asked about."""

    def __init__(self, rules: WorkloadRules) -> None:
        super().__init__(rules.rules)
        self.needed = tuple(dict.fromkeys((*HINTS, *self.needed)))
        self.found: dict[tuple[str, ...], int] = {}

    def __bool__(self) -> bool:
        return True

    def named(self, of: HintsOf, default: str) -> str:
        values = tuple(map(of, self.needed))
        self.found[values] = self.found.get(values, 0) + 1
        return default

    def sets(self) -> list[NamedBy]:
        return [
            hints_explained(self, dict(zip(self.needed, values, strict=True)), records=records)
            for values, records in self.found.items()
        ]


@dataclass(slots=True)
class _Example:
    """The words of the command line."""

    hints: dict[str, str] = field(default_factory=dict)
    body: bool = False


def main(args: argparse.Namespace) -> int:
    path = args.rules if args.rules is not None else settings_of(args).intake.rules
    rules, example = read_rules(path), _example(args.explain)
    found = _of_body(rules, example.hints) if example.body else [hints_explained(rules, example.hints)]
    if args.json:
        print_json([_facts(one) for one in found])
        return 0
    console = out()
    _say(
        console,
        f"{plural(len(rules.rules), 'rule')} in {path}" if path else "no rule: workload_rules is not set",
    )
    for one in found[:SHOWN]:
        _print(console, one, rules, several=example.body)
    if len(found) > SHOWN:
        _say(console, f"and {plural(len(found) - SHOWN, 'set')} of hints more; --json shows all")
    return 0


def hints_explained(rules: WorkloadRules, hints: Mapping[str, str], *, records: int = 1) -> NamedBy:
    """The name by these rules, else that without rules, which is the hint `workload`."""
    ruling = rules.ruling(lambda hint: hints.get(hint, ""))
    return NamedBy(
        hints={hint: value for hint, value in hints.items() if value},
        rule=ruling.number,
        name=rules.rules[ruling.number - 1].name if ruling.number else "",
        workload=ruling.workload or hints.get("workload", ""),
        passed=ruling.passed,
        records=records,
    )


def _example(words: Sequence[str]) -> _Example:
    example = _Example()
    for word in words:
        hint, is_pair, value = word.partition("=")
        if word == STDIN:
            example.body = True
        elif not is_pair:
            raise BadInput(
                f"{word!r} is no hint with its value; write it as namespace=shop, or - for a request"
            )
        else:
            example.hints[check_hint(hint, f"the example {word!r}")] = value
    return example


def _of_body(rules: WorkloadRules, hints: Mapping[str, str]) -> list[NamedBy]:
    if wrong := [hint for hint in hints if hint not in _OF_REQUEST]:
        raise BadInput(f"{wrong[0]} comes from the request on standard input; leave it out, or leave - out")
    recorder = _Recorder(rules)
    given = Hints(
        protocol=hints.get("protocol", ""),
        key=hints.get("key", ""),
        peer=hints.get("peer", "127.0.0.1"),
        rules=recorder,
    )
    _decoded(sys.stdin.buffer.read(), given)
    if not recorder.found:
        raise BadInput("the request on standard input holds no record; give its body as its sender sends it")
    return recorder.sets()


def _decoded(body: bytes, hints: Hints) -> Decoded:
    """A body as its listener decodes it. Raises BadInput."""
    is_json = body.lstrip()[:1] in (b"{", b"[")
    typed = Hints(
        protocol=hints.protocol,
        key=hints.key,
        peer=hints.peer,
        rules=hints.rules,
        content_type="application/json" if is_json else "",
    )
    # Each decoder needs packages of its own.
    match hints.protocol:
        case "otlp":
            from pipeline.sources.protocols import otlp, otlp_json

            return (otlp_json.decode_json if is_json else otlp.decode_protobuf)(body, typed)
        case "bulk":
            from pipeline.sources.protocols import bulk

            return bulk.decode_bulk(body, typed)
        case "loki":
            from pipeline.sources.protocols import loki

            return loki.decode_push(body, typed)
        case "hec":
            from pipeline.sources.protocols import hec

            return hec.decode_events(body, typed)
        case "lines":
            from pipeline.sources.protocols import lines

            return lines.decode_posted(body, typed)
        case "journal":
            from pipeline.sources.protocols import journal

            return journal.decode_journal(body, typed)
        case "syslog" | "relp":
            from pipeline.sources.protocols.streams.syslog import syslog_records

            return syslog_records([(line, hints.peer) for line in body.splitlines() if line], typed)
        case "forward":
            return _forwarded(body, typed)
    shown = f"the protocol {hints.protocol!r} is unknown" if hints.protocol else "the protocol is missing"
    raise BadInput(f"{shown}; beside - write protocol= and one of {HINTS['protocol'].partition(': ')[2]}")


def _forwarded(body: bytes, hints: Hints) -> Decoded:
    from pipeline.sources.protocols.streams import forward

    found = map(forward.forward_message, forward.ForwardFraming().feed(body))
    messages = [message for message in found if message is not None]
    return forward.forward_records([(one.tag, forward.forward_lines(one)) for one in messages], hints)


def _print(console: Console, one: NamedBy, rules: WorkloadRules, *, several: bool) -> None:
    hints = ", ".join(f"{hint}={value}" for hint, value in one.hints.items()) or "no hints"
    _say(console, f"{hints}: {plural(one.records, 'record')}" if several else hints)
    for number, why in enumerate(one.passed, start=1):
        _say(console, f"  {_title(rules, number)} does not apply: {why}")
    if one.rule:
        _say(console, f"  {_title(rules, one.rule)} names the workload {one.workload}")
    elif one.workload:
        _say(console, f"  no rule applies, so the workload is {one.workload}")
    else:
        _say(console, "  no rule applies, so the name that the protocol gives stays")


def _title(rules: WorkloadRules, number: int) -> str:
    name = rules.rules[number - 1].name
    return f"rule {number}" if name == str(number) else f"rule {number} ({name})"


def _say(console: Console, text: str) -> None:
    console.print(one_line(text), markup=False, soft_wrap=True)


def _facts(one: NamedBy) -> dict[str, Any]:
    return {
        "hints": one.hints,
        "rule": one.rule or None,
        "name": one.name or None,
        "workload": one.workload or None,
        "passed": list(one.passed),
        "records": one.records,
    }
