"""Settings of the selector: which tokens carry loss."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rocktokens.settings import Count, CountOrZero, Number, Seed, Settings, require

# Selector → the fields of SelectorConfig it takes.
SELECTOR_OPTIONS: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "freeze": ("rocks", "bypass", "window", "tau"),
    "freeze_rocks": ("rocks", "window", "tau"),
    "soft": ("rocks", "lam", "window", "tau"),
    "random": ("rocks", "lam", "window", "tau", "seed"),
    "adaptive": ("rocks", "bypass", "budget", "seed"),
    **dict.fromkeys(("entropy", "divergence", "prefix", "tip", "adakd"), ("keep",)),
    "teachable": ("keep", "top"),
    "selectkd": ("top",),
    **dict.fromkeys(("iw", "fire", "position"), ()),
}


@dataclass(frozen=True, kw_only=True)
class SelectorConfig(Settings, section="distill.selector"):
    """Which tokens carry loss, and how much."""

    name: str = "uniform"
    """uniform, freeze, freeze_rocks, soft, random, adaptive, entropy, divergence, prefix; the published ones tip,
    teachable, iw, fire, selectkd, position, adakd; or your own, as package.module:Class."""
    rocks: tuple[CountOrZero, ...] = ()
    """Token ids; empty: for freeze those of the bypass list, for freeze_rocks, soft and random the rocks that
    `detect` declared in the run. For adaptive: the only types it may freeze; empty: any."""
    bypass: str | None = None
    """A bypass.json, or a run that has one: what freeze leaves out, and the only types that adaptive may freeze. Unset:
    freeze takes the run's own list."""
    lam: Number | None = None
    """Loss weight of a rock for soft (0.5 if unset), of a control for random (0 if unset)."""
    keep: Number | None = None
    """Share kept by entropy, divergence, tip, teachable (0.05 if unset) and adakd; for prefix: share of max_new_tokens
    where sampling stops."""
    top: Count | None = None
    """For teachable (16 if unset) and selectkd (5 if unset): number of most probable tokens to compare."""
    window: CountOrZero = 0
    """Positions on either side that a rock's high-divergence window may reach; 0 is off."""
    tau: Number | None = None
    """Loss in nats above which a window continues; unset: each step's 80th percentile."""
    budget: Number = 0.005
    """For adaptive: least share of the loss that makes a token type worth freezing."""
    seed: Seed = 0
    """Seed of controls and audits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        takes = SELECTOR_OPTIONS.get(self.name)
        if takes is not None:  # else a class of the user's own, or a mistake that make_selector names
            said = f"it takes {', '.join(takes) or 'no options'}"
            for name in self._changed():
                require(name in takes, f"selector {self.name} has no {name}; {said}")

    def _changed(self) -> tuple[str, ...]:
        return tuple(f.name for f in fields(self) if f.name != "name" and getattr(self, f.name) != f.default)

    def options(self) -> dict[str, object]:
        """The settings this selector takes, without those left unset."""
        takes = set(SELECTOR_OPTIONS.get(self.name, self._changed())) - {"bypass"}  # that file is read elsewhere
        return {name: getattr(self, name) for name in sorted(takes) if getattr(self, name) is not None}
