"""A page in a headless Chromium that a test clicks in: the machine's own Chromium, driven by
Playwright.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

CHROMIUM_PATH = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
# Chromium looks for updates, accounts and experiments on its own, and no test may reach for a
# network.
_FLAGS_AGAINST_BACKGROUND_REQUESTS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
    "--disable-gpu",
]
# Texts of the page that are no words but values of JavaScript, which an element was made of by mistake.
_VALUES_WITHOUT_WORDS_SCRIPT = """(() => {
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) texts.push(walker.currentNode.textContent.trim());
  return texts.filter((text) => /^(null|undefined|NaN|\\[object .*\\])$/.test(text));
})()"""


def require_chromium() -> None:
    """Skip the test where there is no Chromium; in CI, which has to bring one, fail."""
    if CHROMIUM_PATH is not None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(
            "no Chromium on this machine, and CI has to have one (Debian: apt-get install chromium)"
        )
    pytest.skip("no Chromium on this machine to click in")


class Browser:
    """One page at a time.

    `errors` are the page's uncaught exceptions and console errors, `requests` what it loaded.
    """

    def __init__(self, context: Any) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page = context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type == "error" else None,
        )
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file and wait until its own script has shown all of it."""
        self.page.goto("about:blank")
        self.errors.clear()
        self.requests.clear()
        self.page.goto(path.as_uri() + fragment)
        self.wait("document.readyState === 'complete' && !document.getElementById('status')")
        assert self.js(_VALUES_WITHOUT_WORDS_SCRIPT) == [], "nobody has put these in words"

    def wait(self, condition: str) -> None:
        """Wait until the expression is true.

        It is asked from outside, since a strict page refuses to evaluate it by itself.
        """
        for _ in range(600):
            if self.js(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never came true: {condition}; errors: {self.errors}")

    def wait_for_error(self, text: str) -> None:
        """Wait until the page has logged an error with these words, which arrives a moment later."""
        for _ in range(600):
            if any(text in error for error in self.errors):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"no error with {text!r}: {self.errors}")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.page.evaluate(expression)

    def texts(self, selector: str) -> list[str]:
        """The texts of all such elements; a space that holds a line together counts as any."""
        contents: list[str] = self.page.locator(selector).evaluate_all(
            "found => found.map(node => node.textContent)"
        )
        return [text.replace("\u00a0", " ") for text in contents]

    def text(self, selector: str) -> str:
        return self.texts(selector)[0]

    def click(self, selector: str) -> None:
        """A mouse click in the middle of the first such element, as a person does it."""
        self.page.locator(selector).first.click()

    def press(self, key: str) -> None:
        """A key, on whatever has the focus."""
        self.page.keyboard.press(key)

    def put(self, selector: str, value: str) -> None:
        """Set a field and tell the page, as typing or choosing does."""
        field = self.page.locator(selector)
        if field.evaluate("node => node.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="dark" if dark else "light")

    def screenshot(self, path: Path, *, full_page: bool = False) -> None:
        self.page.screenshot(path=path, full_page=full_page)


@contextmanager
def open_chromium(home: Path) -> Iterator[Browser]:
    """A page of a Chromium whose profile and home are under `home`; it quits at the end."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM_PATH is not None, "no Chromium on this machine"
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            home / "profile",
            executable_path=CHROMIUM_PATH,
            chromium_sandbox=os.geteuid() != 0,  # Chromium's own sandbox refuses root
            args=_FLAGS_AGAINST_BACKGROUND_REQUESTS,
            env={**os.environ, "HOME": str(home)},
            offline=True,  # a page's attempts still count as requests
        )
        try:
            yield Browser(context)
        finally:
            context.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    require_chromium()
    with open_chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


def assert_attack_runs_unescaped(attack: str, browser: Browser, folder: Path) -> None:
    """Assert that the page's script runs where a text of the page could have one.

    A page that neither escapes a script nor has a policy runs it. Without this a test in which
    nothing runs would prove nothing.
    """
    unsafe = folder / "unsafe.html"
    unsafe.write_text(f"<!doctype html><title>fine</title><p>{attack}</p>")
    browser.open(unsafe)
    browser.wait("document.title === 'owned'")


class TagsOfPage(HTMLParser):
    """Every tag of a page with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
