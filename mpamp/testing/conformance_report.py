"""What the conformance kit found: checks, each passed, failed or skipped, and the report of them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..errors import told

__all__ = ["Check", "ConformanceError", "Inapplicable", "Report", "require", "run"]

Outcome = Literal["passed", "failed", "skipped"]


class ConformanceError(AssertionError):
    """A backend doesn't keep what mpamp promises for every device; the message is the report."""


class Inapplicable(Exception):
    """Raised by a check that can't be made here, with the reason."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    section: str
    name: str
    outcome: Outcome
    detail: str = ""
    """What is wrong, or why it was skipped."""

    def __str__(self) -> str:
        return f"{self.outcome.upper()} {self.section}: {self.name}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one backend; ``str()`` of it is for people, ``to_dict()`` for programs."""

    device_type: str
    backend: str
    place: str
    """``"this machine's"`` or ``"fake"``: which tensors the checks were made on."""
    checks: tuple[Check, ...]

    @property
    def passed(self) -> list[Check]:
        """The checks that the backend passed."""
        return [check for check in self.checks if check.outcome == "passed"]

    @property
    def failures(self) -> list[Check]:
        """The checks that it failed."""
        return [check for check in self.checks if check.outcome == "failed"]

    @property
    def skipped(self) -> list[Check]:
        """The checks that can't be made here, each with its reason."""
        return [check for check in self.checks if check.outcome == "skipped"]

    def raise_for_failures(self) -> Report:
        """Return the report itself if nothing failed.

        Raises:
            ConformanceError: Something did.
        """
        if self.failures:
            raise ConformanceError(str(self))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON takes it."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.backend} on {self.place} tensors: {_counts(self.checks)}"]
        for section in dict.fromkeys(check.section for check in self.checks):
            mine = [check for check in self.checks if check.section == section]
            lines.append(f"  {section}: {_counts(mine)}")
            lines += [f"    FAILED {check.name}: {check.detail}" for check in mine if check.outcome == "failed"]
            reasons = Counter(check.detail for check in mine if check.outcome == "skipped")
            lines += [f"    skipped {count}: {reason}" for reason, count in reasons.most_common()]
        return "\n".join(lines)


def _counts(checks: tuple[Check, ...] | list[Check]) -> str:
    counts = Counter(check.outcome for check in checks)
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


def require(condition: object, message: str) -> None:
    """Fail the check that is being made unless a condition holds."""
    if not condition:
        raise ConformanceError(message)


def run(section: str, name: str, check: Callable[[], object]) -> Check:
    """Make one check: it fails by raising, and is skipped by raising ``Inapplicable``."""
    try:
        check()
    except Inapplicable as reason:
        return Check(section, name, "skipped", str(reason))
    except ConformanceError as error:
        return Check(section, name, "failed", str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a vendor's code raises
        return Check(section, name, "failed", told(error).strip().partition("\n")[0][:300])
    return Check(section, name, "passed")
