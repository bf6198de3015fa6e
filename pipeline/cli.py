"""The command line: parses, dispatches, and turns every error of ours into one sentence and an exit code.

Exit codes: 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C, 143 by SIGTERM. Nothing heavy is imported before
a command runs, so `--help` is quick.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.commands import extras
from pipeline.commands.gpu import flags as gpu_flags
from pipeline.errors import BadInput, LogweirError

EXAMPLES = """examples:
  logweir run /var/log/syslog                        what matters in this file?
  logweir run today.log --baseline yesterday.log     what is new today?
  logweir run 'logs/*.log.gz' --out findings --report findings.html
  logweir up                                         keep a pipeline running; then, elsewhere:
  tail -F app.log | logweir send - --workload shop/app
"""


class Terminated(BaseException):
    """SIGTERM, or a closed terminal: ends like Ctrl-C, with its own exit code."""


def parser() -> argparse.ArgumentParser:
    """All verbs and flags."""
    top = argparse.ArgumentParser(
        prog="logweir",
        description="Finds the lines that matter in a river of logs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"logweir {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML; see docs/settings.md")
    common.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="of the program itself"
    )
    common.add_argument("--json", action="store_true", help="print facts as JSON on standard output")
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="data of the embedded stack (logweir-data)"
    )

    def verb(name: str, module: str, text: str, **kwargs: Any) -> argparse.ArgumentParser:
        # A run keeps everything below its --out.
        parents = [common] if name == "run" else [common, place]
        made = verbs.add_parser(
            name, parents=parents, help=text, description=text[0].upper() + text[1:] + ".", **kwargs
        )
        made.set_defaults(command=module)
        return made

    run = verb("run", "run.verb", "the whole pipeline on files, then exit: which lines matter, and why")
    run.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="log files; globs, .gz and .zst are fine, - is standard input",
    )
    run.add_argument(
        "--out", type=Path, default=Path("logweir-out"), metavar="DIR", help="where results go (logweir-out)"
    )
    run.add_argument(
        "--baseline",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="logs of good times to learn from; may be given again; default: learn from FILE itself",
    )
    run.add_argument("--workload", metavar="NAME", help="whose logs these are; default: each file's name")
    run.add_argument(
        "--report", type=Path, metavar="HTML", help="where the HTML report goes (DIR/report.html)"
    )
    run.add_argument(
        "--limit", type=_positive, default=20, metavar="N", help="findings shown in the terminal (20)"
    )
    run.add_argument("--time-zone", metavar="ZONE", help="IANA zone of times without offset (UTC)")
    run.add_argument(
        "--masks", type=Path, action="append", metavar="FILE", help="more masks; may be given again"
    )

    up = verb("up", "up", "start the embedded stack and keep it running until Ctrl-C")
    up.set_defaults(action="up")
    verb("status", "status", "what is running, what waits, which models are live, what trains next and why")
    doctor = verb("doctor", "doctor", "what is missing on this machine, and how to get it")
    doctor.set_defaults(action="doctor")
    _running(verb)

    send = verb("send", "send.verb", "send log lines to a running stack")
    send.add_argument("files", nargs="*", metavar="FILE", help="log files, or - for standard input")
    send.add_argument(
        "--opensearch",
        metavar="INDEX",
        help="documents of these indices of OPENSEARCH_URL instead, app-logs-*",
    )
    send.add_argument("--workload", metavar="NAME", help="whose logs these are; default: each file's name")
    send.add_argument(
        "--follow", "-f", action="store_true", help="go on with what is appended, through rotations"
    )
    send.add_argument(
        "--wait",
        action="store_true",
        help="return when everything sent is stored; fail if some of it cannot be",
    )
    send.add_argument(
        "--backfill",
        action=argparse.BooleanOptionalAction,
        help="these lines wait behind fresh ones, or never do; by default those do whose times are older than an hour",
    )
    send.add_argument(
        "--baseline",
        action="store_true",
        help="these lines are known good times: the next training learns from them, nothing judges them",
    )
    send.add_argument("--time-zone", metavar="ZONE", help="IANA zone of times without offset (UTC)")

    watch = verb("watch", "watch", "whose logs get models by themselves")
    watch.add_argument("action", choices=("add", "remove", "list"))
    watch.add_argument(
        "pattern",
        nargs="*",
        metavar="WORKLOAD",
        help="cluster/namespace/deployment, with * and ? as wildcards",
    )

    train = verb(
        "train",
        "train",
        "train a model on what is stored; publish it unless it is worse than the live one",
    )
    train.add_argument(
        "--workload", action="append", metavar="NAME", help="only this one, or a pattern; may be given again"
    )
    train.add_argument("--since", metavar="WHEN", help="only lines of the last 15m, 1h, 7d, or since a time")
    train.add_argument("--until", metavar="WHEN", help="only lines before that")
    train.add_argument(
        "--exclude",
        action="append",
        metavar="WORD",
        help="leave out lines with this word; may be given again",
    )
    train.add_argument("--no-wait", action="store_true", help="ask for it and return")
    train.add_argument("--list", action="store_true", help="show trainings that wait, run or ran")
    train.add_argument(
        "--cancel", nargs="?", const="", metavar="TRAINING", help="stop this one, or the one that runs"
    )

    _mark(verb)
    models = verb("models", "models", "model versions: list them, show one, make another one live")
    models.add_argument("action", choices=("list", "show", "promote", "rollback"))
    models.add_argument("version", nargs="?", help="for show (default: the live one) and promote")
    models.add_argument(
        "--model",
        default="shared",
        metavar="WORKLOAD",
        help="for rollback: a workload with its own model (shared)",
    )
    models.add_argument("--reason", metavar="TEXT", help="for promote and rollback: kept with the version")

    gpu_flags.add(verbs, common, place)
    _stored(verb)
    return top


def _mark(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """The verb for what people say of lines."""
    mark = verb(
        "mark",
        "mark.verb",
        "say that lines are normal or anomalous, whatever a model says; it learns that next time",
    )
    mark.add_argument(
        "pattern",
        nargs="?",
        metavar="PATTERN",
        help="a pattern id (`results --json`), a template as T17, or the text of a line; - reads that from standard input; "
        "T-5 as `incidents ID` shows it is a finding in sessions or rates",
    )
    mark.add_argument("state", nargs="?", choices=("normal", "anomalous"), help="what its lines are")
    mark.add_argument(
        "--for", metavar="SPAN", help="only for the next 90s, 15m, 1h, 7d; default: until revoked"
    )
    mark.add_argument("--workload", metavar="NAME", help="only the lines of this workload")
    mark.add_argument("--why", metavar="TEXT", help="kept with the mark")
    mark.add_argument("--list", action="store_true", help="show the marks, and those that ran out lately")
    mark.add_argument("--revoke", metavar="PATTERN", help="take a mark back: the model's answer counts again")


def _running(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """The verbs about what runs, and its end."""
    health = verb(
        "health", "health", "whether a worker, a role or everything is well; the exit code says it too"
    )
    health.add_argument(
        "what",
        nargs="?",
        default="",
        metavar="NAME|ROLE",
        help="default: all there should be; NAME@ is on this machine",
    )
    health.add_argument(
        "--ready", action="store_true", help="it also has to answer under the live model version"
    )
    drain = verb("drain", "drain", "take nothing in any more, and wait until all that is in is stored")
    drain.set_defaults(action="drain")
    drain.add_argument("--undo", action="store_true", help="take lines in again")
    stop = verb("stop", "drain", "drain the embedded stack, then end it; on a shared Redis only end it")
    stop.set_defaults(action="stop")
    stop.add_argument(
        "--now", action="store_true", help="without draining: the next `logweir up` goes on with it"
    )
    for one in (drain, stop):
        one.add_argument(
            "--timeout", type=_seconds, metavar="S", help="give up waiting after so many seconds"
        )


def _stored(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """The verbs about what is stored, and what could not be."""
    dead = verb("dead", "dead", "batches that could not be processed")
    dead.add_argument("action", choices=("list", "show", "retry", "discard"))
    dead.add_argument("batch", nargs="*", metavar="BATCH", help="batch ids; 'all' for every one")
    dead.add_argument(
        "--limit", type=_positive, metavar="N", help="for list: the newest N batches (100; --json: all)"
    )

    incidents = verb(
        "incidents", "incidents", "what went wrong together: open and past incidents, the newest first"
    )
    incidents.add_argument(
        "incident", nargs="?", metavar="ID", help="one of them, with its causes and samples"
    )
    incidents.add_argument("--open", action="store_true", help="only those that still go on")
    incidents.add_argument(
        "--since", metavar="SPAN", help="only those that went on in the last 90s, 15m, 1h, 7d"
    )

    results = verb("results", "dead", "stored results")
    results.set_defaults(action="results")
    results.add_argument("--since", metavar="SPAN", help="only the last 90s, 15m, 1h, 7d")
    results.add_argument("--anomalous", action="store_true", help="only anomalous lines")
    results.add_argument("--workload", metavar="NAME", help="only this workload")
    results.add_argument("--limit", type=_positive, default=50, metavar="N", help="newest N lines (50)")


def main(argv: Sequence[str] | None = None) -> int:
    """The `logweir` command; returns its exit code."""
    try:
        _open_streams()
        signal.signal(signal.SIGTERM, _terminate)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # ignored under nohup, and then it stays so
            signal.signal(signal.SIGHUP, _terminate)  # the terminal was closed
        args = parser().parse_args(argv)
        extras.check(args.verb)
        if args.command == "send.verb":
            from pipeline.settings import limit_polars

            limit_polars()
        module = importlib.import_module(f"pipeline.commands.{args.command}")
        code = int(module.main(args))
        sys.stdout.flush()  # here, where a closed pipe is expected
        return code
    except BadInput as exc:
        return _say(exc, 2)
    except LogweirError as exc:
        return _say(exc, 1)
    except ModuleNotFoundError as exc:
        remedy = extras.explained(exc)
        if remedy is None:
            raise
        return _say(remedy, 2)
    except KeyboardInterrupt as exc:
        return _say(str(exc) or "stopped", 130)
    except Terminated as exc:
        return _say(str(exc) or "stopped", 143)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing is wrong, and nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as exc:
        if exc.strerror is None:
            raise
        what = f" ({exc.filename})" if exc.filename else ""
        return _say(f"{exc.strerror}{what}; look at that file, its directory and the space there", 1)


def _open_streams() -> None:
    """Streams that were closed before we began (`>&-`) lead nowhere, and no file of ours gets their number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - open until the end
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - open until the end


def _terminate(_number: int, _frame: object) -> None:
    raise Terminated


def _say(what: object, code: int) -> int:
    print(f"logweir: {what}", file=sys.stderr)
    return code


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
