"""Growth is told by its last decade, and its constant part is no growth."""

from __future__ import annotations

import pytest

from mpamp.bench.fit import fit

COUNTS = [1, 10, 100, 300, 1000]


@pytest.mark.parametrize(("power", "is_linear"), [(0.5, True), (1.0, True), (1.5, False), (2.0, False)])
def test_the_exponent_is_the_power(power: float, is_linear: bool) -> None:
    found = fit(COUNTS, [50 + 3 * (n - 1) ** power for n in COUNTS])
    assert found.constant == 50
    assert found.exponent == pytest.approx(power, abs=0.001)
    assert found.is_linear is is_linear


def test_each_is_what_one_more_adds() -> None:
    assert fit(COUNTS, [7 + 2.5 * n for n in COUNTS]).each == 2.5


@pytest.mark.parametrize("costs", [[5.0] * 5, [9.0, 8.0, 8.0, 7.0, 7.0]])
def test_what_does_not_grow_has_no_exponent(costs: list[float]) -> None:
    found = fit(COUNTS, costs)
    assert found.exponent == 0
    assert found.is_linear


def test_one_count_shows_no_growth() -> None:
    with pytest.raises(ValueError, match="there are 1"):
        fit([1], [2.0])
