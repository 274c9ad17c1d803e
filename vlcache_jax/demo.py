"""`vlcache demo`: the whole way from a checkpoint to answers, on a model and pictures made on the spot."""

from __future__ import annotations

import tempfile
import time

from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from vlcache_jax.buckets import Ladder
from vlcache_jax.llm import LLM
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.tiny import make_checkpoint

_LADDER = Ladder(rows=(64, 128, 256, 512), patches=(256, 1024), sequences=(1, 4))
_STEPS = ("decode_image", "preprocess", "encode", "prefill", "first_token", "decode")


def run_demo() -> None:
    """Makes a checkpoint, answers four requests in one call, and prints tokens and times."""
    console = Console()
    console.print(
        "[bold]A tiny Qwen3-VL with random weights[/bold], made on the spot: "
        "the way from checkpoint to answer is real, the answers mean nothing."
    )
    with tempfile.TemporaryDirectory(prefix="vlcache-demo-") as directory:
        make_checkpoint(directory, "qwen3_vl", seed=0)
        start = time.perf_counter()
        with LLM(directory, ladder=_LADDER, max_rows=512, max_model_len=1024, kv_cache_bytes=64 * 2**20) as llm:
            loaded = time.perf_counter() - start
            programs, seconds = llm.warmup(verbose=False)
            console.print(f"loaded in {loaded:.1f} s, compiled {programs} programs in {seconds:.1f} s")
            house, sea = _house(), _sea()
            requests: dict[str, list[Image.Image | str]] = {
                "one picture": [house, "What is this?"],
                "the same picture": [house, "What colour is the roof?"],
                "two pictures": [house, "before, and after:", sea, "What has changed?"],
                "text alone": ["What is a picture?"],
            }
            conversations = [
                [{"role": "user", "content": [_part(part) for part in parts]}] for parts in requests.values()
            ]
            outputs = llm.chat(conversations, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)

    answers = Table("request", "prompt tokens", "of images", "answer's tokens", title="Answers")
    times = Table(
        "request", *(step.replace("_", " ") for step in _STEPS), title="Milliseconds a step, shared in the batch"
    )
    for name, output in zip(requests, outputs, strict=True):
        images = sum(image.tokens for image in output.cache.images)
        tokens = " ".join(map(str, output.outputs[0].token_ids))
        answers.add_row(name, str(len(output.prompt_token_ids)), str(images), tokens)
        times.add_row(name, *(f"{1000 * getattr(output.metrics, step):.1f}" for step in _STEPS))
    console.print(answers)
    console.print(times)


def _part(value: Image.Image | str) -> dict[str, object]:
    return {"type": "text", "text": value} if isinstance(value, str) else {"type": "image", "image": value}


def _house() -> Image.Image:
    picture = Image.linear_gradient("L").resize((320, 240)).convert("RGB")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((90, 110, 230, 220), fill=(200, 180, 140))
    draw.polygon([(70, 110), (160, 40), (250, 110)], fill=(160, 40, 30))
    draw.rectangle((145, 160, 175, 220), fill=(90, 60, 40))
    return picture


def _sea() -> Image.Image:
    picture = Image.radial_gradient("L").resize((200, 260)).convert("RGB")
    draw = ImageDraw.Draw(picture)
    for y in range(140, 260, 12):
        draw.line([(x, y + (x // 9) % 2 * 5) for x in range(0, 200, 9)], fill=(20, 60, 160), width=4)
    return picture
