"""Prompts on the host: conversations and texts with images become token ids with a placeholder for every image.

A text is tokenised once, with a single `<|image_pad|>` for each image and `<|video_pad|>` for each video. How many
tokens these take is known when their size is; `PromptRenderer.expand` then repeats the pads in the array of ids, with
what a family puts between the chunks of a video. Pads are special tokens, so this equals tokenising the text with the
repeated pads, as the library's processors do. `thinks` and `is_opened` find prompts that open a model's thinking.
"""

from __future__ import annotations

import operator
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np
import numpy.typing as npt

from vlcache_jax.common.checks import check_flags, check_text, short
from vlcache_jax.common.files import check_readable
from vlcache_jax.common.json_files import OBJECT, TEXT, check_fields, either, optional, read_object
from vlcache_jax.inputs.access import LOCAL_ONLY, Access
from vlcache_jax.inputs.expansion import Expander
from vlcache_jax.inputs.images import ImageSource, read_image
from vlcache_jax.inputs.messages import (
    IMAGE_TOKEN,
    NO_SETTINGS,
    VIDEO_TOKEN,
    VIDEO_TYPES,
    MediaSettings,
    check_keys,
    check_marks,
    check_uuid,
    has_media,
    image_value,
    is_with_metadata,
    listed,
    read_message,
    read_settings,
    read_tools,
    typed,
    video_value,
    written_out,
)
from vlcache_jax.inputs.processor import overrule
from vlcache_jax.inputs.videos import NO_OPTIONS, VideoOptions, VideoSource, read_video

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<think>", "</think>"


def thinks(chat_template: str) -> bool:
    """Return whether answers to prompts of a template may think: it removes that from those of earlier turns."""
    return CLOSE in chat_template


def is_opened(prompt: str) -> bool:
    """Return whether a prompt ends within thinking, as those of Qwen3-VL-Thinking do; the answer only closes it.

    The last tag counts: a template whose thinking is off writes an empty one, and a final message that goes on may have
    begun to think.
    """
    return prompt.rfind(OPEN) > max(prompt.rfind(CLOSE), prompt.rfind("<|im_end|>"))


# What the library's `apply_chat_template` takes itself, or hands to the template by that name.
_TEMPLATES_OWN = (
    "conversation", "documents", "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict",
    "return_tensors", "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "truncation",
)  # fmt: skip
_MOST_NAMES = 1024  # that the caller gives a template
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")


type Source = ImageSource | VideoSource


class TemplateOptions(TypedDict, total=False):
    """How conversations become text; see `Template`."""

    chat_template: str | os.PathLike[str] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | None


@dataclass(frozen=True)
class Template:
    """How conversations become text.

    Attributes:
        chat_template: Jinja; None: the checkpoint's own.
        chat_template_kwargs: names that the template may use.
        add_generation_prompt: the text ends where the assistant's turn begins; None: unless the last message goes on.
        continue_final_message: the text ends within the last message, so that the answer goes on with it.
        tools: that the answer may call, see `tools.read_tools`.
        tool_choice: "auto"; "none": the template hears of no tools. What forces a call is no matter of the template.

    Raises:
        ValueError: one is of another type, or a message is to begin and to go on.
    """

    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | None = None

    def __post_init__(self) -> None:
        if self.chat_template is not None:
            check_text(self.chat_template, "chat_template")
        kwargs = {} if self.chat_template_kwargs is None else self.chat_template_kwargs
        if isinstance(kwargs, Mapping) and len(kwargs) > _MOST_NAMES:
            raise ValueError(f"chat_template_kwargs must have at most {_MOST_NAMES} names, got {len(kwargs)}")
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
        if self.tool_choice not in (None, "auto", "none"):
            raise ValueError(f'tool_choice must be "auto" or "none", got {short(self.tool_choice)}')
        tools = read_tools(self.tools)
        check_marks(tools, "tools")
        object.__setattr__(self, "tools", tuple(tools) if self.tool_choice != "none" else ())


OWN_TEMPLATE = Template()


