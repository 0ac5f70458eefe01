"""The page at `/` in a real browser: headless Chromium."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from support.server_process import MODEL, TENANT_A, TENANT_B, ServerProcess


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert program is not None, "Debian's package chromium is not installed; `make test` does that"
    assert driver is not None, "Debian's package chromium-driver is not installed; `make test` does that"
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1360,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # It leaves its socket, for whose path a folder of pytest's may be too long. Its processes may end after it.
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = webdriver.Chrome(options, Service(driver, env={**os.environ, "TMPDIR": folder}))
        yield browser
        browser.quit()


class Page:
    """The page in a browser."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        browser.get(f"{url}/")
        browser.execute_script("sessionStorage.clear()")
        browser.get_log("browser")
        browser.refresh()

    def find(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """All matching elements' texts, read at once: the page redraws tables, and elements found before are gone."""
        texts: list[str] = self.script(f"[...document.querySelectorAll({selector!r})].map(each => each.innerText)")
        return texts

    def wait(self, until: Callable[[], Any]) -> Any:
        return WebDriverWait(self.browser, 600).until(lambda browser: until())

    def log_in(self, key: str) -> None:
        self.wait(lambda: self.one("#key-form").is_displayed())
        self.one("#key").send_keys(key, Keys.ENTER)
        self.wait(lambda: self.one("#model").text == MODEL)
        assert not self.one("#key-form").is_displayed()

    def ask(self, question: str) -> str:
        """Ask a question; returns the page's line about reused prompt tokens."""
        before = len(self.find(".reuse"))
        self.one("#question").send_keys(question, Keys.ENTER)
        self.wait(lambda: len(self.find(".reuse")) > before)
        return self.find(".reuse")[-1].text

    def script(self, code: str) -> Any:
        return self.browser.execute_script(f"return {code}")


@pytest.fixture
def server(default_server: ServerProcess) -> ServerProcess:
    """Its answers come to an end of their own."""
    return default_server


@pytest.fixture
def page(chromium: webdriver.Chrome, server: ServerProcess) -> Iterator[Page]:
    page = Page(chromium, server.url)
    yield page
    chromium.get("about:blank")


def test_a_chat_shows_what_was_reused_and_the_tree_grows(page: Page) -> None:
    page.log_in(TENANT_A)
    assert page.one("#tree-empty").is_displayed()
    assert page.ask("What is the capital of France?").startswith("0 of ")
    first_answer = page.find(".message.assistant")[0].text
    assert first_answer
    second = page.ask("And of Italy?")
    reused, total = (int(word) for word in second.split()[:3:2])
    assert 0 < reused < total
    assert f"{total - reused} computed" in second
    page.wait(lambda: page.find(".node"))
    assert not page.one("#tree-empty").is_displayed()
    page.wait(lambda: page.one("#blocks-cached").text != "0")
    page.wait(lambda: page.one("#hit-rate").text.endswith("%"))
    page.wait(lambda: page.one("#running").text == "0")
    # The whole chat is one node: the second turn continues the first.
    page.wait(lambda: len(page.find(".node")) == 1)
    page.browser.execute_script("document.querySelector('.node').focus()")
    page.wait(lambda: "tokens in" in page.one("#detail").text)
    assert "tokens in" in page.one(".node").accessible_name
    page.one("#new-chat").click()
    assert page.find(".message") == []


def test_boxes_are_right_of_their_parents(page: Page, server: ServerProcess) -> None:
    stem = "You are the assistant of a small public library. " * 4
    with server.client(TENANT_A) as http:
        for question in ("Where are the ships?", "When are you open?", "Can I borrow a film?"):
            body = {"prompt": stem + question, "max_tokens": 1}
            assert http.post("/v1/completions", json=body).status_code == 200
    page.log_in(TENANT_A)
    page.wait(lambda: len(page.find(".node")) == 4)
    boxes = page.script(
        "[...document.querySelectorAll('.node')].map(n => ({text: n.textContent, left: parseFloat(n.style.left),"
        " top: parseFloat(n.style.top), width: parseFloat(n.style.width), height: parseFloat(n.style.height)}))"
    )
    shared = max(boxes, key=lambda box: box["height"])
    own = [box for box in boxes if box is not shared]
    assert shared["text"].startswith("You are the assistant")
    assert shared["left"] == 0
    assert shared["height"] == sum(box["height"] for box in own)
    assert {box["left"] for box in own} == {shared["width"]}
    assert len({box["top"] for box in own}) == 3


def test_a_tenant_s_page_shows_nothing_of_another(page: Page, server: ServerProcess) -> None:
    with server.client(TENANT_A) as http:
        assert http.post("/v1/completions", json={"prompt": "A secret of tenant A. " * 8}).status_code == 200
    page.log_in(TENANT_B)
    page.wait(lambda: page.one("#blocks-cached").text != "0")
    assert page.find(".node") == []
    assert "secret" not in page.one("body").text


def test_markup_in_a_prompt_is_shown_as_text(page: Page) -> None:
    page.log_in(TENANT_A)
    page.ask("<img src=x onerror=\"document.title='broken'\"> <b id=injected>Hello!</b>")
    page.wait(lambda: page.find(".node"))
    assert page.browser.title == "RadixKV"
    assert page.find("#injected, #messages img, #tree img") == []
    assert "<b id=injected>" in page.find(".message.user")[0].text


def test_the_page_requests_the_state_once_at_a_time(page: Page) -> None:
    """An answer could come after a later one, and show what was before."""
    page.log_in(TENANT_A)
    page.browser.execute_script(
        "const plain = window.fetch; window.asking = window.most = window.asked = 0;"
        "window.fetch = async (path, options) => {"
        "  window.most = Math.max(window.most, ++window.asking);"
        "  if (!window.asked++) await new Promise(resolve => { window.answer = resolve; });"
        "  return plain(path, options).finally(() => window.asking--);"
        "}"
    )
    page.wait(lambda: page.script("window.answer !== undefined"))
    page.browser.execute_script("for (let i = 0; i < 3; i++) window.dispatchEvent(new Event('resize')); answer()")
    page.wait(lambda: page.script("window.asked > 2"))
    assert page.script("window.most") == 1


def test_a_server_that_does_not_answer_is_reported(page: Page) -> None:
    """The page showed the last state for ever."""
    page.log_in(TENANT_A)
    page.browser.execute_script("AbortSignal.timeout = () => AbortSignal.abort(new Error('too slow'))")
    page.wait(lambda: page.one("#status").text == "no answer: too slow")


def test_a_refusal_by_a_proxy_is_shown_by_its_status(page: Page) -> None:
    """It was shown as JSON that cannot be parsed."""
    page.log_in(TENANT_A)
    page.browser.execute_script("window.fetch = async () => new Response('<html>Bad gateway</html>', { status: 502 })")
    page.wait(lambda: page.one("#status").text == "no answer: status 502")
    page.one("#question").send_keys("Hi", Keys.ENTER)
    page.wait(lambda: page.texts(".message.failed") == ["status 502"])


def test_a_key_that_cannot_be_sent_is_not_taken(page: Page) -> None:
    """The form vanished, every request failed, and no other key could be entered."""
    page.wait(lambda: page.one("#key-form").is_displayed())
    page.one("#key").send_keys("\u043a\u043b\u044e\u0447", Keys.ENTER)
    assert page.one("#key-form").is_displayed()
    page.one("#key").clear()
    page.log_in(TENANT_A)


def test_enter_that_ends_a_composed_word_sends_nothing(page: Page) -> None:
    page.log_in(TENANT_A)
    page.one("#question").send_keys("\u306b\u307b\u3093")
    page.browser.execute_script(
        "const options = { key: 'Enter', isComposing: true, bubbles: true, cancelable: true };"
        "arguments[0].dispatchEvent(new KeyboardEvent('keydown', options))",
        page.one("#question"),
    )
    assert page.find(".message") == []


def test_a_refused_question_shows_the_reason(page: Page) -> None:
    page.log_in(TENANT_A)
    page.browser.execute_script("arguments[0].value = 'word '.repeat(9000)", page.one("#question"))
    page.one("#send").click()
    failed = page.wait(lambda: page.find(".message.failed"))
    assert "tokens" in failed[0].text


def test_a_new_chat_gives_up_the_answer_of_the_old_one(page: Page) -> None:
    """The rest of the answer became the first message of the new chat, and was sent with its first question."""
    page.log_in(TENANT_A)
    page.browser.execute_script(
        "const plain = window.fetch, encoder = new TextEncoder();"
        "window.fetch = async (path, options) => {"
        "  if (!path.endsWith('completions')) return plain(path, options);"
        "  window.sent = JSON.parse(options.body).messages;"
        "  return new Response(new ReadableStream({ start(controller) {"
        "    const send = (event) => controller.enqueue(encoder.encode(`data: ${JSON.stringify(event)}\\n\\n`));"
        "    window.end = () => {"
        "      send({ choices: [], usage: { prompt_tokens: 1, completion_tokens: 1 } });"
        "      controller.close();"
        "    };"
        "    options.signal?.addEventListener('abort', () => {"
        "      window.end = () => {};"
        "      controller.error(options.signal.reason);"
        "    });"
        "    send({ choices: [{ delta: { content: 'Well' } }] });"
        "  } }));"
        "}"
    )
    for question in ("The first?", "The second?"):
        page.one("#question").send_keys(question, Keys.ENTER)
        page.wait(lambda: page.texts(".message.assistant") == ["Well"])
        assert page.one("#messages").get_attribute("aria-busy") == "true"
        assert page.script("window.sent") == [{"role": "user", "content": question}]
        page.one("#new-chat").click()
        page.script("window.end()")
        page.wait(lambda: page.one("#send").is_enabled())
        assert page.one("#messages").get_attribute("aria-busy") == "false"
        assert page.find(".message, .reuse") == []


@pytest.mark.parametrize(("content", "shown", "kind"), [("42", "42", "message assistant"), ("", "Hm, six", "thoughts")])
def test_what_a_model_thinks_is_shown_until_its_answer_begins(page: Page, content: str, shown: str, kind: str) -> None:
    """An answer that was all thoughts used to stay an empty box."""
    page.log_in(TENANT_A)
    deltas = [{"role": "assistant", "content": ""}, {"reasoning": "Hm, "}, {"reasoning": "six"}, {"content": content}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    events.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 9}})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    page.browser.execute_script(
        "const [body] = arguments; const real = window.fetch;"
        "window.fetch = (path, ...rest) => path.endsWith('completions') ? new Response(body) : real(path, ...rest)",
        body,
    )
    page.ask("Six times seven?")
    box = page.find(".message")[-1]
    assert box.text == shown
    assert kind in str(box.get_attribute("class"))
    assert ("thoughts" in str(box.get_attribute("class"))) == (not content)


