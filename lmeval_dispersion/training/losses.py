"""Dispersion losses: add a positive multiple of one to the training loss.

All take states ``z`` of shape (b, t, d), any float dtype, and return a scalar. They compute in
float32 at least (float64 stays float64), under autocast too. A stack of layers, shape (l, b, t, d),
gives one loss for each layer, shape (l,). Their common arguments are keywords:

- ``mask`` (b, t): true on real tokens; without a mask all are. Padding never matters.
- ``segments`` (b, t): the document of each token in packed rows; pairs never cross documents. It is
  ignored with ``pairs="batch"``, whose pairs span texts on purpose.
- ``pairs``: ``sequence`` forms pairs inside each sequence (or document) and averages over those
  that have a pair; ``batch`` forms them among all tokens of the batch.
- ``max_tokens``: draw at most so many tokens of each row, anew in each call, from ``generator``
  (without one the draw is always the same), never from the global generator.

They raise GeometryError if a shape does not fit, and UsageError for an option that cannot be used.

Vectors of length up to 1e-12 have no direction: the angular losses leave them out. A group with
fewer than two points drops out; without groups the loss is 0 with a zero gradient. Non-finite
states give NaN.

:class:`DispersionLoss` is a loss as a module with its options and its own draws of tokens.

``released`` makes the losses of LD use the constants of its released code, with which its tables
were made and which differ from its formulas (:mod:`lmeval_dispersion.training.released`).

Sources: RD is "On the Predictive Power of Representation Dispersion in Language Models" (ICLR
2026), sections 3.4 and B.4.2 (push-away, cross-domain push-away, squeeze). LD is "Dispersion Loss
Counteracts Embedding Condensation" (ICML 2026); its losses follow the published formulas.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmeval_dispersion.errors import GeometryError, UsageError
from lmeval_dispersion.layouts import nearest
from lmeval_dispersion.training import released as released_code
from lmeval_dispersion.training.pairs import (
    Pairs,
    Points,
    angular_exponentials,
    angular_hinges,
    cross_domain_cosine,
    distance_exponentials,
    mean_cosine,
    median_distance,
    points,
    squared_correlations,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Axis = Literal["features", "tokens"]


class Selection(TypedDict, total=False):
    """The arguments by which every loss selects the tokens that it forms pairs of.

    Attributes:
        mask: Shape (b, t), true on real tokens; None if all are real.
        segments: Shape (b, t), the document of each token in packed rows. Pairs never cross
            documents, unless ``pairs`` is ``batch``. None for one document a row.
        max_tokens: Maximum number of tokens that are drawn from each row, at least 2; None for all.
        generator: The random generator of this draw; None for the same draw at every call.
    """

    mask: Tensor | None
    segments: Tensor | None
    max_tokens: int | None
    generator: torch.Generator | None


def push_away(
    z: Tensor,
    *,
    pairs: Pairs = "batch",
    across_ranks: bool = False,
    **selection: Unpack[Selection],
) -> Tensor:
    """Return minus the mean cosine distance over all pairs of tokens.

    The value lies in [-n/(n-1), 0] for n tokens: 0 if all vectors point the same way, -1 if they
    are orthogonal on average. Its negative is the dispersion of the tokens. Source: section 3.4
    of the paper RD (see the module).

    Args:
        z: Shape (b, t, d) or (l, b, t, d), the states.
        pairs: ``batch`` for the pairs of the whole batch, ``sequence`` for those inside a sequence.
        across_ranks: Whether pairs span all ranks of the default process group. This needs
            ``pairs="batch"`` and a wrapper that averages gradients over ranks, such as DDP or FSDP.
        **selection: The tokens that count; see `Selection`.

    Returns:
        A scalar, or shape (l,) for a stack of layers.

    Raises:
        GeometryError: A shape or dtype does not fit.
        UsageError: An option cannot be used, or ``across_ranks`` is set without an initialised
            process group.

    >>> float(push_away(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])))
    -1.0
    """
    if across_ranks and pairs != "batch":
        raise UsageError(
            f"expected pairs='batch' with across_ranks, got {pairs!r}; leave across_ranks out, or "
            "form pairs over the whole batch"
        )
    if across_ranks and not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "across_ranks needs an initialised torch.distributed process group, got none; launch "
            "with torchrun and call torch.distributed.init_process_group() first (the Trainer of "
            "transformers does so), or leave across_ranks out"
        )
    p = points(z, pairs=pairs, **selection)
    cosine, counted = mean_cosine(p, across_ranks=across_ranks)
    return _by_layer(z, p, cosine - 1.0, counted)


@wraps(push_away, assigned=())  # its signature
def squeeze(z: Tensor, **options: Any) -> Tensor:
    """Return the mean cosine distance over all pairs of tokens, the negative of `push_away`.

    Minimising this loss makes states more alike, which should make a model worse: it serves as the
    control experiment. It takes the arguments of :func:`push_away`. Source: appendix B.4.2 of the
    paper RD (see the module).
    """
    return -push_away(z, **options)


def cross_domain_push_away(
    z: Tensor,
    *,
    domains: Tensor,
    **selection: Unpack[Selection],
) -> Tensor:
    """Return minus the mean cosine distance over pairs of tokens from different domains.

    The value lies in [-2, 0]; it is 0 if the batch has one domain. Source: section 3.4 of the
    paper RD (see the module).

    Args:
        z: Shape (b, t, d) or (l, b, t, d), the states.
        domains: Shape (b,), the domain of each sequence as an integer.
        **selection: The tokens that count; see `Selection`. ``segments`` has no effect.

    Returns:
        A scalar, or shape (l,) for a stack of layers.

    Raises:
        GeometryError: A shape or dtype does not fit.
        UsageError: ``max_tokens`` is below 2.
    """
    if domains.shape != z.shape[-3:-2]:
        raise GeometryError(
            f"expected `domains` of shape (b,) = ({z.shape[-3]},), got {tuple(domains.shape)}"
        )
    selection["segments"] = None
    p = points(z, **selection)
    cosine, counted = cross_domain_cosine(p, domains)
    return _by_layer(z, p, cosine - 1.0, counted)


def angular_spread(
    z: Tensor,
    *,
    tau: float = 1.0,
    pairs: Pairs = "sequence",
    released: bool | float = False,
    **selection: Unpack[Selection],
) -> Tensor:
    """Return the log of the mean of exp(-D / tau) over pairs, where D = arccos(cos) / pi.

    The value lies in [-1/tau, 0]: 0 if all vectors point the same way, -1/(2 tau) if all are
    orthogonal. Cosines are kept 1e-6 away from +-1, so that the gradient is finite. Source:
    angular spread in the paper LD (see the module).

    Args:
        z: Shape (b, t, d) or (l, b, t, d), the states.
        tau: The temperature, at least 0.02; the smaller it is, the more the closest pairs count.
        pairs: ``sequence`` for pairs inside a sequence, ``batch`` for those of the whole batch.
        released: Whether to use the constants of LD's released code, for which the range above does
            not hold. That code cuts cosines at 0.25 from +-1; give a number for another cut (its
            GPT-2 command line has 0.1).
        **selection: The tokens that count; see `Selection`.

    Returns:
        A scalar, or shape (l,) for a stack of layers.

    Raises:
        GeometryError: A shape or dtype does not fit.
        UsageError: An option cannot be used.
    """
    _at_least(tau, 0.02)  # below, exp(-1/tau) leaves float32
    clamp = _released_clamp(released)
    p = points(z, pairs=pairs, **selection)
    if clamp is not None:
        return _by_layer(z, p, *released_code.spread_as_released(p, tau, clamp))
    return _by_layer(z, p, *angular_exponentials(p, tau))


def orthogonalization(
    z: Tensor,
    *,
    margin: float = 0.5,
    pairs: Pairs = "sequence",
    released: bool | float = False,
    **selection: Unpack[Selection],
) -> Tensor:
    """Return the mean of max(0, margin - D)^2 over pairs, where D = arccos(cos) / pi.

    The value lies in [0, margin^2]: 0 if no two vectors are closer than ``margin``, margin^2 if all
    point the same way. Source: orthogonalization in the paper LD (see the module).

    Args:
        z: Shape (b, t, d) or (l, b, t, d), the states.
        margin: The distance up to which pairs are pushed apart, in (0, 1]; 0.5 is a right angle.
        pairs: ``sequence`` for pairs inside a sequence, ``batch`` for those of the whole batch.
        released: Whether to use the constants of LD's released code, as in :func:`angular_spread`;
            the range above does not hold for it.
        **selection: The tokens that count; see `Selection`.

    Returns:
        A scalar, or shape (l,) for a stack of layers.

    Raises:
        GeometryError: A shape or dtype does not fit.
        UsageError: An option cannot be used.
    """
    if not 0.0 < margin <= 1.0:
        raise UsageError(f"expected a margin in (0, 1], got {margin}; 0.5 is a right angle")
    clamp = _released_clamp(released)
    p = points(z, pairs=pairs, **selection)
    if clamp is not None:
        return _by_layer(z, p, *released_code.hinges_as_released(p, margin, clamp))
    return _by_layer(z, p, *angular_hinges(p, margin))


def l2_repel(
    z: Tensor,
    *,
    tau: float | Literal["median"] = 1.0,
    norm_weight: float = 0.1,
    pairs: Pairs = "sequence",
    released: bool = False,
    **selection: Unpack[Selection],
) -> Tensor:
    """Return the log of the mean of exp(-|z_i - z_j|^2 / tau) over pairs, plus a norm term.

    The norm term is ``norm_weight`` times the mean square of the numbers in ``z``. The first term
    is at most 0, and 0 if all vectors coincide. If distances are large compared with sqrt(tau),
    the closest pair determines the first term. Source: l2-repel in the paper LD (see the module).

    Args:
        z: Shape (b, t, d) or (l, b, t, d), the states.
        tau: The number by which squared distances are divided, at least 1e-30. ``median`` takes the
            median squared distance inside each sequence, document or batch, over at most 128 of its
            tokens; no gradient flows through this median.
        norm_weight: The weight of the norm term, at least 0.
        pairs: ``sequence`` for pairs inside a sequence, ``batch`` for those of the whole batch.
        released: Whether to use the constants of LD's released code, which also counts the pairs of
            a token with itself; ``tau`` must then be a number. At large distances, as in the middle
            layers of a GPT-2, the first term then has practically no gradient; it is 0.01 if all
            vectors coincide.
        **selection: The tokens that count; see `Selection`.

    Returns:
        A scalar, or shape (l,) for a stack of layers.

    Raises:
        GeometryError: A shape or dtype does not fit.
        UsageError: An option cannot be used.
    """
    if norm_weight < 0:
        raise UsageError(f"expected a norm_weight of at least 0, got {norm_weight}")
    if released and tau == "median":
        raise UsageError(
            "expected a number as tau with released, got 'median'; the paper's code has tau=1.0"
        )
    p = points(z, pairs=pairs, **selection)
    if tau == "median":
        median = median_distance(p)
        rate = torch.where(median > 0, median.clamp(min=1e-30).reciprocal(), 0.0)
    else:
        _at_least(tau, 1e-30)
        rate = torch.full((p.groups,), 1.0 / float(tau), dtype=p.z.dtype, device=p.z.device)
    if released:
        value, counted = released_code.repulsion_as_released(p, float(tau))
    else:
        value, counted = distance_exponentials(p, rate)
    mean_square = p.sums(p.z.square().mean(-1)) / p.counts(p.real).clamp(min=1.0)
    return _by_layer(z, p, value + norm_weight * mean_square, counted)


def decorrelation(
    z: Tensor,
    *,
    axis: Axis = "features",
    pairs: Pairs = "sequence",
    released: bool = False,
    **selection: Unpack[Selection],
) -> Tensor:
    """Return the mean squared correlation over pairs of different features.

    The value lies in [0, 1]; it is 0 if the features are uncorrelated. Source: decorrelation in the
    paper LD (see the module), with a mean in place of the sum. In LD's table 1 each token is
    standardised over its features, although the entries of Z^T Z belong to pairs of features; here
    each feature is standardised over the tokens.

    Args:
        z: Shape (b, t, d) or (l, b, t, d), the states.
        axis: ``features`` to correlate features over the tokens; ``tokens`` to correlate tokens
            over the features, so that the loss is over pairs of tokens.
        pairs: ``sequence`` for the tokens of a sequence, ``batch`` for those of the whole batch.
        released: Whether to correlate tokens, as LD's released code does. A token whose features
            are all equal is left out; that code gives NaN.
        **selection: The tokens that count; see `Selection`.

    Returns:
        A scalar, or shape (l,) for a stack of layers.

    Raises:
        GeometryError: A shape or dtype does not fit.
        UsageError: An option cannot be used.
    """
    if axis not in get_args(Axis):
        raise UsageError(f"expected axis to be {' or '.join(get_args(Axis))}, got {axis!r}")
    p = points(z, pairs=pairs, **selection)
    of_tokens = axis == "tokens" or released
    return _by_layer(z, p, *squared_correlations(p, of_tokens=of_tokens))


#: Loss -> its value, its range, its pairs and its source, in Markdown.
LOSS_TABLE = {
    "push_away": (
        "−mean(1 − cos)",
        "−1 orthogonal on average, 0 parallel",
        "batch",
        "RD 3.4",
    ),
    "cross_domain_push_away": (
        "−mean(1 − cos)",
        "−2 … 0",
        "between domains",
        "RD 3.4",
    ),
    "squeeze": (
        "mean(1 − cos), the ablation",
        "0 … 1",
        "batch",
        "RD B.4.2",
    ),
    "angular_spread": (
        "log mean(exp(−D/τ)), D = arccos(cos)/π",
        "−1/(2τ) orthogonal, 0 parallel",
        "sequence",
        "LD",
    ),
    "orthogonalization": (
        "mean(max(0, ½ − D)²)",
        "0 right angles, ¼ parallel",
        "sequence",
        "LD",
    ),
    "l2_repel": (
        r"log mean(exp(−\|z_i − z_j\|²/τ)) + `norm_weight` · mean(z²)",
        "≤ 0 before the norm term",
        "sequence",
        "LD",
    ),
    "decorrelation": (
        "mean squared correlation of features",
        "0 … 1",
        "tokens of a sequence",
        "LD",
    ),
}
LOSSES: dict[str, Callable[..., Tensor]] = {name: globals()[name] for name in LOSS_TABLE}


def __dir__() -> list[str]:
    return sorted([*LOSS_TABLE, "DispersionLoss"])


class DispersionLoss(nn.Module):
    """A dispersion loss with fixed options, as a module.

    >>> DispersionLoss("angular_spread", tau=0.5)
    DispersionLoss(angular_spread, tau=0.5)

    Args:
        loss: Name of a loss, or a function of your own. It is called as ``loss(z, mask=mask,
            segments=segments)`` with the states (b, t, d) of each layer and returns a scalar that
            autograd can differentiate. ``domains`` is passed too if the function has that argument,
            and ``generator`` if it has that argument and ``max_tokens`` is set.
        seed: Seed of the draw of tokens, if ``max_tokens`` is set. The draw of call k depends on
            the seed and k alone, so a run that is resumed with ``calls = k`` draws the same tokens.
        options: Keyword arguments of the loss, such as ``max_tokens``, the most tokens that are
            drawn from each row.

    Attributes:
        function: The loss as a function.
        name: Name of the loss.
        options: Keyword arguments of the loss.
        seed: Seed of the draw of tokens.
        calls: Number of calls so far. The first call is number 0.
        needs_domains: Whether each call needs ``domains``.

    Raises:
        UsageError: The loss or an option is unknown, or a function of your own lacks the argument
            ``mask`` or ``segments``.
    """

    def __init__(self, loss: str | Callable[..., Tensor], *, seed: int = 0, **options: Any) -> None:
        super().__init__()
        if isinstance(loss, str):
            if loss not in LOSSES:
                raise UsageError(
                    f"expected a loss among {', '.join(LOSSES)}, got "
                    f"{loss!r}{nearest(loss, LOSSES)}"
                )
            self.function = LOSSES[loss]
            self.name = loss
        else:
            self.function = loss
            self.name = getattr(loss, "__name__", type(loss).__name__)
        names = _argument_names(self.function)
        _check_options(self.name, names, options)
        self.options = options
        self.seed = seed
        self.calls = 0
        self.needs_domains = "domains" in names
        self._draws = "generator" in names

    def forward(
        self,
        z: Tensor,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        domains: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the states ``z``.

        Args:
            z: Shape (b, t, d), or (l, b, t, d) for a stack of layers.
            mask: Shape (b, t), true on real tokens; None if all are real.
            segments: Shape (b, t), the document of each token in packed rows; None for one document
                a row.
            domains: Shape (b,), the domain of each sequence; only for a loss with this argument.

        Returns:
            A scalar, or shape (l,) for a stack of layers.

        Raises:
            GeometryError: A shape or dtype does not fit.
            UsageError: The loss needs ``domains``, which are missing, or an option cannot be used.
        """
        given: dict[str, Any] = {"mask": mask, "segments": segments, **self.options}
        if self.needs_domains:
            if domains is None:
                raise UsageError(
                    "expected `domains` of shape (b,), one for each sequence, got none; pass them "
                    "with each call, or to describe() of the regularizer before each pass"
                )
            given["domains"] = domains
        if self._draws and self.options.get("max_tokens") is not None:
            generator = torch.Generator(z.device)
            given["generator"] = generator.manual_seed(self.seed * 1_000_003 + self.calls)
        self.calls += 1
        if self.function in LOSSES.values() or z.dim() == 3:
            return self.function(z, **given)
        values = [self.function(layer, **given) for layer in z]
        if values[0].shape != ():
            raise GeometryError(
                f"expected a scalar from {self.name}, got a tensor of shape "
                f"{tuple(values[0].shape)}; average over the tokens"
            )
        return torch.stack(values)

    def extra_repr(self) -> str:
        """Return the loss's name and options, as ``repr`` shows them."""
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        return ", ".join([self.name, *options])


