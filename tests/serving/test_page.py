"""The page at / in a real browser, on a real server; skipped where there is no Chromium."""

import functools
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from lamina.runtime.sampling_params import SamplingParams
from lamina.serving.routes.page import PATHS

from .server_process import SMALL, ServerProcess

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
LONG = "200"  # tokens, most of the context
ESCAPE, SHIFT, ENTER = "\ue00c", "\ue008", "\ue007"  # keys as WebDriver writes them
# The contrast of each text with what is behind it, as WCAG 2 has it.
CONTRASTS = """
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    function pixel(colors) {
        canvas.clearRect(0, 0, 1, 1);
        for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    }
    function luminance(rgb) {
        const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = rgb.map(v => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    }
    const found = {};
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.data.trim(), element = walker.currentNode.parentElement;
        if (!text || !element.checkVisibility()) continue;
        if (element.closest('select')?.disabled) continue;
        const behind = [];
        for (let at = element; at; at = at.parentElement)
            behind.unshift(getComputedStyle(at).backgroundColor);
        const back = luminance(pixel(behind));
        const front = luminance(pixel([...behind, getComputedStyle(element).color]));
        found[text] = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    }
    return found;
"""


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver; Debian has them as chromium and chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(30)
    yield driver
    driver.quit()


class Page:
    """The page as a user meets it: fields, buttons and texts by their ids."""

    def __init__(self, browser, url):
        self.browser, self.url = browser, url
        browser.get_log("browser")
        browser.get(url)
        browser.execute_script("sessionStorage.clear(); localStorage.clear()")
        browser.refresh()
        self.until(lambda: self.text("state") != "connecting…")

    def element(self, name):
        return self.browser.find_element("id", name)

    def text(self, name):
        return self.element(name).text

    def setting(self, name, value):
        field = self.browser.find_element("css selector", f"#settings [name={name}]")
        field.clear()
        field.send_keys(value)

    def send(self, text):
        self.element("message").send_keys(text, "\n")

    def messages(self):
        """What each message of the conversation says, the oldest first."""
        return [each.text for each in self.browser.find_elements("css selector", "#log article p")]

    def is_writing(self):
        return self.element("stop").is_displayed()

    def rows(self):
        """Cells of the table of requests, the newest first."""
        rows = "[...document.querySelectorAll('#requests tr')]"
        return self.browser.execute_script(f"return {rows}.map(r => [...r.cells].map(c => c.textContent))")

    def until(self, is_so, seconds=30):
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, self.browser.find_element("tag name", "body").text
            time.sleep(0.02)

    def complaints(self):
        """What the browser has to say of the page's own files and scripts."""
        return [entry for entry in self.browser.get_log("browser") if entry["source"] != "network"]


@pytest.fixture
def page(browser, server):
    return Page(browser, server.url)


def test_it_opens_with_the_model_and_the_state_and_nothing_refused(page):
    page.until(lambda: page.text("state") == "ready")
    page.until(lambda: page.text("model") == "tiny")
    assert page.browser.title == "Lamina"
    assert not page.complaints()


def test_an_answer_appears_as_it_is_written_and_its_phases_are_listed(page):
    page.setting("max_tokens", "60")
    page.setting("seed", "3")
    watch = """
        const [done] = arguments, seen = [];
        new MutationObserver(() => {
            seen.push(document.querySelector('#log article:last-child p').textContent.length);
            if (document.getElementById('stop').hidden && seen.length > 1) done(seen);
        }).observe(document.body, {subtree: true, childList: true, characterData: true, attributes: true});
        document.getElementById('message').value = 'hello';
        document.getElementById('composer').requestSubmit();
    """
    lengths = page.browser.execute_async_script(watch)
    assert len(set(lengths)) > 5
    assert lengths == sorted(lengths)
    question, answer = page.messages()
    assert question == "hello"
    assert answer
    ((tokens, *phases, end),) = page.rows()
    assert (tokens, end) == ("60", "length")
    assert all(float(spent) >= 0 for spent in phases)
    assert not page.complaints()


def test_the_next_message_goes_on_with_the_conversation(page, server):
    page.setting("max_tokens", "3")
    page.send("one")
    page.until(lambda: len(page.rows()[0]) == 6)
    page.send("two")
    page.until(lambda: len(page.rows()) == 2)
    assert [text for text in page.messages() if text in ("one", "two")] == ["one", "two"]
    page.element("clear").click()
    assert page.messages() == []


