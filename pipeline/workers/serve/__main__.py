"""`python -m pipeline.workers.serve`: see server.py."""

from pipeline.workers.exits import exit_code
from pipeline.workers.serve.server import main

if __name__ == "__main__":
    raise SystemExit(exit_code(main))
