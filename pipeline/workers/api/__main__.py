"""`python -m pipeline.workers.api`: see server.py.

Its imports take seconds, in which the supervisor may die."""

from typing import Final

from pipeline.workers.exits import exit_code
from pipeline.workers.tethered import tether_to_supervisor

GRACE_S: Final = 10.0


def main(argv: list[str]) -> int:
    tether_to_supervisor(grace_s=GRACE_S)
    from pipeline.workers.api import server

    return server.main(argv)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
