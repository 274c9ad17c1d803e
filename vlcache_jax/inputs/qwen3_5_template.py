"""Chat templates in the four prompt forms of Qwen3.5, 3.6 and 3.8, for checkpoints without one and for tests.

A template of a checkpoint is used as it is, and these replace none. They render the same tokens as the published ones,
but for the sentences that describe tools and the thinking effort, which are other words of the same meaning.

| form | models | thinking by default | earlier thinking | values of calls that are no strings |
|---|---|---|---|---|
| `qwen3.5-small` | 3.5 with 0.8B and 2B | off | dropped | as Python writes them |
| `qwen3.5` | other 3.5 | on | dropped | as Python writes them |
| `qwen3.6` | 3.6 | on | dropped, or kept with `preserve_thinking` | JSON |
| `qwen3.8` | 3.8 | on, by `reasoning_effort` | kept, or dropped with `preserve_thinking=false` | JSON |
"""

from __future__ import annotations

import json

FORMS = ("qwen3.5-small", "qwen3.5", "qwen3.6", "qwen3.8")

HEAD = "# Tools\n\nThese functions can be called. Their definitions:\n\n<tools>"
CALLS = (
    "\n\nTo call a function, end the answer with a call in this form, which has a line for each tag:\n\n"
    "<tool_call>\n<function=its_name>\n<parameter=first>\nvalue\n</parameter>\n<parameter=second>\na value\nof several"
    "\nlines\n</parameter>\n</function>\n</tool_call>\n\n"
    "Give every parameter that is required. Reasons stand before the call, and nothing after it. Without a fitting "
    "function, answer from what is known, and do not mention functions."
)
XHIGH = "Think thoroughly before answering: consider alternatives, and check each step and the result."
LOW = "Think briefly, and answer as soon as the answer is clear."

_TEMPLATE = """
{%- set seen = namespace(images=0, videos=0) %}
{%- set found = namespace(last=-1, head='') %}

{%- macro media(kind) %}
    {%- if add_vision_id is defined and add_vision_id %}
        {{- 'Picture ' ~ seen.images ~ ': ' if kind == 'image' else 'Video ' ~ seen.videos ~ ': ' }}
    {%- endif %}
    {{- '<|vision_start|><|' ~ kind ~ '_pad|><|vision_end|>' }}
{%- endmacro %}

{%- macro written(content, counts=true, is_system=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is mapping %}
        {{- raise_exception('content must be a text or a list of parts') }}
    {%- elif content is not none and content is defined %}
        {%- for part in content %}
            {%- set is_image = part.type == 'image' or 'image' in part or 'image_url' in part %}
            {%- set is_video = part.type == 'video' or 'video' in part %}
            {%- if (is_image or is_video) and is_system %}
                {{- raise_exception('a system message must have text alone') }}
            {%- elif is_image %}
                {%- if counts %}{% set seen.images = seen.images + 1 %}{% endif %}
                {{- media('image') }}
            {%- elif is_video %}
                {%- if counts %}{% set seen.videos = seen.videos + 1 %}{% endif %}
                {{- media('video') }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- else %}
                {{- raise_exception('a part must be text, an image or a video') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}

{%- macro value(given) %}
    {%- if given is string %}
        {{- given }}
    {%- elif as_json or given is mapping or given is sequence %}
        {{- given | tojson }}
    {%- else %}
        {{- given | string }}
    {%- endif %}
{%- endmacro %}

{%- if not messages %}{{ raise_exception('there must be a message') }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set text = written(message.content, counts=false) | trim %}
        {%- if not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) %}
            {%- set found.last = loop.index0 %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if found.last < 0 %}{{ raise_exception('there must be a message of the user') }}{% endif %}

{#- The system turn has the thinking effort, the tools and the system message. -#}
{%- if has_effort and (enable_thinking is not defined or enable_thinking is true) %}
    {%- set effort = reasoning_effort if reasoning_effort is defined else 'xhigh' %}
    {%- if effort not in ('xhigh', 'medium', 'low') %}
        {{- raise_exception('reasoning_effort must be xhigh, medium or low, got ' ~ reasoning_effort) }}
    {%- endif %}
    {%- set found.head = {'xhigh': xhigh, 'medium': '', 'low': low}[effort] %}
{%- endif %}
{%- if tools %}
    {%- set found.head = found.head ~ ('\\n\\n' if found.head else '') ~ tools_head %}
    {%- for tool in tools %}{% set found.head = found.head ~ '\\n' ~ (tool | tojson) %}{% endfor %}
    {%- set found.head = found.head ~ '\\n</tools>' ~ tools_end %}
{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set text = written(messages[0].content, is_system=true) | trim %}
    {%- set found.head = found.head ~ ('\\n\\n' if found.head and text else '') ~ text %}
{%- endif %}
{%- if found.head or (messages[0].role == 'system' and not has_effort) %}
    {{- '<|im_start|>system\\n' ~ found.head ~ '<|im_end|>\\n' }}
{%- endif %}

{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('a system message must be the first one') }}{% endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' ~ (written(message.content) | trim) ~ '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = written(message.content) | trim %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content and not has_effort %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > found.last or keeps_thoughts %}
            {{- '<think>\\n' ~ (thought | trim) ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function is defined else call %}
            {{- ('\\n\\n' if content else '') if loop.first else '\\n' }}
            {{- '<tool_call>\\n<function=' ~ function.name ~ '>\\n' }}
            {%- if function.arguments is defined and (function.arguments or not has_effort) %}
                {%- for key, given in function.arguments | items %}
                    {{- '<parameter=' ~ key ~ '>\\n' ~ value(given) ~ '\\n</parameter>\\n' }}
                {%- endfor %}
            {%- endif %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' ~ (written(message.content) | trim) ~ '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- else %}
        {{- raise_exception('role must be system, user, assistant or tool') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' ~ ('<think>\\n' if thinks else '<think>\\n\\n</think>\\n\\n') }}
{%- endif %}
"""


def qwen3_5_template(form: str) -> str:
    """Return the Jinja text of one of `FORMS`.

    Raises:
      ValueError: there is no such form.
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    keeps = {"qwen3.6": "preserve_thinking is defined and preserve_thinking is true",
             "qwen3.8": "preserve_thinking is not defined or preserve_thinking is true"}  # fmt: skip
    given = "enable_thinking is defined and enable_thinking is"
    rules = {
        "as_json": str(form in keeps).lower(),
        "has_effort": str(form == "qwen3.8").lower(),
        "keeps_thoughts": keeps.get(form, "false"),
        "thinks": f"{given} true" if form == "qwen3.5-small" else f"not ({given} false)",
        **{name: json.dumps(text) for name, text in
           (("tools_head", HEAD), ("tools_end", CALLS), ("xhigh", XHIGH), ("low", LOW))},
    }  # fmt: skip
    return "".join(f"{{%- set {name} = {rule} %}}\n" for name, rule in rules.items()) + _TEMPLATE.lstrip("\n")
