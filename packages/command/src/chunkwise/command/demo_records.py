"""The results of `chunkwise demo`, which it prints, judges and draws."""

import dataclasses
import statistics


@dataclasses.dataclass(frozen=True)
class Recall:
    """The lines that were stored, and by the name of a state the lines that came back."""

    facts: dict[str, str]
    answers: dict[str, list[str]]

    def right_characters(self, state: str) -> float:
        """Return the share of characters that are right."""
        pairs = zip(self.facts.values(), self.answers[state], strict=True)
        return statistics.fmean(a == b for line, answer in pairs for a, b in zip(line, answer, strict=True))

    def right_lines(self, state: str) -> int:
        """Return how many lines are right from the first to the last character."""
        return sum(line == answer for line, answer in zip(self.facts.values(), self.answers[state], strict=True))


@dataclasses.dataclass(frozen=True)
class Run:
    """The speed and the error of one way to compute T tokens."""

    way: str
    tokens: int
    seconds: float
    error: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds
