"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass, field

from drivetrain.core.text import readable_bytes


@dataclass(frozen=True)
class Score:
    """One quantity against its theoretical minimum, `limit`: less is better."""

    what: str
    found: float
    limit: float
    formula: str
    unit: str = "bytes"

    @property
    def share(self) -> float:
        """The share of the limit reached, at most 1.0, even if rounding would give more."""
        return 1.0 if self.found <= self.limit else self.limit / self.found

    def __str__(self) -> str:
        return (
            f"{self.what}: {self._shown(self.found)}; limit {self.formula} ="
            f" {self._shown(self.limit)}: {self.share:.0%}"
        )

    def _shown(self, value: float) -> str:
        return readable_bytes(value) if self.unit == "bytes" else f"{value:g} {self.unit}"


@dataclass
class Passed:
    """What was shown, line by line, and the scores."""

    lines: list[str] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    picture: str = ""
