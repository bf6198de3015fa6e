"""The template tree: Drain3 learns masked lines and gives each a template id that never changes.

Drain (He et al., ICWS 2017; implementation: drain3) groups lines of equal token count by their first tokens and
by the share of equal tokens. Two additions: severe and ordinary lines live in separate subtrees, because a
tree that merges "succeeded" with "failed" hides what we look for; and exact repeats are answered from a dict,
because drain3 searches one-token lines slowly (logpai/Drain3 issue 37).

Where several shards learn, the tree of each holds the templates of all. It makes and widens its own; one of another
shard is taken for a line that it covers as it stands.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from drain3.drain import LogCluster

from pipeline.drain.tree import Tree
from pipeline.records.verdict import UNCLASSIFIED
from pipeline.redis.shards import ids_of

_EXACT_LIMIT: Final = 200_000
_SEVERE: Final = "severe"
_PLAIN: Final = "plain"


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


class Templates:
    """What one shard learns, beside what it knows of the others. Not thread-safe: there is one writer.

    `ids`: those that may be given. `own`: whether the templates of a workload are this shard's.
    """

    def __init__(
        self,
        *,
        similarity: float,
        depth: int,
        per_workload: int,
        ids: range = ids_of(0),
        own: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.per_workload = per_workload
        self._ids = ids
        self._own = own
        self._drain = Tree(
            sim_th=similarity,
            depth=depth + 1,  # the marker takes a level of its own
            max_children=200,
            parametrize_numeric_tokens=True,
        )
        self._drain.clusters_counter = ids.start - 1
        self._workload: dict[int, str] = {}
        self._created: dict[str, int] = {}
        self._exact: dict[tuple[bool, str], int] = {}

    def __len__(self) -> int:
        return len(self._workload)

    @property
    def newest_id(self) -> int:
        """The highest of our ids that is known; the one before the first when there is none."""
        return int(self._drain.clusters_counter)

    def restore(self, templates: Iterable[Template]) -> None:
        """Take in templates as they are stored: all of them into an empty instance, or what other shards changed since."""
        for template in sorted(templates, key=lambda t: t.template_id):
            self._take_in(template)
        # What was answered before may be covered by one of them now, as it will be after the next start.
        self._exact.clear()

    def is_own(self, template_id: int) -> bool:
        """Whether this is a known template that this shard alone changes."""
        return template_id in self._workload and template_id not in self._drain.fixed

    def _take_in(self, template: Template) -> None:
        tokens = self._tokens(template.text, severe=template.severe)
        known = self._drain.id_to_cluster.get(template.template_id)
        if known is not None:
            self._drain.rewrite(known, tokens)
            return
        cluster = LogCluster(tokens, template.template_id)
        self._drain.id_to_cluster[template.template_id] = cluster
        self._drain.add_seq_to_prefix_tree(self._drain.root_node, cluster)
        if template.template_id in self._ids:
            self.skip_ids(template.template_id)
        if not self._own(template.workload):
            self._drain.fixed.add(template.template_id)
        self._note(template.template_id, template.workload)

    def skip_ids(self, newest: int) -> None:
        """Give no id up to `newest` again."""
        self._drain.clusters_counter = max(self._drain.clusters_counter, newest)

    def learn(self, masked: str, *, severe: bool, workload: str) -> tuple[Template | None, Change]:
        """`place`, and the template itself; None when the line is unclassified."""
        template_id, change = self.place(masked, severe=severe, workload=workload)
        return (None if template_id == UNCLASSIFIED else self.template(template_id)), change

    def place(self, masked: str, *, severe: bool, workload: str) -> tuple[int, Change]:
        """Put one masked line into its template, creating it when needed; the template's id.

        UNCLASSIFIED when the workload has used up its templates.
        """
        known = self._exact.get((severe, masked))
        if known is not None:
            return known, Change.NONE
        tokens = self._tokens(masked, severe=severe)
        found = self._drain.tree_search(self._drain.root_node, tokens, self._drain.sim_th, False)
        if found is None and self._created.get(workload, 0) >= self.per_workload:
            return UNCLASSIFIED, Change.NONE
        if len(self._exact) >= _EXACT_LIMIT:
            self._exact.clear()
        cluster, change = (
            (self._create(tokens), Change.CREATED) if found is None else self._widen(found, tokens)
        )
        if change is Change.CREATED:
            self._note(cluster.cluster_id, workload)
            if not self._own(workload):  # done here all the same: whose it is changes it from now on
                self._drain.fixed.add(cluster.cluster_id)
        self._exact[(severe, masked)] = cluster.cluster_id
        return int(cluster.cluster_id), change

    def match(self, masked: str, *, severe: bool) -> int | None:
        """The id of the template this line would be put into now; None when it would make one. Changes nothing."""
        tokens = self._tokens(masked, severe=severe)
        found = self._drain.tree_search(self._drain.root_node, tokens, self._drain.sim_th, False)
        return None if found is None else int(found.cluster_id)

    # The two halves of drain3's add_log_message, which would search the tree a second time.

    def _create(self, tokens: tuple[str, ...]) -> LogCluster:
        self._drain.clusters_counter += 1
        cluster = LogCluster(tokens, self._drain.clusters_counter)
        self._drain.id_to_cluster[cluster.cluster_id] = cluster
        self._drain.add_seq_to_prefix_tree(self._drain.root_node, cluster)
        return cluster

    def _widen(self, cluster: LogCluster, tokens: tuple[str, ...]) -> tuple[LogCluster, Change]:
        wider = tuple(self._drain.create_template(tokens, cluster.log_template_tokens))
        if wider == tuple(cluster.log_template_tokens):
            return cluster, Change.NONE
        self._drain.rewrite(cluster, wider)
        return cluster, Change.CHANGED

    def template(self, template_id: int) -> Template:
        """A template as it is now. Raises KeyError when there is none of that id."""
        marker, *words = self._drain.id_to_cluster[template_id].log_template_tokens
        return Template(
            template_id=template_id,
            text=" ".join(words),
            severe=marker == _SEVERE,
            workload=self._workload[template_id],
        )

    def _note(self, template_id: int, workload: str) -> None:
        self._workload[template_id] = workload
        self._created[workload] = self._created.get(workload, 0) + 1

    @staticmethod
    def _content(masked: str, *, severe: bool) -> str:
        # The marker is the first token, so it picks the subtree; it is not part of the template's text.
        return f"{_SEVERE if severe else _PLAIN} {masked}"

    def _tokens(self, masked: str, *, severe: bool) -> tuple[str, ...]:
        return tuple(self._drain.get_content_as_tokens(self._content(masked, severe=severe)))
