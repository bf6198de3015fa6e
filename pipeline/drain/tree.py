"""Drain3's tree with two things of ours: what counts as alike, and leaves in which a search does not go from template to template.

drain3 compares a line with every template of its leaf, word by word, and goes through the leaf for every template that
it puts there. Where every line is new, the leaf of a workload holds thousands: 4 ms a line.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from drain3.drain import Drain, LogCluster, Node
from numpy.typing import NDArray

WILDCARD: Final = "<*>"
_FEW: Final = 32  # as many are compared one by one as fast
_CELLS: Final = 1 << 20  # of columns compared at once
_NO_WORD: Final = -1


class Tree(Drain):  # type: ignore[misc] # drain3 publishes no types
    """Drain3 without the first word, the marker, in its measure of likeness: only the words of the lines count.

    A candidate is dropped at the word that makes it too unlike.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, param_str=WILDCARD)
        self.fixed: set[int] = set()  # clusters that are not ours to widen
        self._rewritten = 0

    def add_seq_to_prefix_tree(self, root_node: Node, cluster: LogCluster) -> None:
        """Put a cluster into the leaf of its first words, as drain3 does, without going through the leaf."""
        tokens = cluster.log_template_tokens
        node = root_node.key_to_child_node.setdefault(str(len(tokens)), Node())
        for token in tokens[: min(self.max_node_depth, len(tokens)) - 1]:
            node = self._child(node, token)
        if not isinstance(node.cluster_ids, _Leaf):
            node.cluster_ids = _Leaf()
        node.cluster_ids.append(cluster.cluster_id)

    def _child(self, node: Node, token: str) -> Node:
        children = node.key_to_child_node
        if token not in children:
            full = len(children) + (WILDCARD not in children) >= self.max_children
            if full or (self.parametrize_numeric_tokens and self.has_numbers(token)):
                token = WILDCARD
        return children.setdefault(token, Node())

    def rewrite(self, cluster: LogCluster, tokens: tuple[str, ...]) -> None:
        """Give a cluster another text. Raises ValueError unless it has as many words: no line would find it."""
        if len(tokens) != len(cluster.log_template_tokens):
            raise ValueError(
                f"template {cluster.cluster_id} has {len(tokens) - 1} words; it had another number"
            )
        if any(
            new not in (old, WILDCARD) for old, new in zip(cluster.log_template_tokens, tokens, strict=True)
        ):
            self._rewritten += 1
        cluster.log_template_tokens = tokens

    def fast_match(
        self, cluster_ids: Sequence[int], tokens: Sequence[str], sim_th: float, include_params: bool
    ) -> LogCluster | None:
        words = len(tokens) - 1  # the marker is equal wherever two lines are compared
        allowed = words - math.ceil(sim_th * words)
        if isinstance(cluster_ids, _Leaf) and not include_params:
            cluster_ids = cluster_ids.sharing(tokens, words - allowed, self.id_to_cluster, self._rewritten)
        best: LogCluster | None = None
        fewest, most_wild, lowest = allowed + 1, -1, 0
        for cluster_id in cluster_ids:
            cluster = self.id_to_cluster[cluster_id]
            misses = wild = 0
            step = (
                words + 1 if cluster_id in self.fixed else 1
            )  # a cluster that is fixed fits as it is or not at all
            for own, other in zip(cluster.log_template_tokens, tokens, strict=True):
                if own == WILDCARD:
                    wild += 1
                    misses += not include_params
                elif own != other:
                    misses += step
                if misses > allowed:
                    break
            # As drain3: the most alike, of equals the one with more wildcards. Then the lowest id: twins of two shards
            # lie in every tree, each in the order in which it came to know them.
            if misses <= allowed and (misses, -wild, cluster_id) < (fewest, -most_wild, lowest):
                best, fewest, most_wild, lowest = cluster, misses, wild, cluster_id
        return best


class _Leaf(list[int]):
    """The clusters of a leaf in order of arrival; beside many of them, the hashes of their words in a column per place.

    Hashes tell which clusters can share enough words with a line: never one too few, seldom one too many. A wildcard that
    a cluster got after its hashes were noted makes no more of it than one too many.
    """

    __slots__ = ("_columns", "_noted", "_rewritten")

    def __init__(self) -> None:
        super().__init__()
        self._columns: NDArray[np.int32] = np.empty((0, 0), np.int32)  # (words, room)
        self._noted = self._rewritten = 0

    def sharing(
        self, tokens: Sequence[str], least: int, clusters: dict[int, LogCluster], rewritten: int
    ) -> Sequence[int]:
        """The clusters that may have `least` words where this line has them.

        `rewritten`: counts the clusters anywhere that got other words since the start.
        """
        if len(self) <= _FEW:
            return self
        if rewritten != self._rewritten:
            self._noted, self._rewritten = 0, rewritten
        self._note(len(tokens) - 1, clusters)
        line = _hashes(tokens)[:, np.newaxis]
        shared = np.zeros(len(self), np.uint32)
        step = max(1, _CELLS // len(self))
        for start in range(0, len(line), step):
            equal = self._columns[start : start + step, : len(self)] == line[start : start + step]
            shared += equal.sum(axis=0, dtype=np.uint32)
        return [self[place] for place in np.flatnonzero(shared >= least)]

    def _note(self, words: int, clusters: dict[int, LogCluster]) -> None:
        if self._columns.shape[1] < len(self):
            self._columns, self._noted = np.empty((words, 2 * len(self)), np.int32), 0
        for place in range(self._noted, len(self)):
            self._columns[:, place] = _hashes(clusters[self[place]].log_template_tokens)
        self._noted = len(self)


def _hashes(tokens: Sequence[str]) -> NDArray[np.int32]:
    """One of 31 bits for every word behind the marker; a wildcard has that of no word."""
    return np.fromiter(
        (_NO_WORD if token == WILDCARD else hash(token) & 0x7FFF_FFFF for token in tokens[1:]),
        np.int32,
        len(tokens) - 1,
    )
