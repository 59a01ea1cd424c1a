"""Variants take turns, all as often, and what is set up for one is set up before each of its turns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from mpamp.bench.timing import Variant, measure, repeat

CPU = torch.device("cpu")


def test_each_round_has_a_turn_of_each_and_begins_with_another() -> None:
    log: list[str] = []
    variants = [Variant(name, lambda n: None, setup=lambda name=name: log.append(name)) for name in "ab"]
    timings = measure(variants, CPU, rounds=3, turn_s=0.0, warm_up=0)
    assert log[-6:] == ["a", "b", "b", "a", "a", "b"]
    assert [timing.rounds for timing in timings] == [3, 3]


def test_the_steps_of_a_turn_run_in_its_context() -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        log.append("in")
        yield
        log.append("out")

    measure([Variant("a", repeat(lambda: log.append("step")), context)], CPU, rounds=1, turn_s=0.0, warm_up=1)
    assert log[-4:] == ["in", "step", "step", "out"]  # one to warm up, and one that is timed


def test_no_round_starts_after_the_budget_but_the_first() -> None:
    (timing,) = measure([Variant("a", lambda n: None)], CPU, rounds=9, turn_s=0.0, budget_s=0)
    assert timing.rounds == 1


def test_what_hangs_on_the_clock_is_agreed_on() -> None:
    asked: list[int] = []

    def agree(number: int) -> int:
        asked.append(number)
        return 7 if len(asked) == 1 else 0

    (timing,) = measure([Variant("a", lambda n: None)], CPU, rounds=3, turn_s=0.0, budget_s=0, agree=agree)
    assert timing.repeats == 7
    assert timing.rounds == 3  # the others have time yet
    assert asked[1:] == [True, True]


def test_quartiles_are_within_what_was_seen() -> None:
    (timing,) = measure([Variant("a", lambda n: None)], CPU, rounds=2, turn_s=0.0)
    assert 0 < timing.low_us <= timing.us <= timing.high_us
