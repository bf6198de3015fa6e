"""Budgets: GPU-hours of a tenant in a day, a week or a month."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
import redis
from gpu_worlds import GIB, device, exclusive, lease, request, shared, snapshot
from pool_devices import put_devices

from pipeline.errors import BadInput, LeaseRefused
from pipeline.gpu.policy import budgets
from pipeline.gpu.policy.budgets import parse_budget, period_of, why_exhausted, with_use
from pipeline.gpu.policy.explain import device_views, why_it_waits
from pipeline.gpu.policy.policy import make_plan, open_to_shared
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import BudgetPeriod, Need, Tenant, TenantBudget
from pipeline.settings import Settings

AT = int(datetime(2026, 11, 26, 5, 30, tzinfo=UTC).timestamp() * 1000)  # a Thursday
ONE = device()


def at(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type, misc]


# ---- pure ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hours", "per"),
    [("100/month", 100.0, "month"), ("2.5/day", 2.5, "day"), (" 0/week ", 0.0, "week")],
)
def test_a_budget_is_hours_and_a_period(text: str, hours: float, per: str) -> None:
    assert parse_budget(text) == TenantBudget(gpu_hours=hours, per=BudgetPeriod(per))
    assert parse_budget(text, refuses=True).refuses


@pytest.mark.parametrize(
    "text", ["", "100", "100/year", "-1/day", "1e3/day", "nan/day", "100/month/2", "12345678/day"]
)
def test_other_words_are_no_budget(text: str) -> None:
    with pytest.raises(BadInput, match="is no budget; write hours and a period"):
        parse_budget(text)


def test_periods_are_those_of_utc() -> None:
    assert period_of(BudgetPeriod.DAY, AT) == (at(2026, 11, 26), at(2026, 11, 27))
    assert period_of(BudgetPeriod.WEEK, AT) == (at(2026, 11, 23), at(2026, 11, 30))
    assert period_of(BudgetPeriod.MONTH, AT) == (at(2026, 11, 1), at(2026, 12, 1))
    december = int(at(2026, 12, 31, 23, 59).timestamp() * 1000)
    assert period_of(BudgetPeriod.MONTH, december) == (at(2026, 12, 1), at(2027, 1, 1))
    assert [len(list(budgets.days_of(per, AT))) for per in BudgetPeriod] == [1, 4, 26]


def budgeted(hours: float, used: float = 0.0, *, refuses: bool = False) -> dict[str, Tenant]:
    budget = TenantBudget(gpu_hours=hours, per=BudgetPeriod.DAY, refuses=refuses)
    return {"logweir": Tenant(name="logweir", budget=budget, used_gpu_hours=used)}


def test_what_lives_counts_up_to_now_by_its_share_and_from_the_period_on() -> None:
    half, quarter = shared(4 * GIB, compute_percent=50), shared(ONE.schedulable_mib // 4)
    # Two hours, of which the first half hour lies in the day before; the second has no share of time.
    held = [lease("l", half, [ONE], age_s=7200), lease("m", quarter, [ONE], age_s=3600)]
    world = snapshot([ONE], leases=held)
    midnight = int(period_of(BudgetPeriod.DAY, world.now_ms)[0].timestamp() * 1000)
    inside = min(7200, (world.now_ms - midnight) / 1000), min(3600, (world.now_ms - midnight) / 1000)
    found = with_use(budgeted(10), {"logweir": 3_600_000, "other": 9}, world)
    assert found["logweir"].used_gpu_hours == pytest.approx(1 + (0.5 * inside[0] + 0.25 * inside[1]) / 3600)
    whole = with_use(budgeted(10), {}, snapshot([ONE], leases=[lease("l", exclusive(), [ONE], age_s=60)]))
    assert whole["logweir"].used_gpu_hours == pytest.approx(1 / 60)


def test_a_tenant_whose_budget_is_used_up_gets_nothing_and_keeps_nothing_from_others() -> None:
    tenants = budgeted(5, used=5) | {"b": Tenant(name="b")}
    waits = [request("first", exclusive(), since_ms=1), request("second", exclusive(tenant="b"), since_ms=2)]
    made = make_plan(snapshot([ONE], waiting=waits, tenants=tenants))
    assert [grant.request_id for grant in made.grants] == ["second"]
    busy = snapshot([ONE], leases=[lease("l", exclusive(tenant="b"), [ONE])], waiting=waits, tenants=tenants)
    assert make_plan(busy).reservation is not None
    assert make_plan(busy).reservation.request_id == "second"  # type: ignore[union-attr]
    assert not open_to_shared(snapshot([ONE], tenants=tenants), shared(GIB))
    assert open_to_shared(snapshot([ONE], tenants=budgeted(5, used=4.99)), shared(GIB))


def test_the_reason_names_the_use_the_budget_and_the_next_period() -> None:
    tenant = budgeted(5, used=5.25)["logweir"]
    assert why_exhausted(tenant, AT) == (
        "its tenant logweir has used 5.25 of its 5 GPU-hours of this day; the next one begins at 2026-11-27 00:00 UTC"
    )
    waits = request("r", shared(GIB))
    world = snapshot([ONE], waiting=[waits], tenants={"logweir": tenant})
    assert why_it_waits(world, waits, device_views(world)).startswith(
        "its tenant logweir has used 5.25 of its 5"
    )
    assert why_exhausted(budgeted(5, used=4.99)["logweir"], AT) == ""
    assert why_exhausted(Tenant(name="free"), AT) == ""


# ---- on Redis, from two machines -------------------------------------------------------------------


@pytest.fixture
def machines(client: "redis.Redis", settings: Settings) -> tuple[Pool, Pool]:
    """One pool, seen from two machines that keep nothing in common but Redis."""
    own = settings.replace(gpu_node_ttl_ms=600_000)
    here, there = Pool(client, own), Pool(client, own)
    put_devices(here, 1)
    return here, there


def spend(pool: Pool, hours: float, name: str = "job") -> None:
    """As if a lease of the whole device had lived so long, within today."""
    got = pool.request(exclusive(), holder="h", request_id=name)
    key = pool.ledger.keys.gpu("leases")
    text = (pool.client.hget(key, name) or b"").decode()
    then = got.granted_ms - round(hours * 3_600_000)
    pool.client.hset(key, name, text.replace(f'"granted_ms":{got.granted_ms}', f'"granted_ms":{then}'))
    assert pool.release(got)


def budget(pool: Pool, wanted: TenantBudget | None, tenant: str = "logweir") -> None:
    pool.planner.accounts.change(tenant, lambda account: replace(account, budget=wanted))


def test_a_budget_that_is_used_up_lets_needs_wait_or_refuses_them(machines: tuple[Pool, Pool]) -> None:
    here, there = machines
    month = TenantBudget(gpu_hours=0.01, per=BudgetPeriod.MONTH)
    spend(here, 0.007)
    budget(here, month)
    budget(here, month, "gone")  # the settings do not name it any more
    assert here.snapshot().tenants["logweir"].used_gpu_hours < 0.008
    need = Need(memory_mib=100)
    there.release(there.request(need, holder="h"))
    spend(there, 0.004, "more")
    # Each machine looks once a second; these two begin anew.
    here, there = (Pool(one.client, one.settings) for one in machines)
    with pytest.raises(
        LeaseRefused,
        match=r"no GPU now: its tenant logweir has used 0\.01 of its 0\.01 GPU-hours of this month",
    ):
        here.request(need, holder="h")
    with pytest.raises(LeaseRefused, match=r"within 0\.05 s: its tenant logweir has used"):
        there.request(need, holder="h", timeout_s=0.05)
    budget(there, replace(month, refuses=True))
    assert there.snapshot()
    with pytest.raises(LeaseRefused, match=r"^no GPU now: its tenant logweir has used"):
        there.request(need, holder="h", timeout_s=None)  # it does not wait
    budget(there, None)
    there.release(there.request(need, holder="h"))
