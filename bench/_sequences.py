"""Sessions: HDFS blocks (protocol P1) and TrainTicket traces, each beside plain baselines.

`hdfs`: trained on the 4,855 normal sessions of the usual training file alone, thresholds from them alone;
tested on all other sessions of the logs, weighted by how often they are there and with each distinct one
once. What is called oracle picks its threshold on the test set. The rules have no random part, so a seed
draws nine tenths of the training sessions.

`trainticket`: trained on traces without an error span, tested on the others of them and on every trace with
one. In those faults each wrong trace holds templates that no normal one has, so knowing the events is enough.
Hence a second task, `known_lines`: held-out normal traces with one thing made wrong (cut short, a line lost,
repeated, or two parts changed about), so that only known lines are left to go by. Seeds draw what is held
out."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean, pstdev
from time import perf_counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bench import _sequences_data as sets
from bench._sequences_data import Labelled, Session
from pipeline.watching.sessions.model import SessionModel

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

_SHARE: Final = 0.9  # of the HDFS training sessions that a seed draws
_HELD_OUT: Final = 0.2  # of the normal TrainTicket traces
_TAMPERED: Final = ("cut", "lost", "repeated", "turned")
_ROWS: Final = 256


def hdfs(data: Path, seeds: int = 5) -> dict[str, Any]:
    """F1, precision and recall; `spread` over the seeds; baselines; sessions per second."""
    train, test = sets.hdfs(data)
    sessions = [row.session for row in test]
    wrong = np.array([row.anomalous for row in test])
    times = np.array([row.times for row in test], dtype=np.float64)
    everything = list(train.elements())
    model = SessionModel.fit(everything)
    flags = _anomalous(model, sessions)
    scores = _ratios(model, sessions)
    drawn = []
    for seed in range(seeds):
        chosen = np.random.default_rng(seed).choice(
            len(everything), int(_SHARE * len(everything)), replace=False
        )
        part = _anomalous(SessionModel.fit([everything[i] for i in chosen]), sessions)
        drawn.append((f1_of(part, wrong, times)["f1"], f1_of(part, wrong)["f1"]))
    weighted, distinct = f1_of(flags, wrong, times), f1_of(flags, wrong)
    return {
        "f1": weighted["f1"],
        "f1_distinct": distinct["f1"],
        "oracle_f1": _oracle(scores, wrong, times),
        "oracle_f1_distinct": _oracle(scores, wrong),
        "weighted": weighted,
        "distinct": distinct,
        "spread": {"f1": _spread([w for w, _ in drawn]), "f1_distinct": _spread([d for _, d in drawn])},
        "rules": {
            name: f1_of(scores_ > limit, wrong, times)["f1"]
            for name, scores_, limit in zip(
                ("counts", "order"), model.scores(sessions).T, model.limits(), strict=True
            )
        },
        "baselines": _plain(list(train), sessions, wrong, times),
        "sessions_per_s": _speed(model, test),
        "raw": _raw(data, seeds),
        "silent": _silent(data, seeds),
    }


def _raw(data: Path, seeds: int) -> dict[str, dict[str, float]]:
    """Raw lines of 11,501 blocks, of which 350 are anomalous: one half judged by what the other taught, its
    normal blocks alone, or all of them with nobody's word for any."""
    rows = sets.hdfs_raw(data)
    found: dict[str, list[float]] = {
        "f1_from_normal": [],
        "f1_unlabelled": [],
        "f1_unlabelled_all_believed": [],
    }
    for seed in range(seeds):
        half = np.random.default_rng(seed).random(len(rows)) < 0.5
        train = [row for row, is_train in zip(rows, half, strict=True) if is_train]
        test = [row for row, is_train in zip(rows, half, strict=True) if not is_train]
        wrong = np.array([row.anomalous for row in test])
        for name, trusted, normal in (
            ("f1_from_normal", True, True),
            ("f1_unlabelled", False, False),
            ("f1_unlabelled_all_believed", True, False),
        ):
            taught = [row.session for row in train if not (normal and row.anomalous)]
            model = SessionModel.fit(taught, trusted=trusted)
            found[name].append(f1_of(_anomalous(model, [row.session for row in test]), wrong)["f1"])
    return {name: _spread(values) for name, values in found.items()}


