"""Grouping accuracy on loghub's 2,000 lines of twelve systems: our templates beside plain Drain3 with its
published masks.

Ours has one mask set for all systems and takes raw lines, so that its header split counts too. Drain3 has
what its authors published for each system (logpai/logparser, logparser/Drain/benchmark.py): masks, likeness,
depth, and the message as the authors of the set cut it out. GA is the share of lines in a group that holds
exactly the lines of one true event (Zhu et al., ICSE-SEIP 2019); FGA the harmonic mean of precision and
recall over groups (Jiang et al., ISSTA 2024)."""

import csv
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any, Final

from drain3 import TemplateMiner
from drain3.masking import MaskingInstruction
from drain3.template_miner_config import TemplateMinerConfig

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import DEPTH, PER_WORKLOAD, Templates
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.schema import raw_frame
from pipeline.settings import Settings
from pipeline.sources import formats


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Settings of Drain for one system."""

    masks: tuple[str, ...]
    likeness: float = 0.5
    depth: int = 4


_IP: Final = r"(\d+\.){3}\d+"
_DOTTED: Final = r"([\w-]+\.){2,}[\w-]+"
PUBLISHED: Final = {
    "Android": Published(
        masks=(r"(/[\w-]+)+", _DOTTED, r"\b(\-?\+?\d+)\b|\b0[Xx][a-fA-F\d]+\b|\b[a-fA-F\d]{4,}\b"),
        likeness=0.2,
        depth=6,
    ),
    "Apache": Published(masks=(_IP,)),
    "BGL": Published(masks=(r"core\.\d+",)),
    "HDFS": Published(masks=(r"blk_-?\d+", r"(\d+\.){3}\d+(:\d+)?")),
    "HPC": Published(masks=(r"=\d+",)),
    "Hadoop": Published(masks=(_IP,)),
    "HealthApp": Published(masks=(), likeness=0.2),
    "Linux": Published(masks=(_IP, r"\d{2}:\d{2}:\d{2}"), likeness=0.39, depth=6),
    "Mac": Published(masks=(_DOTTED,), likeness=0.7, depth=6),
    "OpenSSH": Published(masks=(_IP, _DOTTED), likeness=0.6, depth=5),
    "Windows": Published(masks=(r"0x.*?\s",), likeness=0.7, depth=5),
    "Zookeeper": Published(masks=(r"(/|)(\d+\.){3}\d+(:\d+)?",)),
}


def measure(data: Path) -> dict[str, Any]:
    masks, settings = MaskSet.load(), Settings()
    systems: dict[str, dict[str, float]] = {}
    for name, published in PUBLISHED.items():
        folder = data / "loghub_2k" / name
        with (folder / f"{name}_2k.log_structured.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        raw = (folder / f"{name}_2k.log").read_text(encoding="utf-8", errors="replace").splitlines()
        if len(raw) != len(rows):
            raise ValueError(f"{name} has {len(raw)} lines, but labels for {len(rows)}")
        events = [row["EventId"] for row in rows]
        ga, fga = accuracy(ours(raw, masks, settings), events)
        other_ga, other_fga = accuracy(theirs([row["Content"] for row in rows], published), events)
        systems[name] = {"ga": ga, "fga": fga, "drain3_ga": other_ga, "drain3_fga": other_fga}
    averages = {
        key: round(mean(s[key] for s in systems.values()), 4)
        for key in ("ga", "fga", "drain3_ga", "drain3_fga")
    }
    return averages | {"systems": systems}


def ours(raw: Sequence[str], masks: MaskSet, settings: Settings) -> list[Hashable]:
    """The template id of every raw line, each a record of its own."""
    parsed = formats.parse(raw_frame(raw), formats.detect(raw[:200]), arrived=datetime.now(UTC))
    templates = Templates(
        similarity=settings.drain.similarity,
        depth=DEPTH,
        per_workload=PER_WORKLOAD,
    )
    severe = parsed["level"].is_in(list(ERROR_LEVELS)).fill_null(False)
    found: list[Hashable] = []
    for masked, is_severe in zip(masks.mask(parsed["message"])["masked"], severe, strict=True):
        template, _ = templates.learn(masked, severe=is_severe, workload="bench")
        found.append(template.template_id if template else 0)
    return found


def theirs(messages: Iterable[str], published: Published) -> list[Hashable]:
    """The cluster of every message."""
    config = TemplateMinerConfig()
    config.masking_instructions = [MaskingInstruction(pattern, "*") for pattern in published.masks]
    config.drain_sim_th, config.drain_depth = published.likeness, published.depth
    miner = TemplateMiner(config=config)
    return [miner.add_log_message(message.strip())["cluster_id"] for message in messages]


def accuracy(groups: Sequence[Hashable], events: Sequence[str]) -> tuple[float, float]:
    """(GA, FGA) of a grouping, by line, against the true events."""
    found, true = _lines_by(groups), _lines_by(events)
    right = set(found.values()) & set(true.values())
    share = sum(map(len, right)) / len(events)
    return round(share, 4), round(2 * len(right) / (len(found) + len(true)), 4)


def _lines_by(names: Iterable[Hashable]) -> dict[Hashable, frozenset[int]]:
    lines: dict[Hashable, set[int]] = defaultdict(set)
    for line, name in enumerate(names):
        lines[name].add(line)
    return {name: frozenset(members) for name, members in lines.items()}
