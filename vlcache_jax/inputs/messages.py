"""Messages and their parts: reading and checks of text, images, videos, tools and `mm_processor_kwargs`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from vlcache_jax.common.checks import check_flags, check_text, exceeds, short, unknown
from vlcache_jax.common.json_files import parse_json
from vlcache_jax.common.vllm_compat import warn
from vlcache_jax.inputs.images import LibraryItemRef
from vlcache_jax.inputs.processor import OWN_LIMITS, check_limits, check_own_limits
from vlcache_jax.inputs.videos import ALIASES, NO_OPTIONS, OPTIONS, SAMPLING, VideoOptions, plain

_PIXELS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_KNOWN = (*_PIXELS, "size", *SAMPLING)
_MAX_VIDEOS = 1024  # maximum of a request with an option per video


@dataclass(frozen=True)
class MediaSettings:
    """Settings of the images and videos of a request, a call or an engine.

    Attributes:
        limits: the given ones of min_pixels and max_pixels of images.
        videos: options of all videos; those in a video's part of a message take precedence.
        each: options of each video in order; None: `videos` applies to all.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    videos: VideoOptions = NO_OPTIONS
    each: tuple[VideoOptions, ...] | None = None

    def of_video(self, number: int) -> VideoOptions:
        """Return the options of a request's video."""
        return self.each[number] if self.each is not None and number < len(self.each) else self.videos

    def check_videos(self, count: int, name: str) -> None:
        """Raise a ValueError if the settings do not fit a request with `count` videos; `name` is its name in errors."""
        if self.each is not None and len(self.each) != count:
            raise ValueError(
                f"{name} mm_processor_kwargs fps must be one number, or a list with one for each video, "
                f"got {len(self.each)} for {count} videos"
            )


NO_SETTINGS = MediaSettings()


def read_settings(given: Any, name: str = "mm_processor_kwargs", *, of_request: bool = True) -> MediaSettings:
    """Return the settings of `mm_processor_kwargs`; None has none.

    Args:
        given: min_pixels and max_pixels of images, or the same limits as size={"shortest_edge": ..., "longest_edge":
            ...}; and the keys of `videos.SAMPLING` for videos, such as fps. As in Qwen's utility, fps may be a list
            with one value per video.
        name: name of the settings in errors.
        of_request: True if they belong to one request, so that fps may be a list.

    Raises:
        ValueError: a key is unknown, a value has another type or is out of bounds, or a limit is set in both spellings.
    """
    if given is None:
        return NO_SETTINGS
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must be a dict with {', '.join(_KNOWN)}, got {type(given).__name__} {short(given)}")
    for key in given:
        if key not in _KNOWN:
            raise ValueError(f"{name}: {unknown(key, _KNOWN)}")
    limits = {key: given[key] for key in _PIXELS if given.get(key) is not None}
    if given.get("size") is not None:
        limits = _size(given["size"], limits, name)
    sampling = {key: plain(given[key]) for key in SAMPLING if key in given}
    each = None
    if of_request and isinstance(rates := sampling.get("fps"), list):
        if len(rates) > _MAX_VIDEOS:
            raise ValueError(f"{name} fps must have at most {_MAX_VIDEOS} entries, got {len(rates)}")
        each = tuple(VideoOptions.checked(sampling | {"fps": fps}, name) for fps in sampling.pop("fps"))
    return MediaSettings(check_limits(limits, name), VideoOptions.checked(sampling, name), each)


def _size(size: Any, limits: Mapping[str, int], name: str) -> dict[str, int]:
    """Return the limits in `size`."""
    edges = tuple(_PIXELS.values())
    if not isinstance(size, Mapping) or not size or not set(size) <= set(edges):
        raise ValueError(f"{name} size must be a dict with {' and '.join(edges)}, in pixels of area, got {short(size)}")
    if limits:
        raise ValueError(f"{name} size and {' or '.join(_PIXELS)} are mutually exclusive, got both")
    return {pixels: size[edge] for pixels, edge in _PIXELS.items() if edge in size}


MAX_TOOLS = 1024
"""Maximum number of functions in a conversation."""
_MAX_CHARACTERS = 1 << 20  # maximum of one function

