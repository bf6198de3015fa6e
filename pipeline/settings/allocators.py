"""How the allocators of a process keep freed memory for its next batch."""

import ctypes
import os
from typing import Final

# Numbers of malloc.h in glibc.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_MIB: Final = 1 << 20
_GLIBC: Final = {
    _MMAP_THRESHOLD: 32 * _MIB,  # the most that glibc takes: larger blocks go back at once
    _TRIM_THRESHOLD: 64 * _MIB,  # free memory at the end of the heap that stays
    _TOP_PAD: 8 * _MIB,
}
# jemalloc is the allocator of Polars, which reads this when it is loaded.
_POLARS: Final = "_RJEM_MALLOC_CONF"
_KEPT_MS: Final = 2_000  # Batches come many times as often under load.
# The Redis of the wheel uses glibc's malloc, which keeps what a full queue took. Payloads above this size are
# mapped separately, so that they go back to the system when they are done.
_GIVEN_BACK: Final = {"MALLOC_MMAP_THRESHOLD_": "131072"}


def giving_back() -> dict[str, str]:
    """The environment of a child process that gives the memory of large blocks back."""
    return os.environ | _GIVEN_BACK


def keep_freed_memory() -> None:
    """Lets this process keep freed memory, and Polars in it for some seconds unless _RJEM_MALLOC_CONF is set.

    A batch frees the columns that the next one takes again. Asking the kernel for them anew took a twentieth
    of the processor time in a virtual machine (docs/performance.md). Without effect on Polars once it is
    imported, and on other libraries of C than glibc.
    """
    if not os.environ.get(_POLARS):
        os.environ[_POLARS] = f"dirty_decay_ms:{_KEPT_MS},muzzy_decay_ms:-1"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _GLIBC.items():
            mallopt(parameter, value)
