"""The sequence detector: what normal sessions look like, and which ones do not."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_sets import DATA, needs_log_sets

from pipeline.errors import BadBundle
from pipeline.watching.sessions.model import (
    LEVEL,
    MAX_VECTORS,
    NORMAL,
    SessionModel,
    SessionVerdict,
    dump,
    load,
)
from pipeline.watching.sessions.prefixes import SessionWithGaps, most_frequent, thin_out

ROOT = Path(__file__).resolve().parents[2]
Session = tuple[int, ...]

# Requests: begun, one or two reads, one write or none, done.
READ = (1, 2, 3, 9)
TWICE = (1, 2, 3, 2, 3, 9)
WRITE = (1, 2, 3, 4, 5, 9)
BOTH = (1, 2, 3, 2, 3, 4, 5, 9)
NORMALS = [READ] * 400 + [TWICE] * 300 + [WRITE] * 200 + [BOTH] * 100


def judged(session: Session, normals: Sequence[Session] = NORMALS) -> SessionVerdict:
    return SessionModel.fit(normals).judge([session])[0]


def reread(model: SessionModel) -> SessionModel:
    return load(dump({"shop": model}))["shop"]


def names(verdict: SessionVerdict) -> list[str]:
    return [reason.partition(":")[0] for reason in verdict.reasons]


def test_a_session_of_training_is_normal() -> None:
    model = SessionModel.fit(NORMALS)
    assert model.judge([READ, TWICE, WRITE, BOTH]) == [NORMAL] * 4


def test_a_session_is_set_beside_the_nearest_learnt_one() -> None:
    model = SessionModel.fit([(1, 2, 2, 3)] * 60 + [(7, 8)] * 60)
    assert model.beside_nearest((2, 1, 3, 2)) == (4, [])
    size, differences = model.beside_nearest((1, 2, 3, 9))
    assert size == 4 and sorted(differences) == [(2, 1, 2), (9, 1, 0)]
    assert model.beside_nearest((7, 8, 8))[1] == [(8, 2, 1)]
    assert model.beside_nearest(()) == (0, [])


def test_an_event_that_training_never_saw_is_named() -> None:
    verdict = judged((1, 2, 3, 77, 9))
    assert verdict.anomalous
    assert verdict.reasons[0] == "session-event:77"
    assert verdict.cause == "session-event:77"


def test_an_event_that_comes_too_often_is_named_with_both_numbers() -> None:
    verdict = judged((1, 2, 3, 4, 4, 4, 5, 9))
    assert verdict.anomalous
    assert verdict.reasons[0] == "session-counts:4 3/1"
    assert verdict.cause == "session-counts:4"


def test_an_event_that_is_missing_is_named_with_both_numbers() -> None:
    verdict = judged((1, 2, 3, 4, 5))
    assert verdict.anomalous
    assert verdict.reasons[0] == "session-counts:9 0/1"


def test_known_numbers_in_an_unknown_order_are_named() -> None:
    verdict = judged((9, 5, 4, 3, 2, 1))
    assert verdict.anomalous
    assert names(verdict) == ["session-order"]
    assert verdict.reasons[0].removeprefix("session-order:").split()[0] in {"1", "2", "3", "4", "5", "9"}
    assert " " not in verdict.cause


def test_numbers_that_vary_in_training_are_forgiven_and_those_that_never_do_are_not() -> None:
    draw = random.Random(2)
    numbers = [3 + int(draw.lognormvariate(4.0, 0.8)) for _ in range(3_000)]
    unseen = next(n for n in range(100, 400) if n not in numbers)
    model = SessionModel.fit([(1, *(2,) * n, 9) for n in numbers])
    varied, fixed = model.judge([(1, *(2,) * unseen, 9), (1, *(2,) * 5, 9, 9, 9)])
    assert not varied.anomalous
    assert fixed.anomalous
    assert fixed.cause == "session-counts:9"


def test_events_that_come_in_any_order_have_no_wrong_one() -> None:
    draw = random.Random(3)
    shuffled = [(1, *draw.sample(range(2, 12), 10), 99) for _ in range(2_000)]
    model = SessionModel.fit(shuffled[:1_500])
    assert not any(verdict.anomalous for verdict in model.judge(shuffled[1_500:]))


def test_more_anomalous_scores_higher_and_is_less_likely() -> None:
    mild, wild = judged((1, 2, 3, 2, 3, 2, 3, 9)), judged((77, 78, 79, 80))
    assert wild.score > mild.score
    assert wild.p_value <= mild.p_value
    assert all(0.0 <= v.score < 1.0 and 0.0 < v.p_value <= 1.0 for v in (mild, wild))


def test_a_score_is_above_a_half_exactly_when_it_is_anomalous() -> None:
    draw = random.Random(5)
    model = SessionModel.fit(NORMALS)
    tried = [tuple(draw.choices((1, 2, 3, 4, 5, 9, 77), k=draw.randint(1, 20))) for _ in range(300)]
    assert all((v.score > 0.5) == v.anomalous for v in model.judge([*tried, *NORMALS]))
    assert all(bool(v.reasons) == v.anomalous for v in model.judge(tried))


def test_normal_sessions_never_seen_are_rarely_anomalous() -> None:
    # Flows with two parts that vary by themselves, so that many held-out sessions are of a kind never seen.
    draw = random.Random(7)

    def one() -> Session:
        return (1, *(2, 3) * draw.randint(1, 12), *(4,) * draw.randint(0, 6), *draw.sample((5, 6, 7), 3), 9)

    model = SessionModel.fit([one() for _ in range(3_000)])
    false = sum(verdict.anomalous for verdict in model.judge([one() for _ in range(3_000)]))
    assert false <= 3_000 * LEVEL * 10


def test_where_no_kind_of_session_is_rare_every_new_one_is_anomalous() -> None:
    model = SessionModel.fit([(1, *(2,) * n, 9) for n in range(3, 40)] * 100)
    assert model.judge([(1, *(2,) * 41, 9)])[0].anomalous


# Seven kinds of request that nobody vouches for, and a fault that came ten times.
UNNAMED = [(1, *(2, 3) * n, 9) for n in range(1, 8)] * 100
FAULT = (1, 50, 51, 52, 53)


def test_a_fault_among_sessions_that_nobody_calls_normal_is_not_learnt() -> None:
    model = SessionModel.fit([*UNNAMED, *[FAULT] * 10], trusted=False)
    assert model.judge([FAULT])[0].anomalous
    assert not any(verdict.anomalous for verdict in model.judge(UNNAMED))
    assert not SessionModel.fit([*UNNAMED, *[FAULT] * 10]).judge([FAULT])[0].anomalous


def test_of_unlabelled_sessions_one_with_an_event_that_no_common_one_has_is_not_learnt_however_near() -> None:
    near = (1, *(2, 3) * 7, 50, 9)
    rare = (1, *(2, 3) * 7, 3, 9)
    model = SessionModel.fit([*UNNAMED * 4, *[near] * 240, *[rare] * 8], trusted=False)
    assert [verdict.anomalous for verdict in model.judge([near, rare])] == [True, False]
    assert model.judge([near])[0].cause == "session-event:50"


def test_what_is_more_than_a_few_sessions_is_learnt_whoever_vouches_for_it() -> None:
    model = SessionModel.fit([*UNNAMED, *[FAULT] * 90], trusted=False)
    assert not model.judge([FAULT])[0].anomalous


def test_flows_with_nothing_in_common_do_not_make_everything_normal() -> None:
    draw = random.Random(1)
    first, second = (1, 2, 3, 4, 5, 6), (11, 12, 13, 14, 15, 16)

    def one() -> Session:
        return (21, *(22, 23) * draw.randint(1, 6), *draw.sample((25, 26, 27), draw.randint(0, 3)), 29)

    third = [one() for _ in range(200)]
    model = SessionModel.fit([*[first] * 900, *[second] * 900, *third])
    wrong = [(1, 2, 3, 99, 4, 5, 6), (11, 12, 13, 14, 15), (1, 2, 3, 14, 15, 16)]
    assert all(verdict.anomalous for verdict in model.judge(wrong))
    assert sum(verdict.anomalous for verdict in model.judge([one() for _ in range(200)])) <= 2


def test_unlabelled_flows_with_nothing_in_common_are_learnt_but_for_what_has_other_events() -> None:
    flows = [tuple(range(10 * n, 10 * n + 6)) for n in range(1, 8)]
    longer = (*flows[0], flows[0][-1])
    model = SessionModel.fit([*flows * 400, *[longer] * 20, *[(*flows[0], 99)] * 20], trusted=False)
    assert [verdict.anomalous for verdict in model.judge([longer, (*flows[0], 99)])] == [False, True]


def test_where_few_kinds_are_common_nothing_is_left_out() -> None:
    model = SessionModel.fit([*[READ] * 200, FAULT], trusted=False)
    assert not model.judge([FAULT])[0].anomalous


# Written at once, read now and then, deleted hours later: silent in between.
BLOCK = ((1, 2, 2, 2), (8,), (8, 8), (9, 9, 9))
BLOCKS = [BLOCK[:1]] * 200 + [(BLOCK[0], BLOCK[3])] * 300 + [BLOCK] * 100 + [BLOCK[:2]] * 60


def test_a_session_is_normal_at_every_silence_at_which_normal_ones_were_and_wrong_at_others() -> None:
    model = SessionModel.fit_segments(BLOCKS)
    assert model.stateful and not SessionModel.fit(NORMALS).stateful
    states = [(1, 2, 2, 2), (1, 2, 2, 2, 8), (1, 2, 2, 2, 8, 8, 8), (1, 2, 2, 2, 8, 8, 8, 9, 9, 9)]
    assert model.judge(states) == [NORMAL] * 4
    short, alone = model.judge([(1, 2), (9, 9, 9)])
    assert short.anomalous, "no normal session was silent with so little"
    assert alone.anomalous, "a part by itself is no session"
    assert reread(model).judge(states) == [NORMAL] * 4
    assert reread(model).stateful
    always = reread(SessionModel.fit_segments([BLOCK] * 60))
    assert always.judge(states) == [NORMAL] * 4, "no session ended with what others were silent after"


def test_segments_without_gaps_are_whole_sessions_and_a_newer_version_is_refused() -> None:
    model = SessionModel.fit_segments([session] for session in NORMALS)
    blob = dump({"": model})
    assert blob == dump({"": SessionModel.fit(NORMALS)})
    version, models = msgpack.unpackb(blob)
    with pytest.raises(BadBundle, match=f"version {version + 1}"):
        load(msgpack.packb([version + 1, models]))


def test_a_key_that_is_used_again_after_silences_names_a_new_session_each_time() -> None:
    draw = random.Random(4)
    again = [tuple(draw.choices([READ, TWICE, WRITE], k=draw.randint(1, 9))) for _ in range(800)]
    model = SessionModel.fit_segments(again)
    assert not model.stateful
    assert model.judge([READ, TWICE, WRITE]) == [NORMAL] * 3
    assert model.judge([READ + READ])[0].anomalous


def test_how_most_sessions_begin_says_nothing_of_how_far_they_vary() -> None:
    draw = random.Random(3)
    odd = [((1, 80, 81, 82, 83, 84),)] * 20
    usual = [
        ((1, 2, 2, 2), *((8,) * draw.randint(1, 3) for _ in range(draw.randint(0, 9)))) for _ in range(900)
    ]
    model = SessionModel.fit_segments([*usual, *odd])
    assert model.judge([(1, 2, 2, 2, 99)])[0].anomalous
    assert model.limits()[0] < 1.0, "without how they begin there is nothing left but odd ones"


def test_states_of_one_session_do_not_vouch_for_each_other() -> None:
    odd = ((1, 70), (70,), (70, 70))
    model = SessionModel.fit_segments([*[((1, 2, 3), (9,))] * 300, *[((1, 2, 3, 3), (9,))] * 300, odd])
    left_out = model.count_tail.values
    usual = SessionModel.fit([(1, 70), *[(1, 2, 3)] * 300, *[(1, 2, 3, 9)] * 300]).count_tail.values
    assert left_out[-1] > 0.5 * usual[-1], "its states lie side by side, and far from all others"


@pytest.mark.long
def test_however_often_normal_sessions_fall_silent_few_of_them_are_anomalous() -> None:
    draw = random.Random(11)

    def one() -> list[Session]:
        parts = [(1, *(2,) * draw.randint(3, 5), *(3,) * draw.randint(0, 2))]
        parts += [(4, *(5,) * draw.randint(1, 3)) for _ in range(draw.randint(0, 6))]
        return [*parts, (9,) * draw.randint(1, 2)]

    model = SessionModel.fit_segments([one() for _ in range(800)])
    assert model.stateful
    states = {
        sum(parts[:end], ()): at
        for at, parts in enumerate(one() for _ in range(800))
        for end in range(1, len(parts) + 1)
    }
    verdicts = model.judge(list(states))
    wrong = {at for at, verdict in zip(states.values(), verdicts, strict=True) if verdict.anomalous}
    assert len(wrong) <= 800 * LEVEL * 10


def test_one_kind_of_session_is_enough_to_learn_from() -> None:
    model = SessionModel.fit([READ] * 3_000)
    assert model.judge([READ])[0] == NORMAL
    assert model.judge([(1, 2, 9)])[0].anomalous


def test_ids_of_no_template_do_no_harm_and_are_one_event() -> None:
    normals = [(1, -5, 9)] * 60 + [(1, 0, 9)] * 60
    model = SessionModel.fit(normals)
    assert model.judge([(1, -7, 9), (1, 0, 9)]) == [NORMAL, NORMAL]
    assert model.vocabulary.vectors.rows == 1


def test_an_event_that_ends_sessions_is_learnt_and_one_that_also_comes_earlier_is_not() -> None:
    assert SessionModel.fit(NORMALS).ends == {9}
    assert SessionModel.fit([*NORMALS, *[(1, 9, 2, 9)] * 50]).ends == set()
    assert SessionModel.fit([READ] * 5).ends == set()


def test_an_empty_session_is_normal_and_no_session_at_all_is_refused() -> None:
    assert SessionModel.fit(NORMALS).judge([()])[0] == NORMAL
    assert SessionModel.fit(NORMALS).judge([]) == []
    with pytest.raises(ValueError, match="no session"):
        SessionModel.fit([()])


def test_a_very_long_session_is_looked_at_up_to_its_limit() -> None:
    verdict = judged((1,) * 100_000)
    assert verdict.anomalous
    assert verdict.reasons[0] == "session-counts:1 2000/1"


def test_sessions_that_fall_silent_very_often_are_learnt_as_far_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chatty = [[(50, 51), *[(n, 9)] * 39] for n in range(1, 30)]  # 40 states of 2 to 80 events: 1,640 in each
    monkeypatch.setattr("pipeline.watching.sessions.prefixes.MAX_PREFIX_EVENTS", 5_000)
    model = SessionModel.fit_segments(chatty)
    assert (model.sessions, model.stateful) == (3, True)
    monkeypatch.setattr("pipeline.watching.sessions.prefixes.MAX_PREFIX_EVENTS", 10)
    assert SessionModel.fit_segments(chatty).sessions == 1
    assert SessionModel.fit([(1, 2)]).sessions == 1


@pytest.mark.long
def test_long_sessions_that_are_always_silent_keep_no_other_out() -> None:
    draw = random.Random(2)
    many = [[(10, *draw.choices(range(11, 30), k=20))] for _ in range(500)]
    chatty = [[(1,), *[(2 + i % n,) for i in range(1_999)]] for n in (3, 4)]
    model = SessionModel.fit_segments(many + chatty)
    assert (model.sessions, model.stateful) == (502, True)


def test_one_for_which_there_is_no_room_keeps_out_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.watching.sessions.prefixes.MAX_PREFIX_EVENTS", 1_000)
    times = Counter[SessionWithGaps]({((1, 2), (2,)): 9, ((5,) * 1_500, (1_500,)): 8, ((1, 3), (2,)): 7})
    assert [session for (session, _), _ in most_frequent(times)] == [(1, 2), (1, 3)]


def test_states_that_are_looked_at_are_evenly_chosen_and_the_last_is_one() -> None:
    assert thin_out(ends := tuple(range(1, 150))) == ends
    some = thin_out(range(1, 2_001))
    assert (len(some), some[0], some[-1]) == (10, 200, 2_000)
    assert list(thin_out([19_999, 20_001])) == [20_001]


def _unlike(draw: random.Random) -> Session:
    return tuple(draw.sample(range(1, 1_000), 6))


def _sometimes_unlike(draw: random.Random) -> Session:
    return (1, 2, 3, 4) if draw.random() < 0.7 else tuple(draw.sample(range(10, 400), 5))


def _rare_requests(draw: random.Random) -> Session:
    first = 10 * draw.randrange(1, 60)
    return (1, 2, 3, 4) if draw.random() < 0.95 else tuple(range(first, first + 4))


def _requests(draw: random.Random) -> Session:
    first = 1_000 + 10 * min(400, int(draw.paretovariate(0.9)))
    return tuple(range(first, first + 4))


@pytest.mark.long
@pytest.mark.parametrize("one", [_unlike, _sometimes_unlike, _rare_requests, _requests])
def test_where_too_few_are_alike_to_say_how_far_normal_ones_vary_none_is_far(
    one: Callable[[random.Random], Session],
) -> None:
    draw = random.Random(1)
    model = SessionModel.fit([one(draw) for _ in range(1_000)])
    wrong = [v for v in model.judge([one(draw) for _ in range(1_000)]) if v.anomalous]
    assert len(wrong) <= 8
    assert all(v.p_value <= 3 / 1_001 for v in wrong)


def test_what_is_learnt_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.watching.sessions.prefixes.MAX_DISTINCT", 50)
    monkeypatch.setattr("pipeline.watching.sessions.model.MAX_VECTORS", 20)
    monkeypatch.setattr("pipeline.watching.sessions.model.MAX_TRANSITIONS", 30)
    draw = random.Random(1)
    many = [tuple(draw.choices(range(1, 40), k=12)) for _ in range(500)]
    model = SessionModel.fit([*many, *NORMALS])
    assert model.vocabulary.vectors.rows <= 20
    assert model.transitions is None
    assert not model.judge([READ])[0].anomalous, "the most frequent ones are kept"
    assert reread(model).judge(many) == model.judge(many)


SESSIONS = st.lists(
    st.lists(st.integers(-2, 12), min_size=1, max_size=12).map(tuple), min_size=1, max_size=40
)


@settings(max_examples=40, deadline=None)
@given(SESSIONS, SESSIONS, st.randoms(use_true_random=False))
def test_the_order_of_training_sessions_changes_nothing(
    train: list[Session], others: list[Session], draw: random.Random
) -> None:
    shuffled = list(train)
    draw.shuffle(shuffled)
    one, other = SessionModel.fit(train), SessionModel.fit(shuffled)
    assert one.judge(others) == other.judge(others)
    assert dump({"": one}) == dump({"": other})
    several = [[session[:3], session[3:]] for session in train]
    draw.shuffle(several)
    silent = SessionModel.fit_segments([session[:3], session[3:]] for session in train)
    assert dump({"": SessionModel.fit_segments(several)}) == dump({"": silent})
    if silent.stateful:
        assert all(verdict == NORMAL for verdict in silent.judge([*train, *(s[:3] for s in train)]))


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(SESSIONS, SESSIONS)
def test_training_is_normal_verdicts_are_sane_and_bytes_bring_them_back(
    train: list[Session], others: list[Session]
) -> None:
    model = SessionModel.fit(train)
    assert all(verdict == NORMAL for verdict in model.judge(train))
    verdicts = model.judge(others)
    assert all(0 <= v.score < 1 and 0 < v.p_value <= 1 for v in verdicts)
    assert reread(model).judge(others) == verdicts
    alone = [model.judge([session])[0] for session in others]
    assert alone == verdicts, "a verdict does not depend on the sessions judged with it"


def test_the_file_of_a_bundle_holds_each_workload_apart() -> None:
    models = {"shop": SessionModel.fit(NORMALS), "": SessionModel.fit([(4, 5)] * 60)}
    back = load(dump(models))
    assert sorted(back) == ["", "shop"]
    assert back["shop"].judge([READ, (4, 5)]) == models["shop"].judge([READ, (4, 5)])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_read_but_never_anything_else(data: st.DataObject) -> None:
    blob = bytearray(dump({"shop": SessionModel.fit(NORMALS)}))
    at = data.draw(st.integers(0, len(blob) - 1))
    how = data.draw(st.sampled_from(["cut", "flip", "blank"]))
    if how == "cut":
        blob = blob[:at]
    elif how == "flip":
        blob[at] ^= data.draw(st.integers(1, 255))
    else:
        blob[at : at + 8] = b"\xff" * 8
    try:
        models = load(bytes(blob))
    except BadBundle:
        return
    for model in models.values():
        for verdict in model.judge([READ, (1, 2, 77), (9, 3, 2, 1)]):
            assert 0 <= verdict.score <= 1


@pytest.mark.parametrize(
    "blob",
    [b"", b"\xc1", b"\x00", msgpack.packb({}), msgpack.packb([99, {}]), msgpack.packb([1, 2]), msgpack.packb([1, {"": 7}]), b"\x81" * 2_000],
)  # fmt: skip
def test_bytes_of_something_else_are_refused(blob: bytes) -> None:
    with pytest.raises(BadBundle):
        load(blob)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", 10**9), ("rows", -1), ("rows", True), ("level", 0.0), ("level", float("nan")),
        ("count_tail", [b"", b"x" * 8]), ("count_tail", [b"", b""]), ("order_tail", [2.0, 1.0]),
        ("ends", [-4]), ("sessions", "many"), ("weights", None),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_are_refused(field: str, value: object) -> None:
    version, models = msgpack.unpackb(dump({"shop": SessionModel.fit(NORMALS)}))
    assert field in models["shop"]
    models["shop"][field] = value
    with pytest.raises(BadBundle, match="publish it again"):
        load(msgpack.packb([version, models]))


@pytest.mark.parametrize("name", ["row", "event", "n", "events", "weights", "pairs", "times"])
def test_arrays_that_do_not_fit_are_refused(name: str) -> None:
    version, models = msgpack.unpackb(dump({"shop": SessionModel.fit(NORMALS)}))
    models["shop"][name] = np.full(3, -1, dtype="<i8").tobytes()
    with pytest.raises(BadBundle):
        load(msgpack.packb([version, models]))


@pytest.mark.long
@needs_log_sets
def test_on_hdfs_the_rules_hold_what_was_measured() -> None:
    from bench._sequences import f1_of
    from bench._sequences_data import hdfs

    train, test = hdfs(DATA)
    verdicts = SessionModel.fit(train.elements()).judge([row.session for row in test])
    flags = np.array([verdict.anomalous for verdict in verdicts])
    wrong = np.array([row.anomalous for row in test])
    times = np.array([row.times for row in test], dtype=np.float64)
    assert f1_of(flags, wrong, times)["f1"] >= 0.985
    assert f1_of(flags, wrong)["f1"] >= 0.965


def test_with_more_kinds_of_sessions_than_are_kept_ordinary_ones_stay_normal() -> None:
    """Every session is made in one way, and their count vectors are three times the number that is kept."""
    rng = random.Random(1)

    def visit() -> tuple[int, ...]:
        pages = min(40, 1 + int(rng.expovariate(1 / 5)))
        return (1, *rng.choices(range(10, 22), weights=[1 / (k + 1) for k in range(12)], k=pages), 2)

    learnt = [visit() for _ in range(8_000)]
    assert len({tuple(sorted(Counter(session).items())) for session in learnt}) > 3 * MAX_VECTORS
    model = SessionModel.fit(learnt)
    for sessions in (learnt, [visit() for _ in range(8_000)]):
        assert sum(verdict.anomalous for verdict in model.judge(sessions)) <= 5 * LEVEL * len(sessions)
