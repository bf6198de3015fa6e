"""Every Redis key, declared once: its type, its content, its bound and who deletes it.

All keys of one deployment share the hash tag `{prefix}`, so the keys of every script live in one slot of a
Redis Cluster. `table()` gives the declarations as rows; tests hold running systems to them."""

from dataclasses import dataclass
from typing import Final, overload

WORKER_TTL_S: Final = 15
TROUBLE_TTL_S: Final = 15
SHARED: Final = "shared"  # the name of the model that answers for every workload without its own


class Key:
    """One key: `keys.due` is its whole name. `kind`: the Redis type; `bound`: what bounds it, or its
    deleter."""

    def __init__(self, kind: str, content: str, bound: str) -> None:
        self.kind, self.content, self.bound = kind, content, bound
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, keys: None, owner: type) -> "Key": ...
    @overload
    def __get__(self, keys: "Keys", owner: type) -> str: ...
    def __get__(self, keys: "Keys | None", owner: type) -> "Key | str":
        return self if keys is None else keys(self.name)


class KeyFamily(Key):
    """Keys with further parts: `keys.batch(id)`. `parts` shows them, as in `<id>`."""

    def __init__(self, parts: str, kind: str, content: str, bound: str) -> None:
        super().__init__(kind, content, bound)
        self.parts = parts

    @overload  # type: ignore[override]
    def __get__(self, keys: None, owner: type) -> "KeyFamily": ...
    @overload
    def __get__(self, keys: "Keys", owner: type) -> "KeyBuilder": ...
    def __get__(self, keys: "Keys | None", owner: type) -> "KeyFamily | KeyBuilder":
        return self if keys is None else KeyBuilder(keys, self.name)


@dataclass(frozen=True, slots=True)
class KeyBuilder:
    """A key family of one deployment."""

    keys: "Keys"
    name: str

    def __call__(self, *parts: str) -> str:
        return self.keys(self.name, *parts)


