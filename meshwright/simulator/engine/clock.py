"""Run queue of rank processes, which keep their own clocks and wait for messages and groups."""

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeAlias, cast

from simpy import Environment, Event
from simpy.events import EventCallbacks

Process: TypeAlias = Generator[Event | None, int, None]
"""Generator that yields the event it waits for, or None if another process resumes it."""
Wait: TypeAlias = Generator[Event | None, int, int]
"""Sub-generator of a process; it returns the time at which it is done."""
Resume: TypeAlias = Callable[[int], Event | None]
"""Resume a process with the time that it has waited for (`send` of its generator)."""

CALLED_BACK = cast("EventCallbacks", None)
"""Callbacks of an event after `Environment.step`."""


class UntimedEnvironment(Environment):
    """SimPy environment without time: processes resume in the order in which they become ready.

    Ranks wait for half of their messages.  Each has one receiver, resumed when it is sent: with
    SimPy events and processes a step would take twice as long to simulate.  Only groups use events.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ready: deque[tuple[Callable[..., Event | None], object]] = deque()
        self.enqueue = self._ready.append

    def start(self, process: Process) -> Resume:
        """Queue the start of *process*; return the function that resumes it."""
        self.enqueue((process.send, None))
        return process.send

    def schedule(self, event: Event, *_: object) -> None:
        """Queue *event* last (SimPy calls this when an event succeeds)."""
        self.enqueue((self._run_callbacks, event))

    def run_until_idle(self) -> None:
        """Run processes until the queue is empty."""
        queue = self._ready
        while queue:
            resume, value = queue.popleft()
            try:
                event = resume(value)
            except StopIteration:
                continue
            if event is not None:
                event.callbacks.append(partial(self._enqueue_resume, resume))

    def _enqueue_resume(self, resume: Resume, event: Event) -> None:
        self.enqueue((resume, event.value))

    @staticmethod
    def _run_callbacks(event: Event) -> None:
        callbacks, event.callbacks = event.callbacks, CALLED_BACK
        for callback in callbacks:
            callback(event)
