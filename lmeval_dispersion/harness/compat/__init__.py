"""What works around lm-eval, and nothing else does: the next lm-eval changes exactly this package.

lm-eval has no public way to do five things that a dispersion task needs. Each is done here, once:

===================================  ===================================================================
how a task scores its documents      :class:`TaskHooks`, which every generation of lm-eval implements
a request type of one's own          :func:`add_request_types` puts methods on lm-eval's model classes
seeing the tokens of a running batch :func:`shadowed` puts functions over one model's methods for a while
what the running evaluation knows    :func:`surroundings` reads it from the stack frames of the callers
states and vectors on their way      :mod:`.carriers`: answers that carry states, floats that carry vectors
===================================  ===================================================================

The rest of the harness uses the names below and does not ask which lm-eval is installed.
"""

from __future__ import annotations

from typing import Any

from lmeval_dispersion.harness.compat.carriers import check_groups, plain, pooled, state_of, with_state
from lmeval_dispersion.harness.compat.hooks import TaskHooks
from lmeval_dispersion.harness.compat.running import (
    Surroundings,
    add_request_types,
    more_tasks,
    shadowed,
    surroundings,
)

__all__ = [
    "Surroundings",
    "TaskHooks",
    "add_request_types",
    "check_groups",
    "hooked_task",
    "more_tasks",
    "plain",
    "pooled",
    "shadowed",
    "state_of",
    "surroundings",
    "with_state",
]


def hooked_task() -> Any:
    """lm-eval's task class with :class:`TaskHooks`, for the lm-eval that is installed."""
    from lm_eval.api.task import ConfigurableTask

    if hasattr(ConfigurableTask, "process_instances"):
        from lmeval_dispersion.harness.compat import task_05 as generation
    else:
        from lmeval_dispersion.harness.compat import task_04 as generation  # type: ignore[no-redef]
    return generation.HookedTask
