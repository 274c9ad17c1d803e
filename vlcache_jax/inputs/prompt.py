"""Prompts on the host: conversations and texts with images become token ids with a place for every image.

A text is tokenised once, with a single `<|image_pad|>` for each image. How many tokens an image takes is known when its
size is; `PromptRenderer.expand` then repeats the pads in the array of ids. Pads are special tokens, so this equals
tokenising the text with the repeated pads, as the library's processors do.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np
import numpy.typing as npt

from vlcache_jax.checks import check_flags, check_text, short
from vlcache_jax.fields import OBJECT, TEXT, check_fields, either, read_object
from vlcache_jax.inputs.access import LOCAL_ONLY, Access
from vlcache_jax.inputs.images import ImageSource, read_image
from vlcache_jax.inputs.processor import check_limits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IMAGE_TOKEN = "<|image_pad|>"
VIDEO_TOKEN = "<|video_pad|>"

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MESSAGE_KEYS = ("role", "content", "name", "tool_call_id")
_TEMPLATES_OWN = ("conversation", "documents", "padding", "return_dict", "return_tensors", "tokenize", "truncation")
_IMAGE_KEYS = ("image", "image_pil", "url", "path", "base64")
_IMAGE_TYPES = ("image", "image_url", "image_pil")
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")


class TemplateOptions(TypedDict, total=False):
    """How conversations become text; see `Template`."""

    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool


@dataclass(frozen=True)
class Template:
    """How conversations become text.

    Attributes:
        chat_template: Jinja; None: the checkpoint's own.
        chat_template_kwargs: names that the template may use.
        add_generation_prompt: the text ends where the assistant's turn begins; None: unless the last message goes on.
        continue_final_message: the text ends within the last message, so that the answer goes on with it.

    Raises:
        ValueError: one is of another type, or the last two are both set.
    """

    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        if self.chat_template is not None:
            check_text(self.chat_template, "chat_template")
        kwargs = {} if self.chat_template_kwargs is None else self.chat_template_kwargs
        if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
            raise ValueError(f"chat_template_kwargs must be a dict with strings as keys, got {short(kwargs)}")
        for key in kwargs:
            if key in _TEMPLATES_OWN or key in TemplateOptions.__annotations__:
                raise ValueError(f"chat_template_kwargs must hold names that the template uses, got {key!r}")
        check_flags(continue_final_message=self.continue_final_message)
        if self.add_generation_prompt is None:
            object.__setattr__(self, "add_generation_prompt", not self.continue_final_message)
        check_flags(add_generation_prompt=self.add_generation_prompt)
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt must be False where continue_final_message is True, got True")


OWN_TEMPLATE = Template()


@dataclass(frozen=True, eq=False)
class Prompt:
    """A request's text and images, checked but with nothing decoded.

    Attributes:
        text: as the model sees it, with one `<|image_pad|>` for each image.
        token_ids: of `text`, int32 [n], not expanded.
        images: in the order of their places.
        uuids: the caller's own id of each image, or None.
        mm_processor_kwargs: min_pixels and max_pixels of this request; empty means the engine's.
        name: what error messages call it, such as "conversations[2]".
    """

    text: str = field(repr=False)
    token_ids: npt.NDArray[np.int32] = field(repr=False)
    images: tuple[ImageSource, ...] = ()
    uuids: tuple[str | None, ...] = ()
    mm_processor_kwargs: Mapping[str, int] = field(default_factory=dict)
    name: str = "prompt"

    @classmethod
    def of_image(cls, source: ImageSource, image_token_id: int, limits: Mapping[str, int] | None) -> Prompt:
        """An image and nothing else."""
        ids = np.array([image_token_id], np.int32)
        return cls(IMAGE_TOKEN, ids, (source,), (None,), check_limits(limits))


class PromptRenderer:
    """Makes prompts with a checkpoint's tokenizer and chat template.

    Attributes:
        tokenizer: a tokenizer of transformers.
        chat_template: Jinja text, or None where only `from_prompt` is used.
        access: what images may be read from where.
        image_token_id: of `<|image_pad|>`.
        max_tokens: of a prompt; texts that are longer for sure are refused before they are tokenised. None: any.
        max_images: of a prompt; None: any number.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        *,
        access: Access = LOCAL_ONLY,
    ):
        special = tokenizer.get_added_vocab()
        for token in (IMAGE_TOKEN, VIDEO_TOKEN):
            if token not in special:
                raise ValueError(f"tokenizer must have the special token {token}, got {sorted(special)}")
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.access = access
        self.image_token_id: int = special[IMAGE_TOKEN]
        self._video_token_id: int = special[VIDEO_TOKEN]
        self.max_tokens: int | None = None
        self.max_images: int | None = None
        self._tokenizing = threading.Lock()

    @classmethod
    def from_pretrained(cls, directory: str | PathLike[str], *, access: Access = LOCAL_ONLY) -> PromptRenderer:
        """Reads the tokenizer and the chat template of a checkpoint.

        The template is taken, as in the library's processors, from chat_template.json, else chat_template.jinja, else
        the tokenizer's configuration.

        Raises:
            ValueError: no directory, no tokenizer in it, a damaged file, or a tokenizer without the image tokens.
        """
        if not Path(directory).is_dir():
            raise ValueError(f"directory must be a checkpoint's directory, got {str(directory)!r}")
        _check_tokenizer_files(Path(directory))
        try:
            tokenizer = _tokenizer_class(Path(directory)).from_pretrained(directory, local_files_only=True)
        except Exception as error:  # the library and its parser raise nearly anything
            raise ValueError(f"{directory} must hold a tokenizer: {type(error).__name__}: {error}") from error
        template = tokenizer.chat_template
        legacy = Path(directory, "chat_template.json")
        if legacy.exists():
            found = read_object(legacy)
            check_fields(found, {"chat_template": either(TEXT, OBJECT)}, legacy, required=True)
            template = found["chat_template"]
        if isinstance(template, dict):
            template = template.get("default")
        return cls(tokenizer, template, access=access)

    def image(self, value: Any, name: str = "image") -> ImageSource:
        """Takes hold of an image, see `images.read_image`."""
        return read_image(value, access=self.access, name=name)

    def from_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        mm_processor_kwargs: Mapping[str, int] | None = None,
        template: Template = OWN_TEMPLATE,
        name: str = "conversation",
    ) -> Prompt:
        """Renders a conversation, by default up to where the assistant's next turn begins.

        Args:
            messages: of OpenAI's or Hugging Face's shape: `{"role": ..., "content": ...}`, the content a string or a
                list of parts `{"type": "text", "text": ...}`, `{"type": "image_url", "image_url": {"url": ...}}`,
                `{"type": "image", "image" | "url" | "path" | "base64": ...}`, `{"type": "image_pil", "image_pil":
                ...}`. An image may have a "uuid", the caller's own id of it. The role developer is system. A message's
                "name" and an image's "detail" are ignored, with a warning.
            mm_processor_kwargs: pixel limits of this request.
            template: by which it is rendered.
            name: what error messages call the conversation, such as "conversations[2]".

        Raises:
            ValueError: an empty conversation, another role, key or type of part, an unreadable image, a text that holds
                an image or video placeholder, or a template that does not give every image its place.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise ValueError(f"{name} must be a list of messages, got {type(messages).__name__}")
        if not messages:
            raise ValueError(f"{name} must hold at least one message, got none")
        chat_template = self.chat_template if template.chat_template is None else template.chat_template
        if chat_template is None:
            raise ValueError(f"{name} must be given as a prompt: this checkpoint has no chat template")
        images: list[tuple[ImageSource, str | None]] = []
        rendered = [self._message(message, f"{name} messages[{i}]", name, images) for i, message in enumerate(messages)]
        try:
            text = self.tokenizer.apply_chat_template(
                rendered,
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=bool(template.add_generation_prompt),
                continue_final_message=template.continue_final_message,
                **(template.chat_template_kwargs or {}),
            )
        except Exception as error:  # templates come with checkpoints and raise what they like
            whose = "the checkpoint's chat template" if template.chat_template is None else "chat_template"
            raise ValueError(f"{name} must suit {whose}, which failed: {error}") from error
        sources, uuids = [source for source, _ in images], tuple(uuid for _, uuid in images)
        return self._prompt(cast(str, text), sources, uuids, mm_processor_kwargs, name)

    def from_prompt(self, prompt: str | Mapping[str, Any] | Sequence[int], *, name: str = "prompt") -> Prompt:
        """Takes a text or its tokens as they are, with one `<|image_pad|>` at the place of each image.

        Args:
            prompt: the text, or `{"prompt": str, "multi_modal_data": {"image": image or list},
                "multi_modal_uuids": {"image": id or list}, "mm_processor_kwargs": {...}}`, or with token ids as
                "prompt_token_ids" in place of "prompt".
            name: what error messages call it, such as "prompts[2]".

        Raises:
            ValueError: an unknown key, an unreadable image, or as many placeholders as there are not images.
        """
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if isinstance(prompt, list | tuple | np.ndarray):
            prompt = {"prompt_token_ids": prompt}
        if not isinstance(prompt, Mapping):
            raise ValueError(f"{name} must be a string, a dict or token ids, got {type(prompt).__name__}")
        _check_keys(prompt, _PROMPT_KEYS, name)
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is not None and text is not None:
            raise ValueError(f"{name} must hold either 'prompt' or 'prompt_token_ids', got both")
        if ids is None and not isinstance(text, str):
            raise ValueError(f"{name} must hold a string as 'prompt', got {type(text).__name__}")
        images = [
            self.image(image, f"{name} images[{i}]")
            for i, image in enumerate(_of_images(prompt, "multi_modal_data", name) or ())
        ]
        uuids = _of_images(prompt, "multi_modal_uuids", name)
        if uuids is None:
            uuids = [None] * len(images)
        if len(uuids) != len(images):
            raise ValueError(f"{name} must have one uuid for each image, got {len(uuids)} for {len(images)} images")
        for i, uuid in enumerate(uuids):
            _check_uuid(uuid, f"{name} uuids[{i}]")
        given = cast(str, text) if ids is None else self._token_ids(ids, f"{name} prompt_token_ids")
        return self._prompt(given, images, tuple(uuids), prompt.get("mm_processor_kwargs"), name)

    def expand(
        self, token_ids: npt.NDArray[np.int32], counts: Sequence[int]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Repeats each image's pad as often as the image has tokens.

        Args:
            token_ids: with one pad for each image, int32 [n].
            counts: tokens of each image.

        Returns:
            The ids, int32, and of each image where its pads start and how many they are, int32 [images].

        Raises:
            ValueError: as many pads as there are not counts, a count below 1, or two pads side by side.
        """
        places = self._places(token_ids, "token_ids")
        lengths = np.asarray(counts, np.int32)
        if lengths.shape != places.shape:
            raise ValueError(f"counts must have one entry for each of {len(places)} images, got {len(lengths)}")
        if np.any(lengths < 1):
            raise ValueError(f"counts must be positive, got {lengths.tolist()}")
        repeats = np.ones(len(token_ids), np.int64)
        repeats[places] = lengths
        starts = places + np.cumsum(lengths - 1) - (lengths - 1)
        return np.repeat(np.asarray(token_ids, np.int32), repeats), starts.astype(np.int32), lengths

    def _message(
        self, message: Any, name: str, conversation: str, images: list[tuple[ImageSource, str | None]]
    ) -> dict[str, Any]:
        """Checks a message, appends its images to `images`, and returns it in the shape that templates know."""
        if not isinstance(message, Mapping):
            raise ValueError(f"{name} must be a dict with role and content, got {type(message).__name__}")
        # What others leave empty says nothing, such as "tool_calls": [].
        message = {key: value for key, value in message.items() if key in _MESSAGE_KEYS or value not in (None, [], {})}
        _check_keys(message, _MESSAGE_KEYS, name)
        if message.get("name") is not None:
            _warn_ignored("name", "a message")
        given, content = message.get("role"), message.get("content")
        if not (isinstance(given, str) and given in _ROLES):
            raise ValueError(f"{name} must have the role {', '.join(_ROLES)}, got {short(given)}")
        role = _ROLES[given]
        if isinstance(content, str):
            return {"role": role, "content": _plain_text(content, name)}
        if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
            raise ValueError(f"{name} must have a string or a non-empty list of parts as content, got {content!r:.80}")
        parts: list[dict[str, str]] = []
        for i, part in enumerate(content):
            where = f"{name} content[{i}]"
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text":
                _check_keys(part, ("type", "text"), where)
                parts.append({"type": "text", "text": _plain_text(part.get("text"), where)})
            elif kind in _IMAGE_TYPES:
                image = f"{conversation} images[{len(images)}]"
                _check_uuid(part.get("uuid"), f"{where} uuid")
                images.append((self.image(_image_value(part, where), image), part.get("uuid")))
                parts.append({"type": "image"})
            else:
                got = f"type {kind!r}" if isinstance(part, Mapping) else type(part).__name__
                raise ValueError(f"{where} must be a dict of type text, image, image_url or image_pil, got {got}")
        return {"role": role, "content": parts}

    def _token_ids(self, given: Any, name: str) -> npt.NDArray[np.int32]:
        """Ids of a prompt as they came.

        Raises:
            ValueError: they are not token ids of the vocabulary.
        """
        try:
            ids = np.asarray(given)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{name} must be token ids, got {short(given)}") from error
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            raise ValueError(f"{name} must be a non-empty list of token ids, got {short(given)}")
        if ids.min() < 0 or ids.max() >= len(self.tokenizer):
            raise ValueError(f"{name} must be from 0 to {len(self.tokenizer) - 1}, got {short(given)}")
        return ids.astype(np.int32)

    def _prompt(
        self,
        given: str | npt.NDArray[np.int32],
        images: Sequence[ImageSource],
        uuids: tuple[str | None, ...],
        mm_processor_kwargs: Mapping[str, int] | None,
        name: str,
    ) -> Prompt:
        limits = check_limits(mm_processor_kwargs, f"{name} mm_processor_kwargs")
        if self.max_images is not None and len(images) > self.max_images:
            raise ValueError(f"{name} must hold at most {self.max_images} images, got {len(images)}")
        if isinstance(given, str):
            text, token_ids = given, self._tokenized(given, name)
        else:
            text, token_ids = str(self.tokenizer.decode(given)), given
        if not len(token_ids):
            raise ValueError(f"{name} must not be empty, got {text!r}")
        if np.any(token_ids == self._video_token_id):
            raise ValueError(f"{name} must hold no videos, got {VIDEO_TOKEN}")
        places = self._places(token_ids, name)
        if len(places) != len(images):
            raise ValueError(
                f"{name} must hold one {IMAGE_TOKEN} for each image, got {len(places)} placeholders "
                f"for {len(images)} images"
            )
        return Prompt(text, token_ids, tuple(images), uuids, limits, name)

    def _tokenized(self, text: str, name: str) -> npt.NDArray[np.int32]:
        check_text(text, name)
        if self.max_tokens is not None and len(text) > self.max_tokens * self._longest_token:
            raise ValueError(
                f"{name} must be short enough for max_model_len = {self.max_tokens} tokens, "
                f"got a text of {len(text)} characters"
            )
        with self._tokenizing:  # a tokenizer takes one at a time
            return np.asarray(self.tokenizer(text)["input_ids"], np.int32)

    @cached_property
    def _longest_token(self) -> int:
        """Characters that a token can stand for; added tokens may be longer than all others."""
        return max(map(len, self.tokenizer.get_vocab()))

    def _places(self, token_ids: npt.NDArray[np.int32], name: str) -> npt.NDArray[np.int64]:
        places = np.flatnonzero(np.asarray(token_ids) == self.image_token_id)
        if np.any(np.diff(places) == 1):  # their tokens would run together to one image
            raise ValueError(f"{name} must have a token between two images, got two {IMAGE_TOKEN} side by side")
        return places


