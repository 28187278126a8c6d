"""Chat templates: the same jinja environment as transformers, so that the text is the same.

The environment was written after ``transformers.utils.chat_template_utils`` (5.24): sandboxed and
immutable, ``trim_blocks``, ``lstrip_blocks``, loop controls, the ``generation`` tag, ``tojson``
without HTML escapes, ``raise_exception``, ``strftime_now``, and a harmless ``dict`` and
``namespace``. Which content form a template wants is found as vLLM finds it.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class GenerationTag(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}`` marks an answer for training; kept as is."""

    tags = {"generation"}  # noqa: RUF012 - the name and form jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node:
        """The body, called as a block so that white space is treated as by transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class TemplateDict:
    """``dict(...)`` for templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """As ``dict.fromkeys``."""
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(Namespace):
    """``namespace(...)`` that refuses underscore names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not set {name!r} on a namespace")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> ImmutableSandboxedEnvironment:
    """A fresh environment for chat templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=TemplateDict(),
        namespace=TemplateNamespace,
    )
    return made


class ChatTemplate:
    """One compiled template. Rendering is thread-safe.

    Raises ``jinja2.TemplateSyntaxError`` for a source that is no template.
    """

    def __init__(self, source: str) -> None:
        made = environment()
        self.source = source
        self._template = made.from_string(source)
        tree = made.parse(source)
        self.takes_parts = loops_over_content(tree)
        """It loops over a message's content: messages get lists of parts ("openai" form in vLLM);
        else plain text ("string")."""
        self.literals = [node.data for node in tree.find_all(nodes.TemplateData)]
        self.literals += [c.value for c in tree.find_all(nodes.Const) if isinstance(c.value, str)]
        """All text that the template itself can write."""

    def render(self, variables: dict[str, Any]) -> str:
        """The text; raises ``jinja2.TemplateError`` and what template code may raise."""
        return self._template.render(variables)


# --- which content form a template wants (as vLLM decides it) ------------------------------------


def loops_over_content(tree: nodes.Template) -> bool:
    """Whether there is a loop over ``message['content']``, or (in a macro) over ``content``."""
    messages = _loop_targets(tree, _aliases(tree, "messages"), None)
    through_macro = any(_accesses(loop.iter, "content", None) for loop in tree.find_all(nodes.For))
    return through_macro or bool(_loop_targets(tree, messages, "content"))


def _aliases(tree: nodes.Template, name: str) -> list[str]:
    """``name`` and every variable that is assigned from it or from a slice of it."""
    found = [name]
    for known in found:  # grows while it is walked
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            if not isinstance(target, nodes.Name) or target.name in found:
                continue
            if _accesses(assign.node, known, None):
                found.append(target.name)
    return found


def _loop_targets(tree: nodes.Template, names: list[str], key: str | None) -> list[str]:
    """Loop variables of the loops over one of ``names`` (or over its attribute ``key``)."""
    return [
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name)
        and any(_accesses(loop.iter, name, key) for name in names)
    ]


def _accesses(node: nodes.Node, name: str, key: str | None) -> bool:
    """``node`` is ``name`` (or ``name[key]``), perhaps filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return node.node is not None and _accesses(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _accesses(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.name == name
    if isinstance(node, nodes.Getitem):
        inside = isinstance(node.arg, nodes.Const) and node.arg.value == key
        return inside and _accesses(node.node, name, None)
    return isinstance(node, nodes.Getattr) and node.attr == key and _accesses(node.node, name, None)