def _silent(data: Path, seeds: int) -> dict[str, dict[str, dict[str, float]]]:
    """The same raw lines as a stream has them, where a block is written, read and deleted with hours between:
    a half of the normal blocks teaches, the rest and all anomalous ones are judged. Blocks found and false
    alarms when a block is judged once when all of it is there, each part alone at every silence, or at every
    silence with all that came before. Unlabelled: what is judged is also what teaches, as in a run without a
    baseline."""
    rows = sets.hdfs_raw(data)
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):
        half = np.random.default_rng(seed).random(len(rows)) < 0.5
        train = [row for row, taught in zip(rows, half, strict=True) if taught and not row.anomalous]
        test = [row for row, taught in zip(rows, half, strict=True) if not taught or row.anomalous]
        for name, model, view in (
            ("whole", SessionModel.fit(row.session for row in train), lambda row: [row.session]),
            ("parts", SessionModel.fit(part for row in train for part in row.parts), lambda row: row.parts),
            (
                "states",
                SessionModel.fit_segments(row.parts for row in train),
                lambda row: accumulate(row.parts),
            ),
            (
                "whole_unlabelled",
                SessionModel.fit((row.session for row in test), trusted=False),
                lambda row: [row.session],
            ),
            (
                "states_unlabelled",
                SessionModel.fit_segments((row.parts for row in test), trusted=False),
                lambda row: accumulate(row.parts),
            ),
        ):
            judged = [(row, state) for row in test for state in view(row)]
            flags = _anomalous(model, [state for _, state in judged])
            told = {id(row): row for (row, _), flag in zip(judged, flags, strict=True) if flag}
            right = sum(row.anomalous for row in told.values())
            figures = found.setdefault(name, {"found": [], "false_alarms": []})
            figures["found"].append(right)
            figures["false_alarms"].append(len(told) - right)
    return {name: {what: _spread(values) for what, values in rows_.items()} for name, rows_ in found.items()}


def trainticket(data: Path, seeds: int = 5) -> dict[str, Any]:
    """F1 of finding traces with an error span, and of finding tampered traces that have known lines only."""
    rows, templates = sets.trainticket(data)
    normal = [row.session for row in rows if not row.anomalous]
    faults = [row.session for row in rows if row.anomalous]
    found: dict[str, dict[str, list[float]]] = {"faults": {}, "known_lines": {}}
    each: dict[str, list[float]] = {}
    for seed in range(seeds):
        draw = np.random.default_rng(seed)
        order = draw.permutation(len(normal))
        cut = int(_HELD_OUT * len(normal))
        train, held_out = [normal[i] for i in order[cut:]], [normal[i] for i in order[:cut]]
        model, plain = SessionModel.fit(train), Plain(train)
        tampered = [
            (how, _tampered(held_out[i], how, draw)) for i, how in enumerate(_TAMPERED * cut) if i < cut
        ]
        tasks = {
            "faults": faults,
            "known_lines": [session for _, session in tampered if session is not None],
        }
        for task, bad in tasks.items():
            sessions = held_out + bad
            wrong = np.arange(len(sessions)) >= len(held_out)
            verdicts = _anomalous(model, sessions)
            answers = {"rules": verdicts} | plain.flags(sessions)
            for name, flags in answers.items():
                found[task].setdefault(name, []).append(f1_of(flags, wrong)["f1"])
        for how in _TAMPERED:
            bad = [session for kind, session in tampered if kind == how and session is not None]
            each.setdefault(how, []).append(float(_anomalous(model, bad).mean()))
            plainly = plain.flags(bad)["event+length+count_vector"]
            each.setdefault(f"{how}_event+length+count_vector", []).append(float(plainly.mean()))
    return {
        "traces": len(rows),
        "templates": templates,
        "f1": round(mean(found["faults"]["rules"]), 4),
        **{task: {name: _spread(values) for name, values in rows_.items()} for task, rows_ in found.items()},
        "recall_known_lines": {name: round(mean(values), 3) for name, values in each.items()},
    }


