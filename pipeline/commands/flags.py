"""The flags of each verb, one function a verb; `pipeline/cli.py` lists the verbs.

The module imports nothing heavy, because every command line builds all flags.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from pipeline.commands.parsing import Parser
from pipeline.records.levels import LEVELS


def common() -> Parser:
    """The flags of every verb."""
    flags = Parser(add_help=False)
    flags.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML; see docs/settings.md")
    flags.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="of the program itself"
    )
    flags.add_argument("--json", action="store_true", help="print facts as JSON on standard output")
    return flags


def data_dir() -> Parser:
    """The flag of every verb except `run`, which keeps its data below --out."""
    flags = Parser(add_help=False)
    flags.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="data of the embedded stack (logweir-data)"
    )
    return flags


def run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="log files, folders, globs, and tar or zip archives, packed or not; - is standard input",
    )
    _filters(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("logweir-out"), metavar="DIR", help="where results go (logweir-out)"
    )
    parser.add_argument(
        "--baseline",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="logs of good times to learn from; may be given again; default: learn from FILE itself",
    )
    parser.add_argument(
        "--normal",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="what is no finding: a template or a line in each row; may be given again",
    )
    parser.add_argument(
        "--workload",
        metavar="NAME",
        help="whose logs these are; default: each file's name, its folder's for more than 1,000 names",
    )
    parser.add_argument(
        "--report", type=Path, metavar="HTML", help="where the HTML report goes (DIR/report.html)"
    )
    parser.add_argument(
        "--limit",
        type=_positive,
        default=20,
        metavar="N",
        help="findings shown in the terminal (20), at most three of an incident",
    )
    parser.add_argument("--all", action="store_true", help="show every finding in the terminal")
    parser.add_argument(
        "--context",
        type=_natural,
        default=0,
        metavar="N",
        help="also the N lines before and after the first sample of each finding (0)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the findings as CSV as well")
    parser.add_argument(
        "--fail-on",
        choices=("fatal", "error", "any"),
        help="exit with 3 for a finding that is fatal or critical, that is error-like, or for any finding",
    )
    _time_zone(parser)
    _declared(parser)
    parser.add_argument(
        "--masks", type=Path, action="append", metavar="FILE", help="more masks; may be given again"
    )


def _filters(parser: argparse.ArgumentParser) -> None:
    for flag, help_text in (("--include", "only these files"), ("--exclude", "not these files and folders")):
        parser.add_argument(
            flag,
            action="append",
            default=[],
            metavar="GLOB",
            help=f"of what folders and globs bring, {help_text}; may be given again",
        )


def health(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        default="",
        metavar="NAME|ROLE",
        help="default: all there should be; NAME@ is on this machine",
    )
    parser.add_argument(
        "--ready", action="store_true", help="it also has to answer under the live model version"
    )


def drain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--undo", action="store_true", help="take lines in again")
    _timeout(parser)


def stop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--now", action="store_true", help="without draining: the next `logweir up` goes on with it"
    )
    _timeout(parser)


def send(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="log files, folders, globs, and tar or zip archives, packed or not; - is standard input",
    )
    _filters(parser)
    parser.add_argument(
        "--opensearch",
        metavar="INDEX",
        help="documents of these indices of OPENSEARCH_URL instead, app-logs-*",
    )
    parser.add_argument("--workload", metavar="NAME", help="whose logs these are; default: each file's name")
    parser.add_argument(
        "--follow", "-f", action="store_true", help="go on with what is appended, through rotations"
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="return when everything sent is stored; fail if some of it cannot be",
    )
    parser.add_argument(
        "--backfill",
        action=argparse.BooleanOptionalAction,
        help="these lines wait behind fresh ones, or never do; by default those do whose times are older "
        "than an hour",
    )
    parser.add_argument(
        "--baseline",
        action="store_true",
        help="these lines are known good times: the next training learns from them, nothing judges them",
    )
    _time_zone(parser)
    _declared(parser)


def backfill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "place",
        nargs="?",
        metavar="DIR|s3://BUCKET/PREFIX",
        help="log objects, packed or not; every machine with readers must reach it by this name",
    )
    _filters(parser)
    parser.add_argument(
        "--since",
        metavar="WHEN",
        help="only objects of the last 15m, 1h, 7d, or since a time: by the date in their name, else by "
        "their time of change",
    )
    parser.add_argument("--until", metavar="WHEN", help="only objects before that")
    parser.add_argument(
        "--parallel", type=_positive, default=4, metavar="N", help="readers at a time, over all machines (4)"
    )
    parser.add_argument(
        "--workload", metavar="NAME", help="whose logs these are; default: each object's name"
    )
    parser.add_argument("--detach", action="store_true", help="plan it, call the readers and return")
    parser.add_argument("--list", action="store_true", help="show backfills, and how far they are")
    parser.add_argument("--cancel", metavar="NAME", help="end this one; the same command goes on with it")
    _time_zone(parser)
    _declared(parser)


def watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "remove", "list"))
    parser.add_argument(
        "pattern",
        nargs="*",
        metavar="WORKLOAD",
        help="cluster/namespace/deployment, with * and ? as wildcards",
    )
    _nested(parser)


def _nested(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workloads",
        type=Path,
        metavar="FILE",
        help="those of {cluster: {namespace: [deployment]}}, Opni's JSON; - is standard input",
    )


def train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", action="append", metavar="NAME", help="only this one, or a pattern; may be given again"
    )
    _nested(parser)
    parser.add_argument("--since", metavar="WHEN", help="only lines of the last 15m, 1h, 7d, or since a time")
    parser.add_argument("--until", metavar="WHEN", help="only lines before that")
    parser.add_argument(
        "--opensearch", metavar="INDEX", help="learn from log documents of OpenSearch: a name, or logs-*"
    )
    parser.add_argument(
        "--query", type=Path, metavar="FILE", help="only documents that this clause selects, as JSON"
    )
    parser.add_argument(
        "--level-not", metavar="LEVELS", help="no documents of these levels, such as error,fatal"
    )
    parser.add_argument(
        "--exclude",
        action="append",
        metavar="WORD",
        help="leave out lines with this word; may be given again",
    )
    parser.add_argument("--no-wait", action="store_true", help="ask for it and return")
    parser.add_argument("--list", action="store_true", help="show trainings that wait, run or ran")
    # False is "the one that runs": an empty name is refused, as of a shell variable without a value.
    parser.add_argument(
        "--cancel", nargs="?", const=False, metavar="TRAINING", help="stop this one, or the one that runs"
    )


def mark(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pattern",
        nargs="?",
        metavar="PATTERN",
        help="a pattern id (`results --json`), a template as T17, or the text of a line; - reads that from "
        "standard input; T-5 as `incidents ID` shows it is a finding in sessions or rates",
    )
    parser.add_argument("state", nargs="?", choices=("normal", "anomalous"), help="what its lines are")
    parser.add_argument(
        "--for", metavar="SPAN", help="only for the next 90s, 15m, 1h, 7d; default: until revoked"
    )
    parser.add_argument("--workload", metavar="NAME", help="only the lines of this workload")
    parser.add_argument("--why", metavar="TEXT", help="kept with the mark")
    parser.add_argument("--list", action="store_true", help="show the marks, and those that ran out lately")
    parser.add_argument(
        "--revoke", metavar="PATTERN", help="take a mark back: the model's answer counts again"
    )


def silence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pattern", nargs="?", metavar="WORKLOAD", help="whose incidents; * and ? as in `logweir watch`"
    )
    parser.add_argument("--for", metavar="SPAN", help="15m, 2h, 7d; at most 90d")
    parser.add_argument("--why", metavar="TEXT", help="the reason, for others")
    parser.add_argument("--template", metavar="T17", help="only causes of this template or finding")
    parser.add_argument(
        "--service", metavar="NAME", help="only workloads whose last part is this; * and ? as above"
    )
    parser.add_argument("--list", action="store_true", help="show the silences, and those that ended lately")
    parser.add_argument("--end", metavar="ID", help="end one now")


def models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "show", "promote", "rollback", "export"))
    parser.add_argument("version", nargs="?", help="for show and export (default: the live one), and promote")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="for export: a new folder with the version, its templates and masks, for `score_frame`",
    )
    parser.add_argument(
        "--model",
        default="shared",
        metavar="WORKLOAD",
        help="for rollback: a workload with its own model (shared)",
    )
    parser.add_argument("--reason", metavar="TEXT", help="for promote and rollback: kept with the version")


def intake(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--snippets",
        choices=(
            "opentelemetry",
            "fluent-bit",
            "vector",
            "rsyslog",
            "loki",
            "curl",
            "filebeat",
            "logstash",
            "syslog-ng",
            "docker",
            "python",
            "node",
        ),
        metavar="NAME",
        help="the configuration of a shipper: opentelemetry, fluent-bit, vector, rsyslog, loki, curl, filebeat, "
        "logstash, syslog-ng, docker, python or node",
    )
    parser.add_argument(
        "--explain",
        nargs="+",
        action="extend",
        default=[],
        metavar="HINT=VALUE",
        help="the rule that names the workload of a record with these hints; "
        "with - and protocol=NAME, of the records of a request on standard input",
    )
    parser.add_argument(
        "--rules", type=Path, metavar="FILE", help="for --explain: this file, not that of workload_rules"
    )


def keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "list", "revoke"))
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the key, such as that of its sender")
    parser.add_argument(
        "--workload", metavar="NAME", help="for add: all lines that it sends belong to this one"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="for add: it may only send for, or see, these workloads (* and ? as in `logweir watch`); may be "
        "repeated",
    )
    parser.add_argument(
        "--scope",
        action="append",
        default=[],
        choices=("send", "read", "mark", "operate", "admin", "infer", "gpu"),
        help="for add: send lines (the default), or ask the API: read, mark, operate, admin; each of these "
        "brings those before it; infer, gpu: ask the served models, the GPU leases of a tenant; may be repeated",
    )
    parser.add_argument(
        "--tenant",
        metavar="NAME",
        default="",
        help="for add with infer or gpu: whose models and leases (logweir)",
    )
    parser.add_argument("--for", metavar="SPAN", help="for add: only for the next 12h, 90d")


def store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("show", "adopt"), nargs="?", default="show",
        help="adopt: the pipeline works with the store of these settings from now on",
    )  # fmt: skip


def dead(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "show", "retry", "discard"))
    parser.add_argument("batch", nargs="*", metavar="BATCH", help="batch ids; 'all' for every one")
    parser.add_argument(
        "--limit", type=_positive, metavar="N", help="for list: the newest N batches (100; --json: all)"
    )


def incidents(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("incident", nargs="?", metavar="ID", help="one of them, with its causes and samples")
    parser.add_argument("--open", action="store_true", help="only those that still go on")
    parser.add_argument(
        "--since", metavar="SPAN", help="only those that went on in the last 90s, 15m, 1h, 7d"
    )
    parser.add_argument(
        "--note", metavar="TEXT", help="write a note on this incident, for all who look at it"
    )


def events(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--follow", action="store_true", help="go on until Ctrl-C; with --json an event in each row"
    )
    parser.add_argument(
        "--since",
        metavar="ID|WHEN",
        help="those behind this event, or of the last 15m, 1h, 7d, or since a time",
    )
    parser.add_argument(
        "--type", action="append", metavar="TYPE", help="only model.live, or model.*; may be given again"
    )
    parser.add_argument(
        "--limit", type=_positive, metavar="N", help="the first N; without --since the newest N (50)"
    )


def results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("show", "files"),
        default="show",
        help="files: the Parquet files that hold the results, for DuckDB, Polars, pandas or Spark",
    )
    _choosing(parser)
    parser.add_argument(
        "--context", type=_positive, metavar="N", help="also the N lines before and after each, of its source"
    )
    parser.add_argument("--limit", type=_positive, default=50, metavar="N", help="newest N lines (50)")
    parser.add_argument(
        "--news",
        action="store_true",
        help="calm lines never said before, the strangest of each day (--since 24h)",
    )


def export(parser: argparse.ArgumentParser) -> None:
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--csv", type=Path, metavar="FILE", help="write this CSV file")
    target.add_argument("--parquet", type=Path, metavar="FILE", help="write this Parquet file")
    target.add_argument(
        "--delta", type=Path, metavar="DIR", help="write this Delta table (needs the extra `delta`)"
    )
    _choosing(parser)
    parser.set_defaults(limit=0)


def _choosing(parser: argparse.ArgumentParser) -> None:
    """Flags that choose stored lines."""
    parser.add_argument(
        "--since",
        metavar="WHEN",
        help="only the last 90s, 15m, 1h, 7d, or since a time such as 2026-11-20T10:00",
    )
    _until(parser)
    parser.add_argument("--anomalous", action="store_true", help="only anomalous lines")
    _chosen_workloads(parser)
    parser.add_argument("--level", choices=LEVELS, help="only lines of this level or a graver one")
    parser.add_argument("--text", metavar="TEXT", help="only lines with this text, in upper or lower case")
    parser.add_argument("--template", metavar="T17", help="only lines of this template")


def _until(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--until", metavar="WHEN", help="only before that; written as --since")


def _chosen_workloads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", metavar="PATTERN", help="only these workloads; * and ? as in `logweir watch`"
    )


def patterns(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--since", metavar="WHEN", default="24h", help="the last 1h, 24h, 7d, or since a time (24h)"
    )
    _until(parser)
    parser.add_argument(
        "--against",
        metavar="WHEN",
        help="compare with a span of the same length that begins then, 7d ago say (default: the span before)",
    )
    _chosen_workloads(parser)
    parser.add_argument("--template", metavar="T17", help="only this pattern, in each workload")
    parser.add_argument(
        "--values", action="store_true", help="the values of its variables in its newest 500 lines"
    )
    parser.add_argument("--anomalous", action="store_true", help="only patterns with anomalous lines")
    parser.add_argument(
        "--order",
        choices=("count", "change", "new", "less"),
        default="count",
        help="what comes first (count): the frequent, what became more, what is new, what became less",
    )
    parser.add_argument("--limit", type=_positive, default=30, metavar="N", help="the first N patterns (30)")


def rates(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--since", metavar="WHEN", default="24h", help="the last 1h, 24h, 7d, or since a time (24h)"
    )
    _until(parser)
    _chosen_workloads(parser)
    parser.add_argument(
        "--buckets",
        type=_up_to(500),
        default=24,
        metavar="N",
        help="so many equal parts of the span, at most 500 (24)",
    )


def comparison(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", nargs="?", default="1h", metavar="SPAN", help="1h, 2h..1h, or TIME..TIME (1h)")
    parser.add_argument(
        "b", nargs="?", metavar="SPAN", help="compared with this one (default: the same span before)"
    )
    _chosen_workloads(parser)
    parser.add_argument(
        "--other", metavar="PATTERN", help="the workloads of the second span, where they are others"
    )
    parser.add_argument("--kind", choices=("new", "gone", "more", "fewer"), help="only these differences")
    parser.add_argument(
        "--limit",
        type=_up_to(1_000),
        default=50,
        metavar="N",
        help="the first N differences, at most 1,000 (50)",
    )


def sessions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "session", nargs="?", metavar="KEY", help="the records of this session, trace or request instead"
    )
    parser.add_argument(
        "--since", metavar="WHEN", default="7d", help="the last 1h, 24h, 7d, or since a time (7d)"
    )
    _until(parser)
    parser.add_argument(
        "--limit",
        type=_up_to(1_000),
        metavar="N",
        help="the first N findings (100), or the newest N records (500); at most 1,000",
    )


def units(parser: argparse.ArgumentParser) -> None:
    from pipeline.records.unit_query import UNIT_COLUMNS

    parser.add_argument(
        "--by", choices=sorted(UNIT_COLUMNS), default="host", help="what a unit is (host); pod: as host"
    )
    parser.add_argument(
        "--since", metavar="WHEN", default="1h", help="the last 15m, 1h, or since a time (1h)"
    )
    _until(parser)
    parser.add_argument(
        "--normal",
        metavar="WHEN",
        help="normal is what was from then to --since (default: six times as long a span before it)",
    )
    _chosen_workloads(parser)
    parser.add_argument("--limit", type=_positive, default=20, metavar="N", help="the first N units (20)")


def formats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="log files to recognise; default: list the known formats"
    )
    parser.add_argument(
        "--check",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="say what is wrong with the declarations in this file; without FILE, with those of Logweir",
    )
    _time_zone(parser)
    _declared(parser)


def _declared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--formats",
        type=Path,
        action="append",
        metavar="FILE",
        help="formats of your own; may be given again",
    )
    parser.add_argument("--format", metavar="NAME", help="read every line as this format")
    parser.add_argument(
        "--time",
        metavar="FORM",
        help="the time at the beginning of a line, such as '%%d.%%m.%%Y %%H:%%M:%%S'",
    )


def _time_zone(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--time-zone", metavar="ZONE", help="IANA zone of times without offset (UTC)")


def _timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="give up waiting after so many seconds")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _natural(text: str) -> int:
    if not text.isdecimal() or int(text) > 1_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number up to 1,000")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _up_to(most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most:,}")
        return int(text)

    return number
