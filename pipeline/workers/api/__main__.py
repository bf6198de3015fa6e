"""`python -m pipeline.workers.api`: see server.py."""

from pipeline.workers.api.server import main
from pipeline.workers.exits import exit_code

if __name__ == "__main__":
    raise SystemExit(exit_code(main))
