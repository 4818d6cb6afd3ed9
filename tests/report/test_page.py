"""The page of `groupwise watch` and the report, in a real browser: Debian's chromium under Playwright."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from groupwise.records import Group
from groupwise.report.run_reader import RunIndex, RunReader
from groupwise.report.static_report import write_report
from groupwise.report.watch_server import listen
from groupwise.tracking.run_files import MetricsFile
from groupwise.tracking.run_folder import RunFolder
from tests.support.synthetic_runs import good_groups, group_of, healthy, make_run, make_search, rollout

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser test")
expect = playwright.expect
PATIENCE = 60_000
"""Milliseconds: how busy the machine is must not decide a test."""
expect.set_options(timeout=PATIENCE)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here: the page is not tested"),
]

ATTACK = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script></script><b>bold</b>"
VIEWS = ("curves", "rewards", "groups", "tokens", "alarms")
SIZES = {"1280 light": (1280, "light"), "1280 dark": (1280, "dark"), "390 light": (390, "light")}
SIZES["390 dark"] = (390, "dark")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run that learns and one that fails in every way, full of markup."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "hostile", steps=4, groups=hostile_groups, metrics=hostile_metrics)
    make_run(folder / "learns", steps=30)
    return folder


def hostile_groups(step: int) -> list[Group]:
    first, second = good_groups(step)
    wrong = rollout(f"mask {ATTACK}", prompt=f"p {ATTACK}", rewards={ATTACK: 1.0})
    # Without an advantage, for the trainer's own records refuse such a mask.
    wrong = replace(wrong, trained=(False, False, *(True,) * (len(wrong.tokens) - 2)), advantage=0.0)
    failed = rollout("lost", member=1, prompt=f"p {ATTACK}", error=f"raised {ATTACK}", rewards={})
    return [group_of([wrong, failed], question=ATTACK), first, second]


def hostile_metrics(step: int) -> dict[str, float]:
    return {**healthy(step), f"reward/{ATTACK}/mean": 0.5, f"other/{ATTACK}": 1.0}


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with served(runs) as address:
        yield address


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a search of two members, one of which diverged."""
    folder = tmp_path_factory.mktemp("searches")
    make_search(folder / "search")
    return folder


@pytest.fixture(scope="module")
def search_address(search: Path) -> Iterator[str]:
    with served(search) as address:
        yield address


@contextmanager
def served(runs: Path) -> Iterator[str]:
    import uvicorn

    from groupwise.report.watch_server import application

    listening = listen("127.0.0.1", 0)
    settings = uvicorn.Config(application(RunIndex.of([runs])), lifespan="off", log_level="error")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
        listening.close()


class Visit:
    """A page and everything that went wrong on it."""

    def __init__(self, browser: Any, *, width: int = 1280, theme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: said.type == "error" and self.wrong.append(said.text))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, address: str) -> Any:
        self.page.goto(address)
        self.page.wait_for_selector(".view")
        return self.page


@pytest.fixture
def visit(browser: Any, request: pytest.FixtureRequest) -> Iterator[Visit]:
    width, theme = getattr(request, "param", (1280, "light"))
    visit = Visit(browser, width=width, theme=theme)
    yield visit
    visit.context.close()
    assert visit.wrong == []


CONTRAST = """
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (css) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const light = (c) => {
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = c.slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) {
      layers.push(rgba(getComputedStyle(one).backgroundColor));
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const poor = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !element.checkVisibility({ opacityProperty: true })) continue;
    if (element.closest(":disabled, .sign, noscript, script, style, .skip")) continue;
    const back = behind(element);
    const [a, b] = [light(over(rgba(getComputedStyle(element).color), back)), light(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const words = element.textContent.slice(0, 40);
    if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${element.className}: ${words}`);
  }
  return poor;
}
"""

NAMELESS = """
() => [...document.querySelectorAll("a, button, input, select, summary, [role=img]")]
  .filter((one) => one.checkVisibility())
  .filter((one) => !(one.textContent.trim() || one.getAttribute("aria-label") || one.labels?.length))
  .map((one) => one.outerHTML.slice(0, 80))
"""


@pytest.fixture(scope="module")
def visits(browser: Any, address: str) -> Iterator[dict[tuple[str, str], Visit]]:
    """Pages by size and run: opened once, as a reader does who goes from view to view."""
    visits: dict[tuple[str, str], Visit] = {}
    yield visits
    for visit in visits.values():
        visit.context.close()