class Plain:
    """Event set, length and plain count vectors, thresholds by leave-one-out as ours: what the rules are to
    beat."""

    def __init__(self, train: Sequence[Session]) -> None:
        self.events = {event for session in train for event in session}
        lengths = [len(session) for session in train]
        self.lengths = min(lengths), max(lengths)
        self.columns: dict[int, int] = {}
        self.vectors = np.unique(self._vectors(train, learn=True), axis=0)
        left_out = self.distances(self.vectors, itself=False)
        self.limit = float(left_out.max()) if len(left_out) > 1 else 0.0

    def flags(self, sessions: Sequence[Session]) -> dict[str, Flags]:
        """By rule and by rules together."""
        event = np.array([not self.events.issuperset(session) for session in sessions])
        length = np.array([not self.lengths[0] <= len(s) <= self.lengths[1] for s in sessions])
        counted = self.scores(sessions) > self.limit
        return {
            "event": event,
            "length": length,
            "event+length": event | length,
            "event+length+count_vector": event | length | counted,
        }

    def scores(self, sessions: Sequence[Session]) -> Floats:
        """Plain ECVC: L1 distance to the nearest count vector, divided by both totals."""
        return self.distances(self._vectors(sessions, learn=False), itself=True)

    def distances(self, vectors: Floats, *, itself: bool) -> Floats:
        found = np.zeros(len(vectors))
        totals = self.vectors.sum(axis=1)
        for begin in range(0, len(vectors), _ROWS):
            part = vectors[begin : begin + _ROWS]
            table = np.abs(part[:, None] - self.vectors[None]).sum(axis=2)
            table /= np.maximum(1.0, part.sum(axis=1)[:, None] + totals[None])
            if not itself:
                table[np.arange(len(part)), begin + np.arange(len(part))] = np.inf
            found[begin : begin + len(part)] = table.min(axis=1)
        return found

    def _vectors(self, sessions: Sequence[Session], *, learn: bool) -> Floats:
        if learn:
            for event in sorted({event for session in sessions for event in session}):
                self.columns[event] = len(self.columns)
        found = np.zeros((len(sessions), len(self.columns) + 1), dtype=np.float32)  # the last: unseen events
        for row, session in enumerate(sessions):
            for event, times in Counter(session).items():
                found[row, self.columns.get(event, len(self.columns))] += times
        return found.astype(np.float64) if len(found) < _ROWS else found  # type: ignore[return-value]


def _plain(
    train: Sequence[Session], sessions: Sequence[Session], wrong: Flags, times: Floats
) -> dict[str, dict[str, float]]:
    """Baseline rows of P1; those with a count vector have an oracle threshold, and ours beside it."""
    plain = Plain(train)
    flags = plain.flags(sessions)
    distance = plain.scores(sessions)
    known = flags["event+length"]
    rows = {
        name: {"f1": f1_of(flag, wrong, times)["f1"], "f1_distinct": f1_of(flag, wrong)["f1"]}
        for name, flag in flags.items()
    }
    for name, scores in (
        ("count_vector_oracle", distance),
        ("event+length+count_vector_oracle", np.where(known, np.inf, distance)),
    ):
        rows[name] = {"f1": _oracle(scores, wrong, times), "f1_distinct": _oracle(scores, wrong)}
    return rows


def _tampered(session: Session, how: str, draw: np.random.Generator) -> Session | None:
    """The session with one thing wrong; None where that changes nothing."""
    n = len(session)
    at = int(draw.integers(n))
    made: Mapping[str, Callable[[], Session]] = {
        "cut": lambda: session[: max(1, (2 * n) // 3)],
        "lost": lambda: session[:at] + session[at + 1 :],
        "repeated": lambda: session[:at] + 3 * session[at : at + 1] + session[at + 1 :],
        "turned": lambda: session[n // 2 :] + session[: n // 2],
    }
    changed = made[how]()
    return changed if changed and changed != session else None


def _anomalous(model: SessionModel, sessions: Sequence[Session]) -> Flags:
    return np.array([verdict.anomalous for verdict in model.judge(sessions)])


def _ratios(model: SessionModel, sessions: Sequence[Session]) -> Floats:
    return np.array([verdict.score for verdict in model.judge(sessions)])


def f1_of(flags: Flags, wrong: Flags, times: Floats | None = None) -> dict[str, float]:
    """F1, precision, recall and what they come from; `times` is how often each session is there."""
    weights = np.ones(len(wrong)) if times is None else times
    hit, false = weights[flags & wrong].sum(), weights[flags & ~wrong].sum()
    missed = weights[~flags & wrong].sum()
    return {
        "f1": round(float(2 * hit / max(1.0, 2 * hit + false + missed)), 4),
        "precision": round(float(hit / max(1.0, hit + false)), 4),
        "recall": round(float(hit / max(1.0, hit + missed)), 4),
        "false_alarms": float(false),
        "missed": float(missed),
    }


def _oracle(scores: Floats, wrong: Flags, times: Floats | None = None) -> float:
    """The best F1 of any threshold, chosen on the test set."""
    weights = np.ones(len(wrong)) if times is None else times
    order = np.argsort(-scores, kind="stable")
    hit = np.cumsum(np.where(wrong, weights, 0.0)[order])
    flagged = np.cumsum(weights[order])
    last = np.append(scores[order][1:] != scores[order][:-1], True)  # equal scores fall together
    return round(float((2 * hit / (flagged + weights[wrong].sum()))[last].max()), 4)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": round(mean(values), 4),
        "sd": round(pstdev(values), 4),
        "least": min(values),
        "most": max(values),
    }


def _speed(model: SessionModel, test: Sequence[Labelled]) -> int:
    """Sessions per second, repeated as they are in the log."""
    stream = [row.session for row in test for _ in range(row.times)]
    began = perf_counter()
    model.judge(stream)
    return round(len(stream) / (perf_counter() - began))
