"""Prompts on the host: conversations and texts with images become token IDs with a placeholder per image.

A text is tokenized once, with one `<|image_pad|>` per image and one `<|video_pad|>` per video. Once sizes are known,
`PromptRenderer.expander` repeats the placeholders in the token IDs and adds the family's text between the chunks of a
video. Placeholders are special tokens, so the result equals tokenizing the expanded text, as the library's processors
do. `thinks` and `is_opened` detect prompts that open a model's reasoning.
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
from vlcache_jax.inputs.qwen3_5_template import FORMS, qwen3_5_template
from vlcache_jax.inputs.videos import NO_OPTIONS, VideoOptions, VideoSource, read_video

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<think>", "</think>"


def calls_in_xml(chat_template: str | None) -> bool:
    """Return whether a template's model writes tool calls in XML form, see `vlcache_jax.protocol.xml_tools`."""
    return chat_template is not None and "<function=" in chat_template


def thinks(chat_template: str) -> bool:
    """Return whether a template's model may reason: such a template removes the reasoning of earlier turns."""
    return CLOSE in chat_template


def is_opened(prompt: str) -> bool:
    """Return whether a prompt ends within reasoning, which the output then only closes, as for Qwen3-VL-Thinking.

    The last tag counts. A template with reasoning turned off writes an empty block, and a final message to continue may
    have begun to reason.
    """
    return prompt.rfind(OPEN) > max(prompt.rfind(CLOSE), prompt.rfind("<|im_end|>"))


# Arguments of the library's `apply_chat_template`, and names that it passes to the template.
_TEMPLATES_OWN = (
    "conversation", "documents", "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict",
    "return_tensors", "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "truncation",
)  # fmt: skip
_MAX_NAMES = 1024  # maximum of `chat_template_kwargs`
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")


type Source = ImageSource | VideoSource


class TemplateOptions(TypedDict, total=False):
    """Options of the chat template; see `Template`."""

    chat_template: str | os.PathLike[str] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | None