@pytest.mark.parametrize("run", ["learns", "hostile"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_whole_legible_and_named_at_every_size(
    browser: Any, address: str, visits: dict[tuple[str, str], Visit], view: str, size: str, run: str
) -> None:
    if (size, run) in visits:
        visit = visits[size, run]
        visit.page.evaluate("hash => { location.hash = hash }", f"{view}?run={run}")
    else:
        width, theme = SIZES[size]
        visit = visits[size, run] = Visit(browser, width=width, theme=theme)
        visit.open(f"{address}#{view}?run={run}")
    page = visit.page
    page.wait_for_selector(f".view.{view}")
    page.wait_for_timeout(150)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main b:text-is('bold')").count() == 0
    assert all(url.startswith((address, "data:", "blob:")) for url in visit.asked)
    assert visit.wrong == []


# Curves


def test_curves_show_values_intervals_and_the_whole_in_words(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#curves?run=learns")
    held_out = page.locator("figure", has_text="Held-out accuracy")
    assert "avg@4: from 20.0 % at step 0 to 80.0 % at step 30" in held_out.locator(
        "[role=img]"
    ).get_attribute("aria-label")
    assert "80.0 % [70.0 %, 90.0 %]" in " ".join(held_out.locator(".legend").inner_text().split())
    page.locator("figure", has_text="Time per step").scroll_into_view_if_needed()
    titles = page.locator("figcaption .title").all_inner_texts()
    for title in ("Reward", "Reward by part", "Entropy", "Groups without signal", "Length", "Time per step"):
        assert title in titles


def test_pointing_at_a_curve_tells_that_step_in_every_chart(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#curves?run=learns")
    box = page.locator("figure", has_text="Reward by part").locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    told = page.locator("figure", has_text="Groups without signal").locator(".legend .at")
    expect(told).to_have_text(re.compile("^step 1[56]$"))


def test_a_line_is_hidden_and_shown_by_its_entry_in_the_legend(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#curves?run=learns")
    held_out = page.locator("figure", has_text="Held-out accuracy")
    before = held_out.locator("canvas").screenshot()
    entry = held_out.locator(".legend button").first
    entry.click()
    expect(entry).to_have_attribute("aria-pressed", "false")
    assert held_out.locator("canvas").screenshot() != before
    entry.click()
    expect(entry).to_have_attribute("aria-pressed", "true")


def test_every_chart_is_drawn_for_paper(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#curves?run=learns")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".card canvas").count() == page.locator(".card").count()


def test_smoothing_and_log_scale_redraw_without_complaint(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#curves?run=learns")
    before = page.locator("canvas").first.screenshot()
    page.locator("#smoothing").fill("0.9")
    page.locator("#log").check()
    page.wait_for_timeout(200)
    assert page.locator("canvas").first.screenshot() != before


def test_a_curve_downloads_as_csv_and_as_png(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#curves?run=learns")
    with page.expect_download() as found:
        page.get_by_role("button", name="Held-out accuracy as CSV").click()
    table = found.value.path().read_text().splitlines()
    assert table[0].startswith('step,"greedy","greedy low","greedy high","avg@4"')
    assert table[1].startswith("0,0.2,0.1,0.30")
    with page.expect_download() as found:
        page.get_by_role("button", name="Reward by part as PNG").click()
    assert found.value.suggested_filename == "reward-by-part.png"
    assert found.value.path().read_bytes().startswith(b"\x89PNG")


def test_every_other_metric_can_be_unfolded(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#curves?run=hostile")
    page.get_by_text("All other metrics").click()
    expect(page.locator(".more figcaption .title", has_text=f"other/{ATTACK}")).to_have_count(1)


@pytest.mark.parametrize("visit", SIZES.values(), ids=SIZES, indirect=True)
def test_nothing_moves_when_curves_are_drawn(visit: Visit, address: str) -> None:
    # The page draws all curves after a second: stop its timers, so that a busy machine is not too late.
    visit.page.clock.install(time=0)
    visit.page.clock.pause_at(1)
    page = visit.open(f"{address}#curves?run=learns")
    heights = "[...document.querySelectorAll('.card')].map((card) => card.offsetHeight)"
    before = page.evaluate(heights)
    assert page.locator(".card canvas").count() < len(before), "some are drawn only when they are reached"
    for card in page.locator(".card").all():
        card.scroll_into_view_if_needed()
        expect(card.locator("canvas")).to_have_count(1)
    assert page.evaluate(heights) == before


def test_settings_can_be_unfolded(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#curves?run=learns")
    page.get_by_text("Settings", exact=True).click()
    expect(page.locator(".settings")).to_contain_text("max_steps: 30")


def test_runs_are_drawn_side_by_side(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#curves?run=learns")
    page.locator(".picker summary").click()
    page.get_by_label("compare with hostile").check()
    page.wait_for_selector(".short h2")
    assert page.locator(".short h2").all_inner_texts() == ["learns", "hostile"]
    legend = page.locator("figure", has_text="Groups without signal").locator(".legend")
    assert "learns" in legend.inner_text()
    assert "hostile" in legend.inner_text()
    assert "with=hostile" in page.url


def test_the_page_follows_a_run_that_trains(visit: Visit, address: str, runs: Path) -> None:
    run = make_run(runs / "live", steps=2)
    try:
        page = visit.open(f"{address}#curves?run=live")
        assert "step 2" in page.locator(".state").inner_text()
        MetricsFile(run.metrics).append(3, {**healthy(3), "reward/mean": 1.987})
        expect(page.locator(".state")).to_contain_text("step 3 of 2")
        expect(page.locator(".figures")).to_contain_text("1.987")
    finally:
        shutil.rmtree(run.path)
        time.sleep(1.2)  # the server forgets it before the next test lists runs


def test_what_is_unfolded_stays_so_when_other_runs_come_and_go(
    visit: Visit, address: str, runs: Path
) -> None:
    page = visit.open(f"{address}#curves?run=hostile")
    page.get_by_text("All other metrics").click()
    expect(page.locator("details.more[open] .card").first).to_be_visible()
    run = make_run(runs / "newcomer", steps=2)
    offered = page.locator(".picker .menu-name", has_text="newcomer")
    try:
        expect(offered).to_have_count(1)
    finally:
        shutil.rmtree(run.path)
    expect(offered).to_have_count(0)
    expect(page.locator("details.more[open] .card").first).to_be_visible()


# Rewards


def test_rewards_lead_from_a_step_to_a_group(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#rewards?run=learns&step=7")
    page.wait_for_selector(".strips li")
    assert page.locator("h2", has_text="Step 7, group by group").count() == 1
    assert "1 × 2.00, 2 × 1.00" in page.locator(".strips a").first.get_attribute("aria-label")
    page.keyboard.press("]")
    page.wait_for_selector("h2:text('Step 8, group by group')")
    page.locator(".strips a").first.click()
    page.wait_for_selector("h2:text('Step 8, group 0')")


# Groups


def test_a_group_shows_its_answers_best_first_with_their_rewards(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#groups?run=learns&step=5&group=1")
    page.wait_for_selector(".member")
    assert page.locator(".member .advantage").all_inner_texts() == ["A +1.20", "A −0.600", "A −0.600"]
    first = page.locator(".member").first
    assert "correct 1.00" in first.inner_text()
    assert "finished" in first.inner_text()
    assert page.locator(".message pre").inner_text() == "5 + 1?"


@pytest.mark.parametrize("visit", [SIZES["1280 light"], SIZES["390 dark"]], indirect=True)
def test_a_search_shows_its_members_and_their_groups(visit: Visit, search_address: str) -> None:
    page = visit.open(f"{search_address}#curves?run=search")
    rows = page.locator(".population tbody tr")
    expect(rows).to_have_count(2)
    best = " ".join(rows.nth(1).inner_text().split())
    assert best == "1 best 1 0 2.0e-4 62.5 % [50.0 %, 75.0 %] changed after step 2: lr 0.0001 → 0.0002"
    assert "diverged: the weights contain NaN or inf" in rows.nth(0).inner_text()
    titles = page.locator("figcaption .title").all_inner_texts()
    assert "Reward of each member" in titles
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.evaluate(CONTRAST) == []
    page = visit.open(f"{search_address}#groups?run=search&step=2")
    expect(page.locator(".list button")).to_have_count(4)
    expect(page.locator("h2")).to_contain_text("Step 2, group 0 member 0")
    page.get_by_label("population member").select_option("1")
    expect(page.locator(".list button")).to_have_count(2)
    expect(page.locator("h2")).to_contain_text("Step 2, group 2 member 1")
    assert page.evaluate(CONTRAST) == []
    page.locator(".member a", has_text="tokens").first.click()
    page.wait_for_selector(".view.tokens")


def test_the_report_of_a_search_has_its_members(visit: Visit, search: Path) -> None:
    report = write_report(RunReader(RunFolder(search / "search")), state="finished")
    page = visit.open(report.as_uri())
    expect(page.locator(".population tbody tr")).to_have_count(2)


def test_text_of_models_is_shown_as_text(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#groups?run=hostile&step=2&group=0")
    page.wait_for_selector(".member")
    assert ATTACK in page.locator(".message pre").first.inner_text()
    assert ATTACK in page.locator(".member .answer").first.inner_text()
    assert f"raised {ATTACK}" in page.locator(".member .error").inner_text()
    page.locator(".example summary").click()
    assert ATTACK in page.locator(".example pre").inner_text()
    assert page.evaluate("window.hacked") is None


def test_keys_move_through_groups_and_steps(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#groups?run=learns&step=5&group=0")
    for key, title in (("j", "Step 5, group 1"), ("k", "Step 5, group 0"), ("]", "Step 6, group 0")):
        page.keyboard.press(key)
        page.wait_for_selector(f"h2:text-is('{title}')")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "words"
    page.keyboard.press("Escape")
    page.keyboard.press("5")
    page.wait_for_selector(".view.alarms")
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1


def test_search_finds_answers_anywhere_in_the_run(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#groups?run=learns")
    page.locator("#words").fill("answer 32")
    hits = page.locator(".hits li")
    expect(hits).to_have_count(3)  # 30 + 0 + 2, 30 + 1 + 1 and 29 + 1 + 2
    expect(hits.last).to_contain_text("step 29 · group 1")
    hits.last.locator("button").click()
    expect(page.locator(".group h2")).to_have_text("Step 29, group 1")
    page.locator(".search summary").click()
    page.get_by_label("reward from").fill("1.5")
    expect(hits).to_have_count(0)
    page.locator("#words").fill("")
    expect(hits.first).to_contain_text("step 30")
    page.get_by_label("reward from").fill("")
    expect(page.locator(".hits")).to_have_count(0)


def test_every_answer_that_was_found_can_be_reached(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#groups?run=learns")
    page.locator("#words").fill("answer")
    told, hits = page.get_by_role("status").filter(has_text="found"), page.locator(".hits li")
    further = page.get_by_role("button", name="Search older steps")
    expect(told).to_have_text("50 answers found, more in step 22")
    for count in (100, 150):
        further.click()
        expect(hits).to_have_count(count)
    further.click()
    expect(told).to_have_text("180 answers found in the whole run")
    expect(hits).to_have_count(180)
    expect(further).to_have_count(0)


# Tokens


def test_tokens_are_coloured_by_what_is_chosen_and_tell_their_numbers(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#tokens?run=learns&step=5&group=0&member=0")
    page.wait_for_selector(".token")
    assert page.locator(".flow .token.prompt").count() == 3
    token = page.locator(".flow .token.sampled").first
    colours = set()
    for name in ("Advantage", "Log-prob", "Ratio", "Entropy", "Mask"):
        page.get_by_text(name, exact=True).click()
        colours.add(token.evaluate("element => getComputedStyle(element).backgroundColor"))
    assert len(colours) >= 4
    token.hover()
    told = " ".join(page.locator(".info").inner_text().split())
    for number in (
        "log-prob -0.500",
        "probability 60.7 %",
        "entropy 0.700",
        "ratio 1.105",
        "advantage +1.20",
    ):
        assert number in told
    token.focus()
    page.keyboard.press("ArrowRight")
    assert "token 5 of 12" in " ".join(page.locator(".info").inner_text().split())


def test_a_mask_fault_is_marked_where_it_is(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#tokens?run=hostile&step=2&group=0&member=0&by=mask")
    page.wait_for_selector(".token.fault")
    assert page.locator(".token.fault").count() == 1
    assert "the mask is wrong" in page.locator("[role=alert]").inner_text()


# Alarms


def test_alarms_say_what_was_seen_and_lead_there(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#alarms?run=hostile")
    assert page.locator(".alarm h3").all_inner_texts()[0].startswith("▲")
    assert "The loss mask does not match the sampled tokens" in page.locator(".alarm").inner_text()
    page.wait_for_selector("nav .badge")
    page.locator(".alarm a").click()
    page.wait_for_selector("h2:text('Step 4, group 0')")
    page = visit.open(f"{address}#alarms?run=learns")
    page.wait_for_selector(".verdict:text('No alarms in 30 steps.')")


# The report


@pytest.fixture(scope="module")
def report(runs: Path) -> Path:
    run = RunReader(RunIndex.of([runs]).runs["hostile"].folder)
    return write_report(run, state="finished")


def test_names_and_settings_full_of_markup_are_text_on_the_live_page(
    visit: Visit, address: str, runs: Path
) -> None:
    name = "<img src=x onerror=window.hacked=1>"
    run = make_run(runs / name, steps=2, groups=hostile_groups, metrics=hostile_metrics)
    run.config.write_text(run.config.read_text() + f"# {ATTACK}\n")
    try:
        for view in VIEWS:
            page = visit.open(f"{address}#{view}?run={quote(name)}")
            expect(page.locator("#header")).to_contain_text(name)
            assert page.locator("main img, header img").count() == 0
        page = visit.open(f"{address}#curves?run={quote(name)}")
        page.get_by_text("Settings", exact=True).click()
        expect(page.locator(".settings")).to_contain_text(ATTACK)
        page = visit.open(f"{address}#groups?run={quote(name)}")
        page.locator("#words").fill("mask")
        expect(page.locator(".hits")).to_contain_text("<img src=x")
        assert page.evaluate("window.hacked") is None
    finally:
        shutil.rmtree(run.path)
        time.sleep(1.2)  # the server forgets it before the next test lists runs


@pytest.mark.parametrize("view", VIEWS)
def test_the_report_shows_every_view_alone_and_offline(visit: Visit, report: Path, view: str) -> None:
    visit.context.set_offline(True)
    page = visit.open(f"{report.as_uri()}#{view}")
    page.wait_for_timeout(150)
    marks = {
        "curves": "figure canvas",
        "rewards": ".strips li",
        "groups": ".member",
        "tokens": ".token",
        "alarms": ".alarm",
    }
    page.wait_for_selector(marks[view])
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img").count() == 0
    assert all(url.startswith(("file:", "data:", "blob:")) for url in visit.asked)


def test_the_theme_can_be_chosen_and_stays(visit: Visit, address: str) -> None:
    page = visit.open(address)
    page.keyboard.press("t")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    page.wait_for_selector(".view")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_discrete_rewards_are_bars_whose_parts_can_be_hidden(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#rewards?run=learns")
    page.wait_for_selector(".card canvas")
    labels = page.locator(".legend .entry")
    assert labels.all_inner_texts() == ["reward 1.00\n66.7 %", "reward 2.00\n33.3 %"]
    assert "Each bar is a step" in page.inner_text(".note")
    blue = "c => c.getContext('2d').getImageData(c.width / 2, c.height * 0.7, 1, 1).data.slice(0, 3).join()"
    before = page.eval_on_selector(".card canvas", blue)
    labels.first.click()
    assert page.eval_on_selector(".card canvas", blue) != before


def test_the_held_out_reward_has_a_figure_and_a_chart(
    visit: Visit, address: str, runs: Path, tmp_path: Path
) -> None:
    stored = runs / "learns" / "eval" / "after.json"
    record = json.loads(stored.read_text())
    reward = {"eval/reward": 1.5, "eval/reward_low": 1.25, "eval/reward_high": 1.75}
    stored.write_text(json.dumps({**record, **reward}))
    try:
        page = visit.open(f"{address}#curves?run=learns")
        figure = page.locator(".figure", has_text="held-out reward")
        assert "1.500" in figure.inner_text()
        assert "95 % interval 1.250 – 1.750" in figure.inner_text()
        assert page.locator(".card .title", has_text="Held-out reward").count() == 1
    finally:
        stored.write_text(json.dumps(record))


def test_every_chart_is_drawn_without_scrolling(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#curves?run=learns")
    cards = page.locator(".card").count()
    page.wait_for_selector(f":nth-match(.card canvas, {cards})")


@pytest.mark.parametrize("visit", [(390, "light")], indirect=True)
def test_a_phone_shows_the_curve_first_and_says_tap(visit: Visit, address: str) -> None:
    page = visit.open(f"{address}#curves?run=learns")
    page.wait_for_selector(".card")
    chart, figures = (page.locator(one).first.bounding_box() for one in (".card", ".figures"))
    assert chart["y"] + chart["height"] < figures["y"]
    assert page.locator(".touch").is_visible()
    assert "tap" in page.inner_text(".touch")
