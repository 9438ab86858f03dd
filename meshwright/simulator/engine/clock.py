"""Whose turn it is: processes that keep their own clocks, and wait for messages and groups."""

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeAlias, cast

from simpy import Environment, Event
from simpy.events import EventCallbacks

Process: TypeAlias = Generator[Event | None, int, None]
"""What yields the event that it waits for, or nothing where another process makes it go on."""
Wait: TypeAlias = Generator[Event | None, int, int]
"""A part of a process that returns when it is done."""
GoOn: TypeAlias = Callable[[int], Event | None]
"""What makes a process go on with the time that it has waited for."""

WOKEN = cast("EventCallbacks", None)
"""What `Environment.step` leaves of the callbacks of an event."""


class StandingClock(Environment):
    """Processes go on in the order in which they may, with no time between.

    Ranks wait for half of their messages.  Each has one taker, who goes on when it is sent: were it
    an event of SimPy's, and the rank a process of SimPy's, a step would take twice as long.  Groups
    meet in events.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turns: deque[tuple[Callable[..., Event | None], object]] = deque()
        self.next_turn = self._turns.append

    def start(self, process: Process) -> GoOn:
        """Let *process* begin in its turn; return what makes it go on."""
        self.next_turn((process.send, None))
        return process.send

    def schedule(self, event: Event, *_: object) -> None:
        """Take *event* as the last one."""
        self.next_turn((self._happen, event))

    def run_dry(self) -> None:
        """Let processes go on until nobody can."""
        turns = self._turns
        while turns:
            go_on, value = turns.popleft()
            try:
                event = go_on(value)
            except StopIteration:
                continue
            if event is not None:
                event.callbacks.append(partial(self._met, go_on))

    def _met(self, go_on: GoOn, event: Event) -> None:
        self.next_turn((go_on, event.value))

    @staticmethod
    def _happen(event: Event) -> None:
        callbacks, event.callbacks = event.callbacks, WOKEN
        for wake in callbacks:
            wake(event)
