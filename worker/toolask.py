"""What a chat request says about tools: which there are, and whether one must be called. P."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import BadRequest
from worker.fields import Fields

MAX_TOOLS = 512
MAX_NAME = 256
NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that can be called."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object."""
    strict: bool = False
    """Arguments must follow the schema even where the model is free to call."""


@dataclass(frozen=True, slots=True)
class ToolAsk:
    """Tools of a request in which they may be called."""

    callable: tuple[Function, ...]
    """Those that may be called; never empty."""
    required: bool
    """The answer must be calls, and nothing else."""
    single: bool
    """At most one call."""

    @property
    def names(self) -> frozenset[str]:
        """Names that a call may have."""
        return frozenset(function.name for function in self.callable)

    @property
    def guarded(self) -> bool:
        """A free answer is watched: should it call, the call must be of a certain form."""
        return self.single or any(function.strict for function in self.callable)


def read_tools(fields: Fields, *, chat: bool) -> ToolAsk | None:
    """Tools that may be called; None if there are none, or none may be.

    :raises BadRequest: tools or choice are malformed or do not fit each other.
    """
    choice = fields.get("tool_choice")
    required, name = _choice(choice)
    parallel = fields.flag("parallel_tool_calls", default=True)
    if not chat:
        if required:
            raise BadRequest("'tool_choice' belongs to chat completions.", param="tool_choice")
        return None
    functions = _functions(fields.get("tools") or [])
    if required and not functions:
        raise BadRequest(
            "'tool_choice' asks for a call, but there are no 'tools'.", param="tool_choice"
        )
    if choice == "none" or not functions:
        return None
    if name is None:
        return ToolAsk(functions, required, single=not parallel)
    chosen = tuple(function for function in functions if function.name == name)
    if not chosen:
        raise BadRequest(
            "'tool_choice' names a function that is not among the 'tools'.", param="tool_choice"
        )
    return ToolAsk(chosen, required, single=True)


def _choice(choice: object) -> tuple[bool, str | None]:
    """(whether a call is required, the name of the function if one is named)."""
    if choice is None or choice in ("none", "auto"):
        return False, None
    if choice == "required":
        return True, None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return True, name
    raise BadRequest(
        '\'tool_choice\' must be "none", "auto", "required" or '
        '{"type": "function", "function": {"name": ...}}.',
        param="tool_choice",
    )


def _functions(tools: list[Any]) -> tuple[Function, ...]:
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"'tools' may hold at most {MAX_TOOLS} tools.", param="tools")
    return tuple(_function(f"tools[{index}]", tool) for index, tool in enumerate(tools))


def _function(where: str, tool: dict[str, Any]) -> Function:
    kind = tool.get("type", "function")
    if kind != "function":
        raise BadRequest(f"'{where}.type' other than \"function\" is not supported.", param="tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"'{where}.function' must be an object.", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise BadRequest(
            f"'{where}.function.name' must be a string of 1 to {MAX_NAME} characters.",
            param="tools",
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise BadRequest(f"'{where}.function.strict' must be true or false.", param="tools")
    parameters = function.get("parameters")
    if parameters is None:
        return Function(name, NO_PARAMETERS, bool(strict))
    if not isinstance(parameters, dict):
        raise BadRequest(f"'{where}.function.parameters' must be a JSON schema.", param="tools")
    return Function(name, {"type": "object", **parameters}, bool(strict))
