"""The losses as modules that hold their options and their own draws of tokens, and a table of their names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.training import losses

_PER_CALL = ("z", "mask", "segments", "domains", "generator")


class DispersionLoss(nn.Module):
    """A loss of :mod:`lmeval_dispersion.training.losses` with its options fixed; use a subclass.

    Args:
        seed: Seed of the draw where ``max_tokens`` is given. The draw of call number k depends on the seed
            and k alone, so a run that goes on from ``calls = k`` draws the same tokens.
        options: Keyword arguments of the function.

    Attributes:
        calls: Number of the next call.

    Raises:
        UsageError: The function takes no such option.
    """

    function: ClassVar[Callable[..., Tensor]]
    needs_domains: ClassVar[bool] = False

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__()
        # Squeeze passes everything on to push-away.
        function = losses.push_away if self.function is losses.squeeze else self.function
        known = [name for name in inspect.signature(function).parameters if name not in _PER_CALL]
        for name in options:
            if name not in known:
                raise UsageError(
                    f"expected options of {function.__name__} among {', '.join(known)}, got {name!r}"
                )
        self.options, self.seed, self.calls = options, seed, 0

    def forward(
        self,
        z: Tensor,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        domains: Tensor | None = None,
    ) -> Tensor:
        """The loss of states (b, t, d), or of each layer of a stack (l, b, t, d)."""
        given: dict[str, Any] = {"mask": mask, "segments": segments}
        if self.needs_domains:
            if domains is None:
                raise UsageError("expected `domains` of shape (b,), one number a sequence, got none")
            given["domains"] = domains
        if self.options.get("max_tokens") is not None:
            given["generator"] = torch.Generator(z.device).manual_seed(self.seed * 1_000_003 + self.calls)
        self.calls += 1
        return type(self).function(z, **given, **self.options)

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class PushAway(DispersionLoss):
    """:func:`~lmeval_dispersion.training.losses.push_away`."""

    function = staticmethod(losses.push_away)


class Squeeze(DispersionLoss):
    """:func:`~lmeval_dispersion.training.losses.squeeze`."""

    function = staticmethod(losses.squeeze)


class CrossDomainPushAway(DispersionLoss):
    """:func:`~lmeval_dispersion.training.losses.cross_domain_push_away`."""

    function = staticmethod(losses.cross_domain_push_away)
    needs_domains = True


class AngularSpread(DispersionLoss):
    """:func:`~lmeval_dispersion.training.losses.angular_spread`."""

    function = staticmethod(losses.angular_spread)


class Orthogonalization(DispersionLoss):
    """:func:`~lmeval_dispersion.training.losses.orthogonalization`."""

    function = staticmethod(losses.orthogonalization)


class L2Repel(DispersionLoss):
    """:func:`~lmeval_dispersion.training.losses.l2_repel`."""

    function = staticmethod(losses.l2_repel)


class Decorrelation(DispersionLoss):
    """:func:`~lmeval_dispersion.training.losses.decorrelation`."""

    function = staticmethod(losses.decorrelation)


LOSSES: dict[str, type[DispersionLoss]] = {
    "push_away": PushAway,
    "cross_domain_push_away": CrossDomainPushAway,
    "squeeze": Squeeze,
    "angular_spread": AngularSpread,
    "orthogonalization": Orthogonalization,
    "l2_repel": L2Repel,
    "decorrelation": Decorrelation,
}


def loss_named(name: str, **options: Any) -> DispersionLoss:
    """A new loss module by its function's name.

    Raises:
        UsageError: There is no such loss or option.

    >>> loss_named("angular_spread", tau=0.5)
    AngularSpread(tau=0.5)
    """
    if name not in LOSSES:
        near = difflib.get_close_matches(name, LOSSES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"expected a loss of {', '.join(LOSSES)}, got {name!r}{hint}")
    return LOSSES[name](**options)
