"""Where a checkpoint comes from: a local directory, or a model of the Hugging Face hub, which is fetched."""

from __future__ import annotations

import dataclasses
import pathlib
import re

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

# "owner/name" or "name", of the characters that the hub allows; what begins with a dot or slash is a path.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclasses.dataclass(frozen=True)
class Located:
    """A checkpoint directory, and the commit it is of where the hub says so."""

    directory: pathlib.Path
    revision: str | None


def locate(source: str | pathlib.Path, revision: str | None = None) -> Located:
    """Finds a checkpoint, from the hub if there is no such directory.

    Raises:
      FileNotFoundError: it is neither a directory nor a model of the hub that can be fetched.
      ValueError: `revision` is given for a directory.
    """
    directory = pathlib.Path(source).expanduser()
    if directory.is_dir():
        if revision is not None:
            raise ValueError(f"revision must be None for a local directory, got {revision!r} for {directory}")
        return Located(directory, _snapshot_commit(directory))
    if directory.exists():
        raise NotADirectoryError(f"model must be a checkpoint directory, but {directory} is a file")
    if not isinstance(source, str) or not _HUB_ID.fullmatch(source):
        raise FileNotFoundError(f"model must be a directory or the id of a model on the hub, got {str(source)!r}")

    import huggingface_hub  # only here: who serves a local directory needs no network
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        fetched = huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=_FETCHED)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"model must be a directory or the id of a model on the hub; there is no directory {source!r}, "
            f"and the hub could not be asked for it: {error}"
        ) from error
    return Located(pathlib.Path(fetched), _snapshot_commit(pathlib.Path(fetched)))


def _snapshot_commit(directory: pathlib.Path) -> str | None:
    """The commit, if the directory is a snapshot in the hub's cache (`models--owner--name/snapshots/<commit>`)."""
    path = directory.resolve()
    return path.name if path.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", path.name) else None
