"""The small world of `harness_fixtures`, for races that load models."""

from harness_fixtures import (  # noqa: F401
    _a_template_is_compiled_once,
    _no_description_of_this_machine,
    _what_was_imported_is_not_looked_through_again,
    datasets_root,
    forks,
    in_world,
    model_folder,
    named_tasks_alone,
    task_manager,
    tasks,
    tokenizer,
)
