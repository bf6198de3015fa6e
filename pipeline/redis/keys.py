"""Every Redis key: its name, type, what bounds it and who deletes it. Loads the Lua scripts.

All keys of one deployment share the hash tag `{prefix}`, so that every script's keys live in one slot.

| key | type | content | bound / deleter |
|---|---|---|---|
| batch:<id> | hash | ledger entry of one batch | TTL `KEEP_DONE_S` from commit/split; ledger/discard.lua |
| payload:<id> | string | the records, Arrow or pushed lines (records/payload.py) | ledger/commit.lua, ledger/split.lua, ledger/discard.lua; bytes bounded by ledger/accept.lua |
| work:<id> | string | distinct masked lines and their answers so far, Arrow | ledger/advance.lua replaces, ledger/commit.lua deletes |
| due | zset id -> ms | unfinished batches, when the sweeper looks at them | commit, bury, split |
| dead | zset id -> ms | dead letters | ledger/retry.lua, ledger/discard.lua |
| warming | zset id -> ms | batches stored without a verdict | ledger/rescore.lua |
| counts | hash | batches and bytes in flight, batches per stage, bytes of dead letters | fixed fields |
| closed | string | nothing is taken in: since when and why, JSON | ledger.open_door; after 90 s where `stop` set it and died |
| totals:<workload> | hash | lines accepted, stored, dead, discarded; lines by outcome | one per workload, never deleted |
| workloads | set | names of all workloads seen | one entry per workload |
| forgotten:<purpose> | hash file -> "", `` -> run id | result files of batches that Redis forgot, and the start of Redis they were looked for (sinks/forgotten.py) | 10,000 per start; TTL 30 days |
| cursors | hash source -> cursor | where each source goes on reading | one per source |
| verdicts:<version>:young, :old | hash key -> verdict | answers of one model version | drain/learn.lua rotates young to old; TTL a day |
| evidence:young, :old | hash version NUL pattern -> msgpack, or who scores it now | what was scored and no verdict is known of yet (models/single_flight.py) | evidence_*.lua rotate young to old; 20,000 lines; TTL a minute |
| templates | hash id -> msgpack | every template | bounded per workload by the learner |
| templates_untold | hash id -> changes | templates that the OpenSearch index does not hold yet | as templates; drain/told.lua |
| template_changes | zset id -> n | templates in the order of their last change, where several shards learn (drain/learner.py) | as templates |
| template_counts | hash workload -> n | templates that a workload has created | one per workload |
| lease:<resource> | hash | holder, token, deadline | fields expire on Redis time in every lease script |
| tokens | hash resource -> n | newest fencing token | never deleted |
| epoch | hash | replication id of Redis, end of the quarantine after a change | one |
| model | hash | live version of the shared model, its token, generation and the versions before it | models/publish.lua |
| model:<workload> | hash | the same for a model of a workload's own | models/publish.lua |
| model_names | set | models that were ever published | one per model |
| model_faults | hash version -> JSON | versions whose files cannot be read, and why | cleared when they can, or are removed; TTL 20 s from the last report |
| watch | hash | watchlist: pattern -> JSON, and its version under '' | training/watchlist.lua, bounded there |
| marks | hash | what people said of patterns and templates: `kind:number:workload` -> msgpack, and a version under '' | marks/mark.lua, bounded there |
| training:<id> | hash | one requested training: request, state, status, token | TTL 30 days from its end |
| training_queue | zset id -> ms | trainings that wait, and from when on they may begin | training/take.lua, training/cancel.lua |
| training_keys | hash | key of a waiting request -> id, to merge equal ones | as training_queue |
| training_now | string | the training that runs | training/end.lua |
| trainings | zset id -> ms | trainings, newest last | those that wait or run, and 200 that ended |
| trainings_ended | zset id -> number | trainings in the order they ended | 200 |
| drift:<version> | hash | what was measured under a version, and the window it is compared in (controller/drift.py) | TTL 30 days from the last commit |
| slots | hash | per schedule: slot that is done, who is at the current one (controller/schedule.py) | one per schedule |
| controller | hash | per model: last decision, what its past trainings left behind | one per model |
| decisions | list | decisions with their inputs, newest first, JSON | 1,000 |
| serving | hash worker -> JSON | the versions that a worker serves, and since when | the sweep drops silent workers |
| workers | hash name -> JSON | last heartbeat of every worker process | the sweep drops silent ones |
| gpu:nodes | hash node -> JSON | nodes and their agents | gpu/sweep.lua forgets a node silent for a day |
| gpu:beats | zset node -> ms | when a node was heard of last | as gpu:nodes |
| gpu:devices | hash uuid -> JSON | devices as their agent saw them | gpu/report.lua replaces a node's, gpu/sweep.lua with the node |
| gpu:leases | hash id -> JSON | leases that live | the scripts that end a lease: gpu_release, gpu_revoke, gpu_sweep, gpu_abandon, gpu_wait |
| gpu:deadlines | zset id -> ms | when leases end unless renewed | as gpu:leases |
| gpu:yields | zset id -> ms | when leases that were asked to yield are revoked | as gpu:leases |
| gpu:ended:<id> | string | how a lease ended, for its holder | TTL 10 min |
| gpu:taken | hash `uuid:what` -> n | memory, compute, shared, exclusive and left parts per device | as gpu:leases and gpu:left |
| gpu:left | hash `lease uuid token` -> JSON | parts whose processes may still be there | gpu/report.lua, gpu/clear.lua |
| gpu:freed | set of uuids | devices whose left parts have gone, to be told | gpu/sweep.lua |
| gpu:waiting | hash id -> JSON | needs that wait, one per asking process or program | gpu/commit.lua, gpu/abandon.lua; gpu/sweep.lua after a lease TTL without a word |
| gpu:waiting_until | zset id -> ms | when a waiting need is forgotten | as gpu:waiting |
| gpu:told:<id> | list | wakes whoever waits for a request | TTL 60 s |
| gpu:tokens | hash uuid -> n | newest fencing token of a device, and of all under '' | never deleted |
| gpu:usage | hash tenant -> `value:ms` | decayed use | one per tenant |
| gpu:reservation | string | the one reservation, JSON | gpu/commit.lua, and with its request gpu/abandon.lua, gpu/sweep.lua |
| gpu:epoch | string | number of changes of the pool | one |
| gpu:models | hash `[device, tenant, model]` -> JSON | models on devices: whose lease, state, last use | gpu/place.lua drops what no living lease covers |
| gpu:planning | string | who plans now | TTL 1 s |
| gpu:planned | string | somebody who waits has planned lately | TTL 0.5 s |
| watching | hash | observations ever taken off their list, dropped, their bytes; last round; open events, past ones, and incidents; `lost <workload>`: when pasts of it were last not kept | fixed fields, and one per workload, as watching:pulses |
| watching:observations | list | what stored batches said to the watcher, oldest first (watching/observation.py) | 10,000 and 64 MiB in ledger/commit.lua; watching/watched.lua |
| watching:sessions | hash workload NUL key -> msgpack | open sessions | 100,000, and 2,000,000 events in all; watching/watched.lua |
| watching:idle:<lane> | zset workload NUL key -> ms | when a session closes if nothing more comes | as watching:sessions |
| watching:pasts | hash workload NUL key -> msgpack | what came of sessions that fell silent (watching/sessions/history.py) | as watching:past_due |
| watching:past_due | zset workload NUL key -> ms | when each of those is forgotten, a day after its last event | 100,000, and 2,000,000 events in all; watching/watched.lua |
| watching:pulses | hash workload -> msgpack | the time of a workload, and its counts since the last look at its rates | 10,000 workloads; watching/watched.lua, 30 days after its last line |
| watching:rates | hash workload -> msgpack | what is known of a workload's rates (watching/rates/rates.py bounds each) | as watching:pulses, and 64 MiB in all |
| watching:incidents | string | incidents, msgpack (watching/incidents/live.py bounds it) | one |
| watching:rests | string | a round of the watcher hung lately | TTL 5 times `step_s` |
| watching:outbox | list | rows that the watcher found and no sink has yet, oldest first | emptied before a round adds to it |
| metrics:<role> | hash | what processes of a role have counted (observe/counters.py) | as many fields as closed labels allow, never deleted |
| trouble | string | the newest reason why work had to wait, JSON | TTL 15 s |
| probe | string | whether Redis takes writes | TTL 5 s |
"""

