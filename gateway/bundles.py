"""Where the gateway gets tokenizers from: the workers of a model themselves."""

from __future__ import annotations

from typing import Protocol

from gateway.decision import ModelProfile
from gateway.router import Router
from gateway.upstream import Timeouts, Upstream, UpstreamError
from shared.bundle import TokenizerBundle, decode_bundle
from shared.errors import HeadwaterError

MAX_BUNDLE_BYTES = 256 * 2**20


class TokenizerUnavailable(HeadwaterError):
    """The tokenizer cannot be had now; the message says why."""


class BundleSource(Protocol):
    """Where a tokenizer bundle comes from."""

    async def fetch(self, profile: ModelProfile) -> TokenizerBundle:
        """Raises :class:`TokenizerUnavailable`."""
        ...


class WorkerBundles:
    """Asks the workers of a model, one after the other."""

    def __init__(
        self, router: Router, upstream: Upstream, timeouts: Timeouts, api_key: str
    ) -> None:
        self._router, self._upstream, self._timeouts = router, upstream, timeouts
        self._headers = [("Authorization", f"Bearer {api_key}")] if api_key else []

    async def fetch(self, profile: ModelProfile) -> TokenizerBundle:
        """See :class:`BundleSource`."""
        reason = "no worker"
        for worker in profile.workers:
            url = self._router.worker_url(worker)
            if url is None:
                continue
            try:
                bundle = await self._fetch_from(url)
            except (UpstreamError, TokenizerUnavailable) as error:
                reason = str(error)
                continue
            if bundle.fingerprint == profile.tokenizer:
                return bundle
            reason = f"{worker} serves another tokenizer than it announces"
        raise TokenizerUnavailable(reason)

    async def _fetch_from(self, url: str) -> TokenizerBundle:
        call = self._upstream.open(
            url, "/headwater/tokenizer", self._headers, b"", timeouts=self._timeouts, method="GET"
        )
        async with call as response:
            if response.status != 200:
                raise TokenizerUnavailable(f"status {response.status}")
            pieces: list[bytes] = []
            size = 0
            while piece := await response.read():
                size += len(piece)
                if size > MAX_BUNDLE_BYTES:
                    raise TokenizerUnavailable("the tokenizer is too large")
                pieces.append(piece)
        try:
            return decode_bundle(b"".join(pieces))
        except ValueError as error:
            raise TokenizerUnavailable(f"the worker's tokenizer is not readable: {error}") from None
