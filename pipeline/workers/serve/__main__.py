"""`python -m pipeline.workers.serve`: see server.py.

Its imports take seconds, in which the supervisor may die."""

from typing import Final

from pipeline.workers.exits import exit_code
from pipeline.workers.tethered import tether_to_supervisor

GRACE_S: Final = 20.0


def main(argv: list[str]) -> int:
    tether_to_supervisor(grace_s=GRACE_S)
    from pipeline.workers.serve import server

    return server.main(argv)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
