"""The page in a browser, as a person has it: opened, looked at, hovered over, zoomed, on a phone, and live."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import CHROMIUM, DRAWN, Browser
from made_runs import continue_run, make_run, opened

from trainer.health.dashboard.page import page, payload
from trainer.health.dashboard.read import Run
from trainer.health.dashboard.serve import Server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests: it takes a second to start."""
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, long_run: Run) -> Path:
    """one.html, of a run of 4,000 steps; two.html, with a run in BF16 and an awkward name before it; short.html, of a
    run of 40."""
    folder = tmp_path_factory.mktemp("pages")
    other = opened(make_run(folder / "<b onclick=alert(1)>&lt;", steps=1000, recipe="bf16", seed=2))
    short = opened(make_run(folder / "short", steps=40))
    (folder / "short.html").write_text(page(payload([short])))
    (folder / "one.html").write_text(page(payload([long_run])))
    (folder / "two.html").write_text(page(payload([other, long_run])))
    return folder


PANEL = "view.panels.find((one) => one.spec.title === {!r})"


def titles(browser: Browser) -> list[str]:
    """Of the charts that can be seen."""
    heads = "[...document.querySelectorAll('section.card h3')].filter((one) => one.offsetParent)"
    return browser.run(f"{heads}.map((one) => one.firstChild.data)")


def drawn(browser: Browser, title: str) -> str:
    """JavaScript for a chart. It is waited for: the observer of what is on the screen may report after a frame."""
    panel = PANEL.format(title)
    browser.until(f"{panel}.onScreen && !view.panels.some((one) => one.onScreen && one.stale)")
    return panel


