"""Everything that turns a request into token ids, as one value that can be sent over the wire.

A bundle comes from a model directory, from a hub id, or from a worker (msgpack). Its fingerprint
enters the hash scope: two sides with the same fingerprint make the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from tokenizers import Tokenizer

from shared.errors import HeadwaterError

SPECIAL_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
"""What chat templates can use as variables."""

_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
    "additional_chat_templates/*.jinja",
)


class BundleError(HeadwaterError, ValueError):
    """The tokenizer of a model cannot be had; the message says why."""


class TokenizerBundle(msgspec.Struct, frozen=True):
    """A tokenizer with its chat template."""

    tokenizer_json: str
    """The whole ``tokenizer.json``."""
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool = False
    """Plain prompts begin with ``bos_token``; chats never get one besides the template's."""
    special_tokens: dict[str, str] = {}
    """Further names a template may use (``pad_token`` ...)."""
    tool_template: str | None = None
    """Template for requests with tools, where the model has one of its own."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end an answer, by the model's generation config."""
    generation: dict[str, Any] = {}
    """Sampling defaults of the model. Not part of the fingerprint: they change no prompt."""

    @property
    def fingerprint(self) -> str:
        """32 hex digits over all that decides a prompt's tokens."""
        identity = (
            *(self.tokenizer_json, self.chat_template, self.tool_template),
            *(self.bos_token, self.eos_token, self.add_bos),
            sorted(self.special_tokens.items()),
        )
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(identity))

    @property
    def variables(self) -> dict[str, str]:
        """Special tokens by the name a template knows them by."""
        named = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return {**self.special_tokens, **{k: v for k, v in named.items() if v is not None}}


def encode_bundle(bundle: TokenizerBundle) -> bytes:
    """msgpack form."""
    return msgspec.msgpack.encode(bundle)


def decode_bundle(data: bytes) -> TokenizerBundle:
    """Inverse of :func:`encode_bundle`; raises :class:`BundleError`."""
    try:
        return msgspec.msgpack.decode(data, type=TokenizerBundle)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BundleError(f"not a tokenizer bundle: {error}") from None


def load_bundle(source: str) -> TokenizerBundle:
    """Read a model's tokenizer from a directory, else from the hub (cache first if offline).

    Raises :class:`BundleError` if there is no ``tokenizer.json``, or a file cannot be read.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = _download(source)
    try:
        tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BundleError(
            f"{source} has no tokenizer.json; convert its tokenizer to the fast form first"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    default, for_tools = _templates(folder, config)
    special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
    eos = generation.pop("eos_token_id", None)
    if eos is None:
        eos = _read_json(folder / "config.json").get("eos_token_id")
    bos = special.pop("bos_token", None)
    return TokenizerBundle(
        tokenizer_json=tokenizer_json,
        chat_template=default,
        bos_token=bos,
        eos_token=special.pop("eos_token", None),
        add_bos=_adds_bos(config, tokenizer_json, bos),
        special_tokens=special,
        tool_template=for_tools,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        generation=generation,
    )


def _download(source: str) -> Path:
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise BundleError(f"{source} is no directory and no hub id")
    # Imported here: it is slow, and most processes never load anything from the hub.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=list(_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).split("\n", 1)[0]
        raise BundleError(f"{source} cannot be fetched from the hub: {reason}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    try:
        decoded = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
    if not isinstance(decoded, dict):
        raise BundleError(f"{path} is no JSON object")
    return decoded


def _templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """(default template, template for requests with tools); files win over the configuration."""
    named: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, list):  # the older form: [{"name": ..., "template": ...}]
        named = {entry["name"]: entry["template"] for entry in given}
    elif isinstance(given, str):
        named = {"default": given}
    older = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(older, str):
        named["default"] = older
    file = folder / "chat_template.jinja"
    if file.is_file():
        named = {"default": file.read_text(encoding="utf-8")}
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[extra.stem] = extra.read_text(encoding="utf-8")
    return named.get("default"), named.get("tool_use")


def _special_tokens(config: dict[str, Any], older: dict[str, Any]) -> dict[str, str]:
    """Named special tokens; a token is text, or an object with its text as ``content``."""
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name) or older.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _adds_bos(config: dict[str, Any], tokenizer_json: str, bos: str | None) -> bool:
    """Whether plain prompts get a BOS: the configuration's word, else what the tokenizer does."""
    explicit = config.get("add_bos_token")
    if isinstance(explicit, bool):
        return explicit and bos is not None
    try:
        head = msgspec.json.decode(tokenizer_json, type=_Head)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BundleError(f"tokenizer.json cannot be read: {error}") from None
    return bos is not None and _begins_with(head.post_processor, bos)


class _Head(msgspec.Struct):
    """What is looked at in a tokenizer.json without building the tokenizer (which is slow)."""

    post_processor: dict[str, Any] | None = None


def _begins_with(processor: dict[str, Any] | None, token: str) -> bool:
    """Whether a post-processor puts ``token`` in front of a single text."""
    if processor is None:
        return False
    if processor.get("type") == "Sequence":
        return any(_begins_with(step, token) for step in processor.get("processors", ()))
    if processor.get("type") == "TemplateProcessing":
        first = (processor.get("single") or [{}])[0]
        return bool(first.get("SpecialToken", {}).get("id") == token)
    return bool((processor.get("cls") or [None])[0] == token)


def open_tokenizer(bundle: TokenizerBundle) -> Tokenizer:
    """The tokenizer, never truncating or padding; raises :class:`BundleError`."""
    try:
        tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a bad file
        raise BundleError(f"tokenizer.json cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def added_ends(
    tokenizer: Tokenizer, bundle: TokenizerBundle
) -> tuple[Sequence[int], Sequence[int]]:
    """Tokens that the tokenizer puts before and after a plain prompt; the bundle rules on BOS."""
    probe = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    at = next((i for i in range(len(whole)) if whole[i : i + len(probe)] == probe), None)
    before, after = ([], []) if at is None else (whole[:at], whole[at + len(probe) :])
    bos = None if bundle.bos_token is None else tokenizer.token_to_id(bundle.bos_token)
    if bos is not None and bundle.add_bos and bos not in before:
        before = [bos, *before]
    if not bundle.add_bos and before == [bos]:
        before = []
    return before, after
