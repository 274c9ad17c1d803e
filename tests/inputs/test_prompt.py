import base64
import copy
import io
import json
import math
import re
import shutil

import numpy as np
import pytest
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from vlcache_jax.inputs.access import Access
from vlcache_jax.inputs.messages import read_settings
from vlcache_jax.inputs.processor import ImageProcessor
from vlcache_jax.inputs.prompt import IMAGE_TOKEN, VIDEO_TOKEN, PromptRenderer, Template, template_text

# In the manner of the published template: a system turn of its own where none is given.
QWEN2_5_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' or 'video' in part -%}
{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
# No system turn of its own, parts through a macro, strict about roles.
QWEN3_TEMPLATE = """\
{%- macro render(content) -%}
{%- if content is string -%}
{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if 'image' in part or 'image_url' in part or part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'video' in part or part.type == 'video' -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('System message must be at the beginning.') }}
{%- endif -%}
{{ '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    IMAGE_TOKEN,
    VIDEO_TOKEN,
]
FAMILIES = {
    "qwen2": (  # its template is the same
        "Qwen2VLProcessor",
        QWEN2_5_TEMPLATE,
        {"patch_size": 14, "min_pixels": 784 * 4, "max_pixels": 784 * 64},
    ),
    "qwen2_5": (
        "Qwen2_5_VLProcessor",
        QWEN2_5_TEMPLATE,
        {"patch_size": 14, "min_pixels": 784 * 4, "max_pixels": 784 * 64},
    ),
    "qwen3": (
        "Qwen3VLProcessor",
        QWEN3_TEMPLATE,
        {"patch_size": 16, "min_pixels": 1024 * 4, "max_pixels": 1024 * 64},
    ),
}


def make_tokenizer(special=SPECIAL):
    """Bytes 0-255 without merges, then the special tokens: 264 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[token for token in special if token not in ("<|im_end|>", "<|endoftext|>")],
    )


def make_oracle(base, image_processor, tokenizer, template):
    """The family's processor without its video processor, which would need torchvision."""

    class Oracle(base):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
            self.image_token, self.video_token = IMAGE_TOKEN, VIDEO_TOKEN
            self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
            self.video_token_id = tokenizer.convert_tokens_to_ids(VIDEO_TOKEN)
            transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    return Oracle(image_processor, tokenizer, template)


class Family:
    def __init__(self, name, directory):
        base, template, settings = FAMILIES[name]
        settings = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2, **settings}
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(directory)
        (directory / "chat_template.jinja").write_text(template)
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
        self.renderer = PromptRenderer.from_pretrained(directory)
        self.processor = ImageProcessor.from_pretrained(directory)
        self.library_images = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
        self.library = make_oracle(getattr(transformers, base), self.library_images, tokenizer, template)

    def expanded(self, prompt):
        """Our ids, and what the library would call pixel_values."""
        patches = [self.processor.patches(image.decode(), prompt.limits) for image in prompt.images]
        counts = [self.processor.num_tokens(grid) for _, grid in patches]
        token_ids, starts, lengths = self.renderer.expander.expand(prompt.token_ids, counts)
        return token_ids, starts, lengths, [self.processor.pixel_values(patch) for patch in patches]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return Family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Family("qwen3", tmp_path_factory.mktemp("renderer")).renderer


def picture(height, width, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


FIRST, SECOND, THIRD = picture(89, 109), picture(140, 84, 1), picture(60, 60, 2)


def text(value):
    return {"type": "text", "text": value}


def image(value):
    return {"type": "image", "image": value}


CONVERSATIONS = {
    "text only": [{"role": "user", "content": "Hello, Wörld! 你好"}],
    "image first": [{"role": "user", "content": [image(FIRST), text("What is this?")]}],
    "image last": [{"role": "user", "content": [text("What is this? "), image(FIRST)]}],
    "image alone": [{"role": "user", "content": [image(FIRST)]}],
    "text between": [{"role": "user", "content": [text("a"), image(FIRST), text("\n b "), image(SECOND), text("c")]}],
    "images side by side": [{"role": "user", "content": [image(FIRST), image(SECOND), image(THIRD), text("Which?")]}],
    "the same image twice": [{"role": "user", "content": [image(FIRST), text("and"), image(FIRST)]}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [image(SECOND), text("?")]}],
    "system of parts": [
        {"role": "system", "content": [text("Be "), text("brief.")]},
        {"role": "user", "content": "Hello <|im_end|> there"},
    ],
    "turns": [
        {"role": "user", "content": [image(SECOND), text("First?")]},
        {"role": "assistant", "content": "A picture."},
        {"role": "user", "content": [text("And "), image(THIRD), text(" this?")]},
        {"role": "assistant", "content": [text("Another.")]},
        {"role": "user", "content": "  Which was nicer?\n"},
    ],
}


PARTS = "input_image, image, image_url, image_pil, video or video_url, or a string"