def middle(browser: Browser, title: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
    """A place in a chart, which is scrolled to and drawn."""
    pause = f"new Promise((done) => setTimeout(() => {DRAWN}, 100))"
    browser.run(f"({PANEL.format(title)}.element.scrollIntoView({{block: 'center'}}), {pause})")
    panel = drawn(browser, title)
    corner = f"{panel}.overlay.getBoundingClientRect()"
    box = f"[{corner}.left + one.left, {corner}.top + one.top, one.plotWidth, one.plotHeight]"
    left, top, width, height = browser.run(f"((one) => {box})({panel})")
    return left + across * width, top + down * height


def empty(browser: Browser) -> list[str]:
    """Charts whose canvas is empty, of all that are shown."""
    script = """view.panels.filter((one) => {
        one.render();
        const { width, height } = one.canvas;
        if (!one.canvas.isConnected || (one.stage.offsetParent === null && !one.canvas.width)) return false;
        const image = one.canvas.getContext("2d").getImageData(0, 0, Math.max(width, 1), Math.max(height, 1));
        return !new Uint32Array(image.data.buffer).some(Boolean);
    }).map((one) => one.spec.title)"""
    return browser.run(script)


def test_a_run_of_thousands_of_steps_opens_about_as_fast_as_one_of_forty(
    browser: Browser, pages: Path, tmp_path: Path
) -> None:
    browser.show(1400, 900)
    url = (pages / "one.html").as_uri()
    few, many = (min(browser.open(each) for _ in range(2)) for each in ((pages / "short.html").as_uri(), url))
    assert many < 10 * few
    assert browser.problems == [] and browser.requests == [url]
    there = titles(browser)
    expected = {
        "Loss",
        "Gradient norm",
        "Scales and casts",
        "Kurtosis by block",
        "Load by expert",
        "Throughput",
        "Power",
    }
    assert expected <= set(there) and len(there) >= 30
    assert "Gap to the first run" not in there  # one run has none
    assert "unheard/of" in browser.run(
        "document.querySelector('details').textContent"
    )  # a metric that the page does not know
    assert empty(browser) == []
    assert browser.picture(tmp_path / "desktop.png", whole=True).stat().st_size > 100_000
    assert browser.problems == []


def test_cursor_and_zoom_of_all_charts_together(browser: Browser, pages: Path) -> None:
    browser.show(1400, 900)
    browser.open((pages / "one.html").as_uri())
    value = f"[...{drawn(browser, 'Gradient norm')}.chips.values()][0].textContent"
    at_rest = browser.run(value)
    x, y = middle(browser, "Loss")
    browser.mouse("mouseMoved", x, y)
    assert abs(browser.run("view.hover") - 2000) < 20
    assert browser.run(value) != at_rest and "step 2,0" in browser.run("document.querySelector('.range').textContent")

    browser.mouse("mousePressed", x, y)
    browser.mouse("mouseMoved", x + 50, y)
    browser.mouse("mouseMoved", x + 100, y)
    browser.mouse("mouseReleased", x + 100, y)
    low, high = browser.run("shown()")
    assert abs(low - 2000) < 20 and 2200 < high < 3000
    for count in (1, 2):
        browser.mouse("mousePressed", x, y, count)
        browser.mouse("mouseReleased", x, y, count)
    assert browser.run("view.range") is None

    # the drop of the scales of three tensors at step 2000
    x, y = middle(browser, "Scales and casts", 0.5, 41.5 / 162)
    browser.mouse("mouseMoved", x, y)
    said = browser.run("document.getElementById('tip').innerText")
    assert browser.run("view.runs[0].rows.fp8[41]") in said and "scale" in said and "amax" in said
    browser.run("view.panels.find((one) => one.spec.title === 'Scales and casts').narrow('mtp :grad')")
    browser.until("view.panels.find((one) => one.spec.title === 'Scales and casts').rows.length === 6")
    assert browser.problems == []


@pytest.mark.parametrize(("low", "high"), [(1e18, 1e18), (0.3, 0.1 + 0.2), (1e300, 1.1e300)])
def test_an_axis_ends_where_numbers_are_too_coarse_for_its_ticks(
    browser: Browser, pages: Path, low: float, high: float
) -> None:
    browser.open((pages / "short.html").as_uri())
    ticks = browser.run(f"linearTicks({low!r}, {high!r}, 8).ticks")
    assert 1 <= len(ticks) <= 16 and all(abs(tick - low) <= high - low + 1e-9 * high for tick in ticks)


def test_events_are_listed_filtered_and_marked(browser: Browser, pages: Path) -> None:
    browser.show(1400, 900)
    browser.open((pages / "one.html").as_uri())
    count = "document.querySelectorAll('#main table.list tr.go').length"
    assert browser.run(count) == 9  # without the checkpoints
    browser.run(
        "[...document.querySelectorAll('#bar .chip')].find((one) => one.textContent.includes('checkpoint')).click()"
    )
    assert browser.run(count) == 16
    box = "document.querySelector('input[type=search][aria-label=\"filter events\"]')"
    browser.run(f"({box}.value = 'scale_drop', {box}.dispatchEvent(new Event('input')))")
    assert browser.run(count) == 1
    browser.run("document.querySelector('#main tr.go').click()")
    low, high = browser.run("shown()")
    assert low < 2520 < high and high - low < 1000
    assert "<img src=x" not in browser.run("document.body.innerHTML.replace(/<script[^]*?<.script>/g, '')")
    assert browser.problems == []


def test_a_phone_in_the_dark_with_two_runs(browser: Browser, pages: Path, tmp_path: Path) -> None:
    browser.show(360, 740, dark=True, touch=True)
    browser.open((pages / "two.html").as_uri())
    assert browser.run("document.documentElement.scrollWidth") <= 360
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 24)"
    assert "Gap to the first run" in titles(browser)
    assert "<b onclick=alert(1)>&lt;" in browser.run("document.getElementById('head').innerText")
    assert empty(browser) == []
    browser.run("[...document.querySelectorAll('#bar .chip')][0].click()")  # without the first run
    assert browser.run("visibleRuns().length") == 1
    browser.picture(tmp_path / "phone.png")
    middle(browser, "Scales and casts")
    browser.run("[...document.querySelectorAll('#bar .chip')][1].click()")  # and without the second
    x, y = middle(browser, "Scales and casts")
    browser.mouse("mouseMoved", x, y)
    assert browser.problems == []


def test_a_zero_leaves_a_logarithmic_axis_to_the_other_values(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "skipped", steps=40)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[4]["optim/update_ratio"] = 0  # a skipped step has no update
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "page.html").write_text(page(payload([opened(folder)])))
    browser.open((tmp_path / "page.html").as_uri())
    panel = PANEL.format("Update ratio")
    assert browser.run(f"({panel}.render(), {panel}.isLog)") and browser.run(f"{panel}.y[0]") > 1e-3


