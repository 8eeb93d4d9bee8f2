"""Watching a training run: G of the domains from the head in memory, the spread of a fixed batch.

    trainer.add_callback(DispersionCallback(trainer, domains=["math"]))  # Trainer, TRL
    watcher = watch(model, tokenizer, domains=["math"], folder="run")  # any loop: watcher.step() each step

``dispersion watch FOLDER`` draws the record. ``DispersionCallback`` and ``watch`` are public, as names of
:mod:`lmeval_dispersion`. The modules are private.
"""
