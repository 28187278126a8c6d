"""Log-probabilities as OpenAI and vLLM show them. P: no I/O."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from worker.sequence import TokenLogprob
from worker.tokentext import TokenText

Json = dict[str, Any]
Entry = tuple[int, TokenLogprob | None]
"""A token and its log-probability; a prompt's first token has none."""


class Offsets:
    """Character of the text at which each token starts; one that starts within a character starts
    where that one does.

    :param echo: the prompt's text, if the text begins with it.
    """

    def __init__(self, tokens: TokenText, echo: str = "") -> None:
        self._tokens, self._echo = tokens, echo
        self._at = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def next(self, token: int) -> int:
        """Where an answer's next token starts."""
        start = self._at
        self._at += len(self._decoder.decode(self._tokens.bytes_of(token)))
        return start

    def in_prompt(self, prompt: Sequence[int]) -> list[int]:
        """Where each token of the echoed prompt starts. Special ones count if they are written out
        there; after the last one the answer begins."""
        starts = []
        for token in prompt:
            if self._tokens.is_special(token):
                starts.append(self._at)
                name = self._tokens.text_of(token)
                self._at += len(name) if self._echo.startswith(name, self._at) else 0
            else:
                starts.append(min(self.next(token), len(self._echo)))
        self._decoder.reset()
        self._at = len(self._echo)
        return starts


class LogprobForm:
    """How one response names tokens."""

    def __init__(self, tokens: TokenText, *, as_ids: bool = False) -> None:
        """``as_ids``: as ``token_id:17`` instead of by their text."""
        self._tokens, self._as_ids = tokens, as_ids

    def chat(self, entries: Sequence[tuple[int, TokenLogprob]]) -> Json:
        """The ``logprobs`` of a chat choice."""
        content = [
            {
                **self._token(token, entry.logprob),
                "top_logprobs": [self._token(other, value) for other, value in entry.top],
            }
            for token, entry in entries
        ]
        return {"content": content, "refusal": None}

    def completion(self, entries: Sequence[Entry], starts: Sequence[int]) -> Json:
        """The ``logprobs`` of a text completion. The token itself stands among the alternatives,
        though it may make them one more than were asked for."""
        return {
            "text_offset": list(starts),
            "token_logprobs": [
                None if entry is None else finite(entry.logprob) for _, entry in entries
            ],
            "tokens": [self._name(token) for token, _ in entries],
            "top_logprobs": [self._top(token, entry) for token, entry in entries],
        }

    def prompt(
        self, prompt: Sequence[int], scores: Sequence[TokenLogprob], n: int
    ) -> list[Json | None]:
        """vLLM's ``prompt_logprobs``: for each token an object by token id, its own entry first,
        then the ``n`` best; null for the first token."""
        entries: list[Json | None] = [None]
        for token, entry in zip(prompt[1:], scores, strict=True):
            shown = {token: (entry.logprob, entry.rank)}
            for rank, (other, value) in enumerate(entry.top[:n], 1):
                shown.setdefault(other, (value, rank))
            entries.append(
                {
                    str(each): {
                        "logprob": finite(value),
                        "rank": rank,
                        "decoded_token": self._tokens.text_of(each),
                    }
                    for each, (value, rank) in shown.items()
                }
            )
        return entries

    def _top(self, token: int, entry: TokenLogprob | None) -> Json | None:
        if entry is None:
            return None
        shown = {self._name(other): finite(value) for other, value in entry.top}
        shown.setdefault(self._name(token), finite(entry.logprob))
        return shown

    def _token(self, token: int, logprob: float) -> Json:
        return {
            "token": self._name(token),
            "logprob": finite(logprob),
            "bytes": list(self._tokens.bytes_of(token)),
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokens.text_of(token)


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI shows -9999 for "impossible"."""
    return max(logprob, -9999.0)
