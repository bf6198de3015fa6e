"""Exit codes of worker processes, as those of the command: an error of ours is one sentence, no traceback."""

import sys
from collections.abc import Callable

from pipeline.errors import BadInput, LogweirError
from pipeline.imports import end_uncollected


def exit_code(main: Callable[[list[str]], int]) -> int:
    """Run `main` on the arguments of this process; 2 for what a user has to mend, 1 for our other errors."""
    end_uncollected()
    try:
        return main(sys.argv[1:])
    except LogweirError as exc:
        sys.stderr.write(f"logweir: {exc}\n")
        return 2 if isinstance(exc, BadInput) else 1
