"""Delta debugging: which of many candidates a test needs, in as few tests as possible."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

__all__ = ["Bisection"]


class Bisection:
    """Finds a least set of candidates with which a test passes, where more of them never make it fail.

    Groups are tested first: the shortest beginning of the list that passes ends at a candidate that is needed, and is
    found by halving. With it kept, the same is done to what comes before, until those that were found are enough.
    Each costs about ``log2(len(candidates)) + 1`` tests. It is the idea of ddmin (Zeller and Hildebrandt, 2002) in the
    form of QuickXplain (Junker, 2004).

    Attributes:
        found: Those known to be needed.
        suspects: Those among which the others are; empty at the end.

    Example:
        >>> tests = []
        >>> def passes(kept):
        ...     tests.append(sorted(kept))
        ...     return {"exp", "pow"} <= set(kept)
        >>> search = Bisection(["add", "exp", "mul", "pow", "tanh"])
        >>> search.run(passes), search.found, len(tests)
        (True, ['pow', 'exp'], 6)
    """

    def __init__(self, candidates: Sequence[str]) -> None:
        self.candidates = list(candidates)
        self.found: list[str] = []
        self.suspects = list(candidates)

    def run(self, passes: Callable[[Collection[str]], bool]) -> bool:
        """Search; tell whether there is a set that passes at all. The empty one is known not to."""
        known_to_pass = False
        if not self.suspects:
            return False
        while self.suspects:
            end = self._shortest(passes)
            if end == len(self.suspects) and not known_to_pass and not passes([*self.found, *self.suspects]):
                return False
            known_to_pass = True
            self.found.append(self.suspects[end - 1])
            self.suspects = self.suspects[: end - 1]
            if self.suspects and passes(self.found):
                self.suspects = []
        return True

    def _shortest(self, passes: Callable[[Collection[str]], bool]) -> int:
        """Return the length of the shortest beginning that passes with those found, if the whole does."""
        least, most = 1, len(self.suspects)
        while least < most:
            middle = (least + most) // 2
            if passes([*self.found, *self.suspects[:middle]]):
                most = middle
            else:
                least = middle + 1
        return most
