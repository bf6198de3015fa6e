"""The command line: parses, dispatches, and turns every error of ours into one sentence and an exit code.

Exit codes: 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C, 143 by SIGTERM. Nothing heavy is imported
before a command runs, so `--help` is quick."""

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from pipeline import __version__
from pipeline.commands import extras, flags
from pipeline.commands.gpu import flags as gpu_flags
from pipeline.commands.parsing import Parser
from pipeline.errors import BadInput, LogweirError
from pipeline.imports import end_uncollected, uncollected
from pipeline.units import one_line
from pipeline.upkeep import start_timer
from pipeline.workers.exits import ReaderLeft, leave

EXAMPLES = """examples:
  logweir run /var/log/syslog                        what matters in this file?
  logweir run today.log --baseline yesterday.log     what is new today?
  logweir run 'logs/*.log.gz' --out findings --report findings.html
  logweir up                                         keep a pipeline running; then, elsewhere:
  tail -F app.log | logweir send - --workload shop/app
"""


AGAIN_S: Final = 0.05


class Terminated(BaseException):
    """SIGTERM, or a closed terminal: ends like Ctrl-C, with its own exit code."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb, the module below pipeline.commands whose `main(args)` runs it, its flags and its help."""

    name: str
    module: str
    flags: Callable[[argparse.ArgumentParser], None] | None  # None: none of its own
    help: str


# Verbs that read through an API (--url); some of their actions change things, which they refuse.
REMOTE: Final = frozenset(
    (
        "status", "results", "patterns", "units", "incidents", "models", "train", "watch", "mark", "silence", "dead", "senders",
        "gpu", "events", "health", "keys", "backfill", "compare", "sessions", "rates", "export",
    )
)  # fmt: skip
# The other verbs, and why none of them asks an API.
ONLY_HERE: Final = {
    "run": "it reads files of this machine, and keeps its results here",
    "up": "it starts processes on this machine",
    "console": "its link opens on the machine of the pipeline alone; open the URL, and sign in with a key there",
    "doctor": "it looks at this machine",
    "formats": "it reads files of this machine",
    "drain": "it changes the pipeline; run it on the machine itself",
    "stop": "it ends processes of a machine; run it there",
    "send": "it sends lines, with a key of the intake; `logweir intake` names the address",
    "intake": "it names addresses of its own machine; the page Send of the console shows them elsewhere",
    "store": "it compares the store of its own machine with that of the pipeline; `logweir status` counts results",
}
GPU: Final = Verb("gpu", "gpu.verbs", None, "")  # its flags add it
# In the order of `logweir --help`.
VERBS: Final = (
    Verb("run", "run.verb", flags.run, "the whole pipeline on files, then exit: which lines matter, and why"),
    Verb("up", "up", None, "start the embedded stack and keep it running until Ctrl-C"),
    Verb(
        "status",
        "status",
        None,
        "what is running, what waits, which models are live, what trains next and why",
    ),
    Verb("console", "console", None, "a link that opens the console in a browser of this machine, good once"),
    Verb("doctor", "doctor", None, "what is missing on this machine, and how to get it"),
    Verb("formats", "formats", flags.formats, "the known log formats, or which of them a file has"),
    Verb(
        "health",
        "health",
        flags.health,
        "whether a worker, a role or everything is well; the exit code says it too",
    ),
    Verb("drain", "drain", flags.drain, "take nothing in any more, and wait until all that is in is stored"),
    Verb("stop", "drain", flags.stop, "drain the embedded stack, then end it; on a shared Redis only end it"),
    Verb("send", "send.verb", flags.send, "send log lines to a running stack"),
    Verb(
        "backfill",
        "backfill.verb",
        flags.backfill,
        "read an archive of logs in a bucket or folder, by readers of all machines, each line once",
    ),
    Verb("intake", "intake.verb", flags.intake, "where shippers send lines, and how each of them does"),
    Verb("keys", "intake.keys", flags.keys, "who may send to the intake, and who may ask the API"),
    Verb(
        "senders",
        "intake.senders",
        None,
        "who sends, how much, who has gone silent, and how far Kafka and NATS are read",
    ),
    Verb("watch", "watch", flags.watch, "whose logs get models by themselves"),
    Verb(
        "train",
        "train",
        flags.train,
        "train a model on what is stored; publish it unless it is worse than the live one",
    ),
    Verb(
        "mark",
        "mark.verb",
        flags.mark,
        "say that lines are normal or anomalous, whatever a model says; it learns that next time",
    ),
    Verb(
        "silence",
        "mark.silence",
        flags.silence,
        "show incidents of a workload apart until a time; lines are scored and stored as before",
    ),
    Verb(
        "models",
        "models",
        flags.models,
        "model versions: list them, show one, make another one live, export one",
    ),
    Verb("store", "store", flags.store, "what the machines of a pipeline share, and how much lies there"),
    GPU,
    Verb("dead", "dead", flags.dead, "batches that could not be processed"),
    Verb(
        "incidents",
        "incidents",
        flags.incidents,
        "what went wrong together: open and past incidents, the newest first",
    ),
    Verb(
        "events",
        "events.verb",
        flags.events,
        "what has happened: models, trainings, leases of GPUs, incidents; for other programs to follow",
    ),
    Verb("results", "results", flags.results, "stored results"),
    Verb("export", "export", flags.export, "stored results as CSV, Parquet or a Delta table"),
    Verb("patterns", "patterns", flags.patterns, "what is logged how often, what changed, and since when"),
    Verb("rates", "stored.rates", flags.rates, "how many lines each workload wrote, over time"),
    Verb("compare", "stored.compare", flags.comparison, "what differs between two spans or two workloads"),
    Verb(
        "sessions",
        "stored.sessions",
        flags.sessions,
        "sessions that left the course of the others; the records of one session or trace",
    ),
    Verb("units", "units.verb", flags.units, "which host, pod, service or session is unusual, and why"),
)