# Qwen2.5's default system message, and its description of tools.
_SYSTEM = "You are a helpful assistant."
_OFFER = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def read_tools(given: Any) -> list[dict[str, Any]]:
    """Return tools in the form that chat templates use.

    Args:
      given: a list of `{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`,
        or of `{"type": "function", "name": ..., ...}`, as in requests to `/v1/responses`. None: no tools.

    Raises:
      ValueError: `given` is not such a list.
    """
    if not isinstance(given, Sequence | None) or isinstance(given, str | bytes):
        raise ValueError(f"tools must be a list, got {short(given)}")
    if len(given or ()) > MAX_TOOLS:
        raise ValueError(f"tools must have at most {MAX_TOOLS} entries, got {len(given or ())}")
    tools = [_read(tool, f"tools[{i}]") for i, tool in enumerate(given or ())]
    counts = Counter(tool_names(tools))
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise ValueError(f"tools must have unique names, got {short(twice)} twice")
    return tools


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the function names of tools that `read_tools` has read."""
    return [tool["function"]["name"] for tool in tools]


def _read(tool: Any, name: str) -> dict[str, Any]:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise ValueError(f'{name} must be an object of the type "function", got {short(tool)}')
    if exceeds(tool, _MAX_CHARACTERS):
        raise ValueError(f"{name} must have at most {_MAX_CHARACTERS} characters, got {short(tool)}")
    if "function" not in tool:
        tool = {"function": {key: value for key, value in tool.items() if key != "type"}}
    function = tool["function"]
    if not isinstance(function, Mapping):
        raise ValueError(f"{name}.function must be an object, got {short(function)}")
    function = {key: value for key, value in function.items() if value is not None}
    called = function.get("name")
    if not (isinstance(called, str) and called and called.isprintable() and not set(called) & set('"\\')):
        raise ValueError(f"{name}.function.name must be a name, got {short(called)}")
    if "description" in function:
        check_text(function["description"], f"{name}.function.description")
    if not isinstance(function.get("parameters", {}), Mapping):
        raise ValueError(f"{name}.function.parameters must be a JSON schema, got {short(function['parameters'])}")
    check_flags(**{f"{name}.function.strict": function.get("strict", False)})
    read = {"type": "function", **tool, "function": function}
    try:
        json.dumps(read, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be JSON: {str(error) or type(error).__name__}") from error
    return read


def written_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation with its tools, calls and results as text, for a template without tools.

    The text is that of Qwen2.5's template. Qwen2.5-VL is based on Qwen2.5, but its own template has no tools.

    Args:
      messages: results of `read_message`.
      tools: results of `read_tools`.
    """
    first, *others = (
        messages if messages[0]["role"] == "system" else [{"role": "system", "content": _SYSTEM}, *messages]
    )
    offered = _OFFER.format("\n".join(_json(tool) for tool in tools))
    rendered: list[dict[str, Any]] = [{**first, "content": _joined(first["content"], offered)}]
    before = None
    for message in others:
        role = message["role"]
        if role == "tool":
            result = _joined(_joined("<tool_response>\n", message["content"]), "\n</tool_response>")
            if before == "tool":
                rendered[-1]["content"] = _joined(_joined(rendered[-1]["content"], "\n"), result)
            else:
                rendered.append({"role": "user", "content": result})
        else:
            calls = [call.get("function", call) for call in message.get("tool_calls", ())]
            texts = [
                f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {_json(call["arguments"])}}}\n</tool_call>'
                for call in calls
            ]
            content = message["content"]
            if texts:
                content = _joined(content, "\n" * bool(content) + "\n".join(texts))
            own = {key: value for key, value in message.items() if key != "tool_calls"}
            rendered.append({**own, "content": content})
        before = role
    return rendered


def _joined(first: Any, second: Any) -> Any:
    """Return the concatenation of two contents, each a text or parts."""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    parts = [[{"type": "text", "text": one}] if isinstance(one, str) else list(one) for one in (first, second)]
    return parts[0] + parts[1]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


IMAGE_TOKEN = "<|image_pad|>"
VIDEO_TOKEN = "<|video_pad|>"
IMAGE_TYPES = ("image", "image_url", "image_pil")
VIDEO_TYPES = ("video", "video_url")
_IMAGE_KEYS = ("image", "image_pil", "url", "path", "base64")
_VIDEO_KEYS = ("video", "url", "path", "base64")
_MEDIA_KEYS = (*_IMAGE_KEYS, *_VIDEO_KEYS, "image_url", "video_url", "library")
_UNTYPED = ("text", *IMAGE_TYPES, *VIDEO_TYPES)  # keys that give the type of a part without `type`

FILES = "files"
"""Library of the files that clients upload to a server."""
_FILE = "file-id:"  # prefix of a URL that names such a file

_MAX_CALLS = 4096  # maximum in one message
DETAILS = ("auto", "low", "high", "original")
_LOW = 512 * 512  # maximum pixels of an image with `detail="low"`, as in OpenAI's API

MAX_UUID = 1024  # maximum characters of a caller's image ID
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Keys of a message, in addition to role and content, that chat templates use.
_TEMPLATES = ("name", "tool_call_id", "tool_calls", "reasoning", "reasoning_content", "refusal")
_MESSAGE_KEYS = ("role", "content", *_TEMPLATES)
# Types of text parts, and the key of their text.
TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "thinking": "thinking", "refusal": "refusal"}


def read_message(message: Any, name: str, add: Callable[[Mapping[str, Any], str], None]) -> dict[str, Any]:
    """Check a message, and return it in the form that chat templates use.

    Args:
        message: a message with role and content.
        name: name of the message in errors.
        add: function that is called with each image or video part, and its name in errors.

    Raises:
        ValueError: a role, key or type of part is unknown, or a text contains a placeholder.
    """
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must be a dict with role and content, got {type(message).__name__}")
    # Some clients send empty values for unused keys, such as "tool_calls": [].
    message = {key: value for key, value in message.items() if key in _MESSAGE_KEYS or value not in (None, [], {})}
    check_keys(message, _MESSAGE_KEYS, name)
    given, content = message.get("role"), message.get("content")
    if not (isinstance(given, str) and given in ROLES):
        raise ValueError(f"{name} must have the role {', '.join(ROLES)}, got {short(given)}")
    # Keys in addition to the content that templates use.
    checked: dict[str, Any] = {"role": ROLES[given]}
    for key in _TEMPLATES:
        if not message.get(key):
            continue
        if key == "tool_calls":
            checked[key] = _tool_calls(message[key], name)
        else:
            check_text(message[key], f"{name} {key}")
            checked[key] = message[key]
        check_marks(checked[key], f"{name} {key}")
    if reasoning := checked.get("reasoning") or checked.get("reasoning_content"):  # a template uses one of the names
        checked |= {"reasoning": reasoning, "reasoning_content": reasoning}
    # The content is empty, a text, or a list of parts. `add` receives images and videos.
    if content in (None, []) and checked.keys() & {"tool_calls", "reasoning", "refusal"}:
        content = ""
    if isinstance(content, str):
        return checked | {"content": _plain_text(content, name)}
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise ValueError(f"{name} must have a string or a non-empty list of parts as content, got {short(content, 80)}")
    parts: list[dict[str, str]] = []
    for i, part in enumerate(content):
        where = f"{name} content[{i}]"
        part = part if isinstance(part, dict) and part.get("type") is not None else typed(part)
        kind = part.get("type") if isinstance(part, (dict, Mapping)) else None  # dict first: the fast case
        if isinstance(part, str):
            parts.append({"type": "text", "text": _plain_text(part, where)})
        elif isinstance(kind, str) and kind in TEXT_KEYS:
            check_keys(part, ("type", TEXT_KEYS[kind]), where)
            parts.append({"type": "text", "text": _plain_text(part.get(TEXT_KEYS[kind]), where)})
        elif kind in IMAGE_TYPES or kind in VIDEO_TYPES or kind == "input_image":
            add(_as_image_url(part, where) if kind == "input_image" else part, where)
            parts.append({"type": "video" if kind in VIDEO_TYPES else "image"})
        else:
            got = f"type {short(kind)}" if isinstance(part, Mapping) else type(part).__name__
            if isinstance(part, Mapping) and kind is None:
                got = f'no type with the keys {short(list(part))}: add "type"'
            known = ", ".join((*TEXT_KEYS, "input_image", *IMAGE_TYPES, *VIDEO_TYPES[:-1]))
            raise ValueError(f"{where} must be a dict of type {known} or {VIDEO_TYPES[-1]}, or a string, got {got}")
    return checked | {"content": parts}