from dataclasses import dataclass
from typing import Final

WORKER_TTL_S: Final = 15
TROUBLE_TTL_S: Final = 15
SHARED: Final = "shared"  # the name of the model that answers for every workload without its own


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of all keys under one prefix."""

    prefix: str

    def __call__(self, *parts: str) -> str:
        return ":".join(("{" + self.prefix + "}", *parts))

    def kombu(self, name: str) -> str:
        """What Kombu keeps: a queue's messages, or who has which in hand. No braces, unlike what is our own (messages/app.py)."""
        return f"{self.prefix}:{name}"

    def batch(self, batch_id: str) -> str:
        return self("batch", batch_id)

    def payload(self, batch_id: str) -> str:
        return self("payload", batch_id)

    def work(self, batch_id: str) -> str:
        return self("work", batch_id)

    def totals(self, workload: str) -> str:
        return self("totals", workload)

    def verdicts(self, version: str, half: str) -> str:
        return self("verdicts", version, half)

    def evidence(self, half: str) -> str:
        return self("evidence", half)

    def lease(self, resource: str) -> str:
        return self("lease", resource)

    def gpu(self, *parts: str) -> str:
        return self("gpu", *parts)

    def watching(self, *parts: str) -> str:
        return self("watching", *parts)

    def metrics(self, role: str) -> str:
        return self("metrics", role)

    def forgotten(self, purpose: str) -> str:
        return self("forgotten", purpose)

    @property
    def due(self) -> str:
        return self("due")

    @property
    def dead(self) -> str:
        return self("dead")

    @property
    def warming(self) -> str:
        return self("warming")

    @property
    def counts(self) -> str:
        return self("counts")

    @property
    def closed(self) -> str:
        return self("closed")

    @property
    def workloads(self) -> str:
        return self("workloads")

    @property
    def cursors(self) -> str:
        return self("cursors")

    @property
    def templates(self) -> str:
        return self("templates")

    @property
    def templates_untold(self) -> str:
        return self("templates_untold")

    @property
    def template_changes(self) -> str:
        return self("template_changes")

    @property
    def template_counts(self) -> str:
        return self("template_counts")

    @property
    def tokens(self) -> str:
        return self("tokens")

    @property
    def epoch(self) -> str:
        return self("epoch")

    def model(self, name: str = SHARED) -> str:
        return self("model") if name == SHARED else self("model", name)

    def training(self, request_id: str) -> str:
        return self("training", request_id)

    def drift(self, version: str) -> str:
        return self("drift", version)

    @property
    def model_names(self) -> str:
        return self("model_names")

    @property
    def model_faults(self) -> str:
        return self("model_faults")

    @property
    def watch(self) -> str:
        return self("watch")

    @property
    def marks(self) -> str:
        return self("marks")

    @property
    def slots(self) -> str:
        return self("slots")

    @property
    def training_queue(self) -> str:
        return self("training_queue")

    @property
    def training_keys(self) -> str:
        return self("training_keys")

    @property
    def training_now(self) -> str:
        return self("training_now")

    @property
    def trainings(self) -> str:
        return self("trainings")

    @property
    def trainings_ended(self) -> str:
        return self("trainings_ended")

    @property
    def controller(self) -> str:
        return self("controller")

    @property
    def decisions(self) -> str:
        return self("decisions")

    @property
    def serving(self) -> str:
        return self("serving")

    @property
    def workers(self) -> str:
        return self("workers")

    @property
    def trouble(self) -> str:
        return self("trouble")

    @property
    def probe(self) -> str:
        return self("probe")
