"""The template tree: Drain3 groups masked lines and gives each group a template id that never changes.

Drain (He et al., ICWS 2017; implementation: drain3) groups lines of equal token count by their first tokens
and by the share of equal tokens. Two additions: severe and ordinary lines live in separate subtrees, because
a template that covers "succeeded" and "failed" hides the failure. A dict answers exact repeats, because
drain3 searches one-token lines slowly (logpai/Drain3 issue 37).

With several shards, the tree of each shard holds the templates of all shards. A shard creates and widens its
own templates only; a template of another shard covers a line as the template stands, or not at all."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from drain3.drain import LogCluster

from pipeline.drain.tree import Tree
from pipeline.records.verdict import UNCLASSIFIED
from pipeline.records.wire import Codec
from pipeline.redis.shards import ids_of

DEPTH: Final = 4  # of the tree, as Drain3 ships it
PER_WORKLOAD: Final = 5_000  # templates one workload may create; further lines are unclassified
_EXACT_LIMIT: Final = 200_000
_SEVERE: Final = "severe"
_PLAIN: Final = "plain"


class Change(StrEnum):
    """The effect of a line on its template."""

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


# Version 3 of WIRE_VERSION concerns payloads alone, and builds of version 2 read these templates.
_WIRE: Final = Codec(tuple[str, bool, str], version=2, what="a stored template")


def pack_template(template: Template) -> bytes:
    """A template as Redis stores it, under its id."""
    return _WIRE.pack((template.text, template.severe, template.workload))


def unpack_template(template_id: int, blob: bytes) -> Template:
    """Raises BadPayload, TooNew."""
    text, severe, workload = _WIRE.unpack(blob, what=f"stored template {template_id}")
    return Template(template_id=template_id, text=text, severe=severe, workload=workload)


class Templates:
    """The tree of one shard. Not thread-safe: a shard has one writer.

    `ids`: the ids this shard may give. `is_ours`: whether this shard owns the templates of a workload.
    """

    def __init__(
        self,
        *,
        similarity: float,
        depth: int,
        per_workload: int,
        ids: range = ids_of(0),
        is_ours: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.per_workload = per_workload
        self._ids = ids
        self._is_ours = is_ours
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
        """The highest id of this shard; the id before its first one when it has none."""
        return int(self._drain.clusters_counter)

    def restore(self, templates: Iterable[Template]) -> None:
        """Adds stored templates: all of them to an empty instance, or the changes of other shards."""
        for template in sorted(templates, key=lambda t: t.template_id):
            self._take_in(template)
        # One of them may cover a line that was answered before, as it would after a restart.
        self._exact.clear()

    def is_own(self, template_id: int) -> bool:
        """Whether this shard has the template and may change it."""
        return template_id in self._workload and template_id not in self._drain.fixed

    def _take_in(self, template: Template) -> None:
        tokens = self._tokens(template.text, severe=template.severe)
        cluster = self._drain.id_to_cluster.get(template.template_id)
        if cluster is not None:
            self._drain.rewrite(cluster, tokens)
            return
        cluster = LogCluster(tokens, template.template_id)
        self._drain.id_to_cluster[template.template_id] = cluster
        self._drain.add_seq_to_prefix_tree(self._drain.root_node, cluster)
        if template.template_id in self._ids:
            self.skip_ids(template.template_id)
        if not self._is_ours(template.workload):
            self._drain.fixed.add(template.template_id)
        self._note(template.template_id, template.workload)

    def skip_ids(self, newest: int) -> None:
        """Gives no id up to `newest` again."""
        self._drain.clusters_counter = max(self._drain.clusters_counter, newest)

    def learn(self, masked: str, *, severe: bool, workload: str) -> tuple[Template | None, Change]:
        """`place` with the template instead of its id; None when the line is unclassified."""
        template_id, change = self.place(masked, severe=severe, workload=workload)
        return (None if template_id == UNCLASSIFIED else self.template(template_id)), change

    def place(self, masked: str, *, severe: bool, workload: str) -> tuple[int, Change]:
        """Puts a masked line into its template, a new one if necessary; returns the id of the template.

        UNCLASSIFIED when the workload has used up its templates.
        """
        template_id = self._exact.get((severe, masked))
        if template_id is not None:
            return template_id, Change.NONE
        tokens = self._tokens(masked, severe=severe)
        cluster = self._drain.tree_search(self._drain.root_node, tokens, self._drain.sim_th, False)
        if cluster is None and self._created.get(workload, 0) >= self.per_workload:
            return UNCLASSIFIED, Change.NONE
        if len(self._exact) >= _EXACT_LIMIT:
            self._exact.clear()
        if cluster is None:
            cluster, change = self._create(tokens), Change.CREATED
            self._note(cluster.cluster_id, workload)
            if not self._is_ours(workload):  # created here all the same; from now on its own shard changes it
                self._drain.fixed.add(cluster.cluster_id)
        else:
            change = self._widen(cluster, tokens)
        self._exact[(severe, masked)] = cluster.cluster_id
        return int(cluster.cluster_id), change

    def match(self, masked: str, *, severe: bool) -> int | None:
        """The id of the template that covers this line; None when the line needs a new one. Changes
        nothing."""
        tokens = self._tokens(masked, severe=severe)
        cluster = self._drain.tree_search(self._drain.root_node, tokens, self._drain.sim_th, False)
        return None if cluster is None else int(cluster.cluster_id)

    # The two halves of drain3's add_log_message, which would search the tree a second time.

    def _create(self, tokens: tuple[str, ...]) -> LogCluster:
        self._drain.clusters_counter += 1
        cluster = LogCluster(tokens, self._drain.clusters_counter)
        self._drain.id_to_cluster[cluster.cluster_id] = cluster
        self._drain.add_seq_to_prefix_tree(self._drain.root_node, cluster)
        return cluster

    def _widen(self, cluster: LogCluster, tokens: tuple[str, ...]) -> Change:
        wider = tuple(self._drain.create_template(tokens, cluster.log_template_tokens))
        if wider == tuple(cluster.log_template_tokens):
            return Change.NONE
        self._drain.rewrite(cluster, wider)
        return Change.CHANGED

    def template(self, template_id: int) -> Template:
        """The current template of this id. Raises KeyError."""
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

    def _tokens(self, masked: str, *, severe: bool) -> tuple[str, ...]:
        # The marker is the first token, so it picks the subtree; it is not part of the template's text.
        marker = _SEVERE if severe else _PLAIN
        return tuple(self._drain.get_content_as_tokens(f"{marker} {masked}"))
