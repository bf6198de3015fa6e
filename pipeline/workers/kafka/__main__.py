"""`python -m pipeline.workers.kafka NAME`: see process.py."""

from pipeline.workers.exits import exit_code
from pipeline.workers.kafka.process import main

if __name__ == "__main__":
    raise SystemExit(exit_code(main))
