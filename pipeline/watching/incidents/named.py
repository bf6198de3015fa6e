"""The workloads that a text names: "payments POST /charges: connection refused" names `shop/payments`.

A workload is known by the last part of its name. A host with a domain is one before a port. Of several
workloads with that last part, the one that shares most of the writer's own name is meant; where two share as
much, none is. Pure.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from pipeline.watching.named_words import LEAST_CHARS, named_words

MOST: Final = 5  # workloads that one cause names


def by_last_part(workloads: Iterable[str]) -> dict[str, list[str]]:
    """The workloads of each last part, in lower case."""
    found: dict[str, list[str]] = {}
    for name in workloads:
        last = name.rpartition("/")[2].lower()
        if len(last) >= LEAST_CHARS:
            found.setdefault(last, []).append(name)
    return found


def named_in_text(text: str, own: str, known: Mapping[str, list[str]]) -> tuple[str, ...]:
    """The workloads, at most MOST, that a text of workload `own` names; `known`: as of `by_last_part`."""
    if not known:
        return ()
    own_last = own.rpartition("/")[2].lower()
    found = (word.partition(".")[0] if port else word for word, port in named_words(text))
    words = dict.fromkeys(found)
    meant = (_meant(own, known[word]) for word in words if word != own_last and word in known)
    return tuple(sorted(name for name in meant if name is not None)[:MOST])


def _meant(own: str, names: list[str]) -> str | None:
    def shared(name: str) -> int:
        parts = zip(own.split("/"), name.split("/"), strict=False)
        return next((at for at, (a, b) in enumerate(parts) if a != b), 0)

    ordered = sorted(names, key=shared, reverse=True)
    if len(ordered) > 1 and shared(ordered[0]) == shared(ordered[1]):
        return None
    return ordered[0]
