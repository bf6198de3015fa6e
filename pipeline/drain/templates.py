"""The template tree: Drain3 groups masked lines and gives each group a template id that never changes.

Drain (He et al., ICWS 2017; implementation: drain3) groups lines of equal token count by their first tokens
and by the share of equal tokens. Two additions: severe and ordinary lines live in separate subtrees, because
a template that covers "succeeded" and "failed" hides the failure. A dict answers exact repeats, because
drain3 searches one-token lines slowly (logpai/Drain3 issue 37)."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Final

from drain3.drain import LogCluster

from pipeline.drain.tree import Tree
from pipeline.records.batch import digest
from pipeline.records.verdict import UNCLASSIFIED
from pipeline.records.wire import Codec

DEPTH: Final = 4  # of the tree, as Drain3 ships it
PER_WORKLOAD: Final = 5_000  # templates one workload may create; further lines are unclassified
# Ids of templates that no pipeline's tree has made: far beyond 1, 2, 3 ..., and whole numbers in the floats
# of JSON readers. Two of 100,000 templates share an id with a chance of one in a million.
FOREIGN_IDS: Final = range(2**52, 2**53)
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


def foreign_id(template: Template) -> int:
    """The id of a template that no pipeline made, by its text and severity: the same in every training."""
    number = int(digest("severe" if template.severe else "plain", template.text), 16)
    return FOREIGN_IDS[number % len(FOREIGN_IDS)]


_WIRE: Final = Codec(tuple[str, bool, str], version=1, what="a stored template")


def pack_template(template: Template) -> bytes:
    """A template as Redis stores it, under its id."""
    return _WIRE.pack((template.text, template.severe, template.workload))


def unpack_template(template_id: int, blob: bytes) -> Template:
    """Raises BadPayload, TooNew."""
    text, severe, workload = _WIRE.unpack(blob, what=f"stored template {template_id}")
    return Template(template_id=template_id, text=text, severe=severe, workload=workload)


class Templates:
    """The tree. Not thread-safe: it has one writer."""

    def __init__(self, *, similarity: float, depth: int, per_workload: int) -> None:
        self.per_workload = per_workload
        self._drain = Tree(
            sim_th=similarity,
            depth=depth + 1,  # the marker takes a level of its own
            max_children=200,
            parametrize_numeric_tokens=True,
        )
        self._workload: dict[int, str] = {}
        self._created: dict[str, int] = {}
        self._exact: dict[tuple[bool, bytes], int] = {}  # by the digest of a line, which may be long

    def __len__(self) -> int:
        return len(self._workload)

    @property
    def newest_id(self) -> int:
        """The highest id; 0 without one."""
        return int(self._drain.clusters_counter)

    def restore(self, templates: Iterable[Template]) -> None:
        """Adds stored templates to an empty instance."""
        for template in sorted(templates, key=lambda t: t.template_id):
            self._put_in_tree(self._tokens(template.text, severe=template.severe), template.template_id)
            if template.template_id not in FOREIGN_IDS:
                self.skip_ids(template.template_id)
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
        exact = severe, blake2b(masked.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        template_id = self._exact.get(exact)
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
        else:
            change = self._widen(cluster, tokens)
        self._exact[exact] = cluster.cluster_id
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
        return self._put_in_tree(tokens, self._drain.clusters_counter)

    def _put_in_tree(self, tokens: tuple[str, ...], template_id: int) -> LogCluster:
        cluster = LogCluster(tokens, template_id)
        self._drain.id_to_cluster[template_id] = cluster
        self._drain.add_seq_to_prefix_tree(self._drain.root_node, cluster)
        return cluster

    def _widen(self, cluster: LogCluster, tokens: tuple[str, ...]) -> Change:
        wider = tuple(self._drain.create_template(tokens, cluster.log_template_tokens))
        if wider == tuple(cluster.log_template_tokens):
            return Change.NONE
        cluster.log_template_tokens = wider
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
