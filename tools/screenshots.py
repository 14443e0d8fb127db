"""Photographs the page of `trilobite serve` for the documentation: python tools/screenshots.py

Needs playwright and a Chromium; the model is the bundled one, compressed, with a chat template.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.serving import serving, talking_model  # noqa: E402
from trilobite import compress, load_recipe  # noqa: E402

FIGURES = ROOT / "docs" / "figures"
QUESTION = "What does the captain say of the **sea**?\n\n```python\nprint('code has its place')\n```"


def chat(page: Page) -> None:
    """A question and an answer."""
    page.get_by_label("Message").fill(QUESTION)
    page.get_by_label("Message").press("Enter")
    page.locator("article.assistant").wait_for()
    page.locator("#send").wait_for(state="visible", timeout=60_000)


def main() -> None:
    """Light, dark, and as on a phone."""
    FIGURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as run:
        model = Path(folder) / "tiny-moe-3bit"
        compress(str(talking_model(Path(folder) / "tiny-moe")), model, load_recipe("milo-s1"))
        own = Path(run.chromium.executable_path)
        found = str(own) if own.exists() else shutil.which("chromium")
        browser = run.chromium.launch(executable_path=found, args=["--no-sandbox"])
        with serving(model, "--slots", 2) as server:
            for name, dark, width, height in (
                ("serve-light", False, 960, 600),
                ("serve-dark", True, 960, 600),
                ("serve-phone", False, 390, 700),
            ):
                context = browser.new_context(viewport={"width": width, "height": height})
                page = context.new_page()
                page.emulate_media(color_scheme="dark" if dark else "light")
                page.goto(server.url)
                page.evaluate("for (const [id, v] of [['seed', 4], ['tokens', 90]]) $(id).value = v")
                if width > 720:
                    page.get_by_text("Settings").click()
                chat(page)
                page.screenshot(path=FIGURES / f"{name}.png")
                context.close()
        browser.close()


if __name__ == "__main__":
    main()
