"""What must hold of the GPU pool whatever happens, and the tests that state it.

1. Leases on a device, with the orphans of ended leases, never exceed what may be leased, in signed numbers,
   after any step and any crash.
   test_ledger_machine.py::test_the_pool_agrees_with_its_model_whatever_happens
   test_ledger.py::test_a_device_that_shrank_under_its_leases_has_no_room_not_endless_room
   test_policy.py::test_every_plan_keeps_to_capacity_whole_gangs_closed_doors_and_quotas
   test_torture.py::test_leases_hold_while_processes_are_killed_and_stopped_and_redis_is_restarted
2. A need that fits exactly is granted; one that no device can ever take is refused at once, with the
   reason of each device.
   test_ledger.py::test_an_exact_fit_is_granted_and_one_mib_more_is_not
   test_policy.py::test_an_exact_fit_is_accepted_to_the_last_mib_and_percent
   test_admission.py::test_a_need_larger_than_every_device_is_told_what_each_has
   ../e2e/test_gpu_story.py::test_what_can_never_be_had_is_refused_at_once_with_the_reason_per_device
   test_agent.py::test_unequal_gpus_of_a_node_keep_their_own_sizes
3. A lease moves from granted to active to one of its ends and never back; each device counts its leases, and
whoever
   comes with a count that is not the lease's own can neither renew, begin nor give back.
   test_ledger.py::test_a_lease_lives_through_its_states_and_says_how_it_ended
   test_ledger.py::test_tokens_only_grow_and_no_two_leases_have_the_same
   test_ledger.py::test_a_stranger_and_a_stale_token_can_neither_renew_nor_begin_nor_release
   test_ledger.py::test_a_lease_that_ran_out_cannot_be_renewed_before_or_after_the_sweep
   test_pool.py::test_two_needs_of_one_size_are_not_swapped
4. What a killed holder had is back after its TTL and one sweep, and goes to nobody before its process has
left the
   device.
   test_invariants.py::test_capacity_of_a_killed_holder_is_back_within_ttl_and_one_sweep
   test_ledger.py::test_after_a_kill_the_device_is_free_only_when_its_process_has_gone
5. The same holder that asks again under the same name gets the lease that it has.
   test_ledger.py::test_asking_again_gives_the_same_lease_and_renews_it
   test_pool.py::test_asking_again_under_the_same_name_gives_the_same_lease
6. A restart of Redis loses no lease and no token.
   test_ledger.py::test_a_restarted_redis_keeps_leases_and_tokens_and_grants_nothing_for_a_while
7. Only the clock of Redis counts, and it may go backwards.
   test_ledger.py::test_a_node_whose_clock_is_an_hour_off_is_shown_so_and_works
   test_ledger.py::test_a_redis_clock_that_went_back_ends_nothing_and_decays_nothing
   test_fairness.py::test_a_clock_that_steps_back_neither_fades_nor_raises_use
8. A gang has all of its devices or none; one need at a time has the reservation; what overtakes it does not
delay it;
   every need has its turn.
   test_ledger.py::test_a_gang_gets_all_of_its_devices_or_none
   test_policy.py::test_the_first_need_that_does_not_fit_gets_the_one_reservation
   test_policy.py::test_nothing_that_overtakes_delays_the_start_that_was_reserved
   test_policy.py::test_whoever_is_at_place_p_starts_within_p_plus_one_longest_leases
9. Divisible needs get what dominant resource fairness promises; whole ones leave nobody envious by more than
one need and
   nothing that fits idle; splitting work gains nothing.
   test_fairness.py::test_the_reference_has_the_four_properties_of_the_paper
   test_fairness.py::test_nobody_envies_another_by_more_than_one_need
   test_fairness.py::test_nothing_that_fits_outside_the_reservation_is_left_waiting
   test_fairness.py::test_splitting_work_into_more_needs_gains_nothing
10. Past use fades the same in one step as in two, and many needs at once gain nothing over one at a time.
   test_fairness.py::test_fading_twice_is_fading_once_over_both_times
   test_fairness.py::test_a_burst_of_submissions_cannot_beat_the_entry_penalty
11. Displacing comes to rest, takes no lease that could have stayed, and leaves a new one alone for a while.
   test_policy.py::test_displacing_comes_to_rest_and_never_goes_in_turns
   test_policy.py::test_no_victim_could_have_stayed
   test_policy.py::test_a_lease_is_left_alone_by_other_tenants_for_its_first_seconds
12. A fatal error of a GPU marks all of its slices, one that names no GPU marks all, an error of a program
none; a device
   comes back after it was well for a while; whoever cannot look at it calls it unhealthy.
   test_agent.py::test_an_xid_marks_every_slice_of_its_gpu_and_no_other
   test_agent.py::test_an_xid_that_names_no_gpu_marks_all
   test_agent.py::test_errors_of_a_program_leave_the_gpu_usable
   test_agent.py::test_a_fatal_xid_makes_the_gpu_unusable_until_it_was_well_for_a_while
   test_agent.py::test_a_gpu_whose_driver_asks_for_a_reset_is_unusable_until_it_was_reset
   test_agent.py::test_a_look_whose_thread_cannot_start_makes_devices_unusable_and_they_recover
13. A model is loaded once per device; a load that never ends is given up; models go with the lease that they
were loaded
   under, however that ends.
   test_placement.py::test_two_processes_that_race_load_a_model_once
   test_placement.py::test_a_load_that_never_ends_is_given_up_and_its_memory_stays_counted_until_it_does
   test_placement.py::test_the_claim_of_a_dead_loader_ends_with_its_lease
   test_placement.py::test_models_go_with_the_lease_that_they_were_loaded_under
14. A limit holds only when whoever it limits has read it back.
   test_cuda.py::test_a_limit_that_did_not_take_is_an_error
   test_mps.py::test_limits_hold_only_once_the_daemon_lists_the_process
15. Without a driver everything works on the CPU, and a process that forks never has CUDA.
   test_nvml.py::test_a_machine_without_the_library_has_no_devices
   test_agent.py::test_without_a_driver_the_pool_is_empty_and_the_agent_goes_on
   ../e2e/test_gpu_worker.py::test_the_parent_of_a_gpu_worker_never_loads_torch
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from polling import wait_until
from pool_devices import put_devices

from pipeline.errors import LeaseRefused
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import LeaseMode, LeaseState, Need
from pipeline.settings import Settings

HERE = Path(__file__).resolve().parent
WHOLE = Need(mode=LeaseMode.EXCLUSIVE)
TTL_MS = 2_000
HOLDER = """
import time
from pipeline.gpu.values import LeaseMode
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Need
from pipeline.redis.connection import connect
from pipeline.settings import Settings
settings = Settings.load()
with Pool(connect(settings), settings).lease(Need(mode=LeaseMode.EXCLUSIVE), holder="to be killed", timeout_s=20):
    time.sleep(60)
