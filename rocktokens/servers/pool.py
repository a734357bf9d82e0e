"""A pool of base URLs that serve one model: who is asked next, how much is in flight, what happens when one fails.

Connections are kept alive, one a thread and server. A request that meets a 5xx status or a lost connection is sent
again unchanged, its seed included, to another server where there is one: the seed and not the server decides the draw.
A 4xx status, or a 501, is the request's own fault and is raised with the server's text. This module knows HTTP and
JSON; what is asked, and what an answer means, is vllm.py's and states.py's business.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from rocktokens.errors import ConfigError, RunError
from rocktokens.ranks import ranks
from rocktokens.servers.calls import KEY_VARIABLE, Refused, Reply, connect, exchange, hang_up, reason_of
from rocktokens.servers.settings import ServersConfig

J = TypeVar("J")
R = TypeVar("R")

# Statuses below 500 that say "not now" rather than "not this"; and the one above that says "never".
PASSING, NEVER = (408, 425, 429), 501
PROBE_SECONDS = 30.0
LONGEST_PAUSE = 30.0
# How far a prefix's own server may be busier than the idlest one before the request goes elsewhere.
AFFINITY_SLACK = 0.25
DEAD_ENGINE = (
    "The engine behind it has died. On vLLM's CPU build a seeded request whose prompt is cut into chunks does that "
    "('CPU Generator does not use offset'): start the server with --max-num-batched-tokens 16384 and keep "
    "--servers.prompt-tokens at or below that number."
)


# Words of vLLM's about an engine that is gone, where the server still answers.
GONE = ("enginedead", "enginecore", "engine is dead", "engine core", "does not use offset")


class ServedModel(NamedTuple):
    """What a server says of its model."""

    name: str
    root: str | None
    """Where the server read it from, as the server names it."""
    context: int | None


@dataclass
class _Server:
    url: str
    requests: int = 0
    """In flight now."""
    prompt_tokens: int = 0
    failures: int = 0
    """In a row."""
    down_until: float = 0.0
    answered: int = 0
    model: ServedModel | None = None
    links: dict[int, http.client.HTTPConnection] = field(default_factory=dict)
    """By thread."""


class ServerPool:
    """Servers of one model. Use it as a block, or call `close`, so that its connections end."""

    def __init__(self, urls: Sequence[str], config: ServersConfig | None = None, *, pause: float = 1.0) -> None:
        if not urls:
            raise ConfigError("a pool of servers needs at least one URL; see --servers.student and --servers.teacher")
        self.config = config or ServersConfig()
        self.pause = pause
        """Seconds before the first repetition; doubled for each further one."""
        # What a server takes is shared by all processes of a command.
        self.concurrency = max(1, self.config.concurrency // ranks().world)
        self.prompt_tokens = max(1, self.config.prompt_tokens // ranks().world)
        self._servers = [_Server(url.rstrip("/").removesuffix("/v1")) for url in urls]
        self._turn = threading.Condition()
        self._stopped = threading.Event()

    @property
    def urls(self) -> list[str]:
        """The base URLs, in the order given."""
        return [server.url for server in self._servers]

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every connection; a later request would open a new one."""
        self._hang_up()

    def alone(self, url: str) -> ServerPool:
        """One server of the pool as a pool of its own, to be asked by name."""
        return ServerPool([url], self.config, pause=self.pause)

    def _hang_up(self) -> None:
        with self._turn:
            self._turn.notify_all()
        for server in self._servers:
            for link in [server.links.pop(thread, None) for thread in list(server.links)]:  # others add and take, too
                if link is not None:
                    hang_up(link)

    # What is served

    def models(self) -> list[ServedModel]:
        """What each server serves, asked once; one that does not answer, or is not ready, is refused by its URL."""
        for server in self._servers:
            if server.model is None:
                server.model = self._model_of(server)
        return [server.model for server in self._servers if server.model is not None]

    @property
    def context(self) -> int | None:
        """Tokens that every server takes, prompt and rollout together; None where none of them says."""
        known = [model.context for model in self.models() if model.context is not None]
        return min(known) if known else None

    def narrowest(self) -> str:
        """URL of the server with the shortest context."""
        found = zip(self._servers, self.models())
        return min(found, key=lambda pair: pair[1].context or 1 << 62)[0].url

    def healthy(self, url: str) -> str | None:
        """None unless nobody answers GET /health or the answer is a 5xx; then what is wrong, in a sentence."""
        server = next(server for server in self._servers if server.url == url)
        try:
            reply = self._send(server, "GET", "/health", None, PROBE_SECONDS)
        except (OSError, http.client.HTTPException) as error:
            return f"nobody answers at {url} ({reason_of(error)})"
        if reply.status < 500:  # a gateway in front of it may not know /health; only the engine's death is a 5xx
            return None
        return f"{url} says {reply.status}: {reply.text() or 'not healthy'}. {DEAD_ENGINE}"

    def _model_of(self, server: _Server) -> ServedModel:
        for attempt in range(self.config.retries + 1):
            try:
                reply = self._send(server, "GET", "/v1/models", None, PROBE_SECONDS)
            except (OSError, http.client.HTTPException) as error:
                raise ConfigError(
                    f"nobody answers at {server.url} ({reason_of(error)}); start the server, wait until it is ready, "
                    "or correct the URL"
                ) from error
            if not _passes(reply.status):
                return self._read_model(server, reply)
            if attempt < self.config.retries:
                self._stopped.wait(self._pause_after(attempt + 1))
        raise self._given_up(server, f"{server.url}/v1/models answers {reply.status}: {reply.text()}")

    def _read_model(self, server: _Server, reply: Reply) -> ServedModel:
        if reply.status in (401, 403):
            raise ConfigError(
                f"{server.url} wants a key ({reply.status}: {reply.text()}); put it into the environment variable "
                f"{KEY_VARIABLE}"
            )
        if reply.status != 200:
            raise ConfigError(f"{server.url}/v1/models answers {reply.status}: {reply.text()}; is it a vLLM server?")
        try:
            entry = reply.json()["data"][0]
            root, context = entry.get("root"), entry.get("max_model_len")
            return ServedModel(str(entry["id"]), root and str(root), None if context is None else int(context))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RunError) as error:
            raise ConfigError(f"{server.url}/v1/models names no model; is it a vLLM server?") from error

    # Asking

    def map(
        self,
        work: Callable[[J], R],
        jobs: Sequence[J],
        *,
        progress: Callable[[int], None] | None = None,
        beside: Sequence[ServerPool] = (),
    ) -> list[R]:
        """`work` for every job in threads, as many as the servers take; results in order, the first error raised.

        Args:
            work: Asks this pool, or one of those beside it, and returns the job's result.
            jobs: What is worked on.
            progress: Told of every job that is done.
            beside: Other pools that the work asks; when a job fails, their requests end with it.
        """
        if not jobs:
            return []
        self.models()
        found: list[R | None] = [None] * len(jobs)

        def one(index: int) -> None:
            found[index] = work(jobs[index])
            if progress is not None:
                with self._turn:
                    progress(1)

        threads = min(len(jobs), self.concurrency * len(self._servers))
        try:
            with ThreadPoolExecutor(threads) as executor:
                futures = [executor.submit(one, index) for index in range(len(jobs))]
                try:
                    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                except BaseException:
                    for pool in (self, *beside):
                        pool._stopped.set()
                    executor.shutdown(wait=False, cancel_futures=True)
                    for pool in (self, *beside):
                        pool._hang_up()  # what is in flight ends at once instead of being waited for
                    raise
        finally:
            for pool in (self, *beside):
                pool._stopped.clear()
        return found  # type: ignore[return-value]

    def post(self, path: str, body: dict[str, object], *, prefix: Sequence[int] = ()) -> Reply:
        """The answer to one request, by whichever server has room; sent again after a 5xx or a lost connection.

        Args:
            path: Below the base URL, such as /v1/completions.
            body: Sent as JSON; `model` is filled in with the name under which the server serves.
            prefix: The prompt's ids: they count against the prompt tokens in flight, and requests that begin alike go
                to one server while it is not much busier than the others, for its prefix cache.

        Returns:
            A reply with status 200.
        """
        self.models()
        home = zlib.crc32(json.dumps(list(prefix[:256])).encode()) % len(self._servers)
        last, failed = "", set[str]()
        for attempt in range(self.config.retries + 1):
            server = self._take(home, len(prefix), failed)
            try:
                assert server.model is not None
                reply = self._send(server, "POST", path, {"model": server.model.name, **body}, self.config.timeout)
            except (OSError, http.client.HTTPException) as error:
                last = f"{server.url} broke off ({reason_of(error)})"
                self._give_back(server, len(prefix), failed=True)
            else:
                passing = _passes(reply.status)
                self._give_back(server, len(prefix), failed=passing)
                if reply.status == 200:
                    return reply
                if not passing:
                    said = reply.text()
                    raise Refused(f"{server.url}{path} refuses a request ({reply.status}): {said}", reply.status, said)
                last = f"{server.url} answers {reply.status}: {reply.text()}"
            failed.add(server.url)
            if self._stopped.is_set():
                raise RunError("stopped, because another request failed")
            home += attempt + 1  # elsewhere, where there is an elsewhere
        raise self._given_up(server, last)

    def _given_up(self, server: _Server, last: str) -> RunError:
        """What is said once a request has failed for good; `last`: what this server said, or did, the last time."""
        attempts = self.config.retries + 1
        told = [f"{last}; given up after {attempts} attempt{'s' if attempts > 1 else ''}."]
        if any(word in last.lower() for word in GONE):
            told.append(DEAD_ENGINE)
        else:
            found = self.healthy(server.url)
            if found is not None and DEAD_ENGINE in found:
                told.append(found)
            elif found is not None and server.answered:
                told.append(f"{found}, though it answered before. {DEAD_ENGINE}")
        told.append("Finished parts stay: repair the servers and repeat the command.")
        return RunError(" ".join(told))

    def _pause_after(self, failures: int) -> float:
        return min(self.pause * 2.0 ** (failures - 1), LONGEST_PAUSE)

    def _take(self, home: int, tokens: int, failed: set[str]) -> _Server:
        """Wait for a server with room; the prefix's own one unless it is down or clearly busier.

        A server that failed this request is asked again only where no other is up: a dead server is always idle, and
        would use up the request's repetitions while the others are busy.
        """
        with self._turn:
            while not self._stopped.is_set():
                now = time.monotonic()
                up = [server for server in self._servers if server.down_until <= now]
                up = [server for server in up if server.url not in failed] or up
                free = [server for server in up if self._has_room(server, tokens)]
                if free:
                    own = self._servers[home % len(self._servers)]
                    idle = min(free, key=lambda server: server.requests)
                    slack = idle.requests + AFFINITY_SLACK * self.concurrency
                    chosen = own if own in free and own.requests <= slack else idle
                    chosen.requests += 1
                    chosen.prompt_tokens += tokens
                    return chosen
                pause = None if up else min(server.down_until for server in self._servers) - now
                self._turn.wait(pause)
        raise RunError("stopped, because another request failed")

    def _has_room(self, server: _Server, tokens: int) -> bool:
        if server.requests == 0:
            return True  # a prompt beyond the bound goes alone
        return server.requests < self.concurrency and server.prompt_tokens + tokens <= self.prompt_tokens

    def _give_back(self, server: _Server, tokens: int, *, failed: bool) -> None:
        with self._turn:
            server.requests -= 1
            server.prompt_tokens -= tokens
            now = time.monotonic()
            if failed and now >= server.down_until:  # of many requests in flight the first says it for all
                server.failures += 1
                server.down_until = now + self._pause_after(server.failures)
            elif not failed:
                server.failures, server.answered = 0, server.answered + 1
            self._turn.notify_all()

    def _send(self, server: _Server, method: str, path: str, body: dict[str, object] | None, seconds: float) -> Reply:
        thread = threading.get_ident()
        link = server.links.get(thread)
        fresh = link is None
        if link is None:
            link = server.links[thread] = connect(server.url, seconds)
        payload = None if body is None else json.dumps(body).encode()
        try:
            return exchange(link, method, server.url, path, payload, seconds)
        except (OSError, http.client.HTTPException) as error:
            link.close()
            server.links.pop(thread, None)
            if fresh or self._stopped.is_set() or isinstance(error, TimeoutError):
                raise
        # A kept connection that the server has closed meanwhile says nothing about the server: once more, anew.
        link = server.links[thread] = connect(server.url, seconds)
        try:
            return exchange(link, method, server.url, path, payload, seconds)
        except (OSError, http.client.HTTPException):
            link.close()
            server.links.pop(thread, None)
            raise


def _passes(status: int) -> bool:
    """Whether it may go better another time."""
    return status in PASSING or (status >= 500 and status != NEVER)
