"""Where an lm-eval with task plugins finds our tasks: the entry point ``lm_eval.tasks`` is ``.tasks`` here.

Such an lm-eval looks for the folder of the package ``lmeval_dispersion.harness.plugin.tasks`` and imports
nothing of it but this module, its parent. Our configurations include lm-eval's own files, whose place is
known on this machine only: the folder is the one of ``dispersion enable --path``.
"""

from lmeval_dispersion.harness.install import tasks_path

__path__ = [str(tasks_path().parent)]
