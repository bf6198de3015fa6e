"""The console in a real browser: every page in both themes and three widths, by keyboard, live, and under
attack."""

import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

import polars as pl
import pytest
from answers_contract import row
from axe_playwright_python.base import AXE_SCRIPT
from console_process import OBEYED, PLAIN, TEMPLATE, Console, running_console
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from polling import wait_until

from pipeline.records.schema import RESULT_SCHEMA
from pipeline.redis.keys import Keys
from pipeline.service.access.keys import SenderKeys
from pipeline.service.incident_states import read_decisions
from pipeline.service.marks import read_marks
from pipeline.sinks.choose import parquet_of

_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(_BROWSER is None, reason="needs Chromium"),
]
FLAGS: Final = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
)  # fmt: skip
# All rules at the narrowest and the widest; at the width between, the colours of the dark theme. Room is
# measured at each.
LOOKS: Final = (("light", 400), ("dark", 800), ("light", 1600))
ENDS: Final = (400, 1600)
HEAVIEST: Final = 200 * 1024  # bytes of a page with all that it loads
LIVE_MS: Final = 15_000
# Pages of one thing; the others are found in the navigation. Links of `inside` are taken from the page.
ONE_THING: Final = {
    "/incidents": "/incidents/",
    "/patterns": "/patterns/T",
    "/lines": "/lines/",
    "/sessions": "/sessions/",
    "/rates": "/units",
}
# Pages of the navigation where lines of senders are to be seen.
SHOWS_LINES: Final = (
    "/", "/incidents", "/patterns?since=6h", "/lines", "/patterns/T2?since=6h", "/pipeline", "/compare", "/rates", "/units?by=workload", "/learning",
)  # fmt: skip
# The dark theme has other colours and nothing else.
COLOURS: Final = ("color-contrast", "link-in-text-block")
AXE: Final = """async rules => (await axe.run(document, {
        resultTypes: ["violations"], preload: false, ...(rules.length ? {runOnly: {type: "rule", values: rules}} : {}),
    })).violations
    .map(v => v.id + ": " + v.help + " " + v.nodes.slice(0, 3).map(n => n.html.slice(0, 160)).join(" | "))"""
TOO_WIDE: Final = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
WEIGHT: Final = """() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .reduce((sum, one) => sum + one.encodedBodySize, 0)"""
# The tree that the browser makes of a page: a tag with its depth, in order.
TREE: Final = """text => {
    const found = [], walk = (node, depth) => { for (const one of node.children) {
        found.push([one.localName, depth]); if (one.localName !== "svg") walk(one, depth + 1); } };
    walk(new DOMParser().parseFromString(text, "text/html"), 0);
    return found;
}"""
# Elements that only an attacker makes.
FOREIGN: Final = """() => [...document.querySelectorAll("img, iframe, object, embed, base, b[hx-get], [onclick], [onerror]")]
    .map(one => one.outerHTML.slice(0, 100)).concat(window.pwned ? ["ran"] : [])"""
VOID: Final = frozenset(
    ["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"]
)


@pytest.fixture(scope="module")
def console(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with running_console(redis_url, tmp_path_factory.mktemp("console")) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=_BROWSER, args=list(FLAGS))
        yield found
        found.close()


@pytest.fixture(scope="module")
def visit(console: Console, browser: Browser) -> Iterator[BrowserContext]:
    """A browser that has come in by a link."""
    context = browser.new_context()
    context.new_page().goto(console.link())
    yield context
    context.close()


@contextmanager
def opened(context: BrowserContext, url: str, troubles: list[str]) -> Iterator[Page]:
    """A page; what it says on the console, what fails and what it asks of other hosts are troubles."""
    page, host = context.new_page(), urlsplit(url).netloc

    def asked(address: str) -> None:
        if urlsplit(address).netloc != host and not address.startswith("data:"):
            troubles.append(f"{url} asks {address}")

    page.on("request", lambda request: asked(request.url))
    page.on("pageerror", lambda error: troubles.append(f"{url} throws {error}"))
    page.on(
        "console",
        lambda said: (
            troubles.append(f"{url} says {said.text}")
            if said.type in ("error", "warning") and "/nothing-here" not in url
            else None
        ),
    )
    page.on(
        "requestfailed",
        # A page that is left early gives up its stream, and the icon that comes last.
        lambda failed: (
            troubles.append(f"{failed.url} failed: {failed.failure}")
            if "/events" not in failed.url
            and not (failed.url.endswith("/icon.svg") and failed.failure == "net::ERR_ABORTED")
            else None
        ),
    )
    try:
        page.goto(url)
        yield page
    finally:
        page.close()