def test_the_page_of_an_ingress_shows_its_replicas(page: Page) -> None:
    states = [
        {
            "name": "one",
            "up": True,
            "draining": False,
            "generation": "5f1c0a77",
            "running": 3,
            "waiting": 1,
            "blocks": 5000,
            "cached_blocks": 1200,
        },
        {
            "name": "two",
            "up": False,
            "draining": False,
            "generation": None,
            "running": 0,
            "waiting": 0,
            "blocks": 0,
            "cached_blocks": 0,
        },
    ]
    page.log_in(TENANT_B)
    assert not page.one("#replicas").is_displayed()
    page.browser.execute_script(
        "const [states] = arguments, plain = window.fetch;"
        "window.fetch = async (path, options) => {"
        "  const response = await plain(path, options);"
        "  return path === 'live' ? Response.json({...await response.json(), trees: [], replicas: states}) : response;"
        "}",
        states,
    )
    page.wait(lambda: page.one("#replicas").is_displayed())
    # In one call: each answer of the server replaces the rows.
    rows = [text.split("\t") for text in page.texts("#replicas tbody tr")]
    assert rows == [["one", "up", "5f1c0a77", "3", "1", "1,200 of 5,000"], ["two", "down", "", "0", "0", "0 of 0"]]
    assert page.one("#tree-title").text == "Replicas"
    assert not page.one("#tree-empty").is_displayed()