def _tokenizer_class(directory: Path) -> Any:
    """The library's class for a checkpoint's tokenizer.

    `AutoTokenizer` chooses the same, but imports torch where it is installed, which takes ten seconds; so it is asked
    only where a checkpoint names another class than those of these models, or none.
    """
    # Or the library, when it is imported, would complain to everyone that there is no torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    path = directory / "tokenizer_config.json"
    settings = read_object(path) if path.is_file() else {}
    match settings.get("tokenizer_class"):
        case "Qwen2Tokenizer" | "Qwen2TokenizerFast":
            from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

            return Qwen2Tokenizer
        case "TokenizersBackend" | "PreTrainedTokenizerFast":
            from transformers.tokenization_utils_tokenizers import TokenizersBackend

            return TokenizersBackend
    from transformers import AutoTokenizer

    return AutoTokenizer


def _check_keys(given: Mapping[str, Any], known: Sequence[str], name: str) -> None:
    for key in given:
        if key not in known:
            raise ValueError(f"{name} must hold only {', '.join(known)}, got {key!r}")


def _check_uuid(uuid: Any, name: str) -> None:
    if not (uuid is None or (isinstance(uuid, str) and uuid)):
        raise ValueError(f"{name} must be a non-empty string or None, got {short(uuid)}")
    if uuid is not None:
        check_text(uuid, name)


