"""Files that ship with the package: a small trained Qwen3-VL (research/tiny_vqa), its schedules, images, and the
page of the demo.
"""

import pathlib

_FOLDER = pathlib.Path(__file__).parent
TINY_VQA = _FOLDER / "tiny_vqa"
DEMO_PAGE = _FOLDER / "pages" / "demo.html"
PICTURES = _FOLDER / "pictures"
SCHEDULES = tuple(sorted((_FOLDER / "schedules").glob("*.json")))
