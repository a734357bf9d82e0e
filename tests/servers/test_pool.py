"""The pool of servers: sharing out, bounds, repetition elsewhere, and what is said when nobody answers."""

from __future__ import annotations

import asyncio
import time

import pytest
import tiny
from standin_server import StandIn

from rocktokens.errors import ConfigError, RunError
from rocktokens.sample.requests import Request
from rocktokens.servers.pool import ServerPool, wait_for
from rocktokens.servers.settings import ServersConfig
from rocktokens.servers.vllm import VllmEngine

MODEL = tiny.tiny_model(seed=3)


def pool_of(*servers: StandIn, **settings) -> ServerPool:
    return ServerPool([server.url for server in servers], ServersConfig(**settings), pause=0.01)


def engine_of(pool: ServerPool) -> VllmEngine:
    return VllmEngine(pool, eos_ids=(1,), vocabulary=tiny.VOCABULARY)


def requests(count: int, length: int = 6) -> list[Request]:
    return [Request(prompt, length, seed) for seed, prompt in enumerate(tiny.prompts(count, seed=5))]


def test_two_servers_share_the_work_and_give_what_one_gives():
    with StandIn(MODEL) as one, StandIn(MODEL) as two:
        with pool_of(one) as pool:
            alone = engine_of(pool).generate(requests(40))
        one.requests.clear()
        with pool_of(one, two, concurrency=4) as pool:
            told = []
            both = engine_of(pool).generate(requests(40), progress=told.append)
        assert both == alone
        assert sum(told) == 40
        assert len(one.requests) + len(two.requests) == 40
        assert one.requests
        assert two.requests


@pytest.mark.parametrize(("workers", "concurrency", "prompt_tokens"), [(1, 3, 20), (4, 8, 80)])
def test_what_is_in_flight_is_bounded_for_all_workers_of_a_command(monkeypatch, workers, concurrency, prompt_tokens):
    monkeypatch.setattr("rocktokens.servers.pool.num_workers", lambda: workers)
    settings = {"concurrency": concurrency, "prompt_tokens": prompt_tokens}
    with StandIn(MODEL) as server, pool_of(server, **settings) as pool:
        engine_of(pool).generate([Request(tuple([5] * 9), 4, seed) for seed in range(30)])
        assert 1 <= server.most_in_flight <= 2  # three would hold 27 prompt tokens
        assert server.most_prompt_tokens <= 20
        assert server.connections <= 3


@pytest.mark.parametrize("trouble", [{"fail_first": 6}, {"die_after": 5}], ids=str)
def test_what_fails_is_repeated_elsewhere_and_the_draw_is_the_same(trouble):
    with StandIn(MODEL) as calm, pool_of(calm) as pool:
        wanted = engine_of(pool).generate(requests(30))
    with StandIn(MODEL, **trouble) as shaky, StandIn(MODEL) as other:
        with pool_of(shaky, other, concurrency=2) as pool:
            assert engine_of(pool).generate(requests(30)) == wanted
        assert shaky.dead == ("die_after" in trouble)


def test_a_request_does_not_go_back_to_the_server_that_failed_it_while_another_is_up():
    """A dead server is always idle: it would use up the repetitions while the other is busy with long rollouts."""
    pool = ServerPool(["http://127.0.0.1:1", "http://127.0.0.1:2"], ServersConfig(concurrency=1))

    async def check() -> None:
        busy = await pool._take(0, 1, set())
        waiting = asyncio.ensure_future(pool._take(1, 1, {"http://127.0.0.1:2"}))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await pool._give_back(busy, 1, failed=False)
        assert await waiting is busy
        await pool._give_back(busy, 1, failed=True)
        assert (await pool._take(0, 1, {"http://127.0.0.1:2"})).url == "http://127.0.0.1:2"  # no other is up

    wait_for(check())


def test_a_time_out_counts_and_ends_what_is_in_flight():
    with StandIn(MODEL, slow_after=1) as server, pool_of(server, retries=0, timeout=0.5) as pool:
        start = time.monotonic()
        with pytest.raises(RunError, match="given up after 1 attempt"):
            engine_of(pool).generate(requests(20))
        assert time.monotonic() - start < 10


def test_an_error_ends_the_requests_in_flight():
    says = pytest.raises(ConfigError, match="refuses a request")
    slow, refuses = StandIn(MODEL, slow_after=0), StandIn(MODEL, refuse="no")
    with slow, refuses, pool_of(slow, refuses, concurrency=4) as pool, says:
        engine_of(pool).generate(requests(8))


def test_a_server_that_is_not_ready_to_name_its_model_is_asked_again():
    with StandIn(MODEL, models_fail=2) as late, pool_of(late) as pool:
        assert pool.models() == [("m", "model", 96)]
    with StandIn(MODEL, models_fail=10_000) as late, pool_of(late, retries=1) as pool:
        with pytest.raises(ConfigError, match="503: warming up") as error:
            pool.models()
        assert late.url in str(error.value)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://x", "http://", "http://h:99999", "http://h:port", "http://[::1", "http://a b", ""]
)
def test_urls_are_checked(url):
    with pytest.raises(ConfigError, match="base URLs"):
        ServersConfig(student=(url,))


@pytest.mark.parametrize("trouble", [{"refuse": "logit_bias must be nice"}, {"pooling": True, "unknown": 501}], ids=str)
def test_a_request_that_is_refused_is_not_repeated(trouble):
    with StandIn(MODEL, **trouble) as server, pool_of(server) as pool:
        with pytest.raises(ConfigError, match=trouble.get("refuse", "501")):
            engine_of(pool).generate(requests(1))
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ({"token_ids": 7}, "without token ids"),
        ({"token_ids": [5] * 5001}, "5,001 tokens where 6 were asked for, for p7#0"),
        ({"token_ids": [5, 1, 5]}, "after an end token, for p7#0"),
        ({"token_ids": [10**9]}, "token 1000000000, where the model has"),
        ({"token_ids": [-1]}, "token -1"),
        ({"token_ids": [[5]]}, "token .*5"),
        ({"token_ids": [5.5]}, r"token 5\.5"),
        ({"body": b"[" * 200_000}, "without token ids"),
        ({"body": b'{"choices": 5}'}, "without token ids"),
        ({"body": b"\x1b[31mred" * 10**6}, r"without token ids.*x1b\[31mred"),
        ({"refuse": "\x1b]0;owned\x07" + "no" * 10**6}, r"refuses.*x1b\]0;owned"),
        ({"drips": True}, "no whole answer within"),
        ({"drips": True, "body": b" " * 10**7}, "more than 67,108,864 bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_answer_that_is_none_is_one_short_sentence_with_the_url(trouble, says):
    start, asked = time.monotonic(), [Request((5, 6), 6, 1, name="p7#0")]
    with StandIn(MODEL, **trouble) as server, pool_of(server, retries=0, timeout=2) as pool:
        with pytest.raises((RunError, ConfigError), match=says) as error:
            engine_of(pool).generate(asked)
        assert server.url in str(error.value)
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 700
    assert time.monotonic() - start < 10
