"""What a measurement writes: compact JSON, and pictures."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from vlcache_jax.study import report


def test_json_has_a_line_for_each_key_and_row(tmp_path):
    out = tmp_path / "out.json"
    head = {
        "versions": {"jax": "1"},
        "cases": {"a": {"ms": 0.5}, "b": {"ms": 2.25}},
        "none": [],
        "no number": None,
    }
    report.write("A table", [{"name": "x", "s": 1e-7}, {"name": "y", "s": 0.0}], head, out)
    assert out.read_text(encoding="utf-8").splitlines() == [
        "{", '"title": "A table",', '"versions": {"jax":"1"},', '"cases": {', '"a": {"ms":0.5},',
        '"b": {"ms":2.25}', "},", '"none": [],', '"no number": null,', '"rows": [',
        '{"name":"x","s":1e-07},', '{"name":"y","s":0.0}', "]", "}",
    ]  # fmt: skip
    assert json.loads(out.read_text(encoding="utf-8"))["cases"]["b"] == {"ms": 2.25}


@pytest.mark.parametrize("dpi", [50, 110])
def test_pictures_have_a_palette_and_the_resolution_asked_for(tmp_path, dpi):
    pyplot = report.figures()
    figure, axes = pyplot.subplots(figsize=(4, 3))
    axes.imshow([[0, 1], [2, 3]])
    report.save_figure(figure, tmp_path / "a.png", dpi=dpi)
    assert not pyplot.fignum_exists(figure.number)
    with Image.open(tmp_path / "a.png") as image:
        assert (image.mode, image.size) == ("P", (4 * dpi, 3 * dpi))
        assert image.info["dpi"] == pytest.approx((dpi, dpi), abs=0.1)
        assert image.convert("RGB").getpixel((2, 2)) == (255, 255, 255)


def test_a_picture_of_another_kind_is_written_as_it_is(tmp_path):
    figure, _ = report.figures().subplots()
    report.save_figure(figure, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text(encoding="utf-8")
