"""Every wait of the runtime is needed: with any one of them missing, a test fails.

`FAILS` names for each wait (file, function, how many in that function before it) a test that fails without it. Each is
shown to: a process imports the package without that wait and runs that test. One wait of each file is shown in every
run, all of them with `-m soak`. A wait that is new, or one that is gone, fails here until the table says so.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waits.sites import VARIABLE, Site, sites

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 170
ORDER, STORE, ARENA = "tests/waits/test_order.py", "tests/store/test_store.py", "tests/store/test_arena.py"
SNAPSHOT, SAVED = "tests/store/test_snapshot.py", "tests/checkpoint/test_background.py"
CROSSING = "tests/optim/test_crossing.py"
LAZY = "tests/optim/test_lazy.py"
UPDATED = "test_the_update_is_torchs_and_elements_outside_every_segment_keep_their_bits"
RESIDENT = "tests/optim/test_resident.py"
CUDA = "tests/device/test_cuda.py"
AFTER = "tests/device/test_ticket.py::test_after_a_failure_nothing_runs_and_the_whole_has_its_error"
SKIPPED = (
    "tests/parity/test_resident.py::test_a_step_that_is_not_finite_is_skipped_whole_and_counted_whoever_asks_first"
)
OF_RANKS = "tests/waits/test_order_of_ranks.py"
EXCHANGE, TRAFFIC = "tests/zero/test_exchange.py", "tests/zero/test_traffic.py"
TRAINS = f"{TRAFFIC}::test_ranks_train_what_one_rank_trains_though_every_message_is_late"
CLOSED = f"{TRAFFIC}::test_closing_in_the_middle_waits_for_no_other_rank_and_gives_back_all_memory_and_the_thread"
DROPPED = f"{OF_RANKS}::test_dropping_a_gradient_of_a_backward_that_failed_is_not_undone_by_one_on_its_way"
COMMUNICATES = f"{OF_RANKS}::test_a_device_communicates_after_what_it_is_told_to_wait_for"

FAILS: dict[tuple[str, str, int], str] = {
    ("api.py", "stats", 0): SKIPPED,
    ("device/cpu.py", "communicate", 0): f"{COMMUNICATES}[cpu]",
    ("device/cuda.py", "wait", 0): f"{CUDA}::test_an_event_waits_for_its_stream",
    ("device/cuda.py", "wait", 1): f"{CUDA}::test_a_copy_waits_for_the_event_it_is_given_after",
    ("device/cuda.py", "release", 0): f"{CUDA}::test_memory_given_up_on_another_stream_waits_for_that_stream",
    ("device/cuda.py", "order", 0): f"{CUDA}::test_compute_waits_for_what_it_is_ordered_after",
    ("device/cuda.py", "close", 0): f"{CUDA}::test_closing_the_device_waits_for_its_copies",
    ("device/ticket.py", "settled", 0): f"{ORDER}::test_pages_do_not_go_while_a_copy_uses_them",
    ("device/ticket.py", "continued", 0): AFTER,
    ("io/probe.py", "_round", 0): (
        "tests/io/test_uneven.py::test_drives_are_measured_and_a_large_transfer_reaches_nine_tenths_of_their_sum"
    ),
    ("io/swapfile.py", "free", 0): "tests/io/test_swapfile.py::test_free_waits_for_what_is_in_flight",
    ("optim/adamw.py", "_settle", 0): f"{ORDER}::test_a_wait_for_the_devices_decision_is_counted_as_stalled",
    ("schedule/execute.py", "use", 0): "tests/schedule/test_execute.py::test_in_a_known_cycle_every_use_is_a_hit",
    ("schedule/execute.py", "settle", 0): f"{ORDER}::test_a_step_waits_for_what_is_fetched_ahead_of_what_it_writes",
    ("zero/build.py", "_fill", 0): f"{ORDER}::test_filling_a_drive_waits_before_it_uses_its_buffer_again",
    ("zero/home.py", "grad", 0): f"{ORDER}::test_reading_a_gradient_waits_until_it_has_been_added",
    ("zero/residence.py", "promote", 0): f"{ORDER}::test_a_group_that_is_promoted_has_arrived",
    ("device/memory.py", "write", 0): f"{STORE}::test_memory_that_a_copy_still_reads_is_not_changed",
    ("device/memory.py", "quiet", 0): (
        f"{ARENA}::test_memory_given_after_the_end_is_unlocked_when_its_copies_are_over_and_not_before"
    ),
    ("device/memory.py", "decommit", 0): f"{ORDER}::test_pages_do_not_go_while_a_copy_uses_them",
    ("device/streams.py", "communicate", 0): f"{COMMUNICATES}[emulated]",
    ("device/streams.py", "copy_in", 0): f"{ORDER}::test_a_copy_in_waits_for_what_the_buffer_was_used_for_before",
    ("device/streams.py", "copy_out", 0): (f"{ORDER}::test_a_copy_out_waits_for_what_makes_its_source"),
    ("optim/crossing.py", "_cross", 0): f"{CROSSING}::{UPDATED}[fp32]",
    ("optim/crossing.py", "_cross", 1): f"{CROSSING}::{UPDATED}[fp32]",
    ("optim/outcome.py", "receive", 0): f"{RESIDENT}::test_sending_an_outcome_does_not_wait_and_receiving_it_does",
    ("optim/outcome.py", "settle", 0): f"{ORDER}::test_a_wait_for_the_devices_decision_is_counted_as_stalled",
    ("optim/outcome.py", "_free_left", 0): (
        f"{RESIDENT}::test_the_outcomes_memory_is_page_locked_until_its_last_copy_is_over"
    ),
    ("optim/slots.py", "__exit__", 0): f"{ORDER}::test_a_step_that_fails_leaves_nothing_in_flight",
    ("optim/slots.py", "_wait", 0): f"{ORDER}::test_a_step_waits_for_the_states_it_updates",
    ("optim/slots.py", "_raise_finished", 0): f"{ORDER}::test_a_write_that_fails_early_fails_its_step",
    ("store/arena.py", "take", 0): (
        f"{ARENA}::test_memory_that_a_copy_still_uses_is_waited_for_before_it_serves_again_or_is_unlocked"
    ),
    ("store/arena.py", "exchange", 0): (
        f"{ARENA}::test_what_is_exchanged_leaves_the_viewer_its_pages_and_moves_lock_and_charge"
    ),
    ("store/arena.py", "_await_oldest", 0): (
        f"{ARENA}::test_when_room_is_short_idle_memory_goes_first_and_then_the_oldest_copies_are_waited_for"
    ),
    ("store/arena.py", "_drop_oldest", 0): f"{ARENA}::test_an_interrupt_while_a_copy_is_waited_for_loses_no_memory",
    ("store/arena.py", "_drop", 0): (
        f"{ARENA}::test_memory_given_after_the_end_is_unlocked_when_its_copies_are_over_and_not_before"
    ),
    ("store/store.py", "discard", 0): f"{STORE}::test_memory_that_a_copy_still_reads_is_not_changed",
    ("store/store.py", "write", 0): f"{STORE}::test_memory_that_a_copy_still_reads_is_not_changed",
    ("store/window.py", "load", 0): f"{STORE}::test_a_clean_block_is_evicted_without_a_write_and_a_dirty_one_with_one",
    ("store/window.py", "patch", 0): f"{STORE}::test_any_byte_range_is_loaded_and_patched_exactly",
    ("store/window.py", "patch", 1): f"{STORE}::test_a_clean_block_is_evicted_without_a_write_and_a_dirty_one_with_one",
    ("store/store.py", "_settle", 0): f"{ORDER}::test_a_wait_for_a_block_is_counted_as_stalled",
    ("store/store.py", "_settle", 1): f"{STORE}::test_after_a_failed_fetch_every_call_raises_the_first_cause",
    ("store/snapshot.py", "_fill", 0): f"{SNAPSHOT}::test_any_range_reads_as_what_was_written[drive]",
    ("store/snapshot.py", "_fill", 1): f"{SNAPSHOT}::test_a_copy_is_given_when_what_was_given_before_is_done",
    ("store/snapshot.py", "_fill", 2): f"{SNAPSHOT}::test_any_range_reads_as_what_was_written[device]",
    ("store/watched.py", "look", 0): f"{ORDER}::test_a_read_that_fails_and_that_nobody_waits_for_fails_its_block",
    ("store/watched.py", "wait", 0): "tests/store/test_watched.py::test_who_sees_a_failure_finds_that_the_owner_knows",
    ("zero/collectives.py", "exchange_slices", 0): f"{TRAINS}[host-2]",
    ("zero/collectives.py", "unite", 0): f"{TRAINS}[host-3]",
    ("zero/departures.py", "depart", 0): f"{ORDER}::test_a_view_of_a_gradient_kept_over_a_backward_shows_the_sum",
    ("zero/departures.py", "_land", 0): f"{ORDER}::test_a_step_takes_every_gradient_on_its_way",
    ("zero/departures.py", "_land", 1): f"{ORDER}::test_a_gradient_that_cannot_be_added_is_an_error_of_the_step",
    ("zero/departures.py", "_add", 0): f"{ORDER}::test_setting_a_gradient_is_not_undone_by_one_on_its_way",
    ("zero/exchange.py", "retract", 0): (
        f"{EXCHANGE}::test_what_a_round_has_begun_to_speak_of_is_taken_back_after_it_if_at_all[False]"
    ),
    ("zero/exchange.py", "settle", 0): (
        f"{EXCHANGE}::test_who_waits_for_a_job_says_so_to_the_others_and_is_counted_as_stalled"
    ),
    ("zero/exchange.py", "_ask", 0): f"{EXCHANGE}::test_a_call_waits_for_the_last_rank_to_make_it",
    ("zero/exchange.py", "_ask", 1): f"{EXCHANGE}::test_an_error_ends_a_wait_for_any_of_several_jobs",
    ("zero/exchange.py", "_take_back", 0): (
        f"{EXCHANGE}::test_an_interrupt_while_the_action_of_a_call_goes_on_is_raised_when_that_has_ended"
    ),
    ("zero/exchange.py", "wait", 0): (
        f"{EXCHANGE}::test_who_waits_for_a_job_says_so_to_the_others_and_is_counted_as_stalled"
    ),
    ("zero/exchange.py", "wait", 1): (f"{EXCHANGE}::test_waiting_for_a_job_that_failed_raises_its_error_each_time"),
    ("zero/grads.py", "drain", 0): f"{ORDER}::test_reading_a_gradient_waits_until_it_has_been_added",
    ("zero/grads.py", "replace", 0): f"{ORDER}::test_setting_a_gradient_is_not_undone_by_one_on_its_way",
    ("zero/grads.py", "zero", 0): f"{ORDER}::test_zeroing_a_gradient_is_not_undone_by_one_on_its_way",
    ("zero/group.py", "disown", 0): f"{ORDER}::test_closing_takes_back_what_is_on_its_way",
    ("zero/group.py", "_share_edit", 0): (
        f"{OF_RANKS}::test_an_edit_is_shared_when_the_stream_that_makes_it_has_made_it[3]"
    ),
    ("zero/group.py", "begin_fetch", 0): (f"{OF_RANKS}::test_a_fetch_that_the_ranks_refuse_leaves_nothing_on_its_way"),
    ("zero/group.py", "wait", 0): f"{ORDER}::test_a_wait_for_a_drive_is_counted_as_stalled",
    ("zero/group.py", "wait", 1): f"{OF_RANKS}::test_a_wait_for_other_ranks_is_counted_as_stalled",
    ("zero/group.py", "poll", 0): f"{ORDER}::test_what_has_arrived_gives_back_what_carried_it_without_being_used",
    ("zero/group.py", "drop", 0): f"{ORDER}::test_letting_go_of_what_is_on_its_way_leaks_nothing[drop]",
    ("zero/group.py", "refresh", 0): f"{ORDER}::test_letting_go_of_what_is_on_its_way_leaks_nothing[refresh]",
    ("zero/group.py", "refresh", 1): f"{ORDER}::test_a_view_kept_over_a_step_shows_the_new_values_at_once",
    ("zero/group.py", "memory_of", 0): f"{ORDER}::test_a_step_waits_for_the_parameters_it_updates_where_they_arrive",
    ("zero/group.py", "memory_of", 1): (
        f"{ORDER}::test_a_step_waits_for_copies_of_parameters_that_a_forward_given_before_still_needs"
    ),
    ("zero/model.py", "end_saving", 0): f"{SAVED}::test_the_next_save_a_load_and_the_end_wait_for_it",
    ("zero/model.py", "close", 0): f"{SAVED}::test_the_next_save_a_load_and_the_end_wait_for_it",
    (
        "zero/model.py",
        "before_step",
        0,
    ): f"{LAZY}::test_after_a_step_that_failed_nobody_is_given_torn_weights_and_a_load_goes_on",
    ("zero/model.py", "before_step", 1): f"{ORDER}::test_a_step_waits_for_what_is_fetched_ahead_of_what_it_writes",
    (
        "zero/model.py",
        "_end_update",
        0,
    ): f"{LAZY}::test_closing_before_a_step_is_over_gives_everything_back[drive-False]",
    ("optim/apply.py", "apply", 0): f"{LAZY}::test_a_step_that_fails_at_once_leaves_nothing_to_be_done_later",
    ("zero/model.py", "begin_step", 0): f"{ORDER}::test_a_step_takes_every_gradient_on_its_way",
    ("zero/model.py", "gathered", 0): (
        f"{OF_RANKS}::test_what_gather_modifies_is_given_out_when_the_stream_that_does_has_done_it[3]"
    ),
    ("zero/model.py", "settle", 0): (SKIPPED),
    ("zero/model.py", "_settle_hints", 0): (
        f"{ORDER}::test_what_carries_something_fetched_ahead_is_waited_for_where_its_memory_is_needed"
    ),
    ("zero/closing.py", "_drop_states", 0): f"{ORDER}::test_closing_takes_back_gradients_on_their_way",
    ("zero/closing.py", "_drop_states", 1): f"{CLOSED}[host-offered-2]",
    ("zero/model.py", "release", 0): f"{ORDER}::test_closing_waits_for_what_still_computes",
    ("zero/passage.py", "settle", 0): f"{ORDER}::test_a_wait_for_a_drive_is_counted_as_stalled",
    ("zero/passage.py", "arrive", 0): f"{ORDER}::test_parameters_that_cannot_be_read_are_an_error_of_their_use",
    ("zero/passage.py", "arrive", 1): f"{ORDER}::test_a_view_kept_over_a_step_shows_the_new_values_at_once",
    ("zero/reducer.py", "_end_backward", 0): (
        f"{OF_RANKS}::test_what_backward_ends_with_has_left_the_device_before_the_ranks_look_what_there_is[2]"
    ),
    ("zero/shared.py", "land", 0): f"{TRAINS}[host-1]",
    ("zero/shared.py", "replace", 0): f"{DROPPED}[2-alone-False]",
    ("zero/shared.py", "zero", 0): f"{DROPPED}[2-zero-True]",
    ("zero/shared.py", "zero", 1): f"{DROPPED}[1-zero-False]",
    ("zero/step.py", "finish", 0): f"{TRAINS}[host-1]",
    ("zero/step.py", "finish", 1): (
        f"{OF_RANKS}::test_what_a_step_has_updated_in_the_gathered_group_is_on_its_drive_when_the_step_returns"
    ),
    ("zero/traffic.py", "_gather", 0): (
        f"{OF_RANKS}::test_where_all_want_a_group_and_one_cannot_read_its_shard_all_say_so"
    ),
    ("zero/traffic.py", "_gather", 1): (f"{OF_RANKS}::test_a_rank_sends_its_own_shard_when_it_has_come_to_the_device"),
    ("zero/traffic.py", "_gather", 2): f"{TRAFFIC}::test_on_a_gpu_what_one_rank_wants_comes_through_the_host",
    ("zero/traffic.py", "_read", 0): (
        f"{OF_RANKS}::test_a_shard_that_another_rank_wants_is_sent_when_the_drive_has_read_it"
    ),
    ("zero/traffic.py", "arrive", 0): (
        f"{OF_RANKS}::test_a_shard_that_cannot_be_read_is_an_error_on_the_rank_that_wants_it"
    ),
    ("zero/traffic.py", "arrive", 1): (
        f"{TRAFFIC}::test_on_a_gpu_what_all_ranks_want_comes_by_collectives_on_a_stream_that_compute_waits_for"
    ),
    ("zero/traffic.py", "_finished", 0): f"{TRAINS}[host-3]",
    ("zero/traffic.py", "settle", 0): f"{OF_RANKS}::test_a_wait_for_other_ranks_is_counted_as_stalled",
}


def keyed() -> dict[tuple[str, str, int], Site]:
    """Every wait by its place among those of its function."""
    found: dict[tuple[str, str, int], Site] = {}
    for site in sites():
        earlier = sum(key[:2] == (site.file, site.function) for key in found)
        found[site.file, site.function, earlier] = site
    return found


def shown() -> list[object]:
    """All waits; those that are not the first of their file only in a soak."""
    files: set[str] = set()
    params = []
    for key in keyed():
        params.append(
            pytest.param(key, marks=[pytest.mark.soak] if key[0] in files else [], id="-".join(map(str, key)))
        )
        files.add(key[0])
    return params


def test_every_wait_has_a_test_that_fails_without_it() -> None:
    assert set(FAILS) == set(keyed())


@pytest.mark.parametrize("key", shown())
def test_without_the_wait_its_test_fails(key: tuple[str, str, int], tmp_path: Path) -> None:
    site = keyed()[key]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"--basetemp={tmp_path / 'pytest'}", "-o", "addopts=--import-mode=importlib", FAILS[key]]
    path = os.pathsep.join([str(ROOT / "tests" / "waits" / "site"), str(ROOT / "tests")])
    env = {**os.environ, VARIABLE: str(site), "PYTHONPATH": path}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    ended = ran.returncode == 1 or ran.returncode < 0  # a test failed, or memory that was gone ended the process
    assert ended, f"{FAILS[key]} passes without `{site.text}` at {site}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
