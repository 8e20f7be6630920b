"""The sweep's page in a headless browser: at every width, by day and night, on paper, by pointer and by keyboard."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from edge_client.sweeping.report import render
from shared_hooks.metrics.records import Reading
from tests.edge_client.sweeping import synthetic

CNN = "backbone.encoder.stages.{}.layers.1.a_rather_long_name.convolution#12"
BLOCKS = "encoder.layers.{}.attention.output.projection"
HOSTILE = "<img src=x onerror=window.hacked=1>.{}</script><script>window.hacked=1</script>"
LONG = "backbone.encoder.a_rather_long_name_for_a_block.layers.3.attention"


def page(count: int = 6, **known: Any) -> str:
    return render(synthetic.known(count, **known))


def of_blocks(blocks: int, each: int) -> dict[str, Any]:
    """A sweep of as many cuts, in blocks that their names tell."""

    def named(found: re.Match[str]) -> str:
        return f"encoder.layer.{int(found[1]) // each}.part_{int(found[1]) % each}"

    known = synthetic.known(blocks * each, repetitions=1, inputs=["a.png"])
    renamed: dict[str, Any] = json.loads(re.sub(r"features\.(\d+)\.conv", named, json.dumps(known)))
    return renamed


def test_every_chart_is_drawn(opened: Any) -> None:
    shown = opened(page(7, energy=Reading.estimated(0.002, "a share")))
    ways = 7 + 3
    assert shown.count("#stages .row") == ways == shown.count("#stages .mark")
    assert shown.count("#stages .row .piece") > 3 * ways
    assert shown.count("#agreement .point") == ways
    assert shown.count("#bytes .column") == ways == shown.count("#energy .column")
    assert shown.count("#pareto svg") == 2 and shown.count("#figure-front-bytes .point") == ways
    assert shown.count("#layers .row") == 7 + 1  # and outside layers
    assert shown.count("#local .column") == 7 and shown.count("#local .reference") == 1


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_clipped_at_any_width_and_all_can_be_read(opened: Any, dark: bool) -> None:
    known = synthetic.known(36, name=CNN, inputs=["a_long_file_name_" * 8 + ".png"], repetitions=1, observers=LONG)
    shown = opened(render(known), 1400, dark)
    for width in (1400, 768, 360):
        shown.page.set_viewport_size({"width": width, "height": 844})
        shown.until(
            "[...document.querySelectorAll('.chart')].every((one) => !one.clientWidth ||"
            " [...one.children].every((svg) => Math.abs(svg.clientWidth - one.clientWidth) < 2))"
        )
        assert shown.overflowing() == []
        assert shown.low_contrast() == []
        assert shown.count("#stages .row") == 39  # all of them, without a place of its own to scroll


def test_it_prints_on_a4(opened: Any) -> None:
    known = synthetic.known(40, name=BLOCKS, repetitions=1, inputs=["a.png"], observers=LONG)
    shown = opened(render(known), 1400)
    shown.page.set_viewport_size({"width": 703, "height": 1032})  # 210 mm less two margins of 12, at 96 to the inch
    shown.page.emulate_media(media="print", color_scheme="light")
    shown.until("document.querySelector('#stages svg').clientWidth === 700")
    assert shown.overflowing() == []
    heights = [one.bounding_box()["height"] for one in shown.page.locator("svg").all()]
    assert len(heights) > 8 and max(heights) < 900  # none is cut by the end of a page
    assert shown.count("#stages .row") == 43 and shown.count("details:not([open]):not(.behind)") == 0
    shown.page.emulate_media(media="screen")
    shown.page.set_viewport_size({"width": 1400, "height": 844})
    shown.until("document.querySelectorAll('#stages svg').length === 1")
    # and a real print: all pages are A4
    paper = shown.page.pdf(prefer_css_page_size=True)
    assert paper.startswith(b"%PDF") and set(media_boxes(paper)) <= {(595, 842), (594, 841), (595, 841), (596, 842)}


def media_boxes(pdf: bytes) -> list[tuple[int, int]]:
    found = re.findall(rb"/MediaBox\s*\[\s*0 0 ([\d.]+) ([\d.]+)\s*\]", pdf)
    assert found
    return [(int(float(width)), int(float(height))) for width, height in found]


def test_bars_are_folded_by_block_with_a_choice(opened: Any) -> None:
    shown = opened(render(of_blocks(12, 5)))
    rows = shown.page.locator("#stages .row")
    assert rows.count() == 3 + 12
    first = shown.page.locator("#stages .row[role=button]").first
    assert "encoder.layer.0, 5 cuts" in first.get_attribute("aria-label")
    first.focus()
    shown.page.keyboard.press("Enter")
    assert rows.count() == 3 + 12 + 5 and first.get_attribute("aria-expanded") == "true"
    shown.page.keyboard.press("Space")
    assert rows.count() == 3 + 12
    shown.page.locator("#stages").get_by_role("button", name="every cut (60)").click()
    assert rows.count() == 63 and shown.count("#bytes .column") == 63
    shown.page.locator("#layers").get_by_role("button", name="every layer (60)").click()
    assert shown.count("#layers .row") == 61


def test_the_axis_measures_the_bars(opened: Any) -> None:
    known = synthetic.known(5)
    shown = opened(render(known))
    axis = shown.page.evaluate(
        "[...document.querySelectorAll('#stages text')].filter((one) => /^[\\d.]+ (µs|ms)$/.test(one.textContent) &&"
        " !one.matches('.value')).map((one) => [one.textContent, one.getBBox().x + one.getBBox().width / 2])"
    )
    (zero, left), (text, right) = [one for one in axis if one[0].split()[1] in ("ms", "µs")][:2]
    assert float(zero.split()[0]) == 0
    per_ms = (right - left) / float(text.split()[0])
    ends = shown.page.evaluate(
        "[...document.querySelectorAll('#stages .row')].map((row) => {"
        " const boxes = [...row.querySelectorAll('.piece')].map((one) => one.getBBox());"
        " return Math.max(...boxes.map((box) => box.x + box.width)) - Math.min(...boxes.map((box) => box.x)) })"
    )
    wanted = [way["latency_ns"] / 1e6 for way in known["ways"] if way["mode"] == "networked" or way["layer_id"] is None]
    assert [end / per_ms for end in ends] == pytest.approx(wanted, rel=0.03)


def test_each_chart_is_saved_by_a_click_and_by_the_keyboard(opened: Any, tmp_path: Path) -> None:
    known = synthetic.known(5, observers=LONG, energy=Reading.estimated(0.1, "a share"))
    shown = opened(render(known), dark=True)
    buttons = shown.page.locator("[data-save]")
    assert buttons.count() == 2 * 10
    names = []
    for number, button in enumerate(buttons.all()):
        if not button.is_visible():  # of an input that is folded
            continue
        if number % 8 == 7:
            shown.page.wait_for_timeout(1200)  # of a burst within a second Chromium lets ten pass
        with shown.page.expect_download() as download:
            if number % 3:
                button.click()
            else:
                button.focus()
                shown.page.keyboard.press("Enter")
        file = tmp_path / download.value.suggested_filename
        download.value.save_as(file)
        names.append(file.name)
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".svg":
            tree = ElementTree.fromstring(text)
            assert tree.tag == "{http://www.w3.org/2000/svg}svg" and float(tree.attrib["width"]) > 500
            assert "var(--" not in text and "#ffffff" in text and "<title>" in text  # complete, and by day
        else:
            rows = list(csv.reader(text.splitlines()))
            assert len(rows) > 5 and {len(row) for row in rows} == {len(rows[0])}
    assert "toy-stages.svg" in names and "toy-attention-1.csv" in names and len(set(names)) == len(names) == 18
    saved = list(csv.DictReader((tmp_path / "toy-stages.csv").read_text().splitlines()))
    drawn = {way["name"]: way for way in known["ways"] if way["mode"] == "networked" or way["name"] == "edge-only"}
    assert {row["way"]: float(row["latency_ns"]) for row in saved} == {
        name: way["latency_ns"] for name, way in drawn.items()
    }


def test_a_spreadsheet_runs_no_name(opened: Any) -> None:
    shown = opened(page(2, name='=HYPERLINK("x,{}")'))
    with shown.page.expect_download() as download:
        shown.page.locator("#stages [data-save=csv]").click()
    text = Path(download.value.path()).read_text()
    assert '''"'=HYPERLINK(""x,0"")"''' in text and "\n=" not in text


def test_the_keyboard_reaches_everything(opened: Any) -> None:
    shown = opened(page(5))
    shown.page.keyboard.press("Tab")
    assert shown.page.evaluate("document.activeElement.textContent") == "Skip to the results"
    shown.page.keyboard.press("Enter")
    assert shown.page.evaluate("document.activeElement.id") == "main"
    reached = []
    for _ in range(60):
        shown.page.keyboard.press("Tab")
        where = shown.page.evaluate("(document.activeElement.closest('section') || {}).id || ''")
        kind = shown.page.evaluate(
            "document.activeElement.closest('.chart') ? 'chart' : document.activeElement.tagName"
        )
        if shown.page.evaluate("document.activeElement === document.body"):
            break
        reached.append((where, kind))
    for section in ("stages", "agreement", "bytes", "pareto", "layers", "local"):
        assert [kind for where, kind in reached if where == section and kind == "chart"] == ["chart"]
        assert [kind for where, kind in reached if where == section].count("BUTTON") >= 2
    order = list(dict.fromkeys(where for where, _ in reached))
    assert order == [
        one for one in shown.page.evaluate("[...document.querySelectorAll('section')].map((s) => s.id)") if one in order
    ]
    mark = shown.page.locator("#stages .row").first
    mark.focus()
    shown.page.keyboard.press("ArrowDown")
    tip = shown.page.locator("#tip")
    # the first mark's was there already, by the focus
    shown.page.locator("#tip", has_text="cloud-only").wait_for(state="visible")
    shown.page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_a_screen_reader_has_names_and_tables(opened: Any) -> None:
    shown = opened(page(5, observers=LONG))
    unnamed = shown.page.evaluate(
        "[...document.querySelectorAll('section, nav, button, [role=group], [role=img], [role=button]')]"
        ".filter((one) =>"
        " !(one.getAttribute('aria-label') || one.getAttribute('aria-labelledby') || one.textContent.trim()))"
        ".map((one) => one.outerHTML.slice(0, 80))"
    )
    assert unnamed == []
    label = shown.page.locator("#stages .row").nth(3).get_attribute("aria-label")
    assert label.startswith("after layer 0: features.0.conv. latency: ") and "upload: " in label
    shown.page.locator("#bytes summary").click()
    table = shown.page.locator("#bytes table")
    table.wait_for(state="visible")
    assert table.locator("tbody tr").count() == 8 and table.locator("th[scope=col]").count() == 4
    assert (
        shown.count("main") == 1 == shown.count("h1") and shown.page.evaluate("document.documentElement.lang") == "en"
    )


def test_hovering_shows_the_numbers(opened: Any) -> None:
    shown = opened(page(5))
    tip = shown.page.locator("#tip")
    assert not tip.is_visible()
    shown.page.locator("#stages .row").nth(3).hover()
    assert tip.is_visible() and "after layer 0: features.0.conv" in tip.inner_text()
    for word in ("latency", "predicted", "tail on the cloud", "up, down", "exact"):
        assert word in tip.inner_text()
    for chart in ("#agreement .hit", "#bytes .hit", "#layers .row", "#local .hit"):
        one = shown.page.locator(chart).nth(1)
        one.scroll_into_view_if_needed()
        shown.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        one.hover(force=True)  # a neighbour's dot may lie on it: then that one tells
        tip.wait_for(state="visible")
        box = tip.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 1280


def test_the_order_can_be_changed(opened: Any) -> None:
    shown = opened(page(5))

    def values() -> list[str]:
        return [str(text) for text in shown.page.locator("#stages .row .label").all_text_contents()]

    before = values()
    shown.page.get_by_role("button", name="fastest first").click()
    assert sorted(values()) == sorted(before) and values() != before
    assert "best" in shown.page.locator("#stages .row").first.get_attribute("class")


def test_hostile_names_run_nothing(opened: Any) -> None:
    hostile = {"name": HOSTILE, "model": HOSTILE, "inputs": [HOSTILE], "observers": HOSTILE}
    shown = opened(page(3, **hostile, energy=Reading.estimated(1.0, HOSTILE), failing="cloud-only", error=HOSTILE))
    shown.page.locator("#stages .row").nth(2).hover()
    assert "<img src=x" in shown.page.locator("#tip").inner_text()
    assert shown.page.evaluate("window.hacked") is None and shown.count("img") == 0 and shown.count("script") == 2


def test_attention_is_large_with_a_scale_over_the_input_and_side_by_side(opened: Any) -> None:
    shown = opened(page(3, observers=LONG, inputs=["a.png", "b" * 200 + ".png"]))
    maps = shown.page.locator("#figure-attention-0 .map")
    assert maps.count() == 2  # those of the places of a picture, one on either side
    assert shown.count("#figure-attention-0 .map image") == 2 * 3  # the input, the map over it, the scale
    texts = shown.page.locator("#figure-attention-0 text").all_text_contents()
    assert "7 by 7 places of the picture" in texts and "0.13" in texts and "0.031" in texts
    boxes = [one.bounding_box() for one in shown.page.locator("#figure-attention-0 .cells").all()]
    assert all(box["width"] >= 400 and abs(box["width"] - box["height"]) < 1 for box in boxes)
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    shown.page.locator("#figure-attention-0").get_by_role("button", name="queries by keys").click()
    assert maps.count() == 2 and "3 queries down, 3 keys across" in maps.first.text_content()
    layers = shown.page.locator("#figure-attention-0 [aria-label='layers beside each other'] button")
    layers.nth(0).click()
    assert maps.count() == 1 and layers.nth(0).get_attribute("aria-pressed") == "false"
    for number in (0, 1, 3):
        layers.nth(number).click()
    assert maps.count() == 4 and layers.count() == 4
    assert "2 pictures were left out" in shown.page.locator("#observed").inner_text()


def test_missing_data_is_stated(opened: Any) -> None:
    shown = opened(page(2, predicted=False))
    assert "no prediction" in shown.page.locator("#figure-agreement").inner_text()
    assert "no energy was measured" in shown.page.locator("#figure-energy").inner_text()
    assert shown.count("#pareto svg") == 1 and shown.count("#stages .mark") == 0
