"""Representation dispersion for language models: screening, audit, laboratory, training.

The names below are the public ones; each is loaded when it is first asked for, so that importing the
package loads nothing but the standard library::

    from lmeval_dispersion import screen, dispersion

Its modules are private: they may move, and the names stay. What needs an optional part that is not installed
raises ModuleNotFoundError for that library; ``pip install 'lmeval-dispersion[models]'`` brings them all.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.version import __version__ as __version__

if TYPE_CHECKING:
    from lmeval_screener.result import Result as Result
    from lmeval_screener.screening import screen as screen

    from lmeval_dispersion.audit import audit_run as audit_run
    from lmeval_dispersion.audit import calibrate_run as calibrate_run
    from lmeval_dispersion.audit import compare_runs as compare_runs
    from lmeval_dispersion.audit import predict_run as predict_run
    from lmeval_dispersion.errors import DispersionError as DispersionError
    from lmeval_dispersion.geometry import Dispersion as Dispersion
    from lmeval_dispersion.geometry import contributions as contributions
    from lmeval_dispersion.geometry import dispersion as dispersion
    from lmeval_dispersion.geometry import dispersion_estimate as dispersion_estimate
    from lmeval_dispersion.geometry import vendi_score as vendi_score
    from lmeval_dispersion.harness import DispersionTask as DispersionTask
    from lmeval_dispersion.laboratory import clusters as clusters
    from lmeval_dispersion.laboratory import compare_studies as compare_studies
    from lmeval_dispersion.laboratory import condensation as condensation
    from lmeval_dispersion.laboratory import law as law
    from lmeval_dispersion.laboratory import sublayers as sublayers
    from lmeval_dispersion.model.capture import capture as capture
    from lmeval_dispersion.model.loading import load_model as load_model
    from lmeval_dispersion.store import read_store as open_store
    from lmeval_dispersion.training import DispersionConfig as DispersionConfig
    from lmeval_dispersion.training import DispersionRegularizer as DispersionRegularizer
    from lmeval_dispersion.training import DispersionTrainer as DispersionTrainer
    from lmeval_dispersion.training import DispersionTrainerMixin as DispersionTrainerMixin
    from lmeval_dispersion.training import losses as losses
    from lmeval_dispersion.watching import DispersionCallback as DispersionCallback
    from lmeval_dispersion.watching import watch as watch


# Public name -> (module, name in it); an empty name is the module itself.
_WHERE = {
    "Dispersion": ("lmeval_dispersion.geometry", "Dispersion"),
    "DispersionCallback": ("lmeval_dispersion.watching", "DispersionCallback"),
    "DispersionConfig": ("lmeval_dispersion.training", "DispersionConfig"),
    "DispersionError": ("lmeval_dispersion.errors", "DispersionError"),
    "DispersionRegularizer": ("lmeval_dispersion.training", "DispersionRegularizer"),
    "DispersionTask": ("lmeval_dispersion.harness", "DispersionTask"),
    "DispersionTrainer": ("lmeval_dispersion.training", "DispersionTrainer"),
    "DispersionTrainerMixin": ("lmeval_dispersion.training", "DispersionTrainerMixin"),
    "Result": ("lmeval_screener", "Result"),
    "audit_run": ("lmeval_dispersion.audit", "audit_run"),
    "calibrate_run": ("lmeval_dispersion.audit", "calibrate_run"),
    "capture": ("lmeval_dispersion.model.capture", "capture"),
    "clusters": ("lmeval_dispersion.laboratory", "clusters"),
    "compare_runs": ("lmeval_dispersion.audit", "compare_runs"),
    "compare_studies": ("lmeval_dispersion.laboratory", "compare_studies"),
    "condensation": ("lmeval_dispersion.laboratory", "condensation"),
    "contributions": ("lmeval_dispersion.geometry", "contributions"),
    "dispersion": ("lmeval_dispersion.geometry", "dispersion"),
    "dispersion_estimate": ("lmeval_dispersion.geometry", "dispersion_estimate"),
    "law": ("lmeval_dispersion.laboratory", "law"),
    "load_model": ("lmeval_dispersion.model.loading", "load_model"),
    "losses": ("lmeval_dispersion.training.losses", ""),
    "open_store": ("lmeval_dispersion.store", "read_store"),
    "predict_run": ("lmeval_dispersion.audit", "predict_run"),
    "screen": ("lmeval_screener", "screen"),
    "sublayers": ("lmeval_dispersion.laboratory", "sublayers"),
    "vendi_score": ("lmeval_dispersion.geometry", "vendi_score"),
    "watch": ("lmeval_dispersion.watching", "watch"),
}

__all__ = [
    "Dispersion",
    "DispersionCallback",
    "DispersionConfig",
    "DispersionError",
    "DispersionRegularizer",
    "DispersionTask",
    "DispersionTrainer",
    "DispersionTrainerMixin",
    "Result",
    "audit_run",
    "calibrate_run",
    "capture",
    "clusters",
    "compare_runs",
    "compare_studies",
    "condensation",
    "contributions",
    "dispersion",
    "dispersion_estimate",
    "law",
    "load_model",
    "losses",
    "open_store",
    "predict_run",
    "screen",
    "sublayers",
    "vendi_score",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _WHERE[name]
    found = importlib.import_module(module)
    value = getattr(found, attribute) if attribute else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
