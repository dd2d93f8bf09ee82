"""Rewards, worked by hand."""

import pytest

from tmax.errors import VerifierError
from tmax.records import TestReport, TestResult, TestStatus
from tmax.verifier import binary, partial


def report(exit_code: int | None = None, **statuses: TestStatus) -> TestReport:
    tests = tuple(TestResult(name=name, status=status) for name, status in statuses.items())
    if exit_code is None:
        exit_code = 1 if any(test.status == "failed" for test in tests) else 0
    return TestReport(tests=tests, exit_code=exit_code)


def test_binary_is_one_only_where_every_test_passed() -> None:
    assert binary(report(a="passed", b="passed")) == 1.0
    assert binary(report(a="passed", b="failed")) == 0.0


def test_a_skipped_test_has_not_passed() -> None:
    assert binary(report(a="passed", b="skipped")) == 0.0


@pytest.mark.parametrize(
    "no_verdict",
    [report(), report(a="skipped"), report(a="error", exit_code=1), report(a="passed", exit_code=2)],
    ids=["no test", "only skipped", "broken set-up", "interrupted"],
)
def test_a_report_that_is_no_verdict_has_no_reward(no_verdict: TestReport) -> None:
    with pytest.raises(VerifierError):
        binary(no_verdict)
    with pytest.raises(VerifierError):
        partial(no_verdict, None)


NOOP = report(keeps="passed", a="failed", b="failed", c="failed")


def test_partial_is_the_share_of_discriminative_tests_over_one_plus_bonus() -> None:
    # One of three: (1/3 + 0) / 1.2 = 0.2777…
    assert partial(report(keeps="passed", a="passed", b="failed", c="failed"), NOOP) == pytest.approx(1 / 3.6)
    assert partial(report(keeps="passed", a="failed", b="failed", c="failed"), NOOP) == 0.0


def test_partial_pays_the_bonus_for_all_of_them() -> None:
    # (1 + 0.2) / 1.2
    assert partial(report(keeps="passed", a="passed", b="passed", c="passed"), NOOP) == 1.0
    # Two of three with a bonus of one half: (2/3) / 1.5
    assert partial(report(keeps="passed", a="passed", b="passed", c="failed"), NOOP, bonus=0.5) == pytest.approx(4 / 9)


@pytest.mark.parametrize("broken", ["failed", "skipped"])
def test_a_broken_invariant_makes_the_partial_reward_zero(broken: TestStatus) -> None:
    assert partial(report(keeps=broken, a="passed", b="passed", c="passed"), NOOP) == 0.0


def test_an_invariant_that_is_gone_is_broken() -> None:
    assert partial(report(a="passed", b="passed", c="passed"), NOOP) == 0.0


def test_a_discriminative_test_that_is_gone_has_not_passed() -> None:
    # Two of three: (2/3) / 1.2
    assert partial(report(keeps="passed", a="passed", b="passed"), NOOP) == pytest.approx(2 / 3.6)


def test_without_a_verdict_on_the_untouched_sandbox_every_test_is_discriminative() -> None:
    half = report(a="passed", b="failed")
    # (1/2) / 1.2
    assert partial(half, None) == pytest.approx(1 / 2.4)
    assert partial(half, report(a="error", exit_code=2)) == pytest.approx(1 / 2.4)
    assert partial(report(a="passed", b="skipped"), None) == pytest.approx(1 / 2.4)


def test_where_everything_passes_untouched_there_is_nothing_to_earn() -> None:
    assert partial(report(a="passed"), report(a="passed")) == 0.0