def _argument_names(function: Callable[..., Tensor]) -> list[str]:
    """The names of a loss's arguments, in order; with ``**`` if a function of the user's takes any others."""
    parameters = inspect.signature(getattr(function, "forward", function)).parameters
    names = list[str]()
    for name, parameter in parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.append(name)
        elif function in LOSSES.values():
            names += Selection.__annotations__
        else:
            names.append("**")
    return names


def _check_options(loss: str, names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise UsageError for a function that is not called as a loss is, or an option that it lacks."""
    if "**" in names:
        return
    missing = [name for name in ("mask", "segments") if name not in names]
    if missing:
        raise UsageError(
            f"expected a loss with the arguments z, mask and segments, got {loss} without "
            f"{' and '.join(missing)}; give the function these arguments"
        )
    each_call = ("z", "mask", "segments", "domains", "generator")
    known = [name for name in names if name not in each_call]
    for option in options:
        if option not in known:
            if not known:
                raise UsageError(f"{loss} takes no options, got {option!r}; leave it out")
            raise UsageError(f"expected an option of {loss} ({', '.join(known)}), got {option!r}")


def _by_layer(z: Tensor, p: Points, values: Tensor, counted: Tensor) -> Tensor:
    """A scalar if ``z`` was one layer, one loss per layer if it was a stack."""
    means = p.layer_means(values, counted)
    return means[0] if z.dim() == 3 else means


def _released_clamp(released: bool | float) -> float | None:
    """Where the released code cuts cosines, as the distance from +-1; None for the published formula."""
    if released is False:
        return None
    if released is True:
        return released_code.CLAMP
    if not 0.0 < released < 1.0:
        raise UsageError(
            "expected released to be True, False, or the distance from ±1, above 0 and below 1, at "
            f"which cosines are cut, got {released!r}; the paper's code has 0.25 and "
            "0.1"
        )
    return float(released)


def _at_least(tau: float, least: float) -> None:
    if not (isinstance(tau, (int, float)) and math.isfinite(tau) and tau >= least):
        raise UsageError(f"expected tau to be a finite number of at least {least}, got {tau!r}")
