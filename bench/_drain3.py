"""Drain3 as its users have it, with the very masks of ours: Rust patterns as Python's `re` writes them."""

import re
from collections.abc import Callable
from typing import Final

from drain3 import TemplateMiner
from drain3.masking import AbstractMaskingInstruction
from drain3.template_miner_config import TemplateMinerConfig

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.masking.passes import HIDDEN, SHOWN
from pipeline.drain.templates import DEPTH
from pipeline.settings import Settings

# Where the two dialects differ in what our masks use; anything else is written alike in both.
_WORDS: Final = (
    (r"(?-u:\b{start-half})", r"(?<![0-9A-Za-z_])"),
    (r"(?-u:\b)", r"(?a:\b)"),
)
_CASELESS: Final = "(?i)"
_GROUP: Final = re.compile(r"\$\{(\d+)\}")
_HIDE: Final = str.maketrans(HIDDEN)
_SHOW: Final = re.compile("|".join(SHOWN))


class Substitution(AbstractMaskingInstruction):  # type: ignore[misc] # drain3 publishes no types
    """One of our passes as a masking instruction: what it puts there may be more than a name."""

    def __init__(self, pattern: str, put: "str | Callable[[re.Match[str]], str]") -> None:
        super().__init__("")
        self.regex = re.compile(pattern)
        self.put = put

    def mask(self, content: str, mask_prefix: str, mask_suffix: str) -> str:  # noqa: ARG002 - the tokens have theirs
        return self.regex.sub(self.put, content)


def in_python(pattern: str) -> str:
    """A pattern of ours for `re`. Flags in front of an alternative count for that alternative alone, as in
    Rust."""
    for rust, python in _WORDS:
        pattern = pattern.replace(rust, python)
    while _CASELESS in pattern:
        start = pattern.index(_CASELESS)
        end = _closing(pattern, start)
        pattern = f"{pattern[:start]}(?i:{pattern[start + len(_CASELESS) : end]}){pattern[end:]}"
    return pattern


def _closing(pattern: str, start: int) -> int:
    """Where the group ends that holds `start`; the end of the pattern where none does."""
    depth, at, in_class = 0, start + len(_CASELESS), False
    while at < len(pattern):
        c = pattern[at]
        if c == "\\":
            at += 1
        elif in_class:
            in_class = c != "]"
        elif c == "[":
            in_class = True
        elif c == "(":
            depth += 1
        elif c == ")":
            if not depth:
                return at
            depth -= 1
        at += 1
    return at


def instructions(masks: MaskSet) -> list[Substitution]:
    """The passes of a mask set in their order, and the one that shows kept digits again."""
    made = []
    for step in masks.plan.passes:
        put = _hide if step.keep else _GROUP.sub(r"\\g<\1>", step.replacement)
        made.append(Substitution(in_python(step.pattern), put))
    return [*made, Substitution(_SHOW.pattern, _show)]


def _hide(match: "re.Match[str]") -> str:
    return match.group().translate(_HIDE)


def _show(match: "re.Match[str]") -> str:
    return SHOWN[match.group()]


def miner(masks: MaskSet, settings: Settings) -> TemplateMiner:
    """Drain3 in memory, without snapshots, with our masks and the likeness and depth that ours has."""
    config = TemplateMinerConfig()
    config.masking_instructions = instructions(masks)
    config.drain_sim_th, config.drain_depth = settings.drain.similarity, DEPTH
    config.parametrize_numeric_tokens = True
    return TemplateMiner(config=config)