def typed(part: Any) -> Any:
    """Return a part with its type, if it has none but exactly one key that gives it; otherwise unchanged."""
    if not isinstance(part, Mapping) or part.get("type") is not None:
        return part
    kinds = [kind for kind in _UNTYPED if part.get(kind) is not None]
    return {**part, "type": kinds[0]} if len(kinds) == 1 else part


def _tool_calls(given: Any, name: str) -> list[dict[str, Any]]:
    """Return tool calls for templates: arguments as objects, rather than as JSON text as in OpenAI's messages."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ValueError(f"{name} tool_calls must be a list, got {short(given)}")
    if len(given) > _MAX_CALLS:
        raise ValueError(f"{name} tool_calls must have at most {_MAX_CALLS} entries, got {len(given)}")
    calls: list[dict[str, Any]] = []
    for i, call in enumerate(given):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError(f"{name} tool_calls[{i}] must be a dict with a function, got {short(call)}")
        check_text(function.get("name") or None, f"{name} tool_calls[{i}]", "a dict with the name of a function")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, Mapping):  # invalid output of a model must not end the conversation
            warn(f"{name} tool_calls[{i}] arguments should be a JSON object: they are ignored")
            arguments = {}
        parsed = {**function, "arguments": arguments}
        calls.append({**call, "function": parsed} if "function" in call else parsed)
    return calls


def check_marks(value: Any, name: str) -> None:
    """Raise a ValueError if any text in a nested value contains a placeholder."""
    pending = [value]  # no recursion: the nesting may exceed Python's limit
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            _plain_text(one, name)
        elif isinstance(one, Mapping):
            pending += [*one.keys(), *one.values()]
        elif isinstance(one, Sequence) and not isinstance(one, bytes):
            pending += one


def _as_image_url(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert an image part of OpenAI's newer form to the older one."""
    part = {key: value for key, value in part.items() if value is not None}
    if "file_id" in part:
        check_keys(part, ("type", "file_id", "detail"), name)
        _check_uploaded(part.get("detail"), name)
        return {"type": "image", "library": FILES, "id": part["file_id"]}
    check_keys(part, ("type", "image_url", "detail", "uuid", "file_id"), name)
    url = part.get("image_url")
    if not isinstance(url, str | None):
        raise ValueError(f"{name} must have a string as image_url, got {type(url).__name__}")
    return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail")}, "uuid": part.get("uuid")}


def image_value(part: Mapping[str, Any], name: str) -> tuple[Any, dict[str, int]]:
    """Return the argument of `read_image` in an image part of either form, and the pixel limits in the part."""
    limits = {} if part.keys().isdisjoint(OWN_LIMITS) else check_own_limits(part, name)
    if part.get("library") is not None or part.get("id") is not None:
        return _named(part, name), {}
    if part["type"] == "image_url":
        check_keys(part, ("type", "image_url", "uuid", *OWN_LIMITS), name)
        value, detail = part.get("image_url"), None
        if isinstance(value, Mapping):
            check_keys(value, ("url", "detail"), f"{name} image_url")
            detail, value = value.get("detail"), value.get("url")
            limits = _detailed(detail, limits, name)
        if not isinstance(value, str):
            raise ValueError(f"{name} must have a string as image_url or as its url, got {type(value).__name__}")
        if value.startswith(_FILE):
            _check_uploaded(detail, name)
            return _named({"library": FILES, "id": value.removeprefix(_FILE)}, name), {}
        return value, limits
    check_keys(part, ("type", "uuid", *_IMAGE_KEYS, *OWN_LIMITS), name)
    return _only(part, _IMAGE_KEYS, name), limits


def _detailed(detail: Any, limits: dict[str, int], name: str) -> dict[str, int]:
    """Return the limits of an image with that of OpenAI's `detail`; its own limits take precedence."""
    if detail not in (None, *DETAILS):
        raise ValueError(f"{name} image_url.detail must be one of {', '.join(DETAILS)}, got {short(detail)}")
    if detail != "low" or not limits.keys().isdisjoint(("max_pixels", "resized_height")):
        return limits
    return {**limits, "max_pixels": max(_LOW, limits.get("min_pixels", 0))}


def _check_uploaded(detail: Any, name: str) -> None:
    """Raise a ValueError if `detail` would change the size of an uploaded image."""
    if detail not in (None, "auto", "high", "original"):
        raise ValueError(
            f"{name} detail must be auto, high or original for an uploaded image, which keeps its stored size, "
            f"got {short(detail)}"
        )


