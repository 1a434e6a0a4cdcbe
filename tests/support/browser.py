"""A headless Chromium in which a test opens a report page and clicks, driven by Playwright."""

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
# Returns the texts of the page that are values of JavaScript, such as `undefined`, which a script
# shows by mistake.
_UNFORMATTED_VALUES_SCRIPT = """(() => {
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
    """A tab of Chromium, which shows one page at a time.

    `errors` has the page's uncaught exceptions and console errors, `requests` the URLs it has asked
    for. A `selector` is one of CSS.
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
        # A page that differs from the present one by its fragment alone would not be loaded.
        self.page.goto("about:blank")
        self.errors.clear()
        self.requests.clear()
        self.page.goto(path.as_uri() + fragment)
        # The page's own script removes the element `status` when all of it is shown.
        self.wait("document.readyState === 'complete' && !document.getElementById('status')")
        assert self.evaluate(_UNFORMATTED_VALUES_SCRIPT) == [], "texts of the page are bare values"

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true, at most 30 seconds.

        It is evaluated again and again from outside, since a page with a strict policy refuses to
        evaluate it by itself.
        """
        for _ in range(600):
            if self.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never came true: {condition}; errors: {self.errors}")

    def wait_for_error(self, text: str) -> None:
        """Wait until `errors` has one with this text, at most 30 seconds."""
        for _ in range(600):
            if any(text in error for error in self.errors):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"no error with {text!r}: {self.errors}")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        return self.page.evaluate(expression)

    def all_texts(self, selector: str) -> list[str]:
        """Return the text of each element; non-breaking spaces become plain ones."""
        contents: list[str] = self.page.locator(selector).evaluate_all(
            "nodes => nodes.map(node => node.textContent)"
        )
        return [text.replace("\u00a0", " ") for text in contents]

    def text(self, selector: str) -> str:
        """Return the text of the first element."""
        return self.all_texts(selector)[0]

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of the first element."""
        self.page.locator(selector).first.click()

    def press(self, key: str) -> None:
        """Press a key in the element that has the focus."""
        self.page.keyboard.press(key)

    def fill(self, selector: str, value: str) -> None:
        """Set the value of a text field or a selection, with the events of typing or choosing."""
        field = self.page.locator(selector)
        if field.evaluate("node => node.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)

    def set_viewport(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window, and whether the user prefers a dark page."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="dark" if dark else "light")

    def screenshot(self, path: Path, *, full_page: bool = False) -> None:
        self.page.screenshot(path=path, full_page=full_page)


@contextmanager
def open_chromium(home: Path) -> Iterator[Browser]:
    """Start a Chromium whose profile and home are under `home`, and yield its tab.

    It has no network, and quits at the end of the block.
    """
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
    """Return a tab of Chromium for the tests of a file; without Chromium they are skipped."""
    require_chromium()
    with open_chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


def assert_attack_runs_unescaped(attack: str, browser: Browser, folder: Path) -> None:
    """Assert that `attack` runs its script in a page that does not escape it.

    The script changes the page's title to "owned". Without this, a test that sees no script run in
    a report page would prove nothing.
    """
    unescaped_page = folder / "unsafe.html"
    unescaped_page.write_text(f"<!doctype html><title>fine</title><p>{attack}</p>")
    browser.open(unescaped_page)
    browser.wait("document.title === 'owned'")


class TagsOfPage(HTMLParser):
    """The tags of an HTML text: `tags` has names with attributes, ("img", {"src": "x"})."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
