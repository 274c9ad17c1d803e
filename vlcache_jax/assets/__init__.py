"""What ships with the package: a small trained Qwen3-VL (benchmarks/tiny_vqa) and pictures to ask it about."""

import pathlib

_FOLDER = pathlib.Path(__file__).parent
TINY_VQA = _FOLDER / "tiny_vqa"
PICTURES = _FOLDER / "pictures"
