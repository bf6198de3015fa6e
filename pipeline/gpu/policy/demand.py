"""The distribution of recent needs, which packing looks ahead by.

Needs are counted in a window. A full window joins the distribution that plans use, where older needs then
count half. So the distribution stays the same for a whole window, and figures computed from it stay valid.
The first windows are short: a new pool learns soon.
"""

from collections import Counter
from typing import Final, Generic, TypeVar

T = TypeVar("T")

FIRST: Final = 32  # needs of the first window; each later one is as long as all before, up to WINDOW
WINDOW: Final = 512
HALVED: Final = 2048  # from so many needs on, those before count half at each new window


class DemandHistory(Generic[T]):
    """Counts of needs by their form. `counts` is the distribution, `window` what has come since."""

    def __init__(self) -> None:
        self.counts: Counter[T] = Counter()
        self.window: Counter[T] = Counter()

    def add(self, form: T) -> bool:
        """Count one need; True when the distribution has changed."""
        self.window[form] += 1
        total = self.counts.total()
        if self.window.total() < max(FIRST, min(total, WINDOW)):
            return False
        if total >= HALVED:
            self.counts = Counter({one: count // 2 for one, count in self.counts.items() if count > 1})
        self.counts += self.window
        self.window = Counter()
        return True