def paths(page: Page, inside: str = "body") -> list[str]:
    """The addresses of links, without those of other places on the same page."""
    found = page.eval_on_selector_all(f"{inside} a[href]", "all => all.map(one => one.href)")
    return [url.partition("#")[0] for url in dict.fromkeys(found)]


def every_page(console: Console, context: BrowserContext) -> list[str]:
    """The pages of the navigation, and one of each thing that they link to."""
    page = context.new_page()
    page.goto(console.url)
    wanted = paths(page, "#pages")
    for url in list(wanted):
        beginning = ONE_THING.get(urlsplit(url).path)
        if beginning is None or page.goto(url + "?since=6h").status != 200:  # type: ignore[union-attr]
            continue
        of_one = [one for one in paths(page, "main") if urlsplit(one).path.startswith(beginning)]
        wanted += of_one[:1]
    page.close()
    return [*wanted, f"{console.url}/silences"]


@pytest.mark.parametrize("at_each", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_every_page_is_open_to_everybody_in_both_themes_and_at_every_width(
    console: Console, visit: BrowserContext, at_each: bool
) -> None:
    """Every second page is asked all rules at its narrowest and the others at their widest, or all pages at
    each of the two."""
    troubles: list[str] = []
    pages = every_page(console, visit)
    assert len(pages) >= 15
    pages += [
        f"{console.url}/rates?workload=shop/web",
        f"{console.url}/nothing-here",
        f"{console.url}/lines?since=30d",
    ]
    for n, url in enumerate(pages):
        with opened(visit, url, troubles) as page:
            weight = page.evaluate(WEIGHT)
            if weight > HEAVIEST:
                troubles.append(f"{url} weighs {weight:,} bytes")
            troubles += found_by_axe(page, ENDS if at_each else ENDS[n % 2 :][:1])
    assert not troubles, "\n".join(dict.fromkeys(troubles))


def found_by_axe(page: Page, ends: Sequence[int] = ENDS) -> list[str]:
    """What is wrong with a page in each of LOOKS, by all rules at these widths."""
    troubles: list[str] = []
    page.evaluate(AXE_SCRIPT)
    for theme, width in LOOKS:
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 900})
        where = f"{urlsplit(page.url).path} {theme} {width}"
        if theme == "dark" or width in ends:
            rules = COLOURS if theme == "dark" else ()
            troubles += [f"{where}: {found}" for found in page.evaluate(AXE, rules)]
        if (over := page.evaluate(TOO_WIDE)) > 0:
            troubles.append(f"{where} is {over} px too wide")
    return troubles


def test_what_was_never_said_before_is_folded_and_read_by_keys(
    console: Console, visit: BrowserContext
) -> None:
    troubles: list[str] = []
    with opened(visit, console.url, troubles) as page:
        keys, fold = page.keyboard, page.locator("details", has_text="Never said before (1)")

        def down() -> None:
            for _ in range(page.locator("[data-row]").count() + 1):
                keys.press("j")

        down()
        assert fold.locator(".on").count() == 0  # what is folded is passed over
        fold.locator("summary").focus()
        keys.press("Enter")
        assert "never seen in 900 lines" in fold.locator("li").inner_text()
        troubles += found_by_axe(page)
        down()
        assert fold.locator(".on").count() == 1
        keys.press("Enter")
        page.wait_for_url("**/lines/said-0?at=*")
        assert "array is lost" in page.locator("#here").inner_text()
    assert not troubles, "\n".join(troubles)


