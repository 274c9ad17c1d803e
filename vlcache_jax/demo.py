"""`vlcache demo`: pictures are seen once and then found again, on a model and pictures made on the spot."""

from __future__ import annotations

import tempfile
import time
from typing import Any

from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from vlcache_jax.buckets import Ladder
from vlcache_jax.llm import LLM
from vlcache_jax.outputs import RequestOutput
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.tiny import make_checkpoint

_LADDER = Ladder(rows=(64, 128, 256, 512), patches=(256, 1024, 4096), sequences=(1, 4))
_TEXT = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 64}
_VISION = {"hidden_size": 128, "intermediate_size": 512, "depth": 6}


def run_demo() -> None:
    """Makes a checkpoint, asks about pictures that come again, and prints what was computed and what was reused."""
    console = Console()
    console.print(
        "[bold]A small Qwen3-VL with random weights[/bold], made on the spot: "
        "the way from checkpoint to answer is real, the answers mean nothing."
    )
    house, sea = _house(), _sea()
    with tempfile.TemporaryDirectory(prefix="vlcache-demo-") as directory:
        make_checkpoint(directory, "qwen3_vl", seed=0, text=_TEXT, vision=_VISION)
        start = time.perf_counter()
        with LLM(directory, ladder=_LADDER, max_rows=512, max_model_len=1024, kv_cache_bytes=64 * 2**20) as llm:
            loaded = time.perf_counter() - start
            programs, seconds = llm.warmup(reuse="0.1", verbose=False)
            console.print(f"loaded in {loaded:.1f} s, compiled {programs} programs in {seconds:.1f} s")
            turns: list[tuple[str, list[Image.Image | str], Any]] = [
                ("a new picture", [house, "What is this?"], "exact"),
                ("it comes again", [house, "What colour is the roof?"], "exact"),
                ("behind other text", ["Look closely: ", house, "What is this?"], "exact"),
                ("the same, reuse 0.1", ["Once more, look: ", house, "and answer."], "0.1"),
                ("beside a new one, 0.1", ["Now two: ", house, sea, "What has changed?"], "0.1"),
                ("in another order, 0.1", ["And now: ", sea, house, "Which is which?"], "0.1"),
            ]
            params = SamplingParams(max_tokens=8, temperature=0)
            outputs = []
            for _, parts, reuse in turns:
                conversation = [{"role": "user", "content": [_part(part) for part in parts]}]
                [output] = llm.chat(conversation, params, reuse=reuse, verify=True, use_tqdm=False)
                llm.cache.flush()  # so that the next turn's times are its own
                outputs.append(output)
            kept = llm.cache.stats()

    table = Table("turn", "images", "computed", "reused", "ms", "logits off by", title="Six turns, tokens and time")
    for (name, _, _), output in zip(turns, outputs, strict=True):
        table.add_row(name, *_row(output))
    console.print(table)
    console.print(
        f"Kept: {kept.encoder_records} encoder records, {kept.kv_records} of K, V, {kept.bytes / 1e6:.1f} MB. "
        "ms: to the first token. Off by: beside a cold run. An image is exact where everything before it is the same: "
        "nothing is lost. Behind anything else it is approximate, if you allow it (here 10 % of its tokens are "
        "computed anew), and the output says so. How well it then answers is a question for trained weights."
    )


def _row(output: RequestOutput) -> tuple[str, ...]:
    report, verified = output.cache, output.verification
    assert verified is not None
    return (
        ", ".join(image.match for image in report.images),
        str(report.rows[-1]),
        str(len(output.prompt_token_ids) - report.rows[-1]),
        f"{1000 * output.metrics.ttft:.1f}",
        f"{verified.max_logit_difference:.0e}",
    )


def _part(value: Image.Image | str) -> dict[str, object]:
    return {"type": "text", "text": value} if isinstance(value, str) else {"type": "image", "image": value}


def _house() -> Image.Image:
    picture = Image.linear_gradient("L").resize((480, 360)).convert("RGB")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((135, 165, 345, 330), fill=(200, 180, 140))
    draw.polygon([(105, 165), (240, 60), (375, 165)], fill=(160, 40, 30))
    draw.rectangle((217, 240, 262, 330), fill=(90, 60, 40))
    return picture


def _sea() -> Image.Image:
    picture = Image.radial_gradient("L").resize((300, 390)).convert("RGB")
    draw = ImageDraw.Draw(picture)
    for y in range(210, 390, 18):
        draw.line([(x, y + (x // 13) % 2 * 8) for x in range(0, 300, 13)], fill=(20, 60, 160), width=6)
    return picture
