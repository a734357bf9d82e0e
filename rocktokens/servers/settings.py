"""Settings of the servers that sample and score in place of models in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from rocktokens.settings import Count, CountOrZero, Positive, Settings, require

Wire = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ServersConfig(Settings, section="servers"):
    """Where models are served, and how hard the servers may be pressed.

    Of these settings only `wire` changes what is computed: 16 bits round the teacher's states. `score` records it.
    """

    student: tuple[str, ...] = ()
    """Base URLs of vLLM servers that generate with the student, e.g. http://host:8000; empty: in this process."""
    teacher: tuple[str, ...] = ()
    """Base URLs of vLLM servers of the teacher: those started with --runner pooling give hidden states for scoring and
    training, those that generate draw its rollouts and grafts; empty: the teacher is loaded in this process."""
    concurrency: Count = 64
    """Requests in flight at each server; 256 or more on a large GPU."""
    prompt_tokens: Count = 16384
    """Prompt tokens in flight at each server. On vLLM's CPU build keep it at most at the server's
    --max-num-batched-tokens: a seeded request whose prompt is cut into chunks ends that engine."""
    retries: CountOrZero = 5
    """How often a request is sent again, to another server where there is one, after a 5xx or a lost connection."""
    timeout: Positive = 1800.0
    """Seconds that one request may take."""
    wire: Wire = "float32"
    """Precision of hidden states on the network. float32 gives the local KL to 5e-5 nats, float16 to 2e-3, bfloat16
    to 2e-2."""
    verify: bool | None = None
    """Load the model here once and compare a probe's log-probabilities with the served model's; unset: where it takes
    less than a quarter of the free memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("student", "teacher"):
            urls = getattr(self, field)
            for url in urls:
                require(is_base_url(url), f"servers.{field} takes base URLs such as http://127.0.0.1:8000, got {url!r}")
            alike = {url.rstrip("/").removesuffix("/v1") for url in urls}
            require(len(alike) == len(urls), f"servers.{field} names a URL twice: {', '.join(urls)}")


def is_base_url(url: str) -> bool:
    """Whether it is an address that can be called: http or https, a host, and a port that exists."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a port beyond 65535, or half a bracket
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and not set(url) & set(" \t\r\n")
