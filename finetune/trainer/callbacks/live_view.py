"""A region at the bottom of the terminal that is drawn over and over; what is printed meanwhile appears above it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live

_REFRESH_SECONDS = 0.5


class LiveView:
    """Draws what `render` returns, at most twice a second, from the thread that calls `draw`.

    There is no thread of its own: a data loader's worker that is forked while another thread holds the console's lock
    would wait for it for ever.

    Args:
        console: a terminal.
        render: gives the picture; it may look at the console's size.
    """

    def __init__(self, console: Console, render: Callable[[], RenderableType]) -> None:
        self._console = console
        self._render = render
        self._live: Live | None = None
        self._drawn = 0.0
        self._size = console.size
        self._handlers: list[tuple[logging.StreamHandler, object]] = []

    @property
    def is_on(self) -> bool:
        return self._live is not None

    def start(self) -> None:
        """Takes over the terminal; standard output, standard error and logs of libraries then appear above the view."""
        if self._live is not None:
            return
        streams = {sys.stdout, sys.stderr}
        self._size = self._console.size
        self._live = Live(self._render(), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)
        self._drawn = time.monotonic()
        # Handlers of libraries hold the streams that they found; rich has replaced these.
        for handler in _stream_handlers():
            if handler.stream in streams:
                self._handlers.append((handler, handler.setStream(sys.stderr)))

    def draw(self, *, now: bool = False) -> None:
        """Draws where it is time to, or at once; does nothing while the view is off."""
        if self._live is None or not (now or time.monotonic() - self._drawn >= _REFRESH_SECONDS):
            return
        if self._console.size != self._size:
            # The terminal has wrapped the old picture anew, so nobody knows how many lines it takes.
            self._live.transient = True
            self.stop()
            self._console.clear()
            self.start()
            return
        self._live.update(self._render(), refresh=True)
        self._drawn = time.monotonic()

    def stop(self) -> None:
        """Draws once more, gives the terminal back and leaves the picture; harmless where the view is off."""
        live, self._live = self._live, None
        if live is None:
            return
        try:
            live.update(self._render())
        finally:
            while self._handlers:
                handler, stream = self._handlers.pop()
                handler.setStream(stream)
            live.stop()


def _stream_handlers() -> list[logging.StreamHandler]:
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    handlers = {handler for logger in loggers for handler in logger.handlers}
    return [handler for handler in handlers if type(handler) is logging.StreamHandler]
