"""Rewards in [0, 1] out of per-test reports; pure functions.

The rule: only a report that is a verdict has a reward, and a test that was skipped has not passed.
"""

from tmax.errors import VerifierError
from tmax.records import TestReport


def binary(report: TestReport) -> float:
    """1 if every test passed, else 0. Raises VerifierError for a report that is no verdict."""
    _require_verdict(report)
    return 1.0 if report.all_passed else 0.0


def partial(report: TestReport, noop: TestReport | None, bonus: float = 0.2) -> float:
    """The share of discriminative tests that pass, with a bonus for passing all: (share + bonus * all)/(1 + bonus).

    `noop` is the report on the untouched sandbox. Tests that passed there are invariants: one that does not pass now
    makes the reward 0, and they earn nothing. All others are discriminative; every test is where `noop` is None or no
    verdict. A test that `noop` names and `report` lacks has not passed. Where there is nothing to earn the reward is 0.
    Raises VerifierError for a report that is no verdict.
    """
    _require_verdict(report)
    passed = {test.name for test in report.tests if test.status == "passed"}
    named = {test.name for test in report.tests}
    untouched = noop.tests if noop is not None and noop.judged else ()
    invariants = {test.name for test in untouched if test.status == "passed"}
    discriminative = (named | {test.name for test in untouched}) - invariants
    if not invariants <= passed or not discriminative:
        return 0.0
    share = len(discriminative & passed) / len(discriminative)
    return (share + bonus * (share == 1.0)) / (1.0 + bonus)


def _require_verdict(report: TestReport) -> None:
    if not report.judged:
        broken = next((f"`{test.name}`: {test.message}" for test in report.tests if test.status == "error"), "")
        raise VerifierError(
            f"the hidden tests gave no verdict (pytest exit code {report.exit_code}) {broken}".rstrip(),
            hint="validate the task: its tests must run and judge on any final state",
        )
