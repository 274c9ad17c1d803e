"""What ships with the package: a small trained Qwen3-VL (benchmarks/tiny_vqa), once it is trained."""

import pathlib

TINY_VQA = pathlib.Path(__file__).parent / "tiny_vqa"


def model_or_shipped(model: str | pathlib.Path | None) -> str | pathlib.Path:
    """The model, or the shipped one for None.

    Raises:
      ValueError: None, and no model ships with this version.
    """
    if model is None and not TINY_VQA.is_dir():
        raise ValueError("MODEL must be given: the model that is to ship with the package is still in training")
    return TINY_VQA if model is None else model