def _warn_ignored(key: str, where: str) -> None:
    package = str(Path(__file__).parent.parent)
    warnings.warn(f"the {key} of {where} is ignored", UserWarning, skip_file_prefixes=(package,))


def _plain_text(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{name} must have a string as text, got {type(text).__name__}")
    for token in (IMAGE_TOKEN, VIDEO_TOKEN):
        if token in text:
            raise ValueError(f"{name} must not contain {token}, which marks the place of an image or video")
    return text


def _image_value(part: Mapping[str, Any], name: str) -> Any:
    """What `read_image` takes, from an image part of either shape."""
    if part["type"] == "image_url":
        _check_keys(part, ("type", "image_url", "uuid"), name)
        value = part.get("image_url")
        if isinstance(value, Mapping):
            _check_keys(value, ("url", "detail"), f"{name} image_url")
            if value.get("detail") is not None:
                _warn_ignored("detail", "an image")
            value = value.get("url")
        if not isinstance(value, str):
            raise ValueError(f"{name} must have a string as image_url or as its url, got {type(value).__name__}")
        return value
    _check_keys(part, ("type", "uuid", *_IMAGE_KEYS), name)
    given = [key for key in _IMAGE_KEYS if part.get(key) is not None]
    if len(given) != 1:
        raise ValueError(f"{name} must hold exactly one of {', '.join(_IMAGE_KEYS)}, got {', '.join(given) or 'none'}")
    value = part[given[0]]
    if given[0] == "base64" and isinstance(value, str) and not value.startswith("data:"):
        return f"data:;base64,{value}"
    return value


def _check_tokenizer_files(directory: Path) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (path := directory / name).exists():
            read_object(path)
    # Megabytes of vocabulary are not read twice: a look at the beginning tells another kind of file.
    if (path := directory / "tokenizer.json").exists():
        if not path.is_file():
            raise ValueError(f"{path} must be a JSON file: no regular file")
        with path.open("rb") as file:
            if not (begin := file.read(64)).lstrip().startswith(b"{"):
                raise ValueError(f"{path} must be a JSON file that holds an object, got {begin!r}")


def _of_images(prompt: Mapping[str, Any], key: str, name: str) -> list[Any] | None:
    """The images, or their ids, under `key` of a prompt: None if absent; a single one is a list of one."""
    data = prompt.get(key)
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} {key} must be a dict with 'image', got {type(data).__name__}")
    _check_keys(data, ("image",), f"{name} {key}")
    value = data.get("image")
    if value is None:
        return None
    return list(value) if isinstance(value, (list, tuple)) else [value]