def _named(part: Mapping[str, Any], name: str) -> LibraryItemRef:
    """Return the library item that a part names. The library has its size."""
    part = {key: value for key, value in part.items() if value is not None}
    check_keys(part, ("type", "library", "id"), f"{name} (an item of a library)")
    for key in ("library", "id"):
        check_text(part.get(key) or None, f"{name} {key}", "a non-empty string")
    return LibraryItemRef(part["library"], part["id"])


def _only(part: Mapping[str, Any], keys: Sequence[str], name: str) -> Any:
    """Return the value of the only one of the keys that is set."""
    given = [key for key in keys if part.get(key) is not None]
    if len(given) != 1:
        raise ValueError(f"{name} must have exactly one of {', '.join(keys)}, got {', '.join(given) or 'none'}")
    value = part[given[0]]
    if given[0] == "base64" and isinstance(value, str) and not value.startswith("data:"):
        return f"data:;base64,{value}"
    return value


def video_value(part: Mapping[str, Any], name: str) -> tuple[Any, dict[str, Any], Any]:
    """Return the arguments of `read_video` in a video part of either form: the video, its options, its metadata."""
    shared = ("type", "uuid", *OPTIONS, *ALIASES, "video_metadata")
    for alias, own in ALIASES.items():
        if alias in part and own in part:
            raise ValueError(f"{name} {own} and {alias} are mutually exclusive, got both")
    options = {ALIASES.get(key, key): part[key] for key in (*OPTIONS, *ALIASES) if key in part}
    if part["type"] == "video_url":
        check_keys(part, ("video_url", *shared), name)
        value = part.get("video_url")
        if isinstance(value, Mapping):
            check_keys(value, ("url",), f"{name} video_url")
            value = value.get("url")
        if not isinstance(value, str):
            raise ValueError(f"{name} must have a string as video_url or as its url, got {type(value).__name__}")
        return value, options, part.get("video_metadata")
    check_keys(part, (*_VIDEO_KEYS, *shared), name)
    return _only(part, _VIDEO_KEYS, name), options, part.get("video_metadata")


def listed(prompt: Mapping[str, Any], key: str, kind: str, name: str) -> list[Any] | None:
    """Return the images or videos, or their IDs, under `key` of a prompt as a list; None if there are none."""
    data = prompt.get(key)
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} {key} must be a dict with 'image' or 'video', got {type(data).__name__}")
    check_keys(data, ("image", "video"), f"{name} {key}")
    value = data.get(kind)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        return [value]
    are_frames = [isinstance(one, Image.Image) or (isinstance(one, np.ndarray) and one.ndim < 4) for one in value]
    is_one = kind == "video" and value and (all(are_frames) or is_with_metadata(value))
    return [value] if is_one else list(value)


def is_with_metadata(value: Any) -> bool:
    """Return whether a video is a pair of frames and metadata, as in vLLM."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping) and "type" not in value[1]


def check_keys(given: Mapping[str, Any], known: Sequence[str], name: str) -> None:
    """Raise a ValueError that begins with `name` if a key is unknown."""
    for key in given:
        if key not in known:
            raise ValueError(f"{name}: {unknown(key, known)}")


def has_media(part: Mapping[str, Any]) -> bool:
    """Return whether an image or video part has a value."""
    values = (part.get(key) for key in _MEDIA_KEYS)
    return any((one.get("url") if isinstance(one, Mapping) else one) is not None for one in values)


def check_uuid(uuid: Any, name: str, *, is_alone: bool) -> None:
    """Raise a ValueError unless `uuid` is None or an ID with an image; vLLM also accepts an ID alone (`is_alone`)."""
    if not (uuid is None or (isinstance(uuid, str) and uuid)):
        raise ValueError(f"{name} must be a non-empty string or None, got {short(uuid)}")
    if uuid is not None:
        check_text(uuid, name)
        if len(uuid) > MAX_UUID:
            raise ValueError(f"{name} must have at most {MAX_UUID} characters, got {short(uuid)}")
        if is_alone:
            raise ValueError(f"{name} needs its image or video, got {short(uuid)} alone")


def _plain_text(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{name} must have a string as text, got {type(text).__name__}")
    for token in (IMAGE_TOKEN, VIDEO_TOKEN):
        if token in text:
            raise ValueError(f"{name} must not contain {token}, the placeholder of an image or video")
    return text
