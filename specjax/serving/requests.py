"""The requests of OpenAI's clients, checked field by field.

A field that is unknown, or that asks for something this server does not do, is refused: an output
that ignores it would not be the one that was asked for. Fields that change no output are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from specjax.files.json_objects import refuse_constant
from specjax.serving.errors import Refused
from specjax.speculation.penalties import LogitBias
from specjax.speculation.sampling import IDLE, Sampling

MOST_OUTPUTS = 128  # of one request
MOST_BIASES = 300  # of one request
_MOST_TOKENS = 2**20
_GREEDY = 1e-6  # temperatures below it
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")

Text = Annotated[str, Field(max_length=2**22)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=_MOST_TOKENS)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]  # a token id as a key of JSON
Biases = Annotated[
    dict[TokenText, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)
]
Label = Annotated[str, Field(max_length=500)]


class Checked(BaseModel):
    """Values have the type that JSON gives them; no field is ignored."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(Checked):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class JsonSchema(Checked):
    """A schema with its name."""

    name: Label
    description: Text | None = None
    definition: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # an answer always keeps to the schema


class ResponseFormat(Checked):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _one(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type 'json_schema', and only with it")
        return self


class Common(Checked):
    """The fields that both kinds of request have."""

    model: Label
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_OUTPUTS)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    logit_bias: Biases | None = None
    response_format: ResponseFormat | None = None
    guided_regex: Text | None = None
    guided_grammar: Text | None = None
    # They change no output.
    user: Label | None = None
    metadata: dict[str, Any] | None = None

    def sampling(self) -> Sampling | None:
        """How to draw tokens; None: the greedy choice. OpenAI's default is a temperature of 1."""
        temperature = 1.0 if self.temperature is None else self.temperature
        changes = self._changes()
        if temperature < _GREEDY:
            return Sampling(top_k=1, **changes) if changes else None
        top_k = self.top_k if self.top_k is not None and self.top_k > 0 else None
        return Sampling(
            temperature=temperature, top_k=top_k, top_p=self.top_p, min_p=self.min_p, **changes
        )

    def _changes(self) -> dict[str, Any]:
        """The penalties and the bias that change something."""
        changes: dict[str, Any] = {
            name: value
            for name in _PENALTIES
            if (value := getattr(self, name)) is not None and value != IDLE[name]
        }
        if self.logit_bias:
            biases = {int(token): bias for token, bias in self.logit_bias.items()}
            changes["logit_bias"] = LogitBias.of([biases], width=MOST_BIASES)
        return changes

    def schema_asked(self) -> dict[str, Any] | None:
        """The JSON schema that the response format asks for; None: any text."""
        asked = self.response_format
        if asked is None or asked.type == "text":
            return None
        return {"type": "object"} if asked.json_schema is None else asked.json_schema.definition

    def stops(self) -> tuple[str, ...]:
        """The texts that end an output."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def include_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check_stream(self) -> None:
        """Raises Refused where options of a stream come without one."""
        if self.stream_options is not None and not self.stream:
            message = "stream_options goes with stream=true"
            raise Refused(400, message, param="stream_options")


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: (
        Text
        | Tokens
        | Annotated[list[Text] | list[Tokens], Field(min_length=1, max_length=MOST_OUTPUTS)]
    )
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_OUTPUTS)] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each a text or token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        return [given] if isinstance(given[0], int) else given


def _text_of(content: Any) -> Any:
    """The text of a content that comes in parts; anything else as it is."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") for part in content if _is_text(part)]
    return "".join(parts) if len(parts) == len(content) else content


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


class Called(Checked):
    """A function that was called. arguments: a JSON object."""

    name: Label
    arguments: Text

    @field_validator("arguments")
    @classmethod
    def _object(cls, text: str) -> str:
        try:
            found = isinstance(json.loads(text, parse_constant=refuse_constant), dict)
        except (ValueError, RecursionError):
            found = False
        if not found:
            raise ValueError("arguments must be a JSON object, written as a text")
        return text


class ToolCall(Checked):
    """A call in an assistant's message."""

    id: Label
    type: Literal["function"]
    function: Called


class Message(Checked):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | None, BeforeValidator(_text_of)] = None
    refusal: None = None
    name: Label | None = None
    tool_call_id: Label | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=128)] | None = None

    @model_validator(mode="after")
    def _some(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls go with the role 'assistant'")
        if self.content is None and not self.tool_calls:
            raise ValueError("content may be left out only beside tool_calls")
        return self

    def shown(self) -> dict[str, Any]:
        """The message as a chat template reads it: with the arguments of calls as objects."""
        fields = {"content": "", **self.model_dump(exclude_none=True)}
        for call in fields.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return fields


class Function(Checked):
    """A function that a model may call."""

    name: Label
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Checked):
    """A tool, as a chat template reads it."""

    type: Literal["function"]
    function: Function


class FunctionName(Checked):
    """A function by its name."""

    name: Label


class ToolChoice(Checked):
    """The one tool that an answer must call."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    store: Literal[False] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as a chat template reads them."""
        return [message.shown() for message in self.messages]

    def tools_shown(self) -> list[dict[str, Any]] | None:
        """The tools as a chat template reads them; None: the model is not told of any."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    def tools_to_call(self) -> list[dict[str, Any]]:
        """The functions of which the answer must call one; none where it need not.

        Raises Refused where tool_choice asks for a call of a tool that is not among the tools.
        """
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return []
        functions = [tool.function.model_dump(exclude_unset=True) for tool in self.tools or ()]
        if isinstance(choice, ToolChoice):
            functions = [each for each in functions if each["name"] == choice.function.name]
        if not functions:
            message = "tool_choice asks for a call of a tool that is not among the tools"
            raise Refused(400, message, param="tool_choice")
        return functions

    def check_logprobs(self) -> None:
        """Raises Refused where top_logprobs comes without logprobs."""
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "top_logprobs goes with logprobs=true", param="top_logprobs")
