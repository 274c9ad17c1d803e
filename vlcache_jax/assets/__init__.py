"""Files that ship with the package: small trained models with the architectures of Qwen3-VL and of Qwen3.5
(research/tiny_vqa), schedules of the first one, images, and the page of the demo.
"""

import pathlib

_FOLDER = pathlib.Path(__file__).parent
TINY_VQA = _FOLDER / "tiny_vqa"
TINY_HYBRID = _FOLDER / "tiny_hybrid"
DEMO_PAGE = _FOLDER / "pages" / "demo.html"
PICTURES = _FOLDER / "pictures"
SCHEDULES = tuple(sorted((_FOLDER / "schedules").glob("*.json")))
