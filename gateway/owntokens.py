"""The gateway's tokens of the probe prompts, made as those of requests are."""

from __future__ import annotations

import msgspec

from gateway.decision import ModelProfile
from gateway.parity import Answer, Kind, Probe
from gateway.prompts import Prompts
from shared.errors import BadRequest
from shared.load import WorkerInfo
from shared.openai import RouteKind, parse
from shared.render import Renderer

_KINDS = {Kind.TEXT: RouteKind.COMPLETIONS, Kind.CHAT: RouteKind.CHAT}


class PromptTokens:
    """See ``gateway.feeds.parity.OwnTokens``."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    def missing(self, info: WorkerInfo) -> str | None:
        """Why there are no tokens to compare with; None if there are."""
        if not info.tokenizer:
            return "the worker names no tokenizer, and [render] tokenizers has none for its model"
        if self._prompts.renderer(info.tokenizer) is not None:
            return None
        profile = _profile(info)
        self._prompts.want(profile)
        return self._prompts.missing(profile)

    def loading(self, info: WorkerInfo) -> bool:
        """The tokenizer is on its way."""
        return self._prompts.loading(info.tokenizer)

    def bos(self, info: WorkerInfo) -> int | None:
        """Id of the BOS token, if the tokenizer has one."""
        renderer = self._prompts.renderer(info.tokenizer)
        return None if renderer is None else bos_of(renderer)

    async def encode(self, info: WorkerInfo, probe: Probe) -> Answer:
        """Tokens of a probe prompt; they are short, so that this needs no thread."""
        renderer = self._prompts.renderer(info.tokenizer)
        if renderer is None:
            return Answer(missing="the tokenizer is gone")
        return encode(renderer, probe)


def bos_of(renderer: Renderer) -> int | None:
    """Id of a tokenizer's BOS token."""
    bos = renderer.bundle.bos_token
    return None if bos is None else renderer.tokenizer.token_to_id(bos)


def encode(renderer: Renderer, probe: Probe) -> Answer:
    """Tokens of a probe prompt, or what the template says against it."""
    request = parse(_KINDS[probe.kind], msgspec.json.encode(probe.fields))
    try:
        return Answer(renderer.encode_request(request).tokens)
    except BadRequest as error:
        return Answer(refused=error.message)


def _profile(info: WorkerInfo) -> ModelProfile:
    return ModelProfile(
        canonical=info.models[0] if info.models else "",
        tokenizer=info.tokenizer,
        workers=(info.id,),
        min_block_size=info.block_size,
        max_model_len=info.max_model_len,
    )
