"""The page in a browser without a window, against a server with the bundled model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tools.serving import TINY, Server, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
Page = playwright.Page


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as run:
        own = Path(run.chromium.executable_path)
        found = (
            own
            if own.exists()
            else next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
        )
        if found is None:
            pytest.skip("no Chromium is installed: `playwright install chromium`, or the system's package")
        launched = run.chromium.launch(executable_path=str(found), args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser, server: Server) -> Iterator[Page]:
    """The chat, with greedy answers of at most 24 tokens; no error of a script goes unseen."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    found = context.new_page()
    errors: list[str] = []
    found.on("pageerror", lambda e: errors.append(str(e)))
    found.on(
        "console",
        lambda m: errors.append(m.text) if m.type == "error" and "status of" not in m.text else None,
    )
    found.goto(server.url)
    playwright.expect(found).to_have_title(
        "talking", timeout=30_000
    )  # before it knows the model, it shows nothing
    found.get_by_text("Settings").click()
    found.get_by_label("Temperature").fill("0")
    found.get_by_label("Max tokens").fill("24")
    found.get_by_label("Max tokens").blur()
    yield found
    context.close()
    assert errors == []


def ask(page: Page, text: str) -> str:
    """The answer to a message."""
    answers = page.locator("article.assistant")
    before = answers.count()
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    playwright.expect(answers).to_have_count(before + 1)
    finished(page)
    return str(answers.last.locator(".content").inner_text())


def finished(page: Page) -> None:
    playwright.expect(page.locator("#send")).to_be_visible(timeout=30_000)


def test_an_answer_streams_and_is_what_the_api_says(page: Page, server: Server) -> None:
    text = ask(page, "The sea is")
    body = {"messages": [{"role": "user", "content": "The sea is"}], "max_tokens": 24}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert text.split() == answer["choices"][0]["message"]["content"].split()
    assert page.title() == "talking"
    said = page.locator("#figures").inner_text()
    for part in ("first token", "tokens/s", "24 tokens", "from the cache"):
        assert part in said


def test_stop_regenerate_edit_copy(page: Page) -> None:
    page.get_by_label("Max tokens").fill("400")
    page.get_by_label("Max tokens").blur()
    page.get_by_label("Message").fill("Once upon a time")
    page.get_by_label("Message").press("Enter")
    playwright.expect(page.locator("article.assistant .content")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    finished(page)
    stopped = page.locator("article.assistant .content").inner_text()
    page.get_by_label("Max tokens").fill("24")
    page.get_by_label("Max tokens").blur()
    page.get_by_role("button", name="Regenerate").click()
    finished(page)
    again = page.locator("article.assistant .content").inner_text()
    assert again
    assert stopped.startswith(again[:10]) or again.startswith(stopped[:10])
    page.locator("article.assistant").get_by_role("button", name="Copy").click()
    playwright.expect(page.get_by_text("copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()").split() == again.split()
    page.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Message").input_value() == "Once upon a time"
    assert page.locator("article").count() == 0


def test_conversations_outlive_the_page_and_travel_as_a_file(page: Page, tmp_path: Path) -> None:
    ask(page, "The sea is")
    page.get_by_role("button", name="New conversation").click()
    ask(page, "Dear sir")
    page.reload()
    assert page.locator("#list li").count() == 2
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    assert [c["title"] for c in json.loads(file.read_text())["conversations"]] == ["Dear sir", "The sea is"]
    page.get_by_role("button", name="Delete Dear sir").click()
    page.locator("#file").set_input_files(file)
    playwright.expect(page.locator("#list li")).to_have_count(3)
    page.locator("#file").set_input_files({"name": "x", "mimeType": "", "buffer": b'{"conversations": [1]}'})
    playwright.expect(page.locator("#figures")).to_contain_text("import:")
    page.locator("#list").get_by_role("button", name="The sea is", exact=True).first.click()
    assert page.locator("article").count() == 2


HOSTILE = """<img src=x onerror="document.title='caught'"> <script>document.title='caught'</script>
[a](javascript:document.title='caught') **bold** `x < y` [b](https://example.org/)

- one
- *two*

```html
<b>code</b>
```"""


def test_text_of_a_model_is_never_markup(page: Page) -> None:
    page.evaluate("(text) => { now.messages = [{ role: 'assistant', content: text }]; show(); }", HOSTILE)
    content = page.locator("article .content")
    assert content.locator("img, script, b").count() == 0
    assert [a.get_attribute("href") for a in content.locator("a").all()] == ["https://example.org/"]
    assert content.locator("strong").inner_text() == "bold"
    assert content.locator("li").all_inner_texts() == ["one", "two"]
    assert content.locator("pre code").inner_text() == "<b>code</b>"
    assert "<img src=x" in content.inner_text()
    assert page.title() == "talking"


def test_nothing_else_can_be_loaded(browser, server: Server) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    policy = httpx.get(server.url).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'let', () => 'refused')") == "refused"
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'now = 1'}))"
    )
    assert page.evaluate("now !== 1")
    seen = page.evaluate("performance.getEntriesByType('resource').map((e) => new URL(e.name).origin)")
    assert set(seen) <= {server.url, "null"}
    context.close()


def test_a_phone_and_the_keyboard(browser, server: Server) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 780}, has_touch=True)
    page = context.new_page()
    page.goto(server.url)
    playwright.expect(page.get_by_role("heading", name="talking")).to_be_visible()
    assert not page.locator("#side").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the menu
    assert page.locator("#side").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#side").is_visible()
    page.get_by_label("Message").focus()
    page.keyboard.type("The sea is")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("article.assistant")).to_have_count(1)
    finished(page)
    context.close()


def test_a_model_without_chat_template_continues_texts(browser) -> None:
    with serving(TINY, "--slots", 2, "--api-key", "secret") as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url)
        playwright.expect(page.locator("#figures")).to_contain_text("API key")
        page.get_by_label("API key").fill("secret")
        page.get_by_label("Max tokens").fill("12")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Temperature").blur()
        text = page.get_by_label("Text to continue")
        text.focus()
        page.get_by_label("API key").dispatch_event("change")  # the page asks the server again
        page.wait_for_load_state("networkidle")
        playwright.expect(text).to_be_focused()
        text.fill("The sea is")
        page.get_by_role("button", name="Continue").click()
        playwright.expect(page.get_by_role("button", name="Try again")).to_be_visible(timeout=30_000)
        first = text.input_value()
        assert first.startswith("The sea is ")
        assert len(first) > 20
        page.get_by_role("button", name="Try again").click()
        playwright.expect(page.locator("#figures")).to_contain_text("12 tokens")
        finished(page)
        assert text.input_value() == first
        context.close()