class _Tags(HTMLParser):
    """The tags of a text with their depth, and what is not closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[list[Any]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.wrong += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        if len(names) != len(set(names)):
            self.wrong.append(f"<{tag}> has an attribute twice")
        self._add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._add(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes nothing")

    def _add(self, tag: str) -> None:
        if "svg" not in self.open:
            self.tags.append([tag, len(self.open)])


def test_pages_are_the_html_that_a_browser_reads_and_every_link_leads_somewhere(
    console: Console, visit: BrowserContext
) -> None:
    cookie, wrong = console.enter(), []
    page = visit.new_page()
    page.goto(f"{console.url}/in")
    followed: dict[str, str] = {}
    for url in every_page(console, visit):
        path = url.removeprefix(console.url)
        answer = console.ask(path, cookie=cookie)
        read = _Tags(answer.body)
        wrong += [f"{path}: {found}" for found in read.wrong]
        if (meant := page.evaluate(TREE, answer.body)) != read.tags:
            at = next(
                (n for n, pair in enumerate(zip(meant, read.tags, strict=False)) if pair[0] != pair[1]), 0
            )
            wrong.append(
                f"{path}: a browser reads {meant[at - 2 : at + 3]} where {read.tags[at - 2 : at + 3]} stands"
            )
        ids = re.findall(r'\sid="([^"]+)"', answer.body)
        wrong += [f"{path}: {name!r} twice" for name in {one for one in ids if ids.count(one) > 1}]
        wrong += [
            f"{path}: nothing {name!r}"
            for name in re.findall(r'href="#([^"]+)"', answer.body)
            if name not in ids
        ]
        hrefs = re.findall(r'\s(?:href|src)="([^"#]+)', answer.body)
        followed |= {urljoin(url, href.replace("&amp;", "&")): path for href in hrefs}
    for url, path in followed.items():
        answer = console.ask(url.removeprefix(console.url), cookie=cookie)
        if answer.status != 200:
            wrong.append(f"{path} links to {url}: {answer.status}")
    assert not wrong, "\n".join(wrong)


def test_what_a_sender_writes_is_text_in_every_field_of_every_page(
    console: Console, visit: BrowserContext
) -> None:
    cookie, troubles, shown = console.enter(), [], 0
    urls = dict.fromkeys([*every_page(console, visit), *(console.url + path for path in SHOWS_LINES)])
    hostile = [
        url
        for path in ("/", "/lines?workload=w/*", "/patterns?since=6h")
        for url in _of_hostile(console, visit, path)
    ]
    for url in [*urls, *dict.fromkeys(hostile)]:
        if console.ask(url.removeprefix(console.url), cookie=cookie).status == 404:
            continue
        with opened(visit, url, troubles) as page:
            html, text = page.content(), page.inner_text("body")
            troubles += [f"{url} holds {found}" for found in page.evaluate(FOREIGN)]
            troubles += [f"{url} holds {one!a}" for one in OBEYED if one in html]
            if "window.pwned" in text:
                shown += 1
                if "<script>window.pwned=1</script>" not in text or (
                    "{{ 7*7 }}" not in text and url in hostile
                ):
                    troubles.append(f"{url} does not show what was written")
    assert not troubles, "\n".join(dict.fromkeys(troubles))
    assert shown >= 5


def _of_hostile(console: Console, context: BrowserContext, path: str) -> list[str]:
    """Pages of what was written by an attacker."""
    page = context.new_page()
    page.goto(console.url + path)
    found = page.eval_on_selector_all(
        "main article, main tr, main li.line",
        "all => all.filter(one => one.innerText.includes('window.pwned')).flatMap(one => [...one.querySelectorAll('a[href]')].map(a => a.href))",
    )
    page.close()
    return [str(one) for one in found]


def test_an_incident_is_found_marked_and_acknowledged_by_keys_alone_and_undone(
    console: Console, visit: BrowserContext
) -> None:
    troubles: list[str] = []
    with opened(visit, console.url, troubles) as page:
        keys = page.keyboard
        cards = page.locator("article.incident")
        for _ in range(cards.count()):
            keys.press("j")
            if PLAIN in page.locator("article.on").inner_text():
                break
        keys.press("Enter")
        page.wait_for_url("**/incidents/*")
        name = page.url.rpartition("/")[2]
        keys.press("j")  # the incident itself, or its first cause
        page.wait_for_selector("li.cause.on, #live.on")
        if page.locator("li.cause.on").count() == 0:
            keys.press("j")
        for key in "mn":
            keys.press(key)
        page.focus("[data-undo]")  # a note that nobody reads goes after ten seconds
        page.wait_for_selector("li.cause .is-normal")
        assert [mark.state for mark in read_marks(console.redis, console.settings).marks] == ["normal"]
        keys.press("u")
        page.wait_for_selector("li.cause .is-normal", state="detached")
        assert read_marks(console.redis, console.settings).marks == []
        keys.press("a")
        page.focus("[data-undo]")
        page.wait_for_selector(".head .st-acknowledged")
        assert read_decisions(console.redis, console.settings)[name].state == "acknowledged"
        keys.press("u")
        page.wait_for_selector(".head .st-acknowledged", state="detached")
        assert name not in read_decisions(console.redis, console.settings)
        keys.press("?")
        page.wait_for_selector("#help[open]")
        page.uncheck("#keys-on")
        keys.press("Escape")
        keys.press("/")
        assert page.locator("dialog[open]").count() == 0
        page.click("#open-help")
        page.check("#keys-on")
        keys.press("Escape")
        keys.press("/")
        keys.type("comp")
        keys.press("Escape")  # a field of search would only empty itself
        assert page.locator("dialog[open]").count() == 0
        keys.press("c")
        page.wait_for_url("**/compare?a=*..*&b=*..*")
        page.go_back()
        page.goto(f"{page.url}?zone=Asia%2FTokyo")
        assert page.inner_text("#zone") == "Asia/Tokyo"
        first = page.locator(".lead time").first
        assert first.inner_text()[-8:] != first.get_attribute("data-utc")[-8:]  # type: ignore[index]
        keys.press("t")
        assert "zone" not in page.url and page.inner_text("#zone") == "UTC"
        keys.press("/")
        keys.type("compa")
        assert page.locator("#palette-hits a.on").get_attribute("aria-selected") == "true"
        assert page.get_attribute("#palette-text", "aria-activedescendant") == "hit-0"
        keys.press("Enter")
        page.wait_for_url("**/compare*")
    assert not troubles, "\n".join(troubles)


def test_an_open_page_shows_a_new_incident_without_a_reload_and_without_jumping(
    console: Console, visit: BrowserContext
) -> None:
    troubles: list[str] = []
    with opened(visit, console.url, troubles) as page:
        page.set_viewport_size({"width": 800, "height": 300})
        page.evaluate("() => { window.kept = 1; scrollTo(0, 200); }")
        place = page.evaluate("() => scrollY")
        text = "a fault that nobody has seen before"
        assert place > 0
        page.wait_for_timeout(1_100)  # the stream has begun
        began = time.monotonic()
        console.add_incident(text, workload="shop/pay", cause=7)
        page.wait_for_selector(f"article.incident:has-text('{text}')", timeout=LIVE_MS)
        assert time.monotonic() - began < LIVE_MS / 1000
        assert page.evaluate("() => [window.kept, scrollY]") == [1, place]
        assert wait_until(lambda: "1 new incident" in page.inner_text("#said"), timeout_s=2)
    assert not troubles, "\n".join(troubles)


def test_lines_follow_until_somebody_reads_on(console: Console, visit: BrowserContext) -> None:
    troubles: list[str] = []

    def store(text: str) -> None:
        now = datetime.now(UTC)
        rows = [row(0, text, timestamp=now, workload="shop/new", message=text, template_id=TEMPLATE)]
        parquet_of(console.settings).write(text, pl.DataFrame(rows, schema=RESULT_SCHEMA))
        console.redis.hincrby(Keys(console.settings.redis.key_prefix).counts, "stored", 1)

    with opened(visit, f"{console.url}/lines?since=6h&follow=true", troubles) as page:
        page.wait_for_timeout(1_100)  # the stream has begun
        store("first-that-comes")
        page.wait_for_selector("li.line:has-text('first-that-comes')", timeout=LIVE_MS)
        page.keyboard.press("j")
        store("second-that-comes")
        page.wait_for_timeout(2_000)
        assert page.locator("li.line:has-text('second-that-comes')").count() == 0
        page.keyboard.press("Escape")
        page.wait_for_selector("li.line:has-text('second-that-comes')", timeout=LIVE_MS)
    assert not troubles, "\n".join(troubles)


def test_a_link_is_good_once_and_its_cookie_is_kept_from_scripts_and_other_sites(console: Console) -> None:
    path = console.link().removeprefix(console.url)
    first, again = console.ask(path), console.ask(path)
    assert (first.status, again.status, again.cookie) == (303, 403, "")
    said = first.headers["set-cookie"].lower()
    assert "httponly" in said and "samesite=strict" in said
    assert console.ask("/", cookie=first.cookie).status == 200
    assert console.ask("/").headers["location"] == "/in"
    elsewhere = console.link().removeprefix(console.url) + "&next=//evil.example/"
    assert console.ask(elsewhere).headers["location"] == "/"


def test_pages_allow_no_script_of_others(console: Console) -> None:
    cookie = console.enter()
    for path in ("/", "/lines", "/in", "/incidents/nothing"):
        headers = console.ask(path, cookie=cookie).headers
        policy = headers["content-security-policy"]
        assert (
            "unsafe" not in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        )
        assert "form-action 'self'" in policy and "*" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    nonces = {console.ask("/", cookie=cookie).headers["content-security-policy"] for _ in range(2)}
    assert len(nonces) == 2
    assert console.ask("/", cookie=cookie, headers={"Host": "evil.example"}).status == 421


def test_a_form_needs_its_token_and_its_origin(console: Console) -> None:
    cookie = console.enter()
    token = re.search(r'name="token" value="(\w+)"', console.ask("/", cookie=cookie).body)
    other = re.search(r'name="token" value="(\w+)"', console.ask("/", cookie=console.enter()).body)
    assert token and other
    form = {"state": "normal", "pattern": "T1 shop/web", "token": token[1]}
    own = {"Origin": console.url}
    for fields, headers, status in (
        (form | {"token": ""}, own, 403),
        (form | {"token": other[1]}, own, 403),
        (form, {}, 403),
        (form, {"Origin": "http://evil.example"}, 403),
        (form, {"Origin": "null"}, 403),
        (form, own, 303),
    ):
        assert console.ask("/do/mark", cookie=cookie, form=fields, headers=headers).status == status, headers
    assert [mark.workload for mark in read_marks(console.redis, console.settings).marks] == ["shop/web"]
    undo = form | {"state": ""}
    assert console.ask("/do/mark", cookie=cookie, form=undo, headers=own).status == 303
    assert console.ask("/out", cookie=cookie, form={"token": token[1]}, headers=own).status == 303
    assert console.ask("/", cookie=cookie).status == 303


def test_a_key_signs_in_sees_its_workloads_and_ends_with_its_key(console: Console, browser: Browser) -> None:
    secret = console.new_key("narrow", "read", only=("shop/web",))
    time.sleep(1.1)  # as long as an older ring of keys is taken
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{console.url}/lines?since=6h")
        page.fill("#key", "lw_wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("[role=alert]")
        page.fill("#key", secret)
        page.keyboard.press("Enter")
        page.wait_for_url("**/lines?since=6h")
        assert set(page.locator("li.line .meta").all_inner_texts()) and "shop/db" not in page.inner_text(
            "main"
        )
        assert page.locator("form.mark, .acts").count() == 0
        SenderKeys(console.redis, console.settings).revoke("narrow")
        began = time.monotonic()
        assert wait_until(lambda: "/in" in _again(page), timeout_s=3)
        assert time.monotonic() - began < 2
        assert page.context.cookies()[0]["httpOnly"] and page.context.cookies()[0]["sameSite"] == "Strict"


def _again(page: Page) -> str:
    page.reload()
    return page.url
