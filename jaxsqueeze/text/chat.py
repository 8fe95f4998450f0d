"""Chat templates: messages to the prompt text a model was trained on.

A template is a program from a checkpoint, so it runs in jinja2's immutable sandbox, with the extras that published
templates rely on. Whatever goes wrong while it runs is the request's fault (ValueError): a role it does not know, a
field it needs. The rendered text carries its own BOS; encode it with ``add_special_tokens=False``.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from jaxsqueeze.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

# Names a request's chat_template_kwargs may not set: they are the server's, or other parameters of the request.
RESERVED_KWARGS = frozenset(
    {"chat_template", "messages", "conversation", "tools", "documents", "add_generation_prompt", "tokenize"}
    | {"continue_final_message", "return_dict", "bos_token", "eos_token", "unk_token", "sep_token", "pad_token"}
    | {"cls_token", "mask_token", "raise_exception", "strftime_now"}
)
_CUT = "\ue000\ue001\ue000"  # private-use characters: marks where the final turn is left open


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks an assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class ChatTemplate:
    """One compiled template. Raises ValueError if the source is missing or not jinja2."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        if source is None:
            raise ValueError("this model has no chat template: use /v1/completions, or convert it with one")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        return cls(tokenizer.chat_template, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. ``continue_final_message`` leaves the last turn open, to be continued by the model.

        ``kwargs`` are further variables for the template (``enable_thinking``); those in ``RESERVED_KWARGS`` are
        refused. Raises ValueError."""
        if add_generation_prompt and continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message cannot both be true")
        if refused := RESERVED_KWARGS.intersection(kwargs or ()):
            raise ValueError(f"chat_template_kwargs may not set {', '.join(sorted(refused))}")
        if not messages:
            raise ValueError("messages must not be empty")
        plain = [self._normalise(m) for m in messages]
        variables = {**(kwargs or {}), "add_generation_prompt": add_generation_prompt}
        whole = self._run(plain, variables)
        if not continue_final_message:
            return whole
        marked = self._run([*plain[:-1], {**plain[-1], "content": _content_text(plain[-1]) + _CUT}], variables)
        start, cut, _ = marked.rpartition(_CUT)
        if not cut:
            raise ValueError("continue_final_message: the chat template does not show the final message's content")
        # A template that trims content trims it here too: the mark hides the content's end from it.
        return start if whole.startswith(start) else start.rstrip()

    def _run(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(
                {"tools": None, "documents": None, **self._special_tokens, **variables, "messages": messages}
            )
        except Exception as error:  # the template is not ours: any failure is this request's
            raise ValueError(f"the chat template refused these messages: {error}") from error

    def _normalise(self, message: Message) -> dict[str, Any]:
        """Part lists become strings, and tool-call arguments objects, as templates expect them."""
        out = dict(message)
        if isinstance(out.get("content"), list):
            out["content"] = "".join(_part_text(part) for part in out["content"])
        if out.get("role") == "developer" and not self._knows_developer:
            out["role"] = "system"
        if out.get("tool_calls"):
            out["tool_calls"] = [_parsed_call(call) for call in out["tool_calls"]]
        return out


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise ValueError("continue_final_message needs a final message with text content")
    return content


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
        raise ValueError(f"message content parts must be of type text, got {kind!r}")
    return part[kind]


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tool call arguments are not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}
