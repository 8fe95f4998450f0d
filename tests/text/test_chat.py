"""Chat templates. Expected texts are written out by hand from what each template says."""

import datetime

import pytest

from jaxsqueeze.text.chat import RESERVED_KWARGS, ChatTemplate
from tests.text.build_tokenizers import CHAT

USER = [{"role": "user", "content": "Hi"}]
TRIMMED = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


def render(source, messages, **options):
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_plain_turn():
    assert render(CHAT, USER) == "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_bos_is_rendered_once(sentencepiece):
    text = ChatTemplate.of(sentencepiece).render(USER)
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert ids.count(sentencepiece.bos_token_id) == 1
    assert ids[0] == sentencepiece.bos_token_id


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_part_lists_equal_the_string(role):
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " world"}]
    assert render(CHAT, [{"role": role, "content": parts}]) == render(CHAT, [{"role": role, "content": "Hello world"}])


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, {"type": "text"}, "text", {"text": "x"}])
def test_other_parts_are_refused(part):
    with pytest.raises(ValueError, match="parts must be of type text"):
        render(CHAT, [{"role": "user", "content": [part]}])


def test_a_template_error_is_a_value_error():
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
    with pytest.raises(ValueError, match="System role not supported"):
        render(source, [{"role": "system", "content": "x"}])
    assert render(source, USER) == "ok"


def test_any_failure_inside_a_template_is_a_value_error():
    with pytest.raises(ValueError, match="chat template refused"):
        render("{{ messages[0].content + 'x' }}", [{"role": "user", "content": None}])
    with pytest.raises(ValueError, match="chat template refused"):
        render("{{ 1 / 0 }}", USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_templates_run_in_a_sandbox(source):
    with pytest.raises(ValueError, match="chat template refused"):
        render(source, USER)


def test_broken_and_missing_templates():
    with pytest.raises(ValueError, match="not valid"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(ValueError, match="no chat template"):
        ChatTemplate(None, {})


class TestExtras:
    def test_tojson_leaves_html_and_unicode_alone(self):
        assert render("{{ messages[0].x | tojson }}", [{"role": "user", "x": {"a": "<é&'>"}}]) == '{"a": "<é&\'>"}'
        assert render("{{ {'a': 1} | tojson(indent=2) }}", USER) == '{\n  "a": 1\n}'

    def test_loop_controls_and_block_trimming(self):
        source = (
            "{% for m in messages %}\n    {% if loop.index > 1 %}\n        {% break %}\n    {% endif %}\n"
            "{{ m.role }}\n{% endfor %}"
        )
        assert render(source, [*USER, {"role": "assistant", "content": ""}]) == "user\n"

    def test_strftime_now(self):
        assert render("{{ strftime_now('%Y') }}", USER) in {
            str(datetime.date.today().year),
            str(datetime.date.today().year - 1),
        }

    def test_generation_block_is_its_body(self):
        source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        assert render(source, USER) == "Hi"

    def test_kwargs_reach_the_template(self):
        source = "{{ 'think' if enable_thinking else 'plain' }}"
        assert render(source, USER, kwargs={"enable_thinking": True}) == "think"

    def test_developer_is_system_where_the_template_does_not_know_it(self):
        assert render("{{ messages[0].role }}", [{"role": "developer", "content": "x"}]) == "system"
        known = "{{ messages[0].role }}{# developer #}"
        assert render(known, [{"role": "developer", "content": "x"}]) == "developer"

    def test_tool_call_arguments_reach_the_template_as_objects(self):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
        messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        assert render("{{ messages[0].tool_calls[0].function.arguments.a[0] }}", messages) == "1"
        bad = {**call, "function": {"name": "f", "arguments": "{"}}
        with pytest.raises(ValueError, match="not JSON"):
            render(CHAT, [{"role": "assistant", "content": None, "tool_calls": [bad]}])


class TestRequestTemplates:
    @pytest.mark.parametrize("name", sorted(RESERVED_KWARGS))
    def test_reserved_names_are_refused(self, name):
        with pytest.raises(ValueError, match=name):
            render(CHAT, USER, kwargs={name: "{{ 1 }}"})


class TestContinuation:
    def options(self):
        return {"add_generation_prompt": False, "continue_final_message": True}

    def messages(self, content):
        return [*USER, {"role": "assistant", "content": content}]

    def test_both_flags_are_refused(self):
        with pytest.raises(ValueError, match="cannot both"):
            render(CHAT, USER, add_generation_prompt=True, continue_final_message=True)

    def test_final_turn_is_left_open(self):
        got = render(CHAT, self.messages("Sure, "), **self.options())
        assert got == "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nSure, "

    def test_a_template_that_trims_still_trims(self):
        got = render(TRIMMED, self.messages(" Sure, "), **self.options())
        assert got == "<user>\nHi<end>\n<assistant>\nSure,"

    def test_content_that_occurs_twice_is_cut_at_the_last(self):
        messages = [{"role": "user", "content": "end"}, {"role": "assistant", "content": "end"}]
        assert render(TRIMMED, messages, **self.options()) == "<user>\nend<end>\n<assistant>\nend"

    def test_parts_and_empty_content(self):
        got = render(CHAT, self.messages([{"type": "text", "text": "A"}]), **self.options())
        assert got.endswith("assistant\nA")
        assert render(CHAT, self.messages(""), **self.options()).endswith("<|im_start|>assistant\n")

    def test_template_that_hides_the_message_is_refused(self):
        with pytest.raises(ValueError, match="does not show"):
            render("{{ messages[0].content }}", self.messages("x"), **self.options())
        with pytest.raises(ValueError, match="text content"):
            render("x", self.messages(None), **self.options())


def test_empty_conversation_is_refused():
    with pytest.raises(ValueError, match="messages"):
        render(CHAT, [])
