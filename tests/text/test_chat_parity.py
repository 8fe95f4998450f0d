"""Chat templates against transformers' own renderer, on templates in the styles of the families we serve."""

import pytest

from jaxsqueeze.text.chat import ChatTemplate
from tests.text import build_tokenizers

pytestmark = pytest.mark.parity

TEMPLATES = {
    "chatml": build_tokenizers.CHAT,
    "headers and trimming": (
        "{{- bos_token }}\n{%- for m in messages %}\n"
        "    {{- '<|head|>' + m.role + '<|end_head|>\\n\\n' + m.content | trim + '<|turn|>' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|head|>assistant<|end_head|>\\n\\n' }}\n{%- endif %}\n"
    ),
    "system folded into the first turn": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ (first if loop.first else '') + m.content | trim }}</turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}"
    ),
    "brackets": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
        "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    ),
    "json and loops": (
        "{% for m in messages %}{% if loop.index0 > 5 %}{% break %}{% endif %}"
        "{{ {'role': m.role, 'text': m.content} | tojson }}\n{% endfor %}"
        "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    ),
}
CONVERSATIONS = [
    [{"role": "user", "content": "Hi <b>&' there é"}],
    [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": " padded \n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " Sure, here "},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "a"},
    ],
    [{"role": "assistant", "content": "wrong"}, {"role": "user", "content": "order"}],
]


@pytest.fixture(scope="module")
def theirs():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=build_tokenizers.sentencepiece(), bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("index", range(len(CONVERSATIONS)))
@pytest.mark.parametrize(
    ("generate", "continued", "kwargs"),
    [(True, False, {}), (False, False, {"enable_thinking": False}), (False, True, {})],
)
def test_equals_transformers(theirs, name, index, generate, continued, kwargs):
    messages, source = CONVERSATIONS[index], TEMPLATES[name]
    ours = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    try:
        want = theirs.apply_chat_template(
            messages,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=generate,
            continue_final_message=continued,
            **kwargs,
        )
    except Exception:
        with pytest.raises(ValueError, match=r"chat template refused|does not show"):
            ours.render(messages, generate, continued, kwargs)
    else:
        assert ours.render(messages, generate, continued, kwargs) == want
