"""A pool of base URLs that serve one model: which server is asked next, how much is in flight, what happens on failure.

A request that meets a 5xx status or a lost connection is sent again unchanged, its seed included, to another server if
there is one: the seed and not the server decides the draw. A 4xx status, or a 501, is the request's own fault and is
raised with the server's text. This module knows HTTP and JSON; what is asked is up to vllm.py and states.py.

All pools of a process share one event loop, in a thread of its own, so that work of one pool may await another's
answers (a graft asks the student's servers and the teacher's).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import httpx

from rocktokens.errors import ConfigError, RunError, printable
from rocktokens.jobs import num_workers
from rocktokens.servers.settings import ServersConfig

J = TypeVar("J")
R = TypeVar("R")

# The environment variable whose value is sent as a bearer token, for servers started with --api-key.
KEY_VARIABLE = "ROCKTOKENS_API_KEY"
PASSING, NEVER = (408, 425, 429), 501  # below 500 and yet "not now" rather than "not this"; above and yet "never"
PROBE_SECONDS, LONGEST_PAUSE = 30.0, 30.0
MOST_BYTES, READ_BYTES = 2**26, 2**20  # of an answer, unless more is asked for; of it, read at once
AFFINITY_SLACK = 0.25  # of the concurrency: how much busier than the idlest a prefix's own server may be
DEAD_ENGINE = (
    "The engine behind it has died. On vLLM's CPU build a seeded request whose prompt is cut into chunks does that "
    "('CPU Generator does not use offset'): start the server with --max-num-batched-tokens 16384 and keep "
    "--servers.prompt-tokens at or below that number. "
)


class Refused(ConfigError):
    """A 4xx status or a 501: request, key or the server's settings are wrong, and repeating it would not help."""

    def __init__(self, message: str, status: int, said: str) -> None:
        super().__init__(message)
        self.status, self.said = status, said


class Reply(NamedTuple):
    """A whole answer of a server."""

    status: int
    body: bytes
    url: str

    def text(self) -> str:
        """The server's error message in one line."""
        text = self.body[:10_000].decode("utf-8", "replace")
        with suppress(ValueError, AttributeError):  # not JSON, or no object: the text as it is
            said = self.json()
            inner = said.get("error", said.get("detail", said))
            text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
        return printable(" ".join(text.split()))

    def json(self) -> Any:
        """The body as JSON; ValueError where it is none."""
        try:
            return json.loads(self.body)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error

    @property
    def passes(self) -> bool:
        """Whether the same request may succeed another time."""
        return self.status in PASSING or (self.status >= 500 and self.status != NEVER)


class ServedModel(NamedTuple):
    """What a server says of its model."""

    name: str
    root: str | None
    """Where the server read it from, as the server names it."""
    context: int | None


@dataclass
class _Server:
    url: str
    requests: int = 0  # in flight now
    prompt_tokens: int = 0  # in flight now
    failures: int = 0  # in a row
    down_until: float = 0.0
    has_answered: bool = False
    model: ServedModel | None = None


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all pools of this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="servers", daemon=True).start()
    return loop


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_loop.cache_clear)  # a forked process does not have the thread


