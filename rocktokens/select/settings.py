"""Settings of the selector: which tokens carry loss."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rocktokens.settings import Settings, require

# Selector → the fields of SelectorConfig it takes.
SELECTOR_OPTIONS: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "freeze": ("rocks", "bypass", "window", "tau"),
    "freeze_rocks": ("rocks", "window", "tau"),
    "soft": ("rocks", "lam", "window", "tau"),
    "random": ("rocks", "lam", "match_loss", "window", "tau", "seed"),
    "adaptive": ("rocks", "bypass", "budget", "max_fall", "audit", "seed"),
    "entropy": ("keep",),
    "divergence": ("keep",),
    "prefix": ("keep",),
    "fewer": ("rocks", "least", "full"),
    "merit": ("rocks", "least", "full", "keep"),
    "random_rollouts": ("share", "counts", "seed"),
    "tip": ("keep", "corner"),
    "teachable": ("keep", "top"),
    "iw": ("gamma",),
    "fire": ("drop",),
    "selectkd": ("top", "low"),
    "esr": ("tokens",),
    "scheduled_prefix": ("start", "keep"),
    "position": (),
    "adakd": ("keep",),
}


@dataclass(frozen=True, kw_only=True)
class SelectorConfig(Settings):
    """Which tokens carry loss, and how much."""

    name: str = "uniform"
    """uniform, freeze, freeze_rocks, soft, random, adaptive, entropy, divergence, prefix, fewer, merit,
    random_rollouts; the published ones tip, teachable, iw, fire, selectkd, esr, scheduled_prefix, position, adakd; or
    your own, as package.module:Class."""
    rocks: tuple[int, ...] = ()
    """Token ids; empty: for freeze those of the bypass list, for freeze_rocks, soft, random, fewer and merit the rocks
    that `detect` declared in the run. For adaptive: the only types it may freeze; empty: any."""
    bypass: str | None = None
    """A bypass.json, or a run that has one: what freeze leaves out, and the only types that adaptive may freeze. Unset:
    freeze takes the run's own list."""
    lam: float | None = None
    """Loss weight of a rock for soft (0.5 if unset), of a control for random (0 if unset)."""
    keep: float | None = None
    """Share kept by entropy, divergence, tip, teachable (0.05 if unset) and adakd; for prefix, scheduled_prefix and
    merit: share of max_new_tokens where sampling stops."""
    corner: str | None = None
    """For tip: confident keeps where the student is certain and far from the teacher; unset: certain or far."""
    top: int | None = None
    """For teachable (16 if unset) and selectkd (5 if unset): most probable tokens that are looked at."""
    gamma: float | None = None
    """For iw: how much more the first position weighs than the last (0.5 if unset)."""
    drop: float | None = None
    """For fire: share of the rollouts that carry no loss (0.2 if unset)."""
    low: float | None = None
    """For selectkd: weight where the student's first choice is not among the teacher's (0.01 if unset)."""
    tokens: int | None = None
    """For esr: tokens after which sampling stops (100 if unset)."""
    start: float | None = None
    """For scheduled_prefix: share of max_new_tokens at the first step (0.1 if unset)."""
    share: float | None = None
    """For random_rollouts: share of each step's rollouts that are sampled (0.5 if unset)."""
    counts: tuple[int, ...] = ()
    """For random_rollouts: how many are sampled in each step, instead of a share; the last number holds on."""
    window: int = 0
    """Positions on either side that a rock's high-divergence window may reach; 0 is off."""
    tau: float | None = None
    """Loss in nats above which a window goes on; unset: each step's 80th percentile."""
    match_loss: bool = False
    """For random: match the loss of the frozen positions too, not only their number and run lengths."""
    budget: float = 0.005
    """For adaptive: least share of the loss that makes a token type worth freezing."""
    max_fall: float = 0.15
    """For adaptive: a frozen type thaws when its mean loss has moved by more than this share."""
    audit: float = 0.05
    """For adaptive: share of frozen positions left in the loss."""
    least: int = 1
    """For fewer and merit: rollouts that a prompt gets at least, of rollouts_per_prompt."""
    full: float = 0.5
    """For fewer and merit: a prompt gets all of them while its non-rock loss is above this share of the first steps'
    mean, and fewer in proportion below."""
    seed: int = 0
    """Seed of controls and audits."""

    def __post_init__(self) -> None:
        if self.name not in SELECTOR_OPTIONS:
            return  # a class of the user's own, or a mistake that make_selector names
        takes = SELECTOR_OPTIONS[self.name]
        for item in fields(self):
            changed = getattr(self, item.name) != item.default
            require(
                item.name == "name" or item.name in takes or not changed,
                f"selector {self.name} has no {item.name}; it takes {', '.join(takes) or 'no options'}",
            )

    def options(self) -> dict[str, object]:
        """The settings this selector takes, without those left unset."""
        takes = SELECTOR_OPTIONS.get(
            self.name, tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)
        )
        own = ("name", "bypass")  # the list is read by whoever has the tokenizer at hand
        return {name: getattr(self, name) for name in takes if name not in own and getattr(self, name) is not None}
