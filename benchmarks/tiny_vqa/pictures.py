"""Images: grids of colored glyphs, one of them framed.

`python -m vlcache_jax.benchmarks.tiny_vqa.pictures --out FOLDER` writes those that ship with the package.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import pathlib

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (214, 40, 40),
    "green": (30, 150, 70),
    "blue": (40, 80, 210),
    "yellow": (245, 200, 20),
    "purple": (140, 50, 170),
    "orange": (245, 130, 20),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
BACKGROUND = (250, 250, 250)
_OVERSAMPLING = 4


@dataclasses.dataclass(frozen=True, order=True)
class Glyph:
    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


GLYPHS = tuple(Glyph(colour, shape) for colour in COLOURS for shape in SHAPES)


@dataclasses.dataclass(frozen=True)
class Size:
    """Rows and columns of an image's grid, and a cell's side in pixels (a multiple of 16, an image token's side).

    If `is_tinted`, a cell's background encodes its row and column, for encoders without position embeddings.
    """

    rows: int
    columns: int
    cell: int = 32
    is_tinted: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.columns * (self.cell // 16) ** 2


@dataclasses.dataclass(frozen=True)
class Picture:
    """Glyphs of an image by (row, column), from 0; all differ. The one at `code` is framed."""

    size: Size
    glyphs: dict[tuple[int, int], Glyph]
    code: tuple[int, int]

    @property
    def code_glyph(self) -> Glyph:
        return self.glyphs[self.code]

    def find(self, glyph: Glyph) -> tuple[int, int] | None:
        return next((place for place, other in self.glyphs.items() if other == glyph), None)

    def count(self, kind: str) -> int:
        """Return the number of glyphs of a color or a shape."""
        return sum(kind in (glyph.colour, glyph.shape) for glyph in self.glyphs.values())


def draw_pictures(rng: np.random.Generator, sizes: list[Size], *, filled: float = 0.75) -> list[Picture]:
    """Return random images that share glyphs: each shows each other's code with probability 1/2, if there is room.

    Args:
      rng: Source of random numbers.
      sizes: Sizes of the images.
      filled: Fraction of the cells that hold a glyph, on average.
    """
    order = rng.permutation(len(GLYPHS))
    codes, others = order[: len(sizes)], order[len(sizes) :]
    pictures = []
    for i, size in enumerate(sizes):
        cells = size.rows * size.columns
        count = max(1, min(rng.binomial(cells, filled), len(others)))
        shown = [codes[i]] + [code for j, code in enumerate(codes) if j != i and rng.random() < 0.5]
        shown = shown[: max(1, cells)]
        shown += list(rng.permutation(others)[: max(0, count - len(shown))])
        places = [divmod(int(cell), size.columns) for cell in rng.permutation(cells)[: len(shown)]]
        glyphs = {place: GLYPHS[glyph] for place, glyph in zip(places, shown, strict=True)}
        pictures.append(Picture(size, glyphs, places[0]))
    return pictures


def render(picture: Picture) -> np.ndarray:
    """Render the image, `[rows x cell, columns x cell, 3]` uint8."""
    size = picture.size
    cell = size.cell
    image = np.empty((size.rows * cell, size.columns * cell, 3), np.uint8)
    for row, column in itertools.product(range(size.rows), range(size.columns)):
        background = _tint(row, column) if size.is_tinted else BACKGROUND
        glyph = picture.glyphs.get((row, column))
        is_framed = (row, column) == picture.code
        image[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell] = (
            background if glyph is None else _sprite(glyph, cell, is_framed, background)
        )
    return image


def shipped_pictures() -> dict[str, Picture]:
    """Return the images of `vlcache demo`, by file name. Seed and sizes match its questions."""
    names, sizes = ("picture.png", "left.png", "right.png"), [Size(4, 4), Size(4, 4), Size(4, 5)]
    rng = np.random.default_rng(103)
    return dict(zip(names, draw_pictures(rng, sizes[:1]) + draw_pictures(rng, sizes[1:]), strict=True))


def _tint(row: int, column: int) -> tuple[int, int, int]:
    red, green, blue = BACKGROUND
    return red - 20 * row, green, blue - 20 * column


@functools.cache
def _sprite(glyph: Glyph, cell: int, framed: bool, background: tuple[int, int, int]) -> np.ndarray:
    side = cell * _OVERSAMPLING
    image = Image.new("RGB", (side, side), background)
    draw = ImageDraw.Draw(image)
    _draw_shape(draw, glyph, side)
    image = image.resize((cell, cell), Image.Resampling.BOX)
    if framed:
        ImageDraw.Draw(image).rectangle((0, 0, cell - 1, cell - 1), outline=(0, 0, 0), width=cell // 16)
    return np.asarray(image)


def _draw_shape(draw: ImageDraw.ImageDraw, glyph: Glyph, side: int) -> None:
    fill = COLOURS[glyph.colour]
    near, far, middle = side * 0.14, side * 0.86, side / 2
    box = (near, near, far, far)
    match glyph.shape:
        case "circle":
            draw.ellipse(box, fill=fill)
        case "square":
            draw.rectangle((side * 0.18, side * 0.18, side * 0.82, side * 0.82), fill=fill)
        case "triangle":
            draw.polygon([(middle, near), (far, far), (near, far)], fill=fill)
        case "star":
            angles = np.pi * (np.arange(10) / 5 - 0.5)
            radii = np.where(np.arange(10) % 2 == 0, side * 0.4, side * 0.16)
            draw.polygon(
                [(middle + r * np.cos(a), middle + r * np.sin(a)) for r, a in zip(radii, angles, strict=True)],
                fill=fill,
            )
        case "cross":
            arm = side * 0.12
            draw.rectangle((middle - arm, near, middle + arm, far), fill=fill)
            draw.rectangle((near, middle - arm, far, middle + arm), fill=fill)
        case "ring":
            draw.ellipse(box, outline=fill, width=round(side * 0.14))
        case _:
            raise ValueError(f"no glyph has the shape {glyph.shape!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, picture in shipped_pictures().items():
        Image.fromarray(render(picture)).save(out / name)


if __name__ == "__main__":
    main()
