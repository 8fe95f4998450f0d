"""Stop strings over streamed text: nothing of a stop string leaks, nothing else is held back.

An automaton over characters (Aho and Corasick 1975) follows the text. Its state is the longest suffix that begins some
stop string, so the text to hold back is known exactly, and which stop string is found first does not depend on where
tokens end: the one that is complete at the earliest character, of those the longest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque


class StopAutomaton:
    """Immutable, shared by all texts with the same stop strings. State 0: nothing of a stop string seen."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        if not all(stops):
            raise ValueError("stop strings must not be empty")
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self.found: list[str | None] = [None]  # the longest stop string that ends at this state
        for stop in stops:
            self._add(stop)
        # Breadth first: a state's failure link is shallower, so it is finished before the state.
        self.held = [0] * len(self._next)  # characters that can still become a stop string
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fail = self._fail[state]
            self.found[state] = self.found[state] or self.found[fail]
            self.held[state] = self._depth[state] if self._next[state] else self.held[fail]
            for char, child in self._next[state].items():
                self._fail[child] = self.step(fail, char)
                queue.append(child)

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self.found.append(None)
            state = self._next[state][char]
        self.found[state] = stop

    def step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)


@functools.lru_cache(maxsize=64)
def automaton(stops: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(stops)


@dataclasses.dataclass
class StopFilter:
    """One text. ``push`` returns what may be shown; after ``stopped`` is set the text is over."""

    stops: tuple[str, ...]
    keep_stop: bool = False  # include_stop_str_in_output
    stopped: str | None = None
    _state: int = 0
    _held: str = ""

    def push(self, text: str, may_stop: bool = True) -> str:
        """``may_stop`` False: a stop string that ends in this text is plain text (``min_tokens``)."""
        if not self.stops:
            return text
        machine = automaton(self.stops)
        buffer = self._held + text
        start = len(self._held)
        for index, char in enumerate(text, start):
            self._state = machine.step(self._state, char)
            found = machine.found[self._state] if may_stop else None
            if found is not None:
                self.stopped = found
                self._held = ""
                end = index + 1
                return buffer[:end] if self.keep_stop else buffer[: end - len(found)]
        cut = len(buffer) - machine.held[self._state]
        self._held = buffer[cut:]
        return buffer[:cut]

    def release(self) -> str:
        """The text ends here without a stop string: what was held back."""
        held, self._held = self._held, ""
        self._state = 0
        return held