@dataclass(frozen=True)
class Template:
    """Chat template and its options.

    Attributes:
        chat_template: Jinja text; None: the checkpoint's template.
        chat_template_kwargs: variables of the template.
        add_generation_prompt: end the text where the assistant's turn begins; None: the opposite of
            `continue_final_message`.
        continue_final_message: end the text within the last message, so that the output continues it.
        tools: tools that the answer may call, see `messages.read_tools`.
        tool_choice: "auto", or "none" to omit the tools. Forcing a call is not the template's task.

    Raises:
        ValueError: an option has another type, or both `add_generation_prompt` and `continue_final_message` are set.
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
        if isinstance(kwargs, Mapping) and len(kwargs) > _MAX_NAMES:
            raise ValueError(f"chat_template_kwargs must have at most {_MAX_NAMES} names, got {len(kwargs)}")
        if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
            raise ValueError(f"chat_template_kwargs must be a dict with strings as keys, got {short(kwargs)}")
        for key in kwargs:
            if key in _TEMPLATES_OWN or key in TemplateOptions.__annotations__:
                raise ValueError(f"chat_template_kwargs must be variables of the template, got the reserved {key!r}")
        check_flags(continue_final_message=self.continue_final_message)
        if self.add_generation_prompt is None:
            object.__setattr__(self, "add_generation_prompt", not self.continue_final_message)
        check_flags(add_generation_prompt=self.add_generation_prompt)
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message are mutually exclusive, got both")
        if self.tool_choice not in (None, "auto", "none"):
            raise ValueError(f'tool_choice must be "auto" or "none", got {short(self.tool_choice)}')
        tools = read_tools(self.tools)
        check_marks(tools, "tools")
        object.__setattr__(self, "tools", tuple(tools) if self.tool_choice != "none" else ())


OWN_TEMPLATE = Template()


@dataclass(frozen=True, eq=False)
class Prompt:
    """Checked text, images and videos of a request, with nothing decoded.

    Attributes:
        text: text that the model sees, with one `<|image_pad|>` per image and one `<|video_pad|>` per video.
        token_ids: token IDs of `text`, not expanded, int32 [n].
        sources: images and videos in the order of the prompt.
        uuids: the caller's ID of each of them, or None.
        limits: min_pixels and max_pixels of the request; empty: the engine's.
        name: name in errors, such as "conversations[2]".
        opens_thought: True if the text ends within the reasoning before the answer.
    """

    text: str = field(repr=False)
    token_ids: npt.NDArray[np.int32] = field(repr=False)
    sources: tuple[Source, ...] = ()
    uuids: tuple[str | None, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    name: str = "prompt"
    opens_thought: bool = False

    def limits_of(self, source: Source) -> Mapping[str, int]:
        """Return the pixel limits of a source: its own, completed by the request's."""
        own = source.limits if isinstance(source, ImageSource) else {}
        return overrule(self.limits, own) if own else self.limits

    @property
    def images(self) -> tuple[ImageSource, ...]:
        """Sources that are images."""
        return tuple(source for source in self.sources if isinstance(source, ImageSource))

    @property
    def videos(self) -> tuple[VideoSource, ...]:
        """Sources that are videos."""
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
    """Renderer of prompts with a checkpoint's tokenizer and chat template.

    Attributes:
        chat_template: Jinja text, or None if only `from_prompt` is used.
        access: rules for reading files and URLs.
        image_token_id, video_token_id: IDs of `<|image_pad|>` and `<|video_pad|>`.
        max_tokens: maximum number of tokens of a prompt. Longer texts are refused before they are tokenized, if their
            number of characters shows it. None: no limit.
        max_images, max_videos: maximum numbers in a prompt; None: no limit.
        video_options: default options of videos.
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
        """Read the tokenizer and the chat template of a checkpoint.

        As in the library's processors, the template comes from the first of processor_config.json, chat_template.json,
        chat_template.jinja and the tokenizer's configuration that has one.

        Raises:
            ValueError: there is no such directory, it has no tokenizer, a file is damaged, or the tokenizer lacks the
                image tokens.
        """
        if not Path(directory).is_dir():
            raise ValueError(f"directory must be a checkpoint's directory, got {str(directory)!r}")
        check_tokenizer(Path(directory))
        try:
            tokenizer = _tokenizer_class(Path(directory)).from_pretrained(directory, local_files_only=True)
        except Exception as error:  # the library and its parser raise many types of errors
            raise ValueError(f"{directory} must have a valid tokenizer: {type(error).__name__}: {error}") from error
        return cls(tokenizer, _chat_template(Path(directory), tokenizer), access=access)

    def image(self, value: Any, name: str = "image") -> ImageSource:
        """Read an image, see `images.read_image`."""
        return read_image(value, access=self.access, name=name)

    def video(self, part: Mapping[str, Any], name: str = "video", defaults: VideoOptions = NO_OPTIONS) -> VideoSource:
        """Read the video in a part of a message, see `videos.read_video`; `defaults` are the request's options."""
        part = typed(part)
        if part.get("type") not in VIDEO_TYPES:
            raise ValueError(f"{name} must be a dict of type {' or '.join(VIDEO_TYPES)}, got {short(part)}")
        value, options, metadata = video_value(part, name)
        own = VideoOptions.checked(options, name).over(defaults).over(self.video_options)
        return read_video(value, own, metadata, access=self.access, name=name)

    def alone(self, value: Any, mm_processor_kwargs: Mapping[str, Any] | None) -> Prompt:
        """Return the prompt of only an image, or of a message's part that is a video."""
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
        """Render a conversation, by default up to where the assistant's next turn begins.

        Args:
            messages: messages in the format of OpenAI or Hugging Face, `{"role": ..., "content": ...}`. The content is
                a string or a list of parts `{"type": "text", "text": ...}`, `{"type": "image_url", "image_url": {"url":
                ...}}`, `{"type": "image", "image" | "url" | "path" | "base64": ...}`, `{"type": "image_pil",
                "image_pil": ...}`, `{"type": "video_url", "video_url": {"url": ...}}`, `{"type": "video", "video" |
                "url" | "path" | "base64": ...}`. An image may have "min_pixels" and "max_pixels", which take precedence
                over the request's, or "resized_height" and "resized_width". A video may have the keys of
                `videos.VideoOptions` and "video_metadata". Both may have a "uuid", the caller's ID. The role developer
                is treated as system. The template receives other keys of a message, such as "tool_calls". Of an image's
                "detail", only "low" has an effect. A part may omit its type if one of its keys has the type's name.
                Alternatively, a dict of "messages" and `TemplateOptions`, which replace `template`.
            name: name of the conversation in errors, such as "conversations[2]".
            image_name: name of its only image in errors; None: "images[i]" of the conversation.

        Raises:
            ValueError: the conversation is empty, a role, key or type of part is unknown, an image or video cannot be
                read, a text contains a placeholder, or the template does not render one placeholder per image and
                video.
        """
        if isinstance(messages, Mapping) and "messages" in messages:
            messages, template = _with_template(messages, template, name)
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise ValueError(f"{name} must be a list of messages, got {type(messages).__name__}")
        if not messages:
            raise ValueError(f"{name} must have at least one message, got none")
        if (
            self.max_tokens is not None and (count := _parts(messages)) > self.max_tokens
        ):  # each part, apart from empty texts, takes at least one token
            limit = f"max_model_len = {self.max_tokens} tokens"
            raise ValueError(f"{name} must be short enough for {limit}, got {count} messages and parts")
        chat_template = self.chat_template if template.chat_template is None else template.chat_template
        if chat_template is None:
            raise ValueError(
                f"{name} requires chat_template, because the checkpoint has none: set chat_template or pass a prompt"
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
            raise ValueError(f"{name} tools need a template that renders them, got a chat_template without tools")
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
        except Exception as error:  # templates come from checkpoints and callers, and raise any type of error
            raise ValueError(f"{name} must be valid for {whose}, which raised an error: {error}") from error
        if not text:
            raise ValueError(f"{name} must be valid for {whose}, which rendered an empty prompt")
        prompt = self._prompt(cast(str, text), found, settings, name)
        return replace(prompt, opens_thought=thinks(chat_template) and is_opened(prompt.text))

    def from_prompt(self, prompt: str | Mapping[str, Any] | Sequence[int], *, name: str = "prompt") -> Prompt:
        """Read a text or token IDs with one `<|image_pad|>` or `<|video_pad|>` per image or video.

        Args:
            prompt: the text, or `{"prompt": str, "multi_modal_data": {"image": image or list, "video": video or list},
                "multi_modal_uuids": {"image": ID or list, "video": ...}, "mm_processor_kwargs": {...}}`, or the same
                with token IDs as "prompt_token_ids" instead of "prompt". A video is a value of "video" in a message's
                part, a pair of frames and their metadata, or a part with options. A list of images is one video.
            name: name in errors, such as "prompts[2]".

        Raises:
            ValueError: a key is unknown, an image or video cannot be read, or the number of placeholders differs from
                that of images or videos.
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
            raise ValueError(f"{name} prompt and prompt_token_ids are mutually exclusive, got both")
        if ids is None and not isinstance(text, str):
            raise ValueError(f"{name} must have a string as 'prompt', got {type(text).__name__}")
        settings = read_settings(prompt.get("mm_processor_kwargs"), f"{name} mm_processor_kwargs")
        found: list[tuple[Source, str | None]] = []
        for kind in ("image", "video"):
            media = listed(prompt, "multi_modal_data", kind, name) or []
            if kind == "video":
                settings.check_videos(len(media), name)
            uuids = listed(prompt, "multi_modal_uuids", kind, name)
            uuids = [None] * len(media) if uuids is None else uuids
            if len(uuids) != len(media):
                raise ValueError(f"{name} must have one uuid per {kind}, got {len(uuids)} for {len(media)} {kind}s")
            for i, (one, uuid) in enumerate(zip(media, uuids, strict=True)):
                check_uuid(uuid, f"{name} multi_modal_uuids {kind}[{i}]", is_alone=one is None)
                item_name = f"{name} {kind}s[{i}]"
                if kind == "image":
                    found.append((self.image(one, item_name), uuid))
                else:
                    if is_with_metadata(one):
                        one = {"video": one[0], "video_metadata": one[1]}
                    part = one if isinstance(one, Mapping) else {"video": one}
                    found.append((self.video({"type": "video", **part}, item_name, settings.of_video(i)), uuid))
        if isinstance(ids, Sequence) and self.max_tokens is not None and len(ids) > self.max_tokens:
            limit = f"max_model_len = {self.max_tokens} tokens"
            raise ValueError(f"{name} prompt_token_ids must be short enough for {limit}, got {len(ids)}")
        given = cast(str, text) if ids is None else _token_ids(ids, len(self.tokenizer), f"{name} prompt_token_ids")
        result = self._prompt(given, found, settings, name)
        # A text may mention the tag. A text that a template rendered ends with it.
        may_think = thinks(self.chat_template or "") or self.tokenizer.backend_tokenizer.token_to_id(CLOSE) is not None
        return replace(result, opens_thought=may_think and result.text.rstrip().endswith(OPEN))

    def _add(
        self,
        part: Mapping[str, Any],
        name: str,
        *,
        shown: str,
        settings: MediaSettings,
        found: list[tuple[Source, str | None]],
        numbers: Counter[bool],
    ) -> None:
        """Append the image or video in a message's part to `found`; `numbers` counts images and videos."""
        is_video = part["type"] in VIDEO_TYPES
        number = numbers[is_video]
        numbers[is_video] += 1
        uuid = part.get("uuid")
        if uuid is not None:
            check_uuid(uuid, f"{name} uuid", is_alone=not has_media(part))
        if is_video:
            source: Source = self.video(part, shown.format("video", number), settings.of_video(number))
        else:
            value, limits = image_value(part, name)
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
        for kind, what, token, token_id, max_count in (
            (ImageSource, "image", IMAGE_TOKEN, self.image_token_id, self.max_images),
            (VideoSource, "video", VIDEO_TOKEN, self.video_token_id, self.max_videos),
        ):
            mine = [one for one in found if isinstance(one[0], kind)]
            if max_count is not None and len(mine) > max_count:
                raise ValueError(
                    f"{name} must have at most {max_count} {what}s, got {len(mine)}: raise limit_mm_per_prompt"
                )
            own = places[token_ids[places] == token_id]
            if len(own) != len(mine):
                raise ValueError(
                    f"{name} must have one {token} per {what}, got {len(own)} placeholders for {len(mine)} {what}s"
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
        with self._tokenizing:  # a tokenizer is not thread-safe
            backend = self.tokenizer.backend_tokenizer
            # Other users of the tokenizer may have left other settings; the library also checks them at each call.
            if backend.padding is not None:
                backend.no_padding()
            if backend.truncation is not None:
                backend.no_truncation()
            if backend.encode_special_tokens != self.tokenizer.split_special_tokens:
                backend.encode_special_tokens = self.tokenizer.split_special_tokens
            [encoding] = backend.encode_batch_fast([text])  # without offsets, in half the time
            return np.asarray(encoding.ids, np.int32)

    @cached_property
    def adds_special_tokens(self) -> bool:
        """True if the tokenizer adds special tokens to every text."""
        return bool(self.tokenizer.backend_tokenizer.num_special_tokens_to_add(False))

    @cached_property
    def _longest_token(self) -> int:
        """Maximum characters of a token, added tokens included."""
        return max(map(len, self.tokenizer.get_vocab()))


def _token_ids(given: Any, known: int, name: str) -> npt.NDArray[np.int32]:
    """Return the token IDs of a prompt as int32 [n]; the vocabulary has `known` tokens.

    Raises:
        ValueError: they are not token IDs of the vocabulary.
    """
    try:
        ids = np.asarray(given)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be token ids, got {short(given)}") from error
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a non-empty list of token ids, got {short(given)}")
    if (wrong := ids[(ids < 0) | (ids >= known)]).size:
        raise ValueError(f"{name} must be token ids from 0 to {known - 1}, got {wrong[0]}")
    return ids.astype(np.int32)


def _parts(messages: Sequence[Any]) -> int:
    """Return the number of parts of all messages; a text counts as one."""
    contents = (message.get("content") if isinstance(message, Mapping) else None for message in messages)
    return sum(len(content) if isinstance(content, list | tuple) else 1 for content in contents)


def template_text(given: str | os.PathLike[str]) -> str:
    """Return a template, the content of the file that is named, or our template of a form in `qwen3_5_template`.

    Requests of clients must not name files, since any file could be named.

    Raises:
      ValueError: the file cannot be read.
    """
    # A misspelled path must not be rendered as a template, so only Jinja syntax or several lines are a text.
    if isinstance(given, str) and any(sign in given for sign in "{}\n"):
        return given
    if given in FORMS:
        return qwen3_5_template(str(given))
    path = Path(given).expanduser()
    check_readable(f"chat_template must be one of {', '.join(sorted(FORMS))}, or", path)
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    check_text(text, f"chat_template {path}")
    return text


def _with_template(given: Mapping[str, Any], template: Template, name: str) -> tuple[Any, Template]:
    """Return the messages in a dict, and the template next to them if there is one."""
    check_keys(given, ("messages", *TemplateOptions.__annotations__), name)
    own = {key: value for key, value in given.items() if key != "messages"}
    try:
        return given["messages"], Template(**own) if own else template
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


def _tokenizer_class(directory: Path) -> Any:
    """Return the library's class for a checkpoint's tokenizer.

    `AutoTokenizer` chooses the same class, but imports torch if it is installed, which takes ten seconds. It is used
    only if the checkpoint names another class than those of these models, or none.
    """
    # Without this, importing the library logs a warning if torch is missing.
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
    """Check the files of a checkpoint's tokenizer, which takes no time.

    Raises:
        ValueError: there is no tokenizer, or a file is damaged.
    """
    if not any((directory / name).exists() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        raise ValueError(f"{directory} has no tokenizer: copy tokenizer.json there from the model's page")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (path := directory / name).exists():
            read_object(path)
    # Do not parse megabytes of vocabulary twice: the first bytes show another kind of file.
    if (path := directory / "tokenizer.json").exists():
        if not path.is_file():
            raise ValueError(f"{path} must be a regular file with JSON")
        with path.open("rb") as file:
            if not (begin := file.read(64)).lstrip().startswith(b"{"):
                raise ValueError(f"{path} must be a JSON file that contains an object, got {begin!r}")
