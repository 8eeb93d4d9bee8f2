"""The small world of `harness_fixtures`, for the tests of the plug-in."""

from harness_fixtures import (  # noqa: F401
    _a_template_is_compiled_once,
    _no_description_of_this_machine,
    _what_was_imported_is_not_looked_through_again,
    datasets_root,
    from_samples,
    harness_copy,
    in_world,
    model_folder,
    stock,
    stock_runs,
    task_manager,
    tasks,
    tokenizer,
    world,
)
