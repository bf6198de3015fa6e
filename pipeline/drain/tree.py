"""Drain3's tree with two changes: the measure of similarity, and leaves with an index.

drain3 compares a line with every template of its leaf, word by word, and walks the leaf for every template it
adds. Where every line is new, the leaf of a workload holds thousands of templates: 4 ms a line."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from drain3.drain import Drain, LogCluster, Node
from numpy.typing import NDArray

WILDCARD: Final = "<*>"
_FEW: Final = 32  # up to so many clusters, comparing one by one is as fast as the index
_CELLS: Final = 1 << 20  # cells of the index compared at once; bounds memory
_NO_WORD: Final = -1


class Tree(Drain):  # type: ignore[misc] # drain3 publishes no types
    """Drain3 whose similarity leaves out the first word, the marker: only words of the line count.

    A search drops a candidate at the first word that makes it too dissimilar.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, param_str=WILDCARD)

    def add_seq_to_prefix_tree(self, root_node: Node, cluster: LogCluster) -> None:
        """Adds a cluster to the leaf of its first words, as drain3 does, without walking the leaf."""
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

    def fast_match(
        self, cluster_ids: Sequence[int], tokens: Sequence[str], sim_th: float, include_params: bool
    ) -> LogCluster | None:
        words = len(tokens) - 1  # the marker of both lines is equal
        allowed = words - math.ceil(sim_th * words)
        if isinstance(cluster_ids, _Leaf) and not include_params:
            cluster_ids = cluster_ids.sharing(tokens, words - allowed, self.id_to_cluster)
        best: LogCluster | None = None
        fewest, most_wild, lowest = allowed + 1, -1, 0
        for cluster_id in cluster_ids:
            cluster = self.id_to_cluster[cluster_id]
            misses = wild = 0
            for token, other in zip(cluster.log_template_tokens, tokens, strict=True):
                if token == WILDCARD:
                    wild += 1
                    misses += not include_params
                elif token != other:
                    misses += 1
                if misses > allowed:
                    break
            # As drain3: the most similar; on a tie the one with more wildcards. Then the lowest id.
            if misses <= allowed and (misses, -wild, cluster_id) < (fewest, -most_wild, lowest):
                best, fewest, most_wild, lowest = cluster, misses, wild, cluster_id
        return best


class _Leaf(list[int]):
    """The clusters of a leaf in order of arrival, with an index of word hashes, one column per cluster.

    The index selects the clusters that may share enough words with a line: never one too few, seldom one too
    many. A wildcard that a cluster gains after it was indexed makes at most one too many."""

    __slots__ = ("_columns", "_noted")

    def __init__(self) -> None:
        super().__init__()
        self._columns: NDArray[np.int32] = np.empty((0, 0), np.int32)  # (words, room)
        self._noted = 0

    def sharing(self, tokens: Sequence[str], minimum: int, clusters: dict[int, LogCluster]) -> Sequence[int]:
        """The clusters that may share at least `minimum` words with this line."""
        if len(self) <= _FEW:
            return self
        self._note(len(tokens) - 1, clusters)
        line = _hashes(tokens)[:, np.newaxis]
        shared = np.zeros(len(self), np.uint32)
        step = max(1, _CELLS // len(self))
        for start in range(0, len(line), step):
            equal = self._columns[start : start + step, : len(self)] == line[start : start + step]
            shared += equal.sum(axis=0, dtype=np.uint32)
        return [self[place] for place in np.flatnonzero(shared >= minimum)]

    def _note(self, words: int, clusters: dict[int, LogCluster]) -> None:
        if self._columns.shape[1] < len(self):
            self._columns, self._noted = np.empty((words, 2 * len(self)), np.int32), 0
        for place in range(self._noted, len(self)):
            self._columns[:, place] = _hashes(clusters[self[place]].log_template_tokens)
        self._noted = len(self)


def _hashes(tokens: Sequence[str]) -> NDArray[np.int32]:
    """A hash of 31 bits for every word behind the marker; -1 for a wildcard."""
    return np.fromiter(
        (_NO_WORD if token == WILDCARD else hash(token) & 0x7FFF_FFFF for token in tokens[1:]),
        np.int32,
        len(tokens) - 1,
    )