def test_shift_enter_starts_a_line(page):
    page.setting("max_tokens", "1")
    page.element("message").send_keys("a" + SHIFT + ENTER + SHIFT + "b")
    assert page.messages() == []
    page.send("")
    page.until(lambda: page.messages())
    assert page.messages()[0] == "a\nb"


class Brake:
    """A request beside others that makes each step take longer, for as long as it is held."""

    def __init__(self, server):
        self.server, self.is_held = server, True
        self.generation = server.in_loop(self.begin)

    async def begin(self):
        params = SamplingParams(max_tokens=250, ignore_eos=True, logits_processors=[self.slow])
        return self.server.serving.runtime.generate([5], params)

    def slow(self, prompt, answer, logits):
        if self.is_held:
            time.sleep(0.04)
        return logits

    def release(self):
        self.is_held = False
        self.server.in_loop(self.generation.aclose)


@pytest.fixture(scope="module")
def narrow_server(start_server):
    """A server that computes two sequences at a time."""
    return start_server(settings={"max_num_seqs": 2})


@pytest.fixture
def slow_page(browser, narrow_server):
    """The page of a server whose steps take long."""
    page = Page(browser, narrow_server.url)
    page.brake = Brake(narrow_server)
    yield page
    page.brake.release()


@pytest.mark.parametrize("how", ["button", "escape"])
def test_an_answer_is_stopped_and_its_request_ends(slow_page, how):
    page = slow_page
    page.setting("max_tokens", LONG)
    page.send("tell me more")
    page.until(lambda: len(page.messages()) == 2 and page.messages()[1])
    page.until(lambda: page.text("running") == "2")  # the brake is one
    if how == "button":
        page.element("stop").click()
    else:
        page.element("message").send_keys(ESCAPE)
    page.until(lambda: not page.is_writing())
    assert page.rows()[0][-1] == "stopped"
    assert page.browser.switch_to.active_element.get_attribute("id") == "message"
    assert page.browser.find_element("css selector", "article:last-child footer").text == "stopped"
    assert page.messages()[1]
    page.until(lambda: page.text("running") == "1")
    assert not page.element("problem").is_displayed()


def test_the_queue_is_seen_and_blocks_and_tokens(slow_page, narrow_server):
    page = slow_page
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
    post = functools.partial(httpx.post, f"{narrow_server.url}/v1/completions", json=body, timeout=60)
    with ThreadPoolExecutor(5) as others:
        asked = [others.submit(post) for _ in range(5)]
        page.until(lambda: page.text("waiting") == "4")
        assert page.text("running") == "2"
        page.until(lambda: float(page.text("rate")) > 0)
        used, total = map(int, re.match(r"(\d+) of (\d+) used", page.text("blocks-text")).groups())
        assert 0 < used < total
        page.until(lambda: page.text("between-tokens") != "–")
        narrow_server.in_loop(page.brake.generation.aclose)
        assert all(each.result().status_code == 200 for each in asked)
    page.until(lambda: (page.text("running"), page.text("waiting")) == ("0", "0"))
    page.until(lambda: page.text("first-token") != "–")


def test_an_error_is_shown_in_the_servers_words_and_the_message_kept(page):
    question = "a" * 300
    page.send(question)
    page.until(lambda: page.element("problem").is_displayed())
    assert "maximum context length" in page.text("problem")
    assert page.element("problem").get_attribute("role") == "alert"
    assert page.messages() == []
    assert page.element("message").get_attribute("value") == question
    page.element("message").clear()
    page.setting("max_tokens", "2")
    page.send("short")
    page.until(lambda: len(page.messages()) == 2 and not page.is_writing())
    assert not page.element("problem").is_displayed()


def test_a_setting_that_is_no_number_is_refused_before_it_is_sent(page):
    page.setting("top_p", "1.5")
    page.send("hello")
    assert page.messages() == []
    assert page.element("message").get_attribute("value") == "hello"


