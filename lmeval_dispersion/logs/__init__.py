"""lm-eval's logs: which files are one run, the lines of its samples, and the metric that scores them.

``runs`` finds the files, ``files`` reads the samples, ``results`` the results, ``inspect`` gives logs of
Inspect the form of lm-eval's, ``judging`` reads ``--metric``. Standard library alone; the modules are private.
"""
