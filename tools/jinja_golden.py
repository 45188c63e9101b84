#!/usr/bin/env python3
"""Renders chat templates with Python's jinja2, as transformers sets it up, on random conversations.

    tools/jinja_golden.py [FILE]                      rewrites FILE (default tests/golden/data/jinja.json)
    tools/jinja_golden.py --templates DIR --out FILE  the same for each DIR/*.jinja, such as those of
                                                      released models

FILE has a list of cases: a template, its variables, and the text or {"error": true}. A case has "spans"
where the template has {% generation %}: the characters that it encloses.
build/tests/tests_golden --gtest_filter='Jinja*' compares the file in its place.
Needs the package jinja2, 3.1.6.
"""

import argparse
import functools
import json
import random
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

DEFAULT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "data" / "jinja.json"
NOW = datetime(2026, 3, 7, 9, 5, 2)

# -- what transformers sets up ---------------------------------------------------------------------------


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def __init__(self, environment):
        super().__init__(environment)
        environment.extend(track=self.track)
        self.blocks = None

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("support"), [], [], body).set_lineno(line)

    @jinja2.pass_eval_context
    def support(self, context, caller):
        text = caller()
        if self.blocks is not None:
            begin = len("".join(self.blocks))
            self.spans.append((begin, begin + len(text)))
        return text

    @contextmanager
    def track(self, blocks, spans):
        self.blocks, self.spans = blocks, spans
        try:
            yield
        finally:
            self.blocks = None


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Namespace(jinja2.utils.Namespace):
    def __init__(*args, **kwargs):
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            Namespace.check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name, value):
        Namespace.check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(name)


def environment():
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                         extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = NOW.strftime
    made.globals["namespace"] = Namespace
    return made


@functools.lru_cache
def compiled_of(template):
    env = environment()
    return env, env.from_string(template)


def render(template, variables):
    """The case's result."""
    try:
        env, compiled = compiled_of(template)
        blocks, spans = [], []
        with env.track(blocks, spans):
            for block in compiled.generate(**variables):
                blocks.append(block)
    except Exception:
        return {"error": True}
    return {"text": "".join(blocks), **({"spans": spans} if "{% generation" in template or "{%- generation" in template else {})}


# -- conversations ---------------------------------------------------------------------------------------

WORDS = ["hello", "what is 2 + 2?", "", " leading", "trailing \n", "a\nb\n\nc", "caf\u00e9 \u4f60\u597d \U0001f600", "<b>&'\"</b>",
         "{{ not }} {% a tag %}", "\\n \\ \"", "1.5", "</think>after", "<think>before</think>\n\nafter", "x" * 40,
         "\u0000\u001f\u007f\u00a0\u2028", "it's", "{\"a\": 1}"]
VALUES = [1, -3, 0, 2.5, 1e20, 1e-7, True, False, None, "text", [1, "a", None], {"b": {"c": [True]}, "a": 2.0}, [], {}]


def arguments(rng):
    return {key: rng.choice(VALUES) for key in rng.sample(["city", "unit", "deep", "n"], rng.randint(0, 3))}


def tool_call(rng):
    call = {"name": rng.choice(["get_weather", "search", "f"]), "arguments": arguments(rng)}
    if rng.random() < 0.2:
        call["arguments"] = json.dumps(call["arguments"])
    if rng.random() < 0.2:
        return call
    return {"id": rng.choice(["call_1", "abcdefghi", "123456789"]), "type": "function", "function": call}


def content(rng):
    text = rng.choice(WORDS) + rng.choice(WORDS)
    kind = rng.random()
    if kind < 0.1:
        return [{"type": "text", "text": text}, {"type": rng.choice(["text", "image"]), "text": rng.choice(WORDS)}]
    return None if kind > 0.97 else text