@dataclass(frozen=True, eq=False)
class Prompt:
    """A request's text, images and videos, checked but with nothing decoded.

    Attributes:
        text: as the model sees it, with one `<|image_pad|>` for each image and `<|video_pad|>` for each video.
        token_ids: of `text`, int32 [n], not expanded.
        sources: images and videos in the order of their places.
        uuids: the caller's own id of each of them, or None.
        limits: min_pixels and max_pixels of this request; empty means the engine's.
        name: what error messages call it, such as "conversations[2]".
        opens_thought: the text ends within the thinking that comes before the answer.
    """

    text: str = field(repr=False)
    token_ids: npt.NDArray[np.int32] = field(repr=False)
    sources: tuple[Source, ...] = ()
    uuids: tuple[str | None, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    name: str = "prompt"
    opens_thought: bool = False

    def limits_of(self, source: Source) -> Mapping[str, int]:
        """Of the pixels of one of the sources: its own, and where it has none this request's."""
        own = source.limits if isinstance(source, ImageSource) else {}
        return overrule(self.limits, own) if own else self.limits

    @property
    def images(self) -> tuple[ImageSource, ...]:
        """The sources that are images."""
        return tuple(source for source in self.sources if isinstance(source, ImageSource))

    @property
    def videos(self) -> tuple[VideoSource, ...]:
        """The sources that are videos."""
        return tuple([source for source in self.sources if isinstance(source, VideoSource)])


def _chat_template(directory: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the chat template of a checkpoint, see `PromptRenderer.from_pretrained`; None if it has none."""
    template = tokenizer.chat_template
    for file, is_required in (("chat_template.json", True), ("processor_config.json", False)):
        if not (path := directory / file).exists():
            continue
        found = read_object(path)
        kind = either(TEXT, OBJECT)
        check_fields(found, {"chat_template": kind if is_required else optional(kind)}, path, required=is_required)
        template = found.get("chat_template") or template
    return template.get("default") if isinstance(template, dict) else template


class PromptRenderer:
    """Makes prompts with a checkpoint's tokenizer and chat template.

    Attributes:
        tokenizer: a tokenizer of transformers.
        chat_template: Jinja text, or None where only `from_prompt` is used.
        access: what images may be read from where.
        image_token_id, video_token_id: of `<|image_pad|>` and `<|video_pad|>`.
        expander: puts images and videos in their place.
        max_tokens: of a prompt; texts that are longer for sure are refused before they are tokenised. None: any.
        max_images, max_videos: of a prompt; None: any number.
        video_options: of videos, where neither they nor their request say it.
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
        self.video_token_id: int = special[VIDEO_TOKEN]
        self.expander = Expander(tokenizer, self._tokenized, special, IMAGE_TOKEN, VIDEO_TOKEN)
        self.max_tokens: int | None = None
        self.max_images: int | None = None
        self.max_videos: int | None = None
        self.video_options = NO_OPTIONS
        self._tokenizing = threading.Lock()

    @classmethod
    def from_pretrained(cls, directory: str | PathLike[str], *, access: Access = LOCAL_ONLY) -> PromptRenderer:
        """Reads the tokenizer and the chat template of a checkpoint.

        The template is taken, as in the library's processors, from processor_config.json, else chat_template.json, else
        chat_template.jinja, else the tokenizer's configuration.

        Raises:
            ValueError: no directory, no tokenizer in it, a damaged file, or a tokenizer without the image tokens.
        """
        if not Path(directory).is_dir():
            raise ValueError(f"directory must be a checkpoint's directory, got {str(directory)!r}")
        check_tokenizer(Path(directory))
        try:
            tokenizer = _tokenizer_class(Path(directory)).from_pretrained(directory, local_files_only=True)
        except Exception as error:  # the library and its parser raise nearly anything
            raise ValueError(f"{directory} must hold a tokenizer: {type(error).__name__}: {error}") from error
        return cls(tokenizer, _chat_template(Path(directory), tokenizer), access=access)

    def image(self, value: Any, name: str = "image") -> ImageSource:
        """Takes hold of an image, see `images.read_image`."""
        return read_image(value, access=self.access, name=name)

    def video(self, part: Mapping[str, Any], name: str = "video", defaults: VideoOptions = NO_OPTIONS) -> VideoSource:
        """Takes hold of the video of a message's part, see `videos.read_video`; `defaults` are its request's."""
        part = typed(part)
        if part.get("type") not in VIDEO_TYPES:
            raise ValueError(f"{name} must be a dict of type {' or '.join(VIDEO_TYPES)}, got {short(part)}")
        value, options, metadata = video_value(part, name)
        asked = VideoOptions.checked(options, name).over(defaults).over(self.video_options)
        return read_video(value, asked, metadata, access=self.access, name=name)

    def alone(self, value: Any, mm_processor_kwargs: Mapping[str, Any] | None) -> Prompt:
        """An image, or the part of a message that is a video, and nothing else."""
        source: Source
        settings = read_settings(mm_processor_kwargs)
        if isinstance(value, Mapping):
            settings.check_videos(1, "video")
            source, token, token_id = self.video(value, "video", settings.of_video(0)), VIDEO_TOKEN, self.video_token_id
        else:
            source, token, token_id = self.image(value), IMAGE_TOKEN, self.image_token_id
        return Prompt(token, np.array([token_id], np.int32), (source,), (None,), settings.limits)

    def from_conversation(
        self,
        messages: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        *,
        settings: MediaSettings = NO_SETTINGS,
        template: Template = OWN_TEMPLATE,
        name: str = "conversation",
        image_name: str | None = None,
    ) -> Prompt:
        """Renders a conversation, by default up to where the assistant's next turn begins.

        Args:
            messages: of OpenAI's or Hugging Face's shape: `{"role": ..., "content": ...}`, the content a string or a
                list of parts `{"type": "text", "text": ...}`, `{"type": "image_url", "image_url": {"url": ...}}`,
                `{"type": "image", "image" | "url" | "path" | "base64": ...}`, `{"type": "image_pil", "image_pil":
                ...}`, `{"type": "video_url", "video_url": {"url": ...}}`, `{"type": "video", "video" | "url" | "path" |
                "base64": ...}`. Beside an image may stand "min_pixels" and "max_pixels", which come before those of
                the request, or "resized_height" and "resized_width"; beside a video what `videos.VideoOptions` names,
                and "video_metadata". An image or video may have a "uuid", the caller's own id of it. The role developer
                is system. What else a message may hold, such as "tool_calls", is the template's. An image's "detail" is
                ignored, with a warning. A part may leave out its type where one of its keys is named like it. Or a dict
                of "messages" and `TemplateOptions` that stand in place of `template`.
            settings: of this request.
            template: by which it is rendered.
            name: what error messages call the conversation, such as "conversations[2]".
            image_name: what they call its one image; None: "images[i]" of the conversation.

        Raises:
            ValueError: an empty conversation, another role, key or type of part, an unreadable image or video, a text
                that holds a placeholder, or a template that does not give every image and video its place.
        """
        if isinstance(messages, Mapping) and "messages" in messages:
            messages, template = _with_template(messages, template, name)
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise ValueError(f"{name} must be a list of messages, got {type(messages).__name__}")
        if not messages:
            raise ValueError(f"{name} must hold at least one message, got none")
        if (
            self.max_tokens is not None and (count := _parts(messages)) > self.max_tokens
        ):  # all but empty texts take a token
            limit = f"max_model_len = {self.max_tokens} tokens"
            raise ValueError(f"{name} must be short enough for {limit}, got {count} messages and parts")
        chat_template = self.chat_template if template.chat_template is None else template.chat_template
        if chat_template is None:
            raise ValueError(
                f"{name} must be given as a prompt, or with chat_template: this checkpoint has no chat template"
            )
        found: list[tuple[Source, str | None]] = []
        shown = image_name or f"{name} {{}}s[{{}}]"
        add = partial(self._add, shown=shown, settings=settings, found=found, numbers=Counter())
        listed = name if name.startswith("messages") else f"{name} messages"
        rendered = [read_message(message, f"{listed}[{i}]", add) for i, message in enumerate(messages)]
        settings.check_videos(sum([isinstance(source, VideoSource) for source, _ in found]), name)
        whose = "the checkpoint's chat template" if template.chat_template is None else "chat_template"
        tools: list[Any] = [dict(tool) for tool in template.tools or ()]
        by_hand = bool(tools) and "tools" not in chat_template
        if by_hand and template.chat_template is not None:
            raise ValueError(f"{name} tools must be left out: chat_template does not tell of them")
        try:
            text = self.tokenizer.apply_chat_template(
                written_out(rendered, tools) if by_hand else rendered,
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=bool(template.add_generation_prompt),
                continue_final_message=template.continue_final_message,
                tools=None if by_hand else tools or None,
                **(template.chat_template_kwargs or {}),
            )
        except Exception as error:  # templates come with checkpoints and raise what they like
            raise ValueError(f"{name} must suit {whose}, which failed: {error}") from error
        if not text:
            raise ValueError(f"{name} must suit {whose}, which made an empty prompt of it")
        prompt = self._prompt(cast(str, text), found, settings, name)
        return replace(prompt, opens_thought=thinks(chat_template) and is_opened(prompt.text))

    def from_prompt(self, prompt: str | Mapping[str, Any] | Sequence[int], *, name: str = "prompt") -> Prompt:
        """Takes a text or its tokens as they are, with one `<|image_pad|>` or `<|video_pad|>` at each one's place.

        Args:
            prompt: the text, or `{"prompt": str, "multi_modal_data": {"image": image or list, "video": video or list},
                "multi_modal_uuids": {"image": id or list, "video": ...}, "mm_processor_kwargs": {...}}`, or with token
                ids as "prompt_token_ids" in place of "prompt". A video is what a message's part has under "video", a
                pair of frames and their metadata, or such a part, with options beside it. A list of pictures is one
                video.
            name: what error messages call it, such as "prompts[2]".

        Raises:
            ValueError: an unknown key, an unreadable image or video, or as many placeholders as there are not of these.
        """
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if isinstance(prompt, list | tuple | np.ndarray):
            prompt = {"prompt_token_ids": prompt}
        if not isinstance(prompt, Mapping):
            raise ValueError(f"{name} must be a string, a dict or token ids, got {type(prompt).__name__}")
        check_keys(prompt, _PROMPT_KEYS, name)
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is not None and text is not None:
            raise ValueError(f"{name} must hold either 'prompt' or 'prompt_token_ids', got both")
        if ids is None and not isinstance(text, str):
            raise ValueError(f"{name} must hold a string as 'prompt', got {type(text).__name__}")
        settings = read_settings(prompt.get("mm_processor_kwargs"), f"{name} mm_processor_kwargs")
        found: list[tuple[Source, str | None]] = []
        for kind in ("image", "video"):
            media = listed(prompt, "multi_modal_data", kind, name) or []
            if kind == "video":
                settings.check_videos(len(media), name)
            uuids = listed(prompt, "multi_modal_uuids", kind, name)
            uuids = [None] * len(media) if uuids is None else uuids
            if len(uuids) != len(media):
                raise ValueError(
                    f"{name} must have one uuid for each {kind}, got {len(uuids)} for {len(media)} {kind}s"
                )
            for i, (one, uuid) in enumerate(zip(media, uuids, strict=True)):
                check_uuid(uuid, f"{name} multi_modal_uuids {kind}[{i}]", is_alone=one is None)
                where = f"{name} {kind}s[{i}]"
                if kind == "image":
                    found.append((self.image(one, where), uuid))
                else:
                    if is_with_metadata(one):
                        one = {"video": one[0], "video_metadata": one[1]}
                    part = one if isinstance(one, Mapping) else {"video": one}
                    found.append((self.video({"type": "video", **part}, where, settings.of_video(i)), uuid))
        if isinstance(ids, Sequence) and self.max_tokens is not None and len(ids) > self.max_tokens:
            limit = f"max_model_len = {self.max_tokens} tokens"
            raise ValueError(f"{name} prompt_token_ids must be short enough for {limit}, got {len(ids)}")
        given = cast(str, text) if ids is None else _token_ids(ids, len(self.tokenizer), f"{name} prompt_token_ids")
        result = self._prompt(given, found, settings, name)
        # A text may write about the tag. One that a template made ends with it.
        is_opened_last = self.chat_template is not None and result.text.rstrip().endswith(OPEN)
        return replace(result, opens_thought=is_opened_last and thinks(self.chat_template or ""))

    def _add(
        self,
        part: Mapping[str, Any],
        where: str,
        *,
        shown: str,
        settings: MediaSettings,
        found: list[tuple[Source, str | None]],
        numbers: Counter[bool],
    ) -> None:
        """Appends the image or video of a message's part to those before it, which `numbers` counts."""
        is_video = part["type"] in VIDEO_TYPES
        number = numbers[is_video]
        numbers[is_video] += 1
        uuid = part.get("uuid")
        if uuid is not None:
            check_uuid(uuid, f"{where} uuid", is_alone=not has_media(part))
        if is_video:
            source: Source = self.video(part, shown.format("video", number), settings.of_video(number))
        else:
            value, limits = image_value(part, where)
            source = image = read_image(value, access=self.access, name=shown.format("image", number))
            if limits:
                source = replace(image, limits=limits)
        found.append((source, uuid))

    def _prompt(
        self,
        given: str | npt.NDArray[np.int32],
        found: Sequence[tuple[Source, str | None]],
        settings: MediaSettings,
        name: str,
    ) -> Prompt:
        if isinstance(given, str):
            text, token_ids = given, self._tokenized(given, name)
        else:
            text, token_ids = str(self.tokenizer.decode(given)), given
        if not len(token_ids):
            raise ValueError(f"{name} must not be empty, got {text!r}")
        places = self.expander.pads(token_ids, name)
        ordered: list[tuple[int, Source, str | None]] = []
        for kind, what, token, token_id, most in (
            (ImageSource, "image", IMAGE_TOKEN, self.image_token_id, self.max_images),
            (VideoSource, "video", VIDEO_TOKEN, self.video_token_id, self.max_videos),
        ):
            mine = [one for one in found if isinstance(one[0], kind)]
            if most is not None and len(mine) > most:
                raise ValueError(f"{name} must hold at most {most} {what}s, got {len(mine)}")
            own = places[token_ids[places] == token_id]
            if len(own) != len(mine):
                raise ValueError(
                    f"{name} must hold one {token} for each {what}, got {len(own)} placeholders for {len(mine)} {what}s"
                )
            ordered += [(int(place), *one) for place, one in zip(own, mine, strict=True)]
        ordered.sort(key=operator.itemgetter(0))
        sources, uuids = tuple([source for _, source, _ in ordered]), tuple([uuid for _, _, uuid in ordered])
        return Prompt(text, token_ids, sources, uuids, settings.limits, name)

    def _tokenized(self, text: str, name: str) -> npt.NDArray[np.int32]:
        check_text(text, name)
        if self.max_tokens is not None and len(text) > self.max_tokens * self._longest_token:
            raise ValueError(
                f"{name} must be short enough for max_model_len = {self.max_tokens} tokens, "
                f"got a text of {len(text)} characters"
            )
        with self._tokenizing:  # a tokenizer takes one at a time
            backend = self.tokenizer.backend_tokenizer
            # Whoever used it before may have left other settings; the library, too, looks at them at each call.
            if backend.padding is not None:
                backend.no_padding()
            if backend.truncation is not None:
                backend.no_truncation()
            if backend.encode_special_tokens != self.tokenizer.split_special_tokens:
                backend.encode_special_tokens = self.tokenizer.split_special_tokens
            [encoding] = backend.encode_batch_fast([text])  # without offsets: half the time
            return np.asarray(encoding.ids, np.int32)

    @cached_property
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer adds tokens of its own to every text."""
        return bool(self.tokenizer.backend_tokenizer.num_special_tokens_to_add(False))

    @cached_property
    def _longest_token(self) -> int:
        """Characters that a token can stand for; added tokens may be longer than all others."""
        return max(map(len, self.tokenizer.get_vocab()))


def _token_ids(given: Any, known: int, name: str) -> npt.NDArray[np.int32]:
    """Ids of a prompt as they came, of a vocabulary of `known`.

    Raises:
        ValueError: they are not token ids of the vocabulary.
    """
    try:
        ids = np.asarray(given)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be token ids, got {short(given)}") from error
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a non-empty list of token ids, got {short(given)}")
    if ids.min() < 0 or ids.max() >= known:
        raise ValueError(f"{name} must be from 0 to {known - 1}, got {short(given)}")
    return ids.astype(np.int32)


def _parts(messages: Sequence[Any]) -> int:
    """Of all messages; a text is one."""
    contents = (message.get("content") if isinstance(message, Mapping) else None for message in messages)
    return sum(len(content) if isinstance(content, list | tuple) else 1 for content in contents)


def template_text(given: str | os.PathLike[str]) -> str:
    """A template, or that of the file which is named. (What comes from others must name none: it could be any file.)

    Raises:
      ValueError: the file cannot be read.
    """
    # Who misspells a path must not have it answered as a text.
    if isinstance(given, str) and any(sign in given for sign in "{}\n"):
        return given
    path = Path(given).expanduser()
    check_readable("chat_template", path)
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    check_text(text, f"chat_template {path}")
    return text


def _with_template(given: Mapping[str, Any], template: Template, name: str) -> tuple[Any, Template]:
    """Messages that stand in a dict, and the template that stands beside them, if there is one."""
    check_keys(given, ("messages", *TemplateOptions.__annotations__), name)
    own = {key: value for key, value in given.items() if key != "messages"}
    try:
        return given["messages"], Template(**own) if own else template
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


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


def check_tokenizer(directory: Path) -> None:
    """Looks at the files of a checkpoint's tokenizer, which takes no time.

    Raises:
        ValueError: there are none, or one is damaged.
    """
    if not any((directory / name).exists() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        raise ValueError(
            f"{directory} must hold a tokenizer, but has no tokenizer.json: copy it there from the model's page"
        )
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