"""


def named() -> list[tuple[int, str, str]]:
    """(invariant, file, test) of the list above."""
    found, number = [], 0
    for line in (__doc__ or "").splitlines():
        if start := re.match(r"(\d+)\. ", line):
            number = int(start[1])
        elif test := re.fullmatch(r"   (\S+\.py)::(test_\w+)", line):
            found.append((number, test[1], test[2]))
    return found


def test_every_invariant_names_tests_that_exist() -> None:
    tests = named()
    assert {number for number, _, _ in tests} == set(range(1, 16))
    there = {
        file: {
            node.name
            for node in ast.parse((HERE / file).read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef)
        }
        for file in {file for _, file, _ in tests}
    }
    assert [f"{file}::{test}" for _, file, test in tests if test not in there[file]] == []


@pytest.fixture
def short(settings: Settings) -> Settings:
    return settings.replace(lease_ttl_ms=TTL_MS, gpu_node_ttl_ms=600_000)


@pytest.fixture
def holder(client: "redis.Redis", short: Settings) -> "Iterator[subprocess.Popen[bytes]]":
    """A process that has the only device alone and never gives it back."""
    put_devices(Pool(client, short), 1)
    process = subprocess.Popen([sys.executable, "-c", HOLDER], env=short.to_environ())
    yield process
    process.kill()
    process.wait()


@pytest.mark.long
def test_capacity_of_a_killed_holder_is_back_within_ttl_and_one_sweep(
    holder: "subprocess.Popen[bytes]", client: "redis.Redis", short: Settings
) -> None:
    pool = Pool(client, short)

    def active() -> bool:
        return [lease.state for lease in pool.snapshot().leases] == [LeaseState.ACTIVE]

    def beat(*pids: int) -> tuple[str, ...]:
        put_devices(pool, 1, processes={0: pids}, clear_quarantine=False)
        return pool.sweep().expired

    def a_moment() -> None:
        then_ms = pool.snapshot().now_ms
        assert wait_until(lambda: pool.snapshot().now_ms > then_ms, timeout_s=5, poll_s=0.001)

    assert wait_until(active, timeout_s=30)
    assert beat(holder.pid) == ()
    holder.kill()
    holder.wait()
    killed_ms = pool.snapshot().now_ms
    (lease,) = pool.snapshot().leases
    assert lease.pids == (holder.pid,)
    assert lease.deadline_ms <= killed_ms + TTL_MS
    assert wait_until(lambda: pool.snapshot().now_ms > lease.deadline_ms, timeout_s=10)
    assert beat(holder.pid) == (lease.lease_id,), "one sweep ends it"
    with pytest.raises(LeaseRefused):  # its memory may still be taken
        pool.request(WHOLE, holder="next")
    # The second report without it is surely of a look that began after the lease had ended.
    for _ in range(2):
        a_moment()
        beat()
    successor = pool.request(WHOLE, holder="next")
    assert successor.token > lease.token
