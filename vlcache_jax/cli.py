"""The command `vlcache`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from vlcache_jax.convert.command import convert_command

app = typer.Typer(
    name="vlcache",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serves Qwen vision-language models in JAX. Start with `vlcache demo`: it needs no weights.",
)
app.command("convert")(convert_command)


@app.command("demo")
def demo_command() -> None:
    """Answers questions about a picture with a model made on the spot.

    The model is tiny and its weights are random, so the answers mean nothing. Everything else is real: a Hugging Face
    checkpoint is written and loaded, pictures are drawn, preprocessed and encoded, and the answers are generated in one
    batch. Printed are the answers' tokens and the time of each step.
    """
    from vlcache_jax.demo import run_demo

    run_demo()


@app.command("ask")
def ask_command(
    words: Annotated[
        list[str], typer.Argument(metavar="[IMAGE]... QUESTION", help="Image files, and last the question in quotes.")
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", envvar="VLCACHE_MODEL", help="Checkpoint directory or hub id.")
    ],
    max_tokens: Annotated[int, typer.Option(help="Tokens to answer with at most.")] = 256,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. [default: the checkpoint's own]", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: bfloat16 on a GPU.")] = "auto",
    max_pixels: Annotated[
        int | None,
        typer.Option(help="Pixels of an image at most; larger ones are scaled down. [default: the checkpoint's own]",
                     show_default=False),
    ] = None,
) -> None:  # fmt: skip
    """Asks a question about images.

    Example: vlcache ask -m Qwen/Qwen3-VL-2B-Instruct street.jpg map.png "Is the shop on the map?"
    """
    from vlcache_jax import LLM, SamplingParams
    from vlcache_jax.images import read_image

    *images, question = words
    try:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        # Decoded first: what is wrong with an image is known before the model is loaded.
        pictures = [read_image(image, name=image).decode() for image in images]
        content = [*({"type": "image", "image": picture} for picture in pictures), {"type": "text", "text": question}]
        limits = {"max_pixels": max_pixels} if max_pixels is not None else None
        with LLM(model, dtype=dtype, mm_processor_kwargs=limits) as llm:
            [output] = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    except (ValueError, OSError, MemoryError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(output.outputs[0].text)
    metrics = output.metrics
    typer.echo(
        f"[{len(output.prompt_token_ids)} prompt tokens, {sum(i.tokens for i in output.cache.images)} of images; "
        f"first token after {metrics.ttft:.2f} s, {len(output.outputs[0].token_ids)} tokens in {metrics.decode:.2f} s]",
        err=True,
    )


def main() -> None:
    """Entry point of the console script."""
    # Advice of transformers for people who train with it; a word of ours says what is wrong.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    app()


if __name__ == "__main__":
    main()
