"""The page in a real browser: nothing is fetched, nothing is complained of, nothing is wider than the screen."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from html import escape
from pathlib import Path

import pytest
from pages import full_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps", "--virtual-time-budget=2000",
    "--enable-logging=stderr", "--v=0", "--hide-scrollbars",
)  # fmt: skip
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


class Proxy:
    """Takes every request of the browser, answers none, and keeps the first lines."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed: the test is over
                return
            with connection:
                self.requests.append(connection.recv(4096).decode("latin-1").partition("\r\n")[0])

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    yield proxy
    proxy.close()


def browse(page: Path, proxy: Proxy) -> tuple[str, list[str], list[str]]:
    """Returns the page after it was loaded, what the console says, and what a page's own host was asked for."""
    assert CHROMIUM is not None
    profile = page.with_suffix(".profile")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", f"--proxy-server={proxy.address}", "--dump-dom"]
    result = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    # The browser itself may call home; only what the page asks for goes to a host of a reserved name.
    own = [request for request in proxy.requests if not re.search(r"google|gvt1|chromium", request)]
    return result.stdout, console, own


def test_the_page_asks_for_nothing_and_the_console_is_silent(tmp_path: Path, proxy: Proxy) -> None:
    page = tmp_path / "report.html"
    page.write_text(full_page(), encoding="utf-8")
    shown, console, requests = browse(page, proxy)
    assert "Answers over the steps" in shown and (console, requests) == ([], [])


def test_the_policy_stops_what_the_check_above_would_see(tmp_path: Path, proxy: Proxy) -> None:
    """The same page with a picture and a script put in: without its policy both are noticed, with it neither acts."""
    intruder = '<img src="http://elsewhere.test/x.png"><script>console.error("ran")</script></body>'
    with_policy = full_page().replace("</body>", intruder)
    page = tmp_path / "open.html"
    page.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", with_policy), encoding="utf-8")
    _, console, requests = browse(page, proxy)
    assert any("ran" in line for line in console) and any("elsewhere.test" in request for request in requests)
    proxy.requests.clear()
    page = tmp_path / "closed.html"
    page.write_text(with_policy, encoding="utf-8")
    _, console, requests = browse(page, proxy)
    assert requests == [] and console and not any('"ran"' in line for line in console)


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(tmp_path: Path, proxy: Proxy, width: int) -> None:
    """Measured from a frame of that width, since a window of a headless browser is never as narrow as a telephone."""
    page = tmp_path / "frame.html"
    measure = "f.onload = () => document.title = `width=${f.contentDocument.documentElement.scrollWidth}`"
    frame = f'<iframe id="f" style="width:{width}px;height:900px;border:0" srcdoc="{escape(full_page())}"></iframe>'
    page.write_text(f"<!doctype html><title></title>{frame}<script>{measure}</script>", encoding="utf-8")
    shown, _, _ = browse(page, proxy)
    assert f"<title>width={width}</title>" in shown
