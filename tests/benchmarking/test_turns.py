"""Turns on one device: nobody times while another compiles or times, unless that takes too long."""

from __future__ import annotations

import threading
import time

import pytest

from jaxspec.benchmarking.turns import Turns


def test_timings_wait_for_what_runs_together_and_for_each_other(tmp_path):
    file, events = tmp_path / "lock", []
    compiling, may_end = threading.Event(), threading.Event()

    def compile_programs():
        with Turns(file).together():
            compiling.set()
            assert may_end.wait(10)
            events.append("compiled")

    def measure(name):
        with Turns(file).alone():
            events.append(f"{name} begins")
            time.sleep(0.02)
            events.append(f"{name} ends")

    compiler = threading.Thread(target=compile_programs)
    compiler.start()
    assert compiling.wait(10)
    with Turns(file).together():
        pass  # beside the other one
    timers = [threading.Thread(target=measure, args=(name,)) for name in "ab"]
    for timer in timers:
        timer.start()
    time.sleep(0.1)
    assert events == []
    may_end.set()
    for thread in (compiler, *timers):
        thread.join(10)
    assert events[0] == "compiled" and len(events) == 5
    assert events[1][0] == events[2][0] != events[3][0] == events[4][0], "one after another"


def test_nobody_waits_for_ever(tmp_path):
    file = tmp_path / "lock"
    with Turns(file).together(), pytest.raises(TimeoutError, match="lock"), Turns(file, time.perf_counter()).alone():
        raise AssertionError("a timing began beside what runs together")
    with Turns(file, time.perf_counter()).alone():
        pass  # free again


def test_without_a_file_nothing_waits():
    with Turns().together(), Turns().alone():
        pass
