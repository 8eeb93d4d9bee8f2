"""lm-eval's logs: which files are one run, the lines of its samples, and the metric that scores them.

``runs`` finds the files, ``files`` reads samples, ``results`` reads results, ``inspect`` gives logs
of Inspect the form of lm-eval's, ``judging`` reads ``--metric``. Only the standard library is used;
the modules are private.
"""
