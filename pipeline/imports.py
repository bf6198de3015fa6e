"""The imports of a process without its garbage collector, which would look through all of them many times.

A thousand modules make hundreds of thousands of objects, and none of them is garbage. Measured on Python
3.11 in processor time: `logweir status` took 1.01 s, without collections during the imports 0.92 s, and
without those at the end 0.73 s. `import torch` took 1.84, 1.61 and 1.27 s.
"""

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Imports without a collection. Of two threads at once the one that stopped the collector starts it.

    Where the collector leaves the modules of a process alone (`workers.loops.collect_seldom`), it leaves new
    ones alone, too. With torch a whole collection takes 0.13 s, longer than the network of a batch."""
    collected, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        # The count goes through all frozen objects, so only new modules ask for it.
        if len(sys.modules) > modules and gc.get_freeze_count():
            gc.collect()
            gc.freeze()
        if collected:
            gc.enable()


def install_hint(extra: str) -> str:
    """How the packages of an extra are installed: Logweir is on no package index, so from a clone of it."""
    return f"pip install '.[{extra}]' in a clone of logweir"


def end_uncollected() -> None:
    """At the end of this process the collector looks at nothing, for the system takes all memory back.

    `atexit` runs as ever. No finalizer of an object in a cycle runs; `with` closes what has to be closed."""
    atexit.register(gc.freeze)