def test_text_that_looks_like_a_page_is_shown_as_text(page):
    page.setting("max_tokens", "1")
    page.send("<img src=x onerror=alert(1)><script>alert(2)</script>")
    page.until(lambda: page.messages())
    assert page.messages()[0] == "<img src=x onerror=alert(1)><script>alert(2)</script>"
    assert not page.complaints()


@pytest.fixture
def loading_server(tiny_text_folder):
    """The address of a server with a key and a root path, as soon as it listens."""
    options, key = ("--root-path", "/lamina", "--engine", "thread"), {"LAMINA_API_KEY": "sesame"}
    with ServerProcess(tiny_text_folder, *SMALL, *options, environment=key) as server:
        yield str(server.client.base_url).rstrip("/")


def test_a_server_with_keys_shows_the_page_while_it_loads_and_asks_for_one(browser, loading_server):
    page = Page(browser, loading_server)
    page.until(lambda: "API key" in page.text("state"))
    page.send("hello")
    page.until(lambda: page.element("problem").is_displayed())
    assert "API key" in page.text("problem")
    page.setting("key", "sesame\t")
    page.setting("max_tokens", "2")
    page.until(lambda: "the model is loading" in page.text("state") or page.text("state") == "ready")
    page.until(lambda: page.text("state") == "ready")
    page.until(lambda: page.text("model").startswith("tiny"))
    page.send("")
    page.until(lambda: len(page.messages()) == 2 and not page.is_writing())
    assert page.rows()[0][-1] in ("length", "stop")
    assert "sesame" not in browser.page_source
    browser.refresh()
    page.until(lambda: page.text("state") == "ready")  # the key is kept as long as the tab
    assert not page.complaints()


def test_a_lost_connection_in_the_middle_of_an_answer_is_told(browser, start_server):
    server = start_server(exit_on_engine_loss=False)
    page, brake = Page(browser, server.url), Brake(server)
    page.setting("max_tokens", LONG)
    page.send("tell me more")
    page.until(lambda: len(page.messages()) == 2 and page.messages()[1])
    brake.is_held = False
    server.in_loop(server.serving.runtime.close)
    page.until(lambda: not page.is_writing())
    page.until(lambda: page.element("state").get_attribute("data-state") == "down")
    assert "engine" in page.text("state") or "closed" in page.text("state")


def test_every_control_is_reached_by_the_keyboard_and_has_a_name(page):
    names, seen = [], set()
    focused = page.browser.switch_to.active_element
    while focused.id not in seen:
        seen.add(focused.id)
        if focused.tag_name != "body":  # the browser's own controls follow the last one
            names.append(focused.accessible_name)
        focused.send_keys("\t")
        focused = page.browser.switch_to.active_element
    assert all(names), names
    assert {
        "Skip to the message",
        "Message",
        "Send",
        "New chat",
        "API key",
        "Temperature",
        "Stop at",
        "Conversation",
    } <= set(names)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(page, theme):
    page.setting("max_tokens", "2")
    page.send("hello")
    page.until(lambda: len(page.messages()) == 2 and not page.is_writing())
    while page.browser.execute_script("return document.documentElement.dataset.theme") != theme:
        page.element("theme").click()
    ratios = page.browser.execute_script(CONTRASTS)
    assert len(ratios) > 30
    assert not {text: ratio for text, ratio in ratios.items() if ratio < 4.5}
    page.browser.refresh()
    assert page.browser.execute_script("return document.documentElement.dataset.theme") == theme


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_nothing_is_wider_than_the_window(page, width):
    page.browser.set_window_size(width, 800)
    try:
        page.send("word" * 40)
        page.until(lambda: page.messages())
        root = "document.scrollingElement"
        assert page.browser.execute_script(f"return {root}.scrollWidth <= {root}.clientWidth")
    finally:
        page.browser.set_window_size(1280, 900)


def test_a_server_may_leave_the_page_out(start_server):
    client = start_server(page=False).client
    assert client.get("/").status_code == 404
    assert client.get("/page/page.js").status_code == 404
    assert client.get("/health/ready").status_code == 200


def test_files_of_the_page_let_nothing_else_run(client):
    for path in PATHS:
        answer = client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"].split("; ")
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://|<style|style=|<script>|\son\w+=", answer.text)
    assert client.get("/page/../page.css").status_code == 404
    assert client.get("/page/%2e%2e/__init__.py").status_code == 404
