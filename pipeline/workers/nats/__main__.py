"""`python -m pipeline.workers.nats NAME`: see process.py."""

from pipeline.workers.exits import exit_code
from pipeline.workers.nats.process import main

if __name__ == "__main__":
    raise SystemExit(exit_code(main))