def parser() -> argparse.ArgumentParser:
    """All verbs and flags."""
    top = Parser(
        prog="logweir",
        description="Finds the lines that matter in a river of logs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"logweir {__version__}")
    top.add_argument(
        "--url", metavar="URL", help="ask the pipeline behind this API instead: http://host:4380"
    )
    top.add_argument(
        "--key", metavar="KEY|@FILE", help="of that API; a key on a command line is seen by others here"
    )
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    common, data_dir = flags.common(), flags.data_dir()

    for verb in VERBS:
        if verb is GPU:
            gpu_flags.add(verbs, common, data_dir)
            continue
        added = verbs.add_parser(
            verb.name,
            parents=[common] if verb.name == "run" else [common, data_dir],
            help=verb.help,
            description=verb.help[0].upper() + verb.help[1:] + ".",
        )
        added.set_defaults(command=verb.module)
        if verb.flags is not None:
            verb.flags(added)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """The `logweir` command; returns its exit code. Without `argv` it is that of this process."""
    code = _main(argv)
    if argv is None:
        leave(code)
    return code


def _main(argv: Sequence[str] | None) -> int:
    verb = ""
    try:
        _prepare(alone=argv is None)
        args = parser().parse_args(argv)
        verb = args.verb
        if args.url is not None:
            if args.verb not in REMOTE:
                raise BadInput(
                    f"`logweir {args.verb}` works on the machine itself: {ONLY_HERE[args.verb]}; leave out --url"
                )
        elif args.key is not None:
            raise BadInput("--key is of an API; name the API with --url, or leave out --key")
        else:
            extras.check(args.verb)
        if args.command in ("send.verb", "backfill.verb"):
            from pipeline.settings import limit_polars
            from pipeline.settings.allocators import keep_freed_memory

            limit_polars()
            keep_freed_memory()
        with uncollected():
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
        elsewhere = "; without them --url asks a pipeline elsewhere" if verb in REMOTE else ""
        return _say(f"{remedy}{elsewhere}", 2)
    except KeyboardInterrupt as exc:
        return _say(str(exc) or "stopped", 130)
    except Terminated as exc:
        return _say(str(exc) or "stopped", 143)
    except BrokenPipeError as exc:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exc.code if isinstance(exc, ReaderLeft) else 0
    except OSError as exc:
        if exc.strerror is None:
            raise
        return _say(_os_error(exc), 1)


def _os_error(exc: OSError) -> str:
    """What the system refused; without a file, at which step of ours, because nothing else would say it."""
    if exc.filename:
        return f"{exc.strerror} ({exc.filename}); look at that file, its directory and the space there"
    steps = traceback.extract_tb(exc.__traceback__)
    ours = [step for step in steps if Path(step.filename).is_relative_to(Path(__file__).parent)]
    step = ours[-1]
    place = Path(step.filename).relative_to(Path(__file__).parent.parent)
    return (
        f"{exc.strerror} in {step.name} ({place}:{step.lineno}); the system names no file, so look at the limits, "
        "addresses and file systems of this machine, and report this sentence if they are in order"
    )


def _prepare(*, alone: bool) -> None:
    """Streams, signals, and the end of a process that does nothing but this."""
    if alone:
        end_uncollected()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored, too
            signal.signal(signal.SIGINT, _terminate)
    _open_streams()
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # ignored under nohup, and then it stays so
        signal.signal(signal.SIGHUP, _terminate)  # the terminal was closed


def _open_streams() -> None:
    """Opens /dev/null for each standard stream that is closed (`>&-`), so that no file gets its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - open until the end
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - open until the end


def _terminate(number: int, frame: FrameType | None) -> None:
    if frame is not None and frame.f_code.co_name == "__del__":
        # Python prints and drops what a destructor raises, so the signal is sent again after it.
        start_timer(AGAIN_S, "signal-again", os.kill, os.getpid(), number)
        return
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _say(message: object, code: int) -> int:
    print(f"logweir: {one_line(message)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
