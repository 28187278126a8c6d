"""What a request says about the form of its answer: ``response_format`` and vLLM's fields. P.

``response_format`` has OpenAI's form. ``structured_outputs`` is vLLM's newer form, ``guided_json``,
``guided_regex`` and ``guided_choice`` its older one. A request may use one of them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shared.errors import BadRequest
from worker import lark
from worker.fields import Fields, wrong
from worker.guide import GrammarSpec

MAX_CHOICE_TEXTS = 4096
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}
OUTPUTS = ("json", "regex", "choice", "json_object")
"""Members of ``structured_outputs`` of which one may be given."""
OUTPUTS_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Members that are not supported, with the values that ask for nothing.
    "grammar": (),
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "disable_fallback": (True, False),
}
FIELDS = frozenset({"response_format", "structured_outputs", *GUIDED})


def read_form(fields: Fields) -> GrammarSpec | None:
    """The grammar that an answer must follow; None if it is free.

    :raises BadRequest: a field is malformed, or two of them ask for a form.
    """
    specs = [_response_format(fields), _structured_outputs(fields)]
    for name, form in GUIDED.items():
        value = fields.get(name)
        specs.append(None if value is None else _spec(form, value, name))
    given = [spec for spec in specs if spec is not None]
    if len(given) > 1:
        raise BadRequest(
            f"'{given[0].param}' and '{given[1].param}' exclude each other.", param=given[1].param
        )
    return given[0] if given else None


def _response_format(fields: Fields) -> GrammarSpec | None:
    name = "response_format"
    form = fields.get(name)
    if form is None:
        return None
    if not isinstance(form, dict):
        raise wrong(name, form, "an object")
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _spec("json", {"type": "object"}, name)
    if kind != "json_schema":
        raise BadRequest(
            f'\'{name}.type\' must be "text", "json_object" or "json_schema".', param=name
        )
    described = form.get("json_schema")
    if not isinstance(described, dict) or described.get("schema") is None:
        raise BadRequest(f"'{name}.json_schema.schema' is required.", param=name)
    return _spec("json", described["schema"], name)


def _structured_outputs(fields: Fields) -> GrammarSpec | None:
    name = "structured_outputs"
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    given = {key: each for key, each in value.items() if each is not None}
    for key, each in given.items():
        if key in OUTPUTS:
            continue
        if each not in OUTPUTS_NEUTRAL.get(key, ()):
            raise BadRequest(f"'{name}.{key}' is not supported by this server.", param=name)
    forms = [key for key in OUTPUTS if key in given and given[key] is not False]
    if len(forms) != 1:
        raise BadRequest(f"'{name}' must hold one of {', '.join(OUTPUTS)}.", param=name)
    if forms == ["json_object"]:
        return _spec("json", {"type": "object"}, name)
    return _spec(forms[0], given[forms[0]], name)


def _spec(form: str, value: object, param: str) -> GrammarSpec:
    if form == "json":
        return GrammarSpec("json", _schema(value, param), param)
    if form == "regex":
        if not isinstance(value, str):
            raise wrong(param, value, "a regular expression as a string")
        return GrammarSpec("regex", value, param)
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICE_TEXTS:
        raise wrong(param, value, f"a list of 1 to {MAX_CHOICE_TEXTS} strings")
    if not all(isinstance(text, str) for text in value):
        raise BadRequest(f"'{param}' must hold strings only.", param=param)
    return GrammarSpec("lark", lark.one_of(value), param)


def _schema(value: object, param: str) -> str:
    if isinstance(value, str):  # vLLM takes a schema as text as well
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRequest(f"'{param}' is not valid JSON: {error}", param=param) from None
    if not isinstance(value, dict | bool):
        raise wrong(param, value, "a JSON schema")
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise BadRequest(f"'{param}' is nested too deeply.", param=param) from None
