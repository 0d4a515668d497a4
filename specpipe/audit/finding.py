"""What one test of the audit found, and what all of them come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PASSED, FAILED, TOO_LITTLE, NOT_APPLICABLE = "passed", "failed", "not enough data", "not applicable"
LOSSLESS, BIASED = "lossless", "biased"


@dataclass(frozen=True)
class Finding:
    """One test's outcome.

    Args:
        test: its name.
        result: passed, failed, not enough data, or not applicable (it has nothing to say about this run).
        reason: one sentence with the numbers that decided.
        numbers: everything measured, plain values for result.json.
    """

    test: str
    result: str
    reason: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """An entry of result.json's `tests`."""
        return {"test": self.test, "result": self.result, "reason": self.reason, **self.numbers}


def verdict(findings: Sequence[Finding]) -> tuple[str, list[str]]:
    """(lossless | biased | not enough data, the reasons): biased if any test failed, lossless if none lacks data."""
    for result, word in ((FAILED, BIASED), (TOO_LITTLE, TOO_LITTLE)):
        decisive = [f"{finding.test}: {finding.reason}" for finding in findings if finding.result == result]
        if decisive:
            return word, decisive
    passed = [f"{finding.test}: {finding.reason}" for finding in findings if finding.result == PASSED]
    return (LOSSLESS, passed) if passed else (TOO_LITTLE, ["no test had anything to judge"])