# --- parity with the library -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_conversations_equal_the_librarys_processor(family, case):
    prompt = family.renderer.from_conversation(CONVERSATIONS[case])
    token_ids, starts, lengths, pixels = family.expanded(prompt)
    expected = family.library.apply_chat_template(
        copy.deepcopy(CONVERSATIONS[case]),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="np",
    )
    assert token_ids.dtype == starts.dtype == lengths.dtype == np.int32
    np.testing.assert_array_equal(token_ids, expected["input_ids"][0])
    is_image = np.zeros(len(token_ids), int)
    for start, length in zip(starts, lengths, strict=True):
        is_image[start : start + length] = 1
    np.testing.assert_array_equal(is_image, expected["mm_token_type_ids"][0])
    if pixels:
        np.testing.assert_array_equal(np.concatenate(pixels), expected["pixel_values"])


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_prompts_equal_expansion_of_the_string(family, case):
    images = [
        part["image"] for m in CONVERSATIONS[case] for part in m["content"] if "image" in part and part != "image"
    ]
    rendered = family.renderer.from_conversation(CONVERSATIONS[case])
    prompt = family.renderer.from_prompt({"prompt": rendered.text, "multi_modal_data": {"image": images}})
    assert prompt.text == rendered.text
    np.testing.assert_array_equal(prompt.token_ids, rendered.token_ids)
    grids = [family.library_images(one, return_tensors="np")["image_grid_thw"][0] for one in images]
    counts = iter([int(grid.prod()) // 4 for grid in grids])
    long = re.sub(re.escape(IMAGE_TOKEN), lambda _: IMAGE_TOKEN * next(counts), prompt.text)
    np.testing.assert_array_equal(family.expanded(prompt)[0], family.library.tokenizer(long)["input_ids"])


def test_a_system_turn_is_added_where_the_template_has_one(tmp_path_factory):
    prompts = {}
    for name in FAMILIES:
        renderer = Family(name, tmp_path_factory.mktemp(name)).renderer
        prompts[name] = renderer.from_conversation([{"role": "user", "content": [image(FIRST), text("Hi")]}]).text
    turn = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Hi<|im_end|>\n<|im_start|>assistant\n"
    assert prompts["qwen3"] == turn
    assert prompts["qwen2_5"] == "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + turn


def test_limits_of_a_request_change_its_tokens(family):
    messages = [{"role": "user", "content": [image(FIRST)]}]
    prompt = family.renderer.from_conversation(messages, settings=read_settings({"max_pixels": 8000}))
    area = (2 * family.processor.patch_size) ** 2
    few, many = (family.expanded(p)[2].item() for p in (prompt, family.renderer.from_conversation(messages)))
    assert few * area <= 8000 < many * area


def test_what_stands_beside_an_image_changes_its_tokens(family):
    """In the words of `qwen_vl_utils`; it comes before what the request says."""
    side = 2 * family.processor.patch_size
    wishes = [{}, {"max_pixels": 8000}, {"min_pixels": 10**6}, {"resized_height": 5 * side, "resized_width": 3 * side}]
    url = "data:image/png;base64," + base64.b64encode(png(FIRST)).decode()
    for shown in (image(FIRST), {"type": "image_url", "image_url": url}):
        content = [{**shown, **wish, "uuid": None} for wish in wishes]
        messages = [{"role": "user", "content": content}]
        prompt = family.renderer.from_conversation(messages, settings=read_settings({"max_pixels": 40000}))
        limits = [prompt.limits_of(source) for source in prompt.sources]
        assert limits == [
            {"max_pixels": 40000},
            {"max_pixels": 8000},
            {"min_pixels": 10**6, "max_pixels": 10**6},
            {"max_pixels": 40000, **wishes[3]},
        ]
        plain, few, many, exact = (
            math.prod(family.processor.grid(FIRST.height, FIRST.width, one)) // 4 for one in limits
        )
        assert few * side**2 <= 8000 < plain * side**2 <= 40000 < 10**6 <= many * side**2
        assert exact == 15


# --- shapes of messages ----------------------------------------------------------------------------------------------


def test_every_shape_of_an_image_part_gives_the_same_prompt(renderer, tmp_path):
    encoded = png(FIRST)
    path = tmp_path / "image.png"
    path.write_bytes(encoded)
    coded = base64.b64encode(encoded).decode()
    url = f"data:image/png;base64,{coded}"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": str(path)}},
        {"type": "image", "image": path},
        {"type": "image", "image": encoded},
        {"type": "image", "url": url},
        {"type": "image", "path": str(path)},
        {"type": "image", "base64": coded},
        {"type": "image", "base64": url},
        {"image": path},
        {"image_url": {"url": url}},
        {"type": None, "image": encoded, "max_pixels": 8000},
    ]
    for part in parts:
        prompt = renderer.from_conversation([{"role": "user", "content": [part, {"text": "Hi"}]}])
        assert prompt.text == renderer.from_conversation(user(image(FIRST), text("Hi"))).text
        assert [source.encoded for source in prompt.images] == [encoded]
        assert prompt.text.count(IMAGE_TOKEN) == 1
    for value in (FIRST, np.array(FIRST)):
        (source,) = renderer.from_conversation([{"role": "user", "content": [image(value)]}]).images
        assert source.value is value


def test_every_shape_of_an_image_part_is_read_as_access_says(renderer, tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(b"picture")
    narrow = PromptRenderer(
        renderer.tokenizer,
        renderer.chat_template,
        access=Access(True, ["pictures.example"], allowed_local_media_path=None, max_image_bytes=5),
    )
    shapes = [
        lambda value: {"type": "image_url", "image_url": {"url": value}},
        lambda value: {"type": "image_url", "image_url": value},
        *(lambda value, key=key: {"type": "image", key: value} for key in ("image", "url", "path")),
    ]
    cases = [(shape, str(path), "not allowed by allowed_local_media_path") for shape in shapes]
    cases += [(shape, "http://other.example/", "its host is not in allowed_media_domains") for shape in shapes]
    cases += [
        (lambda _: {"type": "image", "base64": base64.b64encode(bytes(6)).decode()}, "", "at most 5 bytes, got 6")
    ]
    for shape, value, message in cases:
        with pytest.raises(ValueError, match=message):
            narrow.from_conversation([{"role": "user", "content": [shape(value)]}])


def test_images_are_named_across_turns(renderer):
    prompt = renderer.from_conversation(CONVERSATIONS["turns"], name="conversations[2]")
    assert [source.name for source in prompt.images] == ["conversations[2] images[0]", "conversations[2] images[1]"]
    assert prompt.uuids == (None, None)
    assert prompt.limits == {}
    assert prompt.token_ids.dtype == np.int32


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must have at least one message, got none"),
        ("Hello", "must be a list of messages, got str"),
        ({"role": "user", "content": "a"}, "must be a list of messages, got dict"),
        (["Hello"], "messages[0] must be a dict with role and content, got str"),
        (
            [{"role": "user", "content": "a"}, {"role": "robot", "content": "a"}],
            "messages[1] must have the role system,",
        ),
        ([{"content": "a"}], "messages[0] must have the role system, developer, user, assistant, tool, got None"),
        (
            [{"role": ["user"], "content": "a"}],
            "messages[0] must have the role system, developer, user, assistant, tool, got ['user']",
        ),
        (
            [{"role": "assistant", "content": "a", "tool_calls": [1], "refusal": None}],
            "messages[0] tool_calls[0] must be a dict with a function, got 1",
        ),
        (
            [{"role": "assistant", "content": "a", "audio": {"id": "x"}}],
            "messages[0]: unknown field 'audio'",
        ),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0] tool_calls must be a list, got 'x'"),
        ([{"role": "assistant", "reasoning": 5}], "messages[0] reasoning must be a string, got 5"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": ["<|image_pad|>"]}}}]}],
            "messages[0] tool_calls must not contain <|image_pad|>, the placeholder of an image or video",
        ),
        ([{"role": "user", "content": None, "name": "ann"}], "messages[0] must have a string or a non-empty list"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": {"url": "a"}}]}],
            "messages[0] content[0] must have a string as image_url, got dict",
        ),
        ([{"role": "user"}], "messages[0] must have a string or a non-empty list of parts as content, got None"),
        ([{"role": "user", "content": []}], "messages[0] must have a string or a non-empty list of parts as content"),
        ([{"role": "user", "content": image(FIRST)}], "messages[0] must have a string or a non-empty list of parts as"),
        (user(5), "messages[0] content[0] must be a dict of type text, input_text, "),
        (user({"text": "a", "image": FIRST}), f"{PARTS}, got no type with the keys ['text', 'image']: add \"type\""),
        (user({"path": "a.png"}), f"{PARTS}, got no type with the keys ['path']: add \"type\""),
        (user({"image": "no/file.png"}), "images[0] must be the path of a readable file, got 'no/file.png'"),
        (user(text("a"), {"type": "video", "video": "a.mp4"}), "videos[0] must be the path of a readable file"),
        (user({"type": "video_url", "video_url": {"url": "a"}}), "videos[0] must be the path of a readable file"),
        (user({"type": "input_audio", "input_audio": {}}), f"{PARTS}, got type 'input_audio'"),
        (user({"type": "text", "text": 5}), "messages[0] content[0] must have a string as text, got int"),
        (
            user({"type": "text", "text": "a", "b": 1}),
            "messages[0] content[0]: unknown field 'b'; expected one of type, text",
        ),
        (
            user({**image(FIRST), "max_pixel": 5}),
            "content[0]: unknown field 'max_pixel'; did you mean 'max_pixels'?",
        ),
        (user({**image(FIRST), "max_pixels": 0}), "content[0] max_pixels must be a positive integer, got 0"),
        (
            user({**image(FIRST), "resized_width": 9}),
            "content[0] resized_height and resized_width must be set together, got resiz",
        ),
        (user({"type": "image"}), "must have exactly one of image, image_pil, url, path, base64, got none"),
        (
            user({**image(FIRST), "url": "a"}),
            "must have exactly one of image, image_pil, url, path, base64, got image, u",
        ),
        (user({**image(FIRST), "uuid": ""}), "content[0] uuid must be a non-empty string or None, got ''"),
        *(
            (user({**part, "uuid": "zz"}), "content[0] uuid needs its image or video, got 'zz' alone")
            for part in (
                {"type": "image_url", "image_url": None},
                {"type": "image_url", "image_url": {"url": None}},
                {"type": "input_image"},
                {"type": "image", "image": None},
                {"type": "video"},
            )
        ),
        (user({"type": "image", "base64": "@"}), "images[0] must be valid base64, got '@'"),
        (
            user({"type": "image_url", "image_url": {"url": "a", "size": "low"}}),
            "image_url: unknown field 'size'; expected one of url, detail",
        ),
        (
            user({"type": "image_url", "image_url": {"url": "a", "detail": "tiny"}}),
            "content[0] image_url.detail must be one of auto, low, high, original, got 'tiny'",
        ),
        *(
            (
                user(part),
                "detail must be auto, high or original for an uploaded image, which keeps its stored size, got 'low'",
            )
            for part in (
                {"type": "input_image", "file_id": "a", "detail": "low"},
                {"type": "image_url", "image_url": {"url": "file-id:a", "detail": "low"}},
            )
        ),
        (user({"type": "image_url", "image_url": {}}), "must have a string as image_url or as its url, got NoneType"),
        (
            user({"type": "image_url", "url": "a"}),
            "unknown field 'url'; expected one of type, image_url, uuid, min_pixels, max_pi",
        ),
        (user(image(FIRST), image("no/file.png")), "images[1] must be the path of a readable file, got 'no/file.png'"),
        (
            user(image("https://host/a.png")),
            "images[0] must be local unless allow_remote_images=True, got 'https://host",
        ),
        (user(text(f"a{IMAGE_TOKEN}")), f"messages[0] content[0] must not contain {IMAGE_TOKEN}, the placeholder"),
        (
            [{"role": "user", "content": f"a{VIDEO_TOKEN}"}],
            f"messages[0] must not contain {VIDEO_TOKEN}, the placeholder",
        ),
        (
            user(text("<|image"), text("_pad|>")),
            "must have one <|image_pad|> per image, got 1 placeholders for 0 im",
        ),
        (
            [*user(text("a")), {"role": "system", "content": "b"}],
            "must be valid for the checkpoint's chat template, which raised an error: ",
        ),
    ],
)
def test_conversations_are_checked(renderer, messages, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        renderer.from_conversation(messages, name="conversations[7]")
    assert str(caught.value).startswith("conversations[7] ")


def test_a_template_that_drops_an_image_is_found_out():
    template = "{% for message in messages %}{{ message.role }}{% endfor %}"
    renderer = PromptRenderer(make_tokenizer(), template)
    with pytest.raises(ValueError, match="got 0 placeholders for 1 images"):
        renderer.from_conversation(user(image(FIRST)))


def test_a_checkpoint_without_a_template_takes_prompts_only():
    renderer = PromptRenderer(make_tokenizer())
    assert renderer.from_prompt("Hello").text == "Hello"
    with pytest.raises(
        ValueError,
        match="conversation requires chat_template, because the checkpoint has none: set chat_template or pass",
    ):
        renderer.from_conversation(user(text("Hello")))


# --- what clients of others write -----------------------------------------------------------------------------------


def test_openais_shapes_of_parts(renderer):
    plain = renderer.from_conversation(user(image(FIRST), text("a")))
    url = f"data:image/png;base64,{base64.b64encode(png(FIRST)).decode()}"
    shown = {"type": "image_url", "image_url": {"url": url, "detail": "high"}}
    assert renderer.from_conversation(user(shown, text("a"))).text == plain.text
    unset = {"type": "image_url", "image_url": {"url": url, "detail": None}}
    newer = {"type": "input_image", "image_url": url, "detail": "auto", "file_id": None, "uuid": "one"}
    for same in (user(unset, text("a")), user(newer, "a"), user(newer, {"type": "input_text", "text": "a"})):
        assert renderer.from_conversation(same).text == plain.text
    assert renderer.from_conversation(user(newer, "a")).uuids == ("one",)
    refused = [*user(text("a")), {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}]
    spoken = [*user(text("a")), {"role": "assistant", "content": [{"type": "output_text", "text": "No."}]}]
    assert renderer.from_conversation(refused).text == renderer.from_conversation(spoken).text


@pytest.mark.parametrize(
    ("detail", "own", "limits"),
    [
        (None, {}, {}),
        ("auto", {}, {}),
        ("high", {}, {}),
        ("original", {"min_pixels": 9}, {"min_pixels": 9}),
        ("low", {}, {"max_pixels": 512 * 512}),
        ("low", {"min_pixels": 9}, {"min_pixels": 9, "max_pixels": 512 * 512}),
        ("low", {"min_pixels": 10**6}, {"min_pixels": 10**6, "max_pixels": 10**6}),
        ("low", {"max_pixels": 9}, {"max_pixels": 9}),
        (
            "low",
            {"resized_height": 56, "resized_width": 28, "max_pixels": 9},
            {"resized_height": 56, "resized_width": 28},
        ),
    ],
)
def test_the_detail_of_an_image_is_its_size(renderer, detail, own, limits):
    url = f"data:image/png;base64,{base64.b64encode(png(FIRST)).decode()}"
    part = {"type": "image_url", "image_url": {"url": url, "detail": detail}, **own}
    [source] = renderer.from_conversation(user(part, text("a"))).sources
    assert source.limits == limits
    if not own:
        newer = {"type": "input_image", "image_url": url, "detail": detail}
        [source] = renderer.from_conversation(user(newer, text("a"))).sources
        assert source.limits == limits


def test_the_template_gets_what_else_a_message_holds(renderer):
    """A replayed chat, as OpenAI's clients and servers write it."""
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"where": ["C2"], "n": 2}'}}
    bad = {"type": "function", "function": {"name": "look", "arguments": "{"}}
    bare = {"type": "function", "function": {"name": "look", "arguments": None}}
    chat = [
        {"role": "user", "name": "ann", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call, bare], "reasoning_content": "hm", "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
        {"role": "assistant", "content": [], "tool_calls": [bad], "audio": None},
        {"role": "assistant", "content": None, "reasoning": "hm", "refusal": "No."},
    ]
    show = Template("{% for m in messages %}{{ m | tojson }}\n{% endfor %}", add_generation_prompt=False)
    with pytest.warns(
        UserWarning, match=r"^conversation messages\[3\] tool_calls\[0\] arguments should be a JSON object"
    ):
        lines = renderer.from_conversation(chat, template=show).text.splitlines()
    meant = call | {"function": {"name": "look", "arguments": {"where": ["C2"], "n": 2}}}
    empty = {"type": "function", "function": {"name": "look", "arguments": {}}}
    both = {"reasoning": "hm", "reasoning_content": "hm", "thinking": "hm"}  # the last one is the library's
    assert [json.loads(line) for line in lines] == [
        chat[0],
        {"role": "assistant", "content": "", "tool_calls": [meant, empty], **both},
        chat[2],
        {"role": "assistant", "content": "", "tool_calls": [empty]},
        {"role": "assistant", "content": "", "refusal": "No.", **both},
    ]
    assert call["function"]["arguments"].startswith("{")  # the caller's stays as it is


def test_a_developer_is_the_system_and_a_tool_passes(renderer):
    system, developer = (
        renderer.from_conversation([{"role": role, "content": "Be brief."}, *user(text("a"))])
        for role in ("system", "developer")
    )
    assert developer.text == system.text
    told = renderer.from_conversation([*user(text("a")), {"role": "tool", "content": "42", "tool_call_id": "x"}])
    assert "<|im_start|>tool\n42<|im_end|>" in told.text


def test_parts_have_uuids_and_pil_images(renderer):
    parts = [{"type": "image_pil", "image_pil": FIRST, "uuid": "one"}, image(SECOND), image(FIRST) | {"uuid": "two"}]
    prompt = renderer.from_conversation(user(*[part for one in parts for part in (one, text("."))]))
    assert prompt.uuids == ("one", None, "two")
    assert prompt.images[0].value is FIRST


def test_templates_are_the_librarys(renderer):
    """Whatever the options, the text is that of the library's own function."""
    conversation = [*user(text("a")), {"role": "assistant", "content": "The answer is"}]
    apply = renderer.tokenizer.apply_chat_template
    for options, expected in (
        ({}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"continue_final_message": True, "add_generation_prompt": False}, {"continue_final_message": True}),
    ):
        text_of = apply(conversation, chat_template=renderer.chat_template, tokenize=False, **expected)
        assert renderer.from_conversation(conversation, template=Template(**options)).text == text_of
    own = "{{ greeting }} {% for message in messages %}{{ message.content }} {% endfor %}"
    template = Template(chat_template=own, chat_template_kwargs={"greeting": "Hi"})
    assert renderer.from_conversation(conversation[1:], template=template).text == "Hi The answer is "
    with pytest.raises(ValueError, match="conversation must be valid for chat_template, which raised an error: "):
        renderer.from_conversation(conversation, template=Template(chat_template="{% if %}"))
    with pytest.raises(
        ValueError, match=r"^conversation must be valid for chat_template, which rendered an empty prompt$"
    ):
        renderer.from_conversation(conversation, template=Template(chat_template="{{ nothing }}"))


def test_a_template_may_be_the_path_of_its_file(tmp_path, monkeypatch):
    for name in ("own.jinja", "own"):
        (tmp_path / name).write_text("{{ 1 }}" + name)
        assert template_text(str(tmp_path / name)) == template_text(tmp_path / name) == "{{ 1 }}" + name
    monkeypatch.setenv("HOME", str(tmp_path))
    assert template_text("~/own") == "{{ 1 }}own"
    for text in ("{{ 1 }}", "a\n", "{% raw %}.jinja"):
        assert template_text(text) == text
    for name in ("no.jinja", "no", ""):
        with pytest.raises(
            ValueError, match=r"^chat_template must be one of qwen3\.5, .* or must be a file that can be read, got .*: "
        ):
            template_text(name)
    (tmp_path / "own").write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=rf"^chat_template {tmp_path}/own must be text, got .* at character 1, "):
        template_text(str(tmp_path / "own"))


def test_a_template_in_a_row_names_no_file(renderer, tmp_path):
    (tmp_path / "own.jinja").write_text("what nobody is to see")
    row = {"messages": user(text("a")), "chat_template": str(tmp_path / "own.jinja")}
    assert renderer.from_conversation(row).text == str(tmp_path / "own.jinja")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": 5}, "chat_template must be a string, got 5"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be a dict with strings as keys, got [1]"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs must be a dict with strings as keys, got {1: 2}"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs must be variables of the template, got the reserved 'tokenize'",
        ),
        ({"continue_final_message": 1}, "continue_final_message must be a bool, got 1"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt must be a bool, got 'no'"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt and continue_final_message are mutually exclusive, got both",
        ),
    ],
)
def test_options_of_templates_are_checked(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Template(**options)


@pytest.mark.parametrize("as_type", [list, tuple, np.array])
def test_a_prompt_may_be_token_ids(renderer, as_type):
    written = renderer.from_prompt({"prompt": f"a{IMAGE_TOKEN}b", "multi_modal_data": {"image": FIRST}})
    given = {"prompt_token_ids": as_type(written.token_ids.tolist()), "multi_modal_data": {"image": FIRST}}
    prompt = renderer.from_prompt(given)
    np.testing.assert_array_equal(prompt.token_ids, written.token_ids)
    assert prompt.text == written.text
    assert prompt.token_ids.dtype == np.int32


def test_images_may_be_limited(renderer):
    limited = copy.copy(renderer)
    limited.max_images = 1
    limited.from_conversation(user(image(FIRST)))
    with pytest.raises(
        ValueError, match=r"^conversation must have at most 1 images, got 2: raise limit_mm_per_prompt$"
    ):
        limited.from_conversation(user(image(FIRST), text("and"), image(SECOND)))


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_what_others_asked_of_the_tokenizer_is_forgotten(renderer):
    text = f"Compare {IMAGE_TOKEN} now."
    image = {"image": np.zeros((8, 8, 3), np.uint8)}
    before = renderer.from_prompt({"prompt": text, "multi_modal_data": image}).token_ids
    renderer.tokenizer(text, padding="max_length", truncation=True, max_length=5, split_special_tokens=True)
    after = renderer.from_prompt({"prompt": text, "multi_modal_data": image}).token_ids
    assert 5 < len(after) == len(before)
    np.testing.assert_array_equal(after, before)


def test_a_tokenizer_may_add_tokens_of_its_own(checkpoints):
    renderers = [PromptRenderer.from_pretrained(checkpoints("qwen3_vl")) for _ in range(2)]
    end = renderers[1].tokenizer.convert_tokens_to_ids("<|im_end|>")
    added = processors.TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", end)])
    renderers[1].tokenizer.backend_tokenizer.post_processor = added
    assert [one.adds_special_tokens for one in renderers] == [False, True]
    plain, more = (one.from_prompt("a").token_ids.tolist() for one in renderers)
    assert more == [*plain, end]


def test_a_prompt_may_be_a_string(renderer):
    prompt = renderer.from_prompt("Hello")
    assert (prompt.text, prompt.images, prompt.uuids, prompt.limits) == ("Hello", (), (), {})
    assert renderer.tokenizer.decode(prompt.token_ids) == "Hello"


def test_a_prompt_carries_images_uuids_and_limits(renderer):
    prompt = renderer.from_prompt(
        {
            "prompt": f"a{IMAGE_TOKEN}b{IMAGE_TOKEN}",
            "multi_modal_data": {"image": [FIRST, SECOND]},
            "multi_modal_uuids": {"image": ["one", None]},
            "mm_processor_kwargs": {"max_pixels": 9999},
        },
        name="prompts[4]",
    )
    assert [source.name for source in prompt.images] == ["prompts[4] images[0]", "prompts[4] images[1]"]
    assert prompt.uuids == ("one", None)
    assert prompt.limits == {"max_pixels": 9999}


@pytest.mark.parametrize("value", [FIRST, np.array(FIRST), png(FIRST)])
def test_one_image_needs_no_list(renderer, value):
    data = {"prompt": IMAGE_TOKEN, "multi_modal_data": {"image": value}, "multi_modal_uuids": {"image": "one"}}
    prompt = renderer.from_prompt(data)
    assert prompt.images[0].value is value
    assert prompt.uuids == ("one",)


def prompt_with(count, images=(), **others):
    return {"prompt": " ".join([IMAGE_TOKEN] * count) + ".", "multi_modal_data": {"image": list(images)}, **others}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "must be a string, a dict or token ids, got int"),
        ({}, "must have a string as 'prompt', got NoneType"),
        ({"prompt": 5}, "must have a string as 'prompt', got int"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt and prompt_token_ids are mutually exclusive, got both"),
        ({"prompt_token_ids": []}, "prompt_token_ids must be a non-empty list of token ids, got []"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids must be a non-empty list of token ids, got 'ab'"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids must be a non-empty list of token ids, got [1.5]"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids must be a non-empty list of token ids, got [True]"),
        ({"prompt_token_ids": [[1]]}, "prompt_token_ids must be a non-empty list of token ids, got [[1]]"),
        ({"prompt_token_ids": [1, [2]]}, "prompt_token_ids must be token ids, got [1, [2]]"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids must be token ids from 0 to 263, got -1"),
        ({"prompt_token_ids": [264]}, "prompt_token_ids must be token ids from 0 to 263, got 264"),
        ({"prompt_token_ids": [1 << 70]}, "prompt_token_ids must be a non-empty list of token ids, got ["),
        ("", "must not be empty, got ''"),
        (
            {"prompt": "a", "images": []},
            "unknown field 'images'; expected one of prompt, prompt_token_ids, multi_modal_data, multi_modal_uuids, ",
        ),
        (
            {"prompt": "a", "multi_modal_data": [FIRST]},
            "multi_modal_data must be a dict with 'image' or 'video', got list",
        ),
        (
            {"prompt": "a", "multi_modal_data": {"audio": []}},
            "multi_modal_data: unknown field 'audio'; expected one of image, video",
        ),
        (prompt_with(1), "must have one <|image_pad|> per image, got 1 placeholders for 0 images"),
        (prompt_with(2, [FIRST]), "must have one <|image_pad|> per image, got 2 placeholders for 1 images"),
        (
            prompt_with(1, [FIRST, SECOND]),
            "must have one <|image_pad|> per image, got 1 placeholders for 2 images",
        ),
        (IMAGE_TOKEN, "must have one <|image_pad|> per image, got 1 placeholders for 0 images"),
        (f"a{VIDEO_TOKEN}", "must have one <|video_pad|> per video, got 1 placeholders for 0 videos"),
        (
            {"prompt": IMAGE_TOKEN * 2, "multi_modal_data": {"image": [FIRST, SECOND]}},
            "must have a token between two images, got two <|image_pad|> side by side",
        ),
        (
            prompt_with(1, [None]),
            "images[0] must be a path, bytes, an open binary file, a data:, file: or http(s) URL, a PIL image or a ",
        ),
        (prompt_with(1, [b""]), "images[0] must not be empty"),
        (
            prompt_with(2, [FIRST, SECOND], multi_modal_uuids={"image": ["one"]}),
            "must have one uuid per image, got 1 for 2 images",
        ),
        (
            prompt_with(1, [FIRST], multi_modal_uuids={"image": []}),
            "must have one uuid per image, got 0 for 1 images",
        ),
        (
            prompt_with(1, [FIRST], multi_modal_uuids={"image": [5]}),
            "multi_modal_uuids image[0] must be a non-empty string or None, got 5",
        ),
        (
            prompt_with(1, [FIRST], multi_modal_uuids={"image": [""]}),
            "multi_modal_uuids image[0] must be a non-empty string or None, got ''",
        ),
        (
            prompt_with(1, [None], multi_modal_uuids={"image": ["zz"]}),
            "multi_modal_uuids image[0] needs its image or video, got 'zz' alone",
        ),
        (
            prompt_with(1, [FIRST], multi_modal_uuids=["one"]),
            "multi_modal_uuids must be a dict with 'image' or 'video', got list",
        ),
        (
            prompt_with(1, [FIRST], mm_processor_kwargs={"sizes": 5}),
            "mm_processor_kwargs: unknown field 'sizes'; expected one of min_pixels, max_pixels, size, fps, "
            "num_frames, min_frames, max_frames, do_sample_frames; did you mean 'size'?",
        ),
        (
            prompt_with(1, [FIRST], mm_processor_kwargs={"max_pixels": 0}),
            "mm_processor_kwargs max_pixels must be a positive integer, got 0",
        ),
    ],
)
def test_prompts_are_checked(renderer, prompt, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        renderer.from_prompt(prompt, name="prompts[3]")
    assert str(caught.value).startswith(("prompts[3] ", "prompts[3]: "))


# --- expansion -------------------------------------------------------------------------------------------------------


def test_expansion_of_an_example(renderer):
    pad = renderer.image_token_id
    token_ids, starts, lengths = renderer.expander.expand(np.array([1, pad, 2, 3, pad, 4], np.int32), [3, 2])
    assert token_ids.tolist() == [1, pad, pad, pad, 2, 3, pad, pad, 4]
    assert starts.tolist() == [1, 6]
    assert lengths.tolist() == [3, 2]


def test_expansion_without_images_changes_nothing(renderer):
    token_ids, starts, lengths = renderer.expander.expand(np.array([1, 2, 3], np.int32), [])
    assert token_ids.tolist() == [1, 2, 3]
    assert starts.shape == lengths.shape == (0,)


def test_expansion_checks_its_counts(renderer):
    pad = renderer.image_token_id
    with pytest.raises(ValueError, match="counts must have one entry for each of 1 images, got 2"):
        renderer.expander.expand(np.array([1, pad]), [1, 2])
    with pytest.raises(ValueError, match=r"counts must be positive, got \[0\]"):
        renderer.expander.expand(np.array([1, pad]), [0])
    with pytest.raises(ValueError, match="token_ids must have a token between two images"):
        renderer.expander.expand(np.array([pad, pad]), [1, 2])


# --- loading ---------------------------------------------------------------------------------------------------------


def test_the_template_is_found_in_each_place(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert PromptRenderer.from_pretrained(tmp_path).chat_template is None
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "from settings"}))
    assert PromptRenderer.from_pretrained(tmp_path).chat_template == "from settings"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert PromptRenderer.from_pretrained(tmp_path).chat_template == "from jinja"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert PromptRenderer.from_pretrained(str(tmp_path)).chat_template == "from json"
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))
    assert PromptRenderer.from_pretrained(str(tmp_path)).chat_template == "from json"
    (tmp_path / "processor_config.json").write_text(json.dumps({"chat_template": "from the processor"}))
    assert PromptRenderer.from_pretrained(str(tmp_path)).chat_template == "from the processor"


