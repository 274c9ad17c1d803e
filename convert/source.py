"""The source of a checkpoint: a local directory, or a model on the Hugging Face Hub, which is downloaded."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import re

from vlcache_jax.assets import TINY_VQA

# Files of tokenizer, chat template, image processor and generation settings, copied next to converted weights.
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
SHIPPED = {"tiny-vqa": TINY_VQA}  # models that ship with the package, by name

_POINTER = b"version https://git-lfs.github.com/spec/"  # first bytes of a Git LFS pointer file
_MAX_POINTER_BYTES = 1024
_NO_GGUF = "GGUF files are not supported, use the published checkpoint with safetensors files"

# "owner/name" or "name", with the characters that the Hub allows. A path may begin with a dot or slash.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclasses.dataclass(frozen=True)
class Located:
    """A checkpoint directory and its commit, or None if the commit is unknown."""

    directory: pathlib.Path
    revision: str | None


def locate(source: str | pathlib.Path, revision: str | None = None, *, weights: bool = True) -> Located:
    """Find a checkpoint: a directory, a model that ships with the package, or one on the Hub, which is downloaded.

    Args:
      source: directory, name of a shipped model, or Hub ID.
      revision: branch, tag or commit on the Hub.
      weights: download and check the weights too, not only the files next to them.

    Raises:
      FileNotFoundError: it is neither a directory nor a model that can be downloaded.
      NotADirectoryError: it is a file.
      ValueError: `revision` is set for a local directory, or a file is a Git LFS pointer.
    """
    directory = pathlib.Path(source).expanduser()
    if source != "" and directory.is_dir():
        if revision is not None:
            raise ValueError(f"revision must be None for a local directory, got {revision!r} for {directory}")
        _check_files(directory, weights)
        return Located(directory, _snapshot_commit(directory))
    if source != "" and directory.exists():
        instead = {".gguf": f": {_NO_GGUF}", ".safetensors": f": give its folder, {directory.parent}"}
        raise NotADirectoryError(
            f"model must be a checkpoint directory, but {directory} is a file{instead.get(directory.suffix, '')}"
        )
    if (shipped := SHIPPED.get(str(source))) is not None:
        return locate(shipped, revision)
    wrong = f"model must be a checkpoint directory or a Hub ID, got {str(source)!r}"
    if str(source).lower().endswith("gguf"):
        raise FileNotFoundError(f"{wrong}: {_NO_GGUF}")
    if not isinstance(source, str) or not _HUB_ID.fullmatch(source):
        raise FileNotFoundError(f"{wrong}, and there is no such directory" if source != "" else wrong)
    if "/" not in source and (suggestion := _suggest(source)) is not None:  # the Hub has no model of such a name
        raise FileNotFoundError(f"{wrong}; did you mean {suggestion!r}?")

    import huggingface_hub  # not needed for a local directory
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        wanted = _FETCHED if weights else list(SIDE_FILES)
        fetched = huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=wanted)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{wrong}; there is no such directory, and the download from the Hub failed "
            f"({str(error).partition(chr(10))[0]}). {_advice(error)}"
        ) from error
    return Located(pathlib.Path(fetched), _snapshot_commit(pathlib.Path(fetched)))


def _check_files(directory: pathlib.Path, weights: bool) -> None:
    """Check that a download is complete, before files are read."""
    if not (directory / "config.json").exists() and any(directory.glob("*.gguf")):
        raise FileNotFoundError(f"model must be a checkpoint directory, but {directory} has no config.json: {_NO_GGUF}")
    shards = sorted(directory.glob("*.safetensors")) if weights else []
    for path in (*shards, *(directory / name for name in SIDE_FILES)):
        if not path.is_file() or path.stat().st_size > _MAX_POINTER_BYTES:
            continue
        if path.read_bytes().startswith(_POINTER):
            raise ValueError(f"{path} must be the full file, got a Git LFS pointer: run `git lfs pull` in its folder")


def _suggest(name: str) -> str | None:
    """Return the name or Hub ID of a model with a similar name, or None."""
    from vlcache_jax.models.registry import SIZES

    known = {shipped: shipped for shipped in SHIPPED} | {size.lower(): f"Qwen/{size}-Instruct" for size in SIZES}
    plain = name.lower().replace("_", "-").removesuffix("-instruct")
    return next((known[one] for one in difflib.get_close_matches(plain, known, 1, 0.9)), None)


def _advice(error: Exception) -> str:
    """Return advice for an error of the Hub."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return "Request access on the model's page, then log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return "Name a branch, tag or commit that the model has"
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return "Check its name; if it is private, log in with `hf auth login`"
    return (
        "Without a network, run `hf download` on another machine, copy the directory and name it here; or try "
        f"{', '.join(SHIPPED)}, which ships with the package"
    )


def _snapshot_commit(directory: pathlib.Path) -> str | None:
    """Return the commit of a snapshot in the Hub's cache (`models--owner--name/snapshots/<commit>`), or None."""
    path = directory.resolve()
    return path.name if path.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", path.name) else None
