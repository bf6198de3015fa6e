"""`python -m pipeline.workers.intake`: see server.py."""

from pipeline.workers.exits import exit_code
from pipeline.workers.intake.server import main

if __name__ == "__main__":
    raise SystemExit(exit_code(main))
