"""A training run watched as it goes: G of the domains from the head in memory, the spread of a fixed batch.

    trainer.add_callback(DispersionCallback(trainer, domains=["math"]))  # Trainer, TRL
    watcher = watch(model, tokenizer, domains=["math"], folder="run")  # any loop: watcher.step() each step

``dispersion watch FOLDER`` draws what was written. Public are ``DispersionCallback`` and ``watch``, as names
of :mod:`lmeval_dispersion`. Its modules are private.
"""
