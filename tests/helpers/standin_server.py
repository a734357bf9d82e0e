"""A stand-in for a vLLM server, around any Hugging Face model: the standard library's HTTP server in a thread.

It does what stock vLLM does where that matters to us: a request's noise restarts at its seed, `logit_bias` is clamped
to [-100, 100], `max_tokens` is silently cut to the context, `stop_token_ids` end a rollout and stay in it, padding rows
of the head can be drawn, and POST /pooling gives the states after the final norm. And it can be made to misbehave.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch
from transformers import PreTrainedModel

from rocktokens.models.pair import hidden_states
from rocktokens.servers.pool import Reply, ServerPool
from rocktokens.servers.settings import ServersConfig

WIRES = {"float32": np.float32, "float16": np.float16}


@dataclass
class StandIn:
    """A served model. `with StandIn(model) as server: server.url`."""

    model: PreTrainedModel
    name: str = "m"
    root: str = "model"
    context: int = 96
    pooling: bool = False
    """Serve states instead of generating, as `--runner pooling` does."""
    fail_first: int = 0
    """So many requests are answered with 503 first."""
    models_fail: int = 0
    """So many times GET /v1/models is answered with 503 first."""
    unknown: int = 404
    """Status for what it does not serve."""
    refuse: str | None = None
    """Every request is answered with 400 and this text."""
    die_after: int | None = None
    """After so many requests the connection is cut and the server is gone."""
    weakest_bias: float = -100.0
    """Biases are clamped to at least this: a ban that leaks."""
    unit_norm: bool = False
    nan_states: bool = False
    short_states: bool = False
    slow_after: int | None = None
    """Requests after so many are answered only when the server ends."""
    token_ids: object = None
    """Given in place of what was drawn."""
    states_of: Callable[[torch.Tensor], torch.Tensor] = lambda states: states
    """What becomes of a sequence's states."""
    body: bytes | None = None
    """Every request is answered with these bytes."""
    drips: bool = False
    """Bodies come a byte at a time, each sooner than a read would time out, and never end."""
    stop_early: bool = False
    """End rollouts after one token without an end token, as an aborted request does."""
    requests: list[dict] = field(default_factory=list)
    """Bodies of the POST requests that were answered."""
    connections: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    most_prompt_tokens: int = 0
    prompt_tokens: int = 0
    dead: bool = False

    def __enter__(self) -> StandIn:
        self.lock = threading.Lock()
        self.ends = threading.Event()
        self.cache: dict[tuple[int, ...], np.ndarray] = {}
        stand_in = self

        class Handler(_Handler):
            server_of = stand_in

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ends.set()
        self.http.shutdown()
        self.http.server_close()

    @torch.inference_mode()
    def logits(self, prefix: tuple[int, ...]) -> np.ndarray:
        """Next-token logits, remembered: tests ask for the same short prefixes thousands of times."""
        with self.lock:
            if prefix not in self.cache:
                found = self.model(input_ids=torch.tensor([prefix]), use_cache=False).logits[0, -1]
                self.cache[prefix] = found.float().numpy()
            return self.cache[prefix]

    def complete(self, body: dict) -> dict:
        """One rollout as /v1/completions gives it."""
        prefix, drawn = tuple(body["prompt"]), []
        room = min(body["max_tokens"], self.context - len(prefix))
        generator = torch.Generator().manual_seed(body["seed"]) if body.get("seed") is not None else None
        stops, reason = set(body.get("stop_token_ids") or ()), "length"
        for _ in range(room):
            logits = self.logits((*prefix, *drawn)).astype(np.float64).copy()
            for token, bias in (body.get("logit_bias") or {}).items():
                logits[int(token)] += min(max(float(bias), self.weakest_bias, -100.0), 100.0)
            if body["temperature"] == 0:
                token = int(logits.argmax())
            else:
                p = np.exp((logits - logits.max()) / body["temperature"])
                noise = torch.empty(len(p), dtype=torch.float64).exponential_(generator=generator).numpy()
                token = int((p / noise).argmax())
            drawn.append(token)
            if token in stops:
                reason = "stop"
                break
            if self.stop_early:
                reason = "abort"
                break
        told = drawn if self.token_ids is None else self.token_ids
        choice = {"index": 0, "text": "", "token_ids": told, "finish_reason": reason}
        if body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = self.prompt_logprobs(prefix, int(body["prompt_logprobs"]))
        return {"id": "x", "object": "text_completion", "model": self.name, "choices": [choice]}

    @torch.inference_mode()
    def prompt_logprobs(self, prefix: tuple[int, ...], k: int) -> list[dict | None]:
        """Of every token but the first: its own log-probability and those of the k most probable, as vLLM has them."""
        with self.lock:
            logits = self.model(input_ids=torch.tensor([prefix]), use_cache=False).logits[0].float()
        logprob = logits.log_softmax(-1)
        most = logprob.topk(k, dim=-1).indices.tolist() if k else [[] for _ in logprob]
        told = [(i, [token, *most[i]]) for i, token in enumerate(prefix[1:])]
        return [None] + [{str(t): {"logprob": float(logprob[i, t])} for t in tokens} for i, tokens in told]

    @torch.inference_mode()
    def states(self, body: dict) -> bytes:
        """One sequence's states as /pooling gives them with encoding_format bytes_only: numbers and nothing else."""
        with self.lock:
            states = hidden_states(self.model, torch.tensor([body["input"]]))[0].float()
        if self.unit_norm:
            states = torch.nn.functional.normalize(states, dim=-1)
        if self.nan_states:
            states[-1, 0] = torch.nan
        if self.short_states:
            states = states[:-1]
        states = self.states_of(states)
        if body.get("embed_dtype") == "bfloat16":
            return states.bfloat16().view(torch.int16).numpy().tobytes()
        return states.numpy().astype(WIRES[body.get("embed_dtype", "float32")]).tobytes()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one packet
    server_of: StandIn

    def setup(self) -> None:
        super().setup()
        self.server_of.connections += 1

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        it = self.server_of
        if it.dead:
            self.cut()
        elif self.path == "/v1/models" and it.models_fail:
            it.models_fail -= 1
            self.answer(503, {"error": {"message": "warming up"}})
        elif self.path == "/v1/models":
            entry = {"id": it.name, "object": "model", "root": it.root, "max_model_len": it.context}
            self.answer(200, {"object": "list", "data": [entry]})
        else:
            self.answer(404, {"detail": "Not Found"})

    counted: int | None = None
    """Prompt tokens of the request under way."""

    def do_POST(self) -> None:
        it = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        size = len(body.get("prompt", body.get("input", ())))
        with it.lock:
            if it.die_after is not None and len(it.requests) >= it.die_after:
                it.dead = True
            failing, it.fail_first = it.fail_first > 0, max(it.fail_first - 1, 0)
            if not (it.dead or failing):
                it.requests.append(body)
            it.in_flight += 1
            it.prompt_tokens += size
            self.counted = size
            it.most_in_flight = max(it.most_in_flight, it.in_flight)
            it.most_prompt_tokens = max(it.most_prompt_tokens, it.prompt_tokens)
        try:
            if it.dead:
                self.cut()
            elif failing:
                self.answer(503, {"error": {"message": "warming up"}})
            else:
                self.respond(it, body)
        finally:
            self.leave()

    def send_response(self, code: int, message: str | None = None) -> None:
        self.leave()  # before the client can know: its next request must not be counted beside this one
        super().send_response(code, message)

    def leave(self) -> None:
        """The request under way is no longer in flight; says so once."""
        size, self.counted = self.counted, None
        if size is not None:
            with self.server_of.lock:
                self.server_of.in_flight -= 1
                self.server_of.prompt_tokens -= size

    def respond(self, it: StandIn, body: dict) -> None:
        if it.slow_after is not None and len(it.requests) > it.slow_after:
            it.ends.wait()
            self.cut()
        elif it.drips:
            self.send_response(200)
            self.end_headers()
            while not it.ends.wait(0.05):
                self.wfile.write(b" " * (1 if it.body is None else len(it.body)))
                self.wfile.flush()
        elif it.body is not None:
            self.answer(200, it.body)
        elif it.refuse is not None:
            self.answer(400, {"error": {"message": it.refuse, "code": 400}})
        elif body.get("model") != it.name:
            self.answer(404, {"error": {"message": f"The model `{body.get('model')}` does not exist."}})
        elif self.path == "/v1/completions" and not it.pooling:
            if len(body["prompt"]) >= it.context:
                self.answer(400, {"error": {"message": f"maximum context length is {it.context} tokens"}})
            else:
                self.answer(200, it.complete(body))
        elif self.path == "/pooling" and it.pooling:
            self.answer(200, it.states(body))
        else:
            self.answer(it.unknown, {"detail": "Not Found"})

    def answer(self, status: int, body: dict | bytes) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def cut(self) -> None:
        self.close_connection = True
        self.connection.close()


class Direct(ServerPool):
    """A pool that asks one stand-in without a network: a law takes thousands of draws."""

    def __init__(self, server: StandIn) -> None:
        super().__init__([server.url], ServersConfig(concurrency=8), pause=0.01)
        self.server = server

    async def post(self, path: str, body: dict, *, prefix=()) -> Reply:
        self.server.requests.append(body)
        return Reply(200, json.dumps(self.server.complete(body)).encode(), self.server.url)