@dataclass(frozen=True)
class Keys:
    """The names of all keys under one prefix."""

    prefix: str

    def __call__(self, *parts: str) -> str:
        return ":".join(("{" + self.prefix + "}", *parts))

    def kombu(self, name: str) -> str:
        """A key of Kombu: a queue, or its unacknowledged messages. Kombu's keys have no braces
        (messages/app.py)."""
        return f"{self.prefix}:{name}"

    def model(self, name: str = SHARED) -> str:
        """The live version of a model: of the shared one, or of a workload's own."""
        return self("model") if name == SHARED else self("model", name)

    # fmt: off
    batch = KeyFamily("<id>", "hash", "the ledger entry of one batch",
        "TTL `keep_done_s` from commit and bisection; ledger/discard.lua")
    payload = KeyFamily("<id>", "string", "the records: Arrow, or pushed lines (records/payload.py)",
        "commit, bisection, discard; accept.lua bounds the bytes")
    work = KeyFamily("<id>", "string", "distinct masked lines and their answers so far, Arrow",
        "ledger/advance.lua replaces, ledger/commit.lua deletes")
    due = Key("zset id -> ms", "unfinished batches, and when the sweeper looks at each",
        "commit, dead letter, bisection")
    in_flight = Key("zset id -> lane and ms", "unfinished batches, by lane and when each was accepted", "as due")
    dead = Key("zset id -> ms", "dead letters", "ledger/retry.lua, ledger/discard.lua")
    warming = Key("zset id -> ms", "batches stored without a verdict", "ledger/rescore.lua")
    counts = Key("hash", "batches and bytes in flight, batches per stage, bytes of dead letters, lost",
        "fixed fields")
    closed = Key("string", "the closed intake gate: since when and why, JSON",
        "Intake.resume; 90 s where `stop` set it and died")
    intake = KeyFamily("young, :old", "hash identity -> digest of the body",
        "requests that the intake has taken in, and since when under ``",
        "ledger/accept_many.lua rotates young to old, after 10 minutes or 200,000; TTL 20 minutes")
    intake_records = KeyFamily("young, :old", "set of identities",
        "records that the intake has taken in and that may come again with others",
        "as intake, together with it; TTL 20 minutes from the last one")
    sender_keys = Key("hash name -> JSON", "keys of senders and of people who ask: digest, scopes, workloads (service/access/keys.py)",
        "1,000; `logweir keys revoke`")
    console_link = KeyFamily("<digest>", "string", "a link to the console, good once (service/access/console_sessions.py)",
        "TTL 10 minutes; deleted when it is used")
    console_session = KeyFamily("<digest>", "string", "a session of the console, and its key, JSON",
        "TTL 12 hours; deleted when its user signs out")
    incident_states = Key("hash incident -> JSON", "what people decided of incidents (service/incident_states.py)",
        "5,000; the oldest go")
    incident_notes = KeyFamily("<incident>", "list JSON", "notes of people on an incident (service/handover/notes.py)",
        "100; TTL 90 days since the last one")
    silences = Key("hash id -> JSON", "incidents that people do not want to see for now (service/silences.py)",
        "200; a new one removes those that ended a week ago")
    audit = Key("stream", "changes that people made: who, what, of which thing (service/access/audit.py)", "10,000")
    events = Key("stream", "what has happened, for others to follow (observe/events.py)",
        "20,000 in _prelude.lua")
    senders = Key("hash `protocol key peer` -> JSON", "who sends, how much, and when last",
        "1,000; the longest silent one goes; TTL 30 days")
    senders_heard = Key("zset `protocol key peer` -> ms", "the last sign of each sender", "as senders, together with it")
    acknowledged = Key("string", "the write that WAIT asks for (redis/scripts.py)", "TTL a minute")
    totals = KeyFamily("<workload>", "hash", "lines accepted, stored, dead, discarded; lines by outcome",
        "one per workload, never deleted")
    workloads = Key("set", "names of all workloads", "one entry per workload")
    forgotten = KeyFamily("<purpose>", 'hash batch -> "", `` -> run id',
        "stored batches that Redis lost (sinks/forgotten.py)",
        "10,000 per start of Redis; TTL 30 days")
    cursors = Key("hash source -> cursor", "the position where each source continues", "one per source")
    verdicts = KeyFamily("<version>:young, :old", "hash key -> verdict", "verdicts of one model version",
        "drain/learn.lua rotates young to old; TTL a day")
    templates = Key("hash id -> msgpack", "every template", "the learner bounds them per workload")
    templates_untold = Key("hash id -> changes", "templates that the OpenSearch index lacks",
        "as templates; drain/told.lua")
    templates_journal = Key("string",
        "the newest entry of the journal that `templates` reflects (drain/journal.py)", "one number")
    template_counts = Key("hash workload -> n", "templates that a workload has created", "one per workload")
    lease = KeyFamily("<resource>", "hash", "holder, token, deadline",
        "every lease script expires it on Redis time")
    tokens = Key("hash resource -> n", "the newest fencing token", "never deleted")
    shares = KeyFamily("<source>, :readers", "hash partition -> JSON, zset reader -> ms",
        "the reader of each partition, and the readers that live (redis/partition_leases.py)",
        "leases/share.lua drops what expired; TTL ten lease TTLs")
    kafka = Key("hash source -> JSON", "how far each partition of Kafka is read, and by whom",
        "one per partition; a day after its last report")
    nats = Key("hash source -> JSON", "how far each stream of NATS is read, and by whom",
        "one per stream; a day after its last report")
    nats_since = Key("string", "the start of Redis under which results were looked for, and from when on",
        "sinks/nats.py; TTL 30 days")
    nats_jobs = Key("hash training -> JSON",
        "trainings that were asked for over NATS; the workloads, the last event",
        "workers/nats/jobs.py drops ended ones")
    epoch = Key("hash", "the replication id of Redis; the end of the quarantine after a change", "one")
    model_names = Key("set", "models that were ever published", "one per model")
    model_faults = Key("hash `version machine` -> JSON", "versions that a machine cannot read, and why",
        "cleared when readable; TTL 20 s from the last report")
    store = Key("string", "the store that all processes share: id, URL and machine of the first, JSON",
        "one; `logweir store adopt` replaces it")
    redis_loss = Key("string", "that Redis came up empty, and what came back, JSON (observe/losses.py)", "TTL 7 days")
    watch = Key("hash", "the watchlist: pattern -> JSON, and its version under ''",
        "training/watchlist.lua bounds it")
    marks = Key("hash",
        "marks of patterns and templates: `kind:number:workload` -> msgpack, version under ''",
        "marks/mark.lua bounds it")
    training = KeyFamily("<id>", "hash", "one requested training: request, state, status, token",
        "TTL 30 days from its end")
    training_queue = Key("zset id -> ms", "queued trainings, and when each may begin",
        "training/take.lua, training/cancel.lua")
    training_keys = Key("hash", "key of a queued request -> id; merges equal requests", "as training_queue")
    training_now = Key("string", "the running training", "training/end.lua")
    trainings = Key("zset id -> ms", "trainings, newest last", "queued and running ones, and 200 that ended")
    trainings_ended = Key("zset id -> number", "trainings in the order of their ends", "200")
    drift = KeyFamily("<version>", "hash",
        "figures measured under a version, and its comparison window (controller/drift.py)",
        "TTL 30 days from the last commit")
    controller = Key("hash", "per model: the last decision, and results of past trainings", "one per model")
    decisions = Key("list", "decisions with their inputs, newest first, JSON", "1,000")
    serving = Key("hash worker -> JSON", "the versions that a worker serves, and since when",
        "the sweep drops silent workers")
    workers = Key("hash name -> JSON", "the last heartbeat of every worker process",
        "the sweep drops silent workers")
    metrics = KeyFamily("<role>", "hash", "counters of the processes of a role (observe/counters.py)",
        "closed labels bound the fields; never deleted")
    trouble = Key("string", "the newest reason why work had to wait, JSON", "TTL 15 s")
    probe = Key("string", "a test whether Redis takes writes", "TTL 5 s")
    backfills = Key("zset name -> ms", "backfills, newest last", "`Plans.names` drops those that expired")
    backfill = KeyFamily("<name>:<part>", "several", "the plan of a backfill", "see GROUPS")
    gpu = KeyFamily("<part>", "several", "the GPU pool", "see GROUPS")
    watching = KeyFamily("<part>", "several", "sessions, rates and incidents", "see GROUPS")
    # fmt: on