@pytest.mark.parametrize("files", ["tokenizer.json", "vocab.json and merges.txt"])
@pytest.mark.parametrize("named", ["Qwen2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast", None])
def test_the_tokenizer_is_the_one_that_the_library_chooses(checkpoints, tmp_path, named, files):
    """Of the classes that these models name, and of none: `AutoTokenizer` is asked."""
    directory = checkpoints("qwen2_5_vl")
    shutil.copy(directory / "config.json", tmp_path)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings = {key: value for key, value in settings.items() if key != "tokenizer_class"}
    content = json.loads((directory / "tokenizer.json").read_text())
    if files == "tokenizer.json":
        shutil.copy(directory / "tokenizer.json", tmp_path)
    else:  # as the first checkpoints came
        (tmp_path / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
        merges = [" ".join(merge) for merge in content["model"]["merges"]]
        (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
        added = {str(token.pop("id")): token for token in content["added_tokens"]}
        settings["added_tokens_decoder"] = added
    if named is not None:
        settings["tokenizer_class"] = named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    try:
        expected = transformers.AutoTokenizer.from_pretrained(tmp_path)
    except ValueError:  # some cannot be read from those files
        assert (named, files) == ("PreTrainedTokenizerFast", "vocab.json and merges.txt")
        with pytest.raises(ValueError, match="must have a valid tokenizer"):
            PromptRenderer.from_pretrained(tmp_path)
        return
    found = PromptRenderer.from_pretrained(tmp_path).tokenizer
    assert type(found) is type(expected)
    text = "<|im_start|>user\nÄ é e\u0301 the quick brown fox<|vision_start|><|image_pad|> 1234  \n\n don't<|im_end|>"
    assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert found.get_added_vocab() == expected.get_added_vocab()
    assert found.eos_token_id == expected.eos_token_id
    assert found.decode(found(text)["input_ids"]) == expected.decode(expected(text)["input_ids"])


def test_loading_refuses_what_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="directory must be a checkpoint's directory, got 'Qwen/Qwen3-VL-2B'"):
        PromptRenderer.from_pretrained("Qwen/Qwen3-VL-2B")
    with pytest.raises(ValueError, match="has no tokenizer"):
        PromptRenderer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer must have the special token <\|image_pad\|>, got \["):
        PromptRenderer(make_tokenizer(SPECIAL[:3]))


NO_OBJECTS = ("null", "[]", "5", "[" * 100_000, "")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("tokenizer.json", content, "{path} must be a JSON file that contains an object") for content in NO_OBJECTS),
        *(
            ("tokenizer.json", content, "{folder} must have a valid tokenizer: ")
            for content in ("{", "{}", '{"model": 5}')
        ),
        *(("tokenizer_config.json", content, "{path} must be a JSON file") for content in (*NO_OBJECTS, "{")),
        *(("chat_template.json", content, "{path} must be a JSON file") for content in NO_OBJECTS),
        ("processor_config.json", '{"chat_template": 5}', "chat_template of {path}"),
        *(("chat_template.json", content, "chat_template of {path}") for content in ("{}", '{"chat_template": 5}')),
    ],
)  # fmt: skip
def test_loading_refuses_broken_files(tmp_path, name, content, message):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message.format(path=tmp_path / name, folder=tmp_path)):
        PromptRenderer.from_pretrained(tmp_path)


