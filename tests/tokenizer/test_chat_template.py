"""Templates that loop or build without end are stopped; what published templates do still works."""

import time
import tracemalloc

import pytest

from jaxspec.conversion import ConversionError
from jaxspec.tokenizer import chat_template
from jaxspec.tokenizer.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "a b"}]
LOOP = "{% for i in range(99999) %}"
BOMBS = {
    "a loop of loops": LOOP * 4 + "{% endfor %}" * 4,
    "output in loops": LOOP * 3 + "x" + "{% endfor %}" * 3,
    "long output": LOOP + "{{ 'x' * 10000 }}{% endfor %}",
    "a product": "{{ 'x' * 10 ** 10 }}",
    "a product the other way": "{{ 2000000000 * 'xxxxxxxxxx' }}",
    "a list": "{{ ([1] * 10 ** 9) | length }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "doubling with ~": "{% set ns = namespace(x='xx') %}" + LOOP + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling with +": "{% set ns = namespace(x='xx') %}" + LOOP + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling lists": "{% set ns = namespace(x=[1]) %}" + LOOP + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "squaring": "{% set ns = namespace(x=3) %}" + LOOP + "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling blocks": "{% set x = 'xx' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60 + "{{ x }}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "endless macros": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a wide filter": "{{ 'x' | center(10000000000) }}",
    "a wide method": "{{ 'x'.ljust(10000000000) }}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a width apart": "{{ '%*d' % (1000000000, 1) }}",
    "a wide format filter": "{{ '%10000000000d' | format(1) }}",
    "a wide format method": "{{ '{:10000000000}'.format(1) }}",
    "replaced": "{{ ('x' * 100000).replace('x', 'x' * 1000000) }}",
    "replaced by a filter": "{{ ('x' * 100000) | replace('x', 'y' * 1000000) }}",
    "joined": "{{ range(99999) | list | join('x' * 1000000) }}",
    "joined by a method": "{{ ('x' * 1000000).join(['a'] * 100000) }}",
    "indented": "{{ ('\\n' * 100000) | indent(1000000) }}",
    "a sum of lists": "{% set x = range(99999) | list %}{{ [x, x, x, x, x, x, x, x, x, x, x, x, x] | sum(start=[]) | length }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 1.0)
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1 << 22)
    tracemalloc.start()
    begun = time.monotonic()
    with pytest.raises(ConversionError, match="the chat template") as caught:
        ChatTemplate(BOMBS[name]).render({"messages": MESSAGES})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.monotonic() - begun < 20 and peak < 1 << 27 and len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages.x.y }}",
        "{{ none + 1 }}",
        "{{ messages[0] | int('x') + [] }}",
        "{{ [] | first + 1 }}",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ x() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
)
def test_failures_are_named(source):
    with pytest.raises(ConversionError, match="the chat template"):
        ChatTemplate(source).render({"messages": MESSAGES})


@pytest.mark.parametrize(
    "source, text",
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim ~ '!' ~ 3 }}\n{% endfor %}", "<user>a b!3\n"),
        ("{% for m in messages %}{{ loop.index0 + 1 }}{{ loop.last }}{% else %}none{% endfor %}", "1True"),
        (
            "{% set ns = namespace(a='') %}{% for c in 'abc' %}{% if c == 'b' %}{% continue %}{% endif %}"
            "{% set ns.a = ns.a + c %}{% endfor %}{{ ns.a }}",
            "ac",
        ),
        ("{{ messages | tojson(indent=1) }}", '[\n {\n  "role": "user",\n  "content": "a b"\n }\n]'),
        ("{{ 'a,b'.split(',') | join('-') }}{{ '%s and %d' % ('x', 3) }}{{ 'x' * 3 }}", "a-bx and 3xxx"),
        (
            "{{ messages | map(attribute='role') | list }}"
            "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
            "['user']1",
        ),
        ("{% generation %}y{% endgeneration %}{{ none if x is undefined else 2 }}", "yNone"),
        ("{% macro m(a, b='z') %}[{{ a ~ b }}]{% endmacro %}{{ m('q') }}{{ messages[0].items() | list | length }}", "[qz]2"),
        (
            "{{ 'A' | lower }}{{ 'a b' | replace(' ', '_') }}{{ [3, 1] | sort | first }}{{ {'k': 1} | dictsort }}",
            "aa_b1[('k', 1)]",
        ),
        (
            "{{ strftime_now('%Y') | length }}{{ '12' | int + 1 }}{{ messages[-1:] | length }}{{ 7 // 2 }}{{ -3 | abs }}",
            "413133",
        ),
    ],
)
def test_what_templates_do(source, text):
    assert ChatTemplate(source).render({"messages": MESSAGES}) == text