def test_tokens_at_a_step_are_those_of_its_phases(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "phases", steps=40)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["tokens"] = 10 * line["step"] if line["step"] <= 20 else 200 + 50 * (line["step"] - 20)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = payload([opened(folder)])
    data["runs"][0]["about"]["stride"] = 2
    (tmp_path / "page.html").write_text(page(data))
    browser.open((tmp_path / "page.html").as_uri())
    foot = browser.run("document.getElementById('foot').textContent")
    assert foot.endswith("of phases one line in 2 of tensors.jsonl was read")
    for step, tokens in ((10, 100), (20, 200), (25, 450), (40, 1200)):
        shown = browser.run(f"(hover({step}), document.querySelector('.range').textContent)")
        assert shown == f"step {step} · {tokens} tokens"
    assert "tokens" not in titles(browser)


def test_a_printed_page_has_the_charts_that_are_off_the_screen(browser: Browser, pages: Path) -> None:
    browser.show(1400, 900)
    browser.open((pages / "short.html").as_uri())
    assert browser.run("view.panels.some((one) => one.stale)")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert not browser.run("view.panels.some((one) => one.stale)")
    browser._call("Emulation.setEmulatedMedia", media="print")
    overlays = browser.run("[...document.querySelectorAll('.overlay')].map((one) => getComputedStyle(one).display)")
    browser._call("Emulation.setEmulatedMedia", media="")
    assert set(overlays) == {"none"}  # a cleared canvas prints as white paper over the chart


def test_a_chart_with_a_line_at_zero_has_a_logarithmic_axis_without_it(browser: Browser, pages: Path) -> None:
    browser.show(1400, 900)
    browser.open((pages / "one.html").as_uri())
    panel = PANEL.format("Loss gap to BF16")
    ready = "const lines = one.lines(); for (const { curve } of lines) curve.low.fill(1e-3)"
    axis = "one.log = true; one.prepare(lines); one.range(lines); return one.isLog && one.y[0] > 0"
    assert browser.run(f"((one) => {{ {ready}; {axis}; }})({panel})")


def test_blocks_of_experts_keep_their_names_where_there_are_many(browser: Browser, pages: Path) -> None:
    browser.show(360, 740)
    browser.open((pages / "one.html").as_uri())
    browser.run("view.runs[0].load.tokens = Array(60).fill(view.runs[0].load.tokens[0])")
    browser.run("view.runs[0].rows.moe = view.runs[0].load.tokens.map((_, i) => `layers.${i}.moe`)")
    panel = PANEL.format("Load by expert")
    browser.run(f"{panel}.render()")
    assert browser.run(f"{panel}.left") > 60


def test_names_of_any_length_fit(browser: Browser, tmp_path: Path) -> None:
    runs = [opened(make_run(tmp_path / f"{i}-{'long' * 40}", steps=40)) for i in range(2)]
    (tmp_path / "page.html").write_text(page(payload(runs, "(recovery.max_consecutive_skips=3): " + 40 * "long")))
    for width in (360, 1280):
        browser.show(width, 740)
        browser.open((tmp_path / "page.html").as_uri())
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run(
            "(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)(document.querySelector('.runs'))"
        )
        fits = "(({ scrollHeight, clientHeight }) => scrollHeight <= clientHeight)(document.querySelector('.why'))"
        assert width > 1000 or browser.run(fits)
        outside = "one.getBoundingClientRect().right > one.closest('.card').getBoundingClientRect().right"
        assert not browser.run(f"[...document.querySelectorAll('.card select')].some((one) => {outside})")


def test_live(browser: Browser, tmp_path: Path) -> None:
    first = make_run(tmp_path / "first", steps=400, goal=1000)
    server = Server([first, tmp_path / "later"], 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        browser.show(1000, 800)
        browser.open(server.url)
        browser.run("(view.pause = 50, zoom(100, 200))")
        continue_run(first, 400, 100)
        make_run(tmp_path / "later", steps=200, recipe="bf16")
        browser.until("view.full[1] === 500 && view.runs[1].curves.size > 0")
        assert browser.run("view.range.join()") == "100,200"  # the zoom stays
        assert browser.run("view.runs[0].curves.get('loss/lm').mean.length") == 250
        assert browser.run("view.runs[0].grids.get('fp8/scale').columns.length") == 250
        assert empty(browser) == [] and "500 of 1,000" in browser.run("document.getElementById('head').innerText")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    browser.until("document.querySelector('.live.lost') !== null")
    assert not [one for one in browser.problems if "Failed to load resource" not in one], "the server is gone"
