"""Request bodies. Names and defaults are OpenAI's; the further names are vLLM's. A null field means its default.

Values are checked where they are understood (``SamplingParams``, the tokenizer); here only types. Fields that are not
listed are ignored, as OpenAI clients send some that concern only OpenAI (``user``, ``store``, ``metadata``), except
those that would change the answer: they are refused.
"""

from __future__ import annotations

from typing import Annotated, Any

import pydantic

from jaxsqueeze.server.config import MAX_STOP_STRINGS
from jaxsqueeze.types import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_IDS

# What a client would wrongly believe to have been heard.
UNSUPPORTED = (
    *("tools", "functions", "function_call", "documents", "chat_template", "audio", "web_search_options"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
    *("grammar", "ebnf", "regex", "json_schema", "allowed_token_ids", "logits_processors"),
    *("prompt_embeds", "use_beam_search", "truncate_prompt_tokens", "mm_processor_kwargs"),
)

Texts = Annotated[
    list[str],
    pydantic.Field(max_length=MAX_STOP_STRINGS),
    pydantic.BeforeValidator(lambda x: [x] if isinstance(x, str) else x, json_schema_input_type=str | list[str]),
]
Ids = Annotated[list[int], pydantic.Field(max_length=MAX_STOP_IDS)]
Words = Annotated[list[str], pydantic.Field(max_length=MAX_BAD_WORDS)]
Priority = Annotated[int, pydantic.Field(ge=-(2**31), lt=2**31)]


class Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @classmethod
    def openapi_body(cls) -> dict[str, Any]:
        """For the OpenAPI page: routes read their bodies themselves, under their own limits."""
        return {"required": True, "content": {"application/json": {"schema": cls.model_json_schema()}}}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _nulls_are_defaults(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class Generate(Body):
    """What completions and chat completions share."""

    model: str | None = None
    stream: bool = False
    stream_options: dict[str, bool | None] | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] = pydantic.Field({}, max_length=MAX_LOGIT_BIAS)
    bad_words: Words = []
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    prompt_logprobs: int | None = None
    stop: Texts = []
    stop_token_ids: Ids = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: Priority = 0
    return_token_ids: bool = False  # adds token_ids (and prompt_token_ids) to each choice
    response_format: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _refuse(self) -> Generate:
        for name in UNSUPPORTED:
            if (self.model_extra or {}).get(name) not in (None, False, []):  # an empty schema or grammar is one too
                raise ValueError(f"{name} is not supported by this server")
        if (self.response_format or {}).get("type", "text") != "text":
            raise ValueError("response_format other than text is not supported by this server")
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of is not supported (other than equal to n), got {self.best_of}")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be streamed (use echo with logprobs)")
        return self

    def wants_usage(self, key: str) -> bool:
        return bool((self.stream_options or {}).get(key))


class CompletionRequest(Generate):
    prompt: Any = pydantic.Field(None, description="a text, token ids, or a list of either")
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    add_special_tokens: bool = True

    @pydantic.model_validator(mode="after")
    def _no_suffix(self) -> CompletionRequest:
        if self.suffix:
            raise ValueError("suffix (fill in the middle) is not supported by this server")
        return self


class ChatFields(Body):
    """How messages become a prompt."""

    messages: list[dict[str, Any]] = pydantic.Field(min_length=1, max_length=4096)
    add_generation_prompt: bool | None = None  # default: unless the final message is continued
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class ChatRequest(ChatFields, Generate):
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[str] | None = None

    @pydantic.model_validator(mode="after")
    def _refuse_chat(self) -> ChatRequest:
        if self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice is not supported by this server")
        if self.modalities not in (None, ["text"]):
            raise ValueError("modalities other than text are not supported by this server")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if (self.model_extra or {}).get("echo"):
            raise ValueError("echo is for /v1/completions")
        return self


class TokenizeRequest(Body):
    """A ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]