# Keys that are named by parts, `keys.gpu("nodes")`: name, type, content, bound.
# fmt: off
GROUPS: Final = (
    ("model", "hash", "the live version of the shared model: token, generation, earlier versions",
        "models/publish.lua"),
    ("model:<workload>", "hash", "the live version of a workload's own model", "models/publish.lua"),
    ("backfill:<name>:state", "hash", "what is read, how many readers, sums of what has ended",
        "TTL 30 days after its end (backfill/finish.lua) or `logweir backfill --cancel`; so the others"),
    ("backfill:<name>:objects", "hash name -> identity", "objects that were planned", "one per object"),
    ("backfill:<name>:pieces", "hash id -> JSON", "pieces that are not read yet", "backfill/finish.lua"),
    ("backfill:<name>:open", "zset id -> rank", "pieces that no reader has begun", "backfill/take.lua"),
    ("backfill:<name>:hands", "hash slot -> id", "pieces that are being read", "backfill/finish.lua"),
    ("backfill:<name>:tries", "hash id -> n", "readers of a piece since a line of it was accepted",
        "backfill/finish.lua"),
    ("backfill:<name>:failed", "hash id -> JSON", "pieces that cannot be read, and why", "backfill/add.lua"),
    ("backfill:<name>:notes", "list", "notes on what was read", "200"),
    ("backfill:<name>:reading", "hash slot -> JSON", "how far each reader is", "backfill/finish.lua"),
    ("backfill:<name>:borders", "hash", "where pieces of a text meet; the first reader's answer stands",
        "one per piece"),
    ("backfill:<name>:trouble", "string", "why a reader cannot begin", "TTL 20 s"),
    ("gpu:nodes", "hash node -> JSON", "nodes and their agents",
        "gpu/sweep.lua forgets a node after a silent day"),
    ("gpu:beats", "zset node -> ms", "the last heartbeat of each node", "as gpu:nodes"),
    ("gpu:devices", "hash uuid -> JSON", "devices as their agent reported them",
        "gpu/report.lua replaces a node's; gpu/sweep.lua"),
    ("gpu:leases", "hash id -> JSON", "live leases", "gpu/release, revoke, sweep, abandon, wait"),
    ("gpu:deadlines", "zset id -> ms", "when leases end unless renewed", "as gpu:leases"),
    ("gpu:yields", "zset id -> ms", "when leases that must yield are revoked", "as gpu:leases"),
    ("gpu:ended:<id>", "string", "how a lease ended, for its holder", "TTL 10 min"),
    ("gpu:taken", "hash `uuid:what` -> n", "memory, compute, shared, exclusive and orphaned parts per device",
        "as gpu:leases and gpu:left"),
    ("gpu:left", "hash `lease uuid token` -> JSON",
        "orphaned allocations: parts whose processes may still run", "gpu/report.lua, gpu/clear.lua"),
    ("gpu:freed", "set of uuids", "devices whose orphans ended, until planning reads them", "gpu/sweep.lua"),
    ("gpu:waiting", "hash id -> JSON", "waiting needs, one per process or program",
        "commit, abandon; gpu/sweep.lua after a silent lease TTL"),
    ("gpu:waiting_until", "zset id -> ms", "when a waiting need is forgotten", "as gpu:waiting"),
    ("gpu:told:<id>", "channel", "wakes the process that waits for a request", "nothing is stored"),
    ("gpu:line", "list", "epoch, Redis and JSON of the needs that are served next (gpu/policy/line.py)",
        "128; TTL 2 s"),
    ("gpu:accounts", "hash tenant -> JSON", "tenants that were added, and budgets (gpu/leasing/accounts.py)",
        "`gpu tenants remove`"),
    ("gpu:spent", "hash `day tenant` -> ms", "device time of ended leases by day of UTC, for budgets",
        "gpu/sweep.lua: 40 days, from 2,000 fields on"),
    ("gpu:sums", "hash", "number of changes; newest token; decayed use and device time by tenant; lost records",
        "three fields per tenant; never deleted"),
    ("gpu:records", "stream", "usage records of ended leases that the store lacks (gpu/leasing/ended.py)",
        "50,000 in gpu/sweep.lua; removed once stored"),
    ("gpu:jobs", "hash id -> JSON", "jobs that have not ended (gpu/jobs.py)", "as they end"),
    ("gpu:jobs_ended", "hash id -> JSON", "jobs that have ended", "gpu/job_keeper.py: 200, and 7 days"),
    ("gpu:job_beat:<id>", "string", "a process runs this job; of a gang `<lease>:<ms>:<rank>`, then `ready`",
        "TTL of a lease"),
    ("gpu:job_ends:<lease>:<ms>", "hash rank -> 1|0", "ranks of a gang that are over; 1: off their device",
        "TTL 7 days"),
    ("gpu:job_output:<id>", "hash",
        "the end of a job's output, and where it begins; of a rank above 0 `<id>:<rank>`",
        "256 KiB, of all ranks 1.3 MiB; TTL 7 days"),
    ("gpu:job_keeper", "string", "the process that moves jobs on now", "TTL 0.9 s"),
    ("gpu:demand", "hash form -> n", "recent needs that packing looks ahead by; their sum under ''",
        "gpu/wait.lua halves old counts; 512 forms"),
    ("gpu:demand_window", "hash form -> n", "needs that join gpu:demand next; their sum under ''",
        "gpu/wait.lua; 256 forms"),
    ("gpu:reservation", "string", "the one reservation, JSON",
        "gpu/commit.lua; with its request abandon, sweep"),
    ("gpu:models", "hash `[device, tenant, model]` -> JSON", "models on devices: lease, state, last use",
        "gpu/place.lua drops entries without a live lease"),
    ("gpu:served", "hash `tenant/name/version` -> JSON", "models that are served on leases (gpu/served.py)",
        "1,000; `logweir gpu models remove`, and the fourth version of a name"),
    ("gpu:serve_nodes", "hash name -> JSON", "processes that serve models or score, and their room",
        "as they end; ServedModels.nodes after a silent hour"),
    ("gpu:wanted", "zset `tenant/name/version` -> ms", "models that were asked for lately", "30 s"),
    ("gpu:planning", "string", "the process that plans now", "TTL 1 s"),
    ("gpu:planned", "string", "a waiting process has planned lately", "TTL 0.5 s"),
    ("watching", "hash",
        "totals of observations and of what was left out; last round; open and closed sessions, incidents; `lost <model>`, `unkept <model>`",
        "fixed fields, one per workload and kind of key, 2,000 `unkept`"),
    ("watching:observations", "list",
        "observations of stored batches, oldest first (watching/observation.py)",
        "10,000 and 64 MiB in commit.lua; watched.lua"),
    ("watching:sessions", "hash workload NUL kind NUL key -> msgpack", "open sessions",
        "`max_open_sessions`, 2,000,000 events in all; watched.lua"),
    ("watching:idle:<lane>", "zset workload NUL kind NUL key -> ms", "when the window of a session closes",
        "as watching:sessions"),
    ("watching:pasts", "hash workload NUL kind NUL key -> msgpack",
        "histories of judged sessions (watching/sessions/history.py)", "as watching:past_due"),
    ("watching:past_due", "zset workload NUL kind NUL key -> ms",
        "when each history is forgotten, a day after its last event", "as watching:sessions"),
    ("watching:pulses", "hash workload -> msgpack", "watermark of a workload, and its minute counts",
        "10,000 workloads; watched.lua, 30 days after the last line"),
    ("watching:rates", "hash workload -> msgpack",
        "rate state of a workload (watching/rates/rates.py bounds each)",
        "as watching:pulses, with watching:numbers 128 MiB in all"),
    ("watching:numbers", "hash workload -> msgpack",
        "distributions of the variables of a workload (watching/numbers/numbers.py bounds each)",
        "as watching:pulses, with watching:rates 128 MiB in all"),
    ("watching:daily", "hash workload -> msgpack",
        "days on which anomalous templates came (watching/incidents/daily.py)",
        "2,000 templates of a workload; as watching:pulses"),
    ("watching:left_out", "hash workload -> msgpack",
        "lines that its rates and numbers left out (records/left_out.py)", "as watching:pulses"),
    ("watching:incidents", "string", "incidents, msgpack (watching/incidents/live.py bounds it)", "one"),
    ("watching:rests", "string", "a round of the watcher hung lately", "TTL 5 times `step_s`"),
    ("watching:outbox", "list", "rows of findings that no sink has yet, oldest first",
        "emptied before a round adds to it"),
)
# fmt: on


def table() -> list[tuple[str, str, str, str]]:
    """Every key as (name, type, content, bound), sorted by name."""
    rows = [
        (
            f"{key.name}:{key.parts}" if isinstance(key, KeyFamily) else key.name,
            key.kind,
            key.content,
            key.bound,
        )
        for key in vars(Keys).values()
        if isinstance(key, Key) and key.bound != "see GROUPS"
    ]
    return sorted([*rows, *GROUPS])
