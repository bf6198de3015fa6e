"""The template tree: Drain3 learns masked lines and gives each a template id that never changes.

Drain (He et al., ICWS 2017; implementation: drain3) groups lines of equal token count by their first tokens and
by the share of equal tokens. Two additions: severe and ordinary lines live in separate subtrees, because a
tree that merges "succeeded" with "failed" hides what we look for; and exact repeats are answered from a dict,
because drain3 searches one-token lines slowly (logpai/Drain3 issue 37).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from drain3.drain import Drain, LogCluster

WILDCARD: Final = "<*>"
UNCLASSIFIED: Final = 0  # the template id of lines past their workload's limit; real ids begin at 1
_EXACT_LIMIT: Final = 200_000


class Change(StrEnum):
    """What learning a line did to its template."""

    NONE = "none"
    CREATED = "created"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A cluster of masked lines. `text` may gain wildcards later; `template_id` stays."""

    template_id: int
    text: str
    severe: bool
    workload: str  # the workload that created it


class _Tree(Drain):  # type: ignore[misc] # drain3 publishes no types
    """Drain3 without the marker in its measure of likeness: only the words of the lines count."""

    def get_seq_distance(
        self, seq1: Sequence[str], seq2: Sequence[str], include_params: bool
    ) -> tuple[float, int]:
        # The marker is equal wherever two lines are compared; counted, it made all one-word lines alike.
        likeness: tuple[float, int] = super().get_seq_distance(seq1[1:], seq2[1:], include_params)
        return likeness


class Templates:
    """All templates of one shard. Not thread-safe: there is one writer."""

    def __init__(self, *, similarity: float, depth: int, per_workload: int) -> None:
        self.per_workload = per_workload
        self._drain = _Tree(
            sim_th=similarity,
            depth=depth,
            max_children=200,
            param_str=WILDCARD,
            parametrize_numeric_tokens=True,
        )
        self._workload: dict[int, str] = {}
        self._created: dict[str, int] = {}
        self._exact: dict[tuple[bool, str], int] = {}

    def __len__(self) -> int:
        return len(self._workload)

    @property
    def newest_id(self) -> int:
        """The highest id given so far; 0 when there is none."""
        return int(self._drain.clusters_counter)

    def restore(self, templates: Iterable[Template]) -> None:
        """Rebuild the tree from stored templates, into an empty instance."""
        for template in sorted(templates, key=lambda t: t.template_id):
            tokens = self._tokens(template.text, severe=template.severe)
            cluster = LogCluster(tokens, template.template_id)
            self._drain.id_to_cluster[template.template_id] = cluster
            self._drain.add_seq_to_prefix_tree(self._drain.root_node, cluster)
            self._drain.clusters_counter = max(self._drain.clusters_counter, template.template_id)
            self._note(template.template_id, template.workload)

    def skip_ids(self, newest: int) -> None:
        """Give no id up to `newest` again."""
        self._drain.clusters_counter = max(self._drain.clusters_counter, newest)

    def learn(self, masked: str, *, severe: bool, workload: str) -> tuple[Template | None, Change]:
        """Put one masked line into its template, creating it when needed.

        Returns (None, NONE) when the workload has used up its templates: the line is unclassified.
        """
        known = self._exact.get((severe, masked))
        if known is not None:
            return self._template(known, severe), Change.NONE
        tokens = self._tokens(masked, severe=severe)
        found = self._drain.tree_search(self._drain.root_node, tokens, self._drain.sim_th, False)
        if found is None and self._created.get(workload, 0) >= self.per_workload:
            return None, Change.NONE
        cluster, change = self._drain.add_log_message(self._content(masked, severe=severe))
        created = change == "cluster_created"
        if created:
            self._note(cluster.cluster_id, workload)
        if len(self._exact) >= _EXACT_LIMIT:
            self._exact.clear()
        self._exact[(severe, masked)] = cluster.cluster_id
        changed = change == "cluster_template_changed"
        how = Change.CREATED if created else Change.CHANGED if changed else Change.NONE
        return self._template(cluster.cluster_id, severe), how

    def _template(self, template_id: int, severe: bool) -> Template:
        cluster = self._drain.id_to_cluster[template_id]
        return Template(
            template_id=template_id,
            text=" ".join(cluster.log_template_tokens[1:]),
            severe=severe,
            workload=self._workload[template_id],
        )

    def _note(self, template_id: int, workload: str) -> None:
        self._workload[template_id] = workload
        self._created[workload] = self._created.get(workload, 0) + 1

    @staticmethod
    def _content(masked: str, *, severe: bool) -> str:
        # The marker is the first token, so it picks the subtree; it is not part of the template's text.
        return ("severe " if severe else "plain ") + masked

    def _tokens(self, masked: str, *, severe: bool) -> tuple[str, ...]:
        return tuple(self._drain.get_content_as_tokens(self._content(masked, severe=severe)))
