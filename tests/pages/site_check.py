"""`make site-check`: the built site in a real browser, wide and light, narrow and dark.

A page fails if axe (https://github.com/dequelabs/axe-core) has a serious or critical finding, if it
is wider than the window, if it asks another host for anything, or if something of the site is
missing. The pages that the navigation's tabs lead to are also kept as pictures, in all four looks.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

_WIDTHS = {"wide": 1280, "narrow": 390}
_SCHEMES = ("light", "dark")
_CHECKED = (("wide", "light"), ("narrow", "dark"))
_SERIOUS = ("serious", "critical")
_HOVERS = (
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,"
    "primaryPointerType=4,availablePointerTypes=4"
)
"""A headless browser says that nothing can hover, where the theme expects fingers, not keys."""
_ABSENT = "/versions.json"
"""Asked for by the theme, and written by `make docs-version` for the published site only."""


@dataclass(frozen=True)
class Look:
    """A window's width and color scheme."""

    width: str
    scheme: str

    def __str__(self) -> str:
        return f"{self.width}, {self.scheme}"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Print nothing per request."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the folder on this machine; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def looking(browser: Browser, look: Look) -> Iterator[Page]:
    """A page of a browser that sees the site this way, without animations."""
    size = {"width": _WIDTHS[look.width], "height": 900}
    context = browser.new_context(
        viewport=size,
        color_scheme=look.scheme,
        reduced_motion="reduce",
        service_workers="block",
    )
    try:
        yield context.new_page()
    finally:
        context.close()


def check(page: Page, address: str, path: str) -> list[str]:
    """What is wrong with one page."""
    found: list[str] = []

    def note(response: Any) -> None:
        if not response.url.startswith((address, "data:")):
            found.append(f"asks another host: {response.url}")
        elif response.status >= 400 and not response.url.endswith(_ABSENT):
            found.append(f"{response.status}: {response.url.removeprefix(address)}")

    page.on("response", note)
    try:
        page.goto(f"{address}/{path}", wait_until="load")
        too_wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        violations = Axe().run(page).response["violations"]
    finally:
        page.remove_listener("response", note)
    if too_wide > 0:
        found.append(f"{too_wide} pixels wider than the window")
    for each in violations:
        if each["impact"] in _SERIOUS:
            nodes = each["nodes"]
            where = ", ".join(nodes[0]["target"])
            found.append(f"axe, {each['impact']}: {each['help']} ({len(nodes)} times: {where})")
    return found


def top_level(page: Page, address: str) -> list[str]:
    """The pages that the tabs lead to, and the home page."""
    page.goto(f"{address}/")
    links = page.eval_on_selector_all(
        ".md-tabs__link", "links => links.map(link => new URL(link.href).pathname)"
    )
    return list(dict.fromkeys(["", *(link.lstrip("/") for link in links)]))


def main() -> int:
    """Check all pages; print what is wrong, and how many were seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("pictures", type=Path, help="where pictures of top-level pages go")
    parser.add_argument("--browser", default="/usr/bin/chromium")
    args = parser.parse_args()
    files = sorted(file.relative_to(args.site) for file in args.site.rglob("*.html"))
    paths = [str(file).removesuffix("index.html") for file in files if file.name != "404.html"]
    args.pictures.mkdir(parents=True, exist_ok=True)
    num_wrong = 0
    with served(args.site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=args.browser, args=["--no-sandbox", "--disable-gpu", _HOVERS]
        )
        for look in (Look(*words) for words in _CHECKED):
            with looking(browser, look) as page:
                for path in paths:
                    found = check(page, address, path)
                    num_wrong += bool(found)
                    for each in dict.fromkeys(found):
                        print(f"{path or 'home'} ({look}): {each}", flush=True)
        for look in (Look(*words) for words in product(_WIDTHS, _SCHEMES)):
            with looking(browser, look) as page:
                for path in top_level(page, address):
                    page.goto(f"{address}/{path}", wait_until="load")
                    name = path.strip("/").replace("/", "-") or "home"
                    file = f"{name.removesuffix('.html')}-{look.width}-{look.scheme}.png"
                    page.screenshot(path=args.pictures / file)
        browser.close()
    print(f"{len(paths)} pages in {len(_CHECKED)} looks: {num_wrong} views with something wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