def wait_for(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine in the pools' loop and wait for its result; an interrupt cancels it."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class ServerPool:
    """Servers of one model; as a block it ends its connections."""

    def __init__(self, urls: Sequence[str], config: ServersConfig | None = None, *, pause: float = 1.0) -> None:
        self.config = config or ServersConfig()
        # What a server takes is shared by all workers of a command.
        self.concurrency = max(1, self.config.concurrency // num_workers())
        self.prompt_tokens = max(1, self.config.prompt_tokens // num_workers())
        self.pause = pause
        """Seconds before the first repetition; doubled for each further one."""
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._servers = [_Server(url) for url in self.urls]
        self._turn = asyncio.Condition()
        key = os.environ.get(KEY_VARIABLE)
        # Long requests are silent for minutes: without keep-alive packets a network in between forgets the connection.
        alive = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None), socket_options=alive
            ),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *error: object) -> None:
        wait_for(self._client.aclose())

    def models(self) -> list[ServedModel]:
        """What each server serves, asked once; one that does not answer, or is not ready, is refused by its URL."""
        return wait_for(self._models())

    async def _models(self) -> list[ServedModel]:
        for server in self._servers:
            if server.model is None:
                server.model = await self._model_of(server)
        return [server.model for server in self._servers if server.model is not None]

    @property
    def context(self) -> int | None:
        """Tokens that every server takes, prompt and rollout together; None where none of them says."""
        known = [server.model for server in self._servers if server.model is not None]
        if len(known) < len(self._servers):  # asked inside the loop, too, but only once all are known
            known = self.models()
        return min((model.context for model in known if model.context is not None), default=None)

    def require(self, tokens: int, what: str = "a prompt with its rollout") -> None:
        """Refuse servers that do not take `tokens` tokens, naming the one with the shortest context."""
        served = self.context
        if served is not None and served < tokens:
            at = min(zip(self.urls, self.models()), key=lambda pair: pair[1].context or 1 << 62)[0]
            raise ConfigError(
                f"{at} takes {served} tokens, and {what} needs up to {tokens}; start it with --max-model-len {tokens}, "
                "or lower max_new_tokens"
            )

    async def _model_of(self, server: _Server) -> ServedModel:
        for attempt in range(self.config.retries + 1):
            try:
                reply = await self._send(server.url, "GET", "/v1/models", None, PROBE_SECONDS)
            except httpx.RequestError as error:
                raise ConfigError(
                    f"nobody answers at {server.url} ({error or type(error).__name__}); start the server, wait until "
                    "it is ready, or correct the URL"
                ) from error
            if not reply.passes or attempt == self.config.retries:
                break
            await asyncio.sleep(self._pause_after(attempt + 1))
        try:
            entry = reply.json()["data"][0]
            root, context = entry.get("root"), entry.get("max_model_len")
            return ServedModel(str(entry["id"]), root and printable(root), None if context is None else int(context))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"{server.url}/v1/models names no model ({reply.status}: {reply.text()[:100]}); is it a vLLM server, "
                f"and ready? If it wants a key, set the environment variable {KEY_VARIABLE}"
            ) from error

    def map(
        self, work: Callable[[J], Awaitable[R]], jobs: Sequence[J], *, progress: Callable[[int], None] | None = None
    ) -> list[R]:
        """`await work(job)` for every job, as many at once as the servers take; results in order.

        The first error ends everything in flight. `progress` is called after every job.
        """

        async def everything() -> list[R]:
            await self._models()
            slots = asyncio.Semaphore(self.concurrency * len(self._servers))

            async def one(job: J) -> R:
                async with slots:
                    found = await work(job)
                if progress is not None:
                    progress(1)
                return found

            tasks = [asyncio.ensure_future(one(job)) for job in jobs]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        return wait_for(everything()) if jobs else []

    def ask(self, path: str, body: dict[str, object], *, prefix: Sequence[int] = ()) -> Reply:
        """`post` from a thread outside the loop."""
        return wait_for(self.post(path, body, prefix=prefix))

    async def post(
        self, path: str, body: dict[str, object], *, prefix: Sequence[int] = (), most: int = MOST_BYTES
    ) -> Reply:
        """The answer to one request, with status 200, by whichever server has room.

        Args:
            path: below the base URL, such as /v1/completions.
            body: sent as JSON; `model` is filled in with the name under which the server serves.
            prefix: the prompt's ids. They count against the prompt tokens in flight, and requests that begin alike go
                to one server while it is not much busier than the others, for its prefix cache.
            most: bytes that an answer may have.
        """
        await self._models()
        home = zlib.crc32(json.dumps(list(prefix[:256])).encode()) % len(self._servers)
        failed: set[str] = set()
        for _ in range(self.config.retries + 1):
            server = await self._take(home, len(prefix), failed)
            assert server.model is not None
            asked, failing = {"model": server.model.name, **body}, False
            try:
                reply = await self._send(server.url, "POST", path, asked, self.config.timeout, most)
                failing = reply.passes
            except httpx.RequestError as error:
                failing, last = True, f"{server.url} broke off ({error or type(error).__name__})"
            else:
                if reply.status == 200:
                    return reply
                said = reply.text()
                if not failing:
                    raise Refused(f"{server.url}{path} refuses a request ({reply.status}): {said}", reply.status, said)
                last = f"{server.url} answers {reply.status}: {said}"
            finally:
                await self._give_back(server, len(prefix), failed=failing)
            failed.add(server.url)
        hint = DEAD_ENGINE if server.has_answered else ""
        raise RunError(
            f"{last}; given up after {self.config.retries + 1} attempt(s). {hint}Finished parts stay: repair the "
            "servers and repeat the command."
        )

    def _pause_after(self, failures: int) -> float:
        return min(self.pause * 2.0 ** (failures - 1), LONGEST_PAUSE)

    async def _take(self, home: int, tokens: int, failed: set[str]) -> _Server:
        """Wait for a server with room; the prefix's own one unless it is down or clearly busier.

        A server that failed this request is asked again only where no other is up: a dead server is always idle, and
        would use up the request's repetitions while the others are busy.
        """
        async with self._turn:
            while True:
                now = time.monotonic()
                up = [server for server in self._servers if server.down_until <= now]
                up = [server for server in up if server.url not in failed] or up
                free = [
                    server
                    for server in up
                    if server.requests == 0  # a prompt beyond the bound goes alone
                    or (server.requests < self.concurrency and server.prompt_tokens + tokens <= self.prompt_tokens)
                ]
                if free:
                    own = self._servers[home % len(self._servers)]
                    idle = min(free, key=lambda server: server.requests)
                    slack = idle.requests + AFFINITY_SLACK * self.concurrency
                    chosen = own if own in free and own.requests <= slack else idle
                    chosen.requests += 1
                    chosen.prompt_tokens += tokens
                    return chosen
                pause = None if up else min(server.down_until for server in self._servers) - now
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._turn.wait(), pause)

    async def _give_back(self, server: _Server, tokens: int, *, failed: bool) -> None:
        server.requests -= 1
        server.prompt_tokens -= tokens
        now = time.monotonic()
        if failed and now >= server.down_until:  # of many requests in flight the first says it for all
            server.failures += 1
            server.down_until = now + self._pause_after(server.failures)
        elif not failed:
            server.failures, server.has_answered = 0, True
        async with self._turn:
            self._turn.notify_all()

    async def _send(
        self, url: str, method: str, path: str, body: dict[str, object] | None, seconds: float, most: int = MOST_BYTES
    ) -> Reply:
        content = bytearray()
        try:
            # httpx counts the seconds of every read by itself: a server that drips would never be late.
            async with (
                asyncio.timeout(seconds),
                self._client.stream(method, url + path, json=body, timeout=None) as sent,
            ):
                async for chunk in sent.aiter_bytes(READ_BYTES):
                    content += chunk
                    if len(content) > most:
                        raise RunError(f"{url}{path} answers with more than {most:,} bytes; is it a vLLM server?")
        except TimeoutError:
            raise httpx.ReadTimeout(f"no whole answer within {seconds:g} s") from None
        return Reply(sent.status_code, bytes(content), url)
