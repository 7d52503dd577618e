"""Makes the pictures of the console in docs/figures: python docs/_site/screenshots.py

Indexes the sample documents, asks them in Chromium, and photographs the views. The pictures of reuse come from a second
server with the bundled decoder, which keeps KV; the reader keeps none. Needs playwright and Chromium.
"""

import io
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from stillroom.rag.stillroom import Stillroom
from stillroom.server.app import create_app
from stillroom.server.run import HttpServer

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures"
MAX_BYTES = 150_000
QUESTION = "How much did tea cost in London in 1666?"
EARLIER = ["What was the still-room used for?", "How long should an egg be boiled?"]


@contextmanager
def serving(folder: Path, files: Path, model: str = "bundled:reader") -> Iterator[str]:
    """Yield the address of a server on these files."""
    with Stillroom.open(folder, model=model) as stillroom:
        stillroom.add(files)
        server = HttpServer("127.0.0.1", 0)
        ready = threading.Event()
        app = create_app(stillroom)
        thread = threading.Thread(target=server.run, args=(lambda _: app, ready.set, stillroom.config.server))
        thread.start()
        try:
            ready.wait()
            yield server.url
        finally:
            server.stop()
            thread.join()


def ask(page: Page, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.wait_for_selector("#ask-status >> text=Answer complete", state="attached")


@contextmanager
def opened(browser: Browser, url: str, scheme: str = "light", width: int = 1280, height: int = 760) -> Iterator[Page]:
    with browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height}) as context:
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.goto(url)
        yield page


def save(page: Page, name: str) -> None:
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(300)
    path = FIGURES / f"console-{name}.png"
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{path.name} has {path.stat().st_size:,} bytes, more than {MAX_BYTES:,}")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def photograph_reading(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        for question in (*EARLIER, QUESTION):
            ask(page, question)
        page.click("#answer .cite")
        page.wait_for_selector("#reading mark")
        save(page, "ask")
        page.click("nav >> text=Documents")
        page.wait_for_selector("#documents tbody tr")
        save(page, "documents")
    with opened(browser, url, "dark", 390, 844) as page:
        ask(page, QUESTION)
        save(page, "phone")


def photograph_reuse(browser: Browser, url: str) -> None:
    questions = (ROOT / "examples" / "gazetteer_questions.txt").read_text(encoding="utf-8").strip().split("\n")
    for question in questions * 2:
        body = {"messages": [{"role": "user", "content": question}]}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).raise_for_status()
    with opened(browser, f"{url}/#requests") as page:
        page.wait_for_selector(".map tbody tr")
        save(page, "reuse")
    with opened(browser, f"{url}/#live", "dark", height=640) as page:
        page.wait_for_selector(".tile")
        page.click("nav >> text=Ask")
        for question in questions:
            page.goto(f"{url}/#ask")
            ask(page, question)
        page.click("nav >> text=Live")
        page.wait_for_timeout(6000)
        save(page, "live")


def main() -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox does not work as root
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        with serving(Path(folder) / "reading", ROOT / "examples" / "household") as url:
            photograph_reading(browser, url)
        with serving(Path(folder) / "reuse", ROOT / "examples" / "gazetteer", "bundled:microworld") as url:
            photograph_reuse(browser, url)
        browser.close()


if __name__ == "__main__":
    main()
