"""Estimators against numbers worked by hand."""

import pytest

from tmax.stats import (
    clustered_mean_interval,
    p_mixed_group,
    paired_difference,
    pass_at_k,
    pass_rates,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("scored", "passed", "k", "expected"),
    [
        (5, 2, 1, 0.4),
        (5, 2, 2, 0.7),  # 1 - C(3,2)/C(5,2) = 1 - 3/10
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (5, 2, 4, 1.0),  # four of five must hold a pass
        (8, 0, 8, 0.0),
        (8, 8, 1, 1.0),
    ],
)
def test_pass_at_k_counts_subsets_without_a_pass(scored: int, passed: int, k: int, expected: float) -> None:
    assert pass_at_k(scored, passed, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("scored", "passed", "k"), [(5, 6, 1), (5, -1, 1), (5, 2, 0), (5, 2, 6), (0, 0, 1)])
def test_pass_at_k_refuses_impossible_counts(scored: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"trials"):
        pass_at_k(scored, passed, k)


@pytest.mark.parametrize(
    ("passed", "scored", "low", "high"),
    [
        (8, 10, 0.490162, 0.943318),  # (.8 + .192073 ∓ .313617) / 1.384146
        (0, 10, 0.0, 0.277533),  # 3.841459 / 13.841459
        (10, 10, 0.722467, 1.0),
        (1, 1, 0.206549, 1.0),  # 1 / 4.841459
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval_by_hand(passed: int, scored: int, low: float, high: float) -> None:
    assert wilson_interval(passed, scored) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize(
    ("rate", "size", "expected"), [(0.5, 2, 0.5), (0.1, 4, 0.3438), (0.0, 8, 0.0), (1.0, 8, 0.0), (0.25, 3, 0.5625)]
)
def test_a_mixed_group_is_neither_all_passed_nor_all_failed(rate: float, size: int, expected: float) -> None:
    assert p_mixed_group(rate, size) == pytest.approx(expected, abs=1e-12)


def test_the_clustered_mean_weighs_tasks_not_trials() -> None:
    mean, _ = clustered_mean_interval({"a": [1.0, 1.0, 1.0, 1.0], "b": [0.0], "c": []}, seed="0")
    assert mean == 0.5


def test_the_bootstrap_draws_whole_clusters() -> None:
    # Ten clusters, half 0 and half 1: a resampled mean is Binomial(10, 1/2)/10. P(X <= 1) = 11/1024 < 2.5 % and
    # P(X <= 2) = 56/1024 > 2.5 %, so the 95 % interval is (.2, .8); for the quartiles likewise (.4, .6).
    clusters = {f"task{index}": [float(index % 2)] * 20 for index in range(10)}
    assert clustered_mean_interval(clusters, seed="0") == (0.5, (0.2, 0.8))
    assert clustered_mean_interval(clusters, seed="0", level=0.5) == (0.5, (0.4, 0.6))


def test_the_bootstrap_depends_on_the_seed_alone() -> None:
    clusters = {f"task{index}": [index / 7, index / 11] for index in range(6)}
    reordered = dict(reversed(clusters.items()))
    first = clustered_mean_interval(clusters, seed="3")
    assert first == clustered_mean_interval(reordered, seed="3")
    assert first != clustered_mean_interval(clusters, seed="4")


def test_no_value_at_all_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="no cluster"):
        clustered_mean_interval({"a": []}, seed="0")


def test_a_paired_difference_uses_the_tasks_scored_on_both_sides() -> None:
    before = {"easy": [1.0, 0.0], "hard": [0.0, 0.0], "unscored": [], "gone": [1.0]}
    after = {"easy": [1.0, 1.0], "hard": [1.0, 0.0], "unscored": [1.0], "new": [0.0]}
    # +.5 on both shared tasks: the spread between the tasks cancels, so the interval has no width.
    assert paired_difference(before, after, seed="0") == (0.5, (0.5, 0.5), 2)


def test_a_paired_difference_has_the_sign_of_after_minus_before() -> None:
    mean, (low, high), tasks = paired_difference({"a": [1.0], "b": [1.0]}, {"a": [0.0], "b": [0.5]}, seed="0")
    assert (mean, low, high, tasks) == (-0.75, -1.0, -0.5, 2)


def test_the_three_policies_differ_in_what_they_divide_by() -> None:
    assert pass_rates(3, 10, 2, 3) == {"scored_only": 3 / 10, "leaderboard": 3 / 12, "errors_as_zero": 3 / 15}
    assert pass_rates(0, 0, 0, 4) == {"scored_only": None, "leaderboard": None, "errors_as_zero": 0.0}
