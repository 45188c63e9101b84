#!/usr/bin/env python3
"""Writes what transformers makes of chats: ids, and the mask of the assistant's ids.

    tools/chat_golden.py [FILE]   rewrites FILE (default tests/golden/data/chats.json)

FILE has the templates, and a list of cases: the name of a tokenizer of tests/golden/data/tokenizers, the
index of a template, a chat, its ids, and the mask of apply_chat_template(return_assistant_tokens_mask=True).
A chat that the template refuses has {"error": true} instead. Chats whose masks by transformers are wrong
are left out; is_masked_well says which. Where "turns" is true, the mask does not need {% generation %}: the
template without it has the same.
Needs transformers 5.23, with jinja2 and without torch.
"""

import json
import random
import sys
from pathlib import Path

from jinja_golden import message, tool
from transformers import PreTrainedTokenizerFast

DATA = Path(__file__).resolve().parent.parent / "tests" / "golden" / "data"
STYLES = ["qwen2", "llama3", "gpt2", "o200k", "deepseek3", "llama2", "gemma"]

TEMPLATES = [
    # the answer with the token that ends it
    """{%- if tools %}<|tools|>{{ tools | tojson }}
{% endif %}
{%- for m in messages %}
{{- '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<call>{{ call | tojson }}</call>{% endfor %}{{ eos_token }}{% endgeneration %}
{%- else %}{{ m.content }}{{ eos_token }}{% endif %}

{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}""",
    # the answer alone, in the middle of words and lines
    """{{- bos_token }}{% for m in messages %}
{%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('no role ' + m.role) }}{% endif %}
{%- if m.role == 'assistant' %}A:{% generation %}{{ m.content or 'nothing' }}{% endgeneration %}Z
{% else %}{{ m.role }}:{{ m.content }}
{% endif %}{% endfor %}""",
    # nothing marks an answer
    """{% for m in messages %}[{{ m.role }}] {{ m.content | default('', true) | trim }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}""",
]

# As in Gemma 4, the results of tools are printed between the calls of a turn and its content, an answer that follows
# continues the turn, and thoughts are printed after the last question only.
CONTINUES = "{%- elif ns.next == 'assistant' %}"
RESULTS_INSIDE_A_TURN = """{%- set ns = namespace(question=-1, previous='', next='', results=[]) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<user>\\n' + m.content + '<end>\\n' }}{% endif %}
{%- if m.role == 'assistant' %}
{%- if ns.previous != 'assistant' %}{{ '<assistant>\\n' }}{% endif %}
{%- set ns.results = [] %}{% set ns.next = '' %}
{%- for n in messages[loop.index:] %}{% if n.role != 'tool' %}{% set ns.next = ns.next or n.role %}
{%- elif not ns.next %}{% set ns.results = ns.results + [n.content + '</result>'] %}{% endif %}{% endfor %}
{%- generation %}
{%- if m.reasoning_content and loop.index0 > ns.question %}<thought>{{ m.reasoning_content }}</thought>{% endif %}
{%- for call in m.tool_calls or [] %}<call>{{ call.name }}</call>{% endfor %}
{%- if ns.results %}<result>{% endif %}{% endgeneration %}{{ ns.results | join('<result>') }}
{%- generation %}{{ m.content }}{% if m.tool_calls and not ns.results %}<result>
""" + CONTINUES + """
{%- elif m.content or not ns.results %}{{ '<end>\\n' }}{% endif %}{% endgeneration %}
{%- endif %}
{%- if m.role != 'tool' %}{% set ns.previous = m.role %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<assistant>\\n' }}{% endif %}"""
WITH_RESULTS = [RESULTS_INSIDE_A_TURN, RESULTS_INSIDE_A_TURN.replace(CONTINUES + "\n", "")]


def chat_with_results(rng):
    word = lambda: rng.choice(["light", "day 7", "Gr\u00fc\u00dfe, alle", "a\nb", "it's <b>"])
    messages = []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": word()})
        for _ in range(rng.randint(0, 2)):
            calls = [{"name": rng.choice("fg")} for _ in range(rng.randint(1, 2))]
            messages.append({"role": "assistant", "content": word(), "tool_calls": calls})
            messages += [{"role": "tool", "content": word()} for _ in calls]
        if messages[-1]["role"] == "user" or rng.random() < 0.8:
            messages.append({"role": "assistant", "content": word()})
    for m in messages:
        if m["role"] == "assistant" and rng.random() < 0.4:
            m["reasoning_content"] = word()
    return {"messages": messages}


def is_masked_well(line):
    """transformers 5.23 leaves out of a mask all that follows an answer that begins with a space, where the
    tokenizer trims offsets, and all but the first id of a last character that is spread over several."""
    answers = [m.get("content") or "x" for m in line["messages"] if m["role"] == "assistant"]
    return not any(isinstance(text, str) and (text[0] == " " or ord(text[-1]) > 127) for text in answers)


def chat(rng):
    while True:
        line = any_chat(rng)
        if is_masked_well(line):
            return line


def any_chat(rng):
    messages = [message(rng, rng.choice(["system", "developer"]))] if rng.random() < 0.4 else []
    for _ in range(rng.randint(1, 3)):
        messages += [message(rng, "user"), message(rng, "assistant")]
        if "tool_calls" in messages[-1]:
            messages += [message(rng, "tool") for _ in messages[-1]["tool_calls"]] + [message(rng, "assistant")]
    made = {"messages": messages}
    if rng.random() < 0.3:
        made["tools"] = [tool(rng)]
    return made


def case(tokenizer, template, line):
    try:
        made = tokenizer.apply_chat_template(
            line["messages"], tools=line.get("tools"), chat_template=template, return_dict=True,
            return_assistant_tokens_mask="generation %}" in template)
    except Exception as error:  # of the template; any other would show as a case that Moebius takes
        return {"error": True, "text": str(error)[:80]}
    result = {"ids": list(made["input_ids"])}
    if "assistant_masks" in made:
        result["mask"] = list(made["assistant_masks"])
    return result


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA / "chats.json"
    rng, rng_of_results = random.Random(20260308), random.Random(20261130)
    cases = []
    for style in STYLES:
        path = DATA / "tokenizers" / style / "tokenizer.json"
        special = [token["content"] for token in json.loads(path.read_text())["added_tokens"] if token["special"]]
        tokens = {"bos_token": special[0], "eos_token": special[-1]}
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), **tokens)
        for index, template in enumerate(TEMPLATES):
            for _ in range(5):
                line = chat(rng)
                cases.append({"tokenizer": style, "tokens": tokens, "template": index, "line": line,
                              **case(tokenizer, template, line)})
        for index, template in enumerate(WITH_RESULTS, len(TEMPLATES)):
            for _ in range(3):
                line = chat_with_results(rng_of_results)
                cases.append({"tokenizer": style, "tokens": tokens, "template": index, "turns": True, "line": line,
                              **case(tokenizer, template, line)})
    lines = ",\n".join(json.dumps(one) for one in cases)
    out.write_text('{"templates": ' + json.dumps(TEMPLATES + WITH_RESULTS) + ',\n"cases": [\n' + lines + "\n]}\n")
    print(f"{out}: {len(cases)} cases, {sum('error' in one for one in cases)} of them errors")


if __name__ == "__main__":
    main()