@pytest.mark.parametrize("width", [400, 1360])
def test_the_page_fits_logs_no_errors_and_loads_nothing_from_other_hosts(
    page: Page, server: ServerProcess, width: int
) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    page.log_in(TENANT_A)
    page.ask("Hi")
    page.wait(lambda: page.find(".node"))
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with server.client(TENANT_A) as http, http.stream("POST", "/v1/completions", json=body):
        page.wait(lambda: page.one("#requests").is_displayed())
        assert page.script("document.documentElement.scrollWidth") <= width
    backgrounds = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        backgrounds.append(page.script("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds[0] != backgrounds[1]
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    loaded_urls = page.script("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded_urls
    assert all(name.startswith(f"{server.url}/") for name in loaded_urls)
    # The only log entries are the 401s from before the key was entered.
    log_messages = [entry["message"] for entry in page.browser.get_log("browser")]
    assert all("401" in message for message in log_messages), log_messages


def test_what_came_from_the_disk_and_from_drafts_is_shown(
    chromium: webdriver.Chrome, tiny_model_folder: Path, tmp_path: Path
) -> None:
    question = "What is the capital of France? Answer in one sentence, and say what it is known for."
    options = [str(tiny_model_folder), "--served-model-name", MODEL]
    options += ["--disk-cache", str(tmp_path), "--speculative-config", '{"method": "tree"}']
    options += ["--override-generation-config", '{"temperature": 0}']
    for starts in (1, 2):
        with ServerProcess(*options) as server:
            page = Page(chromium, server.url)
            page.wait(lambda page=page: page.one("#model").text == MODEL)
            line = page.ask(question)
            assert ("from disk)" in line) == (starts == 2)
            if starts == 1:
                page.one("#new-chat").click()
                assert "by drafts, " in page.ask(question)
            page.wait(lambda page=page: page.texts("#tiers tbody tr"))
            page.wait(
                lambda page=page, starts=starts: starts == 1 or page.texts("#tiers tbody tr")[0].split()[1] != "0"
            )
            (row,) = page.texts("#tiers tbody tr")
            assert row.startswith("disk")
            chromium.get("about:blank")
