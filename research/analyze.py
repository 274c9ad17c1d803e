"""Figures about the effects of reuse inside a model: `python -m research.analyze`."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlcache_jax.commands import options as opt
from vlcache_jax.commands.schedule import open_model, profile_samples
from vlcache_jax.common.files import PICTURES, check_writable, write_whole
from vlcache_jax.common.progress import Progress, say_errors
from vlcache_jax.reuse.schedule import FORMAT
from vlcache_jax.study.accuracy import CACHED, CONTEXTS, Protocol, arrangement_of, donors_of

if TYPE_CHECKING:
    import numpy as np

    from research.reuse_effects import AttentionFindings, Decomposition
    from vlcache_jax.llm import LLM
    from vlcache_jax.study.sensitivity import ProfileCase

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Draw the effect of reuse inside a model.",
)
_SAMPLES = typer.Option(min=1, help="Questions, spread over the files.")
_CONTEXT = typer.Option(help="Text before the images: new-text or new-question.")
_CACHED = typer.Option(help="Way to cache the images of a question before: together in one prompt, or separately.")
_OUT = typer.Option(help="Chart to write (png); its data are written next to it (json).")
type _Curves = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]
_LEVELS = (0, 50, 150)  # in 1/500: the paper's r = 0, 0.1, 0.3


@app.command("errors")
def errors_command(
    out: Annotated[pathlib.Path, _OUT],
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    data: opt.Data = None,
    samples: Annotated[int, _SAMPLES] = 20,
    context: Annotated[str, _CONTEXT] = "new-text",
    cached: Annotated[str, _CACHED] = "together",
    tokens: Annotated[int, typer.Option(min=1, help="Image tokens of each sample to reuse separately.")] = 16,
    dtype: opt.Dtype = "auto",
) -> None:
    """Measure errors of the attention outputs along the answer, and their origin.

    At r = 0, 0.1 and 0.3 (VLCache, figure 2), as the mean over layers and in each, with the first tokens of an image
    recomputed compared with the last ones (figure 5); the error of the logits decomposed by token and by layer; and the
    distance of the KV from a cold run's, in each layer.

    Example: python -m research.analyze errors --out errors.png
    """
    with (
        say_errors(),
        _opened(opt.one_model(model, same_model), dtype, out, data, samples, context, cached) as (llm, cases),
    ):
        import numpy as np

        from research import reuse_effects
        from vlcache_jax.study.probe import Probe
        from vlcache_jax.study.sensitivity import prepare

        probe = Probe(llm)
        # Each sample at all levels, decomposed by token and layer, and its KV compared with a cold run's.
        curves: dict[str, list[np.ndarray]] = {}
        parts = []
        deviations = []
        for case in cases:
            runs = prepare(probe, case)
            for level in _LEVELS:
                for last in (False, True)[: 1 + bool(level)]:
                    trace = reuse_effects.recompute(probe, runs, level, last=last)
                    name = f"r = {level / 500:g}" + (f", {'last' if last else 'first'} tokens" if level else "")
                    curves.setdefault(name, []).append(reuse_effects.attention_error(runs.placed, runs.cold, trace))
            parts.append(reuse_effects.decompose(probe, runs, tokens=tokens))
            deviations.append(dataclasses.astuple(reuse_effects.deviation(runs)))
        layered = {name: _mean_along(found) for name, found in curves.items()}
        means = {name: errors.mean(0) for name, errors in layered.items()}
        effects = {
            "reused in one layer only": [part.layer for part in parts],
            "reused in a layer and all before": [part.until for part in parts],
            "reused in a layer and all behind": [part.behind for part in parts],
        }
        depths = {name: np.mean([effect.error for effect in found], axis=0) for name, found in effects.items()}
        far = dict(zip(("K", "V", "of K shared", "of V shared"), np.mean(deviations, axis=0), strict=True))
        changed = {name: np.mean([effect.changed for effect in found], axis=0) for name, found in effects.items()}
        report = {
            "arrangement": CONTEXTS[context],
            "donors": CACHED[cached],
            "samples": samples,
            "error of attention outputs, by answer token": {name: mean.tolist() for name, mean in means.items()},
            "error of attention outputs, by layer and answer token": {k: one.tolist() for k, one in layered.items()},
            "error in the second half of the answer, over that in the first": {
                name: _growth([errors.mean(0) for errors in found]) for name, found in curves.items()
            },
            "error of the logits, by layer": {name: errors.tolist() for name, errors in depths.items()},
            "share of answers that change, by layer": {name: shares.tolist() for name, shares in changed.items()},
            "deviation of K, V, and the part that all tokens of an image share, by layer": {
                name: values.tolist() for name, values in far.items()
            },
            "error of single tokens, their sum scaled to all": float(
                np.mean([part.token.error.mean() * part.num_image_tokens for part in parts])
            ),
            "single tokens": [
                {"place": part.place.tolist(), "error": part.token.error.tolist(), "all": part.total} for part in parts
            ],
        }
        figure, axes = _figure(5)
        _draw_errors(axes, means, depths, far, parts)
        _draw_layers(axes[4], layered["r = 0"])
        _save(figure, report, out)


def _draw_layers(axis: Any, layered: np.ndarray) -> None:
    """Draw errors along the answer, a line for each layer."""
    for layer, errors in enumerate(layered):
        axis.plot(errors, "o-", markersize=3, label=f"layer {layer}")
    axis.set(xlabel="answer token", ylabel="error of attention outputs", title="By layer, r = 0")
    axis.legend(fontsize=7)


def _draw_errors(
    axes: Any,
    means: dict[str, np.ndarray],
    depths: dict[str, np.ndarray],
    far: dict[str, np.ndarray],
    parts: Sequence[Decomposition],
) -> None:
    """Draw the chart of `python -m research.analyze errors`: along the answer, by depth, of single tokens, and of
    KV.
    """
    import numpy as np

    left, middle, right, last_axis = axes[:4]
    for name, mean in means.items():
        left.plot(np.arange(len(mean)), mean, "o--" if "last" in name else "o-", markersize=3, label=name)
    left.set(xlabel="answer token", ylabel="error of attention outputs", title="Errors along the answer")
    left.legend(fontsize=8)
    layers = np.arange(len(next(iter(far.values()))))
    for label, values in depths.items():
        middle.plot(layers, values, "o-", markersize=3, label=label)
    total = float(np.mean([part.total for part in parts]))
    middle.axhline(total, color="black", linestyle="--", linewidth=0.8, label="reused in all layers")
    middle.set(xlabel="layer that reuses", ylabel="error of the logits", title="By depth")
    middle.legend(fontsize=8)
    for part in parts:
        right.plot(part.place, part.token.error / max(part.total, 1e-30), ".", color="tab:blue", alpha=0.4)
    right.set(xlabel="place in its image", ylabel="own error / error of all", title="One token reused")
    for name, values in far.items():
        last_axis.plot(layers[1:], values[1:], "o--" if "shared" in name else "o-", markersize=3, label=name)
    last_axis.set(xlabel="layer", ylabel="share of squares", title="Linked K, V against a cold run's")
    last_axis.legend(fontsize=8)


@app.command("sensitivity")
def sensitivity_command(
    scores: Annotated[pathlib.Path, typer.Argument(metavar="SCORES", help="File of `vlcache schedule profile`.")],
    out: Annotated[pathlib.Path, _OUT],
) -> None:
    """Draw the gain of each layer from recomputing at r = 0.1, 0.2 and 0.3 (VLCache, figure 3).

    Example: python -m research.analyze sensitivity scores.npz --out sensitivity.png
    """
    from vlcache_jax.commands.schedule import draw_scores
    from vlcache_jax.study.search import LayerScores

    with say_errors():
        _check(out)
        loaded = LayerScores.load(scores)
        levels = [level for level in (50, 100, 150) if level <= loaded.max_level]
        report = {
            "samples": loaded.samples,
            "full reuse": float(loaded.values[0, 0]),
            **{f"r = {level / 500:g}": loaded.values[:, level].tolist() for level in levels},
        }
        figure, [axis] = _figure(1)
        draw_scores(axis, loaded)
        _save(figure, report, out)


@app.command("attention")
def attention_command(
    out: Annotated[pathlib.Path, _OUT],
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    data: opt.Data = None,
    samples: Annotated[int, _SAMPLES] = 20,
    context: Annotated[str, _CONTEXT] = "new-text",
    cached: Annotated[str, _CACHED] = "together",
    dtype: opt.Dtype = "auto",
) -> None:
    """Measure the attention of the first answer token, and which keys depend on context (MPIC, figures 4, 8, 11 and
    12).

    Example: python -m research.analyze attention --out attention.png
    """
    with (
        say_errors(),
        _opened(opt.one_model(model, same_model), dtype, out, data, samples, context, cached) as (llm, cases),
    ):
        from research import reuse_effects
        from vlcache_jax.study.probe import Probe
        from vlcache_jax.study.sensitivity import prepare

        probe = Probe(llm)
        looks = reuse_effects.look(probe, (prepare(probe, case) for case in cases))
        counts = [reuse_effects.distant_layers(found) for found in looks.distances]
        report: dict[str, Any] = {"arrangement": CONTEXTS[context], "donors": CACHED[cached]}
        report |= {"samples": samples, "images": len(looks.distances)}
        curves = _curves(looks)
        report |= _attention_report(looks, curves, counts)
        figure, axes = _figure(6)
        _draw_attention(axes, looks, curves, counts)
        _save(figure, report, out)


def _attention_report(looks: AttentionFindings, curves: _Curves, counts: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the data of `python -m research.analyze attention`; `counts` are of `distant_layers`."""
    import numpy as np

    along, far, rank = curves
    thresholds = np.logspace(-6, 0, 61)
    first_tenth = [found[: max(1, len(found) // 10)].sum() / found.sum() for found in counts]

    def by_layer(of: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
        return {name: np.mean([of(one) for one in found], axis=0).tolist() for name, found in looks.weights.items()}

    return {
        "share of tokens above 0.001, by layer": by_layer(lambda weights: (weights > 1e-3).mean(1)),
        "attention": thresholds.tolist(),
        "share of tokens with at most this attention, by layer": by_layer(
            lambda weights: _share_up_to(weights, thresholds)
        ),
        "attention on the first tokens, by layer and share of the image": {k: v.tolist() for k, v in along.items()},
        "percentile rank of an image's first token among all tokens, mean over heads by layer": rank[0].tolist(),
        "its standard deviation over heads": rank[1].tolist(),
        "distance of keys on the first tokens, by layer and share of the image": far.tolist(),
        "layers but the first in which a token's keys are among the farthest, of each image": [
            found.tolist() for found in counts
        ],
        "share of such that are in the first tenth of their image": float(np.mean(first_tenth)),
        "what rows behind an image see of its tokens in the first layer": [
            looks.seen[stop:, start:stop].mean(0).tolist() for start, stop in looks.spans
        ],
    }


def _draw_attention(axes: Any, looks: AttentionFindings, curves: _Curves, counts: Sequence[np.ndarray]) -> None:
    """Draw the chart of `python -m research.analyze attention`."""
    import numpy as np

    along, far, rank = curves
    grid = np.linspace(0, 1, far.shape[1])
    for i in range(len(far)):
        colour = {"color": f"C{i % 10}", "label": f"layer {i}"}
        values = np.sort(np.concatenate([weights[i] for weights in looks.weights["scaled"]]))
        axes[0].plot(values, np.linspace(0, 1, len(values)), **colour)
        axes[1].plot(grid, along["scaled"][i], **colour)
        if i:
            axes[3].plot(grid, far[i], **colour)
    axes[0].legend(fontsize=7)
    axes[2].errorbar(np.arange(len(far)), rank[0], rank[1], fmt="o-", markersize=3)
    for found in counts:
        axes[4].plot(np.arange(len(found)) / len(found), found, ".", color="tab:blue", alpha=0.3)
    axes[5].imshow(looks.seen, cmap="magma", aspect="auto")
    for start, _ in looks.spans:
        axes[5].axvline(start, color="white", linewidth=0.5)
    _name_panels(axes)


def _curves(looks: AttentionFindings) -> _Curves:
    """Return attention and distances on the first tokens by layer, and the rank of the first token.

    The x axis is the fraction of an image, because images differ in length. The rank is the mean and deviation over
    heads.
    """
    import numpy as np

    grid = np.linspace(0, 1, 101)

    def over(images: Sequence[np.ndarray]) -> np.ndarray:
        each = [[np.interp(grid, *_cumulative(layer)) for layer in layers] for layers in images]
        return np.asarray(np.mean(each, axis=0))

    rank = np.mean([np.stack([one.mean(1), one.std(1)]) for one in looks.ranks], axis=0)
    along = {name: over(found) for name, found in looks.weights.items()}
    return along, over(looks.distances), np.asarray(rank)


def _share_up_to(weights: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return the distribution function of each layer's weights `[L, T]` at some thresholds."""
    import numpy as np

    return np.stack([np.searchsorted(np.sort(layer), thresholds, "right") / len(layer) for layer in weights])


def _name_panels(axes: Any) -> None:
    """Set the titles of the panels of `python -m research.analyze attention`."""
    share = "first share of the image"
    axes[0].set(xscale="log", xlabel="attention", ylabel="share of image tokens", title="First answer token")
    axes[1].set(xlabel=share, ylabel="attention on it", title="In token order")
    axes[2].set(xlabel="layer", ylabel="percentile among all tokens", title="Rank of an image's first token")
    axes[3].set(xlabel=share, ylabel="of the distance of keys", title="Donor against cold")
    axes[4].set(xlabel="place in its image", ylabel="layers among the farthest", title="Keys that differ most")
    axes[5].set(xlabel="token", ylabel="row", title="First layer, lines: images")


@contextlib.contextmanager
def _opened(
    model: str | None,
    dtype: str,
    out: pathlib.Path,
    data: list[pathlib.Path] | None,
    samples: int,
    context: str,
    cached: str,
) -> Iterator[tuple[LLM, Iterator[ProfileCase]]]:
    """Open an engine and yield it with its cases, after checking all arguments."""
    protocol = Protocol(arrangement_of(context, new=True), "neutral", donors_of(cached))
    _check(out)
    chosen = profile_samples(data, samples)
    with open_model(model, dtype) as llm:
        from vlcache_jax.study.sensitivity import cases_of

        yield llm, _counted(cases_of(llm, chosen, protocol, max_tokens=32))


def _counted(cases: Sequence[ProfileCase]) -> Iterator[ProfileCase]:
    with Progress("samples", len(cases)) as bar:
        for case in cases:
            yield case
            bar.update()


def _check(out: pathlib.Path) -> None:
    """Raise ValueError if the chart and its data cannot be written, or would overwrite other data."""
    check_writable("out", out, PICTURES)
    data = out.with_suffix(".json")
    check_writable("out", data)
    if data.is_file() and FORMAT in data.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"out must not overwrite the schedule {data}, got {out}; choose another file name")


def _mean_along(curves: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean of curves `[..., c]` of different lengths, at each place over those that reach it."""
    import numpy as np

    longest = max(curve.shape[-1] for curve in curves)
    each = [np.mean([one[..., i] for one in curves if i < one.shape[-1]], axis=0) for i in range(longest)]
    return np.stack(each, axis=-1)


def _growth(curves: Sequence[np.ndarray]) -> float:
    """Return the mean of the second half of curves over that of the first half, without curves of one place."""
    import numpy as np

    halves = [(one[: len(one) // 2].mean(), one[len(one) // 2 :].mean()) for one in curves if len(one) > 1]
    first, second = np.mean(halves, axis=0) if halves else (np.nan, np.nan)
    return float(second / first) if first > 0 else float("nan")


def _cumulative(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the fraction of the tokens, from the first on, and the fraction of the sum that they have."""
    import numpy as np

    total = max(float(values.sum()), 1e-30)
    return np.linspace(0, 1, len(values) + 1), np.concatenate([[0], np.cumsum(values) / total])


def _figure(panels: int) -> Any:
    """Return a figure and its panels, at most four in a row."""
    from vlcache_jax.study.report import figures

    pyplot = figures()
    columns = panels if panels <= 4 else 3
    rows = -(-panels // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.8 * rows), squeeze=False)
    for unused in axes.flat[panels:]:
        unused.set_visible(False)
    return figure, axes.flat[:panels]


def _save(figure: Any, report: dict[str, Any], out: pathlib.Path) -> None:
    from vlcache_jax.study.report import save_figure, to_json

    figure.tight_layout()
    save_figure(figure, out)
    data = out.with_suffix(".json")
    write_whole(data, to_json(report))
    typer.echo(f"written to {out} and {data}")


if __name__ == "__main__":
    app()
