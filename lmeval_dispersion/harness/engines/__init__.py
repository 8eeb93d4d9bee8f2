"""Engines that run the prompts of logged samples: lm-eval's model for transformers, and servers of others.

A room of :mod:`lmeval_dispersion.harness.from_samples`; its modules are private. ``engine`` holds what every
engine does and how it is checked, ``vllm`` and ``sglang`` speak the protocols of these servers, ``inputs``
tells what a model is given without running it, ``shared_prefix`` runs what prompts share once, ``parts``
keeps what has been run.
"""
