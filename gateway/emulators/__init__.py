"""Stand-ins for engines of other makes, for tests, demos and benches: no model, no GPU.

They speak each engine's HTTP, metrics and event wire format over a real block pool
(``shared.paging``) or real slots, with modelled delays and deterministic answers, and they can be
made to fail in the ways in which engines fail.
"""

from gateway.emulators.emulator import Emulator, Settings

__all__ = ["Emulator", "Settings"]