# --- tools ------------------------------------------------------------------------------------------------------------

LOOK = {"type": "function", "function": {"name": "look", "description": "Sees.", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("family", ["qwen3_vl-tied", "qwen2_5_vl"])
def test_tools_and_calls_as_published_templates_have_them(checkpoints, family):
    """A history of calls reads as the model itself writes them, whether the template has words for it or not."""
    renderer = PromptRenderer.from_pretrained(checkpoints(family))
    assert ("tools" in renderer.chat_template) == (family == "qwen3_vl-tied")
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"at":["Köln", 2]}'}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call]},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
        {"role": "tool", "content": [text("43")], "tool_call_id": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "44"},
    ]
    told = """<|im_start|>system
Be brief.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "look", "description": "Sees.", "parameters": {"type": "object"}}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
"""
    written = '<tool_call>\n{"name": "look", "arguments": {"at": ["Köln", 2]}}\n</tool_call>'
    history = (
        f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nI look.\n{written}\n{written}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{written}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n44\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    flat = {"type": "function", **LOOK["function"]}
    for tools in ([LOOK], [flat]):
        rendered = renderer.from_conversation(chat, template=Template(tools=tools, tool_choice="auto")).text
        assert json.loads(rendered.partition("<tools>\n")[2].partition("\n</tools>")[0]) == LOOK
        assert rendered.partition("</tools>")[2] == (told + history).partition("</tools>")[2]
    assert renderer.from_conversation(chat, template=Template(tools=[LOOK])).text == told + history
    if family != "qwen3_vl-tied":
        parts = [image(FIRST), text("seen")]
        shown = renderer.from_conversation(
            [chat[1], {"role": "tool", "content": parts}], template=Template(tools=[LOOK])
        )
        assert shown.text.startswith("<|im_start|>system\nYou are a helpful assistant.\n\n# Tools")
        seen = "<|vision_start|><|image_pad|><|vision_end|>seen"
        assert f"<|im_start|>user\n<tool_response>\n{seen}\n</tool_response><|im_end|>\n" in shown.text
        return
    for unheard in (Template(tools=[LOOK], tool_choice="none"), Template(tools=[]), Template()):
        unheard_of = renderer.from_conversation(chat, template=unheard).text
        assert unheard_of == "<|im_start|>system\nBe brief.<|im_end|>\n" + history


def test_a_callers_template_that_knows_no_tools_gets_none(renderer):
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(
        ValueError, match=r"^conversation tools need a template that renders them, got a chat_template without tools$"
    ):
        renderer.from_conversation(user("a"), template=Template(chat_template=plain, tools=[LOOK]))


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (5, "tools must be a list, got 5"),
        ("look", "tools must be a list, got 'look'"),
        ([1], 'tools[0] must be an object of the type "function", got 1'),
        ([LOOK, {"type": "x"}], "tools[1] must be an object of the type \"function\", got {'type': 'x'}"),
        ([{"type": "function", "function": "look"}], "tools[0].function must be an object, got 'look'"),
        ([{"type": "function"}], "tools[0].function.name must be a name, got None"),
        ([{"name": 'a"b'}], "tools[0].function.name must be a name, got 'a\"b'"),
        ([{"name": "a", "parameters": []}], "tools[0].function.parameters must be a JSON schema, got []"),
        ([{"name": "a", "description": 5}], "tools[0].function.description must be a string, got 5"),
        ([{"name": "a", "strict": "yes"}], "tools[0].function.strict must be a bool, got 'yes'"),
        ([{"name": "a", "parameters": {"a": {1}}}], "tools[0] must be JSON: Object of type set is"),
        ([{"name": "a", "parameters": {"a": math.inf}}], "tools[0] must be JSON: Out of range"),
        ([LOOK, LOOK], "tools must have unique names, got 'look' twice"),
        ([{"name": "a", "parameters": {"<|image_pad|>": 1}}],
         "tools must not contain <|image_pad|>, the placeholder of an image or video"),
    ],
)  # fmt: skip
def test_tools_are_checked(tools, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Template(tools=tools)
    with pytest.raises(ValueError, match=r'^tool_choice must be "auto" or "none", got \'any\'$'):
        Template(tools=[LOOK], tool_choice="any")


def test_what_is_nested_deep_is_an_error_like_another(renderer):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match=r"^tools\[0\] must be JSON: "):
        Template(tools=[{"name": "a", "parameters": {"enum": deep}}])
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {"a": deep}}}]}
    with pytest.raises(ValueError, match=r"must not contain <\|image_pad\|>"):
        renderer.from_conversation([*user("a"), called | {"content": "<|image_pad|>"}])
