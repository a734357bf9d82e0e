"""Real vLLM servers for the contract tests, where ROCKTOKENS_VLLM_PYTHON names an interpreter that has vLLM."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PYTHON = os.environ.get("ROCKTOKENS_VLLM_PYTHON")
STATES = [*("--runner", "pooling"), *("--convert", "embed")]
STATES += ["--pooler-config", '{"task":"token_embed","use_activation":false}']
GENERATES = [*("--generation-config", "vllm"), *("--max-logprobs", "-1")]


@contextmanager
def serve(
    model: str | Path,
    log: Path,
    *,
    pooling: bool = False,
    seconds: float = 400.0,
    dtype: str = "float32",
    words: Sequence[str] = (),
) -> Iterator[str]:
    """A vLLM server on the CPU; yields its base URL and ends it in any case. `words`: more of its flags."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    start = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m"]
    start += [*("--host", "127.0.0.1"), *("--port", str(port)), *("--dtype", dtype), "--enforce-eager"]
    start += [*("--max-num-seqs", "64"), *("--max-num-batched-tokens", "16384")]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*start, *(STATES if pooling else GENERATES), *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            _wait(url, server, log, seconds)
            yield url
        finally:
            os.killpg(server.pid, 15)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, 9)
                server.wait()


def _wait(url: str, server: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"vLLM ended with {server.returncode}: {log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(1)
    raise RuntimeError(f"vLLM did not start in {seconds:.0f} s: {log.read_text()[-3000:]}")