def message(rng, role):
    made = {"role": role, "content": content(rng)}
    if role == "assistant":
        if rng.random() < 0.3:
            made["tool_calls"] = [tool_call(rng) for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.2:
            made["reasoning_content"] = rng.choice(WORDS)
        if rng.random() < 0.05:
            del made["content"]
    if role == "tool":
        made.update({"tool_call_id": "call_1", "name": "search"})
    return made


def conversation(rng):
    messages = []
    if rng.random() < 0.5:
        messages.append(message(rng, rng.choice(["system", "system", "developer"])))
    for _ in range(rng.randint(0, 3)):
        messages += [message(rng, "user"), message(rng, "assistant")]
        if "tool_calls" in messages[-1] and rng.random() < 0.8:
            messages += [message(rng, "tool") for _ in messages[-1]["tool_calls"]] + [message(rng, "assistant")]
    if rng.random() < 0.7:
        messages.append(message(rng, "user"))
    if rng.random() < 0.1:
        rng.shuffle(messages)
    return messages


def tool(rng):
    properties = {name: {"type": rng.choice(["string", "number", ["string", "null"], "array"]),
                         "description": rng.choice(WORDS)} for name in rng.sample(["city", "unit", "n"], rng.randint(0, 3))}
    for value in properties.values():
        if rng.random() < 0.3:
            value["enum"] = ["a", "b"]
        if value["type"] == "array":
            value["items"] = {"type": "string"}
    function = {"name": rng.choice(["get_weather", "search"]), "description": rng.choice(WORDS),
                "parameters": {"type": "object", "properties": properties, "required": list(properties)[:1]}}
    return {"type": "function", "function": function}


def variables(rng):
    made = {"messages": conversation(rng), "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
            "unk_token": "<unk>", "add_generation_prompt": rng.random() < 0.5, "tools": None, "documents": None}
    if rng.random() < 0.4:
        made["tools"] = [tool(rng) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.3:
        made["enable_thinking"] = rng.random() < 0.5
    return made


# -- templates of our own, with the constructs of released ones --------------------------------------------

CHAT = [
    # turns with marks, and the answers marked
    """{% for message in messages %}
    {%- if message.role == 'assistant' -%}
<|{{ message.role }}|>{% generation %}{{ message.content }}<|end|>{% endgeneration %}

    {%- else -%}
<|{{ message['role'] }}|>{{ message['content'] }}<|end|>
    {%- endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
""",
    # a system turn apart, roles that must alternate
    """{%- if messages and messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate; got ' + message.role) }}
    {%- endif %}
    {%- if message['role'] == 'user' and loop.first and system_message is defined %}
        {{- '[INST] ' ~ system_message ~ '\\n\\n' + message['content'] ~ ' [/INST]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- else %}
        {{- raise_exception("only user and assistant; got " ~ message.role) }}
    {%- endif %}
{%- endfor %}
""",
    # tools as JSON, calls, a namespace that finds the last question, backward loops
    """{%- if tools %}
# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
{{ tools | tojson(indent=2) }}{{ tools|tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}
{% endif %}
{%- set ns = namespace(last=messages|length - 1, many=true, seen=[]) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.many and message.role == "user" and message.content is string and not(message.content.startswith('<b>')) %}
        {%- set ns.many = false %}
        {%- set ns.last = index %}
    {%- endif %}
    {%- set ns.seen = ns.seen + [message.role] %}
{%- endfor %}
{{ ns.last }} {{ ns.seen }} {{ ns.nothing is defined }}
{%- for message in messages %}
    {%- if message.content is string %}{% set text = message.content %}{% else %}{% set text = '' %}{% endif %}
    {%- set reasoning = '' %}
    {%- if message.reasoning_content is string %}
        {%- set reasoning = message.reasoning_content %}
    {%- elif '</think>' in text %}
        {%- set reasoning = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
{{ message.role|upper }}: [{{ reasoning.strip('\\n') }}] {{ text }}
    {%- for tool_call in message.tool_calls or [] %}
        {%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
        {{- '<call>' + tool_call.name }} {% if tool_call.arguments is string %}{{ tool_call.arguments }}{% else %}{{ tool_call.arguments | tojson }}{% endif %}
        {%- for key, value in tool_call.arguments.items() if tool_call.arguments is mapping %}
 {{ key }}={{ value }};{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}
        {%- else %} none
        {%- endfor %}
    {%- endfor %}
    {%- if message.role == "tool" and (loop.first or loop.previtem.role != "tool") %} first result{% endif %}
    {%- if loop.last or loop.nextitem.role != "tool" %} end{% endif %}
{% endfor -%}
""",
    # macros, recursion, call blocks, defaults
    """{%- macro render_type(spec, depth=0) -%}
    {%- if spec.type is iterable and spec.type is not string -%}
        {{- spec.type | join(' | ') -}}
    {%- elif spec.type == 'array' -%}
        {{- render_type(spec['items'], depth + 1) }}[]
    {%- elif spec.enum is defined -%}
        {{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- elif spec.type == 'object' and spec.properties -%}
        {
        {%- for name, property in spec.properties | dictsort %}
        {{ '  ' * (depth + 1) }}{{ name }}{{ '' if name in spec.required else '?' }}: {{ render_type(property, depth=depth + 1) }}
        {%- if not loop.last %},{% endif %}
        {%- endfor %}
}
    {%- else -%}{{ spec.type | default('any', true) }}{%- endif -%}
{%- endmacro -%}
{%- macro wrap(tag, cls='none') -%}<{{ tag }} {{ cls }} {{ varargs }} {{ kwargs }}>{{ caller(tag) }}</{{ tag }}>{%- endmacro -%}
{% for tool in tools or [] %}
type {{ tool.function.name }} = {{ render_type(tool.function.parameters) }};
{% call(t) wrap('b', 'x', 1, 2, k=3) %}{{ t }}: {{ tool.function.description|replace('\\n', ' ')|indent(4, first=true) }}{% endcall %}

{% endfor %}
{% for message in messages if message.role != 'system' and message.content is string %}
{{ loop.index }}/{{ loop.length }} {{ loop.cycle('odd', 'even') }} {{ loop.revindex0 }}{{ message.content|length }}
{%- if loop.changed(message.role) %} changed{% endif %}
{% if message.role == 'tool' %}{% continue %}{% endif %}
{% if loop.index > 4 %}{% break %}{% endif %}
{{ message.content[:3] }}|{{ message.content[-2:] }}|{{ message.content[::2] }}|{{ message.content[0] }}
{% else %}
nothing
{% endfor %}
""",
    # lists of parts, selects, maps, sets, strings
    """{% set system = messages|selectattr('role', 'equalto', 'system')|map(attribute='content')|list %}
{{ system }} {{ messages|map(attribute='role')|unique|join(',') }} {{ messages|rejectattr('tool_calls', 'defined')|list|length }}
{% for m in messages %}{% if m.content is not string and m.content is sequence %}{% for part in m.content %}
{{- part.text if part.type == 'text' else '<' ~ part['type'] ~ '>' }}
{%- endfor %}{% else %}{{ m.content|default('none', true)|string|trim|capitalize|replace("a", "A") }}{% endif %}
{% endfor %}
{% set block %}  a {{ messages|length }}
 b{% endset %}[{{ block }}]{% set shouted | upper | trim %} text {{ bos_token }} {% endset %}{{ shouted }}
{% filter upper|replace('S', 'z') %}<{{ eos_token }}>{% endfilter %}
{% with a = 1, b = messages|length %}{{ a + b }}{% endwith %}{{ a is defined }}
{{ strftime_now('%d %b %Y') }} {{ range(3)|list }} {{ dict(a=1) }}
{{ messages[0].content.x.y if messages and messages[0].content is mapping else messages[-1].nothing }}
{{ (messages|first).role if messages else 'empty' }} {{ (messages|last).role if messages }}
""",
]

EXPRESSIONS = r"""
1 + 2 * 3 ** 2 // 4 % 5 - -1|7 / 2|7 // -2|-7 % 3|7.5 // 2|2 ** -1|1e3|1_000|0x1F|10 / 5|5 % -3|-5 // 3.0|2 ** 3 ** 2
'a' 'b' ~ 1 ~ none ~ true ~ 1.0|"it's" ~ '\n\t\x41\u00e9\\' ~ '\q'|'%s is %d and %.2f%%' % ('a', 3, 2.5)|'%05d' % 42
[1, 'a', "it's", none, true, 1.5, (1,), (), {'a': 1, 'b': [2]}]|{'x': 1}.x|{'items': 1}.items is callable|{'items': 1}['items']
1 < 2 < 3|1 < 2 > 2|1 == 1.0|true == 1|'a' < 'b'|[1, 2] < [1, 3]|'a' in 'cat'|2 in [1, 2]|'k' in {'k': 1}|3 not in (1, 2)
not 1 == 2 and 3|0 or ''|'' or 'x'|1 if false|(1 if false) is undefined|'a' if 1 else 'b' if 0 else 'c'
nothing|nothing is defined|nothing ~ 'x'|nothing.x|nothing + 1|[nothing]|nothing|length|nothing in [1]|nothing == missing
'abc'[1]|'abc'[-1]|'abc'[5]|'abcdef'[1:4]|'abcdef'[::-1]|'abcdef'[4:1:-1]|'h\u00e9llo'[1:3]|[1, 2, 3][-2:]|[1, 2, 3][:]|(1, 2, 3)[1:]|'abc'[3:1]|[1,2][5:]
'a,b,c'.split(',')|'a b  c '.split()|'a,b,c'.split(',', 1)|'a,b,c'.rsplit(',', 1)|' a b c'.rsplit(none, 1)|' a b  c '.split(none, 1)|'a\nb\r\nc'.splitlines()|'a-b'.partition('-')|'ab'.rpartition('-')
' x '.strip()|'xxaxx'.strip('x')|'abcab'.lstrip('ab')|'abcab'.rstrip('ab')|'\u00a0x\u3000'.strip()|'Hello World'.lower()|'hello world'.title()|'hELLO'.capitalize()|'a.b-c d'.title()
'hello'.replace('l', 'L')|'hello'.replace('l', 'L', 1)|'ab'.replace('', '-')|'hello'.find('l')|'hello'.rfind('l')|'h\u00e9llo'.find('l')|'hello'.count('l')|'hello'.index('z')|'-'.join(['a', 'b'])|'-'.join([1])
'abc'.startswith('a')|'abc'.startswith(('x', 'a'))|'abc'.endswith('bc')|'abc'.removeprefix('a')|'abc'.removesuffix('c')|'12'.isdigit()|''.isdigit()|'a1'.isalpha()|' '.isspace()|'{} {0} {a}'.format(1)|'{} {a} {{}}'.format(1, a=2)
{'a': 1}.get('a')|{'a': 1}.get('b')|{'a': 1}.get('b', 2)|{'a': 1, 'b': 2}.items()|list|{'a': 1}.keys()|list|{'a': 1}.values()|list|{'a': 1}.b|{'a': 1}.b is none|{}.keys() is iterable
[3, 1, 2]|sort|[3, 1, 2]|sort(reverse=true)|['b', 'A', 'c']|sort|['b', 'A']|sort(case_sensitive=true)|{'b': 1, 'a': 2}|dictsort|{'b': 1, 'a': 2}|dictsort(by='value')|{'b': 1}|items|list
[1, 2, 3]|sum|[1, 2]|first|[]|first|[1, 2]|last|[1, 2, 3]|reverse|list|'abc'|reverse|[1, 2, 1]|unique|list|[1, 5, 2]|max|[4, 2]|min|[]|max|'abc'|list|(1, 2)|list|{'a': 1}|list
[1, 2, 3, 4]|select('even')|list|[1, 2]|reject('odd')|list|[0, 1]|select|list|[{'a': 1}, {'a': 2}, {}]|selectattr('a')|list|[{'a': {'b': 1}}]|map(attribute='a.b')|list|[{}]|map(attribute='a', default=3)|list|['a']|map('upper')|list|['a']|map('replace', 'a', 'b')|join
[1, 2, 3]|batch(2)|list|[1, 2, 3]|batch(2, 0)|list|[{'k': 'b', 'v': 1}, {'k': 'a'}]|groupby('k')|[1, 2]|join('-')|[{'a': 1}]|join(',', attribute='a')|[1, none]|join
'3'|int|'x'|int|'x'|int(-1)|3.9|int|'2.7'|int|-3.9|int|'2.5'|float|'x'|float|2.567|round|2.567|round(2)|2.5|round|3.5|round|2.1|round(method='ceil')|-5|abs|3|float|true|int|none|int
'a\nb\n\nc'|indent|'a\nb\n\nc'|indent(2, true)|'a\nb\n\nc'|indent('> ', blank=true)|'hello world-foo (bar'|title|' a '|trim|'xax'|trim('x')|'aBc'|upper|'%s-%s'|format(1, 'a')|none|string|[1]|string|5|default(1)|''|default(1)|''|default(1, true)|nothing|d
1 is number|1.0 is float|true is integer|1 is integer|true is boolean|'a' is string|{} is mapping|[] is sequence|{} is sequence|'' is iterable|1 is iterable|none is none|nothing is undefined|3 is odd|4 is even|9 is divisibleby 3|1 is eq 1|1 is equalto(2)|1 is in [1]|1 is sameas true|true is sameas true|1 is not none|2 is gt 1|'a' is lower|'A' is upper|true is true|1 is true|false is false|range is callable
range(5)|list|range(1, 10, 3)|list|range(5, 0, -2)|list|range(3)|length|range(3)[1]|range(200000)|[1] + [2]|(1,) + (2,)|[0] * 3|'ab' * 2|'ab' * -1|1 + 'a'|'a' + 1|[] + ()|none + 1|1 / 0|'a' < 1|5()|'a'()|{}.x.y
{'a': [1, {'b': none}], 'c': 'x"y'}|tojson|[1, 2]|tojson(indent=1)|{}|tojson(indent=2)|[]|tojson|1e16|tojson|1e15|tojson|0.1|tojson|1e-5|tojson|'\u00e9\u2028\x7f\x01'|tojson|'\u00e9\U0001f600'|tojson(ensure_ascii=true)|nothing|tojson|{1: 2, none: 3, true: 4}|tojson
'<a>'|safe|'<a>'|safe + '<b>'|'<b>' + '<a>'|safe|('<a>'|safe) ~ '<b>'|['<a>'|safe]|join('<b>')|[1, 2].append(3)|{}.update({})|'a' is foo|'a'|foo|raise_exception('no')
[1, 2, 3]|map('string') is string|([1]|select) is iterable|'yes' if []|select else 'no'|'yes' if {}.items() else 'no'|[1]|select|length|([1, 2]|map('int'))[0]|namespace(a=1).a|namespace({'a': 2}).a|cycler('a', 'b').next()|joiner('|')()|dict(a=1)|dict([('a', 1)])|1.0|1e22|123456789.123|-0.0|1e16|0.00001|'\U0001f600'|length
""".strip().split("\n")

BLOCKS = [
    "a\n{% if true %}\n  b\n{% endif %}\nc\n", "  {% if true %}x{% endif %}  \n  {# c #}\n y {#- d -#} z", "a {%- if true -%} b {%- endif -%} c",
    "  {%+ if true %} x {%+ endif +%}\n y", "{% raw %} {{ a }} {% b %}\n{% endraw %}\nx", "  {%- raw -%}  {{ a }}  {%- endraw -%}  x",
    "{{ 1 }}\n{{ 2 -}}\n\n 3 {{- 4 }}\n\n", "\n\n{% set x = 1 %}\n\n{{ x }}\r\nb\rc\r\n", "{{ {'a': {'b': 1}} }}", "{{ '}}' }}{{ \"%}\" }}",
    "{% for i in [1, 2] %}{% for j in 'ab' %}{{ loop.index }}{{ j }}{% endfor %}{{ loop.index }}{% endfor %}",
    "{% for i in [3, [1, [2]]] recursive %}{% if i is iterable %}<{{ loop(i) }}>{% else %}{{ i }}@{{ loop.depth }}{% endif %}{% endfor %}",
    "{% set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = i + 10 %}{{ x }} {% endfor %}{{ x }}",
    "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}", "{% set a, b = 1, [2] %}{{ a }}{{ b }}{% set (c, d) = 'xy' %}{{ d }}{{ c }}",
    "{% set x = 1 %}{% macro m(a, b=x) %}{{ a }}{{ b }}{{ x }}{% endmacro %}{% set x = 2 %}{{ m(0) }}{{ m(b=3, a=4) }}{{ m() }}",
    "{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}{% call m() %}x{% endcall %}", "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}",
    "{% macro f(n) %}{{ n }}{% if n > 0 %},{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "{% for a, b in [[1, 2], [3, 4]] %}{{ a }}-{{ b }};{% endfor %}{% for a, b in [[1]] %}{% endfor %}", "{% for x in none %}{% endfor %}",
    "{% macro m(a, b=2, c=3) %}{{ a }},{{ b }},{{ c }};{% endmacro %}{{ m(*[1, 5]) }}{{ m(1, *[], c=7) }}{{ m(**{'a': 4, 'c': 'x'}) }}"
    "{{ m(*'ab', **{'c': 1}) }}{{ m(c=1, *[8]) }}{{ m(*[1], b=3, **{}) }}{{ [m, m][1](*[[1], [2, 3]][1]) }}",
    "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, *range(3), x=1, **{'y': [2]}) }}{{ m(*{'k': 1}) }}{{ m(*nothing) }}",
    "{{ dict(a=1, **{'b': 2}) }}{{ namespace(**{'x': 3}).x }}{{ ['b', 'a'] | join(*['-']) }}{{ [2, 1] | sort(**{'reverse': true}) }}"
    "{{ 'a-b'.split(*['-', 1]) }}{{ 4 is divisibleby(*[2]) }}",
    "{% macro m(a) %}{% endmacro %}{{ m(*[1, 2]) }}", "{% macro m(a) %}{% endmacro %}{{ m(a=1, **{'a': 2}) }}",
    "{% macro m(a) %}{% endmacro %}{{ m(1, **{'a': 2}) }}", "{% macro m() %}{{ kwargs }}{% endmacro %}{{ m(**nothing) }}",
    "{% macro m() %}{{ kwargs }}{% endmacro %}{{ m(**[1]) }}", "{% macro m() %}{{ kwargs }}{% endmacro %}{{ m(**{1: 2}) }}",
    "{% macro m() %}{{ varargs }}{% endmacro %}{{ m(*1) }}", "{{ f(*[1], 2) }}", "{{ f(**{}, *[1]) }}", "{{ f(*[1], *[2]) }}", "{{ f(**{}, a=1) }}", "{{ f(**{}, **{}) }}",
    "{% for x in nothing %}{% else %}empty{% endfor %}", "{% for i in range(10) if i % 3 == 0 %}{{ i }}{{ loop.last }}{{ loop.revindex }} {% endfor %}",
    "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}{% set ns.a = 'x' %}{{ ns['a'] }}",
    "{% set x = {} %}{% set x.a = 1 %}", "{% set ns = namespace() %}{% set ns._a = 1 %}", "{% if %}{% endif %}", "{{ 1 +", "{% for %}", "{% else %}", "{{ ) }}",
    "{% include 'x' %}", "{% break %}", "{{ a b }}", "{% set true = 1 %}", "{% endfor %}", "{# open", "{{ 'open }}", "{% foo %}",
    "{% generation %}a{% endgeneration %}b{%- generation -%} c {%- endgeneration -%} d", "\u00e9{% generation %}\u00e9\U0001f600{% endgeneration %}",
    "{% for i in [1, 2] %}{% set y = i %}{% generation %}{% set y = 9 %}{{ i }}{{ y }}{% endgeneration %}{{ y }}{% endfor %}",
    "{% set ns = namespace(stop=false) %}{% for i in [1, 2, 3] if not ns.stop %}{{ i }}{% set ns.stop = true %}{% endfor %}",
    "{% with %}{% set q = 1 %}{{ q }}{% endwith %}{{ q }}", "{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}",
    "{% set x %}{% set y = 1 %}{{ y }}{% endset %}{{ x }}{{ y }}", "{% filter trim %}  a  {% endfilter %}|", "{{ x.y }}", "{{ x['y'] }}",
    "{% for k in {'b': 1, 'a': 2} %}{{ k }}{% endfor %}{% for k, v in {'b': 1}.items() %}{{ k }}{{ v }}{% endfor %}",
    "{{ loop }}", "{{ none|selectattr('a')|list }}{{ none|map('upper')|list }}", "{% if false %}{{ 1|nope }}{% endif %}x", "{% for i in [1] %}{{ loop.nope }}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{% endfor %}",
    "{% for i in [1,1,2] %}{{ loop.changed(i) }}{% endfor %}", "{% set f = 'a'.upper %}{{ f() }}", "{{ [1, 2,] }}{{ (1, 2,) }}{{ {'a': 1,} }}{{ range(1,) | list }}",
]


def own_cases():
    rng = random.Random(20260307)
    for template in CHAT:
        for _ in range(12):
            yield template, variables(rng)
    for line in EXPRESSIONS:
        for expression in split_cases(line):
            yield "{{ " + expression + " }}", {}
    for template in BLOCKS:
        yield template, {}


def split_cases(line):
    """Cases are separated by |. A piece that begins with the name of a filter belongs to the one before."""
    env = environment()
    cases = []
    for piece in line.split("|"):
        name = piece.split("(")[0].split(" ")[0].split("[")[0].strip(")")
        if cases and (name in env.filters or name in ("foo", "')()")):
            cases[-1] += "|" + piece
        else:
            cases.append(piece)
    return cases


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--templates", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--each", type=int, default=60, help="conversations for each template")
    args = parser.parse_args()
    pairs = own_cases()
    if args.templates:
        rng = random.Random(1)
        pairs = ((path.read_text(), variables(rng)) for path in sorted(args.templates.glob("*.jinja"))
                 for _ in range(args.each))
    cases = [{"template": template, "variables": values, **render(template, values)} for template, values in pairs]
    out = args.out if args.templates else args.file
    out.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
    failed = sum("error" in case for case in cases)
    print(f"{out}: {len(cases)} cases, {failed} of them errors")


if __name__ == "__main__":
    main()
