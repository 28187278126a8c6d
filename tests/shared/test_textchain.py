"""Keys of text: remembered pages give the keys of a whole walk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import textchain
from shared.blocks import extend_chain
from shared.textchain import PAGE_BYTES, TextChain
from shared.types import BlockKey

ROOTS = (b"a" * 16, b"b" * 16)
PIECES = [bytes([letter]) * size for letter in b"xyz" for size in (1, 63, 64, PAGE_BYTES - 1, 9000)]


@given(
    st.lists(
        st.tuples(st.sampled_from(ROOTS), st.lists(st.sampled_from(PIECES), max_size=4)),
        max_size=12,
    )
)
def test_keys_are_those_of_the_whole_text(prompts: list[tuple[bytes, list[bytes]]]) -> None:
    chain = TextChain()
    for root, pieces in prompts:
        text = b"".join(pieces)
        assert list(chain.keys(root, text)) == extend_chain(root, text)[0]


def test_pages_are_not_remembered_for_those_of_another_salt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[bytes] = []

    def counting(state: bytes, data: bytes) -> tuple[list[BlockKey], bytes]:
        hashed.append(data)
        return extend_chain(state, data)

    monkeypatch.setattr(textchain, "extend_chain", counting)
    chain, text = TextChain(), b"x" * 2 * PAGE_BYTES
    taken = []
    for salt in ("", "a", "b", "b"):
        hashed.clear()
        assert list(chain.keys(ROOTS[0], text, salt)) == extend_chain(ROOTS[0], text)[0]
        taken.append(sum(map(len, hashed)))
    assert taken == [len(text), len(text), len(text), 0]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textchain, "_PAGES", 8)
    chain = TextChain()
    for n in range(30):
        chain.keys(ROOTS[0], n.to_bytes(8, "big") * (PAGE_BYTES // 8))
    assert len(chain._young) + len(chain._old) <= 16
