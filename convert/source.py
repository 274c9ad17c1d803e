"""Where a checkpoint comes from: a local directory, or a model of the Hugging Face hub, which is fetched."""

from __future__ import annotations

import dataclasses
import pathlib
import re

from vlcache_jax.assets import TINY_VQA

# Tokenizer, chat template, image processor and generation settings: what is copied beside converted weights.
SIDE_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)
_FETCHED = [*SIDE_FILES, "additional_chat_templates/*", "*.safetensors", "*.safetensors.index.json"]
SHIPPED = {"tiny-vqa": TINY_VQA}  # models that come with the package, by name

# "owner/name" or "name", of the characters that the hub allows; what begins with a dot or slash is a path.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclasses.dataclass(frozen=True)
class Located:
    """A checkpoint directory, and the commit it is of where the hub says so."""

    directory: pathlib.Path
    revision: str | None


def locate(source: str | pathlib.Path, revision: str | None = None, *, weights: bool = True) -> Located:
    """Finds a checkpoint: a directory, a model that ships with the package, or one of the hub, which is fetched.

    Args:
      revision: branch, tag or commit on the hub.
      weights: whether the weights are wanted, too, and not only the files beside them.

    Raises:
      FileNotFoundError: it is neither a directory nor a model of the hub that can be fetched.
      ValueError: `revision` is given for what is not on the hub.
    """
    directory = pathlib.Path(source).expanduser()
    if directory.is_dir():
        if revision is not None:
            raise ValueError(f"revision must be None for a local directory, got {revision!r} for {directory}")
        return Located(directory, _snapshot_commit(directory))
    if directory.exists():
        raise NotADirectoryError(f"model must be a checkpoint directory, but {directory} is a file")
    if (shipped := SHIPPED.get(str(source))) is not None:
        return locate(shipped, revision)
    if not isinstance(source, str) or not _HUB_ID.fullmatch(source):
        raise FileNotFoundError(f"model must be a directory or the id of a model on the hub, got {str(source)!r}")

    import huggingface_hub  # only here: who serves a local directory needs no network
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        wanted = _FETCHED if weights else list(SIDE_FILES)
        fetched = huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=wanted)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"model must be a directory or the id of a model on the hub; there is no directory {source!r}, "
            f"and the hub could not be asked for it ({str(error).partition(chr(10))[0]}). {_advice(error)}"
        ) from error
    return Located(pathlib.Path(fetched), _snapshot_commit(pathlib.Path(fetched)))


def _advice(error: Exception) -> str:
    """What to do about an error of the hub."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return "Ask for access on the model's page, then log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return "Name a branch, tag or commit that the model has"
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return "Check its name; if it is private, log in with `hf auth login`"
    return (
        "Without a network, give a directory: what was fetched once on another machine (`hf download`) can be copied; "
        f"or try the model that ships with the package, {', '.join(SHIPPED)}"
    )


def _snapshot_commit(directory: pathlib.Path) -> str | None:
    """The commit, if the directory is a snapshot in the hub's cache (`models--owner--name/snapshots/<commit>`)."""
    path = directory.resolve()
    return path.name if path.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", path.name) else None
