from __future__ import annotations

import gc
import sys

import pytest

from naiad.errors import InvalidRequestError
from naiad.tokenization.chat_template import ChatTemplate

GROWING = (
    "{{% set ns = namespace(s='aaaaaaaa') %}}{{% for i in range({}) %}}{{% set ns.s = {} %}}{{% endfor %}}"
)
MESSAGES = [{"role": "user", "content": "hello"}]


def rendered(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ ''.format.__self__ }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ '{0.__class__}'.format_map({}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ ().__class__.__bases__ }}",
        "{% set x = ''.__class__ %}",
        "{% for x in [].__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    ],
)
def test_reaching_out_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ [0] * 1000000000 }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        GROWING.format(60, "ns.s ~ ns.s"),
        GROWING.format(9, "ns.s.replace('a', ns.s)"),
        GROWING.format(9, "ns.s|replace('a', ns.s)"),
        "{{ ('x' * 99999).join(range(99999)|map('string')) }}",
        "{{ range(99999)|join('x' * 99999) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ 'a\nb'|indent(1000000000) }}",
        "{{ messages|tojson(indent=1000000000) }}",
        "{{ [1]|batch(1000000000, 0)|list }}",
    ],
)
def test_running_away_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        rendered(source)


def test_the_time_limit_names_itself() -> None:
    with pytest.raises(InvalidRequestError, match=r"longer than 0\.5 s"):
        rendered("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}")


@pytest.mark.parametrize("expression", ["ns.s ~ ns.s", "ns.s + ns.s", "ns.s * 9"])
def test_a_value_that_grows_is_stopped_by_its_size(expression: str) -> None:
    with pytest.raises(InvalidRequestError, match="a value longer than"):
        rendered(GROWING.format(40, expression))


def test_tracing_is_given_back() -> None:
    before = sys.gettrace()
    rendered("{{ bos_token }}")
    with pytest.raises(InvalidRequestError):
        rendered("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}")
    assert sys.gettrace() is before


# Jinja reads these, and makes code of them that Python does not.
@pytest.mark.parametrize(
    "source", ["{{ messages['role', :3] }}", "{{ f(x=1, x=2) }}", "{% macro f(a, a) %}{% endmacro %}"]
)
def test_a_template_that_python_does_not_compile_has_a_fault(source: str) -> None:
    template = ChatTemplate(source, {})
    assert template.fault
    with pytest.raises(InvalidRequestError, match="chat template can not be used"):
        template.render(MESSAGES)


def test_a_template_that_does_not_compile_is_refused_when_used() -> None:
    template = ChatTemplate("{% for %}", {})
    with pytest.raises(InvalidRequestError, match="can not be used"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages|tojson }}", '[{"role": "user", "content": "hello"}]'),
        ("{% generation %}{{ bos_token }}{% endgeneration %}", "<s>"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ '%s-%02d' % ('a', 5) }}", "a-05"),
        ("{{ messages|map(attribute='content')|join(', ') }}", "hello"),
        ("{{ messages[0].content.replace('l', 'L', 1)|replace('h', 'H') }}", "HeLlo"),
        ("{{ ['a', 'b']|join('-') ~ '-'.join(['c', 'd']) }}", "a-bc-d"),
        ("    {% if tools is none %}\nx\n{% endif %}\n", "x\n"),
        ("{{ '7'|int + 1 }}{{ 'a\nb'|indent(2) }}", "8a\n  b"),
        ("{{ add_generation_prompt }}{{ pad_token is defined }}", "TrueFalse"),
    ],
)
def test_what_chat_templates_use_works(source: str, expected: str) -> None:
    assert rendered(source) == expected


def test_nothing_is_left_to_the_garbage_collector() -> None:
    template = ChatTemplate("{% for each in messages %}{{ each.content }}{% endfor %}", {})
    template.render(MESSAGES)
    gc.collect()
    template.render(MESSAGES)
    assert gc.collect() == 0
